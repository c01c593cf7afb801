"""Adapters of PEFT on a patched or converted base: saved, and loaded with the base's method."""

import peft
import pytest
import torch
from transformers import AutoModelForSequenceClassification, BertConfig, BertForSequenceClassification

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


@pytest.fixture(params=SETTINGS)
def adapter(request, tmp_path, tokens):
    """A base of each method and an adapter on it, both saved; with the output of the two together."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32
    )
    hf_effattn.patch_attention(
        BertForSequenceClassification(config), request.param, **SETTINGS[request.param]
    ).save_pretrained(tmp_path / "base")
    base = hf_effattn.from_pretrained(AutoModelForSequenceClassification, tmp_path / "base")
    lora = peft.LoraConfig(task_type="SEQ_CLS", r=4, target_modules=["query", "value"], init_lora_weights=False)
    model = peft.get_peft_model(base, lora).eval()
    model.save_pretrained(tmp_path / "adapter")
    return request.param, tmp_path / "adapter", model(input_ids=tokens).logits.detach()


@pytest.mark.compatibility("peft", "LoRA: trained, saved, loaded by `AutoPeftModelFor…`", "runs")
def test_an_adapter_loads_with_the_method_of_its_base(adapter, tokens):
    method, path, expected = adapter
    model = hf_effattn.from_pretrained(peft.AutoPeftModelForSequenceClassification, path).eval()
    assert type(model) is peft.PeftModelForSequenceClassification
    assert model.config.effattn["method"] == method
    torch.testing.assert_close(model(input_ids=tokens).logits, expected, rtol=0, atol=0)


def test_the_exact_model_is_another(adapter, tokens):
    """What the test above compares would not tell a patched model from an exact one otherwise."""
    _, path, expected = adapter
    exact = peft.AutoPeftModelForSequenceClassification.from_pretrained(path).eval()
    assert not torch.allclose(exact(input_ids=tokens).logits, expected, atol=1e-6)


@pytest.mark.compatibility("peft", "merged adapters", "runs")
def test_a_merged_adapter_is_saved_and_loaded_patched(adapter, tmp_path, tokens):
    _, path, expected = adapter
    merged = hf_effattn.from_pretrained(peft.AutoPeftModelForSequenceClassification, path).merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    model = hf_effattn.from_pretrained(AutoModelForSequenceClassification, tmp_path / "merged").eval()
    torch.testing.assert_close(model(input_ids=tokens).logits, expected, rtol=0, atol=1e-5)


def test_trained_tables_come_back_with_the_base_loaded_first(tmp_path, tokens):
    config = BertConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32
    )
    base = hf_effattn.patch_attention(BertForSequenceClassification(config), "cst", **SETTINGS["cst"])
    base.save_pretrained(tmp_path / "base")
    base = hf_effattn.from_pretrained(AutoModelForSequenceClassification, tmp_path / "base")
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
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32
    )
    adapter = peft.LoraConfig(task_type="SEQ_CLS", target_modules=["query"])
    if wrapped == "prompt":
        adapter = peft.PromptTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=3)
    model = peft.get_peft_model(BertForSequenceClassification(config), adapter).eval()
    expected = model(input_ids=tokens).logits
    to_patch = model.get_base_model() if wrapped == "base" else model
    with pytest.raises(ValueError, match=r'"cst" adds .* saved without. .* modules_to_save=\["hf_effattn_cst"\]'):
        hf_effattn.patch_attention(to_patch, "cst", **SETTINGS["cst"])
    assert torch.equal(model(input_ids=tokens).logits, expected)
    hf_effattn.patch_attention(to_patch, "clustered", **SETTINGS["clustered"])


def test_tables_learn_only_where_they_are_saved(tmp_path):
    config = BertConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32
    )
    base = hf_effattn.patch_attention(BertForSequenceClassification(config), "cst", **SETTINGS["cst"])
    base.save_pretrained(tmp_path / "base")

    def learning(model):
        return [name for name, weight in model.named_parameters() if "hf_effattn_cst" in name and weight.requires_grad]

    base = hf_effattn.from_pretrained(AutoModelForSequenceClassification, tmp_path / "base")
    assert len(learning(base)) == 2
    model = peft.get_peft_model(base, peft.LoraConfig(task_type="SEQ_CLS", target_modules=["query"]))
    assert not learning(model)
    model.save_pretrained(tmp_path / "adapter")
    auto_class = peft.AutoPeftModelForSequenceClassification
    assert not learning(hf_effattn.from_pretrained(auto_class, tmp_path / "adapter", is_trainable=True))
