"""ClusterFormer encoders: the definition, padding, losses, gradients, saving, the variants of the paper's tables."""

import copy
import inspect
from math import exp, log, sqrt, ulp

import pytest
import torch
import torch.nn.functional as F
from support.clusterformer_cases import HEADS, VARIANTS, padded_texts, texts, tiny_config, tiny_model
from support.labels import labels_for
from transformers import (
    AutoModel,
)

from hf_effattn.models.clusterformer import (
    ClusterFormerForCausalLM,
    ClusterFormerForConditionalGeneration,
    ClusterFormerForMaskedLM,
    ClusterFormerForPreTraining,
    ClusterFormerForQuestionAnswering,
    ClusterFormerForSequenceClassification,
    ClusterFormerModel,
)
from hf_effattn.models.clusterformer.attention import CentroidWeight
from hf_effattn.models.clusterformer.sorting import cluster_loss, cluster_statistics, sorting_loss

# Float64 in another order of sums, numbers of about 4: three times what was seen.
ROUNDING = {"rtol": 0, "atol": 1e-14}
each_variant = pytest.mark.parametrize("variant", VARIANTS)
# Those whose attention is written as loops, too.
WITH_LOOPS = ("neural", "gated", "centroids", "gated_centroids", "weighted_centroids", "wide_window")


