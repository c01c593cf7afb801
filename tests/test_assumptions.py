"""What the code relies on in torch, transformers, accelerate and sentence-transformers, beyond what they document.

Each test is one assumption: its name says it, its docstring who relies on it and where in the library it was seen. All
were seen in torch 2.13.0, transformers 5.24.0, accelerate 1.15.0 and sentence-transformers 6.2.0; where a docstring
names others, in those, too. A new release that changes one fails here, with the name of the assumption.
"""

import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate.big_modeling import _attach_context_parallel_hooks
from accelerate.hooks import ModelHook, add_hook_to_module
from packaging.version import parse
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import AttentionInterface, AttentionMaskInterface, AutoConfig, AutoModel
from transformers.cache_utils import DynamicCache, StaticCache
from transformers.masking_utils import (
    and_masks,
    bidirectional_mask_function,
    causal_mask_function,
    chunked_overlay,
    eager_mask,
    or_masks,
    sdpa_mask,
    sliding_window_bidirectional_overlay,
    sliding_window_overlay,
)

TINY: dict[str, Any] = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
WIDTH = {"intermediate_size": 16, "max_position_embeddings": 32}
IDS = torch.arange(8)[None]


def tiny(model_type: str, **settings: Any) -> Any:
    torch.manual_seed(0)
    return AutoModel.from_config(AutoConfig.for_model(model_type, **TINY | WIDTH | settings)).eval()


def register(name: str, note: Callable[[Any, dict[str, Any]], None]) -> None:
    """Exact attention under a name, which notes the mask and the keywords that it is called with."""

    def attend(module: nn.Module, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any) -> Any:
        note(attention_mask, kwargs)
        return F.scaled_dot_product_attention(query, key, value).transpose(1, 2), None

    AttentionInterface.register(name, attend)


# Masks of transformers


@pytest.mark.parametrize(
    "factory",
    [
        sliding_window_overlay,
        sliding_window_bidirectional_overlay,
        lambda size: chunked_overlay(size, torch.zeros(1, dtype=torch.int64)),  # of Llama 4
    ],
)
def test_windows_and_chunks_of_one_factory_share_code_and_hold_their_width_first(factory: Any) -> None:
    """transformers/masking_utils.py. `patching/exact/windows.py` tells a window from other masks so."""
    narrow, wide = factory(3), factory(5)
    assert narrow.__code__ is wide.__code__
    assert [mask.__closure__[0].cell_contents for mask in (narrow, wide)] == [3, 5]


@pytest.mark.parametrize("join", [and_masks, or_masks], ids=lambda function: function.__name__)
def test_joined_masks_hold_their_parts_first(join: Any) -> None:
    """transformers/masking_utils.py. `patching/exact/windows.py` takes intersections and unions apart."""
    parts = causal_mask_function, sliding_window_overlay(3)
    assert tuple(join(*parts).__closure__[0].cell_contents) == parts


def test_gemma3_reads_both_ways_by_functions_of_its_own() -> None:
    """transformers/models/gemma3/modeling_gemma3.py. `patching/exact/windows.py` compares their bytecode."""
    from transformers.models.gemma3 import modeling_gemma3

    from hf_effattn.patching.exact.windows import Window, window_of

    assert window_of(modeling_gemma3._bidirectional_window_overlay(3)) == Window(2, 2)


def test_no_mask_is_made_where_nothing_is_hidden() -> None:
    """`sdpa_mask` of transformers/masking_utils.py, 5.7 to 5.24. To `padding_mask` None stands for no mask."""
    sizes: dict[str, Any] = {
        "batch_size": 2,
        "q_length": 1,
        "kv_length": 4,
        "mask_function": bidirectional_mask_function,
    }
    sizes |= {"allow_is_bidirectional_skip": True, "use_vmap": False}
    assert sdpa_mask(**sizes, attention_mask=torch.ones(2, 4, dtype=torch.bool)) is None
    padded = torch.tensor([[True] * 4, [True, True, False, False]])
    row = sdpa_mask(**sizes, attention_mask=padded)
    assert row.shape == (2, 1, 1, 4)
    assert row[:, 0, 0].equal(padded)


def test_the_eager_mask_is_added_to_scores() -> None:
    """`eager_mask` of transformers/masking_utils.py: 0 where a query sees a key, else the least number."""
    mask = eager_mask(batch_size=1, q_length=2, kv_length=2, mask_function=causal_mask_function, dtype=torch.float32)
    assert mask[0, 0].tolist() == [[0, torch.finfo(torch.float32).min], [0, 0]]


