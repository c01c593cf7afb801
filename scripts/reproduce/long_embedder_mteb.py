"""QMSum's meetings as a retrieval task of mteb, whose own evaluator judges a model of sentence-transformers."""

from typing import Any

from ..benchmark.retrieval import Meeting, relevance


def mteb_score(model: Any, meetings: list[Meeting]) -> float:
    """nDCG@10 as mteb has it, without its cache, which would take a patched model for the exact one.

    Args:
        model (`SentenceTransformer`): cuts texts at its `max_seq_length`; a text is a batch of its own.
        meetings (`list[Meeting]`): the documents and what is asked of them.

    Raises:
        ImportError: mteb is not installed.
    """
    import mteb

    results = mteb.evaluate(
        model, meetings_task(meetings), cache=None, show_progress_bar=False, encode_kwargs={"batch_size": 1}
    )
    return float(results.task_results[0].scores["test"][0]["ndcg_at_10"])


def meetings_task(meetings: list[Meeting]) -> Any:
    """A task of mteb with these meetings."""
    from datasets import Dataset
    from mteb.abstasks import AbsTaskRetrieval
    from mteb.abstasks.task_metadata import TaskMetadata

    queries, relevant = relevance(meetings)

    class Meetings(AbsTaskRetrieval):
        metadata = TaskMetadata(
            name="QMSumMeetings",
            description="The meeting that a query is about.",
            dataset={"path": "local/qmsum", "revision": "1"},
            type="Retrieval",
            category="t2t",
            eval_splits=["test"],
            eval_langs=["eng-Latn"],
            main_score="ndcg_at_10",
        )

        def load_data(self, **options: Any) -> None:
            corpus = Dataset.from_list([{"id": meeting.name, "text": meeting.text} for meeting in meetings])
            asked = Dataset.from_list([{"id": f"q{number}", "text": text} for number, text in enumerate(queries)])
            wanted = {
                f"q{number}": {meeting.name: 1 for meeting, is_wanted in zip(meetings, row, strict=True) if is_wanted}
                for number, row in enumerate(relevant)
            }
            split = {"corpus": corpus, "queries": asked, "relevant_docs": wanted, "top_ranked": None}
            self.dataset = {"default": {"test": split}}
            self.data_loaded = True

    return Meetings()
