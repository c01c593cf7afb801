"""Pipelines, lm_eval, mteb and trl with patched models: what answers, is evaluated or trained is the patched model."""

import math
import statistics
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer
from support.embedding_cases import save_encoder, text
from support.sentence_models import save_tokenizer, texts
from support.tiny_decoders import make_model
from support.tiny_models import tiny_model
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    pipeline,
)

import hf_effattn
from scripts.benchmark.retrieval import Meeting, ndcg_of_queries, relevance
from scripts.reproduce.long_embedder_mteb import mteb_score

OF_DECODER = {"exact_keys": 24, "key_clusters": 2, "segment_length": 32, "window": 16, "min_length": 0}
PATCH = {"clusters": 4, "topk": 4, "key_clusters": 4, "min_length": 0}


@pytest.fixture
def encoder(tmp_path: Path) -> str:
    return str(save_encoder(tmp_path / "encoder", positions=640))


@pytest.mark.compatibility("lm_eval", "log-likelihoods of a patched decoder", "runs")
def test_likelihoods_are_those_of_the_patched_model(encoder: str) -> None:
    lm_eval_models = pytest.importorskip("lm_eval.models.huggingface")
    instance = pytest.importorskip("lm_eval.api.instance").Instance
    tokenizer = AutoTokenizer.from_pretrained(encoder)
    model = make_model("llama", vocab_size=len(tokenizer), max_position_embeddings=640)
    context, answer = text(200), f" {text(3, seed=1)}"
    request = instance("loglikelihood", {}, (context, answer), 0)

    tokenizer.bos_token = tokenizer.eos_token = "[SEP]"  # begins an empty context

    def judge() -> Any:
        return lm_eval_models.HFLM(
            pretrained=model, tokenizer=tokenizer, backend="causal", max_length=640, add_bos_token=False
        )

    def likelihood() -> float:
        return judge().loglikelihood([request], disable_tqdm=True)[0][0]

    def expected() -> float:
        given = torch.tensor([judge().tok_encode(context + answer)])
        with torch.no_grad():
            log_probs = model(given[:, :-1]).logits.log_softmax(-1)[0, -3:].gather(1, given[0, -3:, None])
        return float(log_probs.sum())

    exact = likelihood()
    hf_effattn.patch_attention(model, "bi-clustered", **OF_DECODER)
    assert likelihood() == pytest.approx(expected(), abs=1e-4)
    assert likelihood() != pytest.approx(exact, abs=1e-3)


@pytest.mark.compatibility("mteb", "`mteb.evaluate(model, tasks, cache=None)`", "runs")
@pytest.mark.compatibility("mteb", "its cache: after the exact model a patched one gets that score", "differs")
def test_mteb_tells_a_patched_model_from_the_exact_one_without_its_cache(encoder: str, tmp_path: Path) -> None:
    """mteb keys its results by the name on the model card, which a patch does not change."""
    mteb = pytest.importorskip("mteb")
    task = _similarity_task(mteb)
    cache = mteb.ResultCache(tmp_path / "cache")

    def score(model: Any, cache: Any) -> float:
        evaluation = mteb.evaluate(model, task, cache=cache, show_progress_bar=False)
        return evaluation.task_results[0].get_score()

    model = SentenceTransformer(modules=[Transformer(encoder), Pooling(16)], device="cpu")
    model.model_card_data.model_name, model.model_card_data.base_model_revision = "someone/model", "main"
    exact = score(model, cache)
    hf_effattn.patch_attention(model, "bi-clustered", **PATCH)
    assert score(model, cache) == pytest.approx(exact, abs=1e-6)
    assert score(model, None) != pytest.approx(exact, abs=1e-4)


@pytest.mark.compatibility("mteb", "`AbsTaskRetrieval`: whole documents, ranked as `encode` has their vectors", "runs")
def test_mteb_ranks_whole_documents_by_the_vectors_of_the_patched_model(encoder: str) -> None:
    pytest.importorskip("mteb")
    documents = [Meeting(f"d{n}", text(150 + n, n), (text(8, n + 20), text(8, n + 40))) for n in range(14)]
    model = SentenceTransformer(modules=[Transformer(encoder), Pooling(16), Normalize()], device="cpu")
    queries, relevant = relevance(documents)
    scores = []
    for _ in range(2):
        vectors = model.encode([document.text for document in documents], batch_size=1)
        wanted = model.encode(queries, batch_size=1)
        scores.append(statistics.fmean(ndcg_of_queries(vectors, wanted, relevant)))
        assert mteb_score(model, documents) == pytest.approx(scores[-1], abs=1e-4)
        hf_effattn.patch_attention(model, "bi-clustered", clusters=2, topk=1, key_clusters=1, min_length=0)
    assert scores[0] != pytest.approx(scores[1], abs=1e-3)


