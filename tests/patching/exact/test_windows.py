"""Layers with a sliding window, in blocks: the keys of transformers' dense mask, the same values and gradients."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from support.tiny_decoders import EAGER, MODELS, make_model, sharing
from support.tiny_models import FULL_LAYERS, MODEL_TYPES, tiny_model
from transformers import AutoModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    and_masks,
    bidirectional_mask_function,
    causal_mask_function,
    chunked_causal_mask_function,
    chunked_overlay,
    create_bidirectional_sliding_window_mask,
    or_masks,
    packed_sequence_mask_function,
    sdpa_mask,
    sliding_window_bidirectional_mask_function,
    sliding_window_bidirectional_overlay,
    sliding_window_causal_mask_function,
    sliding_window_overlay,
)
from transformers.models.gemma3.modeling_gemma3 import _bidirectional_window_overlay

import hf_effattn
from hf_effattn.patching.exact import call
from hf_effattn.patching.exact.windows import (
    Window,
    attend_in_blocks,
    block_length,
    dense_mask,
    mask_of_blocks,
    sees_all,
    shortest_length,
    window_of,
)
from hf_effattn.patching.interface import attention_function
from hf_effattn.patching.model_types.stacks import find_stacks
from hf_effattn.patching.module_patch import RECORD

from .contract import METHOD, Kind, Near, check_against, each, shapes

WINDOWED = [name for name, layers in FULL_LAYERS.items() if layers == (0, 2) and name in MODEL_TYPES]
IN_BLOCKS: dict[str, Any] = {"watched": ((call, "attend_in_blocks"),), "alone": True, "heard": True}


def inputs_of(length: int = 245, padding: str | None = "right", batch: int = 3) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(length)
    inputs = {"input_ids": torch.randint(5, 60, (batch, length), generator=generator)}
    if padding is not None:
        mask = torch.ones(batch, length, dtype=torch.long)
        for row, count in enumerate((length, length - 90, 1)[:batch]):
            mask[row, count:] = 0
        inputs["attention_mask"] = mask if padding == "right" else mask.flip(1)
    return inputs


def dense_of_transformers(
    mask_function: Callable, key_mask: torch.Tensor | None, batch: int, length: int
) -> torch.Tensor:
    mask = sdpa_mask(
        batch, length, length, mask_function=mask_function, attention_mask=key_mask, allow_is_causal_skip=False
    )
    assert mask is not None
    return mask


DECODERS: dict[str, dict[str, Any]] = {
    name: {"layer_types": ["full_attention", "sliding_attention", "full_attention"], "sliding_window": 16} | more
    for name, more in {
        **sharing({"use_sliding_window": True}, "qwen2", "qwen3", "smollm3"),
        **sharing({}, "gemma2", "gemma3_text", "olmo3", "cohere2", "exaone4", "ministral", "modernbert-decoder"),
        **sharing({}, "gpt_oss", "granite_swa", "mimo_v2_flash", "granitemoe_swa", "flint", "gemma3n_text"),
        **sharing({}, "gemma4_unified_text", "afmoe", "cwm", "exaone_moe", "laguna", "mellum"),
        "gemma4_text": {"hidden_size_per_layer_input": 0},
        "llama4_text": {
            "layer_types": ["full_attention", "chunked_attention", "full_attention"],
            "attention_chunk_size": 16,
        },
    }.items()
    if name in MODELS
} | {name: {"sliding_window": 16} for name in ("mistral", "phi3", "starcoder2")}  # in all layers


def check_blocks(shape: tuple[int, ...], layers: int, calls: list[torch.Tensor], _: Any) -> None:
    assert [sizes[2:] for sizes in shapes(calls)] == [shape] * layers


def values(model: Any, inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Those of padded tokens, too, unless attention is eager, where padding sees all tokens."""
    hidden = model(**inputs)[0]
    if model.config.model_type in EAGER and "attention_mask" in inputs:
        hidden = hidden * inputs["attention_mask"][..., None]
    return (hidden,)


def weigh(model: Any) -> list[torch.Tensor]:
    """Those of rows of tokens that are no padding."""
    inputs = inputs_of()
    real = inputs["attention_mask"].bool()[:, None, :, None]
    return [weights * real for weights in model(**inputs, output_attentions=True).attentions]


