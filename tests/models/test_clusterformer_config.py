"""ClusterFormer's configuration: defaults, mistakes, and what a stored one may be changed to as it is loaded."""

import warnings

import pytest
import torch
from support.closeness import assert_close_to_reference
from support.clusterformer_cases import HEADS, SIZES, texts, tiny_config, tiny_model
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForPreTraining,
    AutoModelForSeq2SeqLM,
)

from hf_effattn.models.clusterformer import (
    ClusterFormerConfig,
    ClusterFormerForCausalLM,
    ClusterFormerModel,
)
from hf_effattn.models.clusterformer.attention import SortedBlockSelfAttention


@pytest.mark.filterwarnings("ignore")  # of weights that have no use
@pytest.mark.parametrize("auto_class", HEADS, ids=lambda c: c.__name__)
def test_a_saved_model_is_loaded_with_another_assignment(auto_class, tmp_path):
    tiny_model(HEADS[auto_class], dtype=torch.float32).save_pretrained(tmp_path)
    loaded = auto_class.from_pretrained(tmp_path, assignment="lsh")
    assert not any("centroid" in name for name, _ in loaded.named_parameters())
    inputs = {"decoder_input_ids": texts()} if loaded.config.is_encoder_decoder else {}
    expected = loaded(texts(), **inputs)[0]
    loaded.save_pretrained(tmp_path / "again")
    again = auto_class.from_pretrained(tmp_path / "again")
    assert (again.config.assignment, again.config.gated) == ("lsh", False)
    assert torch.equal(again(texts(), **inputs)[0], expected)


@pytest.mark.parametrize(
    ("stored", "changes", "message"),
    [
        ({}, {"assignment": "kmean"}, "assignment must be one of 'neural', 'kmeans'"),
        ({}, {"sharpness": -1.0}, "sharpness must be above 0"),
        ({}, {"assignment": "lsh", "gated": True}, 'gated=True needs assignment="neural"'),
        ({"assignment": "lsh"}, {"attend_centroids": True}, 'attend_centroids=True needs assignment="neural"'),
        ({"assignment": "kmeans"}, {"is_decoder": True}, 'causal="strict" needs assignment'),
        ({"window_blocks": 1}, {"is_decoder": True}, "window_blocks of at least 2"),
    ],
    ids=str,
)
def test_what_replaces_a_stored_setting_is_checked(stored, changes, message, tmp_path):
    """Unchecked, K-means became a decoder that saw later words."""
    tiny_model(ClusterFormerModel, dtype=torch.float32, **stored).save_pretrained(tmp_path)
    for auto_class in (AutoModel, AutoConfig):
        with pytest.raises(ValueError, match=message):
            auto_class.from_pretrained(tmp_path, **changes)


@pytest.mark.parametrize(
    ("stored", "changes"),
    [
        ({}, {"gated": False}),
        ({"gated": False}, {"gated": True}),
        ({"assignment": "full"}, {"assignment": "neural"}),
        ({"assignment": "full"}, {"decoder_assignment": "neural"}),
        ({"assignment": "lsh"}, {"clusters": 20}),
        ({}, {"max_position_embeddings": 128}),
    ],
    ids=str,
)
def test_defaults_follow_what_replaces_a_stored_setting(stored, changes, tmp_path):
    """Stored as if they had been chosen, they left the paper's form without losses, its centroids frozen."""
    tiny_config(**stored).save_pretrained(tmp_path)
    changed, new = AutoConfig.from_pretrained(tmp_path, **changes), tiny_config(**stored | changes)
    assert changed.to_diff_dict() == new.to_diff_dict()
    assert changed.trains_centroids == new.trains_centroids


def test_what_was_chosen_outlives_a_change(tmp_path):
    chosen = {"gated": False, "cluster_loss_weight": 0.5, "sorting_loss_weight": 0.0, "block_length": 3}
    tiny_config(**chosen).save_pretrained(tmp_path)
    changed = AutoConfig.from_pretrained(tmp_path, clusters=20, sharpness=3.0)
    assert {name: getattr(changed, name) for name in chosen} == chosen


