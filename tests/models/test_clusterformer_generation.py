"""ClusterFormer decoders: no word sees a later one, cached generation equals recomputation, translation."""

import pytest
import torch
from support import cst_models
from support.clusterformer_cases import STRICT, padded_texts, texts, tiny_model
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    CompileConfig,
    EncoderDecoderModel,
)
from transformers.cache_utils import (
    Cache,
    DynamicCache,
    DynamicSlidingWindowLayer,
    EncoderDecoderCache,
    QuantizedCache,
    StaticCache,
)

from hf_effattn.models import CSTForCausalLM
from hf_effattn.models.clusterformer import (
    ClusterFormerForCausalLM,
    ClusterFormerForConditionalGeneration,
    ClusterFormerModel,
)

each_strict = pytest.mark.parametrize("variant", STRICT)
each_causal = pytest.mark.parametrize("causal", ["strict", "paper"])


def changed_before(model, words, t, run):
    """Largest change of any output before `t` when all words from `t` on are others."""
    other = words.clone()
    other[:, t:] = texts(*words.shape, seed=99)[:, t:]
    return (run(model, other)[:, :t] - run(model, words)[:, :t]).abs().max().item()


def logits_of(model, words):
    return model(words, use_cache=False).logits


def test_the_published_form_leaks():
    """The negative control: as published, later words move the clusters of earlier ones."""
    model = tiny_model(ClusterFormerForCausalLM, causal="paper")
    assert max(changed_before(model, texts(2, 30), t, logits_of) for t in range(1, 30)) > 1e-3


def test_the_published_form_hides_later_words_within_a_block():
    """With one block nothing can move, and what is left is the mask: exact causal attention."""
    model = tiny_model(ClusterFormerForCausalLM, causal="paper", clusters=1)
    assert max(changed_before(model, texts(2, 30), t, logits_of) for t in range(1, 30)) < 1e-13


@torch.no_grad()
@pytest.mark.parametrize("keep", [0, 1, 4, torch.tensor([8]), torch.tensor([2, 0, 5])], ids=str)
def test_logits_to_keep_are_a_number_of_last_words_or_places(keep):
    """A tensor was read as a number too: 8 gave the last eight words."""
    model = tiny_model(ClusterFormerForCausalLM)
    words = texts(2, 9)
    everything = model(words).logits
    expected = everything[:, -keep:] if isinstance(keep, int) else everything[:, keep]
    torch.testing.assert_close(model(words, logits_to_keep=keep).logits, expected, rtol=0, atol=4e-15)


@each_strict
@pytest.mark.parametrize("masked", [False, True])
def test_a_static_cache_is_attended_to_as_far_as_it_is_filled(variant, masked):
    """What it returns is as long as what it can hold: full attention once took its empty places for the last words."""
    model = tiny_model(ClusterFormerForCausalLM, **STRICT[variant])
    words = texts(2, 26)
    mask = torch.ones_like(words)
    if masked:
        mask[0, :4] = 0
    expected = model(words, attention_mask=mask, use_cache=False).logits
    cache = StaticCache(config=model.config, max_cache_len=40)
    for _ in range(2):
        for start, end in ((0, 10), (10, 11), (11, 15), (15, 26)):
            options = {"past_key_values": cache} | ({"attention_mask": mask[:, :end]} if masked else {})
            output = model(words[:, start:end], **options)
            counted = mask[:, start:end].bool()
            torch.testing.assert_close(output.logits[counted], expected[:, start:end][counted], rtol=0, atol=1.5e-14)
        assert output.past_key_values is cache
        cache.reset()


@torch.no_grad()
def test_a_quantized_cache_is_refused():
    model = tiny_model(ClusterFormerForCausalLM)
    cache = QuantizedCache.__new__(QuantizedCache)  # it asks for a package of its own when it is made
    with pytest.raises(ValueError, match="a QuantizedCache keeps no clusters"):
        model(texts(), past_key_values=cache)


def test_words_beyond_a_static_cache_are_named():
    model = tiny_model(ClusterFormerForCausalLM)
    cache = StaticCache(config=model.config, max_cache_len=12)
    model(texts(2, 10), past_key_values=cache)
    with pytest.raises(ValueError, match="10 words and 3 more, but the cache holds at most 12"):
        model(texts(2, 3), past_key_values=cache)
    assert model(texts(2, 2), past_key_values=cache).logits.isfinite().all()