def write(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    return model.generate(**inputs, do_sample=False, max_new_tokens=5, pad_token_id=1)


def decoder(name: str) -> Kind:
    sinking = name in EAGER  # all of whose sums are other ones
    layers = 1 if "layer_types" in DECODERS[name] else 3
    return Kind(
        f"{name}, windows",
        partial(make_model, name, **DECODERS[name]),
        partial(inputs_of, padding="left", batch=2),
        values,
        near=Near(atol=5e-5 if sinking else 2e-5),
        slopes=Near(rtol=1e-4, of_all=1e-5) if sinking else Near(rtol=1e-4, atol=2e-4),
        cases=each(padding=(None, "left", "right")),
        ran=partial(check_blocks, (5, 64, 79), layers),
        write=write,
        causal=True,
        slow=name not in ("qwen2", "gemma3_text", "mistral", "gpt_oss"),
        **IN_BLOCKS,
    )


KINDS = [
    Kind(
        f"{name}, windows",
        partial(tiny_model, name),
        inputs_of,
        values,
        near=Near(atol=1e-5),
        slopes=Near(rtol=1e-4, atol=2e-4),
        cases=each(padding=(None, "left", "right")),
        ran=partial(check_blocks, (5, 64, 72 if name == "modernbert" else 80), 1),
        whole=values,
        unpatched=True,
        auto=AutoModel,
        weigh=weigh,
        eager=True,
        retrained=Near(rtol=1e-4, atol=1e-4),
        **IN_BLOCKS,
    )
    for name in WINDOWED
] + [decoder(name) for name in DECODERS]


def test_layers_with_chunks_stay_exact() -> None:
    """Also where a text is no longer than a chunk, which transformers then masks as full attention."""
    model = make_model("llama4_text", **DECODERS["llama4_text"])
    with pytest.raises(ValueError, match=r"layer 1 of .* sees a sliding window only and stays exact"):
        hf_effattn.patch_attention(model, "bi-clustered", layers=[1])
    hf_effattn.patch_attention(model, "bi-clustered")
    assert [vars(module)[RECORD].method is None for module in find_stacks(model)[0].modules] == [False, True, False]


@torch.no_grad()
def test_a_text_does_not_meet_its_neighbours(in_blocks: list[torch.Size]) -> None:
    """Texts of a batch lie one behind the other: what is not finite in one stays there."""
    model = hf_effattn.patch_attention(tiny_model("modernbert"), METHOD)
    inputs = inputs_of(245, None)["input_ids"]
    embeddings = model.get_input_embeddings()(inputs)
    embeddings[1] = torch.nan
    together = model(inputs_embeds=embeddings).last_hidden_state
    for row in (0, 2):
        alone = model(inputs_embeds=embeddings[row : row + 1]).last_hidden_state
        torch.testing.assert_close(together[row], alone[0], rtol=0, atol=1e-5)
    assert len(in_blocks) == 3


@pytest.mark.slow_except("layer")
@pytest.mark.parametrize("part", ["layer", "model"])
@torch.no_grad()
def test_a_compiled_layer_runs_in_blocks_and_a_compiled_model_takes_the_dense_mask(
    part: str, in_blocks: list[torch.Size]
) -> None:
    """The mask of a layer is made outside of its graph."""
    model = tiny_model("modernbert")
    inputs = inputs_of(245, "right")
    exact = model(**inputs).last_hidden_state
    hf_effattn.patch_attention(model, METHOD)
    (model.layers[1] if part == "layer" else model).compile(fullgraph=True, backend="eager")
    torch.testing.assert_close(model(**inputs).last_hidden_state, exact, rtol=0, atol=1e-5)
    assert len(in_blocks) == (part == "layer")


@torch.no_grad()
@pytest.mark.slow_except("*-qwen2")
@pytest.mark.parametrize("model_type", DECODERS)
@pytest.mark.parametrize("kind", ["static", "dynamic, in chunks", "beams"])
def test_caches(model_type: str, kind: str, in_blocks: list[torch.Size]) -> None:
    """Whatever the cache, what is generated is what the exact model generates; a further chunk has a dense mask."""
    model = make_model(model_type, **DECODERS[model_type])
    inputs = inputs_of(300, "left", batch=2)
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 5, "pad_token_id": 1, "disable_compile": True}
    more = {"static": {"cache_implementation": "static"}, "beams": {"num_beams": 3}}
    options |= more.get(kind, {"prefill_chunk_size": 250})
    written = model.generate(**inputs, **options)
    hf_effattn.patch_attention(model, METHOD)
    assert torch.equal(model.generate(**inputs, **options), written)
    assert len(in_blocks) == len(find_stacks(model)[0].exact.windows)


