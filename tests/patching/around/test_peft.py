"""Adapters of PEFT on a patched or converted base: saved, and loaded with the base's method."""

import peft
import pytest
import torch
from support.tiny_models import tiny_model
from transformers import AutoModelForSequenceClassification

import hf_effattn

SETTINGS = {
    "clustered": {"clusters": 4, "min_length": 0},
    "i-clustered": {"clusters": 4, "topk": 4, "min_length": 0},
    "bi-clustered": {"clusters": 4, "topk": 4, "key_clusters": 4, "min_length": 0},
    "cst": {"slice_length": 8, "min_length": 0},
}


@pytest.fixture
def tokens():
    torch.manual_seed(1)
    return torch.randint(0, 50, (2, 48))


def exact():
    return tiny_model("bert", AutoModelForSequenceClassification)


def saved_base(method, folder):
    """Patched, saved, and loaded."""
    hf_effattn.patch_attention(exact(), method, **SETTINGS[method]).save_pretrained(folder)
    return hf_effattn.from_pretrained(AutoModelForSequenceClassification, folder)


@pytest.mark.slow_except("bi-clustered", "cst")
@pytest.mark.compatibility("peft", "LoRA: trained, saved, loaded by `AutoPeftModelFor…`", "runs")
@pytest.mark.compatibility("peft", "merged adapters", "runs")
@pytest.mark.parametrize("method", SETTINGS)
def test_an_adapter_loads_with_the_method_of_its_base_and_is_merged(method, tmp_path, tokens):
    base = saved_base(method, tmp_path / "base")
    lora = peft.LoraConfig(task_type="SEQ_CLS", r=4, target_modules=["query", "value"], init_lora_weights=False)
    model = peft.get_peft_model(base, lora).eval()
    model.save_pretrained(tmp_path / "adapter")
    expected = model(input_ids=tokens).logits
    auto_class = peft.AutoPeftModelForSequenceClassification
    loaded = hf_effattn.from_pretrained(auto_class, tmp_path / "adapter").eval()
    assert type(loaded) is peft.PeftModelForSequenceClassification
    assert loaded.config.effattn["method"] == method
    torch.testing.assert_close(loaded(input_ids=tokens).logits, expected, rtol=0, atol=0)
    plain = auto_class.from_pretrained(tmp_path / "adapter").eval()
    assert not torch.allclose(plain(input_ids=tokens).logits, expected, atol=1e-6)
    loaded.merge_and_unload().save_pretrained(tmp_path / "merged")
    merged = hf_effattn.from_pretrained(AutoModelForSequenceClassification, tmp_path / "merged").eval()
    torch.testing.assert_close(merged(input_ids=tokens).logits, expected, rtol=0, atol=1e-5)


def test_trained_tables_come_back_with_the_base_loaded_first(tmp_path, tokens):
    base = saved_base("cst", tmp_path / "base")
    lora = peft.LoraConfig(
        task_type="SEQ_CLS", target_modules=["query"], modules_to_save=["hf_effattn_cst", "classifier"]
    )
    model = peft.get_peft_model(base, lora).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "hf_effattn_cst.modules_to_save" in name:
                parameter.normal_()
    model.save_pretrained(tmp_path / "adapter")
    with pytest.raises(ValueError, match=r"then PeftModel\.from_pretrained"):
        hf_effattn.from_pretrained(peft.AutoPeftModelForSequenceClassification, tmp_path / "adapter")
    again = hf_effattn.from_pretrained(AutoModelForSequenceClassification, tmp_path / "base")
    again = peft.PeftModel.from_pretrained(again, tmp_path / "adapter").eval()
    torch.testing.assert_close(again(input_ids=tokens).logits, model(input_ids=tokens).logits, rtol=0, atol=0)


@pytest.mark.compatibility("peft", 'a conversion to `"cst"` after `get_peft_model`', "refused")
@pytest.mark.parametrize("wrapped", ["peft", "base", "prompt"])
def test_tables_that_adapters_would_be_saved_without_are_refused(wrapped, tokens):
    """They learned with the adapter, and were in no file."""
    adapter = peft.LoraConfig(task_type="SEQ_CLS", target_modules=["query"])
    if wrapped == "prompt":
        adapter = peft.PromptTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=3)
    model = peft.get_peft_model(exact(), adapter).eval()
    expected = model(input_ids=tokens).logits
    to_patch = model.get_base_model() if wrapped == "base" else model
    with pytest.raises(ValueError, match=r'"cst" adds .* saved without. .* modules_to_save=\["hf_effattn_cst"\]'):
        hf_effattn.patch_attention(to_patch, "cst", **SETTINGS["cst"])
    assert torch.equal(model(input_ids=tokens).logits, expected)
    hf_effattn.patch_attention(to_patch, "clustered", **SETTINGS["clustered"])


def test_tables_learn_only_where_they_are_saved(tmp_path):

    def learning(model):
        return [name for name, weight in model.named_parameters() if "hf_effattn_cst" in name and weight.requires_grad]

    base = saved_base("cst", tmp_path / "base")
    assert len(learning(base)) == 2
    model = peft.get_peft_model(base, peft.LoraConfig(task_type="SEQ_CLS", target_modules=["query"]))
    assert not learning(model)
    model.save_pretrained(tmp_path / "adapter")
    auto_class = peft.AutoPeftModelForSequenceClassification
    assert not learning(hf_effattn.from_pretrained(auto_class, tmp_path / "adapter", is_trainable=True))
