"""Two processes train as one: whole models through the configurations for `accelerate launch`, and sharded layers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import run_classification
import training
from distributed import sharded_steps

SCRIPTS = Path(training.__file__).parent
LONGEST_WAIT_SECONDS = 300


def launch(*command):
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", *command], env=environment, capture_output=True, text=True, timeout=LONGEST_WAIT_SECONDS
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("kind", sharded_steps.KINDS)
def test_sharded_layers_train_as_whole_ones(kind, tmp_path):
    """FSDP 2 over two processes; the torch.library ops, patched models and their new parameters among it."""
    file = tmp_path / "losses.json"
    options = ["--standalone", "--nproc-per-node", "2"]
    launch("torch.distributed.run", *options, sharded_steps.__file__, kind, str(file))
    expected = sharded_steps.losses(kind, 0, 1)
    assert json.loads(file.read_text()) == pytest.approx(expected, abs=2e-6)
    assert expected[-1] < expected[0]


@pytest.mark.parametrize("config", ["two_processes", "fsdp"])
def test_accelerate_launch_gives_the_loss_of_one_process(config, tmp_path):
    for word in ("good", "bad"):
        (tmp_path / f"{word}.txt").write_text("\n".join(f"a {word} film about {n} things" for n in range(40)))
    sizes = "hidden_size=16,num_hidden_layers=1,num_attention_heads=2,slice_length=4,max_position_embeddings=32,"
    sizes += "hidden_dropout_prob=0,attention_probs_dropout_prob=0"
    arguments = [
        *("--class_files", str(tmp_path / "good.txt"), str(tmp_path / "bad.txt"), "--vocab_size", "300"),
        *(
            "--model_type",
            "cst",
            "--config_overrides",
            sizes,
        ),
        *("--max_length", "32", "--max_steps", "6", "--learning_rate", "1e-2"),
        *"--do_train --do_eval --use_cpu --report_to none --disable_tqdm true".split(),  # noqa: SIM905
    ]
    one = run_classification.main(
        [*arguments, "--per_device_train_batch_size", "8", "--output_dir", str(tmp_path / "one")]
    )
    launch(
        *("accelerate.commands.launch", "--config_file", str(SCRIPTS / "accelerate_configs" / f"{config}.yaml")),
        *("--main_process_port", "0", str(SCRIPTS / "run_classification.py"), *arguments),
        *("--per_device_train_batch_size", "4", "--output_dir", str(tmp_path / "two")),
    )
    two = json.loads((tmp_path / "two" / "all_results.json").read_text())
    assert two["epoch"] == one["epoch"]  # each step has the batch of one process, in halves
    assert two["eval_loss"] == pytest.approx(one["eval_loss"], abs=1e-5)
