"""Which modules a patch takes for a layer's self-attention: also those that FSDP, or a user, gave a subclass."""

import copy
import importlib
import inspect
import warnings
from typing import Any

import pytest
import torch
from support import tiny_decoders, tiny_exchanged
from support.tiny_exchanged import output_of
from support.tiny_models import SMALL_SETTINGS, batch_for, encoded, tiny_model
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from transformers import CONFIG_MAPPING, AttentionInterface
from transformers.models.bert.modeling_bert import BertSelfAttention
from transformers.models.t5.modeling_t5 import T5Attention

import hf_effattn
from hf_effattn.patching.model_types.stacks import find_stacks
from hf_effattn.patching.model_types.table import MODEL_TYPES
from hf_effattn.patching.module_patch import RECORD

BI = SMALL_SETTINGS["bi-clustered"]
CAUSAL = {"exact_keys": 24, "key_clusters": 2, "segment_length": 8, "window": 8, "min_length": 0}
# Models whose modules keep their classes, or exchange them for a patch's.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("bi-clustered", BI),
    "llama": ("bi-clustered", CAUSAL),
    "bert-cst": ("cst", {"slice_length": 8}),
    "t5": ("exact", {}),
    "mpnet": ("exact", {}),
    "longformer": ("exact", {}),
}
BESIDE = ("MPNetEncoder",)  # which a patch gives another class, too


def make_model(case: str) -> Any:
    if case in tiny_exchanged.SIZES:
        return tiny_exchanged.make_model(case)
    return tiny_decoders.make_model("llama").model if case == "llama" else tiny_model("bert")


def shard(model: Any) -> None:
    beside = [module for module in model.modules() if type(module).__name__.startswith(BESIDE)]
    for module in (*find_stacks(model)[0].modules, *beside, model):
        fully_shard(module)


@pytest.mark.compatibility("torch", "FSDP2: `fully_shard` before or after the patch", "runs")
@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize(
    ("case", "first"),
    # "cst" is refused after sharding: tests/patching/cst/test_cst.py
    [
        ("bert", "patch"),
        ("bert-cst", "patch"),
        ("mpnet", "patch"),
        *((case, "shard") for case in CASES if case != "bert-cst"),
    ],
)
def test_sharded_attention_is_patched_and_given_back(case: str, first: str) -> None:
    """`fully_shard` gives each module that it is called with a subclass of its class."""
    method, settings = CASES[case]
    exact = make_model(case)
    patched = hf_effattn.patch_attention(copy.deepcopy(exact), method, **settings)
    expected, before = output_of(patched), output_of(exact)
    assert not torch.equal(expected, before) or method == "exact"
    model = copy.deepcopy(exact)
    if first == "shard":
        shard(model)
    classes = [type(module) for module in model.modules()]
    hf_effattn.patch_attention(model, method, **settings)
    if first == "patch":
        shard(model)
    assert torch.equal(output_of(model), expected)
    for module, of_patched in zip(model.modules(), patched.modules(), strict=True):
        assert isinstance(module, type(of_patched))
    attending = find_stacks(model)[0].modules
    assert len(attending) == 3
    assert all(isinstance(module, FSDPModule) for module in attending)
    hf_effattn.unpatch_attention(model)
    assert torch.equal(output_of(model), before)
    assert all(isinstance(module, FSDPModule) for module in attending)
    assert not any(RECORD in vars(module) for module in model.modules())
    ours = [kind for module in model.modules() for kind in type(module).__mro__ if "effattn" in kind.__module__]
    assert not ours
    if first == "shard":
        assert [type(module) for module in model.modules()] == classes


class Inheriting(BertSelfAttention):
    """Changes what goes in, and leaves attention to transformers."""

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().forward(hidden_states * 1.0, *args, **kwargs)


class Naming(BertSelfAttention):
    """Calls transformers' forward by its class, from a helper."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._attend(*args, **kwargs)

    def _attend(self, *args: Any, **kwargs: Any) -> Any:
        return BertSelfAttention.forward(self, *args, **kwargs)


def projected(module: Any, hidden_states: torch.Tensor) -> list[torch.Tensor]:
    heads = module.num_attention_heads, module.attention_head_size
    projections = module.query, module.key, module.value
    return [linear(hidden_states).unflatten(-1, heads).transpose(1, 2) for linear in projections]


def attend_anew(module: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    inputs = projected(module, hidden_states)
    return nn.functional.scaled_dot_product_attention(*inputs).transpose(1, 2).flatten(2)


class Overriding(BertSelfAttention):
    """Attends by itself, so that no method is ever called."""

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return attend_anew(self, hidden_states), None


class Foreign(nn.Module):
    """No class of transformers."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.query, self.key, self.value = module.query, module.key, module.value
        self.num_attention_heads, self.attention_head_size = module.num_attention_heads, module.attention_head_size

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return attend_anew(self, hidden_states), None


class Unchanged(nn.Module):
    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value


def parametrize(module: Any) -> None:
    module.register_parameter("scale", nn.Parameter(torch.ones(1)))
    torch.nn.utils.parametrize.register_parametrization(module, "scale", Unchanged())


def with_first_layer(change: Any) -> Any:
    model = tiny_model("bert")
    layer = model.encoder.layer[0].attention
    if not isinstance(change, type):
        change(layer.self)
    elif issubclass(change, BertSelfAttention):
        layer.self.__class__ = change
    else:
        layer.self = change(layer.self)
    return model


