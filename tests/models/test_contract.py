"""What both families of models promise, CST and ClusterFormer: saving, padding, training, generation over a cache."""

import copy
import logging
import pickle
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from packaging.version import parse
from support import clusterformer_cases, cst_models
from support.closeness import assert_close_to_reference
from support.labels import labels_for
from transformers import AutoConfig

from hf_effattn.models import clusterformer, cst

# No text ends: without any end token the drafts of transformers before 5.8 fail.
NO_END = 10**6


@dataclass(frozen=True)
class Family:
    """The models of one architecture; `make(class, variant, **changes)` and `texts(B, N, seed)` make small ones."""

    name: str
    heads: dict[Any, Any]
    variants: tuple[str, ...]
    causal_variants: tuple[str, ...]
    make: Callable[..., Any]
    config: Callable[..., Any]
    texts: Callable[..., torch.Tensor]
    base: Any
    language_model: Any

    def __str__(self) -> str:
        return self.name


def clusterformer_model(model_class: Any, variant: str = "gated", **changes: Any) -> Any:
    """One of a variant, for which the encoder's cases have a name, or the decoder's."""
    settings = clusterformer_cases.VARIANTS | clusterformer_cases.STRICT
    return clusterformer_cases.tiny_model(model_class, **settings[variant] | changes)


CST = Family(
    "CST",
    cst_models.HEADS,
    tuple(cst_models.VARIANTS),
    tuple(cst_models.VARIANTS),
    cst_models.tiny_model,
    cst_models.tiny_config,
    cst_models.tokens,
    cst.CSTModel,
    cst.CSTForCausalLM,
)
CLUSTERFORMER = Family(
    "ClusterFormer",
    clusterformer_cases.HEADS,
    tuple(clusterformer_cases.VARIANTS),
    tuple(clusterformer_cases.STRICT),
    clusterformer_model,
    lambda variant: clusterformer_cases.tiny_config(**clusterformer_cases.VARIANTS[variant]),
    clusterformer_cases.texts,
    clusterformer.ClusterFormerModel,
    clusterformer.ClusterFormerForCausalLM,
)
FAMILIES = (CST, CLUSTERFORMER)
each_family = pytest.mark.parametrize("family", FAMILIES, ids=str)
each_variant = pytest.mark.parametrize(
    ("family", "variant"), [(family, variant) for family in FAMILIES for variant in family.variants], ids=str
)
each_causal_variant = pytest.mark.parametrize(
    ("family", "variant"), [(family, variant) for family in FAMILIES for variant in family.causal_variants], ids=str
)
some_causal_variants = pytest.mark.parametrize(
    ("family", "variant"),
    [
        *((CST, variant) for variant in ("paper", "three_levels", "global_tokens")),
        *((CLUSTERFORMER, variant) for variant in ("neural", "gated", "wide_window_of_single_words", "full")),
    ],
    ids=str,
)
each_head = pytest.mark.parametrize(
    ("family", "auto_class"),
    [(family, auto_class) for family in FAMILIES for auto_class in family.heads],
    ids=lambda param: str(param) if isinstance(param, Family) else param.__name__,
)
# Where variants differ in what layers hand on to each other.
TRAINED = (
    *((CST, "CSTForSequenceClassification", name) for name in ("paper", "global_tokens", "linear_pooling")),
    *((CST, "CSTForCausalLM", name) for name in ("paper", "three_levels", "mlp", "max_pooling")),
    *(
        (CLUSTERFORMER, "ClusterFormerForMaskedLM", name)
        for name in ("neural", "gated_centroids", "weighted_centroids", "lsh", "random", "full")
    ),
    (CLUSTERFORMER, "ClusterFormerForConditionalGeneration", "gated"),
)
LEARNED = (
    *((CST, "CSTForCausalLM", name) for name in CST.causal_variants),
    *((CST, "CSTForSequenceClassification", name) for name in CST.variants if name not in CST.causal_variants),
    *((CST, head, "paper") for head in ("CSTForMaskedLM", "CSTForTokenClassification", "CSTForQuestionAnswering")),
    *((CLUSTERFORMER, "ClusterFormerForSequenceClassification", name) for name in CLUSTERFORMER.variants),
    (CLUSTERFORMER, "ClusterFormerForCausalLM", "short_reach"),
    (CLUSTERFORMER, "ClusterFormerForConditionalGeneration", "gated"),
)
each_trained = pytest.mark.parametrize(("family", "name", "variant"), TRAINED, ids=str)


