"""Two processes train as one: whole models and sharded layers, `accelerate launch`, and runs that are resumed."""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from support.ranks import on_ranks

from distributed import resumed_runs, training_steps
from scripts.train import classification as run_classification

SCRIPTS = Path(run_classification.__file__).parent
LONGEST_WAIT_SECONDS = 300


def launch(*command):
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", *command], env=environment, capture_output=True, text=True, timeout=LONGEST_WAIT_SECONDS
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.compatibility("torch", "training by DDP and by FSDP2 in two processes", "runs")
@pytest.mark.slow
@pytest.mark.parametrize("way", training_steps.WAYS)
@pytest.mark.parametrize("kind", training_steps.KINDS)
def test_two_processes_train_as_one(kind, way):
    """DDP and FSDP 2; the torch.library ops, patched models and their new parameters among it."""
    expected = training_steps.losses(kind)
    for losses in on_ranks([partial(training_steps.losses, kind, way)] * 2):
        assert losses == pytest.approx(expected, abs=2e-6)
    assert min(expected) < expected[0]  # four steps of a random model need not fall one by one


@pytest.mark.compatibility("accelerate", "`accelerate launch` of a training script", "runs")
@pytest.mark.slow
@pytest.mark.parametrize("config", ["two_processes", "fsdp"])
def test_accelerate_launch_gives_the_loss_of_one_process(config, tmp_path):
    for word in ("good", "bad"):
        (tmp_path / f"{word}.txt").write_text("\n".join(f"a {word} film about {n} things" for n in range(40)))
    sizes = "hidden_size=16,num_hidden_layers=1,num_attention_heads=2,slice_length=4,max_position_embeddings=32,"
    sizes += "hidden_dropout_prob=0,attention_probs_dropout_prob=0"
    arguments = [
        *("--class_files", str(tmp_path / "good.txt"), str(tmp_path / "bad.txt"), "--vocab_size", "300"),
        *("--model_type", "cst", "--config_overrides", sizes),
        *("--max_length", "32", "--max_steps", "6", "--learning_rate", "1e-2"),
        *"--do_train --do_eval --use_cpu --report_to none --disable_tqdm true".split(),  # noqa: SIM905
    ]
    alone = run_classification.main(
        [*arguments, "--per_device_train_batch_size", "8", "--output_dir", str(tmp_path / "one")]
    )
    launch(
        *("accelerate.commands.launch", "--config_file", str(SCRIPTS / "accelerate_configs" / f"{config}.yaml")),
        *("--main_process_port", "0", str(SCRIPTS / "classification.py"), *arguments),
        *("--per_device_train_batch_size", "4", "--output_dir", str(tmp_path / "two")),
    )
    halved = json.loads((tmp_path / "two" / "all_results.json").read_text())
    assert halved["epoch"] == alone["epoch"]  # each step has the batch of one process, in halves
    assert halved["eval_loss"] == pytest.approx(alone["eval_loss"], abs=1e-5)


@pytest.mark.slow
def test_two_processes_go_on_in_a_later_epoch_and_predict_in_order(tmp_path):
    labels = [n * 7 % 10 % 2 for n in range(41)]
    texts = [f"{('bad', 'good')[label]}{' film' * (n * 11 % 13)}" for n, label in enumerate(labels)]
    rows = [f"{text}\t{label}" for text, label in zip(texts, labels, strict=True)]
    tables = {name: ["sentence\tlabel", *rows] for name in ("train", "dev")}
    tables["test"] = ["index\tsentence", *(f"{n}\t{text}" for n, text in enumerate(texts))]
    (tmp_path / "SST-2").mkdir()
    for name, lines in tables.items():
        (tmp_path / "SST-2" / f"{name}.tsv").write_text("\n".join(lines) + "\n")
    sizes = "hidden_size=16,num_hidden_layers=1,num_attention_heads=2,intermediate_size=16,max_position_embeddings=32"
    arguments = [
        *("--task_name", "sst2", "--data_dir", str(tmp_path), "--model_type", "bert", "--config_overrides", sizes),
        *"--vocab_size 300 --max_length 32 --learning_rate 1e-2 --per_device_train_batch_size 4".split(),  # noqa: SIM905
        *"--do_train --do_eval --do_predict --use_cpu --report_to none --disable_tqdm true".split(),  # noqa: SIM905
        *"--max_steps 24 --save_steps 9".split(),  # noqa: SIM905
    ]
    file = tmp_path / "losses.json"
    options = ["--standalone", "--nproc-per-node", "2", resumed_runs.__file__]
    # Of an epoch's six steps the second has had three.
    launch("torch.distributed.run", *options, "9", str(tmp_path), str(file), *arguments)
    losses = json.loads(file.read_text())
    for order, (whole, resumed) in losses.items():
        assert resumed == pytest.approx(whole, abs=1e-6)
        for name in ("whole", "stopped"):
            lines = (tmp_path / f"{order}-{name}" / "SST-2.tsv").read_text().splitlines()
            assert lines[1:] == [f"{n}\t{label}" for n, label in enumerate(labels)]
    assert losses["random"][0] != losses["group_by_length"][0]
