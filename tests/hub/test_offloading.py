"""Models that are loaded onto several devices, or left partly or wholly on the disk: the outputs are the same.

transformers puts weights of an offloaded model in place only while the module that owns them is called.
"""

from functools import partial
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
import transformers
from support import clusterformer_cases, cst_models
from support.cst_conversions import convert, small_model
from support.round_trips import (
    CAUSAL,
    CLASSIFICATION,
    KINDS,
    Kind,
    changed,
    from_scratch,
    inputs_for,
    output_of,
    patched,
)
from transformers import AutoModelForSequenceClassification

import hf_effattn

EXACT = {"bert-exact": Kind(CLASSIFICATION, partial(small_model, "bert", AutoModelForSequenceClassification))}
VARIANTS = {
    "albert-cst": patched("albert", CLASSIFICATION, "cst", composition="local-global"),
    "cst-mlp": from_scratch(CAUSAL, cst_models, variant="mlp_separate_projections"),
    "cst-linear": from_scratch(CAUSAL, cst_models, variant="linear_pooling"),
    "cst-absolute": from_scratch(CAUSAL, cst_models, variant="absolute_positions"),
    "cst-full": from_scratch(CAUSAL, cst_models, variant="full_with_positions_of_keys"),
    "clusterformer-plain": from_scratch(CLASSIFICATION, clusterformer_cases, gated=False, type_vocab_size=1),
}
ALL = EXACT | KINDS | VARIANTS
WRITERS = (CAUSAL, "AutoModelForSeq2SeqLM")
# What a model may have of the CPU's memory, in parts of its own size: with nothing all of it stays on the disk.
SHARES = (0, 0.5, 0.7, 0.9)


def load(kind: Kind, folder: Path, **options: Any) -> Any:
    auto_class = getattr(transformers, kind.auto_class)
    if kind.method is None:
        return auto_class.from_pretrained(folder, **options)
    return hf_effattn.from_pretrained(auto_class, folder, **options)


@pytest.fixture
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Kind, Path, torch.Tensor, int]:
    """A kind of model, a folder with one, its output and its size in bytes."""
    kind = ALL[request.param]
    model = changed(kind.build(), kind)
    model.save_pretrained(tmp_path)
    return kind, tmp_path, output_of(model), sum(tensor.nbytes for tensor in model.parameters())


@pytest.mark.compatibility("accelerate", "weights offloaded to the disk", "runs")
@pytest.mark.slow_except("bert-bi-clustered", "bert-cst", "cst-causal")
@pytest.mark.parametrize("saved", ALL, indirect=True)
def test_outputs_are_the_same_wherever_the_weights_lie(saved: tuple[Kind, Path, torch.Tensor, int]) -> None:
    kind, folder, expected, size = saved
    for device_map in ("cpu", "auto", {"": "cpu"}):
        torch.testing.assert_close(output_of(load(kind, folder, device_map=device_map)), expected)
    seen = set()
    for share in SHARES:
        memory = {"cpu": int(share * size)}
        model = load(kind, folder, device_map="auto", max_memory=memory, offload_folder=folder / "offload")
        devices = set(model.hf_device_map.values())
        assert "disk" in devices
        seen |= {frozenset(devices)}
        torch.testing.assert_close(output_of(model), expected)
    assert seen == {frozenset({"disk"}), frozenset({"cpu", "disk"})}
    # What `device_map="auto"` does where a GPU is too small, with the CPU in its place.
    model = accelerate.cpu_offload(load(kind, folder), execution_device=torch.device("cpu"))
    assert all(parameter.is_meta for parameter in model.parameters())
    torch.testing.assert_close(output_of(model), expected)


@pytest.mark.slow_except("gpt2-bi-clustered")
@pytest.mark.parametrize("saved", [name for name, kind in ALL.items() if kind.auto_class in WRITERS], indirect=True)
def test_generation_from_the_disk(saved: tuple[Kind, Path, torch.Tensor, int]) -> None:
    kind, folder, _, _ = saved
    model, offloaded = load(kind, folder), load(kind, folder, device_map={"": "disk"})
    inputs = {name: ids for name, ids in inputs_for(model).items() if name != "decoder_input_ids"}
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(offloaded.generate(**inputs, **options), model.generate(**inputs, **options))


@pytest.mark.parametrize(
    "saved", ["bert-i-clustered", "bert-cst", "cst-causal", "clusterformer-causal"], indirect=True
)
def test_saved_again_from_the_disk(saved: tuple[Kind, Path, torch.Tensor, int], tmp_path: Path) -> None:
    kind, folder, expected, _ = saved
    with pytest.warns(UserWarning, match="save a model with offloaded modules"):
        load(kind, folder, device_map={"": "disk"}).save_pretrained(tmp_path / "again")
    torch.testing.assert_close(output_of(load(kind, tmp_path / "again")), expected)


@pytest.mark.parametrize("saved", ["bert-exact"], indirect=True)
def test_converted_while_on_the_disk(saved: tuple[Kind, Path, torch.Tensor, int]) -> None:
    kind, folder, exact, _ = saved
    model = load(kind, folder, device_map={"": "disk"})
    expected = output_of(convert(load(kind, folder)))
    torch.testing.assert_close(output_of(convert(model)), expected)
    hf_effattn.unpatch_attention(model)
    torch.testing.assert_close(output_of(model), exact)
    with pytest.raises(ValueError, match="are offloaded: load it without device_map, extend its positions"):
        hf_effattn.extend_positions(model, 128)
    assert output_of(model).isfinite().all()