@pytest.mark.compatibility("torch", "parametrizations, a subclass of the user's", "runs")
@pytest.mark.parametrize(
    ("change", "layers"),
    [(Inheriting, None), (Inheriting, [0]), (Inheriting, [1]), (Naming, None), (parametrize, None)],
)
def test_a_subclass_is_patched_as_its_class_is(change: Any, layers: list[int] | None) -> None:
    batch = batch_for(tiny_model("bert"))
    expected = encoded(hf_effattn.patch_attention(tiny_model("bert"), "bi-clustered", layers=layers, **BI), batch)
    model = hf_effattn.patch_attention(with_first_layer(change), "bi-clustered", layers=layers, **BI)
    assert torch.equal(encoded(model, batch), expected)
    by_name = with_first_layer(change)
    by_name.config.effattn = {"method": "bi-clustered", "layers": layers, **BI}
    by_name.set_attn_implementation("bi-clustered")
    assert torch.equal(encoded(by_name, batch), expected)


@pytest.mark.compatibility("transformers", "attention of the user's own that calls no attention function", "told")
@pytest.mark.parametrize("kind", [Overriding, Foreign])
def test_attention_that_no_method_reaches_stays_and_is_told(kind: type) -> None:
    """The layers around it keep the numbers that the model gives them."""
    model, batch = with_first_layer(kind), batch_for(tiny_model("bert"))
    # It ignores masks, as this batch does; what it computes is attention.
    exact = encoded(model, batch)
    torch.testing.assert_close(exact, encoded(tiny_model("bert"), batch))
    with pytest.warns(UserWarning, match=rf"{kind.__name__} in layers \[0\] stays as it is: .*BertSelfAttention"):
        hf_effattn.patch_attention(model, "bi-clustered", **BI)
    others = hf_effattn.patch_attention(tiny_model("bert"), "bi-clustered", layers=[1, 2], **BI)
    torch.testing.assert_close(encoded(model, batch), encoded(others, batch))
    assert find_stacks(model)[0].layers == ((1,), (2,))
    hf_effattn.unpatch_attention(model)
    assert torch.equal(encoded(model, batch), exact)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hf_effattn.patch_attention(model, "bi-clustered", layers=[-1], **BI)
    last = hf_effattn.patch_attention(tiny_model("bert"), "bi-clustered", layers=[2], **BI)
    torch.testing.assert_close(encoded(model, batch), encoded(last, batch))
    with pytest.raises(ValueError, match=rf"layer 0 of BertModel has attention of its own \({kind.__name__}\)"):
        hf_effattn.patch_attention(model, "bi-clustered", layers=[0], **BI)


def test_a_model_of_such_attention_alone_is_refused() -> None:
    model = tiny_model("bert")
    for layer in model.encoder.layer:
        layer.attention.self.__class__ = Overriding
    with pytest.raises(ValueError, match="none of its modules calls transformers' attention function and is"):
        hf_effattn.patch_attention(model, "bi-clustered", **BI)


class Calling(Foreign):
    """Calls transformers' attention function, and inherits from none of its classes."""

    def __init__(self, module: Any) -> None:
        super().__init__(module)
        self.config, self.is_causal = module.config, False

    def forward(self, hidden_states: torch.Tensor, attention_mask: Any = None, **kwargs: Any) -> Any:
        attend = AttentionInterface()[self.config._attn_implementation]
        output, weights = attend(self, *projected(self, hidden_states), attention_mask, **kwargs)
        return output.flatten(2), weights


def test_attention_under_a_name_of_its_own_is_told_where_a_method_is_called() -> None:
    model, batch = with_first_layer(Calling), batch_for(tiny_model("bert"))
    model.config.effattn = {"method": "bi-clustered", **BI}
    model.set_attn_implementation("bi-clustered")
    with pytest.warns(UserWarning, match='Calling attends exactly: "bi-clustered" replaces .* BertSelfAttention'):
        got = encoded(model, batch)
    others = hf_effattn.patch_attention(tiny_model("bert"), "bi-clustered", layers=[1, 2], **BI)
    torch.testing.assert_close(got, encoded(others, batch))


class InheritingT5(T5Attention):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


def test_a_subclass_of_attention_that_a_patch_exchanges_runs_the_patch() -> None:
    plain, model = make_model("t5"), make_model("t5")
    changed = [block.layer[0].SelfAttention for block in model.block]
    for module in changed:
        module.__class__ = InheritingT5
    expected = output_of(hf_effattn.patch_attention(plain, "exact"))
    hf_effattn.patch_attention(model, "exact")
    assert torch.equal(output_of(model), expected)
    kinds = {type(module) for module in changed}
    assert len(kinds) == 1
    assert issubclass(kinds.pop(), type(plain.block[0].layer[0].SelfAttention))
    hf_effattn.unpatch_attention(model)
    assert {type(module) for module in changed} == {InheritingT5}


@pytest.mark.slow
@pytest.mark.parametrize("model_type", [name for name in MODEL_TYPES if name in CONFIG_MAPPING])
def test_no_other_class_of_transformers_inherits_from_self_attention(model_type: str) -> None:
    """Cross-attention that did would be taken for self-attention."""
    entry = MODEL_TYPES[model_type]
    name = CONFIG_MAPPING[model_type].__module__.replace("configuration_", "modeling_")
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError:  # a type that has another's classes
        return
    kinds = [kind for kind in vars(module).values() if inspect.isclass(kind) and issubclass(kind, nn.Module)]
    heirs = [kind for kind in kinds if any(base.__name__ in entry.attention for base in kind.__mro__[1:])]
    assert not heirs
