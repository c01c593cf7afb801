"""The report's numbers against direct computation, and the model afterwards against the model before."""

import json
import sys

import pytest
import torch
from support.tiny_models import FULL_LAYERS, MODEL_TYPES, batch_for, mostly_slow, tiny_model
from torch.nn.functional import cosine_similarity, scaled_dot_product_attention
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
)

import hf_effattn
from hf_effattn import Report
from hf_effattn.patching import make_method
from hf_effattn.patching.methods import crossover
from hf_effattn.patching.model_types.table import MODEL_TYPES as TABLE

METHODS = [
    {"method": "clustered", "clusters": 5},
    {"method": "i-clustered", "clusters": 5, "topk": 4, "min_length": 0},
    {"method": "bi-clustered", "clusters": 5, "topk": 4, "key_clusters": 6, "min_length": 0},
]
CLUSTERED, IMPROVED = "clustered clusters=5", "i-clustered clusters=5 topk=4"
BI_CLUSTERED = "bi-clustered clusters=5 topk=4 key_clusters=6"


def quick_report(model, inputs, methods=METHODS, **options):
    return hf_effattn.report(model, inputs, methods, **{"repeats": 0, "memory": False, "progress": False} | options)


def first_layer(model, inputs):
    """Query, key and value of the first layer of a BERT, `(B, H, N, D)`."""
    hidden = model.embeddings(input_ids=inputs["input_ids"])
    attention = model.encoder.layer[0].attention.self
    heads = attention.num_attention_heads
    return [
        project(hidden).unflatten(-1, (heads, -1)).transpose(1, 2)
        for project in (attention.query, attention.key, attention.value)
    ]


@pytest.mark.parametrize("padding", [None, "left", "right"])
@torch.no_grad()
def test_error_of_every_head_of_the_first_layer_is_that_of_a_direct_computation(padding):
    model = tiny_model("bert")
    inputs = batch_for(model, padding=padding).inputs
    mask = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()
    query, key, value = first_layer(model, inputs)
    exact = scaled_dot_product_attention(query, key, value, attn_mask=mask[:, None, None, :])
    settings = make_method("i-clustered", clusters=5, topk=4, min_length=0)
    approximate = settings.run(query, key, value, key_mask=mask)
    expected = []
    for head in range(query.shape[1]):
        reference = torch.cat([exact[text, head, mask[text]] for text in range(2)])
        other = torch.cat([approximate[text, head, mask[text]] for text in range(2)])
        expected.append(float((other - reference).norm() / reference.norm()))

    (measured,) = quick_report(model, inputs).of(IMPROVED)

    assert min(expected) > 0.01
    assert measured.attention_error[0] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("padding", [None, "right"])
@torch.no_grad()
def test_output_change_is_that_of_the_patched_model(padding):
    model = tiny_model("bert")
    inputs = batch_for(model, padding=padding).inputs
    mask = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()
    exact = model(**inputs).last_hidden_state
    (measured,) = quick_report(model, inputs).of(CLUSTERED)
    patched = hf_effattn.patch_attention(model, "clustered", clusters=5, min_length=0)
    other = patched(**inputs).last_hidden_state
    pooled = [torch.stack([hidden[text][mask[text]].mean(0) for text in range(2)]) for hidden in (exact, other)]

    error = (other[mask] - exact[mask]).norm() / exact[mask].norm()
    assert measured.change.hidden_error == pytest.approx(float(error), rel=1e-4)
    assert measured.change.embedding_cosines == pytest.approx(cosine_similarity(*pooled).tolist(), rel=1e-4)


