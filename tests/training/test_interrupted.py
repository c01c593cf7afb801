"""Training that is stopped by a signal, or killed, goes on from its last checkpoint to the same result."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from accelerate.data_loader import BatchSamplerShard
from datasets import Dataset
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler
from transformers import TrainerControl, TrainerState, TrainingArguments

from hf_effattn import training
from hf_effattn.training.trainer import EpochOfSampler, RepeatableTrainer
from scripts.train import classification as run_classification

SCRIPT = Path(run_classification.__file__).with_name("clm.py")
LONGEST_WAIT_SECONDS = 240
STEPS = 120


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    """A run of steps that are short enough to wait for, and long enough to be interrupted."""
    folder = tmp_path_factory.mktemp("text")
    (folder / "text.txt").write_text("the cat sat on the mat and the dog sat on the cat. " * 600)
    sizes = "n_layer=2,n_embd=32,n_head=2"  # with dropout: the state of the random numbers is part of a checkpoint
    return [
        *(sys.executable, str(SCRIPT), "--train_files", str(folder / "text.txt")),
        *("--validation_files", str(folder / "text.txt"), "--model_type", "gpt2", "--config_overrides", sizes),
        *("--vocab_size", "270", "--block_length", "64", "--max_steps", str(STEPS), "--save_steps", "10"),
        *"--do_train --do_eval --use_cpu --report_to none --disable_tqdm true --save_total_limit 2".split(),  # noqa: SIM905
        *"--per_device_train_batch_size 8 --resume_from_checkpoint last --logging_steps 1".split(),  # noqa: SIM905
    ]


def run(command, folder):
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*command, "--output_dir", str(folder)],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        # A job in the background of a shell ignores Ctrl-C, and so would everything that it starts.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def result(command, folder):
    """What the run ends with."""
    process = run(command, folder)
    _, errors = process.communicate(timeout=LONGEST_WAIT_SECONDS)
    assert process.returncode == 0, errors[-2000:]
    return json.loads((folder / "all_results.json").read_text())


@pytest.fixture(scope="module")
def unbroken(command, tmp_path_factory):
    folder = tmp_path_factory.mktemp("unbroken")
    return result(command, folder), json.loads((folder / "trainer_state.json").read_text())["log_history"]


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL], ids=lambda how: how.name)
def test_a_stopped_run_goes_on_to_the_same_result(how, command, unbroken, tmp_path):
    process = run(command, tmp_path)
    started = time.monotonic()
    arguments = TrainingArguments(str(tmp_path), resume_from_checkpoint="last", report_to=[], use_cpu=True)
    while (checkpoint := training.checkpoint_to_resume(arguments)) is None:
        assert process.poll() is None, process.stderr.read()[-2000:]
        assert time.monotonic() - started < LONGEST_WAIT_SECONDS
        time.sleep(0.005)
    # Python drops a KeyboardInterrupt that arrives in a destructor: whoever means it presses the keys again.
    while process.poll() is None:
        process.send_signal(how)
        time.sleep(0.1)
    process.communicate(timeout=LONGEST_WAIT_SECONDS)
    assert process.returncode != 0
    assert not (tmp_path / "all_results.json").exists()
    kept = int(Path(training.checkpoint_to_resume(arguments)).name.split("-")[1])
    assert int(Path(checkpoint).name.split("-")[1]) <= kept < STEPS
    resumed = result(command, tmp_path)
    log = json.loads((tmp_path / "trainer_state.json").read_text())["log_history"]
    expected, expected_log = unbroken
    assert resumed["eval_loss"] == pytest.approx(expected["eval_loss"], abs=1e-6)
    losses = [[row["loss"] for row in rows if "loss" in row] for rows in (log, expected_log)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)


def test_a_checkpoint_that_was_being_written_is_passed_over(tmp_path):
    for step, state in ((5, "{}"), (10, None), (15, '{"global_st')):
        (tmp_path / f"checkpoint-{step}").mkdir()
        if state is not None:
            (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text(state)
    arguments = TrainingArguments(str(tmp_path), resume_from_checkpoint="last", report_to=[], use_cpu=True)
    assert training.checkpoint_to_resume(arguments) == str(tmp_path / "checkpoint-5")
    shutil.rmtree(tmp_path / "checkpoint-5")
    assert training.checkpoint_to_resume(arguments) is None


def test_a_finished_run_keeps_its_best_model(tmp_path):
    """By a metric upside down, for which the last of four checkpoints is not the best."""
    for word in ("good", "bad"):
        (tmp_path / f"{word}.txt").write_text("\n".join(f"a {word} film about {n} things" for n in range(40)))
    sizes = "hidden_size=16,num_hidden_layers=1,num_attention_heads=2,intermediate_size=16"
    common = [
        *("--class_files", str(tmp_path / "good.txt"), str(tmp_path / "bad.txt"), "--vocab_size", "300"),
        *("--model_type", "bert", "--config_overrides", sizes, "--max_length", "32", "--learning_rate", "1e-2"),
        *"--do_train --do_eval --use_cpu --report_to none --disable_tqdm true --max_steps 12".split(),  # noqa: SIM905
        *"--load_best_model_at_end --metric_for_best_model loss --greater_is_better true".split(),  # noqa: SIM905
        *"--eval_strategy steps --eval_steps 3 --save_steps 3 --resume_from_checkpoint last".split(),  # noqa: SIM905
    ]
    folder = tmp_path / "run"
    first = run_classification.main([*common, "--output_dir", str(folder)])["eval_loss"]
    state = json.loads((folder / "checkpoint-12" / "trainer_state.json").read_text())
    best = state["best_global_step"]
    assert best < 12
    assert first == state["best_metric"]
    weights = (folder / "model.safetensors").read_bytes()
    for change in ("nothing", "moved", "best deleted"):
        if change == "moved":
            folder = folder.rename(tmp_path / "moved")
        elif change == "best deleted":
            shutil.rmtree(folder / f"checkpoint-{best}")
        assert run_classification.main([*common, "--output_dir", str(folder)])["eval_loss"] == first
        assert (folder / "model.safetensors").read_bytes() == weights
    (folder / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=rf"checkpoint-{best} is gone, and .*moved has no model"):
        run_classification.main([*common, "--output_dir", str(folder)])


@pytest.mark.slow
@pytest.mark.parametrize("order", ["random", "group_by_length"])
def test_a_later_epoch_goes_on_to_the_same_result(order, tmp_path):
    """Stopped in the middle of the second epoch of 9 steps, and at its end before its evaluation; with dropout."""
    for word in ("good", "bad"):
        lines = [f"a {word} film about{' some' * (n * 7 % 11)} things" for n in range(40)]
        (tmp_path / f"{word}.txt").write_text("\n".join(lines))
    sizes = "hidden_size=16,num_hidden_layers=1,num_attention_heads=2,intermediate_size=16"
    common = [
        *("--class_files", str(tmp_path / "good.txt"), str(tmp_path / "bad.txt"), "--vocab_size", "300"),
        *("--model_type", "bert", "--config_overrides", sizes, "--max_length", "32", "--data_seed", "3"),
        *"--do_train --do_eval --use_cpu --report_to none --disable_tqdm true --logging_steps 1".split(),  # noqa: SIM905
        *"--per_device_train_batch_size 8 --max_steps 30 --save_steps 6 --learning_rate 1e-2".split(),  # noqa: SIM905
        *("--train_sampling_strategy", order, "--eval_strategy", "epoch"),
    ]
    metrics = run_classification.main([*common, "--output_dir", str(tmp_path / "whole")])
    for step in (12, 18):
        folder = tmp_path / f"stopped-{step}"
        shutil.copytree(tmp_path / "whole" / f"checkpoint-{step}", folder / f"checkpoint-{step}")
        again = run_classification.main([*common, "--output_dir", str(folder), "--resume_from_checkpoint", "last"])
        assert again["eval_loss"] == pytest.approx(metrics["eval_loss"], abs=1e-6)
        logs = [
            json.loads((path / "trainer_state.json").read_text())["log_history"]
            for path in (tmp_path / "whole", folder)
        ]
        losses = [[row["loss"] for row in log if "loss" in row] for log in logs]
        assert len(losses[0]) == 30
        assert losses[1] == pytest.approx(losses[0], abs=1e-6)


def test_the_order_by_length_depends_on_the_seed_and_the_epoch(tmp_path):
    """Every example once, the batches of like lengths; lengths come from a column where the data have one."""
    lengths = [n * 13 % 31 for n in range(64)]
    rows = Dataset.from_dict({"input_ids": [[1]] * 64, "size": lengths})

    def order(epoch, **seeds):
        arguments = TrainingArguments(
            str(tmp_path),
            train_sampling_strategy="group_by_length",
            length_column_name="size",
            per_device_train_batch_size=4,
            report_to=[],
            use_cpu=True,
            **seeds,
        )
        sampler = RepeatableTrainer(nn.Linear(1, 1), arguments)._get_train_sampler(rows)
        sampler.set_epoch(epoch)
        return list(sampler)

    first = order(0, seed=1)
    assert sorted(first) == list(range(64))
    ranges = [max(part) - min(part) for part in ([lengths[n] for n in first[i : i + 4]] for i in range(4, 64, 4))]
    assert sum(ranges) / len(ranges) < 8  # about 5, and 19 at random
    assert order(0, seed=1) == order(0, seed=2, data_seed=1) == first
    assert len({tuple(order_of) for order_of in (first, order(1, seed=1), order(0, seed=1, data_seed=5))}) == 3


class Diverging(nn.Module):
    """Its loss has no value in the third step."""

    def __init__(self):
        super().__init__()
        self.weight, self.steps = nn.Parameter(torch.ones(1)), 0

    def forward(self, x):
        self.steps += 1
        return {"loss": (self.weight * x).sum() * (torch.nan if self.steps == 3 else 1.0)}


def test_a_loss_that_is_not_finite_ends_the_training(tmp_path):
    """Trainer alone goes on, and saves weights that are not numbers."""
    rows = Dataset.from_dict({"x": [[1.0]] * 8})
    settings = {"max_steps": 5, "save_steps": 1, "per_device_train_batch_size": 1, "report_to": [], "use_cpu": True}
    trainer = RepeatableTrainer(Diverging(), TrainingArguments(str(tmp_path), **settings), train_dataset=rows)
    with pytest.raises(FloatingPointError, match="the loss of step 3 is nan: lower --learning_rate"):
        trainer.train()
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-1", "checkpoint-2"]
    assert load_file(tmp_path / "checkpoint-2" / "model.safetensors")["weight"].isfinite().all()


class BatchesByEpoch(BatchSampler):
    """As transformers' sampler for `batch_rebalance`."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch


def test_a_sampler_of_batches_is_told_the_epoch_that_is_resumed():
    """It lies inside what shares its batches out among the processes."""
    sampler = BatchesByEpoch(SequentialSampler(range(4)), batch_size=2, drop_last=False)
    shard = BatchSamplerShard(sampler, num_processes=2, process_index=0)
    loader = DataLoader(list(range(4)), batch_sampler=shard)
    state = TrainerState(epoch=3.5)
    EpochOfSampler().on_epoch_begin(TrainingArguments("unused"), state, TrainerControl(), train_dataloader=loader)
    assert sampler.epoch == 3
