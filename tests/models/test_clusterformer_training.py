"""Training ClusterFormer: with transformers' Trainer, its log, and that it stays stable."""

import warnings
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from support.clusterformer_cases import texts, tiny_config, tiny_model
from support.cst_models import tiny_model as cst_model
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainerState, TrainingArguments

from hf_effattn.models import CSTForCausalLM, CSTForPairClassification, CSTForSequenceClassification
from hf_effattn.models.clusterformer import (
    ClusterFormerForCausalLM,
    ClusterFormerForSequenceClassification,
    log_clustering,
)
from hf_effattn.models.clusterformer.outputs import ClusteringOutput
from hf_effattn.models.clusterformer.training_callback import ClusteringLog

REPORTED = {"task_loss", "cluster_loss", "sorting_loss", "largest_cluster", "empty_clusters", "word_cosine"}


class Parity(Dataset):
    """Texts of one of two vocabularies: a model that learns at all learns to tell them apart."""

    def __len__(self):
        return 32

    def __getitem__(self, i):
        label = i % 2
        words = torch.randint(5, 30, (17,), generator=torch.Generator().manual_seed(i)) + 25 * label
        return {"input_ids": words, "attention_mask": torch.ones(17, dtype=torch.long), "labels": label}


def trainer_for(model, dataset, folder, **changes):
    settings = {
        "output_dir": str(folder),
        "max_steps": 20,
        "per_device_train_batch_size": 8,
        "learning_rate": 3e-3,
        "logging_steps": 5,
        "report_to": [],
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 0,
    }
    arguments = TrainingArguments(**settings | changes)
    return Trainer(model=model, args=arguments, train_dataset=dataset, eval_dataset=dataset)


class Seen(TrainerCallback):
    def __init__(self):
        self.logs = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.logs.append(dict(logs))


def test_trainer_learns_and_logs_the_clustering(tmp_path):
    torch.manual_seed(0)
    weights = {"cluster_loss_weight": 0.01, "sorting_loss_weight": 0.02}
    model = ClusterFormerForSequenceClassification(tiny_config(initializer_range=0.02, **weights))
    trainer = trainer_for(model, Parity(), tmp_path)
    seen = Seen()
    trainer.add_callback(seen)
    log_clustering(trainer)
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(steps) == 4
    assert all(entry.keys() >= REPORTED for entry in steps)
    assert steps[-1]["task_loss"] < 0.5 * steps[0]["task_loss"]
    for entry in steps:
        total = entry["task_loss"] + 0.01 * entry["cluster_loss"] + 0.02 * entry["sorting_loss"]
        assert entry["loss"] == pytest.approx(total, abs=2e-4)  # Trainer rounds its loss to 4 places
    # Whoever writes the log elsewhere gets the same numbers.
    assert next(entry for entry in seen.logs if "loss" in entry).keys() >= REPORTED
    evaluated = trainer.predict(Parity())
    assert evaluated.predictions.shape == (32, 2)
    assert (evaluated.predictions.argmax(axis=1) == evaluated.label_ids).mean() == 1.0


class Texts(Dataset):
    """Eight texts: with a number, a class, several classes or an own next word each; of 9 words all but `i` count."""

    def __init__(self, kind):
        self.kind = kind

    def __len__(self):
        return 8

    def __getitem__(self, i):
        words = texts(1, 9, seed=i)[0] % 50
        labels = {
            "regression": torch.tensor(i / 4 - 1, dtype=torch.float64),
            "single_label_classification": torch.tensor(i % 3),
            "multi_label_classification": (torch.arange(3) == i % 3).double(),
            "words": words.where(torch.arange(9) > i, -100),
        }
        return {"input_ids": words, "labels": labels[self.kind]} | (
            {"pair_input_ids": words.flip(0)} if self.kind == "single_label_classification" else {}
        )


@pytest.mark.slow_except("CSTForCausalLM-words", "ClusterFormerForSequenceClassification-*")
@pytest.mark.parametrize(
    ("model_class", "kind"),
    [
        (ClusterFormerForSequenceClassification, "single_label_classification"),
        (CSTForSequenceClassification, "regression"),
        (CSTForSequenceClassification, "multi_label_classification"),
        (CSTForPairClassification, "single_label_classification"),
        (CSTForCausalLM, "words"),
    ],
)
def test_accumulation_steps_change_no_loss(model_class, kind, tmp_path):
    """Two halves move the weights as a batch does: with losses that are added twice they would not."""
    moved, losses = [], []
    for batch, accumulation in ((8, 1), (2, 4)):
        labels = {} if kind == "words" else {"num_labels": 1 if kind == "regression" else 3, "problem_type": kind}
        changes = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0} | labels
        if model_class is ClusterFormerForSequenceClassification:
            model = tiny_model(model_class, cluster_loss_weight=1.0, **changes)
        else:
            model = cst_model(model_class, **changes)
        sizes = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulation, "logging_steps": 1}
        trainer = trainer_for(model, Texts(kind), tmp_path, max_steps=1, optim="sgd", max_grad_norm=0.0, **sizes)
        trainer.train()
        moved.append({name: parameter.detach() for name, parameter in model.named_parameters()})
        losses.append(trainer.state.log_history[0]["loss"])
    assert losses[0] == pytest.approx(losses[1], abs=2e-4)  # Trainer rounds them
    for name in moved[0]:
        torch.testing.assert_close(moved[1][name], moved[0][name], rtol=0, atol=3e-16)


