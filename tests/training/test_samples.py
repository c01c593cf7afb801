"""Which samples a run takes when it is to take only some."""

from datasets import Dataset, DatasetDict

from hf_effattn.training.run import drawn_samples


def test_the_seed_decides_which_samples_are_drawn() -> None:
    data = DatasetDict({split: Dataset.from_dict({"row": list(range(50))}) for split in ("train", "test")})
    drawn = [drawn_samples(data, {"train": 10, "test": None}, seed) for seed in (1, 1, 2)]
    rows = [splits["train"]["row"][:] for splits in drawn]
    assert rows[0] == rows[1] != rows[2]
    assert len(set(rows[0])) == 10
    assert drawn[0]["test"]["row"][:] == list(range(50))
    assert sorted(drawn_samples(data, {"train": 99}, 1)["train"]["row"]) == list(range(50))
