"""Keywords of transformers that change attention: honoured, exact, or refused by name."""

import ast
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from support.tiny_decoders import SIZES, make_model
from support.tiny_models import batch_for, encoded, tiny_model
from transformers import AttentionInterface, CLIPModel, Owlv2Model
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.bert import modeling_bert

import hf_effattn
from hf_effattn.patching.interface.attention_function import attention
from hf_effattn.patching.interface.keywords import KNOWN, NOT_IN_SDPA, WITHOUT_EFFECT
from hf_effattn.patching.model_types.stacks import find_stacks

FORCED = {"clusters": 6, "min_length": 0}
MODELS = Path(transformers.__file__).parent / "models"
N = 40


pytestmark = pytest.mark.usefixtures("without_gradient")


@pytest.fixture
def module() -> Any:
    """A patched self-attention module of BERT."""
    model = hf_effattn.patch_attention(tiny_model("bert"), "clustered", **FORCED)
    return find_stacks(model)[0].modules[0]


@pytest.fixture
def projected() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randn(2, 2, N, 16, generator=generator) for name in ("query", "key", "value")}


# Where a modeling file calls the attention function that it looked up.
CALL = re.compile(r"(?<![\w.])(?:attention_interface|ALL_ATTENTION_FUNCTIONS\[[^\]]*\])\(")


def keywords_passed(text: str) -> set[str]:
    """The keywords that a modeling file names where it calls the attention function."""
    names = set()
    for start in CALL.finditer(text):
        end = start.end()
        while text.count("(", start.end() - 1, end) > text.count(")", start.end(), end):
            end = text.index(")", end) + 1
        call = ast.parse(text[start.start() : end], mode="eval").body
        assert isinstance(call, ast.Call)
        names |= {keyword.arg for keyword in call.keywords if keyword.arg is not None}
    return names


def test_every_keyword_of_this_transformers_is_known() -> None:
    """One that is new has to be put into a list of `keywords.py`, when it is known what it does to attention."""
    passed: dict[str, list[str]] = {}
    for path in sorted(MODELS.rglob("modeling_*.py")):
        text = path.read_text(encoding="utf-8")
        assert "ALL_ATTENTION_FUNCTIONS" not in text or CALL.search(text), f"{path.stem} calls it in another way"
        for keyword in keywords_passed(text):
            passed.setdefault(keyword, []).append(path.stem)
    assert {"dropout", "scaling", "sliding_window"} <= passed.keys()  # the files are read at all
    unknown = {keyword: files for keyword, files in passed.items() if keyword not in KNOWN}
    assert not unknown, f"not in any list of hf_effattn/patching/interface/keywords.py: {unknown}"


def test_what_every_model_may_hand_on_is_known() -> None:
    assert transformers.utils.TransformersKwargs.__annotations__.keys() <= KNOWN


def test_a_keyword_in_a_call_is_found() -> None:
    assert keywords_passed("attention_interface(self, q, new=1, **kwargs)\nother(q, old=1)") == {"new"}
    assert keywords_passed("ALL_ATTENTION_FUNCTIONS[name](self, q, tilt=2)") == {"tilt"}


@pytest.mark.parametrize(("where", "padded"), [("keyword", False), ("keyword", True), ("attribute", False)])
def test_is_causal_hides_the_future(
    where: str, padded: bool, module: Any, projected: dict[str, torch.Tensor], attended: list[str]
) -> None:
    mask = torch.ones(2, N, dtype=torch.bool)
    mask[0, 30:] = False
    seen = mask[:, None, None, :] & torch.ones(N, N, dtype=torch.bool).tril() if padded else None
    expected = F.scaled_dot_product_attention(**projected, attn_mask=seen, is_causal=not padded).transpose(1, 2)
    options: dict[str, Any] = {"attention_mask": mask if padded else None}
    if where == "attribute":
        module.is_causal = True
        with pytest.raises(ValueError, match="BertSelfAttention is causal"):
            attention("clustered", module, **projected, **options)
    else:
        actual, weights = attention(
            "clustered", module, **projected, **options, is_causal=True, output_attentions=True
        )
        assert torch.equal(actual, expected)
        assert (weights.triu(1) == 0).all()
    assert attended == []