def test_windows_that_are_told() -> None:
    window = sliding_window_bidirectional_mask_function(16)
    assert window_of(window) == window_of(sliding_window_bidirectional_overlay(16)) == Window(16, 16)
    assert window_of(sliding_window_causal_mask_function(16)) == Window(15, 0)
    smaller = and_masks(causal_mask_function, and_masks(window, sliding_window_bidirectional_overlay(5)))
    assert window_of(smaller) == Window(5, 0)
    assert window_of(or_masks(sliding_window_causal_mask_function(16), window)) == Window(16, 16)
    near = _bidirectional_window_overlay(9)
    assert window_of(or_masks(sliding_window_causal_mask_function(5), near)) == window_of(near) == Window(8, 8)
    # A union sees more than its window, and so may functions that are not known.
    for other in (
        or_masks(window, causal_mask_function),
        and_masks(or_masks(window, causal_mask_function)),
        bidirectional_mask_function,
        causal_mask_function,
        sliding_window_overlay(16),
        or_masks(window, lambda *args: torch.tensor(True, dtype=torch.bool)),
        or_masks(window, lambda *args: torch.tensor(False, dtype=torch.bool)),
        lambda *args: abs(args[2] - args[3]) < 9,
        and_masks(),
        or_masks(),
        and_masks(window, lambda batch, head, query, key: batch == 0),
        lambda batch, head, query, key: (query - key).abs() <= 16,
    ):
        assert window_of(other) is None


def test_functions_that_hide_nothing() -> None:
    always = lambda *args: torch.tensor(True, dtype=torch.bool)  # noqa: E731
    chunks = chunked_overlay(4, torch.zeros(1, dtype=torch.int64))
    both = or_masks(causal_mask_function, sliding_window_overlay(3))
    for mask in (bidirectional_mask_function, always, or_masks(causal_mask_function, always), and_masks(always, both)):
        assert sees_all(mask)
    for mask in (
        causal_mask_function,
        sliding_window_overlay(3),
        or_masks(causal_mask_function, chunks),
        or_masks(causal_mask_function, lambda *args: torch.tensor(False, dtype=torch.bool)),
        or_masks(causal_mask_function, lambda *args: torch.tensor(True)),
        and_masks(causal_mask_function, always),
        and_masks(always, packed_sequence_mask_function(torch.zeros(1, 4))),
    ):
        assert not sees_all(mask)


@torch.no_grad()
def test_further_masks_have_a_dense_mask() -> None:
    """What a model adds to its window may differ by text, and may be written for single places."""
    model = hf_effattn.patch_attention(tiny_model("modernbert"), METHOD)
    embeddings = torch.zeros(2, 245, 32)
    texts = (torch.arange(245) >= torch.tensor([[100], [30]])).long()
    arguments = {"config": model.config, "inputs_embeds": embeddings, "attention_mask": None}
    separate = packed_sequence_mask_function(texts)
    for further in ("and_mask_function", "or_mask_function"):
        model.config._attn_implementation = "sdpa"
        expected = create_bidirectional_sliding_window_mask(**arguments, **{further: separate})
        model.config._attn_implementation = "bi-clustered"
        assert torch.equal(create_bidirectional_sliding_window_mask(**arguments, **{further: separate}), expected)
    assert create_bidirectional_sliding_window_mask(**arguments).ndim == 5


def mask_function_of(size: int, causal: bool) -> tuple[Callable, Window]:
    """transformers' function of a window, and what it leaves to a query."""
    if causal:
        return sliding_window_causal_mask_function(size + 1), Window(size, 0)
    return sliding_window_bidirectional_mask_function(size), Window(size, size)


