"""An embedder learns from pairs and triplets, patched, and resumes to the same weights; mistakes are told."""

import json
import random
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
from support.script_runs import whole_and_resumed
from support.sentence_models import WORDS, inside, outputs, same, save_plain, texts

import hf_effattn
from scripts.train import embedding as run_embedding

RUN = "--use_cpu --report_to none --learning_rate 1e-2 --per_device_train_batch_size 8 --mini_batch_size 8".split()  # noqa: SIM905
METHOD = "bi-clustered clusters=3 topk=4 key_clusters=4 min_length=16"
TOPICS = 8


def rows(negatives: bool = False) -> list[dict[str, str]]:
    """Questions that share words with their texts alone; the columns in an order of their own."""
    draw = random.Random(0)

    def text(topic: int, length: int) -> str:
        return " ".join(draw.choices(WORDS[6 * topic : 6 * topic + 6], k=length))

    made = []
    for topic in list(range(TOPICS)) * 2:
        row = {"number": str(topic), "positive": text(topic, draw.randint(20, 50)), "anchor": text(topic, 6)}
        made.append(row | ({"negative": text((topic + 1) % TOPICS, 30)} if negatives else {}))
    return made


def write(path: Path, content: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in content))
    return str(path)


@pytest.fixture
def common(tmp_path: Path) -> list[str]:
    """A tiny exact model, and pairs to train on."""
    base = save_plain(tmp_path / "base", num_hidden_layers=1)
    return [*RUN, "--model_name_or_path", base, "--train_files", write(tmp_path / "pairs.jsonl", rows()), "--do_train"]


def losses_of(folder: Path) -> list[float]:
    log = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    return [row["loss"] for row in log if "loss" in row]


@pytest.mark.compatibility(
    "sentence-transformers", "`SentenceTransformerTrainer`, cached loss, gradient checkpointing, resumed", "runs"
)
@pytest.mark.slow_except("pairs-bi-clustered*")
@pytest.mark.parametrize("method", [None, METHOD, "cst slice_length=4"], ids=str)
@pytest.mark.parametrize("negatives", [False, True], ids=["pairs", "triplets"])
def test_it_learns_and_a_resumed_run_ends_with_the_same_weights(
    negatives: bool, method: str | None, common: list[str], tmp_path: Path
) -> None:
    """Resumed in its third epoch, after an evaluation, with dropout and checkpointing."""
    data = write(tmp_path / "held-out.jsonl", rows(negatives))
    arguments = [*common, "--train_files", data, "--validation_files", data, "--do_eval", "--gradient_checkpointing"]
    arguments += "--num_train_epochs 4 --logging_steps 2 --save_steps 5 --eval_strategy steps --eval_steps 4".split()  # noqa: SIM905
    arguments += [] if method is None else ["--method", method]
    whole, resumed = whole_and_resumed(run_embedding.main, arguments, tmp_path, step=5)
    losses = losses_of(tmp_path / "whole")
    assert losses[-1] < 0.7 * losses[0]
    assert whole["eval_cosine_ndcg@10"] > 0.8
    assert ("eval_negative_cosine_accuracy" in whole) == negatives
    assert (
        whole["eval_cosine_ndcg@10"]
        == json.loads((tmp_path / "whole" / "all_results.json").read_text())["eval_cosine_ndcg@10"]
    )
    scores = {name for name in whole if name.startswith("eval_") and "cosine" in name}
    assert {name: resumed[name] for name in scores} == {name: whole[name] for name in scores}
    ended, again = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "stopped"))
    assert ended.keys() == again.keys()
    assert all(torch.equal(again[name], weight) for name, weight in ended.items())
    exact = load_file(tmp_path / "base" / "model.safetensors")
    assert not any(torch.equal(ended[name], exact[name]) for name in ended if name in exact and "pooler" not in name)