@pytest.mark.parametrize("has_mask_function", [False, True])
def test_an_attention_function_gets_padding_only_beside_a_mask_function_of_its_name(has_mask_function: bool) -> None:
    """`_preprocess_mask_arguments` of transformers/masking_utils.py; hence `interface.register` registers both."""
    name, masks = f"assumption_{has_mask_function}", []
    register(name, lambda mask, kwargs: masks.append(mask))
    if has_mask_function:
        AttentionMaskInterface.register(name, sdpa_mask)
    model = tiny("bert")
    model.set_attn_implementation(name)
    model(IDS, attention_mask=torch.tensor([[1] * 6 + [0] * 2]))
    assert (masks[0] is not None) == has_mask_function


# Caches, outputs and configs of transformers


def test_a_static_cache_keeps_its_length_in_a_tensor_and_hands_attention_all_its_room() -> None:
    """transformers/cache_utils.py, from 5.10 on. `padding_mask` and `"cst"` take a length that is either.

    Keys beyond the prompt are zeros. The attention function cuts them off.
    """
    model = tiny("llama", num_key_value_heads=2)
    dynamic, static = DynamicCache(config=model.config), StaticCache(config=model.config, max_cache_len=16)
    model(IDS, past_key_values=dynamic)
    model(IDS, past_key_values=static)
    assert type(dynamic.get_seq_length(0)) is int
    assert isinstance(static.get_seq_length(0), torch.Tensor | int)
    assert int(static.get_seq_length(0)) == dynamic.get_seq_length(0) == IDS.shape[1]
    assert static.layers[0].keys.shape[2] == 16
    assert not static.layers[0].keys[:, :, IDS.shape[1] :].any()


def test_gpt2_tells_its_attention_of_wanted_weights_by_the_collector_alone() -> None:
    """transformers/utils/output_capturing.py and GPT-2. Private; `matrices_are_collected` reads it."""
    from transformers.utils.output_capturing import _active_collector

    seen: list[Any] = []

    def note(_: Any, kwargs: dict[str, Any]) -> None:
        seen.append((kwargs.get("output_attentions"), "attentions" in (_active_collector.get() or ())))

    register("assumption_collector", note)
    model = tiny("gpt2", n_positions=32)
    model.config._attn_implementation = "assumption_collector"
    model(IDS, output_attentions=True)
    model(IDS)
    assert seen == [(None, True), (None, False)]


def test_what_a_model_can_record_is_remembered_under_the_name_of_its_class() -> None:
    """transformers/utils/output_capturing.py. Private; the class that Pixtral's model is given is entered there."""
    from transformers.models.pixtral.modeling_pixtral import PixtralVisionModel
    from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

    AutoModel.from_config(AutoConfig.for_model("pixtral", hidden_size=16, num_hidden_layers=1, num_attention_heads=2))
    assert _CAN_RECORD_REGISTRY[str(PixtralVisionModel)] == PixtralVisionModel._can_record_outputs


def test_an_implementation_goes_down_to_the_configs_inside() -> None:
    """`config._attn_implementation` of transformers/configuration_utils.py. Snapshots restore the outermost first."""
    config = AutoConfig.for_model("clip")
    config._attn_implementation = "eager"
    assert {config.text_config._attn_implementation, config.vision_config._attn_implementation} == {"eager"}


def test_a_config_keeps_fields_that_it_does_not_know_and_no_implementation(tmp_path: Any) -> None:
    """transformers/configuration_utils.py. `config.effattn` holds the settings; loading sets the method again."""
    config = AutoConfig.for_model("bert", **TINY)
    config.effattn, config._attn_implementation = {"method": "clustered"}, "eager"
    config.save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert loaded.effattn == {"method": "clustered"}
    assert loaded._attn_implementation != "eager"


def test_decoders_of_transformers_say_that_they_are_causal_on_the_module() -> None:
    """`is_causal` of attention modules, by which a decoder's self-attention is told from an encoder's."""
    assert all(layer.self_attn.is_causal for layer in tiny("llama", num_key_value_heads=2).layers)
    assert not any(layer.attention.self.is_causal for layer in tiny("bert").encoder.layer)


@pytest.mark.parametrize("name", ["_make_global_fixed_block_ids", "_create_global_aggregates"])
def test_longt5_has_the_helpers_that_its_blocks_use(name: str) -> None:
    """transformers/models/longt5/modeling_longt5.py. Private; `exact/architectures/longt5.py` calls them."""
    from transformers.models.longt5 import modeling_longt5

    assert callable(getattr(modeling_longt5, name))


