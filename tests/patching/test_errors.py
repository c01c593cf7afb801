"""What cannot be patched says so, says what to do, and is left whole as it was; and so it is by a report."""

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from support import tiny_decoders, tiny_exchanged
from support.tiny_models import TEXT, batch_for, encoded, tiny_config, tiny_model
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    BertLMHeadModel,
    BertModel,
    BigBirdConfig,
    BigBirdModel,
    BlenderbotConfig,
    BlenderbotModel,
    BloomConfig,
    BloomForCausalLM,
    CLIPTextConfig,
    CLIPTextModel,
    HeliumConfig,
    HeliumForCausalLM,
    LayoutLMConfig,
    LayoutLMModel,
    PreTrainedModel,
    VisionTextDualEncoderModel,
    WhisperForCausalLM,
    XLNetConfig,
    XLNetModel,
)

import hf_effattn
from hf_effattn.patching import patch


def helium(**kwargs: Any) -> HeliumForCausalLM:
    config = HeliumConfig(**TEXT, num_key_value_heads=2, head_dim=16, pad_token_id=1)
    return HeliumForCausalLM._from_config(config, **kwargs).eval()


def traces_of_patching(model: nn.Module) -> list[str]:
    configs = [module.config for module in model.modules() if isinstance(module, PreTrainedModel)]
    traces = [name for name, module in model.named_modules() if "_effattn" in vars(module)]
    traces += [config._attn_implementation for config in configs if config._attn_implementation != "sdpa"]
    return traces + [str(config.effattn) for config in configs if hasattr(config, "effattn")]


MISTAKES: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("i-cluster", {}, ValueError, 'unknown attention method .i-cluster. .did you mean "i-clustered"'),
    ("sdpa", {}, ValueError, 'choose one of "clustered", "i-clustered"'),
    ("i-clustered", {"top_k": 3}, ValueError, 'no setting .top_k. .did you mean "topk"'),
    ("clustered", {"topk": 3}, ValueError, "'clustered' has no setting 'topk'"),
    ("clustered", {"clusters": 0}, ValueError, "clusters must be at least 1, got 0"),
    ("clustered", {"layers": [3]}, ValueError, "layers has 3, but the model has 3 layers; give a list .* 0 to 2"),
    ("clustered", {"layers": [-4]}, ValueError, "layers has -4"),
    ("clustered", {"layers": []}, ValueError, "layers is empty, so nothing would be patched"),
    ("clustered", {"layers": [1, 1]}, ValueError, r"layers names a layer twice: \[1, 1\]"),
    ("clustered", {"layers": [2, -1]}, ValueError, r"layers names a layer twice: \[2, -1\]"),
    ("clustered", {"layers": [True]}, TypeError, "layers must hold ints, got True"),
    ("clustered", {"layers": [1.0]}, TypeError, "layers must hold ints, got 1.0"),
    ("clustered", {"layers": 1}, TypeError, "layers must be a list of ints or None for all, got 1"),
    ("clustered", {"layers": "all"}, TypeError, "layers must be a list of ints or None for all, got 'all'"),
    ("cst", {"slice_length": 0}, ValueError, "slice_length must be at least 1, got 0: the tokens of a slice"),
    ("cst", {"slice_length": 2.5}, TypeError, "slice_length must be an int, got 2.5"),
    ("cst", {"extension_ratio": 4}, ValueError, r"extension_ratio must lie in \[1, 3\], got 4"),
    ("cst", {"extension_ratio": "2"}, TypeError, "extension_ratio must be a number, got str"),
    ("cst", {"slice_length": 3, "extension_ratio": 2}, ValueError, "takes 1.5 tokens of each neighbour"),
    (
        "cst",
        {"composition": "merge"},
        ValueError,
        'composition must be one of .*mean "merged"',
    ),
    ("cst", {"attend_ends": 1}, TypeError, "attend_ends must be True, False or None, got 1"),
    ("cst", {"min_length": -1}, ValueError, "min_length must be at least 0"),
    ("cst", {"min_length": None}, TypeError, "min_length must be an int, got None"),
    ("cst", {"slice_len": 4}, ValueError, "'cst' has no setting 'slice_len' .did you mean \"slice_length\""),
    ("cst", {"clusters": 4}, ValueError, "'cst' has no setting 'clusters'"),
    ("cst", {"slice_length": 64}, ValueError, "slice_length is 64, but BertModel takes 64 tokens at most"),
    ("cst", {"layers": [5]}, ValueError, "layers has 5"),
]