def test_labels_beyond_256_survive_a_bfloat16_cache():
    """bfloat16 holds integers up to 256 only."""
    model = tiny_model(ClusterFormerForCausalLM, dtype=torch.bfloat16, clusters=700)
    cache = model(texts(), use_cache=True).past_key_values
    layer, labels = cache.layers[0], torch.arange(60)[None] * 11 + 40
    assert layer.keys.dtype == torch.bfloat16
    assert torch.equal(layer.add_clusters(labels, None, 0)[0], labels)


@pytest.mark.parametrize("kind", [DynamicCache, StaticCache])
def test_keys_and_values_in_a_cache_have_the_usual_shapes(kind):
    """They held the clusters too: transformers asserts the width of a head, 12 here."""
    model = tiny_model(ClusterFormerForCausalLM)
    options = {"config": model.config, "max_cache_len": 11} if kind is StaticCache else {}
    cache = kind(**options)
    model(texts(3, 11), past_key_values=cache)
    assert isinstance(cache, kind)
    assert [layer.keys.shape for layer in cache.layers] == [(3, 2, 11, 12)] * 2
    assert [layer.values.shape for layer in cache.layers] == [(3, 2, 11, 12)] * 2
    translation = tiny_model(ClusterFormerForConditionalGeneration)
    caches = translation(texts(3, 11), decoder_input_ids=texts(3, 5), use_cache=True).past_key_values
    assert isinstance(caches, EncoderDecoderCache)
    assert {layer.keys.shape for layer in caches.self_attention_cache.layers} == {(3, 2, 5, 12)}
    assert {layer.keys.shape for layer in caches.cross_attention_cache.layers} == {(3, 2, 11, 12)}


def test_caches_without_room_for_clusters_are_named():
    model = tiny_model(ClusterFormerForCausalLM)
    cache = DynamicCache()
    cache.update(torch.zeros(2, 2, 7, 12), torch.zeros(2, 2, 7, 12), 0)
    with pytest.raises(ValueError, match="7 words of another model, without their clusters"):
        model(texts(2, 3), past_key_values=cache)
    cache = Cache(layers=[DynamicSlidingWindowLayer(5), DynamicSlidingWindowLayer(5)])
    with pytest.raises(ValueError, match="layers of type DynamicSlidingWindowLayer, which keep no clusters"):
        model(texts(2, 3), past_key_values=cache)


@pytest.mark.parametrize("head", [ClusterFormerForCausalLM, CSTForCausalLM])
def test_a_cache_goes_by_both_of_its_names(head):
    """transformers calls it `cache` from 5.24 on."""
    model = cst_models.tiny_model(head) if head is CSTForCausalLM else tiny_model(head).double()
    words = texts(2, 9).clamp(max=49)  # of the smaller vocabulary
    expected = model(words).logits[:, 6:]
    for name in ("cache", "past_key_values"):
        cache = model(words[:, :6], use_cache=True).past_key_values
        after = model(words[:, 6:], **{name: cache}).logits
        torch.testing.assert_close(after, expected, rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match="not both"):
        model(words[:, 6:], cache=cache, past_key_values=cache)
    assert {"cache", "past_key_values"} <= {*model.config.keys_to_ignore_at_inference}


@pytest.mark.slow_except("1-None-neural|*-gated|3-None-short_reach|1-4-wide*")
@each_strict
@pytest.mark.parametrize(("beams", "chunk"), [(1, None), (3, None), (1, 4)])
def test_generation_with_a_static_cache_equals_generation_without(variant, beams, chunk):
    """transformers makes a mask of four dimensions for such a cache, and would compile the model."""
    model = tiny_model(ClusterFormerForCausalLM, **STRICT[variant])
    words, mask = padded_texts("left", N=14, padding=5)
    options = {"attention_mask": mask, "max_new_tokens": 8, "num_beams": beams, "do_sample": False}
    expected = model.generate(words, use_cache=False, **options)
    everywhere = CompileConfig(backend="eager")
    everywhere._compile_all_devices = True  # else it would compile on a GPU only
    static = {"cache_implementation": "static", "prefill_chunk_size": chunk, "compile_config": everywhere}
    torch._dynamo.utils.counters.clear()
    assert torch.equal(model.generate(words, **static, **options), expected)
    assert not torch._dynamo.utils.counters["frames"]
    assert torch.equal(model.generate(words[1:], **static, **options | {"attention_mask": None}), expected[1:])


