"""Model cards: their code loads the model, their metadata is the Hub's, their numbers are the report's."""

import re
import warnings

import pytest
import torch
from huggingface_hub import EvalResult, ModelCard
from support import cst_models
from support.round_trips import KINDS, changed, inputs_for, output_of, own_memory
from support.tiny_models import tiny_config
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    BartConfig,
    BartModel,
    BertModel,
    BigBirdConfig,
    GPT2Config,
    VisionTextDualEncoderConfig,
)

import hf_effattn
from hf_effattn.hub import evaluations_of
from hf_effattn.hub.card import SOURCES, loaded_from
from hf_effattn.patching.model_types.stacks import longest_input
from hf_effattn.reporting.table import FORCED, report_table

TASKS = {
    "AutoModelForSequenceClassification": "text-classification",
    "AutoModelForCausalLM": "text-generation",
    "AutoModelForMaskedLM": "fill-mask",
    "AutoModelForSeq2SeqLM": "translation",
}


def made(name):
    kind = KINDS[name]
    return changed(kind.build(), kind)


@pytest.mark.slow_except("bert-per-head", "bert-cst", "gpt2-bi-clustered", "cst-*", "clusterformer-translation")
@pytest.mark.parametrize("name", KINDS)
def test_a_card_loads_the_model_and_names_task_and_method(name, tmp_path):
    kind, model = KINDS[name], made(name)
    model.save_pretrained(tmp_path / name)
    card = hf_effattn.model_card(model, repo_id=str(tmp_path / name), license="mit", language="en")
    names: dict = {}
    exec(re.search(r"```python\n(.*?)```", card.text, re.DOTALL)[1], names)
    assert type(names["model"]) is type(model)
    own_memory(names["model"])
    assert torch.equal(output_of(names["model"]), output_of(model))
    text = str(card)
    data = ModelCard(text).data
    assert data.pipeline_tag == TASKS[kind.auto_class]
    assert data.library_name == "transformers"
    assert data.tags == ["hf_effattn", kind.method or name.split("-")[0]]
    assert data.license == "mit"
    # The meaning of a setting, and a candidate's own.
    assert "None" not in re.sub("None: [a-z]|max_predicted_error=None", "", text)
    assert SOURCES[data.tags[1]] in text
    assert f"\n# {name}\n" in text
    assert "\n\n\n" not in text


def test_the_table_has_the_numbers_of_the_report():
    model = KINDS["bert-clustered"].build()
    report = hf_effattn.report(
        model, inputs_for(model), [{"method": "i-clustered", "clusters": 3, "topk": 2}], repeats=1
    )
    text = hf_effattn.model_card(model, report=report).text
    header, rows = report_table(report)
    assert len(rows) == 2
    for row in [header, *rows]:
        assert "| " + " | ".join(row) + " |" in text
    measured = report.of("i-clustered clusters=3 topk=2")[0]
    assert f"{measured.change.embedding_cosines[0]:.2f}"[:3] in text
    assert f"{report.speedup(measured):.2f}×" in text
    assert FORCED in rows[1][1]
    assert f"{FORCED} forced here" in text
    for fact in (report.environment["device_name"], report.environment["versions"]["torch"]):
        assert fact in text


def test_a_part_that_was_not_measured_has_no_column():
    model = KINDS["bert-clustered"].build()
    report = hf_effattn.report(model, inputs_for(model), ["clustered"], repeats=0, memory=False)
    header, rows = report_table(report)
    assert not any("speed" in heading or "memory" in heading for heading in header)
    assert all(len(row) == len(header) for row in rows)


def test_evaluations_become_a_table_and_the_model_index():
    results = {"eval_accuracy": 0.875, "eval_runtime": 3.0, "epoch": 1.0, "test_f1": 0.5, "train_loss": 0.1}
    evaluations = evaluations_of(results, task="text-classification", dataset="stanfordnlp/sst2")
    assert [(row.dataset_split, row.metric_type, row.metric_value) for row in evaluations] == [
        ("validation", "accuracy", 0.875),
        ("test", "f1", 0.5),
    ]
    card = hf_effattn.model_card(made("bert-cst"), name="tuned", evaluations=evaluations)
    assert "| sst2, validation | accuracy | 0.875 |" in card.text
    index = ModelCard(str(card)).data.eval_results
    assert [(row.dataset_type, row.metric_value) for row in index] == [
        ("stanfordnlp/sst2", 0.875),
        ("stanfordnlp/sst2", 0.5),
    ]
    with pytest.raises(ValueError, match="got a list"):
        evaluations_of([{"eval_accuracy": 0.875}], task="text-classification", dataset="a/b")
    with pytest.raises(ValueError, match="no metric among train_loss"):
        evaluations_of({"train_loss": 0.1}, task="text-classification", dataset="a/b")


