"""Imports inside the package and among the rooms of scripts go one way: down a list, and in no circle of modules."""

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import hf_effattn

ROOT = Path(hf_effattn.__file__).parent
# From the top down: a folder or file imports from those below it only.
LAYERS = (
    "__main__",
    "cli",
    "demo",
    "embedding",
    "samples",
    "training",
    "__init__",
    "hub",
    "reporting",
    "measuring",
    "patching",
    "models",
    "data",
    "ops",
    "atomic_files",
    "settings_parsing",
    "version",
)
SCRIPTS = Path(__file__).parents[1] / "scripts"
ROOMS = ("publish", "reliability", "reproduce", "benchmark", "lra", "train", "shared")


def modules_below(root: Path) -> dict[str, Path]:
    """The modules of a package with their files; a package itself is named `folder.__init__`."""
    return {".".join(file.relative_to(root).with_suffix("").parts): file for file in root.rglob("*.py")}


def imports_of(module: str, tree: ast.AST, modules: dict[str, Path], inside: str = "hf_effattn") -> Iterator[str]:
    """The modules of its own package that a piece of code imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            paths = [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            start = [inside, *module.split(".")[: -node.level]] if node.level else []
            base = start + (node.module.split(".") if node.module else [])
            paths = [[*base, alias.name] for alias in node.names]
        else:
            continue
        for package, *path in paths:
            # The last name is a module, a folder, or something inside of either.
            forms = (path, [*path, "__init__"], path[:-1], [*path[:-1], "__init__"])
            if package == inside:
                yield next(name for form in forms if (name := ".".join(form)) in modules)


def run_at_import(tree: ast.Module) -> ast.Module:
    """The code without the bodies of functions."""

    class WithoutFunctions(ast.NodeTransformer):
        def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
            return None

    return WithoutFunctions().visit(tree)


def upward_imports(root: Path, layers: tuple[str, ...] = LAYERS, inside: str = "hf_effattn") -> list[str]:
    """The imports from one folder to another that is not below it, as `module -> module`."""
    modules = modules_below(root)
    places = {name: place for place, name in enumerate(layers)}
    return [
        f"{module} -> {imported}"
        for module, file in modules.items()
        for imported in imports_of(module, ast.parse(file.read_text(encoding="utf-8")), modules, inside)
        if (folder := module.split(".")[0]) != (target := imported.split(".")[0]) and places[folder] >= places[target]
    ]


def circle_of_imports(root: Path) -> list[str]:
    """Modules that import each other in a circle when they are imported; empty where there are none."""
    modules = modules_below(root)
    graph = {
        module: set(imports_of(module, run_at_import(ast.parse(file.read_text(encoding="utf-8"))), modules)) - {module}
        for module, file in modules.items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def test_every_folder_has_its_layer() -> None:
    assert {name.split(".")[0] for name in modules_below(ROOT)} == set(LAYERS)


def test_the_map_is_this_list() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8").split("```")[1]
    assert tuple(line.split()[0] for line in text.strip().splitlines()) == LAYERS


def test_imports_go_down() -> None:
    assert upward_imports(ROOT) == []


def test_scripts_import_from_rooms_below() -> None:
    assert {name.split(".")[0] for name in modules_below(SCRIPTS)} == set(ROOMS)
    assert upward_imports(SCRIPTS, ROOMS, "scripts") == []


def test_training_scripts_import_the_library_alone() -> None:
    modules = {name: file for name, file in modules_below(SCRIPTS).items() if name.startswith("train.")}
    assert modules
    for module, file in modules.items():
        assert not list(imports_of(module, ast.parse(file.read_text(encoding="utf-8")), modules, "scripts"))


def test_no_circle_of_imports() -> None:
    assert circle_of_imports(ROOT) == []


@pytest.mark.parametrize("line", ["from ..reporting import report", "def late():\n    import hf_effattn.cli.app"])
def test_an_import_upwards_is_found(tmp_path: Path, line: str) -> None:
    for name in ("measuring/clock.py", "reporting/__init__.py", "cli/app.py"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(line if name.startswith("measuring") else "")
    (upward,) = upward_imports(tmp_path)
    assert upward.startswith("measuring.clock -> ")


def test_a_circle_is_found(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from . import two\n")
    (tmp_path / "two.py").write_text("from .one import name\n")
    assert set(circle_of_imports(tmp_path)) == {"one", "two"}
    (tmp_path / "one.py").write_text("def late():\n    from . import two\n")
    assert circle_of_imports(tmp_path) == []
