"""Pushed by one process and loaded by name in another: the same outputs, for every family, precision and form."""

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from safetensors.torch import load_file
from support.hub_server import HubServer
from support.hub_state import USER
from support.round_trips import CASES, HISTORY, KINDS, PRECISIONS, PRIVATE, SAVED, SPREAD, case_name

from hf_effattn.patching.methods.cst.positions import NAME

# Three processes push and load every kind of model before the first test.
pytestmark = pytest.mark.slow

PATCHED, CONVERTED, SCRATCH = (
    [name for name, kind in KINDS.items() if kind.family == family]
    for family in ("patched", "converted", "from-scratch")
)
# A process that does not know this package; it leaves `plain.safetensors` and `plain.json`.
WITHOUT_THE_PACKAGE = """
import json, logging, sys
from pathlib import Path
import torch, transformers
from safetensors.torch import save_file

folder, owner = Path(sys.argv[1]), sys.argv[2]
said = []
handler = logging.Handler()
handler.emit = lambda record: said.append(record.getMessage())
logging.getLogger("transformers").addHandler(handler)
ids = torch.randint(5, 50, (2, 40), generator=torch.Generator().manual_seed(1))
mask = torch.ones_like(ids)
mask[1, -9:] = 0
outputs, facts = {}, {}
for name, auto_class in json.loads(sys.argv[3]).items():
    said.clear()
    try:
        model = getattr(transformers, auto_class).from_pretrained(f"{owner}/{name}").eval()
    except Exception as error:
        facts[name] = {"error": f"{type(error).__name__}: {error}"}
        continue
    # As round_trips.own_memory does, which cannot be imported here.
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.clone()
    with torch.no_grad():
        outputs[name] = model(input_ids=ids, attention_mask=mask).logits.clone()
    facts[name] = {"said": "\\n".join(said)}
assert not any(name.startswith("hf_effattn") for name in sys.modules)
save_file(outputs, folder / "plain.safetensors")
(folder / "plain.json").write_text(json.dumps(facts))
"""


@dataclass(frozen=True)
class Results:
    """What the clients left: outputs by file and case, facts, and the contents of the repositories."""

    folder: Path

    def output(self, file: str, case: str) -> torch.Tensor:
        return load_file(self.folder / f"{file}.safetensors")[case]

    def facts(self, file: str) -> Any:
        return json.loads((self.folder / f"{file}.json").read_text())


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Three clients in turn. Processes of pytest-xdist share one run of them."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "round-trips"
    with FileLock(f"{folder}.lock"):
        if not (folder / "repositories.json").exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            _run_clients(folder)
    return Results(folder)


def _run_clients(folder: Path) -> None:
    with HubServer(folder / "hub") as hub:
        here = (
            f"from pathlib import Path; from support import round_trips; folder = Path({str(folder)!r}); round_trips."
        )
        hub.run("-c", f"{here}push(folder)", home=folder / "pushing", token=hub.token)
        # Without a token but for the private one: public repositories are read by everybody.
        hub.run("-c", f"{here}load(folder, {USER!r}, {hub.token!r})", home=folder / "loading")
        plain = {case_name(*case): KINDS[case[0]].auto_class for case in CASES if case[2] == "shards"}
        arguments = (str(folder), USER, json.dumps(plain | {PRIVATE: KINDS["bert-cst"].auto_class}))
        hub.run("-c", WITHOUT_THE_PACKAGE, *arguments, home=folder / "plain")
        facts: dict[str, Any] = {}
        for name in hub.repositories:
            paths = sorted(hub.files(name))
            leaks = [path for path in paths if hub.token.encode() in hub.content(name, path)]
            facts[name] = {"paths": paths, "leaks": leaks, "config": json.loads(hub.content(name, "config.json"))}
        (folder / "repositories.json").write_text(json.dumps(facts))


each_case = pytest.mark.parametrize(("kind", "precision", "form"), CASES)


@each_case
def test_the_same_outputs_in_a_fresh_process(kind: str, precision: str, form: str, results: Results) -> None:
    name = case_name(kind, precision, form)
    assert torch.equal(results.output("loaded", name), results.output("expected", name))
    facts = results.facts("facts")[name]
    assert facts["dtype"] == f"torch.{precision}"
    if KINDS[kind].method is not None:
        assert facts["implementation"] == KINDS[kind].method
        # Otherwise the exact model would pass for a patched one.
        assert not torch.equal(results.output("expected", name), results.output("exact", name))


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_outputs_out_of_a_folder(kind: str, results: Results) -> None:
    name = case_name(kind, *SAVED)
    assert torch.equal(results.output("loaded", f"{name} saved"), results.output("expected", name))
    files = {path.name for path in (results.folder / "saved" / name).iterdir()}
    assert files <= {"model.safetensors", "config.json", "generation_config.json"}