def test_what_is_saved_is_longer_and_patched_as_it_was_trained(common: list[str], tmp_path: Path) -> None:
    arguments = [*common, "--method", METHOD, "--extend_positions", "96", "--max_length", "80", "--max_steps", "1"]
    metrics = run_embedding.main([*arguments, "--output_dir", str(tmp_path / "run")])
    loaded = SentenceTransformer(str(tmp_path / "run"), device="cpu")
    assert metrics["max_length"] == loaded.max_seq_length == 80
    assert inside(loaded).config.max_position_embeddings == 96
    stored = inside(loaded).config.effattn
    assert stored.items() >= {"method": "bi-clustered", "clusters": 3, "topk": 4, "min_length": 16}.items()
    read = texts((70, 80))
    assert not same(outputs(loaded, read), outputs(hf_effattn.unpatch_attention(loaded), read), atol=1e-4)
    # What was patched is trained further, and evaluated, as it is.
    arguments = [
        *RUN,
        "--model_name_or_path",
        str(tmp_path / "run"),
        "--do_eval",
        "--output_dir",
        str(tmp_path / "next"),
    ]
    run_embedding.main([*arguments, "--validation_files", write(tmp_path / "held-out.jsonl", rows())])


def test_settings_of_a_calibration_reach_the_model(common: list[str], tmp_path: Path) -> None:
    model = SentenceTransformer(str(tmp_path / "base"), device="cpu")
    candidates = [{"clusters": clusters, "topk": 4, "key_clusters": 4, "min_length": 0} for clusters in (2, 6)]
    candidates = [{"method": "bi-clustered"} | candidate for candidate in candidates]
    found = hf_effattn.calibrate(model, texts((40, 50, 60)), 0.5, candidates=candidates, training=True)
    file = str(found.save(tmp_path / "effattn.json"))
    arguments = [*common, "--settings", file, "--max_steps", "1"]
    run_embedding.main([*arguments, "--output_dir", str(tmp_path / "run")])
    loaded = SentenceTransformer(str(tmp_path / "run"), device="cpu")
    expected = hf_effattn.patch_attention(model, settings=file)
    assert inside(loaded).config.effattn == inside(expected).config.effattn


@pytest.mark.compatibility("sentence-transformers", "a cached loss in bfloat16: both of its passes", "runs")
def test_both_passes_of_the_loss_are_in_bfloat16(
    common: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second comes in backward, where the trainer's autocast has ended."""
    seen: list[tuple[torch.dtype, bool]] = []

    def watched(*inputs: Any) -> SentenceTransformer:
        model = load(*inputs)
        layer = inside(model).encoder.layer[0].attention.self.query
        layer.register_forward_hook(lambda _, given, made: seen.append((made.dtype, torch.is_grad_enabled())))
        return model

    load = run_embedding.load_embedder
    monkeypatch.setattr(run_embedding, "load_embedder", watched)
    monkeypatch.setattr(run_embedding, "CPU_MULTIPLIES_BFLOAT16", False)
    arguments = [*common, "--bf16", "--method", METHOD, "--max_steps", "1", "--output_dir", str(tmp_path / "run")]
    with pytest.warns(UserWarning, match="no instructions for bfloat16"):
        run_embedding.main(arguments)
    assert set(seen) == {(torch.bfloat16, False), (torch.bfloat16, True)}


def test_a_batch_has_no_text_twice(common: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two rows with the same text either would be the other's wrong answer."""
    batches: list[list[tuple[int, ...]]] = []

    class Watched(run_embedding.CachedMultipleNegativesRankingLoss):
        def forward(self, features: Any, labels: Any) -> torch.Tensor:
            batches.append([tuple(row) for row in features[1]["input_ids"].tolist()])
            return super().forward(features, labels)

    monkeypatch.setattr(run_embedding, "CachedMultipleNegativesRankingLoss", Watched)
    data = write(tmp_path / "twice.jsonl", [row | {"positive": f"w{n // 2}"} for n, row in enumerate(rows())])
    arguments = [*common, "--train_files", data, "--num_train_epochs", "2", "--output_dir", str(tmp_path / "run")]
    run_embedding.main(arguments)
    assert len(batches) == 4
    assert all(len(set(texts)) == len(texts) for texts in batches)


def test_the_evaluator_knows_all_answers_to_a_question() -> None:
    table = {"anchor": ["a", "b", "a"], "positive": ["x", "y", "z"], "negative": ["y", "x", "v"]}
    retrieval, triplets = run_embedding.evaluator_of(Dataset.from_dict(table), batch_size=2).evaluators
    assert retrieval.queries == ["a", "b"]
    assert retrieval.corpus == ["x", "y", "z", "v"]
    answers = [
        {retrieval.corpus[int(place)] for place in retrieval.relevant_docs[name]} for name in retrieval.queries_ids
    ]
    assert answers == [{"x", "z"}, {"y"}]
    assert (triplets.anchors, triplets.positives, triplets.negatives) == tuple(table.values())
    assert len(run_embedding.evaluator_of(Dataset.from_dict(table).remove_columns("negative"), 2).evaluators) == 1


@pytest.fixture
def preprocessed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], str | None]]:
    """The texts that a model reads at a time, and their prompt."""
    read: list[tuple[list[str], str | None]] = []
    preprocess = SentenceTransformer.preprocess

    def watched(self: Any, inputs: list[str], prompt: str | None = None, **options: Any) -> Any:
        read.append((inputs, prompt))
        return preprocess(self, inputs, prompt=prompt, **options)

    monkeypatch.setattr(SentenceTransformer, "preprocess", watched)
    return read