def test_is_causal_false_lets_a_method_run(
    module: Any, projected: dict[str, torch.Tensor], attended: list[str]
) -> None:
    attention("clustered", module, **projected, attention_mask=None, is_causal=False)
    assert attended == ["clustered"]


def clip(model_class: Any) -> Any:
    """A small random model that compares texts with images."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = sizes | {"vocab_size": 60, "max_position_embeddings": 64, "eos_token_id": 3}
    vision = sizes | {"image_size": 24, "patch_size": 4, "initializer_range": 0.25}
    config = model_class.config_class(text_config=text, vision_config=vision, projection_dim=8)
    return model_class(config).eval()


@pytest.mark.parametrize("model_class", [CLIPModel, Owlv2Model])
def test_of_clip_the_vision_tower_is_patched_and_the_text_sees_no_later_token(
    model_class: Any, attended: list[str]
) -> None:
    model = hf_effattn.patch_attention(clip(model_class), "clustered", **FORCED)
    tokens = torch.randint(5, 60, (2, N))
    later = tokens.clone()
    later[:, 20:] = 7
    images = torch.randn(2, 3, 24, 24)
    before = model(input_ids=tokens, pixel_values=images).text_model_output.last_hidden_state
    after = model(input_ids=later, pixel_values=images).text_model_output.last_hidden_state
    assert torch.equal(before[:, :20], after[:, :20])
    assert attended == ["clustered"] * 4
    assert model.text_model.config._attn_implementation == "sdpa"


def test_what_sdpa_does_not_honour_is_refused_by_name(module: Any, projected: dict[str, torch.Tensor]) -> None:
    for keyword in NOT_IN_SDPA:
        options: dict[str, Any] = {keyword: torch.ones(2)}
        message = rf'BertSelfAttention passes {keyword}= .*neither "clustered" nor the SDPA'
        with pytest.raises(ValueError, match=message):
            attention("clustered", module, **projected, attention_mask=None, **options)
        attention("clustered", module, **projected, attention_mask=None, **{keyword: None})


@pytest.mark.parametrize("padded", [False, True])
def test_a_position_bias_is_added_to_the_scores(
    padded: bool, module: Any, projected: dict[str, torch.Tensor], attended: list[str]
) -> None:
    bias = torch.randn(1, 2, N, N)
    mask = torch.ones(2, N, dtype=torch.bool)
    mask[0, 30:] = False
    seen = torch.where(mask[:, None, None, :], bias, torch.finfo(torch.float32).min) if padded else bias
    expected = F.scaled_dot_product_attention(**projected, attn_mask=seen).transpose(1, 2)
    options: dict[str, Any] = {"attention_mask": mask if padded else None, "position_bias": bias}
    if "position_bias" not in sdpa_attention_forward.__code__.co_varnames:
        with pytest.raises(ValueError, match="passes position_bias=, which neither"):
            attention("clustered", module, **projected, **options)
        return
    actual, _ = attention("clustered", module, **projected, **options)
    torch.testing.assert_close(actual, expected)
    scores = projected["query"] @ projected["key"].transpose(2, 3) * projected["query"].shape[3] ** -0.5
    _, weights = attention("clustered", module, **projected, **options, output_attentions=True)
    torch.testing.assert_close(weights, (scores + seen).softmax(dim=-1))
    assert attended == []


@pytest.mark.compatibility("transformers", "packed texts by `cu_seq_lens`, without a dense mask", "refused")
def test_packed_texts_need_a_dense_mask(module: Any, projected: dict[str, torch.Tensor], attended: list[str]) -> None:
    """Which transformers makes of positions for decoders alone: texts of an encoder would see each other."""
    packed: dict[str, Any] = {"cu_seq_lens_q": torch.tensor([0, 10, N]), "max_length_q": 30}
    with pytest.raises(ValueError, match=r"where packed texts begin.*padding and an attention_mask instead$"):
        attention("clustered", module, **projected, attention_mask=None, **packed)
    with pytest.raises(ValueError, match=r"where packed texts begin.*position_ids that begin anew"):
        attention("clustered", module, **projected, attention_mask=None, is_causal=True, **packed)
    dense = torch.ones(2, 1, N, N, dtype=torch.bool)
    attention("clustered", module, **projected, attention_mask=dense, **packed)
    assert attended == []


@pytest.fixture
def handed(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The keywords of every call of SDPA by transformers' function."""
    calls: list[dict[str, Any]] = []

    def watched(*args: Any, **kwargs: Any) -> Any:
        calls.append(kwargs)
        return sdpa_attention_forward(*args, **kwargs)

    monkeypatch.setattr("hf_effattn.patching.exact.reference.sdpa_attention_forward", watched)
    return calls