def test_gate_and_losses_by_default():
    """The gate alone trains the centroids, in the paper's form the losses, and what has none is not trained."""

    def chosen(**changes):
        config = tiny_config(**changes).settled()
        return config.gated, config.attend_centroids, config.cluster_loss_weight, config.sorting_loss_weight

    assert chosen() == (True, True, 0.0, 0.0)
    assert chosen(is_decoder=True) == chosen(is_encoder_decoder=True) == (True, False, 0.0, 0.0)
    assert chosen(cluster_loss_weight=0.5) == (True, True, 0.5, 0.0)
    assert chosen(attend_centroids=False) == (True, False, 0.0, 0.0)
    assert chosen(gated=False) == (False, False, 1e-4, 1e-4)
    assert chosen(gated=False, sorting_loss_weight=0.0) == (False, False, 1e-4, 0.0)
    assert chosen(gated=False, attend_centroids=True) == (False, True, 1e-4, 1e-4)
    assert chosen(assignment="lsh") == (False, False, 0.0, 0.0)
    assert chosen(assignment="full", decoder_assignment="neural") == (False, False, 1e-4, 1e-4)


@pytest.mark.slow_except("*-AutoModel", "*-AutoModelForSeq2SeqLM", "*-AutoModelForCausalLM")
@pytest.mark.parametrize("auto_class", HEADS, ids=lambda c: c.__name__)
@pytest.mark.parametrize("chosen", [None, False, True])
def test_models_without_a_decoder_attend_to_the_centroids_by_default(auto_class, chosen, tmp_path):
    """Translations were much worse with it; what was chosen stays, in the file too, and one config serves both."""
    config = tiny_config(attend_centroids=chosen)
    if auto_class is AutoModelForCausalLM:
        expected = False
    else:
        expected = auto_class is not AutoModelForSeq2SeqLM if chosen is None else chosen
    model = HEADS[auto_class](config)
    model.save_pretrained(tmp_path)
    for made in (model, auto_class.from_pretrained(tmp_path), auto_class.from_pretrained(tmp_path, sharpness=9.0)):
        assert made.config.attend_centroids is expected
        layers = [part for part in made.modules() if isinstance(part, SortedBlockSelfAttention)]
        of_encoder = layers[:2]  # a translation's decoder stands behind it
        assert [layer.attend_centroids for layer in layers] == [expected] * len(of_encoder) + [False] * len(layers[2:])
    assert config.attend_centroids is chosen