def inputs_for(family: Family, model_class: Any, B: int = 3) -> dict[str, torch.Tensor]:
    """A padded batch, with labels in the form that a head takes."""
    words = family.texts(B, 21)
    mask = torch.ones_like(words)
    mask[-1, 15:] = 0
    inputs = {"input_ids": words.masked_fill(mask == 0, 0), "attention_mask": mask}
    return inputs | labels_for(model_class, words, mask)


def class_of(family: Family, name: str) -> Any:
    return next(model_class for model_class in family.heads.values() if model_class.__name__ == name)


def gradients(model: Any, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(4)
    model(**inputs).loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.slow_except("*-AutoModelForCausalLM", "*-AutoModelForSequenceClassification", "*Seq2SeqLM")
@each_head
def test_saved_and_loaded_by_the_auto_class(family, auto_class, tmp_path):
    model_class = family.heads[auto_class]
    model = family.make(model_class)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.01 * torch.randn_like(parameter)
    model.save_pretrained(tmp_path)
    loaded = auto_class.from_pretrained(tmp_path, dtype=torch.float64).eval()
    assert type(loaded) is type(auto_class.from_config(model.config)) is model_class
    assert loaded.config.to_dict() == model.config.to_dict() | {"_name_or_path": str(tmp_path)}
    assert loaded.state_dict().keys() == model.state_dict().keys()
    assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in model.state_dict().items())
    inputs = inputs_for(family, model_class)
    assert_close_to_reference("output", loaded(**inputs)[0], model(**inputs)[0], rtol=1e-14)


@pytest.mark.slow_except("CST-AutoModel", "*MaskedLM", "*Seq2SeqLM", "CST-AutoModelForCausalLM")
@each_head
def test_base_models_and_heads_load_each_others_weights(family, auto_class, tmp_path):
    """The encoder of a translation model stayed random. A language model stays causal without its head."""
    head, words = family.heads[auto_class], family.texts()
    base = family.make(family.base, seed=7)
    base.save_pretrained(tmp_path / "base")
    model, info = head.from_pretrained(tmp_path / "base", dtype=torch.float64, output_loading_info=True)
    loaded = model.base_model.state_dict()
    assert all(torch.equal(loaded[name], x) for name, x in base.state_dict().items() if not name.startswith("pooler"))
    assert not [name for name in info["missing_keys"] if name.startswith(f"{model.base_model_prefix}.")]
    source = model.encoder if model.config.is_encoder_decoder else model  # its config is of two models
    source.save_pretrained(tmp_path / "head")
    again, info = family.base.from_pretrained(tmp_path / "head", dtype=torch.float64, output_loading_info=True)
    assert not [name for name in info["missing_keys"] if "pooler" not in name]
    assert_close_to_reference("states", again.eval()(words)[0], model.eval().base_model(words)[0], rtol=1e-14)


@each_variant
def test_a_config_survives_json(family, variant, tmp_path):
    config = family.config(variant)
    config.save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert type(loaded) is type(config)
    assert loaded.to_dict() | {"_name_or_path": ""} == config.to_dict() | {"_name_or_path": ""}


@each_head
def test_tuples_and_hidden_states(family, auto_class):
    """A config may ask for tuples."""
    model = family.make(family.heads[auto_class])
    inputs = inputs_for(family, type(model))
    expected = model(**inputs, output_hidden_states=True)
    states = expected.get("hidden_states", expected.get("encoder_hidden_states"))
    assert len(states) == 1 + model.config.num_hidden_layers
    if type(model) is family.base:
        assert torch.equal(states[-1], expected.last_hidden_state)
    assert torch.equal(model(**inputs, return_dict=False)[0], expected[0])
    model.config.return_dict = False
    output = model(**inputs)
    assert isinstance(output, tuple)
    assert torch.equal(output[0], expected[0])
    assert torch.equal(model(**inputs, return_dict=True)[0], expected[0])


