"""Verdicts on ClusterFormer's defaults, made of results that stand here."""

from itertools import islice

import pytest

from scripts.publish import verdicts
from scripts.reproduce.classification import DEFAULT, RANDOM, settings_of


@pytest.mark.parametrize(
    ("differences", "above"),
    [
        ((1.0, 1.0, 1.0), True),
        ((1.0, 2.0, 3.0), True),  # the mean is 2, its standard error 0.58
        ((0.0, 1.0, 2.0), False),
        ((0.0, 0.0, 0.0), False),
        ((-1.0, -1.0, -1.0), False),
    ],
)
def test_a_difference_counts_beyond_two_standard_errors(differences, above):
    assert verdicts.above(list(differences)) == above


def of_defaults(keep, lost, recalled):
    """The verdicts on the default where it loses `lost` points on MR and recalls `recalled` percent of partners."""
    rows = [
        {"dataset": dataset, "settings": settings_of("routings", name, dataset), "seed": seed, "epochs": 3}
        | {"max_length": 64, "train_samples": None, "accuracy": level + seed, "map": level + seed}
        for dataset in verdicts.SEVEN_SETS
        for seed in range(3)
        for name, level in (
            ("Transformer", 80.0),
            ("neural", 79.0),
            ("gated", 78.0),
            (DEFAULT, 80.0 - (lost if dataset == "MR" else 0.0)),
            (RANDOM, 75.0),
        )
    ]
    keep("classification_table", rows, dtype="float32")
    texts = [
        {"routing": routing, "length": length, "window_blocks": 2, "seed": seed, "accuracy": accuracy + seed}
        for routing, accuracy in (("gated with centroids", recalled), ("random order", 50.0))
        for length, seed in ((64, 0), (64, 1), (256, 0))
    ]
    keep("partner_recall", texts)
    return {row.claim.partition(":")[0]: row for row in islice(verdicts.clusterformer(), 4)}


def test_the_default_is_compared_with_the_transformer_and_a_random_order(keep):
    rows = of_defaults(keep, lost=0.0, recalled=90.0)
    of_transformer = rows["our default, gate and centroids"]
    assert of_transformer[1:] == ("+0.0 (CR) to +0.0 (CR) on 7 data sets", "ours, holds")
    (of_random,) = (row for claim, row in rows.items() if "random order" in claim)
    assert of_random[1:] == ("+5.0 on 20 Newsgroups, +40.0 on partner recall of 64 words", "ours, holds")


def test_a_loss_on_one_data_set_or_to_a_random_order_is_told(keep):
    rows = of_defaults(keep, lost=1.0, recalled=49.0)
    of_transformer = rows["our default, gate and centroids"]
    assert of_transformer[1:] == ("-1.0 (MR) to +0.0 (CR) on 7 data sets", "**ours, missed**")
    (of_random,) = (row for claim, row in rows.items() if "random order" in claim)
    assert of_random[1:] == ("+5.0 on 20 Newsgroups, -1.0 on partner recall of 64 words", "**ours, missed**")
