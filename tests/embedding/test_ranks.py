"""How ranks divide work: every piece is in one share, shares cost alike, and each rank can do all alone."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_effattn.embedding.kept import Shards
from hf_effattn.embedding.plan import Remaining
from hf_effattn.embedding.ranks import Rank

COSTS = st.lists(st.floats(0, 1e6), max_size=60)


@given(COSTS, st.integers(1, 9))
def test_shares_are_a_partition_and_every_rank_has_an_order_of_all(costs, ranks):
    shares = [Rank(number, ranks).shares(costs) for number in range(ranks)]
    assert sorted(index for own, _ in shares for index in own) == list(range(len(costs)))
    for own, others in shares:
        assert sorted([*own, *others]) == list(range(len(costs)))
        assert [costs[index] for index in own] == sorted((costs[index] for index in own), reverse=True)


@given(COSTS, st.integers(1, 9))
def test_shares_differ_by_less_than_the_dearest_piece(costs, ranks):
    sums = [sum(costs[index] for index in Rank(number, ranks).shares(costs)[0]) for number in range(ranks)]
    assert max(sums) - min(sums) <= max(costs, default=0.0) * (1 + 1e-9)


def test_what_others_left_is_taken_from_the_end_of_their_shares():
    costs = [6.0, 5.0, 4.0, 3.0, 2.0, 1.0]
    assert Rank(0, 3).shares(costs) == ([0, 5], [4, 1, 3, 2])
    assert Rank(1, 3).shares(costs) == ([1, 4], [3, 2, 5, 0])
    assert Rank(0, 1).shares(costs) == ([0, 1, 2, 3, 4, 5], [])


def test_the_launchers_variables(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert Rank.from_environment() == Rank(0, 1, 0)
    for name, value in (("RANK", "5"), ("WORLD_SIZE", "8"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(name, value)
    assert Rank.from_environment() == Rank(5, 8, 1)
    monkeypatch.setenv("WORLD_SIZE", "5")
    with pytest.raises(ValueError, match="from 0 to WORLD_SIZE - 1, got RANK=5, WORLD_SIZE=5, LOCAL_RANK=1"):
        Rank.from_environment()
    monkeypatch.setenv("RANK", "first")
    with pytest.raises(ValueError, match="whole numbers, got RANK=first"):
        Rank.from_environment()


def test_every_process_of_a_machine_has_a_gpu_of_its_own(monkeypatch):
    rank = Rank(5, 8, 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert (rank.device(None), rank.device("cuda")) == (None, "cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert (rank.device(None), rank.device("cuda")) == ("cuda:1", "cuda:1")
    assert (rank.device("cpu"), rank.device("cuda:3")) == ("cpu", "cuda:3")
    assert Rank().device(None) is None


def test_two_ranks_write_the_same_shard_at_once(tmp_path):
    shards = Shards(tmp_path / "shards")

    def write(file):
        file.write(b"first half, ")
        shards.add(7, lambda other: other.write(b"first half, second half"))  # begun later, and whole sooner
        file.write(b"second half")

    shards.add(7, write)
    assert shards.path(7).read_bytes() == b"first half, second half"
    (tmp_path / "shards" / "0000008.killed.part").touch()
    assert shards.present() == {7}


def test_what_remains_is_done_by_all_ranks_and_counted_once():
    remaining = Remaining({0: 8.0, 2: 4.0, 3: 2.0}, {0: 1, 2: 5, 3: 2}, ranks=2)
    assert (remaining.seconds, remaining.documents) == (7.0, 8)
    for _ in range(2):
        remaining.finish([1, 2])
        assert (remaining.seconds, remaining.documents) == (5.0, 3)