@pytest.mark.parametrize(
    ("min_length", "said"), [(None, "faster run exact"), (0, None), (1500, "than 1,500 tokens run")]
)
def test_the_limits_say_when_exact_attention_runs(min_length, said):
    model = hf_effattn.patch_attention(KINDS["bert-clustered"].build(), "clustered", min_length=min_length)
    text = hf_effattn.model_card(model, limits=["English only."]).text.split("## Limits")[1]
    assert "- English only." in text
    assert (said in text) if said else ("run exact attention" not in text)


def test_the_base_model_is_where_a_patched_model_came_from(tmp_path):
    kind = KINDS["bert-i-clustered"]
    model = kind.build()
    model.config._name_or_path = "google-bert/bert-base-uncased"
    changed(model, kind).save_pretrained(tmp_path / "patched")
    # Saved, loaded and patched once more it still comes from there.
    loaded = hf_effattn.from_pretrained(AutoModelForSequenceClassification, tmp_path / "patched")
    for patched in (model, loaded, hf_effattn.patch_attention(loaded, "clustered")):
        card = hf_effattn.model_card(patched, name="mine")
        assert card.data.base_model == "google-bert/bert-base-uncased"
        assert (
            "[google-bert/bert-base-uncased](https://huggingface.co/google-bert/bert-base-uncased) with" in card.text
        )
    assert hf_effattn.model_card(loaded, base_model="a/b").data.base_model == "a/b"
    hf_effattn.unpatch_attention(loaded)
    hf_effattn.patch_attention(loaded, "clustered")
    assert hf_effattn.model_card(loaded, name="mine").data.base_model is None, "a folder is no base model"


def test_a_model_loaded_from_the_present_folder_is_called_by_the_folders_name(tmp_path, monkeypatch):
    made("bert-i-clustered").save_pretrained(tmp_path / "mine")
    monkeypatch.chdir(tmp_path / "mine")
    card = hf_effattn.model_card(hf_effattn.from_pretrained(AutoModelForSequenceClassification, "."))
    assert card.data.model_name == "mine"
    assert 'from_pretrained(AutoModelForSequenceClassification, "mine")' in card.text


def test_a_card_of_an_attention_that_is_not_saved_warns():
    model = KINDS["bert-i-clustered"].build()
    model.set_attn_implementation("i-clustered")
    with pytest.warns(UserWarning, match='switched to "i-clustered", which save_pretrained does not keep'):
        hf_effattn.model_card(model, name="mine")


def test_a_class_that_transformers_has_no_auto_class_for():
    model = hf_effattn.CSTForPairClassification(cst_models.tiny_config())
    text = hf_effattn.model_card(model, repo_id="me/pairs").text
    assert "from hf_effattn import CSTForPairClassification\n" in text
    assert 'CSTForPairClassification.from_pretrained("me/pairs")' in text


def test_a_part_that_transformers_does_not_name_is_loaded_by_its_card(tmp_path):
    sizes = {"d_model": 16, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 16, "vocab_size": 20}
    encoder = BartModel(BartConfig(**sizes, decoder_layers=1, decoder_attention_heads=2)).get_encoder()
    hf_effattn.patch_attention(encoder, "clustered", clusters=2, min_length=0).save_pretrained(tmp_path)
    text = hf_effattn.model_card(encoder, repo_id=str(tmp_path)).text
    names: dict = {}
    exec(re.search(r"```python\n(.*?)```", text, re.DOTALL)[1], names)
    assert type(names["model"]) is type(encoder)
    assert names["model"].config._attn_implementation == "clustered"


def test_an_exact_model_has_a_card_too():
    model = BertModel(made("bert-clustered").config.__class__(num_hidden_layers=1, hidden_size=12))
    text = hf_effattn.model_card(model, repo_id="me/exact").text
    assert 'hf_effattn.patch_attention(model, "i-clustered", min_length=0)' in text
    assert "exact attention" in text