def test_the_published_form_generates_without_a_cache_and_refuses_one():
    model = tiny_model(ClusterFormerForCausalLM, causal="paper")
    words = texts(2, 9)
    options = {"max_new_tokens": 5, "do_sample": False}
    expected = words
    for _ in range(5):
        expected = torch.cat([expected, model(expected).logits[:, -1].argmax(dim=-1, keepdim=True)], dim=1)
    generated = model.generate(words, use_cache=True, eos_token_id=None, **options)
    assert torch.equal(generated, expected)
    assert model(words).past_key_values is None
    with pytest.raises(ValueError, match="moves earlier words too"):
        model(words, past_key_values=DynamicCache())


def test_a_language_model_is_a_decoder_whatever_its_config_says():
    model = tiny_model(ClusterFormerForCausalLM)
    assert model.config.is_decoder
    with pytest.raises(ValueError, match='causal="strict" needs assignment'):
        tiny_model(ClusterFormerForCausalLM, assignment="kmeans")


@pytest.mark.slow_except("1-{'gated': False}-strict|1-{'gated': True}-paper|3-{'gated': True}-strict|1-*'full'}-paper")
@each_causal
@pytest.mark.parametrize(
    "changes",
    [
        {"gated": False},
        {"gated": True},
        {"attend_centroids": True},
        {"assignment": "full"},
        {"assignment": "kmeans", "decoder_assignment": "full"},
    ],
    ids=str,
)
@pytest.mark.parametrize("beams", [1, 3])
def test_translation_with_a_cache_equals_translation_without(causal, changes, beams):
    model = tiny_model(ClusterFormerForConditionalGeneration, causal=causal, decoder_layers=3, **changes)
    words, mask = padded_texts("right")
    options = {"attention_mask": mask, "max_new_tokens": 10, "num_beams": beams, "do_sample": False}
    expected = model.generate(words, use_cache=False, **options)
    assert expected.shape[1] > 2
    assert torch.equal(model.generate(words, use_cache=True, **options), expected)
    if causal == "strict":
        assert torch.equal(model.generate(words, cache_implementation="static", **options), expected)


@torch.no_grad()
@pytest.mark.parametrize("beams", [1, 3])
def test_a_language_model_with_cross_attention_writes_in_an_encoder_decoder(beams):
    """It took the encoder's states in **kwargs, where transformers does not look: `generate` refused them."""
    decoder = tiny_model(ClusterFormerForCausalLM, is_decoder=True, add_cross_attention=True)
    encoder = tiny_model(ClusterFormerModel, seed=1)
    words, mask = padded_texts("right")
    states = encoder(words, attention_mask=mask).last_hidden_state
    of_encoder = {"encoder_hidden_states": states, "encoder_attention_mask": mask}
    options = {"max_new_tokens": 8, "do_sample": False, "num_beams": beams}
    start = torch.full((3, 1), 2)
    expected = decoder.generate(start, **of_encoder, use_cache=False, **options)
    assert torch.equal(decoder.generate(start, **of_encoder, **options), expected)
    others = of_encoder | {"encoder_hidden_states": -states}
    assert not torch.equal(decoder.generate(start, **others, **options), expected)
    both = EncoderDecoderModel(encoder=encoder, decoder=decoder).eval()
    options |= {"decoder_start_token_id": 2, "pad_token_id": 0, "eos_token_id": 3}
    assert torch.equal(both.generate(words, attention_mask=mask, **options), expected)


@pytest.mark.parametrize("assisted", [{"prompt_lookup_num_tokens": 3}, {"assistant_model": True}], ids=str)
def test_assisted_generation_needs_the_strict_form(assisted):
    """transformers said that use_cache=True was missing, which this form cannot have."""
    model = tiny_model(ClusterFormerForCausalLM, causal="paper")
    with pytest.raises(ValueError, match='needs a cache, and causal="paper" has none'):
        model.generate(texts(1), **{name: model if value is True else value for name, value in assisted.items()})


@torch.no_grad()
def test_translation_with_static_caches_larger_than_source_and_target():
    model = tiny_model(ClusterFormerForConditionalGeneration)
    words, mask = padded_texts("right")
    targets = texts(3, 9, seed=4)
    expected = model(words, attention_mask=mask, decoder_input_ids=targets, use_cache=False).logits
    cache = EncoderDecoderCache(*(StaticCache(config=model.config, max_cache_len=length) for length in (20, 30)))
    for part in (slice(0, 5), slice(5, 6), slice(6, 9)):
        options = {"attention_mask": mask, "past_key_values": cache}
        logits = model(words, decoder_input_ids=targets[:, part], **options).logits
        torch.testing.assert_close(logits, expected[:, part], rtol=0, atol=1e-14)


