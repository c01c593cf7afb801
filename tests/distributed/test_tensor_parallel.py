"""One text on several processes gives what one process gives: values, gradients, padding, settings of single heads."""

import doctest
import inspect
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import transformers
from packaging.version import parse
from peft import LoraConfig, get_peft_model
from support.embedding_cases import save_encoder, text
from support.ranks import on_ranks
from support.tiny_models import tiny_model
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from transformers import AutoModel, AutoModelForMaskedLM, AutoModelForSequenceClassification

import hf_effattn
from distributed import divided_models as models
from hf_effattn.patching import tensor_parallel

pytestmark = pytest.mark.skipif(
    parse(torch.__version__) < parse(tensor_parallel.OLDEST_TORCH), reason="parallelize needs a newer torch"
)
NEAR: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-9}  # of float64


def assert_alike(ranks: list[models.Arrays], expected: models.Arrays) -> None:
    for of_rank in ranks:
        assert of_rank.keys() == expected.keys()
        for name, array in of_rank.items():
            np.testing.assert_allclose(array, expected[name], **NEAR, err_msg=name)


@pytest.mark.compatibility("torch", "`hf_effattn.parallelize`: one text on 2 and 4 processes", "runs")
@pytest.mark.slow_except("2-roberta-bi-clustered")
@pytest.mark.parametrize("method", models.SETTINGS)
@pytest.mark.parametrize("model_type", ["roberta", "bert"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_several_processes_are_one(ranks: int, model_type: str, method: str) -> None:
    """Padded, with a number of tokens that no number of ranks divides."""
    make, patch = partial(models.encoder, model_type), models.patched_by(method)
    divided = on_ranks([partial(models.outcome, make, patch, models.divided)] * ranks)
    assert_alike(divided, models.outcome(make, patch))


@pytest.mark.slow_except("per-head")
@pytest.mark.parametrize("method", models.SETTINGS)
def test_a_divided_model_can_be_patched(method: str) -> None:
    patch = models.patched_by(method)
    divided = on_ranks([partial(models.outcome, models.encoder, models.divided, patch)] * 2)
    assert_alike(divided, models.outcome(models.encoder, patch))


@pytest.mark.slow
@pytest.mark.parametrize("model_type", tensor_parallel.LIKE_BERT)
def test_every_type_is_served_exact_as_well(model_type: str) -> None:
    make = partial(models.encoder, model_type)
    for padding in (None, "left"):
        divided = on_ranks([partial(models.outcome, make, models.divided, padding=padding)] * 2)
        assert_alike(divided, models.outcome(make, padding=padding))


def of_head(auto_class: Any, divide: bool) -> models.Arrays:
    """Loss and gradients of a model with a head, of which some weights are frozen; then embeddings in place of ids."""
    model = models.patched_by("bi-clustered")(models.encoder("bert", auto_class))
    model.bert.encoder.layer[0].requires_grad_(False)
    model = models.divided(model) if divide else model
    inputs = models.batch_of(model).inputs
    labels = inputs["input_ids"] if auto_class is AutoModelForMaskedLM else torch.tensor([0, 1])
    output = model(**inputs, labels=labels)
    output.loss.backward()
    given = {"loss": models.whole(output.loss), "logits": models.whole(output.logits)} | models.gradients(model)
    embeds = torch.randn(2, models.LENGTH, 32, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    embeds.requires_grad_()
    model(inputs_embeds=embeds, attention_mask=inputs["attention_mask"]).logits.square().sum().backward()
    return given | {"embeds": models.whole(embeds.grad)}


@pytest.mark.slow
@pytest.mark.parametrize("auto_class", [AutoModelForMaskedLM, AutoModelForSequenceClassification])
def test_heads_frozen_layers_and_shared_embeddings_stay_what_they_are(auto_class: Any) -> None:
    expected = of_head(auto_class, divide=False)
    assert not any("layer.0." in name for name in expected)
    assert_alike(on_ranks([partial(of_head, auto_class, True)] * 2), expected)


def losses(optimizer: Any, divide: bool) -> list[float]:
    """Of some steps of a classifier, whose encoder and head are clipped apart."""
    model = models.patched_by("bi-clustered")(models.encoder("bert", AutoModelForSequenceClassification))
    model = models.divided(model) if divide else model
    steps, inputs, each = optimizer(model.parameters(), lr=1e-2), models.batch_of(model).inputs, []
    for _ in range(4):
        loss = model(**inputs, labels=torch.tensor([0, 1])).loss
        loss.backward()
        for part in (model.bert.encoder, model.classifier):
            nn.utils.clip_grad_norm_(part.parameters(), 0.5)
        steps.step()
        steps.zero_grad()
        each.append(loss.item())
    return each


@pytest.mark.slow
@pytest.mark.parametrize(
    "optimizer",
    [torch.optim.AdamW, partial(torch.optim.SGD, momentum=0.9, weight_decay=0.1)],
    ids=["adam", "sgd"],
)
def test_a_divided_model_takes_the_steps_of_one_process(optimizer: Any) -> None:
    expected = losses(optimizer, divide=False)
    assert len(set(expected)) == 4
    for of_rank in on_ranks([partial(losses, optimizer, True)] * 2):
        assert of_rank == pytest.approx(expected, rel=1e-7)


def saved(folder: str) -> None:
    model = models.divided(models.patched_by("per-head")(models.encoder()))
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        model.save_pretrained(folder, state_dict=whole)


@pytest.mark.slow
def test_what_is_gathered_is_saved_with_the_settings_of_all_heads(tmp_path: Path) -> None:
    on_ranks([partial(saved, str(tmp_path))] * 2)
    loaded = hf_effattn.from_pretrained(AutoModel, tmp_path, dtype=torch.float64)
    expected = models.patched_by("per-head")(models.encoder())
    assert loaded.config.effattn == expected.config.effattn
    pairs = zip(loaded.state_dict().items(), expected.state_dict().items(), strict=True)
    assert all(name == other and torch.equal(weight, same) for (name, weight), (other, same) in pairs)


def refusal_of_other_inputs(length: int | None, embeds: bool) -> str:
    """What is said where rank 1 has another text than rank 0."""
    model = models.divided(models.patched_by("bi-clustered")(models.encoder()))
    inputs = models.batch_of(model).inputs
    if embeds:
        inputs["inputs_embeds"] = model.get_input_embeddings()(inputs.pop("input_ids")).full_tensor()
    name = "inputs_embeds" if embeds else "input_ids"
    inputs[name] = inputs[name].flip(1) if dist.get_rank() else inputs[name]
    inputs = {name: value[:, : length if dist.get_rank() else None] for name, value in inputs.items()}
    with pytest.raises(ValueError, match="other inputs than") as refused:
        model(**inputs)
    return str(refused.value)


@pytest.mark.slow_except("order")
@pytest.mark.parametrize(
    ("length", "embeds"), [(None, False), (40, False), (None, True)], ids=["order", "length", "embeds"]
)
def test_other_inputs_on_another_rank_are_refused_on_all(length: int | None, embeds: bool) -> None:
    for said in on_ranks([partial(refusal_of_other_inputs, length, embeds)] * 2):
        assert "RobertaModel is divided among 2 processes, which need the same text; one has other inputs than" in said


@pytest.fixture
def llama(tmp_path: Any) -> str:
    models.save_decoder(str(tmp_path))
    return str(tmp_path)


def by_transformers(folder: str, method: str) -> np.ndarray:
    from transformers.distributed import DistributedConfig

    return models.of_decoder(folder, method, distributed_config=DistributedConfig(tp_size=dist.get_world_size()))


@pytest.mark.compatibility("transformers", "tensor parallelism of a decoder, settings of single heads too", "runs")
@pytest.mark.slow
@pytest.mark.skipif(parse(transformers.__version__) < parse("5.24"), reason="it divided models in other ways before")
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("method", models.OF_DECODER)
def test_a_decoder_that_transformers_divided_runs_the_settings_of_its_heads(
    llama: str, method: str, ranks: int
) -> None:
    """Two query heads share the keys of one, and the first text is padded to the left."""
    expected = models.of_decoder(llama, method)
    for hidden in on_ranks([partial(by_transformers, llama, method)] * ranks):
        np.testing.assert_allclose(hidden, expected, **NEAR)


def failures(example: str) -> list[str]:
    """What an example gives that it does not show."""
    said: list[str] = []
    test = doctest.DocTestParser().get_doctest(example, {}, "example", None, None)
    doctest.DocTestRunner(verbose=False).run(test, out=said.append)
    return said


@pytest.mark.slow
def test_the_example_gives_what_it_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = save_encoder(tmp_path / "encoder", positions=4200)
    (tmp_path / "long.txt").write_text(text(4000, seed=0), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    shown = inspect.getdoc(hf_effattn.parallelize) or ""
    assert ">>> model(" in shown
    example = shown.replace('"BAAI/bge-m3"', repr(str(encoder)))
    assert on_ranks([partial(failures, example)] * 2) == [[], []]


class Mesh(SimpleNamespace):
    """As many ranks as said, none of which is asked for anything."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(ndim=len(sizes), size=lambda: sizes[0])


def quantised() -> Any:
    model = models.encoder()
    model.encoder.layer[0].output.dense = type("Int8Linear", (nn.Linear,), {})(48, 32)
    return model


def lora() -> Any:
    return get_peft_model(models.encoder(), LoraConfig(target_modules=["query"])).get_base_model()


def converted() -> Any:
    return hf_effattn.patch_attention(models.encoder(), "cst", slice_length=4)


REFUSED = {
    "another type": (lambda: tiny_model("distilbert"), Mesh(2), r'DistilBertModel \(model type "distilbert"\) cannot'),
    "decoder": (
        lambda: models.encoder("bert", is_decoder=True),
        Mesh(2),
        r"BertModel \(a decoder\) cannot be divided",
    ),
    "heads": (models.encoder, Mesh(3), r"has 4 heads, which 3 processes .* divides 4"),
    "mesh": (models.encoder, Mesh(2, 2), r'mesh has 2 dimensions.* mesh\["tp"\]'),
    "quantised": (quantised, Mesh(2), r"layers that cannot be divided \(Int8Linear\)"),
    "adapters": (lora, Mesh(2), r"layers that cannot be divided \(adapters\)"),
    "converted": (converted, Mesh(2), r'converted to "cst", whose parameters cannot be divided'),
}


@pytest.mark.parametrize(("make", "mesh", "said"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_divided_is_refused_before_anything_changes(make: Any, mesh: Any, said: str) -> None:
    model = make()

    def state() -> tuple[dict[str, int], list[list[int]]]:
        parameters = {name: id(parameter) for name, parameter in model.named_parameters()}
        return parameters, [list(module._forward_pre_hooks) for module in model.modules()]

    before = state()
    with pytest.raises(ValueError, match=said):
        hf_effattn.parallelize(model, mesh)
    assert state() == before


def test_an_older_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.6.0+cpu")
    with pytest.raises(ValueError, match=r"needs torch 2\.13 or newer, and this is 2\.6\.0\+cpu"):
        hf_effattn.parallelize(models.encoder(), Mesh(2))


def refusals_of_a_divided_model() -> list[str]:
    """What is said where a model is divided, or converted, once it is divided."""
    model = models.divided(models.encoder())
    said = []
    for call in (
        partial(models.divided, model),
        partial(hf_effattn.patch_attention, model, "cst", slice_length=4),
        partial(hf_effattn.extend_positions, model, 128),
        partial(hf_effattn.report, model, models.batch_of(model).inputs),
    ):
        with pytest.raises(ValueError, match=r"divided|sharded") as refused:
            call()
        said.append(str(refused.value))
    assert model.config._attn_implementation == "sdpa"
    return said


def test_a_divided_model_is_not_divided_again_converted_extended_or_measured() -> None:
    again, converted, extended, measured = on_ranks([refusals_of_a_divided_model] * 2)[0]
    assert "call parallelize first, and once" in again
    assert '"cst" adds parameters, and RobertaModel is divided among 2 processes' in converted
    assert "sharded" in extended
    assert "RobertaModel is divided among 2 processes, and only a whole model can be measured" in measured


def test_heads_that_transformers_left_untold_are_refused_before_anything_changes() -> None:
    model = models.encoder()
    model._tp_size = 2
    with pytest.raises(ValueError, match=r"4 key/value heads, .* among 2 processes, and its weights do not tell"):
        models.patched_by("per-head")(model)
    assert model.config._attn_implementation == "sdpa"
    assert models.patched_by("bi-clustered")(model).config._attn_implementation == "bi-clustered"
