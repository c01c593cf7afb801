"""ListOps: values by an evaluator of its own, and trees as the published generator makes them."""

import gzip
import random
from collections import Counter
from itertools import islice

import numpy as np
import pytest

from scripts.lra import listops
from scripts.lra.listops import CHUNK, TOKENS, ListOpsSettings, generate_listops
from scripts.lra.random_streams import RandomStream

SMALL = ListOpsSettings(min_length=5, max_length=40, max_depth=4, max_args=5)


def parse(text):
    """A digit, or a list of an operator's name and its arguments; parentheses mean nothing."""
    stack = [[]]
    for word in text.replace("(", " ").replace(")", " ").split():
        if word.startswith("["):
            stack.append([word[1:]])
        elif word == "]":
            done = stack.pop()
            stack[-1].append(done)
        else:
            stack[-1].append(int(word))
    ((tree,),) = stack
    return tree


def evaluate(tree):
    """The value, by the definitions of the task."""
    if isinstance(tree, int):
        return tree
    name, *rest = tree
    values = [evaluate(part) for part in rest]
    if name == "MED":
        ordered = sorted(values)
        middle = len(ordered) // 2
        return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) // 2
    simple = {"MIN": min, "MAX": max, "FIRST": lambda v: v[0], "LAST": lambda v: v[-1], "SM": lambda v: sum(v) % 10}
    return simple[name](values)


def depth(tree):
    return 1 if isinstance(tree, int) else 1 + max(depth(part) for part in tree[1:])


def arities(tree):
    return [] if isinstance(tree, int) else [len(tree) - 1, *(count for part in tree[1:] for count in arities(part))]


@pytest.fixture(scope="module")
def default_chunk():
    return generate_listops(ListOpsSettings(), "train", 0)


@pytest.mark.parametrize("name", ["d8", "d14", "d20", "d20s"])
def test_the_evaluator_agrees_with_the_original_labels(name, large_data):
    """Nangia and Bowman's own test files, so that the other tests may trust the evaluator."""
    with gzip.open(large_data(f"listops/test_{name}.tsv.gz"), "rt") as file:
        for line in islice(file, 1500):
            label, text = line.rstrip("\n").split("\t")
            assert evaluate(parse(text)) == int(label)


def test_values_are_what_the_expressions_say(default_chunk):
    texts, values = default_chunk
    assert len(texts) == len(values) == CHUNK
    assert [evaluate(parse(text)) for text in texts] == values.tolist()


@pytest.mark.parametrize("max_args", [2, 5, 30])
def test_values_of_small_trees(max_args):
    settings = ListOpsSettings(min_length=0, max_length=60, max_depth=3, max_args=max_args)
    texts, values = generate_listops(settings, "test", 3)
    assert [evaluate(parse(text)) for text in texts] == values.tolist()
    trees = list(map(parse, texts))
    assert {depth(tree) for tree in trees} == {1, 2, 3}
    assert max(count for tree in trees for count in arities(tree)) == max_args


def test_lengths_depth_and_arguments(default_chunk):
    """Strictly between the lengths; the deepest digit on level 10; 2 to 10 arguments; no other token."""
    texts, _ = default_chunk
    lengths = [len(text.split(" ")) for text in texts]
    assert min(lengths) > 500
    assert max(lengths) < 2000
    trees = list(map(parse, texts))
    assert max(map(depth, trees)) == 10
    counts = Counter(count for tree in trees for count in arities(tree))
    assert set(counts) == set(range(2, 11))
    assert {word for text in texts for word in text.split(" ")} == set(TOKENS)


def test_one_node_in_four_is_an_operator_and_all_choices_are_alike():
    """Before any tree is thrown away; the standard errors are those of the counts."""
    settings = ListOpsSettings(min_length=0, max_length=100_000)
    levels = listops._grow(RandomStream(5, "train", 0), settings)
    token, arity = (np.concatenate([getattr(level, name) for level in levels[:-1]]) for name in ("token", "arity"))
    operators = arity > 0
    assert operators.mean() == pytest.approx(0.25, abs=5 * (0.25 * 0.75 / operators.size) ** 0.5)
    for drawn, choices in (
        (token[~operators], range(10)),
        (token[operators], range(10, 14)),
        (arity[operators], range(2, 11)),
    ):
        share = 1 / len(choices)
        assert set(np.unique(drawn)) == set(choices)
        error = (share * (1 - share) / drawn.size) ** 0.5
        assert np.abs(np.bincount(drawn.astype(int))[choices.start :] / drawn.size - share).max() < 5 * error
    assert np.unique(levels[-1].token).tolist() == list(range(10))