@each_case
def test_the_repository_holds_safetensors_only(kind: str, precision: str, form: str, results: Results) -> None:
    facts = results.facts("repositories")[f"{USER}/{case_name(kind, precision, form)}"]
    weights = [path for path in facts["paths"] if path.endswith(".safetensors")]
    others = set(facts["paths"]) - set(weights)
    known = {".gitattributes", "README.md", "config.json", "generation_config.json", "model.safetensors.index.json"}
    assert others <= known
    if form == "shards":
        assert len(weights) > 1
        assert "model.safetensors.index.json" in others
    else:
        assert weights == ["model.safetensors"]
        assert "model.safetensors.index.json" not in others
    assert facts["config"]["dtype"] == precision
    assert ("effattn" in facts["config"]) == (KINDS[kind].method is not None)
    assert "attn_implementation" not in str(facts["config"])
    assert facts["leaks"] == [], "the token is in a file"


@pytest.mark.parametrize("kind", PATCHED)
def test_transformers_own_loading_by_the_name_of_the_method(kind: str, results: Results) -> None:
    """`from_pretrained(name, attn_implementation="i-clustered")` after the import reads the saved settings."""
    for precision in PRECISIONS:
        name = case_name(kind, precision, "shards")
        assert torch.equal(results.output("loaded", f"{name} switched"), results.output("expected", name))


@pytest.mark.parametrize("kind", SPREAD)
def test_loaded_by_a_device_map(kind: str, results: Results) -> None:
    name = case_name(kind, "float32", "shards")
    assert torch.equal(results.output("loaded", f"{name} spread"), results.output("expected", name))


@pytest.mark.parametrize("kind", SPREAD)
def test_partly_on_the_disk(kind: str, results: Results) -> None:
    name = case_name(kind, "float32", "shards")
    assert set(results.facts("facts")[f"{name} offloaded"]["devices"].values()) == {"cpu", "disk"}
    # Not to the last bit: what is read from the disk lies in memory as in the file, see round_trips.own_memory.
    torch.testing.assert_close(results.output("loaded", f"{name} offloaded"), results.output("expected", name))


@pytest.mark.parametrize("kind", PATCHED)
def test_without_the_package_a_patched_checkpoint_is_the_exact_model(kind: str, results: Results) -> None:
    for precision in PRECISIONS:
        name = case_name(kind, precision, "shards")
        assert torch.equal(results.output("plain", name), results.output("exact", name))
        assert results.facts("plain")[name] == {"said": ""}


@pytest.mark.parametrize("kind", CONVERTED)
def test_without_the_package_a_converted_checkpoint_warns_of_its_tables(kind: str, results: Results) -> None:
    for precision in PRECISIONS:
        name = case_name(kind, precision, "shards")
        assert torch.equal(results.output("plain", name), results.output("exact", name))
        said = results.facts("plain")[name]["said"]
        assert "UNEXPECTED" in said
        for table in ("token_positions", "slice_positions"):
            assert f"{NAME}.{table}" in said


@pytest.mark.parametrize("kind", SCRATCH)
def test_without_the_package_a_model_from_scratch_is_refused(kind: str, results: Results) -> None:
    error = results.facts("plain")[case_name(kind, "float32", "shards")]["error"]
    assert f"model type `{kind.split('-')[0]}`" in error
    assert "Transformers does not recognize this architecture" in error


@pytest.mark.parametrize("revision", ["first", "newest"])
def test_an_older_revision(revision: str, results: Results) -> None:
    """Of a converted model the position tables are those of the revision, like all other weights."""
    assert torch.equal(results.output("loaded", revision), results.output("expected", revision))
    assert results.facts("commits")["first"] != results.facts("commits")["newest"]
    assert f"{USER}/{HISTORY}" in results.facts("repositories")


def test_a_private_model_is_loaded_with_a_token_only(results: Results) -> None:
    assert torch.equal(results.output("loaded", PRIVATE), results.output("expected", PRIVATE))
    assert f"{USER}/{PRIVATE} is not a local folder" in results.facts("plain")[PRIVATE]["error"]
