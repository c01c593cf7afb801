"""Models of every family that are pushed to the Hub of `hub_server`, and the clients that push and load them.

Each client is a process of its own (`python -c "from support import round_trips; round_trips.push(…)"`); what
it computes it leaves as files in a folder.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from support import clusterformer_cases, cst_conversions, cst_models

import hf_effattn

PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# Less than the smallest model here, in bfloat16.
FORMS = {"one-file": None, "shards": "8KB"}
PADDED = 9


@dataclass(frozen=True)
class Kind:
    """What a model is: the class it is loaded with, and how it is made, method and settings where it is changed."""

    auto_class: str
    build: Callable[[], Any]
    method: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def family(self) -> str:
        return "from-scratch" if self.method is None else "converted" if self.method == "cst" else "patched"


def patched(model_type: str, auto_class: str, method: str, **settings: Any) -> Kind:
    """A pretrained model, to be patched or converted."""

    def build() -> Any:
        return cst_conversions.small_model(model_type, getattr(transformers, auto_class))

    forced = {} if method == "cst" else {"min_length": 0}
    return Kind(auto_class, build, method, forced | settings)


def from_scratch(auto_class: str, cases: Any, **changes: Any) -> Kind:
    """A model of this package, from the module that has tiny ones of its family."""

    def build() -> Any:
        torch.manual_seed(0)
        return getattr(transformers, auto_class).from_config(cases.tiny_config(**changes))

    return Kind(auto_class, build)


CLASSIFICATION, CAUSAL = "AutoModelForSequenceClassification", "AutoModelForCausalLM"
SEGMENTS = {"segment_length": 4, "window": 4}
KINDS = {
    "bert-clustered": patched("bert", CLASSIFICATION, "clustered", clusters=4),
    "bert-i-clustered": patched("bert", CLASSIFICATION, "i-clustered", clusters=4, topk=8, layers=[0, 2]),
    "bert-bi-clustered": patched("bert", CLASSIFICATION, "bi-clustered", clusters=4, topk=8, key_clusters=7),
    "bert-per-head": patched(
        "bert",
        CLASSIFICATION,
        "per-head",
        candidates=[
            {"method": "i-clustered", "clusters": 4, "topk": 8},
            {"method": "bi-clustered", "clusters": 5, "topk": 8, "key_clusters": 7, "max_predicted_error": None},
        ],
        heads=[[0, 1], [2, 0], [1, 2]],
        tolerance=0.3,
    ),
    "gpt2-clustered": patched("gpt2", CAUSAL, "clustered", clusters=4, **SEGMENTS),
    "gpt2-i-clustered": patched("gpt2", CAUSAL, "i-clustered", clusters=4, exact_keys=18, **SEGMENTS),
    "gpt2-bi-clustered": patched("gpt2", CAUSAL, "bi-clustered", exact_keys=18, key_clusters=3, **SEGMENTS),
    "bert-cst": patched("bert", CLASSIFICATION, "cst"),
    "gpt2-cst": patched("gpt2", CAUSAL, "cst", extension_ratio=2),
    "cst-classification": from_scratch(CLASSIFICATION, cst_models),
    "cst-causal": from_scratch(CAUSAL, cst_models),
    "cst-masked": from_scratch("AutoModelForMaskedLM", cst_models, variant="three_levels", num_global_tokens=2),
    "clusterformer-classification": from_scratch(CLASSIFICATION, clusterformer_cases),
    "clusterformer-causal": from_scratch(CAUSAL, clusterformer_cases),
    "clusterformer-translation": from_scratch("AutoModelForSeq2SeqLM", clusterformer_cases),
}
CASES = [(kind, precision, form) for kind in KINDS for precision in PRECISIONS for form in FORMS]
# Those that are also saved in a folder.
SAVED = ("float32", "one-file")
# Those that are also loaded with `device_map="auto"`, one of a family: once like this, and once with this much memory,
# which is less than they need, so that some layers stay on the disk.
SPREAD = {"bert-i-clustered": "60KB", "bert-cst": "60KB", "cst-causal": "15KB", "clusterformer-causal": "40KB"}
# Converted, pushed twice; converted, for who has a token.
HISTORY, PRIVATE = "history", "private"


def case_name(kind: str, precision: str, form: str) -> str:
    """The name of a case, and of its repository."""
    return f"{kind}-{precision}-{form}"


def inputs_for(model: Any) -> dict[str, torch.Tensor]:
    """Two texts, the second padded on the right."""
    ids = torch.randint(5, 50, (2, 40), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, -PADDED:] = 0
    if model.config.is_encoder_decoder:
        return {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": ids[:, 20:]}
    return {"input_ids": ids, "attention_mask": mask}


@torch.no_grad()
def output_of(model: Any) -> torch.Tensor:
    """The logits, as the model gives them."""
    return model.eval()(**inputs_for(model)).logits.clone()


def own_memory(model: Any) -> None:
    """Move weights that are read out of a mapped file to where PyTorch would have put them.

    In the file they may lie at any multiple of their own size, and matrix products of PyTorch can add in another order
    there: equal weights, outputs that differ in the last bit.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.clone()


