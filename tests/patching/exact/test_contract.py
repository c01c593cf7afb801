"""What models that stay exact promise once they are patched: each test runs every kind that makes its promise."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import hf_effattn
from hf_effattn.patching.model_types.stacks import find_stacks

from . import (
    test_own_attention,
    test_pixtral,
    test_relative_bias,
    test_sinks,
    test_softcap,
    test_speech,
    test_windows,
)
from .contract import EQUAL, METHOD, Kind, classes_of_ours, implementations, record, with_dropout

KINDS: list[Kind] = [
    *test_speech.KINDS,
    *test_relative_bias.KINDS,
    *test_own_attention.KINDS,
    *test_pixtral.KINDS,
    *test_sinks.KINDS,
    *test_softcap.KINDS,
    *test_windows.KINDS,
]


# One of each architecture: `make test` runs what these promise, and of the others how near they are with padding.
REPRESENTATIVES = {
    "wav2vec2, key", "parakeet", "t5", "deberta-v2", "longformer", "gemma2", "transient-global", "led's writer",
    "pixtral, one group", "pixtral, three groups", "gpt_oss, windows", "privacy filter", "modernbert, windows",
}  # fmt: skip
QUICK_CASES = {"padded=True", "padded=True, length=150", "global_tokens=some, padded=True", "padding=left", "images"}


def slow_unless(quick: bool) -> list[pytest.MarkDecorator]:
    return [] if quick else [pytest.mark.slow]


def rounded(inputs: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    return {name: given.to(dtype) if given.is_floating_point() else given for name, given in inputs.items()}


def each_kind(promises: Callable[[Kind], Any]) -> pytest.MarkDecorator:
    """Of all kinds those that make a promise."""
    making = [kind for kind in KINDS if promises(kind) not in (None, False, "", {}, ())]
    return pytest.mark.parametrize(
        "kind",
        [pytest.param(kind, id=kind.name, marks=slow_unless(kind.name in REPRESENTATIVES)) for kind in making],
    )


@pytest.fixture
def calls(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was recorded of every call of the functions that a kind watches."""
    return record(monkeypatch, kind.watched, kind.recorded)


