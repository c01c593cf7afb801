"""Gradients, attention dropout, gradient checkpointing and the Trainer."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_models import (
    APPROXIMATIONS,
    SMALL_SETTINGS,
    TEXTS,
    WITH_TOPK,
    batch_for,
    encoded,
    mostly_slow,
    tiny_model,
)
from transformers import AutoModelForSequenceClassification, PreTrainedModel, Trainer, TrainingArguments

import hf_effattn

DROPOUT = {
    "bert": "attention_probs_dropout_prob",
    "distilbert": "attention_dropout",
    "albert": "attention_probs_dropout_prob",
    "modernbert": "attention_dropout",
    "vit": "attention_probs_dropout_prob",
    "wav2vec2": "attention_dropout",
    "whisper": "attention_dropout",
}
WITHOUT_DROPOUT = {
    "hidden_dropout_prob": 0.0,
    "hidden_dropout": 0.0,
    "feat_proj_dropout": 0.0,
    "dropout": 0.0,
    "activation_dropout": 0.0,
    "encoder_layerdrop": 0.0,
    "apply_spec_augment": False,
}


def training_model(model_type: str, attention_dropout: float, auto_class: Any = None) -> PreTrainedModel:
    config = {**WITHOUT_DROPOUT, DROPOUT[model_type]: attention_dropout}
    known = tiny_model(model_type).config.to_dict()
    arguments = {name: value for name, value in config.items() if name in known or name == DROPOUT[model_type]}
    model = (
        tiny_model(model_type, **arguments) if auto_class is None else tiny_model(model_type, auto_class, **arguments)
    )
    return model.train()


def gradients(model: PreTrainedModel, batch: Any) -> dict[str, torch.Tensor]:
    torch.manual_seed(11)
    model.zero_grad()
    encoded(model, batch).square().mean().backward()
    return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}


@pytest.mark.slow_except("bert", "modernbert", "vit", "whisper")
@pytest.mark.parametrize("model_type", DROPOUT)
def test_attention_dropout_is_honoured(model_type: str) -> None:
    batch = batch_for(tiny_model(model_type))
    for method in APPROXIMATIONS:
        settings = SMALL_SETTINGS[method]
        dropped = hf_effattn.patch_attention(training_model(model_type, 0.5), method, **settings)
        kept = hf_effattn.patch_attention(training_model(model_type, 0.0), method, **settings)

        def output(model: PreTrainedModel, seed: int) -> torch.Tensor:
            torch.manual_seed(seed)
            return encoded(model, batch).detach()

        assert not torch.equal(output(dropped, 0), output(kept, 0))
        assert not torch.equal(output(dropped, 0), output(dropped, 1))
        assert torch.equal(output(dropped, 0), output(dropped, 0))
        assert torch.equal(output(kept, 0), output(kept, 1))
        assert torch.equal(output(dropped.eval(), 0), output(kept.eval(), 0))


@pytest.mark.parametrize("method", WITH_TOPK)
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("model_type", ["bert", "distilbert", "modernbert", "vit", "wav2vec2"])
def test_gradient_checkpointing_gives_the_same_gradients(
    model_type: str, reentrant: bool, method: str, attended: list[str]
) -> None:
    """The clusters and the dropout of the forward pass come again when a layer is computed anew."""
    model = hf_effattn.patch_attention(training_model(model_type, 0.3), method, **SMALL_SETTINGS[method])
    batch = batch_for(model, padding="right")
    expected = gradients(model, batch)
    once = len(attended)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    actual = gradients(model, batch)
    assert len(attended) == 3 * once  # once above, and now forward and once more in backward
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(actual[name], gradient, rtol=0, atol=0, msg=name)


@pytest.mark.parametrize("method", WITH_TOPK)
# The loss is constant where the output is normalised without weights, as NeoMME's.
@pytest.mark.parametrize("model_type", mostly_slow(name for name in TEXTS if name != "neomme"))
def test_every_weight_gets_a_gradient_near_the_exact_one(model_type: str, method: str) -> None:
    model = tiny_model(model_type)
    batch = batch_for(model, padding="left")
    exact = gradients(model, batch)
    hf_effattn.patch_attention(model, method, **SMALL_SETTINGS[method] | {"clusters": 20, "topk": 36})
    close = gradients(model, batch)
    assert close.keys() == exact.keys()
    ours, theirs = (torch.cat([grad.flatten() for grad in grads.values()]) for grads in (close, exact))
    assert torch.cosine_similarity(ours, theirs, dim=0) > 0.99


class Sentences(torch.utils.data.Dataset):
    """Two classes told apart by one token, with padding."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(10, 60, (40,), generator=generator)
        tokens[1:20:3] = 5 + index % 2
        mask = torch.ones(40, dtype=torch.long)
        mask[34 - index % 5 :] = 0
        return {"input_ids": tokens * mask, "attention_mask": mask, "labels": torch.tensor(index % 2)}


@pytest.mark.compatibility("transformers", "`Trainer`, gradient checkpointing", "runs")
@pytest.mark.slow
def test_trainer_with_gradient_checkpointing(tmp_path: Path, attended: list[str]) -> None:
    torch.manual_seed(0)
    model = tiny_model("bert", AutoModelForSequenceClassification, initializer_range=0.05)
    hf_effattn.patch_attention(model, "i-clustered", **SMALL_SETTINGS["i-clustered"])
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=20,
        per_device_train_batch_size=8,
        learning_rate=5e-3,
        gradient_checkpointing=True,
        logging_steps=5,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        seed=0,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=Sentences())
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < 0.8 * losses[0]
    assert len(attended) == 20 * 3 * 2
    trainer.save_model(str(tmp_path / "saved"))
    loaded = hf_effattn.from_pretrained(AutoModelForSequenceClassification, tmp_path / "saved")
    assert loaded.config.effattn == model.config.effattn