@pytest.mark.parametrize("patched", [None, "i-clustered", "cst"])
def test_mistakes_leave_the_model_as_it_was(patched: str | None) -> None:
    model = tiny_model("bert")
    batch = batch_for(model, padding="left")
    if patched is not None:
        settings = {"slice_length": 4} if patched == "cst" else {"clusters": 5, "topk": 7, "min_length": 0}
        hf_effattn.patch_attention(model, patched, **settings)
    config, names, traces = model.config.to_dict(), list(model.state_dict()), traces_of_patching(model)
    expected = encoded(model, batch)
    for method, keywords, error, message in MISTAKES:
        with pytest.raises(error, match=message):
            hf_effattn.patch_attention(model, method, **keywords)
        assert (model.config.to_dict(), list(model.state_dict()), traces_of_patching(model)) == (config, names, traces)
    assert torch.equal(encoded(model, batch), expected)
    assert bool(traces) == (patched is not None)


def bert_decoder() -> BertLMHeadModel:
    return BertLMHeadModel(tiny_config("bert", is_decoder=True)).eval()


def blenderbot() -> BlenderbotModel:
    return BlenderbotModel(BlenderbotConfig(vocab_size=60, d_model=32, encoder_layers=1, decoder_layers=1))


def layoutlm() -> LayoutLMModel:
    return LayoutLMModel(LayoutLMConfig(**TEXT)).eval()


def clip_text() -> CLIPTextModel:
    return CLIPTextModel(CLIPTextConfig(**TEXT)).eval()


def of_type(model_type: str) -> PreTrainedModel:
    return AutoModel.from_config(AutoConfig.for_model(model_type, **TEXT))


def masking_nothing() -> PreTrainedModel:
    model = of_type("llama")
    for layer in model.layers:
        layer.self_attn.is_causal = False
    return model


def without_its_softcap() -> PreTrainedModel:
    """As older versions of transformers load it, unless they are told otherwise."""
    model = of_type("gemma2")
    model.config._attn_implementation = "sdpa"
    return model


def of_a_class_of_its_own() -> PreTrainedModel:
    class OwnAttentionModel(PreTrainedModel):
        config_class = BertModel.config_class

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.layer = nn.Linear(2, 2)

    OwnAttentionModel._can_set_attn_implementation_cached_value = True
    return OwnAttentionModel(tiny_config("bert"))