@pytest.fixture
def constants(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name, value in kind.constants:
        monkeypatch.setattr(module, name, value)


@pytest.mark.usefixtures("constants")
@pytest.mark.parametrize(
    ("kind", "case"),
    [
        pytest.param(kind, case, id=f"{kind.name}, {name}", marks=slow_unless(not kind.slow and name in QUICK_CASES))
        for kind in KINDS
        for name, case in kind.cases.items()
    ],
)
def test_a_patched_model_has_the_values_and_gradients_of_the_exact_one(
    kind: Kind, case: dict[str, Any], calls: list[Any]
) -> None:
    model, inputs = kind.make(), kind.inputs(**case)
    with torch.no_grad():
        exact = kind.encode(model, inputs)
    expected = kind.gradients(model, inputs)
    assert not (kind.alone and calls)
    assert not kind.learns or any(part in name for part in kind.learns for name in expected)
    assert hf_effattn.patch_attention(model, METHOD) is model
    kind.near.check(kind.encode_patched(model, inputs, calls), exact)
    kind.slopes.check(kind.gradients(model, inputs), expected)
    hf_effattn.unpatch_attention(model)
    with torch.no_grad():
        EQUAL.check(kind.encode(model, inputs), exact)


@each_kind(lambda kind: kind.unpatched)
@torch.no_grad()
def test_an_unpatched_model_is_what_it_was_and_copies_are_patched(kind: Kind) -> None:
    pickled = pickle.loads(pickle.dumps(kind.patched()))  # transformers' hooks cannot be pickled once it has run
    model, inputs = kind.make(), kind.inputs()
    classes, named = [type(module) for module in model.modules()], implementations(model)
    exact = kind.encode(model, inputs)
    hf_effattn.patch_attention(model, METHOD)
    patched = kind.encode(model, inputs)
    for copied in (copy.deepcopy(model), pickled):
        kind.check_classes(copied)
        EQUAL.check(kind.encode(copied, inputs), patched)
    hf_effattn.unpatch_attention(model)
    assert [type(module) for module in model.modules()] == classes
    assert implementations(model) == named
    assert not hasattr(model.config, "effattn")
    EQUAL.check(kind.encode(model, inputs), exact)


@pytest.mark.usefixtures("constants")
@each_kind(lambda kind: kind.auto)
@torch.no_grad()
def test_a_saved_model_loads_patched_and_by_transformers_exact(kind: Kind, tmp_path: Path, calls: list[Any]) -> None:
    model, inputs = kind.make(), kind.inputs()
    exact, name = kind.encode(model, inputs), type(model).__name__
    hf_effattn.patch_attention(model, METHOD).save_pretrained(tmp_path)
    loaded = hf_effattn.from_pretrained(kind.auto, tmp_path, **kind.load).eval()
    EQUAL.check(kind.encode_patched(loaded, inputs, calls), kind.encode(model, inputs))
    plain = kind.auto.from_pretrained(tmp_path, **kind.load).eval()
    assert plain.config.architectures == [name]
    assert not classes_of_ours(plain)
    kind.near.check(kind.encode(plain, inputs), exact)


@pytest.mark.usefixtures("constants")
@each_kind(lambda kind: kind.weigh)
@torch.no_grad()
def test_attention_weights_are_transformers(kind: Kind, calls: list[Any]) -> None:
    model = kind.make()
    if kind.eager:
        model.set_attn_implementation("eager")
    expected = kind.weigh(model)
    hf_effattn.patch_attention(model, METHOD)
    calls.clear()
    kind.weights_near.check(kind.weigh(model), expected)
    assert not (kind.alone and calls)


@each_kind(lambda kind: kind.whole)
@torch.no_grad()
def test_the_switch_of_transformers_changes_nothing(kind: Kind, calls: list[Any]) -> None:
    """It is heard where transformers calls a function, which then runs exactly, with the matrix that it is given."""
    model, inputs = kind.make(), kind.inputs()
    exact = kind.whole(model, inputs)
    model.set_attn_implementation(METHOD)
    calls.clear()
    kind.whole_near.check(kind.whole(model, inputs), exact)
    if kind.heard:
        kind.ran(calls, inputs)
    hf_effattn.unpatch_attention(model)
    EQUAL.check(kind.whole(model, inputs), exact)


@each_kind(lambda kind: kind.retrained)
def test_a_patched_model_trains_with_gradient_checkpointing_and_dropout(kind: Kind, calls: list[Any]) -> None:
    model, inputs = kind.patched().train(), kind.inputs()
    calls.clear()
    expected, once = kind.gradients(model, inputs), len(calls)
    if model.supports_gradient_checkpointing:
        model.gradient_checkpointing_enable()
        calls.clear()
        kind.retrained.check(kind.gradients(model, inputs), expected)
        assert len(calls) == 2 * once > 0
    if not kind.drops:
        return
    with_dropout(model, 0.5)
    with torch.no_grad():
        assert not torch.equal(*(kind.encode(model, inputs)[-1] for _ in range(2)))
        model.eval()
        assert torch.equal(*(kind.encode(model, inputs)[-1] for _ in range(2)))


@each_kind(lambda kind: kind.redrawn)
@torch.no_grad()
def test_dropout_is_drawn_as_in_transformers(kind: Kind) -> None:
    """Each text's own, and the same numbers are drawn after it."""
    model, inputs = kind.make(**kind.redrawn).train(), kind.inputs()

    def drawn() -> tuple[torch.Tensor, ...]:
        torch.manual_seed(7)
        return kind.encode(model, inputs)

    exact = drawn()
    hf_effattn.patch_attention(model, METHOD)
    kind.near.check(drawn(), exact)


@pytest.mark.slow_except("torch.bfloat16-False-*")
@each_kind(lambda kind: kind.low_precision)
@pytest.mark.parametrize(
    ("dtype", "autocast"),
    [(torch.bfloat16, False), (torch.float16, False), (torch.float64, False), (torch.bfloat16, True)],
    ids=str,
)
@torch.no_grad()
def test_another_precision_is_as_near_as_transformers(kind: Kind, dtype: torch.dtype, autocast: bool) -> None:
    inputs = kind.inputs()
    exact = kind.encode(kind.make().double(), rounded(inputs, torch.float64))[-1]
    stored = torch.float32 if autocast else dtype
    model, inputs = kind.make().to(stored), rounded(inputs, stored)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        by_transformers = kind.encode(model, inputs)[-1]
        patched = kind.encode(hf_effattn.patch_attention(model, METHOD), inputs)[-1]
    assert patched.dtype == by_transformers.dtype
    error, usual = ((output.double() - exact).norm() / exact.norm() for output in (patched, by_transformers))
    assert error <= kind.low_precision * usual + 1e-6  # transformers takes some softmax in float32, of float64 too


@pytest.mark.slow_except("True-dtype0-*", "False-dtype1-*")
@each_kind(lambda kind: kind.all_padded)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("learns", [False, True])
def test_a_text_of_padding_alone_is_finite(kind: Kind, dtype: torch.dtype, learns: bool) -> None:
    """Under autocast, whose numbers are smaller than those that the mask was made of."""
    model, inputs = kind.patched(), kind.inputs()
    inputs["attention_mask"][1] = 0
    with torch.autocast("cpu", dtype=dtype), torch.set_grad_enabled(learns):
        assert kind.part(model)(**inputs)[0].isfinite().all()


@each_kind(lambda kind: kind.traced)
@torch.no_grad()
def test_a_trace_is_of_transformers_code(kind: Kind) -> None:
    inputs = kind.inputs()
    model = hf_effattn.patch_attention(kind.part(kind.make()), METHOD)
    expected = model(**inputs)
    output = torch.jit.trace(model, tuple(inputs.values()), strict=False, check_trace=False)(*inputs.values())
    last = output["last_hidden_state"] if isinstance(output, dict) else output[0]
    seen = kind.traced(expected, inputs)
    kind.near.check([last[seen]], [expected[0][seen]])


@pytest.mark.slow
@each_kind(lambda kind: kind.compiled)
def test_a_compiled_model_gives_the_same(kind: Kind) -> None:
    """And the same gradients, unless the backend is no compiler."""
    model, inputs = kind.patched(**kind.compiled_as), kind.inputs()
    with torch.no_grad():
        expected = kind.encode(model, inputs)
    slopes = kind.gradients(model, inputs) if kind.compiled != "eager" else {}
    torch.compiler.reset()
    kind.part(model).compile(backend=kind.compiled)
    with torch.no_grad():
        near = kind.near if slopes else EQUAL
        near.check(kind.encode(model, inputs), expected)
    if slopes:
        gradients = kind.gradients(model, inputs)  # the compiler has some, of 0, of what nothing reads
        kind.slopes.check({name: gradients[name] for name in slopes}, slopes)


@pytest.mark.usefixtures("constants")
@each_kind(lambda kind: kind.says)
def test_other_methods_approximate_nothing_and_say_so(kind: Kind, calls: list[Any]) -> None:
    model, inputs = kind.make(), kind.inputs()
    with torch.no_grad():
        exact = kind.encode(model, inputs)
    few = {"clusters": 2, "topk": 2}
    if find_stacks(model)[0].causal:
        few = {"exact_keys": 2, "segment_length": 4, "window": 4}
    for method in ("i-clustered", "bi-clustered"):
        warning = f"will approximate nothing: all layers of {type(model).__name__} {kind.says}"
        with pytest.warns(UserWarning, match=warning):
            hf_effattn.patch_attention(model, method, **few, min_length=0)
        kind.near.check(kind.encode_patched(model, inputs, calls), exact)
    with pytest.raises(ValueError, match=f"no attention to patch: all its layers {kind.says}.* and stay exact"):
        hf_effattn.patch_attention(model, "bi-clustered", layers=[0])
    with pytest.raises(
        ValueError, match=f"no attention to measure: all its layers {kind.says}.*, and patch_attention"
    ):
        hf_effattn.calibrate(model, inputs, progress=False)


@each_kind(lambda kind: kind.reports)
def test_a_report_compares_the_patched_model_with_transformers_own(kind: Kind) -> None:
    """Also of a model that is patched."""
    model, inputs = kind.make(), kind.inputs()
    texts, length, baseline = kind.reports
    with torch.no_grad():
        exact = kind.encode(model, inputs)
    for patched in (False, True):
        report = hf_effattn.report(model, inputs, repeats=0, progress=False)
        assert baseline in (None, report.environment["baseline"])
        (measured,) = report.inputs
        assert (measured.batch_size, measured.length, measured.valid_tokens) == (texts, length, len(exact[-1]))
        (ours,) = report.measurements[1:]
        assert ours.method == METHOD
        assert 0 < ours.change.hidden_error < 1e-5
        assert all(error < 1e-5 for error in ours.change.logits_error.values())
        assert all(agreement == 1 for agreement in ours.change.argmax_agreement.values())
        if not patched:
            with torch.no_grad():
                EQUAL.check(kind.encode(model, inputs), exact)
            hf_effattn.patch_attention(model, METHOD)


@each_kind(lambda kind: kind.write)
@torch.no_grad()
def test_a_patched_model_writes_the_same(kind: Kind, calls: list[Any]) -> None:
    """An encoder beside a decoder runs once."""
    model, inputs = kind.make(), kind.inputs()
    written, whole = kind.write(model, inputs), kind.whole and kind.whole(model, inputs)
    hf_effattn.patch_attention(model, METHOD)
    kind.encode_patched(model, inputs, calls)
    once = len(calls)
    calls.clear()
    assert torch.equal(kind.write(model, inputs), written)
    assert not kind.alone or len(calls) == once > 0
    if kind.whole:
        kind.whole_near.check(kind.whole(model, inputs), whole)


@each_kind(lambda kind: kind.causal)
@torch.no_grad()
def test_no_token_sees_a_later_one(kind: Kind) -> None:
    model, inputs = kind.patched(), kind.inputs(**next(iter(kind.cases.values())))
    ids = inputs["input_ids"]
    before = model(**inputs).logits
    for position in (20, ids.shape[1] // 2, ids.shape[1] - 30):
        changed = ids.clone()
        changed[:, position] = (changed[:, position] + 7) % 55 + 5
        after = model(**inputs | {"input_ids": changed}).logits
        assert torch.equal(after[:, :position], before[:, :position])
        assert not torch.equal(after[:, position], before[:, position])
