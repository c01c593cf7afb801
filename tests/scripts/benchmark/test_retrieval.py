"""Retrieval of whole meetings: what is relevant, its nDCG, and a run that goes on where it was stopped."""

import gzip
import json
import math

import numpy as np
import pytest
import torch

from scripts.benchmark import retrieval
from scripts.shared.data import VARIABLE

MEETINGS = {
    "cooking": (
        "Salt, pepper and butter go into a soup. " * 80,
        ["What of the soup?", "Summarize."],
    ),
    "sailing": ("The boat needs a new sail before the storm. " * 80, ["What about the sail of the boat?"]),
    "banking": (
        "Interest rates of the central bank rose again. " * 80,
        ["Why did rates rise?", "Summarize."],
    ),
}


@pytest.fixture
def data(tmp_path, monkeypatch):
    (tmp_path / "qmsum").mkdir()
    with gzip.open(tmp_path / "qmsum" / "test.jsonl.gz", "wt", encoding="utf-8") as file:
        for name, (text, queries) in MEETINGS.items():
            row = {
                "meeting_id": name,
                "meeting_transcripts": [{"speaker": "A", "content": text}],
                "general_query_list": [{"query": "Summarize the whole meeting."}],
                "specific_query_list": [{"query": query} for query in queries],
            }
            file.write(json.dumps(row) + "\n")
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    monkeypatch.setattr(retrieval, "CACHE", tmp_path / "cache")
    return tmp_path


def test_a_query_of_several_meetings_is_about_each(data):
    queries, relevant = retrieval.relevance(retrieval.read_meetings(["test"]))
    assert len(queries) == 4
    assert relevant.sum(axis=1).tolist() == [1, 2, 1, 1]
    assert relevant[queries.index("Summarize.")].tolist() == [True, False, True]


def test_ndcg_is_the_discount_of_the_rank():
    documents = torch.nn.functional.normalize(torch.randn(20, 8, generator=torch.Generator().manual_seed(0)), dim=1)
    documents = documents.numpy()
    order = np.argsort(-documents @ documents[0])
    relevant = np.zeros((3, 20), bool)
    relevant[[0, 1, 2], order[[0, 3, 10]]] = True
    scores = retrieval.ndcg_of_queries(documents, np.stack([documents[0]] * 3), relevant)
    assert scores == pytest.approx([1.0, 1 / math.log2(5), 0.0])


@pytest.mark.slow
def test_a_run_finds_the_meetings_and_goes_on_where_it_was_stopped(data, real_model_folder, monkeypatch):
    embed, calls = retrieval.embed_meeting, []

    def stop(*arguments):
        calls.append(arguments)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return embed(*arguments)

    monkeypatch.setattr(retrieval, "embed_meeting", stop)
    output = data / "retrieval.json"
    options = {"methods": f"{retrieval.CUT},bi-clustered,{retrieval.EXACT}", "output": output}
    with pytest.raises(KeyboardInterrupt):
        retrieval.main(splits="test", **options)
    kept = json.loads(output.read_text())["rows"]
    assert [row["method"] for row in kept] == [retrieval.CUT]
    encoded = []
    encode = retrieval.Encoder.encode
    monkeypatch.setattr(
        retrieval.Encoder, "encode", lambda self, documents: encoded.append(len(documents)) or encode(self, documents)
    )
    retrieval.main(splits="test", **options)
    assert encoded == [1, 1, 4, 1, 1, 1, 4]  # what is missing, two meetings and all three; after each the queries
    cut, clustered, exact, *gains = json.loads(output.read_text())["rows"]
    assert (cut["longest"], exact["queries"], exact["meetings"]) == (512, 4, 3)
    assert exact["shortest"] > 512
    assert exact["ndcg_at_10"] > 0.9
    assert clustered["ndcg_at_10"] == exact["ndcg_at_10"]  # so short that the patch stays exact
    assert [(row["gain_of"], row["gain"]) for row in gains] == [
        (retrieval.CUT, pytest.approx(cut["ndcg_at_10"] - exact["ndcg_at_10"], abs=1e-4)),
        ("bi-clustered", 0),
    ]


def test_queries_about_one_meeting_are_one_observation():
    """With a query each it is the usual error of a mean; what more queries of the same say adds nothing."""
    one = [retrieval.Meeting(name, "", (name,)) for name in "abcd"]
    values = np.array([0.1, 0.5, 0.2, 0.9])
    usual = values.std(ddof=1) / 2
    assert retrieval.standard_error(values, one) == pytest.approx(usual)
    three = [retrieval.Meeting(name, "", tuple(f"{name}{n}" for n in range(3))) for name in "abcd"]
    assert retrieval.standard_error(values.repeat(3), three) == pytest.approx(usual)