@pytest.mark.slow_except("CST-paper|*-global_*|CST-m*|CST-full*|*-neural|*ed_centroids|*-wide_window|*-kmeans|*-lsh")
@each_variant
def test_a_padded_batch_gives_what_its_texts_give(family, variant):
    """Texts without padding, with some on the left, on the right and within, and of padding alone."""
    words = family.texts(6, 21)
    mask = torch.ones_like(words)
    mask[1, :5], mask[2, :19], mask[3, 13:], mask[5] = 0, 0, 0, 0
    mask[4] = torch.rand(21, generator=torch.Generator().manual_seed(0)) > 0.4
    for model_class in [family.base] + [family.language_model] * (variant in family.causal_variants):
        model = family.make(model_class, variant)
        padded = model(words, attention_mask=mask)[0]
        assert padded.isfinite().all()
        for row, kept in enumerate(mask[:5].bool()):
            alone = model(words[row : row + 1, kept])[0][0]
            assert_close_to_reference("padded", padded[row, kept], alone, rtol=2e-14)


@pytest.mark.slow_except(
    "CST-paper|*_levels|CST-*_tokens|CST-*pooling|CST-*_projections|*-neural|*-gated|*-dot|*-short_reach"
)
@each_causal_variant
def test_no_token_changes_what_comes_before_it(family, variant):
    """With every parameter moved from its start; of ClusterFormer later words change the order of sums."""
    model = family.make(family.language_model, variant, use_cache=False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    words, others, close = family.texts(2, 21), family.texts(2, 21, 99), 0 if family is CST else 1e-13
    before = model(words).logits
    for t in range(1, 21):
        last = 21 if t % 2 else t + 1  # one token, or all that follow
        after = model(torch.cat([words[:, :t], others[:, t:last], words[:, last:]], dim=1)).logits
        torch.testing.assert_close(after[:, :t], before[:, :t], rtol=0, atol=close)
        assert not torch.equal(after[:, t:], before[:, t:])


@pytest.mark.slow_except("CST-*_levels-False|CST-*_tokens-True|*-gated-False|*-weighted_*-True|*-neural-False")
@pytest.mark.parametrize("reentrant", [False, True])
@each_trained
def test_gradient_checkpointing_gives_the_same_gradients(family, name, variant, reentrant):
    """Reentrant, it once failed where positions came in a dict, and centroids got none: losses were in a tuple.

    Every parameter that is trained has one, or distributed training would wait for it for ever.
    """
    dropout = {"hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.2}
    model_class = class_of(family, name)
    model, inputs = family.make(model_class, variant, **dropout).train(), inputs_for(family, model_class)
    plain = gradients(model, inputs)
    assert plain.keys() == {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert model.is_gradient_checkpointing
    again = gradients(model, inputs)
    assert again.keys() == plain.keys()
    for parameter, grad in again.items():
        # Reentrant, the gradients of a shared weight are added in another order.
        torch.testing.assert_close(grad, plain[parameter], rtol=0, atol=2e-15 if reentrant else 0)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "name", "variant"), LEARNED[::2], ids=str)
def test_a_batch_is_learned_by_heart(family, name, variant):
    """With dropout, every parameter that is trained among it."""
    model_class = class_of(family, name)
    dropout = {"hidden_dropout_prob": 0.05, "attention_probs_dropout_prob": 0.05}
    model = family.make(model_class, variant, initializer_range=0.02, **dropout).float().train()
    inputs = inputs_for(family, model_class, 4)
    # At twice the rate Adam may leap once a batch is learned, where the rounding of a processor decides.
    optimizer = torch.optim.Adam([weight for weight in model.parameters() if weight.requires_grad], lr=0.005)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = model(**inputs).loss
        loss.backward()
        missing = [name for name, weight in model.named_parameters() if weight.requires_grad and weight.grad is None]
        assert not missing
        optimizer.step()
        losses.append(loss.item())
    assert median(losses[-10:]) < 0.6 * losses[0]  # single steps may leap


@pytest.mark.slow
@pytest.mark.parametrize(("family", "name", "variant"), TRAINED[::3], ids=str)
def test_compiles_as_one_graph(family, name, variant):
    """Random order and LSH once drew in every forward, from a generator that cannot be traced."""
    model_class = class_of(family, name)
    model, inputs = family.make(model_class, variant, use_cache=False), inputs_for(family, model_class)
    expected = gradients(model, inputs)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    model.zero_grad()
    compiled(**inputs).loss.backward()
    for parameter, grad in model.named_parameters():
        if parameter in expected:
            assert_close_to_reference(parameter, grad.grad, expected[parameter], rtol=1e-12)


@pytest.mark.parametrize("with_labels", [True, False])
@each_family
def test_the_loss_takes_labels_that_were_shifted_before(family, with_labels):
    """Under sequence and context parallelism the label of a part's last token lies in the next part."""
    model = family.make(family.language_model)
    words, shifted = family.texts(), family.texts(seed=5)
    shifted[0, 3] = -100
    output = model(words, labels=words if with_labels else None, shift_labels=shifted)
    expected = F.cross_entropy(output.logits.flatten(0, 1), shifted.flatten())
    torch.testing.assert_close(output.get("task_loss", output.loss).double(), expected, rtol=1e-6, atol=0)
    ahead = F.pad(words[:, 1:], (0, 1), value=-100)
    torch.testing.assert_close(model(words, shift_labels=ahead).loss, model(words, labels=words).loss)


@each_family
def test_word_embeddings_are_tied_to_the_head(family, tmp_path):
    for model_class in family.heads.values():
        model = family.make(model_class)
        if model.get_output_embeddings() is None:
            continue
        loose = family.make(model_class, tie_word_embeddings=False)
        assert loose.get_output_embeddings().weight is not loose.get_input_embeddings().weight
        model.resize_token_embeddings(71)
        model.save_pretrained(tmp_path / model_class.__name__)
        for tied in (model, model_class.from_pretrained(tmp_path / model_class.__name__)):
            assert tied.get_output_embeddings().weight is tied.get_input_embeddings().weight
            assert len(tied.get_output_embeddings().weight) == 71


def with_a_cache(model, words, mask, prompt, steps):
    """Logits `(B, N, vocabulary)`: a prompt at once, then `steps` columns a call, through the cache."""
    output = model(words[:, :prompt], attention_mask=mask[:, :prompt], use_cache=True)
    logits = [output.logits]
    for first in range(prompt, words.shape[1], steps):
        seen = slice(0, first + steps)
        cache = {"past_key_values": output.past_key_values, "use_cache": True}
        output = model(words[:, first : first + steps], attention_mask=mask[:, seen], **cache)
        logits.append(output.logits)
    assert output.past_key_values.get_seq_length() == words.shape[1]
    return torch.cat(logits, dim=1)


@pytest.mark.slow_except(
    "CST-paper|*-three_levels|*_tokens|*-slices_of_one|*-parallel|*-abs*|*-neural|*-gated|*-full|*-wide*"
)
@torch.no_grad()
@each_causal_variant
def test_cached_logits_equal_recomputation(family, variant):
    """Rows of different length, too: with padding before the text, and while decoding."""
    model, words = family.make(family.language_model, variant), family.texts(3, 21)
    whole = torch.ones_like(words)
    padded = whole.clone()
    padded[1, :5], padded[2, :2], padded[2, 14:16] = 0, 0, 0
    for mask, prompts in ((whole, ((1, 4), (4, 1), (13, 3))), (padded, ((9, 1),))):
        expected = model(words, attention_mask=mask, use_cache=False).logits[mask.bool()]
        for prompt, steps in prompts:
            actual = with_a_cache(model, words, mask, prompt, steps)[mask.bool()]
            assert_close_to_reference(f"prompt of {prompt}", actual, expected, rtol=1e-13)


@pytest.mark.slow_except("CST-*_tokens-3|CST-*_levels-1|*-gated-3|*-neural-1|*-full-1")
@pytest.mark.parametrize("beams", [1, 3])
@some_causal_variants
def test_generation_with_a_cache_equals_generation_without(family, variant, beams):
    model, words = family.make(family.language_model, variant), family.texts(2, 9)
    options = {"max_new_tokens": 12, "min_new_tokens": 12, "num_beams": beams, "do_sample": False}
    cached = model.generate(words, use_cache=True, **options)
    assert cached.shape == (2, 21)
    assert torch.equal(cached, model.generate(words, use_cache=False, **options))


@some_causal_variants
def test_generation_of_a_left_padded_batch_equals_each_text_alone(family, variant):
    model, words = family.make(family.language_model, variant), family.texts(3, 14)
    mask = torch.ones_like(words)
    mask[0, :5] = 0
    options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
    together = model.generate(words.masked_fill(mask == 0, 0), attention_mask=mask, **options)
    for row in range(3):
        alone = model.generate(words[row : row + 1, mask[row].bool()], **options)
        assert torch.equal(together[row, 14:], alone[0, -8:])


@torch.no_grad()
@each_family
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))])
def test_the_cache_follows_its_rows(family, copied):
    model, words = family.make(family.language_model), family.texts(3, 20)
    for order, change in (
        ([2, 0, 2], lambda cache: cache.reorder_cache(torch.tensor([2, 0, 2]))),
        (
            [2, 0, 2],
            lambda cache: (cache.batch_repeat_interleave(2), cache.batch_select_indices(torch.tensor([5, 0, 4]))),
        ),
    ):
        cache = copied(model(words[:, :12], use_cache=True).past_key_values)
        change(cache)
        actual = model(words[order, 12:], past_key_values=cache).logits
        assert_close_to_reference("rows", actual, model(words[order], use_cache=False).logits[:, 12:], rtol=1e-13)
        cache.reset()
        # Before 5.24 transformers zeroes what a `DynamicLayer` holds, and its length stays.
        if family.name == "CST" or parse(transformers.__version__) >= parse("5.24"):
            assert cache.get_seq_length() == 0