@pytest.mark.parametrize("names", [[], ["query", "document"], ["query", "passage"], ["corpus"]])
def test_a_training_puts_the_prompts_before_the_texts_that_an_evaluation_does(
    names: list[str], common: list[str], preprocessed: Any
) -> None:
    """A model that was not told a prompt of documents has an empty one, which hides that of passages."""
    prompts = {name: f"{name}: " for name in names}
    model = SentenceTransformer(common[common.index("--model_name_or_path") + 1], device="cpu", prompts=prompts)
    model.encode_query("w1")
    model.encode_document("w1")
    of_queries, of_documents = (prompt or None for _, prompt in preprocessed)
    found = run_embedding.prompts_of(model, ["question", "answer", "other"])
    assert [found.get(column) for column in ("question", "answer", "other")] == [of_queries, *2 * [of_documents]]
    assert of_queries == prompts.get("query")


def test_prompts_reach_the_trainer(common: list[str], tmp_path: Path, preprocessed: Any) -> None:
    base = str(tmp_path / "base")
    SentenceTransformer(base, device="cpu", prompts={"query": "w49 w48 ", "document": ""}).save_pretrained(base)
    run_embedding.main([*common, "--max_steps", "1", "--output_dir", str(tmp_path / "run")])
    anchors = {row["anchor"] for row in rows()}
    prompts = [(set(texts) <= anchors, prompt) for texts, prompt in preprocessed if len(texts) == 8]
    assert (True, "w49 w48 ") in prompts
    assert (False, "w49 w48 ") not in prompts


MISTAKES: dict[str, tuple[str, str]] = {
    "nothing": ("", r"nothing to do: pass one or more of --do_train, --do_eval$"),
    "predictions": ("--do_predict", "no --do_predict: `effattn embed` embeds"),
    "no evaluation": ("--do_train --do_eval", r"no validation, which --do_eval needs .* --validation_files"),
    "too long": ("--do_train --max_length 65", "positions for 64 tokens: pass --extend_positions 65"),
    "no model": ("--do_train --model_name_or_path none/of/these", "there is no folder none/of/these"),
    "a method": ("--do_train --method clusterd", "clusterd"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_told(name: str, common: list[str], tmp_path: Path) -> None:
    arguments, message = MISTAKES[name]
    common.remove("--do_train")
    with warnings.catch_warnings(), pytest.raises(ValueError, match=message):
        run_embedding.main([*common, *arguments.split(), "--output_dir", str(tmp_path / "run")])
    assert not (tmp_path / "run").exists()