@torch.no_grad()
def test_as_many_labels_as_tokens_are_labels():
    """They were taken for numbers of the tokens, and half of them for padding."""
    inputs = batch_for(tiny_model("bert"), padding="right").inputs
    labels = inputs["input_ids"].shape[1]
    model = tiny_model("bert", AutoModelForSequenceClassification, num_labels=labels)
    exact = model(**inputs).logits
    (m,) = quick_report(model, inputs).of(CLUSTERED)
    other = hf_effattn.patch_attention(model, "clustered", clusters=5, min_length=0)(**inputs).logits
    assert m.change.logits_error["logits"] == pytest.approx(float((other - exact).norm() / exact.norm()), rel=1e-4)
    same = float((other.argmax(-1) == exact.argmax(-1)).double().mean())
    assert m.change.argmax_agreement["logits"] == same


@pytest.mark.slow_except("bert", "vit", "whisper", "bart")
@pytest.mark.parametrize("model_type", mostly_slow(MODEL_TYPES))
def test_every_model_type_is_measured_and_left_as_it_was(model_type):
    model = tiny_model(model_type)
    inputs = batch_for(model).inputs
    config = json.dumps(model.config.to_dict(), default=str)
    with torch.no_grad():
        before = model(**inputs)[0]
    report = quick_report(model, inputs)
    with torch.no_grad():
        after = model(**inputs)[0]

    layers = FULL_LAYERS.get(model_type, (0, 1, 2))
    in_windows = TABLE[model_type].window_of_image is not None  # which layers see them shows when they are called
    assert tuple(report.layers) == ((0, 1, 2) if in_windows else layers)
    for label in (CLUSTERED, IMPROVED, BI_CLUSTERED):
        (measured,) = report.of(label)
        assert tuple(measured.attention_error) == layers
        assert all(0 < error < 2 for heads in measured.attention_error.values() for error in heads)
        assert measured.change.hidden_error > 0
    assert torch.equal(before, after)
    assert json.dumps(model.config.to_dict(), default=str) == config


def test_a_patched_model_in_training_mode_comes_back_patched_and_in_training_mode():
    model = tiny_model("bert").train()
    model.pooler.eval()
    hf_effattn.patch_attention(model, "i-clustered", layers=[1], clusters=4, topk=3, min_length=0)
    inputs = batch_for(model).inputs
    stored = dict(model.config.effattn)
    torch.manual_seed(0)
    before = model(**inputs).last_hidden_state
    report = quick_report(model, inputs)
    torch.manual_seed(0)
    after = model(**inputs).last_hidden_state

    assert torch.equal(before, after)
    assert model.config.effattn == stored
    assert model.config._attn_implementation == "i-clustered"
    assert model.training
    assert not model.pooler.training
    # What is compared with is the exact model, not the patched one.
    assert (
        report.of(CLUSTERED)[0].attention_error
        == quick_report(hf_effattn.unpatch_attention(model), inputs).of(CLUSTERED)[0].attention_error
    )


def test_an_exception_in_the_forward_pass_leaves_the_model_as_it_was():
    model = tiny_model("bert").train()
    inputs = batch_for(model).inputs

    def fail(*args):
        raise RuntimeError("broken layer")

    hook = model.encoder.layer[1].register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="broken layer"):
        quick_report(model, inputs)
    hook.remove()
    assert model.config._attn_implementation == "sdpa"
    assert model.training
    assert not hasattr(model.config, "effattn")


@pytest.mark.slow_except("2")
@pytest.mark.parametrize("stop_at", [2, 8])
def test_an_interruption_returns_what_has_been_measured(stop_at, tmp_path):
    model = tiny_model("bert")
    inputs = [batch_for(model, length=length).inputs for length in (20, 30)]
    before = model(**inputs[0]).last_hidden_state

    def interrupt(done, total, what):
        if done == stop_at:
            raise KeyboardInterrupt

    with pytest.warns(UserWarning, match="interrupted"):
        report = quick_report(model, inputs, progress=interrupt)
    assert not report.complete
    assert len(report.of(IMPROVED)) == (1 if stop_at == 2 else 2)
    assert "interrupted" in report.summary()
    assert "interrupted" in repr(report)
    # A heat map needs all layers of a length.
    assert report.save(tmp_path)[0].name == "report.json"
    assert Report.from_dict(json.loads(json.dumps(report.to_dict()))) == report
    assert torch.equal(before, model(**inputs[0]).last_hidden_state)


