"""ListOps: values by an evaluator of its own, and trees as the published generator makes them."""

import gzip
from collections import Counter
from itertools import islice

import pytest

from scripts.lra.listops import CHUNK, TOKENS, ListOpsSettings, generate_listops

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
