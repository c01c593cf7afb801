"""Fine-tuning converted models: gradients, dropout, checkpointing, compilation, autocast, the Trainer."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.closeness import assert_close_to_reference
from support.cst_conversions import LENGTH, convert, small_model, tokens
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    Trainer,
    TrainingArguments,
)

import hf_effattn
from hf_effattn.patching.methods.cst.positions import NAME

each_model = pytest.mark.parametrize("model_type", ["bert", "gpt2"])
each_composition = pytest.mark.parametrize("composition", ["merged", "local-global"])


def task(model_type: str, **changes: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """A model with a head, and a padded batch with labels."""
    auto_class = AutoModelForCausalLM if model_type == "gpt2" else AutoModelForSequenceClassification
    model = small_model(model_type, auto_class, **changes)
    ids, mask = tokens(), torch.ones(2, LENGTH, dtype=torch.long)
    mask[0, :6] = 0
    labels = ids.masked_fill(mask == 0, -100) if model_type == "gpt2" else torch.tensor([0, 1])
    return model, {"input_ids": ids, "attention_mask": mask, "labels": labels}


def gradients(model: Any, inputs: dict[str, torch.Tensor], seed: int = 0) -> dict[str, torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(seed)
    model(**inputs).loss.backward()
    return {name: weight.grad for name, weight in model.named_parameters()}


@each_model
@each_composition
@pytest.mark.parametrize("trained", [False, True])
def test_every_parameter_gets_a_gradient(model_type: str, composition: str, trained: bool) -> None:
    """Those of new tables too, although all their entries are 0."""
    model, inputs = task(model_type)
    convert(model, composition=composition, trained=trained, extension_ratio=2)
    found = gradients(model, inputs)
    assert all(gradient is not None and gradient.isfinite().all() for gradient in found.values())
    tables = [gradient for name, gradient in found.items() if NAME in name]
    assert len(tables) == 2
    assert all(gradient.any() for gradient in tables)


@each_composition
def test_gradients_of_the_tables_are_those_of_small_changes(composition: str) -> None:
    model, inputs = task("gpt2")
    inputs.pop("labels")
    convert(model.double(), composition=composition, extension_ratio=2)
    model(**inputs).logits[1].sin().sum().backward()
    for table in getattr(model.base_model, NAME).parameters():
        gradient = table.grad
        direction = torch.randn(table.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(6))
        losses = []
        for step in (1e-6, -1e-6):
            with torch.no_grad():
                table += step * direction
                losses.append(model(**inputs).logits[1].sin().sum().item())
                table -= step * direction
        assert (losses[0] - losses[1]) / 2e-6 == pytest.approx((gradient * direction).sum().item(), rel=1e-5)


@each_model
@each_composition
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_gives_the_same_gradients(model_type: str, composition: str, reentrant: bool) -> None:
    dropout = {"attn_pdrop": 0.3} if model_type == "gpt2" else {"attention_probs_dropout_prob": 0.3}
    model, inputs = task(model_type, **dropout)
    convert(model, composition=composition).train()
    expected = gradients(model, inputs)
    assert not torch.equal(gradients(model, inputs, seed=1)[f"{model.base_model_prefix}.{NAME}.token_positions"],
                           expected[f"{model.base_model_prefix}.{NAME}.token_positions"])  # fmt: skip
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    for name, gradient in gradients(model, inputs).items():
        torch.testing.assert_close(gradient, expected[name], rtol=0, atol=0, msg=name)


@pytest.mark.slow
@each_model
@each_composition
def test_compiles_to_one_graph(model_type: str, composition: str) -> None:
    model, inputs = task(model_type, use_cache=False) if model_type == "gpt2" else task(model_type)
    inputs.pop("labels")  # the loss of GPT-2 logs a warning, which is no part of a graph
    convert(model.double(), composition=composition)
    valid = inputs["attention_mask"].bool() if model_type == "gpt2" else slice(None)

    def run(called: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        model.zero_grad()
        logits = called(**inputs).logits[valid]
        logits.sin().sum().backward()
        return logits.detach(), {name: weight.grad.clone() for name, weight in model.named_parameters()}

    expected, plain = run(model)
    torch._dynamo.reset()
    logits, found = run(torch.compile(model, fullgraph=True, backend="aot_eager"))
    assert_close_to_reference("logits", logits, expected, rtol=1e-12)
    for name, gradient in found.items():
        if plain[name].abs().max() < 1e-13:  # a key's bias adds the same to all scores of a query: 0 but for rounding
            assert gradient.abs().max() < 1e-13, name
        else:
            assert_close_to_reference(name, gradient, plain[name], rtol=1e-10)


@pytest.mark.usefixtures("autocast_rules")
@each_model
@each_composition
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_is_close_to_full_precision(model_type: str, composition: str, dtype: torch.dtype) -> None:
    weights = {"initializer_range": 0.05}
    model, inputs = task(model_type, **weights)
    convert(model, composition=composition)
    with torch.autocast("cpu", dtype=dtype):
        output = model(**inputs)
    output.loss.backward()
    assert all(weight.grad.isfinite().all() for weight in model.parameters())
    valid = inputs["attention_mask"].bool() if model_type == "gpt2" else slice(None)
    exact = model.double()(**inputs).logits.detach()
    found, rounding = output.logits.detach().double(), torch.finfo(dtype).eps
    assert_close_to_reference("logits", found[valid], exact[valid], rtol=4 * rounding)


class Rows(torch.utils.data.Dataset):
    """Texts of two classes told apart by one token, or texts that count upwards, with padding."""

    def __init__(self, model_type: str) -> None:
        self.model_type = model_type

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        mask = torch.ones(40, dtype=torch.long)
        mask[34 - index % 5 :] = 0
        if self.model_type == "gpt2":
            ids = (torch.arange(40) + index) % 50 + 5
            return {"input_ids": ids * mask, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
        ids = torch.randint(10, 60, (40,), generator=generator)
        ids[1:20:3] = 5 + index % 2
        return {"input_ids": ids * mask, "attention_mask": mask, "labels": torch.tensor(index % 2)}


@pytest.mark.slow
@each_model
@each_composition
def test_trainer_fine_tunes_a_converted_model(model_type: str, composition: str, tmp_path: Path) -> None:
    model, _ = task(model_type, initializer_range=0.05)
    convert(model, trained=False, composition=composition)
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=40,
        per_device_train_batch_size=8,
        learning_rate=5e-3,
        logging_steps=10,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        seed=0,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=Rows(model_type))
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < 0.7 * losses[0]
    tables = getattr(model.base_model, NAME)
    assert all(table.any() for table in tables.parameters())
    trainer.save_model(str(tmp_path / "saved"))
    loaded = hf_effattn.from_pretrained(type(model), tmp_path / "saved")
    for name, weight in loaded.state_dict().items():
        assert torch.equal(weight, model.state_dict()[name])
    batch = torch.stack([Rows(model_type)[i]["input_ids"] for i in range(2)])
    with torch.no_grad():
        assert torch.equal(loaded(batch).logits, model.eval()(batch).logits)


@pytest.mark.slow
@each_composition
@torch.no_grad()
def test_exports_for_every_batch_and_number_of_slices(composition: str) -> None:
    model = convert(small_model("bert", num_hidden_layers=1).double(), composition=composition)
    sizes = {0: torch.export.Dim("batch", min=1, max=16), 1: 4 * torch.export.Dim("slices", min=3, max=15)}
    names = ("input_ids", "attention_mask")
    ids = tokens(32, batch=3)
    masks = {"attention_mask": torch.ones_like(ids)}
    program = torch.export.export(model, (ids,), masks, dynamic_shapes=dict.fromkeys(names, sizes)).module()
    for batch, length in ((1, 20), (3, 32), (5, 44), (16, 60)):
        ids = tokens(length, batch=batch)
        mask = torch.ones_like(ids)
        mask[0, -4:] = 0
        actual = next(iter(program(ids, attention_mask=mask).values()))
        assert_close_to_reference("output", actual, model(ids, attention_mask=mask)[0], rtol=1e-12)