def changed(model: Any, kind: Kind) -> Any:
    """The model patched or converted as its kind says."""
    if kind.method == "cst":
        return cst_conversions.convert(model, **kind.settings)
    return hf_effattn.patch_attention(model, kind.method, **kind.settings) if kind.method else model


def push(folder: Path) -> None:
    """Push every case; leave its outputs as `exact.safetensors` and, when changed, `expected.safetensors`."""
    exact, expected, commits = {}, {}, {}
    for kind_name, precision, form in CASES:
        kind, name = KINDS[kind_name], case_name(kind_name, precision, form)
        model = kind.build().to(PRECISIONS[precision])
        exact[name] = output_of(model)
        expected[name] = output_of(changed(model, kind))
        model.push_to_hub(name, **({"max_shard_size": FORMS[form]} if FORMS[form] else {}))
        if (precision, form) == SAVED:
            model.save_pretrained(folder / "saved" / name)

    kind = KINDS["bert-cst"]
    model = changed(kind.build(), kind)
    expected[PRIVATE] = output_of(model)
    model.push_to_hub(PRIVATE, private=True)
    expected["first"] = output_of(model)
    commits["first"] = model.push_to_hub(HISTORY).oid
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    expected["newest"] = output_of(model)
    commits["newest"] = model.push_to_hub(HISTORY).oid
    save_file(exact, folder / "exact.safetensors")
    save_file(expected, folder / "expected.safetensors")
    (folder / "commits.json").write_text(json.dumps(commits))


def load(folder: Path, owner: str, token: str) -> None:
    """Load every case by its name on the Hub; leave the outputs as `loaded.safetensors` and `facts.json`."""
    loaded, facts = {}, {}

    def keep(key: str, model: Any) -> None:
        own_memory(model)
        loaded[key] = output_of(model)
        facts[key] = {
            "dtype": str(model.dtype),
            "implementation": model.config._attn_implementation,
            "devices": getattr(model, "hf_device_map", None),
        }

    for kind_name, precision, form in CASES:
        kind, name = KINDS[kind_name], case_name(kind_name, precision, form)
        auto_class = getattr(transformers, kind.auto_class)
        ours = partial(hf_effattn.from_pretrained, auto_class)
        from_pretrained = auto_class.from_pretrained if kind.method is None else ours
        keep(name, from_pretrained(f"{owner}/{name}"))
        if (precision, form) == SAVED:
            keep(f"{name} saved", from_pretrained(folder / "saved" / name))
        if kind.family == "patched" and form == "shards":
            keep(f"{name} switched", auto_class.from_pretrained(f"{owner}/{name}", attn_implementation=kind.method))
        if kind_name in SPREAD and precision == "float32" and form == "shards":
            keep(f"{name} spread", from_pretrained(f"{owner}/{name}", device_map="auto"))
            most = {"max_memory": {"cpu": SPREAD[kind_name]}, "offload_folder": folder / "offload"}
            keep(f"{name} offloaded", from_pretrained(f"{owner}/{name}", device_map="auto", **most))

    auto_class = getattr(transformers, CLASSIFICATION)
    for name, commit in json.loads((folder / "commits.json").read_text()).items():
        keep(name, hf_effattn.from_pretrained(auto_class, f"{owner}/{HISTORY}", revision=commit))
    keep(PRIVATE, hf_effattn.from_pretrained(auto_class, f"{owner}/{PRIVATE}", token=token))
    save_file(loaded, folder / "loaded.safetensors")
    (folder / "facts.json").write_text(json.dumps(facts))
