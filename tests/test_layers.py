"""Imports go down, never up and never in a circle; those inside functions and for type checkers alike."""

import ast
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src"
TOP = "unde"  # its __init__, which hands out what is below
LAYERS = (
    ("errors", "console", "data", "default_device", "devices", "markup", "onednn", "version"),
    ("fingerprints", "tasks", "groups", "projection", "setup"),
    ("gradients",),
    ("store",),
    ("checkpoints",),
    ("kernels",),
    ("methods",),
    ("parallel",),
    ("scoring",),
    ("weights",),
    ("evaluate",),
    ("plan", "index"),
    ("integrations", "diffusion"),
    ("ui", "bench"),
    ("cli",),
    ("__main__",),
)
HEIGHT = {name: height for height, layer in enumerate(LAYERS) for name in layer}

Arrow = tuple[str, str]  # who imports, what


def graph(source: Path = SOURCE) -> dict[str, set[str]]:
    """Each module of the package, and the modules of it that it imports."""
    files = {_dotted(file.relative_to(source)): file for file in source.rglob("*.py")}
    return {
        name: set(_imported(ast.parse(file.read_text(encoding="utf-8")), _package(name, file), set(files)))
        - {name}
        for name, file in files.items()
    }


def _dotted(file: Path) -> str:
    parts = file.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _package(name: str, file: Path) -> str:
    return name if file.name == "__init__.py" else name.rpartition(".")[0]


def _imported(tree: ast.Module, package: str, modules: set[str]) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            # A name is a module of its own, or something in the module it comes from.
            names = [name if (name := f"{base}.{alias.name}") in modules else base for alias in node.names]
        else:
            continue
        yield from (name for name in names if name in modules)


def height(module: str) -> int | None:
    """How high its layer is; None for a module that has none."""
    return len(LAYERS) if module == TOP else HEIGHT.get(module.split(".")[1])


def upwards(imports: dict[str, set[str]]) -> list[Arrow]:
    return [(a, b) for a, b in _arrows(imports) if (height(a) or 0) < (height(b) or 0)]


def circular(imports: dict[str, set[str]]) -> list[Arrow]:
    """Arrows that lead back to where they start."""
    return [(a, b) for a, b in _arrows(imports) if a in _reached(b, imports)]


def _arrows(imports: dict[str, set[str]]) -> list[Arrow]:
    return [(a, b) for a in sorted(imports) if a != TOP for b in sorted(imports[a])]


def _reached(start: str, imports: dict[str, set[str]]) -> set[str]:
    found, left = {start}, [start]
    while left:
        new = {b for b in imports[left.pop()] if b != TOP} - found
        found |= new
        left.extend(new)
    return found


def _drawn(arrows: list[Arrow]) -> str:
    return "\n" + "\n".join(f"{a} → {b}" for a, b in arrows)


def test_every_module_has_a_layer():
    strays = [module for module in sorted(graph()) if height(module) is None]
    assert not strays, strays


def test_imports_go_down():
    up = upwards(graph())
    assert not up, _drawn(up)


def test_imports_do_not_go_in_circles():
    arrows = circular(graph())
    assert not arrows, _drawn(arrows)


def test_the_test_sees_every_kind_of_import(tmp_path):
    files = {
        "__init__": "from unde.cli import app",
        "errors": "def late():\n    from unde.index import index",
        "data": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from unde import errors, Index",
        "tasks/__init__": "from unde.tasks.base import Task",
        "tasks/base": "from . import other\nfrom ..data import Rows",
        "tasks/other": "import unde.tasks.base\nimport os",
        "index/__init__": "",
        "index/index": "import unde.tasks as t",
        "cli/app": "from unde.index.index import Index",
        "stray": "",
    }
    for name, text in files.items():
        file = tmp_path / "unde" / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    imports = graph(tmp_path)
    assert imports["unde.tasks.base"] == {"unde.tasks.other", "unde.data"}
    assert imports["unde.index.index"] == {"unde.tasks"}
    assert upwards(imports) == [("unde.data", "unde"), ("unde.errors", "unde.index.index")]
    assert ("unde.tasks.base", "unde.tasks.other") in circular(imports)
    assert ("unde.errors", "unde.index.index") in circular(imports)  # … → tasks → base → data → errors
    assert ("unde.cli.app", "unde.index.index") not in circular(imports)
    assert height("unde.stray") is None