OUTSIDE = r"is causal, and \"i-clustered\" serves causal .* types of decoders that .effattn models."
REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (helium, {}, f"HeliumForCausalLM {OUTSIDE}"),
    (bert_decoder, {}, f"BertLMHeadModel {OUTSIDE}"),
    (lambda: WhisperForCausalLM(tiny_config("whisper")), {}, "WhisperForCausalLM is causal"),
    # That its decoder is causal sent a user on to its encoder, which is not served either.
    (blenderbot, {}, r'does not know BlenderbotModel \(model type "blenderbot"\)'),
    (lambda: blenderbot().encoder, {}, r'does not know BlenderbotEncoder \(model type "blenderbot"\)'),
    (
        lambda: BigBirdModel(BigBirdConfig(**TEXT)),
        {},
        "does not serve .* has a sparse attention of its own.* without transformers' AttentionInterface. Leave this",
    ),
    (
        lambda: XLNetModel(XLNetConfig(vocab_size=60, d_model=32, n_layer=1, n_head=2)),
        {},
        "does not dispatch its attention through .*AttentionInterface.*A newer transformers may.*`effattn models`",
    ),
    (layoutlm, {}, r'LayoutLMModel: its model type "layoutlm" makes .* `effattn models` lists the \d+ model'),
    (  # it was told that others are served
        lambda: BloomForCausalLM(BloomConfig(vocab_size=60, hidden_size=32, n_layer=2, n_head=4)),
        {},
        r"does not serve BloomForCausalLM: .* computes its attention itself",
    ),
    (clip_text, {}, r"does not serve CLIPTextModel: .* hides the future by a keyword"),
    (lambda: nn.Linear(2, 2), {}, "Linear has no attention to patch: it holds no transformers model"),
    (masking_nothing, {}, r"LlamaModel has no .* \(LlamaAttention, is_causal=True\); LlamaAttention says is_causal=F"),
    (without_its_softcap, {}, r'runs "sdpa", which drops the tanh .* Load it with attn_implementation="eager"'),
    (
        of_a_class_of_its_own,
        {},
        r"OwnAttentionModel has no attention .*none of its .*BertSelfAttention.; none of",
    ),
    (
        lambda: tiny_model("bert", output_attentions=True, attn_implementation="eager"),
        {},
        r"saves no patched model. Leave it out of .*output_attentions = False",
    ),
    (lambda: tiny_model("bert"), {"seeds": 7}, 'did you mean "seed"'),
    (lambda: tiny_model("bert"), {"tolerance": -1.0}, "at least 0"),
    (lambda: tiny_model("albert"), {"layers": [0]}, "share one attention module"),
    (
        lambda: tiny_model("modernbert"),
        {"layers": [0, 1]},
        r"layer 1 of ModernBertModel .* attention are \[0, 2\]",
    ),
    (lambda: of_type("mpnet"), {"layers": [0]}, "stay exact"),
]


@pytest.mark.parametrize(("make", "arguments", "message"), REFUSED)
def test_a_refusal_is_short_and_leaves_the_model_as_it_was(make: Any, arguments: dict[str, Any], message: str) -> None:
    """Some named all 205 model types that are served, and hid the reason among them."""
    model = make()
    before = traces_of_patching(model)
    with pytest.raises(ValueError, match=message) as refusal:
        hf_effattn.patch_attention(model, "i-clustered", **arguments)
    assert len(str(refusal.value)) <= 300
    assert traces_of_patching(model) == before


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (helium, "HeliumAttention is causal"),
        (lambda: helium(attn_implementation="i-clustered"), "HeliumAttention is causal"),
        (bert_decoder, "BertSelfAttention is causal"),
        (layoutlm, "does not serve LayoutLMSelfAttention"),
        (clip_text, r"does not serve CLIP\w+: .* hides the future by a keyword"),
    ],
)
def test_a_refusal_by_transformers_switch_is_short(make: Any, message: str) -> None:
    model, tokens = make(), torch.arange(40)[None]
    model.set_attn_implementation("i-clustered")
    with pytest.raises(ValueError, match=message) as refusal:
        model(tokens)
    assert len(str(refusal.value)) <= 300
    model.set_attn_implementation("sdpa")
    model(tokens)


def test_loading_a_causal_model_outside_the_table(tmp_path: Path) -> None:
    helium().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match='HeliumForCausalLM is causal, and "clustered" serves'):
        hf_effattn.from_pretrained(AutoModelForCausalLM, tmp_path, method="clustered")


@pytest.mark.parametrize("head", [AutoModel, AutoModelForCausalLM])
@pytest.mark.parametrize("model_type", ["cst", "clusterformer"])
def test_our_own_models_are_efficient_as_they_are(model_type: str, head: Any) -> None:
    """They were told to keep SDPA, which they do not call."""
    config = AutoConfig.for_model(model_type, **TEXT, is_decoder=head is AutoModelForCausalLM)
    model = head.from_config(config).eval()
    for ask in (hf_effattn.report, hf_effattn.calibrate, hf_effattn.patch_attention):
        arguments = ("clustered",) if ask is hf_effattn.patch_attention else ({"input_ids": torch.arange(40)[None]},)
        with pytest.raises(ValueError, match="an efficient attention of its own: there is no exact") as refusal:
            ask(model, *arguments)
        assert f'does not serve {type(model).__name__}: its model type "{model_type}" is' in str(refusal.value)
        assert "sdpa" not in str(refusal.value)