@given(
    st.integers(1, 300),
    st.integers(0, 90),
    st.integers(1, 3),
    st.sampled_from([None, "left", "right"]),
    st.sampled_from(["both sides", "backwards", "chunks"]),
)
def test_the_mask_is_that_of_transformers(length: int, size: int, batch: int, padding: str | None, reach: str) -> None:
    causal, key_mask = reach != "both sides", None
    if padding is not None:
        key_mask = torch.arange(length) < torch.tensor([length, length // 2, 1])[:batch, None]
        key_mask = key_mask if padding == "right" else key_mask.flip(1)
    mask_function, window = mask_function_of(size, causal)
    if reach == "chunks":  # those of a text begin at its first token
        left = torch.zeros(batch, dtype=torch.int64) if key_mask is None else key_mask.int().argmax(dim=1)
        mask_function = chunked_causal_mask_function(size + 1, left)
    assert window_of(mask_function) == window
    sizes: dict[str, Any] = {"batch_size": batch, "length": length, "block": 16, "device": "cpu"}
    blocks = mask_of_blocks(mask_function, key_mask, causal=causal, **sizes)
    assert blocks is not None
    dense = dense_of_transformers(mask_function, key_mask, batch, length)
    assert torch.equal(dense_mask(blocks, length, causal=causal), dense)


# Above and below a window, not a multiple of a block, one block only; keys with fewer heads.
@pytest.mark.parametrize(
    ("length", "size", "heads", "dtype"),
    [
        *((*sizes, torch.float32) for sizes in [(131, 5, 4), (64, 9, 2), (257, 70, 1), (20, 3, 4)]),
        (131, 5, 2, torch.bfloat16),
        (64, 9, 2, torch.float16),
    ],
)
@pytest.mark.parametrize(("batch", "causal"), [(1, False), (3, False), (1, True), (3, True)])
def test_values_and_gradients(
    batch: int, causal: bool, length: int, size: int, heads: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of SDPA under the dense mask, some keys masked."""
    mask_function, _ = mask_function_of(size, causal)
    key_mask = torch.rand(batch, length, generator=torch.Generator().manual_seed(0)) > 0.3
    blocks = mask_of_blocks(
        mask_function, key_mask, causal=causal, batch_size=batch, length=length, block=16, device="cpu"
    )
    assert blocks is not None
    dense = dense_of_transformers(mask_function, key_mask, batch, length)

    def exact(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=dense, scale=0.3, enable_gqa=True
        ).transpose(1, 2)

    attend = partial(attend_in_blocks, mask=blocks, causal=causal, dropout=0.0, scale=0.3)
    sizes = [(batch, 4, length, 8), (batch, heads, length, 8), (batch, heads, length, 6)]
    check_against(exact, attend, sizes, dtype, monkeypatch)


def test_block_length() -> None:
    """A power of 2 of at most a quarter of the window, no less than 64."""
    sides = {0: 64, 5: 64, 64: 64, 255: 64, 256: 128, 512: 256, 513: 256}
    assert {side: block_length(Window(side, side)) for side in sides} == sides
    backwards = {64: 64, 511: 64, 512: 128, 1023: 128, 4095: 512}
    assert {before: block_length(Window(before, 0)) for before in backwards} == backwards


@pytest.mark.parametrize(("batch_size", "shortest"), [(1, 2 * (64 + 128)), (2, 3 * (64 + 128))])
def test_shortest_length(batch_size: int, shortest: int) -> None:
    sizes: dict[str, Any] = {"causal": False, "batch_size": batch_size, "device": "cpu"}
    function = sliding_window_bidirectional_mask_function(64)
    assert shortest_length(Window(64, 64), batch_size) == shortest
    assert mask_of_blocks(function, None, length=shortest, **sizes) is not None
    assert mask_of_blocks(function, None, length=shortest - 1, **sizes) is None


def test_keywords_that_concern_all_keys(in_blocks: list[torch.Size]) -> None:
    """A bias of positions is for all keys: there a mask of blocks becomes a dense one."""
    model = hf_effattn.patch_attention(tiny_model("modernbert"), METHOD)
    mask = ALL_MASK_ATTENTION_FUNCTIONS["bi-clustered"](
        batch_size=1,
        q_length=245,
        kv_length=245,
        mask_function=sliding_window_bidirectional_mask_function(4),
        config=model.config,
    )
    assert mask.ndim == 5
    torch.manual_seed(0)
    query, key, value, bias = torch.randn(1, 2, 245, 16), *torch.randn(2, 1, 2, 245, 16), torch.randn(1, 2, 245, 245)
    module = model.layers[1].attn
    if "position_bias" not in sdpa_attention_forward.__code__.co_varnames:
        with pytest.raises(ValueError, match="passes position_bias=, which neither"):
            attention_function.attention("bi-clustered", module, query, key, value, mask, position_bias=bias)
        return
    output, _ = attention_function.attention("bi-clustered", module, query, key, value, mask, position_bias=bias)
    expected = F.scaled_dot_product_attention(
        query, key, value, attn_mask=bias.masked_fill(~dense_mask(mask, 245, causal=False), -1e9)
    )
    torch.testing.assert_close(output, expected.transpose(1, 2), rtol=0, atol=1e-5)
    assert in_blocks == []
