"""lm_eval and mteb on patched models: what is evaluated is the patched model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from support.embedding_cases import save_encoder, text
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

import hf_effattn

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
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    config = LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=640, initializer_range=0.25, **sizes)
    model = LlamaForCausalLM(config).eval()
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
            found = model(given[:, :-1]).logits.log_softmax(-1)[0, -3:].gather(1, given[0, -3:, None])
        return float(found.sum())

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
        found = mteb.evaluate(model, task, cache=cache, show_progress_bar=False)
        return found.task_results[0].get_score()

    model = SentenceTransformer(modules=[Transformer(encoder), Pooling(16)], device="cpu")
    model.model_card_data.model_name, model.model_card_data.base_model_revision = "someone/model", "main"
    exact = score(model, cache)
    hf_effattn.patch_attention(model, "bi-clustered", **PATCH)
    assert score(model, cache) == pytest.approx(exact, abs=1e-6)
    assert score(model, None) != pytest.approx(exact, abs=1e-4)


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