def _similarity_task(mteb: Any) -> Any:
    """Pairs of texts and made-up scores of how alike they are."""
    from datasets import Dataset, DatasetDict
    from mteb.abstasks import AbsTaskSTS
    from mteb.abstasks.task_metadata import TaskMetadata

    class Pairs(AbsTaskSTS):
        metadata = TaskMetadata(
            name="Pairs",
            description="Random words.",
            dataset={"path": "someone/pairs", "revision": "1"},
            type="STS",
            category="t2t",
            eval_splits=["test"],
            eval_langs=["eng-Latn"],
            main_score="cosine_pearson",
        )

        def load_data(self, **options: Any) -> None:
            rows = [
                {"sentence1": text(100, seed), "sentence2": text(90, seed + 50), "score": seed % 6}
                for seed in range(12)
            ]
            self.dataset = DatasetDict({"test": Dataset.from_list(rows)})
            self.data_loaded = True

    return Pairs()


TRAINED = {"exact_keys": 48, "key_clusters": 4, "segment_length": 64, "window": 32, "min_length": 0}
TRAINING = {"max_steps": 1, "report_to": [], "use_cpu": True, "bf16": False, "save_strategy": "no", "logging_steps": 1}


@pytest.fixture
def decoder(tmp_path: Path) -> Path:
    tokenizer = AutoTokenizer.from_pretrained(save_encoder(tmp_path / "encoder"))
    tokenizer.eos_token = "[SEP]"
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 640}
    sizes |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    make_model("llama", **sizes).save_pretrained(tmp_path / "decoder")
    tokenizer.save_pretrained(tmp_path / "decoder")
    return tmp_path / "decoder"


def patched_decoder(decoder: Path) -> Any:
    return hf_effattn.patch_attention(AutoModelForCausalLM.from_pretrained(decoder), "bi-clustered", **TRAINED)


def first_step(trainer: Any) -> dict[str, float]:
    trainer.train()
    return next(entry for entry in trainer.state.log_history if "loss" in entry)


def preferences() -> Dataset:
    return Dataset.from_list(
        [
            {"prompt": text(80, seed), "chosen": f" {text(120, seed + 10)}", "rejected": f" {text(110, seed + 20)}"}
            for seed in range(4)
        ]
    )


@pytest.mark.compatibility("trl", "`DPOTrainer` with a `ref_model` that is patched alike", "runs")
@pytest.mark.compatibility("trl", "`DPOTrainer` without `ref_model`: the reference has the default settings", "told")
@pytest.mark.parametrize("loaded_patched", [False, True])
def test_the_reference_is_the_policy_or_its_settings_are_told(
    decoder: Path, tmp_path: Path, loaded_patched: bool
) -> None:
    trl = pytest.importorskip("trl")
    model = patched_decoder(decoder)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        reference = patched_decoder(decoder) if loaded_patched else None
        said.clear()
        arguments = trl.DPOConfig(output_dir=str(tmp_path / "run"), per_device_train_batch_size=4, **TRAINING)
        trainer = trl.DPOTrainer(
            model=model,
            ref_model=reference,
            args=arguments,
            train_dataset=preferences(),
            processing_class=AutoTokenizer.from_pretrained(decoder),
        )
        loss = first_step(trainer)["loss"]
    told = any("bi-clustered" in str(warning.message) for warning in said)
    assert told != loaded_patched
    assert (abs(loss - math.log(2)) < 1e-4) == loaded_patched


@pytest.mark.compatibility("trl", "`SFTTrainer`", "runs")
def test_fine_tuning_runs_the_method(decoder: Path, tmp_path: Path, attended: list[str]) -> None:
    trl = pytest.importorskip("trl")
    model = patched_decoder(decoder)
    arguments = trl.SFTConfig(output_dir=str(tmp_path / "run"), per_device_train_batch_size=2, **TRAINING)
    trainer = trl.SFTTrainer(
        model=model,
        args=arguments,
        train_dataset=Dataset.from_list([{"text": text(150, seed)} for seed in range(2)]),
        processing_class=AutoTokenizer.from_pretrained(decoder),
    )
    assert first_step(trainer)["loss"] > 0
    assert attended
    assert set(attended) == {"bi-clustered"}


LONG = texts((38,))[0]
OF_ENCODER = {"clusters": 6, "topk": 8, "min_length": 0}


@pytest.fixture
def word_tokenizer(tmp_path: Path) -> PreTrainedTokenizerFast:
    save_tokenizer(tmp_path)
    return PreTrainedTokenizerFast.from_pretrained(tmp_path)


@pytest.mark.compatibility("transformers", "`pipeline`", "runs")
@pytest.mark.parametrize(
    ("task", "head", "mask"),
    [
        ("text-classification", AutoModelForSequenceClassification, ""),
        ("fill-mask", AutoModelForMaskedLM, " [MASK]"),
        ("feature-extraction", AutoModel, ""),
    ],
)
def test_a_pipeline_answers_by_the_patched_model(task, head, mask, word_tokenizer: Any, attended: list[str]) -> None:
    model, asked = tiny_model("bert", head), [LONG + mask, "w1 w2 w3" + mask]
    answer = pipeline(task, model=model, tokenizer=word_tokenizer, device="cpu")
    exact = answer(asked, batch_size=2)
    hf_effattn.patch_attention(model, "i-clustered", **OF_ENCODER)
    patched = answer(asked, batch_size=2)
    assert attended == ["i-clustered"] * 3
    assert len(patched) == 2
    assert patched[0] != exact[0]
    hf_effattn.unpatch_attention(model)
    assert answer(asked, batch_size=2) == exact