def test_attention_to_the_centroids_follows_what_replaces_a_stored_setting(tmp_path):
    """Stored as if it had been chosen, it would stay in what becomes the paper's form."""
    tiny_model(ClusterFormerModel, dtype=torch.float32).save_pretrained(tmp_path / "gated")
    assert not AutoModel.from_pretrained(tmp_path / "gated", gated=False).config.attend_centroids
    tiny_model(ClusterFormerModel, dtype=torch.float32, gated=False).save_pretrained(tmp_path / "paper")
    assert AutoModel.from_pretrained(tmp_path / "paper", gated=True).config.attend_centroids


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"clusters": 0}, "clusters must be at least 1"),
        ({"window_blocks": 0}, "window_blocks must be at least 1"),
        (
            {"assignment": "som"},
            "assignment must be one of 'neural', 'kmeans', 'lsh', 'random', 'identity', 'full', got 'som'",
        ),
        ({"similarity": "l2"}, "similarity must be one of"),
        ({"causal": "no"}, "causal must be one of"),
        ({"pooling": "max"}, "pooling must be one of"),
        ({"sharpness": 0.0}, "sharpness must be above 0"),
        ({"sharpness": float("inf")}, "sharpness must be above 0, and finite"),
        ({"cluster_loss_weight": -1.0}, "cluster_loss_weight must not be negative"),
        ({"sorting_loss_weight": float("nan")}, "sorting_loss_weight must not be negative, and finite, got nan"),
        ({"task_loss_weight": float("inf")}, "task_loss_weight must not be negative, and finite, got inf"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be at least 1, got 0"),
        ({"num_hidden_layers": -1}, "num_hidden_layers must be at least 1, got -1"),
        ({"decoder_layers": 0}, "decoder_layers must be at least 1"),
        ({"intermediate_size": 0}, "intermediate_size must be at least 1"),
        ({"vocab_size": 0}, "vocab_size must be at least 1"),
        ({"type_vocab_size": 0}, "type_vocab_size must be at least 1"),
        ({"hidden_act": "gleu"}, "hidden_act must be one of .*'gelu'.*, got 'gleu'"),
        ({"pad_token_id": 60}, "pad_token_id must be None or lie in 0 .. vocab_size - 1 = 59, got 60"),
        ({"pad_token_id": -1}, "pad_token_id must be None or lie in 0 .. vocab_size - 1 = 59, got -1"),
        ({"num_attention_heads": 5}, "multiple of num_attention_heads"),
        ({"add_cross_attention": True}, "needs is_decoder"),
        ({"gated": True, "assignment": "lsh"}, 'needs assignment="neural"'),
        ({"attend_centroids": True, "assignment": "lsh"}, 'attend_centroids=True needs assignment="neural"'),
        ({"attend_centroids": True, "is_decoder": True}, "attend_centroids=True needs is_decoder=False"),
        ({"attend_centroids": "often"}, "attend_centroids must be one of None, False, True, 'weighted', got 'often'"),
        ({"is_decoder": True, "assignment": "kmeans"}, 'causal="strict" needs assignment'),
        ({"is_decoder": True, "window_blocks": 1}, "window_blocks of at least 2"),
    ],
    ids=str,
)
def test_mistakes_in_a_config_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        tiny_config(**changes)


@pytest.mark.parametrize("auto_class", [AutoModelForMaskedLM, AutoModelForPreTraining], ids=lambda c: c.__name__)
def test_a_decoder_that_shall_fill_masked_words_in_is_warned_of(auto_class, tmp_path):
    """A saved language model stayed one, silently."""
    tiny_model(ClusterFormerForCausalLM, dtype=torch.float32).save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="is_decoder=True: masked words are filled in from the words before"):
        assert auto_class.from_pretrained(tmp_path).config.is_decoder
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        loaded = auto_class.from_pretrained(tmp_path, is_decoder=False)
    words = texts()
    other = words.clone()
    other[:, -1] += 1
    assert not torch.equal(loaded(words)[0][:, 0], loaded(other)[0][:, 0])


def test_an_encoder_that_is_made_a_decoder_attends_to_no_centroids(tmp_path):
    """They have seen later words."""
    tiny_model(ClusterFormerModel, dtype=torch.float32, attend_centroids=True).save_pretrained(tmp_path)
    loaded = AutoModel.from_pretrained(tmp_path, is_decoder=True)
    assert not loaded.config.attend_centroids
    config = tiny_config(attend_centroids=True)
    config.is_decoder = True  # checked by nobody
    words = texts()
    other = words.clone()
    other[:, -1] += 1
    for model in (loaded.double(), ClusterFormerModel(config).double().eval()):
        # Reporting, the strict form has updated centroids too; later words change the order of its sums.
        hidden, changed = (
            model(w, use_cache=False, output_clustering=True).last_hidden_state[:, :-1] for w in (words, other)
        )
        assert_close_to_reference("hidden", changed, hidden, rtol=1e-14)


@pytest.mark.parametrize("model_class", HEADS.values(), ids=lambda c: c.__name__)
def test_the_papers_similarity_warns_once_where_its_losses_diverge(model_class):
    """A translation model warned three times, twice of a line of its own: of its encoder and its decoder."""
    with pytest.warns(UserWarning, match="no bound") as record:
        model_class(ClusterFormerConfig(**SIZES, similarity="dot", gated=False))
    assert [warning.filename for warning in record] == [__file__]
    with pytest.warns(UserWarning, match="no bound"):
        tiny_config(assignment="full", decoder_assignment="neural", similarity="dot")