def test_progress_counts_every_step():
    model = tiny_model("bert")
    steps = []
    quick_report(model, batch_for(model).inputs, METHODS[:1], repeats=1, progress=lambda *step: steps.append(step))
    assert [done for done, _, _ in steps] == list(range(1, 1 + steps[0][1]))


def test_times_and_memory_are_measured_in_whole_rounds():
    model = tiny_model("bert")
    inputs = [batch_for(model, length=length).inputs for length in (30, 60)]
    report = quick_report(model, inputs, repeats=2, memory=True, max_error=1e-6)
    for index in (0, 1):
        rounds = {len(report.of(method, index)[0].forward_seconds) for method in ("unpatched", CLUSTERED, IMPROVED)}
        assert len(rounds) == 1
        assert rounds.pop() >= 2
        for method in ("unpatched", CLUSTERED, IMPROVED):
            (measured,) = report.of(method, index)
            assert report.speedup(measured) > 0
            assert report.speedup(measured, "attention") > 0
            # At least the layer's own output, in float32.
            assert measured.attention_peak_bytes >= 4 * 2 * report.inputs[index].length * 32
            assert measured.forward_peak_bytes >= measured.attention_peak_bytes
    assert report.speedup(report.of("unpatched", 0)[0]) == 1
    assert report.fastest_within(1e-6) is None
    assert "none of these settings meets it" in report.summary()
    largest = max(m.change.hidden_error for method in (CLUSTERED, IMPROVED) for m in report.of(method))
    assert report.fastest_within(2 * largest) in (CLUSTERED, IMPROVED)
    # What a patched model would not run is not recommended without a word.
    report.max_error = 2 * largest
    for measured in report.of(CLUSTERED):  # the fastest, whatever else the machine does
        measured.forward_seconds = [1e-9] * len(measured.forward_seconds)
    assert "These lengths are below its min_length: to force the method, patch with min_length=0" in report.summary()
    assert "they are shorter than min_length (1," in report.summary()
    report.of(CLUSTERED, 1)[0].why_exact = None  # a length that it starts at
    assert "30 tokens are below its min_length" in report.summary()