@pytest.mark.slow_except("CST-*_tokens-prompt*|CST-*_tokens-an*|*-gated-prompt*|*-gated-an*|*-full-prompt*")
@pytest.mark.parametrize("drafts", ["prompt lookup", "itself", "another model"])
@some_causal_variants
def test_assisted_generation_equals_greedy(family, variant, drafts):
    """CST once asked for a cache before the model had made one."""
    model = family.make(family.language_model, variant, eos_token_id=NO_END)
    assist = {
        "prompt lookup": {"prompt_lookup_num_tokens": 3},
        "itself": {"assistant_model": model},
        "another model": {"assistant_model": family.make(family.language_model, seed=3, eos_token_id=NO_END)},
    }
    words = family.texts(1, 11)
    mask = torch.ones_like(words)
    words[:, 7:], mask[:, :2] = words[:, 2:6], 0  # something to look up
    options = {"attention_mask": mask, "max_new_tokens": 16, "do_sample": False, "return_dict_in_generate": True}
    greedy = model.generate(words, **options)
    assisted = model.generate(words, **options, **assist[drafts])
    assert torch.equal(assisted.sequences, greedy.sequences)
    assert type(assisted.past_key_values) is type(greedy.past_key_values)
    assert assisted.past_key_values.get_seq_length() == 11 + 16 - 1


@pytest.fixture
def no_warnings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A warning, or a word of transformers that is said once a process, is an error."""

    def refuse(_: logging.Logger, message: str, *more: Any) -> None:
        raise AssertionError(message)

    monkeypatch.setattr(logging.Logger, "warning_once", refuse)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@torch.no_grad()
@pytest.mark.compatibility("transformers", "the cache by its new name", "runs")
@pytest.mark.usefixtures("no_warnings")
@each_head
def test_no_model_uses_a_deprecated_name(family, auto_class):
    """transformers warns of the old name of the cache from 5.24 on."""
    model = family.make(family.heads[auto_class], pad_token_id=0)
    words = family.texts(2, 12)
    output = model(input_ids=words, **{"decoder_input_ids": words[:, :4]} if model.config.is_encoder_decoder else {})
    if model.can_generate():
        assert output[1] is not None  # the cache, under whatever name
        assert len(model.generate(words, max_new_tokens=3, do_sample=False)) == 2