def test_smoothed_labels_are_shifted(tmp_path):
    """Trainer shifts them where it knows the name of the class: others learned to copy."""
    for model in (tiny_model(ClusterFormerForCausalLM), cst_model(CSTForCausalLM)):
        trainer = trainer_for(model, Texts("words"), tmp_path, label_smoothing_factor=0.1)
        words = texts(2, 9) % 50
        logits = model(words).logits
        expected = F.cross_entropy(logits[:, :-1].flatten(0, 1), words[:, 1:].flatten(), label_smoothing=0.1)
        torch.testing.assert_close(trainer.compute_loss(model, {"input_ids": words, "labels": words}), expected)


class OwnLoss(Trainer):
    def compute_loss(self, *arguments, **options):
        return super().compute_loss(*arguments, **options)


def test_losses_that_trainer_leaves_out_are_warned_of(tmp_path):
    model = tiny_model(ClusterFormerForSequenceClassification, gated=False)
    gated = tiny_model(ClusterFormerForSequenceClassification)
    for changes in ({"label_smoothing_factor": 0.1}, {"compute_loss_func": F.cross_entropy}):
        function = changes.pop("compute_loss_func", None)
        trainer = trainer_for(model, Parity(), tmp_path, **changes)
        trainer.compute_loss_func = function
        with pytest.warns(UserWarning, match="L1 and L2, are logged but not trained"):
            log_clustering(trainer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        log_clustering(trainer_for(model, Parity(), tmp_path))
        log_clustering(trainer_for(gated, Parity(), tmp_path, label_smoothing_factor=0.1))
        subclassed = trainer_for(model, Parity(), tmp_path, label_smoothing_factor=0.1)
        subclassed.__class__ = OwnLoss
        log_clustering(subclassed)


def test_numbers_of_several_devices_are_kept_apart():
    """nn.DataParallel gives each of its copies a device: their numbers could not be added."""
    model = tiny_model(ClusterFormerForSequenceClassification).train()
    log = ClusteringLog(model)
    with FakeTensorMode():  # no GPU is needed for tensors that have no memory
        for device in ("cuda:0", "cuda:1", "cuda:0"):
            log.collect(model, (), ClusteringOutput(task_loss=torch.ones((), device=device)))
    places = [("task_loss", torch.device(device)) for device in ("cuda:0", "cuda:1")]
    assert list(log.sums) == places
    assert log.steps == {places[0]: 2, places[1]: 1}


def test_the_log_has_the_means_over_passes_and_devices():
    model = tiny_model(ClusterFormerForSequenceClassification).train()
    log = ClusteringLog(model)
    for number in (1.0, 4.0):
        log.collect(model, (), ClusteringOutput(task_loss=torch.tensor(number)))
    elsewhere = "task_loss", torch.device("cuda:1")  # the number itself is here, as float() would bring it
    log.sums[elsewhere], log.steps[elsewhere] = torch.tensor(10.0), 2
    log.collect(model, (), ClusteringOutput(cluster_loss=torch.tensor(-0.5)))
    state, logs = TrainerState(log_history=[{}]), {"loss": 0.0}
    log.on_log(None, state, None, logs)
    assert logs == {"loss": 0.0, "task_loss": 15 / 4, "cluster_loss": -0.5}
    assert state.log_history == [{"task_loss": 15 / 4, "cluster_loss": -0.5}]
    logs = {"loss": 0.0}
    log.on_log(None, state, None, logs)
    assert logs == {"loss": 0.0}


@pytest.mark.slow
def test_the_default_losses_stay_bounded_and_the_papers_do_not():
    """A cosine lies within -1 and 1; an inner product runs off."""
    losses = {}
    for similarity in ("cosine", "dot"):
        torch.manual_seed(0)
        warned = pytest.warns(UserWarning, match="no bound") if similarity == "dot" else nullcontext()
        with warned:
            config = tiny_config(similarity=similarity, cluster_loss_weight=1.0, sorting_loss_weight=1.0)
        config.hidden_dropout_prob = 0.0
        model = ClusterFormerForSequenceClassification(config).train()
        optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        for _ in range(60):
            output = model(texts(), labels=torch.tensor([0, 1, 0]))
            optimizer.zero_grad()
            output.loss.backward()
            optimizer.step()
        losses[similarity] = output.sorting_loss.item()
    assert -1.0001 <= losses["cosine"] <= 1.0001
    assert losses["dot"] < -100