def takes_tilt(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, *, tilt: int = 0) -> None:
    """What a new version of transformers may have as its eager attention."""


def test_a_new_keyword_of_transformers_makes_a_model_exact_and_is_handed_on(
    attended: list[str], handed: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("bert")
    batch = batch_for(model, padding="right")
    exact = encoded(model, batch)
    hf_effattn.patch_attention(model, "clustered", **FORCED)
    monkeypatch.setattr(modeling_bert, "eager_attention_forward", takes_tilt)
    with pytest.warns(UserWarning, match='BertSelfAttention gets tilt=.*"clustered" does not know') as caught:
        assert torch.equal(encoded(model, batch, tilt=2), exact)
    assert {Path(warning.filename).name for warning in caught} == {"tiny_models.py"}  # which calls the model
    assert [keywords["tilt"] for keywords in handed] == [2, 2, 2]
    assert attended == []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not torch.equal(encoded(model, batch, tilt=None), exact)
        encoded(model, batch, **dict.fromkeys({"deterministic", "num_items_in_batch"} & WITHOUT_EFFECT, 3))
    assert attended == ["clustered"] * 6


@pytest.mark.parametrize("where", ["forward", "attention function", "type of what models take"])
def test_a_new_keyword_is_noticed_wherever_transformers_names_it(
    where: str, module: Any, projected: dict[str, torch.Tensor], attended: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = modeling_bert.BertSelfAttention.forward

    def handing_on(self: Any, *args: Any, **kwargs: Any) -> Any:
        return forward(self, *args, tilt=2, **kwargs)

    options: dict[str, Any] = {"attention_mask": None, "tilt": 2}
    with monkeypatch.context() as newer:
        if where == "forward":
            newer.setattr(modeling_bert.BertSelfAttention, "forward", handing_on)
        elif where == "attention function":
            newer.setitem(AttentionInterface._global_mapping, "tilted", takes_tilt)
        else:
            newer.setitem(transformers.utils.TransformersKwargs.__annotations__, "tilt", "int")
        with pytest.warns(UserWarning, match="gets tilt="):
            attention("clustered", module, **projected, **options)
    assert attended == []
    attention("clustered", module, **projected, **options)
    assert attended == ["clustered"]


@pytest.mark.parametrize("model_type", ["bert", "modernbert", "qwen3"])
def test_a_keyword_that_nothing_attends_with_changes_nothing(model_type: str, attended: list[str]) -> None:
    """Sentence-transformers calls a model with what it gave before, which transformers passes to attention."""
    model = make_model(model_type) if model_type in SIZES else tiny_model(model_type)
    counts = {"clusters": 2, "topk": 1, "key_clusters": 2}
    if model_type in SIZES:
        counts = {"exact_keys": 6, "key_clusters": 1, "segment_length": 4, "window": 4}
    hf_effattn.patch_attention(model, "bi-clustered", min_length=0, **counts)
    inputs = torch.randint(5, 50, (2, N))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        expected, ran = model(inputs)[0], len(attended)
        assert torch.equal(model(inputs, token_embeddings=expected, tilt=2)[0], expected)
    assert 0 < 2 * ran == len(attended)


def test_an_input_too_short_for_the_method_keeps_the_keywords(
    attended: list[str], handed: list[dict[str, Any]]
) -> None:
    model = hf_effattn.patch_attention(tiny_model("bert"), "clustered")
    encoded(model, batch_for(model), deterministic=True)
    assert [keywords["deterministic"] for keywords in handed] == [True] * 3
    assert attended == []
