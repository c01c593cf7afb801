"""Gradients, attention dropout, gradient checkpointing and the Trainer."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.cst_conversions import SLICES, small_model
from support.tiny_models import (
    APPROXIMATIONS,
    SMALL_SETTINGS,
    TEXTS,
    WITH_TOPK,
    batch_for,
    encoded,
    mostly_slow,
    tiny_config,
    tiny_model,
)
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
)

import hf_effattn

SETTINGS = SMALL_SETTINGS | {"cst": SLICES | {"composition": "local-global"}}
# Of attention; all other dropout is off.
DROPOUT = {
    "bert": "attention_probs_dropout_prob",
    "distilbert": "attention_dropout",
    "modernbert": "attention_dropout",
    "vit": "attention_probs_dropout_prob",
    "wav2vec2": "attention_dropout",
    "whisper": "attention_dropout",
}
OTHER_DROPOUT = ("hidden_dropout_prob", "hidden_dropout", "feat_proj_dropout", "dropout", "activation_dropout")
OFF: dict[str, Any] = dict.fromkeys(OTHER_DROPOUT, 0.0) | {"encoder_layerdrop": 0.0, "apply_spec_augment": False}


def training_model(model_type: str, attention_dropout: float) -> PreTrainedModel:
    known = tiny_config(model_type).to_dict()
    changes = {name: value for name, value in OFF.items() if name in known}
    return tiny_model(model_type, **changes | {DROPOUT[model_type]: attention_dropout}).train()


def gradients(model: PreTrainedModel, batch: Any) -> dict[str, torch.Tensor]:
    torch.manual_seed(11)
    model.zero_grad()
    encoded(model, batch).square().mean().backward()
    return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}


@pytest.mark.slow_except("bert")
@pytest.mark.parametrize("model_type", DROPOUT)
def test_attention_dropout_is_honoured(model_type: str) -> None:
    batch = batch_for(tiny_model(model_type))
    for method in APPROXIMATIONS if model_type == "bert" else ("bi-clustered",):
        settings = SMALL_SETTINGS[method]
        dropped = hf_effattn.patch_attention(training_model(model_type, 0.5), method, **settings)
        kept = hf_effattn.patch_attention(training_model(model_type, 0.0), method, **settings)

        def output(model: PreTrainedModel, seed: int) -> torch.Tensor:
            torch.manual_seed(seed)
            return encoded(model, batch).detach()

        drawn = output(dropped, 0)
        assert torch.equal(drawn, output(dropped, 0))
        assert not torch.equal(drawn, output(dropped, 1))
        assert not torch.equal(drawn, output(kept, 0))
        assert torch.equal(output(kept, 0), output(kept, 1))
        assert torch.equal(output(dropped.eval(), 0), output(kept.eval(), 0))


@pytest.mark.parametrize(
    ("model_type", "reentrant", "method"),
    [
        ("bert", False, "bi-clustered"),
        ("bert", True, "i-clustered"),
        ("modernbert", True, "bi-clustered"),
        ("vit", False, "i-clustered"),
        ("wav2vec2", True, "bi-clustered"),
        ("bert", True, "cst"),
    ],
)
def test_gradient_checkpointing_gives_the_same_gradients(
    model_type: str, reentrant: bool, method: str, attended: list[str]
) -> None:
    """The clusters and the dropout of the forward pass come again when a layer is computed anew."""
    model = hf_effattn.patch_attention(training_model(model_type, 0.3), method, **SETTINGS[method])
    batch = batch_for(model, padding="right")
    expected = gradients(model, batch)
    once = len(attended)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    actual = gradients(model, batch)
    assert len(attended) == 3 * once  # once above, and now forward and once more in backward
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(actual[name], gradient, rtol=0, atol=0, msg=name)


@pytest.mark.slow_except("*-bi-clustered")
@pytest.mark.parametrize("method", WITH_TOPK)
# The loss is constant where the output is normalised without weights, as NeoMME's.
@pytest.mark.slow_except("bert-bi*|bart-bi*|modernbert-bi*|embedding_gemma2_text-bi*")
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


class Rows(torch.utils.data.Dataset):
    """Texts of two classes told apart by one token, or texts that count upwards, with padding."""

    def __init__(self, causal: bool) -> None:
        self.causal = causal

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        mask = torch.ones(40, dtype=torch.long)
        mask[34 - index % 5 :] = 0
        if self.causal:
            ids = (torch.arange(40) + index) % 50 + 5
            return {"input_ids": ids * mask, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
        ids = torch.randint(10, 60, (40,), generator=torch.Generator().manual_seed(index))
        ids[1:20:3] = 5 + index % 2
        return {"input_ids": ids * mask, "attention_mask": mask, "labels": torch.tensor(index % 2)}


@pytest.mark.compatibility("transformers", "`Trainer`, gradient checkpointing", "runs")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "method", "settings"),
    [
        ("bert", "i-clustered", SMALL_SETTINGS["i-clustered"]),
        ("bert", "cst", SLICES | {"composition": "local-global"}),
        ("gpt2", "cst", SLICES),
    ],
)
def test_trainer_with_gradient_checkpointing(
    model_type: str, method: str, settings: dict[str, Any], tmp_path: Path, attended: list[str]
) -> None:
    auto_class: Any = AutoModelForCausalLM if model_type == "gpt2" else AutoModelForSequenceClassification
    model = small_model(model_type, auto_class, initializer_range=0.05)
    hf_effattn.patch_attention(model, method, **settings)
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=40,
        per_device_train_batch_size=8,
        learning_rate=5e-3,
        gradient_checkpointing=True,
        logging_steps=10,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        seed=0,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=Rows(model_type == "gpt2"))
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < 0.7 * losses[0]
    assert attended == [method] * 40 * 3 * 2
    tables = [weight for name, weight in model.named_parameters() if "hf_effattn_cst" in name]
    assert len(tables) == 2 * (method == "cst")
    assert all(table.any() for table in tables)
    trainer.save_model(str(tmp_path / "saved"))
    loaded = hf_effattn.from_pretrained(auto_class, tmp_path / "saved")
    assert loaded.config.effattn == model.config.effattn
    assert all(torch.equal(weight, model.state_dict()[name]) for name, weight in loaded.state_dict().items())