@each_causal
def test_an_encoder_that_sorts_and_a_decoder_that_does_not(causal):
    """The decoder is that of the Transformer; the losses of the clusters are those of the encoder."""
    settings = {"causal": causal, "gated": True, "decoder_assignment": "full", "num_hidden_layers": 2}
    model = tiny_model(ClusterFormerForConditionalGeneration, **settings)
    assert [layer.sorting is None for layer in model.decoder.layers] == [True, True]
    assert [layer.sorting is None for layer in model.encoder.layers] == [False, False]
    words, targets = texts(2, 11), texts(2, 9, seed=4)
    output = model(words, labels=targets)
    encoded = model.encoder(words, output_clustering=True)
    assert torch.equal(output.cluster_loss, encoded.cluster_loss)
    output.loss.backward()
    assert all(p.grad is not None for name, p in model.named_parameters() if "centroid" in name)
    again = type(model)(type(model.config)(**model.config.to_dict())).double()
    again.load_state_dict(model.state_dict())
    assert torch.equal(again.eval()(words, labels=targets).logits, output.logits)


@each_causal
def test_a_padded_source_changes_no_translation(causal):
    model = tiny_model(ClusterFormerForConditionalGeneration, causal=causal)
    words, mask = padded_texts("right")
    targets = texts(3, 8, seed=4)
    together = model(words, attention_mask=mask, decoder_input_ids=targets).logits
    for b in range(3):
        alone = model(words[b : b + 1, mask[b].bool()], decoder_input_ids=targets[b : b + 1]).logits
        torch.testing.assert_close(together[b : b + 1], alone, rtol=0, atol=1e-14)


def test_a_strict_decoder_of_a_translation_sees_no_later_word_but_the_whole_source():
    model = tiny_model(ClusterFormerForConditionalGeneration)
    source = texts(2, 11)

    def run(model, targets):
        return model(source, decoder_input_ids=targets, use_cache=False).logits

    assert max(changed_before(model, texts(2, 20, seed=4), t, run) for t in range(1, 20)) < 1e-13
    other = source.clone()
    other[:, -1] += 1
    targets = texts(2, 20, seed=4)
    change = model(other, decoder_input_ids=targets).logits - run(model, targets)
    assert (change.abs().amax(dim=-1) > 0).all()


@each_causal
@pytest.mark.parametrize("assignment", ["neural", "full"])
def test_padded_labels_change_nothing(causal, assignment):
    """The decoder's words are made of the labels, and so is what of them is padding."""
    model = tiny_model(ClusterFormerForConditionalGeneration, causal=causal, decoder_assignment=assignment)
    source, labels = texts(2, 11), texts(2, 16, seed=4)
    labels[0, 7:] = -100
    padded = model(source, labels=labels)
    # Stock collators make the decoder's words and no mask of them.
    collated = model(source, labels=labels, decoder_input_ids=model.prepare_decoder_input_ids_from_labels(labels))
    assert torch.equal(collated.logits, padded.logits)
    single = [model(source[:1], labels=labels[:1, :7]), model(source[1:], labels=labels[1:])]
    for alone, logits in zip(single, padded.logits, strict=True):
        torch.testing.assert_close(logits[: alone.logits.shape[1]], alone.logits[0], rtol=0, atol=1e-14)
    mean = (7 * single[0].task_loss + 16 * single[1].task_loss) / 23
    torch.testing.assert_close(padded.task_loss, mean, rtol=1e-15, atol=0)
    for name in ("cluster_loss", "sorting_loss", "largest_cluster", "empty_clusters", "word_cosine"):
        mean = (getattr(single[0], name) + getattr(single[1], name)) / 2
        torch.testing.assert_close(getattr(padded, name), mean, rtol=1e-15, atol=0)


def test_a_label_that_does_not_count_hides_no_word_before_it():
    model = tiny_model(ClusterFormerForConditionalGeneration)
    labels = torch.tensor([[7, -100, 9]])
    by_inputs = model(texts(1, 11), decoder_input_ids=torch.tensor([[2, 7, 0]]))
    assert torch.equal(model(texts(1, 11), labels=labels).logits, by_inputs.logits)