def test_a_report_says_where_no_length_is_enough(monkeypatch):
    """Where the future is masked on a kind of device without kernels for that."""
    monkeypatch.setattr(crossover, "CAUSAL_CROSSOVER", {"elsewhere": crossover.CAUSAL_CROSSOVER["cpu"]})
    sizes = {"vocab_size": 60, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", **sizes)).eval()
    inputs = {"input_ids": torch.arange(5, 45)[None]}
    method = {"method": "bi-clustered", "exact_keys": 18, "key_clusters": 3, "segment_length": 4, "window": 4}
    said = quick_report(model, inputs, [method]).summary()
    assert 'would run exact attention: on "cpu" exact attention runs at every length' in said
    assert "shorter than min_length" not in said


def test_peak_memory_on_the_cpu_is_that_of_the_tensors_alive_at_once():
    def call():
        first = torch.empty(3_000_000)
        del first
        return torch.empty(1_000_000), torch.empty(1_500_000)

    from hf_effattn.measuring.cost import peak_memory_added

    result, added = peak_memory_added(call, torch.device("cpu"))
    assert result[1].shape == (1_500_000,)
    assert added == 12_000_000


def test_short_inputs_are_measured_and_said_to_run_exact():
    model = tiny_model("bert")
    report = quick_report(
        model,
        batch_for(model, length=20).inputs,
        [{"method": "clustered", "clusters": 5, "min_length": 21}, *METHODS[1:]],
    )
    assert report.of(CLUSTERED)[0].why_exact == "min_length"
    assert report.of(CLUSTERED)[0].mean_attention_error > 0.01
    assert report.of(IMPROVED)[0].why_exact is None
    assert f"Patched with {CLUSTERED}, the model would run exact attention" in report.summary()


def test_settings_that_reach_the_length_are_said_to_be_exact():
    model = tiny_model("bert")
    report = quick_report(model, batch_for(model, length=20).inputs, [{"method": "clustered", "clusters": 20}])
    (measured,) = report.of("clustered clusters=20")
    assert measured.why_exact == "settings"
    assert measured.mean_attention_error == pytest.approx(0, abs=1e-5)
    assert "this is exact attention" in report.summary()
    assert report.fastest_within(1) is None


def test_logits_of_heads_are_compared():
    inputs = batch_for(tiny_model("bert"), padding="right").inputs
    answering = quick_report(tiny_model("bert", AutoModelForQuestionAnswering), inputs).of(CLUSTERED)[0].change
    assert set(answering.logits_error) == {"start_logits", "end_logits"}
    assert set(answering.argmax_agreement) == {"start_logits", "end_logits"}
    language = quick_report(tiny_model("bert", AutoModelForMaskedLM), inputs).of(CLUSTERED)[0].change
    assert language.hidden_error > 0
    tokens = int(inputs["attention_mask"].sum())
    assert language.argmax_agreement["logits"] * tokens == pytest.approx(
        round(language.argmax_agreement["logits"] * tokens)
    )
    regression = tiny_model("bert", AutoModelForSequenceClassification, num_labels=1)
    change = quick_report(regression, inputs).of(CLUSTERED)[0].change
    assert change.logits_error["logits"] > 0
    assert not change.argmax_agreement


def test_the_table_is_tidy_and_survives_json(tmp_path):
    model = tiny_model("bert")
    report = quick_report(model, batch_for(model, padding="left").inputs, repeats=1, memory=True)
    table = report.to_pandas()
    errors = table[table.metric == "attention_error"]
    assert len(errors) == 3 * 3 * 2  # methods, layers, heads
    assert not errors.duplicated(["input", "method", "layer", "head"]).any()
    assert table[table.metric == "forward_speedup"].method.tolist() == ["unpatched", CLUSTERED, IMPROVED, BI_CLUSTERED]
    assert table.valid_tokens.unique().tolist() == [69]
    (file,) = report.save(tmp_path / "new" / "folder", pictures=False)
    assert Report.load(file.parent) == report
    assert json.loads(file.read_text())["environment"]["versions"]["torch"] == torch.__version__
    assert str(report) == str(Report.load(file.parent))


MISTAKES = {
    "no inputs": ({"inputs": []}, ValueError, "inputs is empty"),
    "empty tensor": ({"inputs": {"input_ids": torch.zeros(1, 0, dtype=torch.long)}}, ValueError, "is empty"),
    "tensor without values": ({"inputs": {"input_ids": torch.ones(1, 4).long().to("meta")}}, ValueError, "real ones"),
    "model without values": ({"model": tiny_model("bert").to("meta")}, ValueError, "from_pretrained, without offload"),
    "text": ({"inputs": "a text"}, TypeError, "call tokenizer"),
    "texts": ({"inputs": ["a text"]}, TypeError, "call tokenizer"),
    "lists": ({"inputs": {"input_ids": [[1, 2]]}}, TypeError, 'return_tensors="pt"'),
    "one row": ({"inputs": {"input_ids": torch.tensor([1, 2])}}, ValueError, r"ids\[None\]"),
    "foreign ids": ({"inputs": {"input_ids": torch.tensor([[1, 60]])}}, ValueError, "another model's tokenizer"),
    "too long": ({"inputs": {"input_ids": torch.ones(1, 65).long()}}, ValueError, r"extend_positions\(model, 65\)"),
    "dense mask": (
        {"inputs": {"input_ids": torch.ones(1, 4).long(), "attention_mask": torch.ones(1, 1, 4, 4)}},
        ValueError,
        "padding mask",
    ),
    "mask of another length": (
        {"inputs": {"input_ids": torch.ones(1, 4).long(), "attention_mask": torch.ones(1, 5)}},
        ValueError,
        "must have the shape of input_ids",
    ),
    "everything masked": (
        {"inputs": {"input_ids": torch.ones(1, 4).long(), "attention_mask": torch.zeros(1, 4)}},
        ValueError,
        "masks every token",
    ),
    "no methods": ({"methods": []}, ValueError, "methods is empty"),
    "unknown method": ({"methods": ["i-clusterd"]}, ValueError, 'did you mean "i-clustered"'),
    "unknown setting": ({"methods": {"method": "clustered", "cluster": 3}}, ValueError, 'did you mean "clusters"'),
    "method without name": ({"methods": [{"clusters": 3}]}, TypeError, 'the key "method"'),
    "methods as number": ({"methods": 3}, TypeError, "sequence of names"),
    "the same twice": ({"methods": ["clustered", {"method": "clustered", "min_length": 0}]}, ValueError, "twice"),
    "negative repeats": ({"repeats": -1}, ValueError, "repeats"),
    "repeats as float": ({"repeats": 1.5}, TypeError, "repeats"),
    "budget zero": ({"max_error": 0, "repeats": 1}, ValueError, "above 0"),
    "budget as text": ({"max_error": "5%", "repeats": 1}, TypeError, "max_error"),
    "budget without times": ({"max_error": 0.1}, ValueError, "repeats must be at least 1"),
    "not a model": ({"model": torch.nn.Linear(2, 2)}, TypeError, "must be a transformers model"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_named_before_anything_runs(mistake):
    arguments, error, message = MISTAKES[mistake]
    model = tiny_model("bert")
    arguments = {"model": model, "inputs": batch_for(model).inputs} | arguments

    def fail(*args):
        raise AssertionError("the model ran")

    model.register_forward_pre_hook(fail)
    with pytest.raises(error, match=message):
        quick_report(**arguments)


@torch.no_grad()
def test_a_causal_model_with_grouped_heads():
    from transformers import LlamaConfig, LlamaModel

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    torch.manual_seed(0)
    model = LlamaModel(LlamaConfig(vocab_size=60, num_key_value_heads=2, initializer_range=0.25, **sizes)).eval()
    ids = torch.randint(5, 60, (2, 40))
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    small = {"exact_keys": 18, "segment_length": 4, "window": 4}
    methods = [
        {"method": "i-clustered", "clusters": 4, **small},
        {"method": "bi-clustered", "key_clusters": 2, **small},
    ]
    report = quick_report(model, {"input_ids": ids, "attention_mask": mask}, methods)
    hidden = model(ids, attention_mask=mask).last_hidden_state[mask.bool()]
    for label, settings in zip(report.methods, methods, strict=True):
        (measured,) = report.of(label)
        assert all(0 < error < 1 for errors in measured.attention_error.values() for error in errors)
        hf_effattn.patch_attention(model, **settings, min_length=0)
        changed = model(ids, attention_mask=mask).last_hidden_state[mask.bool()]
        hf_effattn.unpatch_attention(model)
        assert measured.change.hidden_error == pytest.approx(
            float((changed - hidden).norm() / hidden.norm()), rel=1e-4
        )


def test_a_causal_model_outside_the_table_is_refused():
    from transformers import HeliumConfig, HeliumModel

    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    sizes |= {"num_key_value_heads": 2, "head_dim": 4, "pad_token_id": 1}
    model = HeliumModel(HeliumConfig(vocab_size=10, **sizes))
    with pytest.raises(ValueError, match="causal"):
        quick_report(model, {"input_ids": torch.ones(1, 4).long()})


def test_without_matplotlib_the_picture_says_what_to_install(monkeypatch, tmp_path):
    model = tiny_model("bert")
    report = quick_report(model, batch_for(model).inputs)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'hf_effattn\[plots\]'"):
        report.plot()
    with pytest.raises(ImportError, match="plots"):
        report.save(tmp_path)
    assert Report.load(tmp_path) == report
