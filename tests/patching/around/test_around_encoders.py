"""Libraries around a text encoder with a patched one: classifiers, attributions, copies."""

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sklearn.base import clone
from sklearn.linear_model import LogisticRegression
from support.round_trips import own_memory
from support.sentence_models import inside, same, save_plain, texts, train_tables
from support.tiny_models import SMALL_SETTINGS, tiny_model
from torch import nn
from transformers import AutoModelForSequenceClassification

import hf_effattn

SETTINGS: dict[str, dict[str, Any]] = {"bi-clustered": SMALL_SETTINGS["bi-clustered"], "cst": {"slice_length": 4}}
IDS = torch.randint(5, 50, (4, 40), generator=torch.Generator().manual_seed(0))
TEXTS, LABELS = texts((40, 33, 38, 36)), [0, 1, 0, 1]


def patched(folder: Path, method: str) -> Any:
    model = SentenceTransformer(save_plain(folder), device="cpu")
    own_memory(model)
    hf_effattn.patch_attention(model, method, **SETTINGS[method])
    train_tables(model)
    return model


@pytest.mark.compatibility("setfit", "`SetFitModel`: fitted, saved, loaded", "runs")
@pytest.mark.parametrize("method", SETTINGS)
def test_a_classifier_of_few_examples_comes_back_with_the_patch(method: str, tmp_path: Path) -> None:
    setfit = pytest.importorskip("setfit")
    body = patched(tmp_path / "plain", method)
    model = setfit.SetFitModel(model_body=body, model_head=LogisticRegression())
    model.fit(TEXTS, LABELS, num_epochs=1)
    expected = torch.as_tensor(model.model_head.predict_proba(body.encode(TEXTS)))
    assert same([torch.as_tensor(model.predict_proba(TEXTS))], [expected])
    model.save_pretrained(tmp_path / "saved")
    loaded = setfit.SetFitModel.from_pretrained(str(tmp_path / "saved"))
    assert inside(loaded.model_body).config._attn_implementation == method
    assert same([torch.as_tensor(loaded.predict_proba(TEXTS))], [expected])


class Classifier(nn.Module):
    """The logits alone, as skorch wants them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """`(B, labels)`, of `ids` `(B, N)`."""
        return self.model(ids).logits


@pytest.mark.compatibility("skorch", "`clone` of scikit-learn, trained, pickled", "runs")
@pytest.mark.parametrize("method", SETTINGS)
def test_a_clone_of_scikit_learn_runs_the_method(method: str, attended: list[str]) -> None:
    skorch = pytest.importorskip("skorch")
    model = hf_effattn.patch_attention(
        tiny_model("bert", AutoModelForSequenceClassification), method, **SETTINGS[method]
    )
    train_tables(model)
    before = [parameter.clone() for parameter in model.parameters()]
    options: dict[str, Any] = {"train_split": None, "verbose": 0, "optimizer": torch.optim.SGD, "lr": 0.1}
    options |= {"criterion": nn.CrossEntropyLoss, "max_epochs": 1}
    net = clone(skorch.NeuralNetClassifier(Classifier(model), **options))
    net.fit(IDS.numpy(), np.array(LABELS))
    assert set(attended) == {method}
    assert all(map(torch.equal, before, model.parameters()))
    now = net.module_.model.named_parameters()
    changed = {name for (name, weight), was in zip(now, before, strict=True) if not torch.equal(weight, was)}
    assert any("query" in name for name in changed)
    assert (method == "cst") == any("hf_effattn_cst" in name for name in changed)
    found = net.predict_proba(IDS.numpy())
    with torch.no_grad():
        expected = net.module_.model(IDS).logits.softmax(-1)
    torch.testing.assert_close(torch.as_tensor(found), expected)
    torch.testing.assert_close(pickle.loads(pickle.dumps(net)).predict_proba(IDS.numpy()), found)


@pytest.mark.compatibility(
    "captum", "`LayerIntegratedGradients`: with clusters their sum is not the difference of the outputs", "differs"
)
@pytest.mark.parametrize(("method", "completes"), [(None, True), ("bi-clustered", False), ("cst", True)])
def test_integrated_gradients_miss_where_clusters_change(method: str | None, completes: bool) -> None:
    """Between the baseline and the text tokens change clusters: the output jumps, of which no gradient tells."""
    attr = pytest.importorskip("captum.attr")
    model = tiny_model("bert", AutoModelForSequenceClassification)
    if method is not None:
        hf_effattn.patch_attention(model, method, **SETTINGS[method])
    gradients = attr.LayerIntegratedGradients(Classifier(model), model.bert.embeddings)
    ids, baseline = IDS[:1], torch.zeros_like(IDS[:1])
    _, missing = gradients.attribute(ids, baseline, target=1, n_steps=50, return_convergence_delta=True)
    with torch.no_grad():
        difference = (model(ids).logits - model(baseline).logits)[0, 1]
    assert bool(missing.abs() < 0.02 * difference.abs()) == completes


LOADS = """
import pickle, sys
model = pickle.load(open(sys.argv[1], "rb"))
assert "hf_effattn" in sys.modules
pickle.dump(model.encode(sys.argv[2]), open(sys.argv[3], "wb"))
"""


@pytest.mark.slow
@pytest.mark.compatibility("torch", "pickled for a process that imports nothing of ours, as joblib and Ray do", "runs")
def test_a_pickled_model_is_patched_in_another_process(tmp_path: Path) -> None:
    model = patched(tmp_path / "plain", "bi-clustered")
    given, found = tmp_path / "given", tmp_path / "found"
    given.write_bytes(pickle.dumps(model))
    subprocess.run([sys.executable, "-c", LOADS, str(given), TEXTS[0], str(found)], check=True)
    assert same([torch.as_tensor(pickle.loads(found.read_bytes()))], [torch.as_tensor(model.encode(TEXTS[0]))])
    assert inside(hf_effattn.unpatch_attention(pickle.loads(given.read_bytes()))).config._attn_implementation == "sdpa"