# Kernels and rounding of torch


def heads(length: int = 24, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 1, 2, length, 16).to(dtype)
    return query, key, value


def test_the_flash_kernel_of_a_cpu_gives_natural_log_sums() -> None:
    """`aten::_scaled_dot_product_flash_attention_for_cpu`, torch 2.6 to 2.13. Exact heads are merged by them."""
    query, key, value = heads()
    output, log_sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value)
    scores = query @ key.mT / math.sqrt(query.shape[-1])
    torch.testing.assert_close(log_sums.reshape(1, 2, -1), scores.logsumexp(dim=-1))
    torch.testing.assert_close(output, scores.softmax(dim=-1) @ value)


def test_sdpa_gives_zeros_where_a_query_sees_no_key() -> None:
    """torch 2.5 on, on a CPU. The ops give 0 there, too."""
    query, key, value = heads()
    seen = torch.ones(24, 24, dtype=torch.bool)
    seen[3] = False
    output = F.scaled_dot_product_attention(query, key, value, attn_mask=seen)
    assert not output[:, :, 3].any()
    assert output.isfinite().all()


def test_sdpa_shares_keys_between_neighbouring_heads() -> None:
    """`enable_gqa`: head `h` reads the keys of head `h // (heads / key heads)`, as the ops' groups do."""
    query, key, value = heads()
    query = torch.cat([query, query.flip(1)], dim=1)
    shared = F.scaled_dot_product_attention(query, key, value, enable_gqa=True)
    expected = F.scaled_dot_product_attention(query, key.repeat_interleave(2, 1), value.repeat_interleave(2, 1))
    torch.testing.assert_close(shared, expected)


def test_sdpa_sums_half_precision_in_float32() -> None:
    """On a CPU; the ops' products of half precision are held to the same error."""
    query, key, value = heads(2048, torch.bfloat16)
    exact = F.scaled_dot_product_attention(query.double(), key.double(), value.double())
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        output = F.scaled_dot_product_attention(query, key, value).double()
    assert (output - exact).norm() / exact.norm() < 2 * torch.finfo(torch.bfloat16).eps


def test_autocast_casts_what_sdpa_gets() -> None:
    """torch.amp's list for a CPU. `cast_by_autocast` does the same for methods, which call no SDPA."""
    with torch.autocast("cpu", torch.bfloat16):
        assert F.scaled_dot_product_attention(*heads()).dtype == torch.bfloat16


def test_softmax_has_a_backward_pass_that_can_be_called() -> None:
    """`torch._softmax_backward_data`. Private; `softmax_backward` calls it."""
    scores = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    weights, grad = scores.softmax(dim=1), torch.randn(3, 5, dtype=torch.float64)
    weights.backward(grad)
    torch.testing.assert_close(torch._softmax_backward_data(grad, weights.detach(), 1, scores.dtype), scores.grad)


def test_a_processor_says_whether_it_multiplies_bfloat16() -> None:
    """`torch.ops.mkldnn._is_mkldnn_bf16_supported`. Private; `ops/shared/torch_internals.py` asks it."""
    assert torch.ops.mkldnn._is_mkldnn_bf16_supported() in (True, False)


# Graphs and transforms of torch


def test_a_trace_tells_that_it_runs() -> None:
    """`torch._C._get_tracing_state`. Private; `ops/shared/torch_internals.py` asks it."""
    states: list[bool] = []

    def told(x: torch.Tensor) -> torch.Tensor:
        states.append(torch._C._get_tracing_state() is not None)
        return x + 1

    told(torch.ones(1))
    torch.jit.trace(told, torch.ones(1), check_trace=False)
    assert states == [False, True]


def test_tensors_within_vmap_do_not_say_that_they_learn() -> None:
    """`torch._C._functorch`. Private; `unbatched` asks the tensor inside."""
    told: list[tuple[bool, bool]] = []

    def read(x: torch.Tensor) -> torch.Tensor:
        inside = torch._C._functorch.get_unwrapped(x)
        told.append((torch._C._functorch.is_batchedtensor(x), inside.requires_grad))
        return x * 2

    torch.vmap(read)(torch.ones(2, requires_grad=True))
    assert told == [(True, True)]