def test_a_name_is_no_model() -> None:
    with pytest.raises(TypeError, match="must be a transformers model, got str"):
        hf_effattn.patch_attention("bert-base-uncased", "clustered")


def test_patching_again_replaces(attended: list[str]) -> None:
    model = tiny_model("bert", attn_implementation="eager")
    batch = batch_for(model)
    exact = encoded(model, batch)
    hf_effattn.patch_attention(model, "i-clustered", clusters=5, layers=[0], min_length=0)
    hf_effattn.patch_attention(model, "clustered", clusters=9, min_length=0)
    encoded(model, batch)
    assert attended == ["clustered"] * 3
    assert model.config.effattn["clusters"] == 9
    assert model.config.effattn["layers"] is None
    assert "topk" not in model.config.effattn
    hf_effattn.unpatch_attention(model)
    assert model.config._attn_implementation == "eager"
    assert torch.equal(encoded(model, batch), exact)


def test_a_switch_of_the_user_is_kept_when_unpatching() -> None:
    """Of a model that was never patched, or in between."""
    model = tiny_model("bert", attn_implementation="eager")
    config = model.config.to_dict()
    assert hf_effattn.unpatch_attention(model) is model
    hf_effattn.patch_attention(model, "clustered").set_attn_implementation("eager")
    hf_effattn.unpatch_attention(model)
    assert model.config._attn_implementation == "eager"
    assert model.config.to_dict() == config
    assert hf_effattn.unpatch_attention(helium()).config._attn_implementation == "sdpa"


def test_what_transformers_loaded_exactly_is_unpatched_too(tmp_path: Path) -> None:
    """Its config still says how it was patched, so that it would be patched again when it is loaded."""
    hf_effattn.patch_attention(tiny_model("bert"), "clustered", clusters=4, min_length=0).save_pretrained(tmp_path)
    model = BertModel.from_pretrained(tmp_path)
    assert model.config.effattn["clusters"] == 4
    hf_effattn.unpatch_attention(model).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="was saved without hf_effattn settings"):
        hf_effattn.from_pretrained(BertModel, tmp_path)