def attention_with_loops(words, layer, centroids, config):
    """Eq. 2 to 10 of one text and one layer in plain Python: lists in, lists out, and the updated centroids.

    Then what is ours, the gate and the attention to the centroids, where the config has it.
    """
    k, heads = config.clusters, config.num_attention_heads
    D = config.hidden_size // heads

    def dot(a, b):
        return sum(x * y for x, y in zip(a, b, strict=True))

    def through(linear, row):
        bias = [0.0] * linear.out_features if linear.bias is None else linear.bias.tolist()
        return [dot(weights, row) + b for weights, b in zip(linear.weight.tolist(), bias, strict=True)]

    z = [through(layer.sorting.centroid_projection, x) for x in words]

    def phi(a, b):
        return config.sharpness * dot(a, b) / sqrt(dot(a, a) * dot(b, b))

    N = len(words)
    total = [sum(exp(phi(c, zj)) for zj in z) for c in centroids]
    u = [[exp(phi(centroids[i], z[j])) / total[i] for j in range(N)] for i in range(k)]
    updated = [[sum(u[i][j] * z[j][a] for j in range(N)) for a in range(len(z[0]))] for i in range(k)]
    labels = [max(range(k), key=lambda i: u[i][j]) for j in range(N)]
    shares = []
    for zj in z:
        raw = [exp(phi(c, zj)) for c in centroids]
        shares.append([r / sum(raw) for r in raw])

    ranked = sorted(range(N), key=lambda j: (labels[j], j))
    w = -(-N // k)
    blocks = [ranked[start : start + w] for start in range(0, N, w)]
    q, key, v = (
        [through(part, x) for x in words]
        for part in (layer.attention.query, layer.attention.key, layer.attention.value)
    )
    mixed = [[] for _ in range(N)]
    for h in range(heads):
        part = slice(h * D, (h + 1) * D)
        for i, block in enumerate(blocks):
            steps = range(min(config.window_blocks, len(blocks)))
            seen = [t for step in steps for t in blocks[(i - step) % len(blocks)]]
            for j in block:
                gate = [log(dot(shares[j], shares[t]) + 1e-4) if config.gated else 0.0 for t in seen]
                raw = [exp(dot(q[j][part], key[t][part]) / sqrt(D) + g) for t, g in zip(seen, gate, strict=True)]
                mixed[j] += [
                    sum(r * v[t][part][a] for r, t in zip(raw, seen, strict=True)) / sum(raw) for a in range(D)
                ]
        if config.attend_centroids:
            keys, values = ([through(p, c) for c in updated] for p in (layer.attention.key, layer.attention.value))
            weighted = config.attend_centroids == "weighted"
            weight = layer.attention.centroid_weight.weight.tolist()[h] if weighted else 1.0
            for j in range(N):
                raw = [exp(dot(q[j][part], c[part]) / sqrt(D)) for c in keys]
                for a in range(D):
                    of_centroids = sum(r * c[part][a] for r, c in zip(raw, values, strict=True)) / sum(raw)
                    mixed[j][h * D + a] += weight * of_centroids
    return [through(layer.attention.output, row) for row in mixed], updated, labels


@pytest.mark.parametrize("variant", WITH_LOOPS)
@pytest.mark.parametrize("N", [1, 3, 23])
def test_a_layer_equals_the_definition_written_as_loops(variant, N):
    model = tiny_model(ClusterFormerModel, **VARIANTS[variant])
    words = torch.randn(1, N, 24, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    layer = model.layers[0]
    with torch.no_grad():
        layer.sorting.centroid_projection.weight += 0.1 * torch.randn(24, 24, dtype=torch.float64)
        clustered = layer.sorting(words, model.centroids.weight[None], None, True)
        actual = layer.attention(words, clustered, None, None)
        expected, updated, labels = attention_with_loops(
            words[0].tolist(), layer, model.centroids.weight.tolist(), model.config
        )
    assert clustered.labels[0].tolist() == labels
    torch.testing.assert_close(clustered.updated[0], torch.tensor(updated, dtype=torch.float64), **ROUNDING)
    torch.testing.assert_close(actual[0], torch.tensor(expected, dtype=torch.float64), **ROUNDING)


def test_updated_centroids_go_to_the_next_layer():
    """The second layer's labels are those of the first layer's updated centroids."""
    model = tiny_model(ClusterFormerModel)
    handed = []
    for layer in model.layers:
        layer.register_forward_hook(lambda module, inputs, output: handed.append((inputs[1], output[1])))
    model(texts())
    assert torch.equal(handed[0][0][0], model.centroids.weight)
    assert torch.equal(handed[1][0], handed[0][1])
    assert not torch.equal(handed[1][0][0], handed[1][0][1])  # another text, other centroids


@pytest.mark.parametrize("side", ["none", "right", "left"])
def test_one_cluster_is_full_attention(side):
    model = tiny_model(ClusterFormerModel, clusters=1, attend_centroids=False)
    words = torch.randn(2, 23, 24, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    mask = None
    if side != "none":
        mask = torch.ones(2, 23, dtype=torch.bool)
        mask[0, slice(0, 9) if side == "left" else slice(14, 23)] = False
    attention = model.layers[0].attention
    clustered = model.layers[0].sorting(words, model.centroids.weight.expand(2, -1, -1), mask, False)
    actual = attention(words, clustered, mask, None)
    q, k, v = (attention.split(part(words)) for part in (attention.query, attention.key, attention.value))
    seen = None if mask is None else mask[:, None, None, :]
    exact = attention.join(F.scaled_dot_product_attention(q, k, v, attn_mask=seen))
    counts = torch.ones(2, 23, dtype=torch.bool) if mask is None else mask
    torch.testing.assert_close(actual[counts], exact[counts], **ROUNDING)


@pytest.mark.parametrize("decoder", [False, True])
@pytest.mark.parametrize("side", ["none", "right", "left"])
def test_full_attention_is_that_of_one_cluster(side, decoder):
    """The Transformer to compare with: the same weights, and what sorting into a single block gives."""
    settings = {"is_decoder": decoder, "causal": "paper"}
    full = tiny_model(ClusterFormerModel, assignment="full", **settings)
    sorted_words = tiny_model(ClusterFormerModel, assignment="identity", clusters=1, **settings)
    assert full.state_dict().keys() == sorted_words.state_dict().keys()
    words, mask = (texts(), None) if side == "none" else padded_texts(side)
    counts = slice(None) if mask is None else mask.bool()
    actual, expected = (model(words, attention_mask=mask).last_hidden_state[counts] for model in (full, sorted_words))
    torch.testing.assert_close(actual, expected, **ROUNDING)


@pytest.mark.parametrize("pooling", ["mean", "first"])
@pytest.mark.parametrize("side", ["right", "left"])
def test_padding_changes_no_logits_and_no_loss_of_a_text(pooling, side):
    model = tiny_model(ClusterFormerForSequenceClassification, pooling=pooling)
    words, mask = padded_texts(side)
    labels = torch.tensor([1, 0, 1])
    padded = model(words, attention_mask=mask, labels=labels)
    single = [model(words[b : b + 1, mask[b].bool()], labels=labels[b : b + 1]) for b in range(3)]
    torch.testing.assert_close(padded.logits, torch.cat([alone.logits for alone in single]), **ROUNDING)
    for name in ("loss", "cluster_loss", "sorting_loss", "largest_cluster", "empty_clusters", "word_cosine"):
        mean = torch.stack([getattr(alone, name) for alone in single]).mean()
        torch.testing.assert_close(getattr(padded, name), mean, **ROUNDING)


@each_variant
@pytest.mark.parametrize("N", [1, 3, 7, 26])
def test_any_length(variant, N):
    """Fewer words than clusters, and numbers that are no multiple of it."""
    model = tiny_model(ClusterFormerForMaskedLM, **VARIANTS[variant])
    words = texts(N=N)
    output = model(words, labels=words)
    output.loss.backward()
    assert output.loss.isfinite()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("assignment", ["neural", "full"])
def test_a_text_without_words_harms_no_other(assignment):
    model = tiny_model(ClusterFormerForSequenceClassification, assignment=assignment)
    words, mask = padded_texts("right")
    mask[0] = 0
    output = model(words, attention_mask=mask, labels=torch.tensor([0, 1, 0]))
    output.loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
    others = model(words[1:], attention_mask=mask[1:], labels=torch.tensor([1, 0]))
    torch.testing.assert_close(output.logits[1:], others.logits, **ROUNDING)
    for name in ("cluster_loss", "sorting_loss", "largest_cluster", "empty_clusters", "word_cosine"):
        torch.testing.assert_close(getattr(output, name), getattr(others, name), **ROUNDING)


@pytest.mark.parametrize("cosine", [True, False])
def test_losses_and_statistics_by_hand(cosine):
    words = torch.tensor([[[3.0, 4.0], [1.0, 0.0], [9.0, 9.0]], [[0.0, 2.0], [0.0, 1.0], [0.0, -1.0]]]).double()
    updated = torch.tensor([[[1.0, 0.0], [0.0, 2.0], [3.0, 4.0]], [[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]]]).double()
    labels = torch.tensor([[2, 0, 0], [1, 1, 2]])
    mask = torch.tensor([[True, True, False], [True, True, True]])
    if cosine:
        l1 = -((1 + 1) / 2 + (1 + 1 + 0) / 3) / 2
        l2 = -((0 + 0.8 + 0.6) / 3 + (0 + 0 - 1) / 3) / 2
    else:
        l1 = -((25 + 1) / 2 + (2 + 1 + 0) / 3) / 2
        l2 = -((0 + 8 + 3) / 3 + (0 + 0 - 1) / 3) / 2
    torch.testing.assert_close(cluster_loss(words, updated, labels, mask, cosine).item(), l1, rtol=0, atol=ulp(l1))
    torch.testing.assert_close(sorting_loss(updated, cosine, mask).item(), l2, rtol=0, atol=2.3e-16)
    largest, empty, word_cosine = cluster_statistics(words, labels, 3, mask)
    torch.testing.assert_close(largest.item(), (1 / 2 + 2 / 3) / 2, rtol=0, atol=1.2e-16)
    torch.testing.assert_close(empty.item(), (1 / 3 + 1 / 3) / 2, rtol=0, atol=6e-17)
    torch.testing.assert_close(word_cosine.item(), (0.6 + (1 - 1 - 1) / 3) / 2, rtol=0, atol=4e-16)


@pytest.mark.parametrize("cosine", [True, False])
def test_gradients_of_the_cluster_loss_are_those_of_its_definition(cosine):
    generator = torch.Generator().manual_seed(0)
    words, updated = (torch.randn(2, n, 6, generator=generator, dtype=torch.float64) for n in (9, 4))
    labels, mask = torch.randint(3, (2, 9), generator=generator), torch.rand(2, 9, generator=generator) > 0.3
    leaves = words.requires_grad_(), updated.requires_grad_()
    loss = 0.0
    for b in range(2):
        nearest = updated[b][labels[b]]
        similar = F.cosine_similarity(words[b], nearest, dim=-1) if cosine else (words[b] * nearest).sum(dim=-1)
        loss = loss - similar[mask[b]].mean() / 2
    actual = torch.autograd.grad(cluster_loss(words, updated, labels, mask, cosine), leaves)
    for gradient, expected in zip(actual, torch.autograd.grad(loss, leaves), strict=True):
        torch.testing.assert_close(gradient, expected, rtol=0, atol=1.5e-17)


@pytest.mark.parametrize(
    "model_class", [head for head in HEADS.values() if head is not ClusterFormerModel], ids=lambda c: c.__name__
)
def test_the_loss_is_the_weighted_sum_of_what_is_reported(model_class):
    """What is not asked for, too, but for a report that is refused."""
    weights = {"cluster_loss_weight": 0.3, "sorting_loss_weight": 0.2, "task_loss_weight": 0.7}
    model, words = tiny_model(model_class, gated=False, **weights), texts()
    inputs = labels_for(model_class, words)
    output, silent = (model(words, **inputs, output_clustering=reports) for reports in (None, False))
    total = 0.7 * output.task_loss + 0.3 * output.cluster_loss + 0.2 * output.sorting_loss
    torch.testing.assert_close(output.loss, total)
    assert torch.equal(output[0], output.loss)  # where everyone looks for it
    assert -1 <= output.cluster_loss < 0
    assert silent.cluster_loss is None
    torch.testing.assert_close(silent.loss, 0.7 * output.task_loss)
    assert model(words).loss is None if model_class is not ClusterFormerForConditionalGeneration else True


def test_loss_of_each_head_by_hand():
    words = texts()
    model = tiny_model(ClusterFormerForMaskedLM)
    labels = words.masked_fill(words % 3 > 0, -100)
    output = model(words, labels=labels)
    expected = F.cross_entropy(output.logits[labels >= 0], labels[labels >= 0])
    torch.testing.assert_close(output.task_loss, expected, rtol=1e-15, atol=0)
    assert model(words, labels=torch.full_like(words, -100)).task_loss == 0

    model = tiny_model(ClusterFormerForPreTraining)
    follows = torch.tensor([0, 1, 1])
    output = model(words, labels=labels, next_sentence_label=follows)
    masked = F.cross_entropy(output.prediction_logits[labels >= 0], labels[labels >= 0])
    expected = masked + F.cross_entropy(output.seq_relationship_logits, follows)
    torch.testing.assert_close(output.task_loss, expected, rtol=1e-15, atol=0)

    model = tiny_model(ClusterFormerForCausalLM)
    output = model(words, labels=words)
    expected = F.cross_entropy(output.logits[:, :-1].flatten(0, 1), words[:, 1:].flatten())
    torch.testing.assert_close(output.task_loss, expected, rtol=1e-15, atol=0)

    model = tiny_model(ClusterFormerForQuestionAnswering)
    # The third has no answer in the text, that of the second goes on beyond it.
    start, end = torch.tensor([0, 5, 99]), torch.tensor([3, 99, 99])
    output = model(words, start_positions=start, end_positions=end)
    parts = F.cross_entropy(output.start_logits[:2], start[:2]) + F.cross_entropy(output.end_logits[:1], end[:1])
    torch.testing.assert_close(output.task_loss, parts / 2, rtol=1e-15, atol=0)

    model = tiny_model(ClusterFormerForSequenceClassification, num_labels=1)
    numbers = torch.tensor([0.5, -1.0, 2.0])
    output = model(words, labels=numbers)
    expected = F.mse_loss(output.logits[:, 0], numbers.double())
    torch.testing.assert_close(output.task_loss, expected, rtol=1e-15, atol=0)

    model = tiny_model(ClusterFormerForSequenceClassification, num_labels=4, problem_type="multi_label_classification")
    several = torch.randint(2, (3, 4)).float()
    output = model(words, labels=several)
    expected = F.binary_cross_entropy_with_logits(output.logits, several.double())
    torch.testing.assert_close(output.task_loss, expected, rtol=1e-15, atol=0)


def test_labels_are_read_as_in_transformers():
    """Float labels of several classes, integers in a column, and places before the text."""
    words = texts()
    model = tiny_model(ClusterFormerForSequenceClassification, num_labels=4)
    several = torch.randint(2, (3, 4)).float()
    output = model(words, labels=several)
    torch.testing.assert_close(
        output.task_loss, F.binary_cross_entropy_with_logits(output.logits, several.double()), rtol=0, atol=1.2e-16
    )

    model = tiny_model(ClusterFormerForSequenceClassification, num_labels=4)
    classes = torch.tensor([3, 0, 1])
    expected = F.cross_entropy(model(words).logits, classes)
    assert torch.equal(model(words, labels=classes).task_loss, expected)
    assert torch.equal(model(words, labels=classes[:, None]).task_loss, expected)

    model = tiny_model(ClusterFormerForQuestionAnswering)
    start, end = torch.tensor([-1, 5, 3]), torch.tensor([3, 7, -1])
    expected = model(words, start_positions=start.clamp(min=0), end_positions=end.clamp(min=0))
    assert torch.equal(model(words, start_positions=start, end_positions=end).loss, expected.loss)


def test_token_types_tell_the_texts_of_a_pair_apart():
    model = tiny_model(ClusterFormerForSequenceClassification)
    words = texts()
    types = (torch.arange(words.shape[1]) > 10).long().expand_as(words)
    assert not torch.equal(model(words).logits, model(words, token_type_ids=types).logits)
    assert torch.equal(model(words).logits, model(words, token_type_ids=torch.zeros_like(words)).logits)


# Which settings leave the centroids to be trained; None: there are none.
TRAINED_CENTROIDS = (
    ({}, True),
    ({"gated": False}, True),
    ({"gated": False, "cluster_loss_weight": 0.0}, True),
    ({"gated": False, "sorting_loss_weight": 0.0}, True),
    ({"gated": False, "cluster_loss_weight": 0.0, "sorting_loss_weight": 0.0}, False),
    ({"cluster_loss_weight": 0.1, "sorting_loss_weight": 0.1}, True),
    ({"assignment": "full"}, None),
)
NOT_CAUSAL = (
    ({"assignment": "kmeans"}, None),
    ({"assignment": "identity"}, None),
    ({"gated": False, "cluster_loss_weight": 0.0, "sorting_loss_weight": 0.0, "attend_centroids": True}, True),
    ({"attend_centroids": "weighted"}, True),
)


@pytest.mark.slow_except(
    "*MaskedLM'>-{}-True-*|*MaskedLM'>*'assignment': *-None-False|*MaskedLM'>-*'attend_centroids': True}-True-True",
    "*'sorting_loss_weight': 0.0}-False-False|*CausalLM'>-{'assignment': 'full'}-None-True",
)
@pytest.mark.parametrize("loaded", [False, True])
@pytest.mark.parametrize(
    ("model_class", "changes", "trained"),
    [
        *((ClusterFormerForMaskedLM, *case) for case in TRAINED_CENTROIDS + NOT_CAUSAL),
        *((ClusterFormerForCausalLM, *case) for case in TRAINED_CENTROIDS),
    ],
    ids=str,
)
def test_every_parameter_that_is_trained_has_a_gradient(model_class, changes, trained, loaded, tmp_path):
    """Else DistributedDataParallel waits for it for ever; loading once let all weights be trained."""
    model = tiny_model(model_class, dtype=torch.float32, **changes).train()
    if loaded:
        model.save_pretrained(tmp_path)
        model = model_class.from_pretrained(tmp_path).train()
    words = texts()
    model(words, labels=words, token_type_ids=torch.zeros_like(words)).loss.backward()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None) == parameter.requires_grad, name
    of_clustering = [p for name, p in model.named_parameters() if "centroid" in name]
    assert [p.requires_grad for p in of_clustering] == [trained] * len(of_clustering)
    weights = sum(isinstance(part, CentroidWeight) for part in model.modules())
    assert weights == (2 if changes.get("attend_centroids") == "weighted" else 0)
    assert len(of_clustering) == (0 if trained is None else 3 + weights)


@pytest.mark.parametrize("auto_class", HEADS, ids=lambda c: c.__name__)
def test_a_loaded_model_trains_what_a_new_one_does(auto_class, tmp_path):
    unused = {"gated": False, "cluster_loss_weight": 0.0, "sorting_loss_weight": 0.0}
    model = tiny_model(HEADS[auto_class], dtype=torch.float32, **unused)
    model.save_pretrained(tmp_path)
    loaded, _ = auto_class.from_pretrained(tmp_path, output_loading_info=True)
    trained = {name: p.requires_grad for name, p in model.named_parameters()}
    assert {name: p.requires_grad for name, p in loaded.named_parameters()} == trained
    assert {name for name, trains in trained.items() if not trains} == {name for name in trained if "centroid" in name}


def test_the_task_trains_the_clustering_only_through_the_gate_and_attention_to_the_centroids():
    gradients = {}
    for variant in ("neural", "gated", "centroids"):
        model = tiny_model(ClusterFormerForMaskedLM, **VARIANTS[variant])
        output = model(texts(), labels=texts())
        output.task_loss.backward()
        gradients[variant] = model.clusterformer.centroids.weight.grad
    assert gradients["neural"] is None
    assert gradients["gated"].abs().max() > 0
    assert gradients["centroids"].abs().max() > 0


def test_centroids_show_a_word_what_its_window_does_not():
    """A word that shares no block with another one feels it only through the centroids."""
    for variant, felt in (("gated", False), ("centroids", True)):
        model = tiny_model(ClusterFormerModel, **VARIANTS[variant])
        words = torch.randn(1, 23, 24, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
        layer, centroids = model.layers[0], model.centroids.weight[None]
        clustered = layer.sorting(words, centroids, None, True)
        place = clustered.order.argsort(dim=1)[0]
        block = place // clustered.block_length
        far = int(((block[0] - block) % 5 == 3).nonzero()[0])
        words[0, far] *= 1.01  # keeps its direction, and with it every label
        again = layer.sorting(words, centroids, None, True)
        assert torch.equal(again.order, clustered.order)
        before, after = (layer.attention(words, sorted_words, None, None) for sorted_words in (clustered, again))
        assert (not torch.equal(before[0, 0], after[0, 0])) == felt


def test_attention_to_the_centroids_has_dropout():
    attention = (
        tiny_model(ClusterFormerModel, attend_centroids=True, attention_probs_dropout_prob=0.5).layers[0].attention
    )
    query = torch.randn(3, 2, 23, 12, dtype=torch.float64)
    centroids = torch.randn(3, 5, 24, dtype=torch.float64)
    first, second = (attention.attend_to_centroids(query, centroids) for _ in range(2))
    assert torch.equal(first, second)
    attention.train()
    first, second = (attention.attend_to_centroids(query, centroids) for _ in range(2))
    assert not torch.equal(first, second)


def test_weighted_attention_to_the_centroids_starts_as_none():
    """At full strength from the first step on it made the words of a sentence alike."""
    torch.manual_seed(0)
    weighted = ClusterFormerModel(tiny_config(attend_centroids="weighted")).eval()
    without = ClusterFormerModel(tiny_config(attend_centroids=False)).eval()
    without.load_state_dict(weighted.state_dict(), strict=False)
    assert torch.equal(weighted(texts()).last_hidden_state, without(texts()).last_hidden_state)


def test_the_projection_of_the_centroids_starts_as_the_identity():
    for model_class in HEADS.values():
        model = tiny_model(model_class, dtype=torch.float32)
        projections = [p for name, p in model.named_parameters() if "centroid_projection" in name]
        assert projections
        assert all(torch.equal(p, torch.eye(24)) for p in projections)


@pytest.mark.parametrize("model_class", HEADS.values(), ids=lambda c: c.__name__)
def test_a_forward_names_what_trainer_shall_pass_on(model_class):
    """Trainer drops the columns that a forward does not name: segments of pairs were lost that way."""
    names = inspect.signature(model_class.forward).parameters
    expected = {"input_ids", "attention_mask", "token_type_ids", "position_ids", "inputs_embeds"}
    if model_class is ClusterFormerForCausalLM:  # transformers looks for them in a decoder
        expected |= {"encoder_hidden_states", "encoder_attention_mask"}
    assert expected <= set(names)


@pytest.mark.slow_except("a_cpu-neural", "a_gpu-gated", "a_gpu-weighted_centroids", "a_cpu-lsh", "a_gpu-full")
@pytest.mark.usefixtures("autocast_rules")
@pytest.mark.parametrize("variant", VARIANTS)
def test_autocast_trains(variant):
    model = tiny_model(ClusterFormerForMaskedLM, dtype=torch.float32, **VARIANTS[variant]).train()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(texts(), labels=texts()).loss
    loss.backward()
    assert loss.isfinite()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


@pytest.mark.usefixtures("autocast_rules")
@pytest.mark.parametrize("masked", [False, True])
def test_autocast_leaves_memberships_in_full_precision(masked):
    """Their product was once made in 16 bits: strict labels while training were not those of inference."""
    sorting = tiny_model(ClusterFormerModel, is_decoder=True, dtype=torch.float32).layers[0].sorting
    generator = torch.Generator().manual_seed(0)
    words, centroids = (torch.randn(2, n, 24, generator=generator) for n in (200, 5))
    mask = torch.rand(2, 200, generator=generator) > 0.3 if masked else None
    expected = sorting.memberships(words, centroids, mask)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = sorting.memberships(words, centroids, mask)
    assert torch.equal(actual, expected)


@pytest.mark.usefixtures("autocast_rules")
def test_autocast_leaves_buckets_in_full_precision():
    sorting = tiny_model(ClusterFormerModel, assignment="lsh", dtype=torch.float32).layers[0].sorting
    words = torch.randn(2, 2000, 24, generator=torch.Generator().manual_seed(0))
    expected = sorting.fixed_labels(words, None)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(sorting.fixed_labels(words, None), expected)


# Orders of the first layer for seed 0, which must not change: tables were made with them.
DRAWN = {
    "random": [9, 3, 7, 2, 11, 5, 8, 6, 0, 1, 4, 10],
    "lsh": [1, 2, 3, 7, 9, 10, 0, 5, 6, 4, 8, 11],
}


@pytest.mark.parametrize("variant", DRAWN)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_a_seed_draws_is_the_same_however_a_model_is_made(variant, dtype, tmp_path):
    """A loaded model is built without memory, and gets what is in no file from somewhere else."""
    model = tiny_model(ClusterFormerModel, dtype=torch.float32, **VARIANTS[variant])
    model.save_pretrained(tmp_path)
    assert not any("drawn" in name for name in model.state_dict())
    words = torch.randn(1, 12, 24, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    models = [
        copy.deepcopy(model).to(dtype),
        copy.deepcopy(model).to(torch.float16).to(dtype),
        tiny_model(ClusterFormerModel, dtype=dtype, **VARIANTS[variant]),
        AutoModel.from_pretrained(tmp_path, dtype=dtype),
        AutoModel.from_pretrained(tmp_path).to(dtype),
        AutoModel.from_pretrained(tmp_path, dtype=dtype, device_map="cpu"),
        copy.deepcopy(model).to("meta").to_empty(device="cpu").to(dtype),
    ]
    for other in models:
        clustered = other.layers[0].sorting(words.to(dtype), None, None, False)
        assert clustered.order[0].tolist() == DRAWN[variant]
        drawn = other.layers[1].sorting.draw()
        assert torch.equal(other.layers[1].sorting.drawn, drawn.to(dtype) if drawn.is_floating_point() else drawn)


def test_controls_are_what_they_say():
    words = torch.randn(1, 12, 24, dtype=torch.float64)
    identity = tiny_model(ClusterFormerModel, assignment="identity").layers[0].sorting(words, None, None, False)
    assert identity.order[0].tolist() == list(range(12))
    orders = [
        tiny_model(ClusterFormerModel, assignment="random", assignment_seed=seed)
        .layers[0]
        .sorting(words, None, None, False)
        .order[0]
        .tolist()
        for seed in (0, 0, 9)
    ]
    assert orders[0] == orders[1] != orders[2]
    assert orders[0] != list(range(12))
    lsh = tiny_model(ClusterFormerModel, assignment="lsh").layers[0].sorting(words, None, None, False)
    opposite = tiny_model(ClusterFormerModel, assignment="lsh").layers[0].sorting(-words, None, None, False)
    assert 0 <= lsh.labels.min() <= lsh.labels.max() < 5
    assert (lsh.labels != opposite.labels).all()


def test_mistakes_in_a_call_are_named():
    model = tiny_model(ClusterFormerModel)
    words = texts()
    with pytest.raises(ValueError, match="one of the two"):
        model()
    with pytest.raises(ValueError, match=r"attention_mask must be \(B, length\) = \(3, 23\)"):
        model(words, attention_mask=torch.ones(3, 22))
    with pytest.raises(ValueError, match="max_position_embeddings is 64"):
        model(texts(N=65))
    with pytest.raises(ValueError, match="an encoder has none"):
        model(words, past_key_values=object())
    for model_class in (ClusterFormerModel, ClusterFormerForCausalLM):
        with pytest.raises(ValueError, match="encoder_hidden_states: this model has no cross attention"):
            tiny_model(model_class)(words, encoder_hidden_states=torch.zeros(3, 7, 24, dtype=torch.float64))
    with pytest.raises(ValueError, match="decoder_start_token_id must be set"):
        tiny_model(ClusterFormerForConditionalGeneration, decoder_start_token_id=None)(words, labels=words)


@pytest.mark.parametrize("model_class", HEADS.values(), ids=lambda c: c.__name__)
@pytest.mark.parametrize("assignment", ["neural", "full"])
def test_weights_of_attention_are_refused_however_they_are_asked_for(model_class, assignment):
    """In the config they were ignored."""
    words = texts()
    inputs = labels_for(model_class, words)
    with pytest.raises(ValueError, match="output_attentions: attention is computed without a matrix"):
        tiny_model(model_class, assignment=assignment)(words, output_attentions=True, **inputs)
    asking = tiny_model(model_class, assignment=assignment, output_attentions=True)
    with pytest.raises(ValueError, match="output_attentions: attention is computed without a matrix"):
        asking(words, **inputs)
    assert asking(words, output_attentions=False, **inputs)[0].isfinite().all()


@pytest.mark.parametrize("name", ["position_ids", "token_type_ids"])
def test_places_and_types_fit_the_words(name):
    """Others were repeated, and the words with them: one word and nine places gave nine hidden states."""
    model = tiny_model(ClusterFormerModel, type_vocab_size=64)
    words, ids = texts(2, 9), torch.arange(9)[None] + 3
    expected = model(words, **{name: ids.expand(2, -1)}).last_hidden_state
    assert not torch.equal(expected, model(words).last_hidden_state)
    assert torch.equal(model(words, **{name: ids}).last_hidden_state, expected)
    for shape in ((2, 8), (2, 1), (1, 1), (3, 9), (9,), (2, 9, 1)):
        with pytest.raises(ValueError, match=rf"{name} must be \(B, N\) = \(2, 9\) or \(1, 9\), got"):
            model(words, **{name: torch.zeros(shape, dtype=torch.long)})
    with pytest.raises(ValueError, match=rf"{name} must be .*\(2, 1\) or \(1, 1\)"):
        model(words[:, :1], **{name: ids.expand(2, -1)})
    for wrong in (ids + 53, ids - 4):
        with pytest.raises(ValueError, match=rf"{name} must lie in 0 .. 63, got"):
            model(words, **{name: wrong})
    with pytest.raises(ValueError, match="max_position_embeddings is 64"):
        model(texts(N=65), **{name: torch.zeros(3, 65, dtype=torch.long)})