def test_what_is_set_in_the_config_later_holds():
    """Encoder and decoder have configs of their own."""
    model = tiny_model(ClusterFormerForConditionalGeneration)
    words = texts(2, 9)
    assert model(words, labels=words).past_key_values is not None
    model.config.use_cache, model.config.output_hidden_states = False, True
    output = model(words, labels=words)
    assert output.past_key_values is None
    assert len(output.encoder_hidden_states) == len(output.decoder_hidden_states) == 1 + model.config.num_hidden_layers


def test_token_types_and_positions_are_those_of_the_source():
    """The decoder got them too once, and they did not fit its words."""
    model = tiny_model(ClusterFormerForConditionalGeneration)
    words, targets = texts(2, 11), texts(2, 8, seed=4)
    places = {
        "token_type_ids": (torch.arange(11) > 5).long().expand(2, -1),
        "position_ids": torch.arange(20, 31).expand(2, -1),
    }
    encoded = model.encoder(words, **places)
    expected = model(encoder_outputs=encoded, labels=targets).logits
    assert torch.equal(model(words, labels=targets, **places).logits, expected)
    generated = model.generate(words, max_new_tokens=8, **places)
    assert torch.equal(generated, model.generate(encoder_outputs=encoded, max_new_tokens=8))


def test_labels_are_moved_one_place_for_the_decoder():
    model = tiny_model(ClusterFormerForConditionalGeneration)
    labels = torch.tensor([[7, 8, 9, -100]])
    assert model.prepare_decoder_input_ids_from_labels(labels).tolist() == [[2, 7, 8, 9]]
    words = texts(1, 11)
    by_labels = model(words, labels=labels)
    by_inputs = model(words, decoder_input_ids=torch.tensor([[2, 7, 8, 9]]))
    counted = slice(0, 3)  # the fourth has no label, so its word is padding
    assert torch.equal(by_labels.logits[:, counted], by_inputs.logits[:, counted])


def test_embeddings_that_are_not_tied_are_resized_apart():
    """The decoder's were once replaced by the encoder's."""
    model = tiny_model(ClusterFormerForConditionalGeneration, tie_word_embeddings=False)
    parts = model.encoder, model.decoder
    before = [part.get_input_embeddings().weight.clone() for part in parts]
    words = texts(2, 11)
    expected = model(words, labels=words).logits
    model.resize_token_embeddings(71)
    for part, weight in zip(parts, before, strict=True):
        assert torch.equal(part.get_input_embeddings().weight[:60], weight)
    assert [len(part.get_input_embeddings().weight) for part in parts] == [71, 71]
    assert torch.equal(model(words, labels=words).logits[..., :60], expected)
    assert model(words, labels=torch.full_like(words, 70)).loss.isfinite()


@pytest.mark.parametrize("tied", [True, False])
def test_the_parts_of_a_resized_translation_model_know_their_size(tied, tmp_path):
    model = tiny_model(ClusterFormerForConditionalGeneration, dtype=torch.float32, tie_word_embeddings=tied)
    model.resize_token_embeddings(70, pad_to_multiple_of=8)
    assert [part.config.vocab_size for part in (model, model.encoder, model.decoder)] == [72, 72, 72]
    model.encoder.save_pretrained(tmp_path)
    encoder = ClusterFormerModel.from_pretrained(tmp_path, add_pooling_layer=False)
    assert torch.equal(encoder.get_input_embeddings().weight, model.encoder.get_input_embeddings().weight)


@pytest.mark.parametrize("auto_class", [AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification])
def test_a_translation_model_is_loaded_as_nothing_else(auto_class, tmp_path):
    """Its weights have other names, so that every one of what was loaded was random."""
    model = tiny_model(ClusterFormerForConditionalGeneration, dtype=torch.float32)
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="AutoModelForSeq2SeqLM"):
        auto_class.from_pretrained(tmp_path)
    loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    words = texts(2, 11)
    assert torch.equal(loaded(words, labels=words).logits, model(words, labels=words).logits)
    model.encoder.save_pretrained(tmp_path / "encoder")
    encoder = ClusterFormerModel.from_pretrained(tmp_path / "encoder", add_pooling_layer=False)
    assert torch.equal(encoder(words)[0], model.encoder(words)[0])
