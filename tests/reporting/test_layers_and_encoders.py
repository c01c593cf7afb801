"""Methods in some layers only, and models with several encoders, each with inputs of its own length."""

import pytest
import torch
from support.tiny_models import batch_for, tiny_config, tiny_model
from transformers import VisionTextDualEncoderConfig, VisionTextDualEncoderModel

import hf_effattn
from hf_effattn import Report
from hf_effattn.measuring.bench import bench

QUICK = {"repeats": 0, "memory": False, "progress": False}


@torch.no_grad()
def test_a_method_in_some_layers_is_the_model_patched_there():
    model = tiny_model("bert")
    inputs = batch_for(model).inputs
    method = {"method": "clustered", "clusters": 5, "min_length": 0}
    report = hf_effattn.report(model, inputs, [method, method | {"layers": [-1, 0]}], **QUICK)
    everywhere, some = (report.of(f"clustered clusters=5{layers}")[0] for layers in ("", " layers=[-1,0]"))
    exact = model(**inputs).last_hidden_state
    patched = hf_effattn.patch_attention(model, layers=[0, 2], **method)(**inputs).last_hidden_state
    assert some.change.hidden_error == pytest.approx(float((patched - exact).norm() / exact.norm()), rel=1e-4)
    assert some.attention_error == everywhere.attention_error | {1: [0.0, 0.0]}
    assert Report.from_dict(report.to_dict()) == report
    assert "layers=[-1,0]" in report.summary()
    report.plot()
    with pytest.raises(ValueError, match="layers has 3"):
        hf_effattn.report(model, inputs, method | {"layers": [3]}, **QUICK)
    with pytest.raises(TypeError, match="a list of layer indices"):
        hf_effattn.report(model, inputs, method | {"layers": 0}, **QUICK)
    with pytest.raises(ValueError, match="no model here that has layers"):
        bench([16], method | {"layers": [0]}, num_heads=1, head_dim=8)


@pytest.mark.parametrize(
    ("clusters", "min_length", "why"),
    [(38, 0, None), (60, 0, "settings"), (20, 50, "min_length"), (20, 0, None), (38, 100, "min_length")],
)
def test_every_encoder_is_judged_by_its_own_length(clusters, min_length, why):
    """A method that was exact in the encoder of 37 patches was said to be exact in that of 60 tokens too."""
    config = VisionTextDualEncoderConfig.from_vision_text_configs(
        tiny_config("vit"), tiny_config("bert"), projection_dim=16
    )
    torch.manual_seed(0)
    model = VisionTextDualEncoderModel(config).eval()
    inputs = {"input_ids": torch.randint(5, 60, (1, 60)), "pixel_values": torch.randn(1, 3, 24, 24)}
    method = {"method": "clustered", "clusters": clusters, "min_length": min_length}
    report = hf_effattn.report(model, inputs, method, **QUICK)
    (measured,) = report.inputs
    assert (measured.length, measured.valid_tokens) == (60, 60)
    assert measured.encoder_lengths == {"vision_model": 37, "text_model": 60}
    assert report.measurements[1].why_exact == why
    words = report.summary()
    assert "1 text of 60 tokens (vision_model 37, text_model 60):" in words
    assert "1 text of 60 tokens (vision_model 37, text_model 60)" in report._repr_html_()
    assert ("this is exact attention" in words) == (why == "settings")
    assert ("in the encoders where they are shorter than min_length" in words) == (why == "min_length")


def test_one_encoder_has_no_lengths_apart():
    model = tiny_model("bert")
    report = hf_effattn.report(model, batch_for(model).inputs, {"method": "clustered", "clusters": 5}, **QUICK)
    assert report.inputs[0].encoder_lengths == {}
    assert "2 texts of 40 tokens:" in report.summary()