def test_a_patch_that_changes_nothing_is_told() -> None:
    """Below its min_length a method leaves every input to exact attention, and this model takes no longer one."""
    llama = AutoConfig.for_model("llama", **TEXT | {"max_position_embeddings": 128})
    with pytest.warns(UserWarning, match='takes at most 64 tokens, and "clustered" .* starts at 1,.*min_length=0'):
        model = hf_effattn.patch_attention(tiny_model("bert"), "clustered", clusters=4)
    assert model.config.effattn["clusters"] == 4
    # It advises what can be done: not all positions can be extended.
    with pytest.warns(
        UserWarning, match=r"longer inputs call extend_positions; to force the method pass min_length=0\.$"
    ):
        hf_effattn.patch_attention(tiny_model("bert"), "clustered", clusters=4)
    with pytest.warns(
        UserWarning, match="at most 128 tokens.* To start earlier give fewer clusters; to .* min_length=0"
    ):
        hf_effattn.patch_attention(AutoModel.from_config(llama), "clustered", clusters=4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hf_effattn.patch_attention(model, "clustered", clusters=4, min_length=64)
        hf_effattn.patch_attention(tiny_model("bert"), "cst", slice_length=4)
    with pytest.warns(UserWarning, match="this model takes at most 62 tokens"):
        hf_effattn.patch_attention(tiny_model("roberta"), "clustered", clusters=4, min_length=63)
    whisper = tiny_model("whisper")
    longest = whisper.config.max_source_positions
    with pytest.warns(UserWarning, match=f"at most {longest} tokens.* nothing to approximate .* smaller counts.$"):
        hf_effattn.patch_attention(whisper, "i-clustered", clusters=2, topk=longest, min_length=0)


@pytest.mark.parametrize(("model_type", "special"), [("vit", 1), ("deit", 2)])
def test_an_image_has_as_many_tokens_as_patches(model_type: str, special: int) -> None:
    model = tiny_model(model_type)
    count = (model.config.image_size // model.config.patch_size) ** 2 + special
    with pytest.warns(UserWarning, match=f"takes at most {count} tokens.* smaller counts.$"):
        hf_effattn.patch_attention(model, "clustered", clusters=count, min_length=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hf_effattn.patch_attention(model, "clustered", clusters=count - 1, min_length=0)


def test_a_warning_that_is_an_error_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    model = tiny_model("bert")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="The patch will do nothing"):
            hf_effattn.patch_attention(model, "clustered", clusters=4)
        assert traces_of_patching(model) == []
        hf_effattn.patch_attention(model, "cst", slice_length=4)
        torch.nn.init.normal_(model.hf_effattn_cst.token_positions)
        with pytest.raises(UserWarning, match="left out"):
            hf_effattn.patch_attention(model, "clustered", clusters=4, min_length=0)
    assert model.config.effattn["method"] == "cst"
    assert model.hf_effattn_cst.token_positions.any()


I_CLUSTERED = {"method": "i-clustered", "clusters": 6, "exact_keys": 48, "min_length": 0}


def small_model(patched: str | None) -> PreTrainedModel:
    """A small random model: one whose classes a patch exchanges, or a decoder, perhaps patched."""
    if patched == "longformer":
        return tiny_exchanged.make_model("longformer")
    model = tiny_decoders.make_model("gpt2")
    if patched == "cst":
        hf_effattn.patch_attention(model, "cst", slice_length=8)
    elif patched is not None:
        settings: dict[str, Any] = {**I_CLUSTERED, "segment_length": 8, "window": 0}
        hf_effattn.patch_attention(model, **settings)
    return model


def state(model: PreTrainedModel) -> list[Any]:
    """All that a module has, with the identity of what is in it, and the config."""
    parts: list[Any] = [copy.deepcopy(model.config.to_dict()), model.config._attn_implementation]
    for module in model.modules():
        parts.append(type(module))
        for name, value in vars(module).items():
            entries = list(value.items()) if isinstance(value, dict) else value
            parts.append((name, [(key, id(entry)) for key, entry in entries] if entries is not value else id(value)))
        parts.append([(key, id(hook)) for key, hook in module._forward_pre_hooks.items()])
    return parts


@pytest.mark.parametrize(
    ("patched", "candidate"), [(None, "i-clustered"), ("i-clustered", "cst"), ("cst", "i-clustered"), ("cst", "cst")]
)
def test_a_report_leaves_the_model_as_it_was(patched: str | None, candidate: str) -> None:
    model = small_model(patched)
    before = state(model)
    method: dict[str, Any] = I_CLUSTERED if candidate != "cst" else {"method": "cst", "slice_length": 4}
    hf_effattn.report(model, {"input_ids": torch.arange(100)[None] % 60}, [method], repeats=1, progress=False)
    assert state(model) == before


@pytest.mark.parametrize(
    ("patched", "to"), [(None, "i-clustered"), ("cst", "i-clustered"), ("cst", "cst"), ("longformer", "exact")]
)
def test_a_patch_that_fails_leaves_the_model_as_it_was(
    patched: str | None, to: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> None:
        raise RuntimeError("disk on fire")

    model = small_model(patched)
    before = state(model)
    monkeypatch.setattr(patch, "write_stored", fail)
    settings: dict[str, Any] = {"cst": {"method": "cst", "slice_length": 4}, "exact": {"method": "exact"}}
    with pytest.raises(RuntimeError, match="disk on fire"):
        hf_effattn.patch_attention(model, **settings.get(to, I_CLUSTERED))
    assert state(model) == before


def test_a_failure_in_the_second_of_two_encoders_leaves_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    model = VisionTextDualEncoderModel(vision_model=tiny_model("vit"), text_model=tiny_model("bert")).eval()
    before, write, calls = state(model), patch.write_stored, []

    def fail_the_second_time(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 2:
            raise RuntimeError("disk on fire")
        return write(*args)

    monkeypatch.setattr(patch, "write_stored", fail_the_second_time)
    with pytest.raises(RuntimeError, match="disk on fire"):
        hf_effattn.patch_attention(model, "clustered", clusters=4, min_length=0)
    assert state(model) == before