def test_a_model_that_no_method_serves_is_not_told_to_be_patched():
    """The card of a model offered `patch_attention`, which refuses it."""
    unserved = BigBirdConfig(architectures=["BigBirdForSequenceClassification"])
    text = hf_effattn.model_card(unserved, repo_id="me/big-bird").text
    assert 'AutoModelForSequenceClassification.from_pretrained("me/big-bird")' in text
    assert "patch_attention" not in text
    decoder = tiny_config("bert", is_decoder=True, architectures=["BertLMHeadModel"])
    assert "patch_attention" not in hf_effattn.model_card(decoder, repo_id="me/decoder").text
    both = VisionTextDualEncoderConfig.from_vision_text_configs(unserved, tiny_config("bert"))
    assert "patch_attention" in hf_effattn.model_card(both, repo_id="me/both").text


def test_the_layers_that_are_patched_are_named():
    """A model patched in some layers read as one patched in all."""
    some, every = (
        hf_effattn.model_card(hf_effattn.patch_attention(KINDS["bert-clustered"].build(), "clustered", layers=layers))
        for layers in ([-1, 0], None)
    )
    assert "| `layers` | `[0, 2]` | the layers that have it, from 0; the others stay exact |" in some.text
    assert "self-attention in layers 0, 2 replaced" in some.text
    assert "layers" not in every.text.split("## Limits")[0]


@pytest.mark.parametrize("model_type", ["bert", "roberta", "xlm-roberta", "camembert", "distilbert", "gpt2"])
def test_the_longest_input_is_what_the_positions_reach(model_type):
    """RoBERTa's table has 514 rows for 512 tokens."""
    sizes = {"n_embd": 32, "n_head": 2, "n_layer": 1, "n_positions": 64} if model_type == "gpt2" else {}
    model = AutoModel.from_config(tiny_config(model_type)) if not sizes else AutoModel.from_config(GPT2Config(**sizes))
    hf_effattn.patch_attention(model, "clustered", clusters=4, min_length=0)
    text = hf_effattn.model_card(model.config, name="m").text
    longest = longest_input(model)
    assert f"Inputs of up to {longest} tokens." in text
    ids = torch.full((1, longest + 1), 7)
    model.eval()(ids[:, 1:])
    with pytest.raises((IndexError, RuntimeError)):
        model(ids)


def test_a_report_of_another_kind_of_model_is_refused():
    bert, gpt2 = KINDS["bert-clustered"].build(), KINDS["gpt2-clustered"].build()
    report = hf_effattn.report(bert, inputs_for(bert), ["clustered"], repeats=0, memory=False)
    with pytest.raises(ValueError, match="of a model of type 'bert', this one is 'gpt2'"):
        hf_effattn.model_card(gpt2, report=report)
    with pytest.raises(TypeError, match="a transformers model or its configuration"):
        hf_effattn.model_card("me/bert")


def test_a_report_of_other_settings_is_told():
    model = hf_effattn.patch_attention(KINDS["bert-clustered"].build(), "clustered", clusters=4, min_length=0)
    inputs = inputs_for(model)
    report, other = (
        hf_effattn.report(model, inputs, [f"clustered clusters={n}"], repeats=0, memory=False) for n in (4, 3)
    )
    with warnings.catch_warnings(action="error"):
        hf_effattn.model_card(model, report=report)
    with pytest.warns(UserWarning, match="clustered clusters=3, and this model runs clustered clusters=4:"):
        hf_effattn.model_card(model, report=other)


def test_the_loading_code_gets_the_name_of_the_repository():
    text = str(hf_effattn.model_card(made("bert-clustered"), name="mine"))
    there = loaded_from(text, "me/there")
    assert 'hf_effattn.from_pretrained(AutoModelForSequenceClassification, "me/there")' in there
    assert loaded_from(there, "mine") == text
    other = 'Trained from `AutoModel.from_pretrained("google-bert/bert-base-uncased")`.'
    described = str(hf_effattn.model_card(made("bert-clustered"), name="mine", description=other))
    assert other in loaded_from(described, "me/there")
    assert 'SequenceClassification, "me/there")' in loaded_from(described, "me/there")
    by_hand = '---\nlicense: mit\n---\nmodel = AutoModel.from_pretrained("mine")\n'
    assert loaded_from(by_hand, "me/there") == by_hand


def test_several_evaluations_of_other_kinds_are_written_as_they_are():
    evaluation = EvalResult(
        task_type="translation", dataset_type="a/b", dataset_name="AB", metric_type="bleu", metric_value="23.1 / 40"
    )
    assert "| AB | bleu | 23.1 / 40 |" in hf_effattn.model_card(made("cst-causal"), evaluations=[evaluation]).text