def test_transforms_and_modes_are_seen() -> None:
    """`torch._C._functorch`, `torch._C._len_torch_dispatch_stack`. Private; `is_plain` and `is_watched` ask them."""
    told: list[tuple[bool, int]] = []

    def read(x: torch.Tensor) -> torch.Tensor:
        told.append((torch._C._functorch.is_functorch_wrapped_tensor(x), torch._C._len_torch_dispatch_stack()))
        return x.sum()

    read(torch.ones(2))
    torch.func.grad(read)(torch.ones(2))
    torch.vmap(read)(torch.ones(2, 2))
    with FlopCounterMode(display=False):
        read(torch.ones(2))
    assert told == [(False, 0), (True, 0), (True, 0), (False, 1)]


def test_the_compiler_tells_an_export_from_a_compilation() -> None:
    """`torch.compiler.is_exporting`, from torch 2.7 on; before, `is_exported` takes either for an export."""
    assert hasattr(torch.compiler, "is_exporting") or parse(torch.__version__).release < (2, 7)


# Models divided among processes


def test_functions_that_are_set_stand_apart_from_registered_ones() -> None:
    """transformers/utils/generic.py: `_local_mapping`. `replaced_functions` looks for DeepSpeed's there."""
    functions = AttentionInterface()
    functions["sdpa"] = functions["eager"] = nn.Identity()
    assert set(functions._local_mapping) == {"sdpa", "eager"}
    AttentionInterface.register("registered", nn.Identity())
    try:
        assert "registered" in functions
        assert "registered" not in functions._local_mapping
    finally:
        del AttentionInterface._global_mapping["registered"]


def test_accelerate_names_its_hooks_of_context_parallelism() -> None:
    """accelerate/big_modeling.py. `drops_masks` knows them by the function that defines them."""
    model = tiny("llama")
    _attach_context_parallel_hooks(model)
    (hook,) = model.layers[0].self_attn._forward_pre_hooks.values()
    assert hook.__qualname__ == "_attach_context_parallel_hooks.<locals>._self_attn_pre_forward_hook"
    assert hook((), (), {"attention_mask": 1}) == ((), {"attention_mask": None, "is_causal": True})


def test_context_parallelism_of_torch_is_seen_at_sdpa() -> None:
    """torch/distributed/tensor/experimental: `_distribute_function`. `context_parallel_is_on` asks for its module."""
    before, place, text = F.scaled_dot_product_attention, "torch.distributed.tensor.experimental.", torch.ones(1, 8)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with context_parallel(init_device_mesh("cpu", (1,)), buffers=[text], buffer_seq_dims=[1]):
            assert F.scaled_dot_product_attention.__module__.startswith(place)
        assert F.scaled_dot_product_attention is before
    finally:
        dist.destroy_process_group()
    assert not str(getattr(before, "__module__", "")).startswith(place)


def test_a_model_that_is_not_divided_has_no_number_of_processes() -> None:
    """transformers/modeling_utils.py: `tp_size`. `head_share` takes None for one process."""
    model = tiny("llama")
    assert model.tp_size in (None, 1)
    assert not any(hasattr(parameter, "device_mesh") for parameter in model.parameters())


# Hooks of accelerate, and sentence-transformers


def test_accelerate_keeps_the_forward_that_a_module_had() -> None:
    """accelerate/hooks.py: `_old_forward` and `_hf_hook`. `change_class` renews one, `"cst"` reads the other."""
    layer, hook = nn.Linear(2, 2), ModelHook()
    add_hook_to_module(layer, hook)
    assert layer._hf_hook is hook
    assert vars(layer)["_old_forward"].__func__ is nn.Linear.forward
    assert "forward" in vars(layer)


def test_sentence_transformers_loads_and_saves_by_one_class() -> None:
    """sentence_transformers/base/modules/transformer.py. Its `__init__` and `save` are watched by a patched model."""
    from sentence_transformers.base.modules import transformer
    from sentence_transformers.models import Transformer

    from hf_effattn.patching import sentence_transformers as ours

    assert transformer.__name__ == ours.LOADER_MODULE
    assert getattr(transformer, ours.LOADER) is Transformer
    assert list(inspect.signature(Transformer.__init__).parameters)[:2] == ["self", "model_name_or_path"]


def test_a_router_names_the_modules_of_a_route() -> None:
    """`Router._resolve_route`. Private; `document_modules` asks it for a document's."""
    from sentence_transformers.models import Router

    router = Router.for_query_document([nn.Identity()], [nn.Identity(), nn.Identity()])
    assert router._resolve_route("document", "text") == "document"
    assert len(router.sub_modules["document"]) == 2
