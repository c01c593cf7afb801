"""trl's trainers on patched models."""

import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from support.embedding_cases import save_encoder, text
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import hf_effattn

PATCH = {"exact_keys": 48, "key_clusters": 4, "segment_length": 64, "window": 32, "min_length": 0}
TRAINING = {"max_steps": 1, "report_to": [], "use_cpu": True, "bf16": False, "save_strategy": "no", "logging_steps": 1}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    tokenizer = AutoTokenizer.from_pretrained(save_encoder(tmp_path / "encoder"))
    tokenizer.eos_token = "[SEP]"
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    config = LlamaConfig(
        vocab_size=len(tokenizer), max_position_embeddings=640, initializer_range=0.2, pad_token_id=0, **sizes
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "decoder")
    tokenizer.save_pretrained(tmp_path / "decoder")
    return tmp_path / "decoder"


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
    saved: Path, tmp_path: Path, loaded_patched: bool
) -> None:
    trl = pytest.importorskip("trl")
    model = hf_effattn.patch_attention(AutoModelForCausalLM.from_pretrained(saved), "bi-clustered", **PATCH)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        reference = (
            None
            if not loaded_patched
            else hf_effattn.patch_attention(AutoModelForCausalLM.from_pretrained(saved), "bi-clustered", **PATCH)
        )
        said.clear()
        arguments = trl.DPOConfig(output_dir=str(tmp_path / "run"), per_device_train_batch_size=4, **TRAINING)
        trainer = trl.DPOTrainer(
            model=model,
            ref_model=reference,
            args=arguments,
            train_dataset=preferences(),
            processing_class=AutoTokenizer.from_pretrained(saved),
        )
        loss = first_step(trainer)["loss"]
    told = any("bi-clustered" in str(one.message) for one in said)
    assert told != loaded_patched
    assert (abs(loss - math.log(2)) < 1e-4) == loaded_patched


@pytest.mark.compatibility("trl", "`SFTTrainer`", "runs")
def test_fine_tuning_runs_the_method(saved: Path, tmp_path: Path, attended: list[str]) -> None:
    trl = pytest.importorskip("trl")
    model = hf_effattn.patch_attention(AutoModelForCausalLM.from_pretrained(saved), "bi-clustered", **PATCH)
    arguments = trl.SFTConfig(output_dir=str(tmp_path / "run"), per_device_train_batch_size=2, **TRAINING)
    trainer = trl.SFTTrainer(
        model=model,
        args=arguments,
        train_dataset=Dataset.from_list([{"text": text(150, seed)} for seed in range(2)]),
        processing_class=AutoTokenizer.from_pretrained(saved),
    )
    assert first_step(trainer)["loss"] > 0
    assert attended
    assert set(attended) == {"bi-clustered"}