def plain_tree(dice, level=1):
    """A tree by the published rule, node after node, and its number of tokens."""
    if level == 10 or dice.random() > 0.25:
        return dice.randrange(10), 1
    parts = [plain_tree(dice, level + 1) for _ in range(dice.randint(2, 10))]
    return [dice.choice(["MIN", "MAX", "MED", "SM"]), *(tree for tree, _ in parts)], 2 + sum(size for _, size in parts)


def test_kept_trees_are_distributed_as_those_of_the_plain_rule(default_chunk):
    """Length and value of what is kept, beside the plain rule with the same rejection."""
    dice = random.Random(7)
    plain = []
    while len(plain) < 250:
        tree, length = plain_tree(dice)
        if 500 < length < 2000:
            plain.append((length, evaluate(tree)))
    texts, values = default_chunk
    lengths = np.array([len(text.split(" ")) for text in texts])
    plain_lengths, plain_values = np.array(plain).T
    error = (lengths.var() / lengths.size + plain_lengths.var() / plain_lengths.size) ** 0.5
    assert abs(lengths.mean() - plain_lengths.mean()) < 4 * error
    found, expected = (np.bincount(v, minlength=10) / v.size for v in (values, plain_values))
    assert np.abs(found - expected).max() < 4 * (0.2 * 0.8 * (1 / values.size + 1 / plain_values.size)) ** 0.5


def test_labels_are_near_the_published_distribution():
    """Every class occurs; 0 and 9 most, for MIN and MAX pull to the ends. No class is worth guessing: under 19 %."""
    values = np.concatenate([generate_listops(ListOpsSettings(), "train", chunk)[1] for chunk in range(4)])
    shares = np.bincount(values, minlength=10) / values.size
    assert set(np.argsort(shares)[-2:]) == {0, 9}
    assert shares.min() > 0.05
    assert shares.max() < 0.19


def test_a_chunk_depends_on_seed_split_and_number_only():
    first = generate_listops(SMALL, "train", 2)[0]
    generate_listops(SMALL, "train", 1)
    assert generate_listops(SMALL, "train", 2)[0] == first
    other_seed = ListOpsSettings(min_length=5, max_length=40, max_depth=4, max_args=5, seed=1)
    for others in (
        generate_listops(SMALL, "train", 3),
        generate_listops(SMALL, "test", 2),
        generate_listops(other_seed, "train", 2),
    ):
        assert others[0] != first


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"train_size": 0}, ValueError, "train_size must be at least 1, got 0"),
        ({"test_size": 2.5}, TypeError, "test_size must be a whole number, got 2.5"),
        ({"seed": -1}, ValueError, "seed must be at least 0, got -1"),
        ({"max_args": 1}, ValueError, "max_args must be from 2 to 100, got 1"),
        ({"max_depth": 0}, ValueError, "max_depth must be from 1 to 20, got 0"),
        ({"min_length": 500, "max_length": 501}, ValueError, "no expression is longer than min_length 500"),
        ({"min_length": 1, "max_length": 4}, ValueError, "no expression is longer than min_length 1"),
        ({"max_depth": 3}, ValueError, "the longest has 122 tokens"),
    ],
)
def test_settings_that_cannot_be(settings, error, message):
    with pytest.raises(error, match=message):
        ListOpsSettings(**settings)


def test_lengths_that_hardly_any_tree_has():
    """Two arguments each: 4, 7, 10, ... tokens, never 5."""
    with pytest.raises(ValueError, match="widen the lengths"):
        generate_listops(ListOpsSettings(min_length=4, max_length=6, max_args=2), "train", 0)
