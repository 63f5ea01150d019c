"""Studies found, run and stored.

A study is a file in experiments/studies with

- a docstring, whose first line is its title;
- `PAPER`, the table or figure of the paper that it stands for ("" if none);
- `run(variant)`, which returns what goes into the result file as JSON, or `learn(cell, method)`, which gives sets of
  weights whose LDS is the result (experiments/shared/sweep.py);
- where it has several data sets, `VARIANTS`, their names: each has a result of its own;
- where it needs retrained models or data, `BANKS` and `DATA`: {variant (None if there are none): names}. Banks are
  those of experiments/shared/banks.py; a variant that is named as one needs it unless `BANKS` is stated. Data are
  files in the folder that UNDE_DATA names.

The result of a study is experiments/results/STUDY.json, or STUDY_VARIANT.json.
"""

from __future__ import annotations

import ast
import importlib
import os
import platform
import re
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from experiments.shared.paths import BANKS, HERE, RESULTS, write_json

PACKAGE = "experiments.studies"
_CONSTANTS = ("PAPER", "VARIANTS", "BANKS", "DATA")
DATA_OF_BANK = {  # what the model of a bank was trained on, where that is no part of a package
    "cifar10-resnet": "cifar10_10k.npz",
    "cifar10-vit": "cifar10_10k.npz",
    "wikitext-gpt2": "wikitext-2",
    "finetuned-gpt2": "wikitext-2",
    "finetuned-resnet": "cifar10_10k.npz",
    "finetuned-vit": "cifar10_10k.npz",
    "finetuned-lora": "wikitext-2",
    "cifar2": "cifar2.npz",
}
# Instructions that change how sums are cut up, and so the last bits of a result
_INSTRUCTIONS = re.compile(r"^(avx\w*|amx\w*|fma|sve\d*|asimd\w*)$")


class Refused(Exception):
    """A study cannot be run as things are; the message says what to do."""


@dataclass(frozen=True)
class Study:
    """A file of experiments/studies, by what it says about itself."""

    name: str
    title: str
    paper: str
    variants: tuple[str, ...]
    banks: dict[str | None, tuple[str, ...]]
    data: dict[str | None, tuple[str, ...]]

    def results(self) -> dict[str, str | None]:
        """Names of results and the variant that each belongs to."""
        if not self.variants:
            return {self.name: None}
        return {f"{self.name}_{variant}": variant for variant in self.variants}

    def needs(self, variant: str | None) -> list[Needed]:
        banks = self.banks.get(variant, ())
        files = dict.fromkeys([*self.data.get(variant, ()), *filter(None, map(DATA_OF_BANK.get, banks))])
        root = os.environ.get("UNDE_DATA")
        return [
            *(Needed("data", name, root is not None and Path(root, name).exists()) for name in files),
            *(Needed("bank", name, bank_path(name).exists()) for name in banks),
        ]


@dataclass(frozen=True)
class Needed:
    kind: str  # "data" or "bank"
    name: str
    there: bool

    def __str__(self) -> str:
        return f"{self.kind} {self.name}" + ("" if self.there else " (missing)")


def bank_path(name: str) -> Path:
    return BANKS / f"{name}.npz"


def result_path(name: str) -> Path:
    return RESULTS / f"{name}.json"


def command(name: str) -> str:
    return f"python -m experiments run {name}"


def from_root(path: Path) -> Path:
    """Relative to the repository, where it lies inside."""
    return path.relative_to(HERE.parent) if path.is_relative_to(HERE.parent) else path


# --- finding ---------------------------------------------------------------------------------------------


@cache
def studies(folder: Path = HERE / "studies") -> dict[str, Study]:
    """All of them, by name. Reading them does not import the models that they are about."""
    return {path.stem: _read(path) for path in sorted(folder.glob("[a-z]*.py"))}


def _read(path: Path) -> Study:
    from experiments.shared.banks import MADE_BY

    tree = ast.parse(path.read_text())
    assigned = [
        (target, node.value) for node in tree.body if isinstance(node, ast.Assign) for target in node.targets
    ]
    stated = {t.id: v for t, v in assigned if isinstance(t, ast.Name) and t.id in _CONSTANTS}
    try:
        values = {k: ast.literal_eval(v) for k, v in stated.items()}
    except ValueError:  # computed, so it has to be imported
        module = importlib.import_module(f"{PACKAGE}.{path.stem}")
        values = {k: getattr(module, k) for k in stated}
    doc = ast.get_docstring(tree)
    if not doc or "PAPER" not in values:
        raise Refused(
            f'{path.name} says no title (a docstring) or no PAPER (a table or figure of the paper, or "")'
        )
    variants = tuple(values.get("VARIANTS", ()))
    banks = values.get("BANKS", {v: (v,) for v in variants if v in MADE_BY})
    title = doc.splitlines()[0].rstrip(".")
    return Study(path.stem, title, values["PAPER"], variants, banks, values.get("DATA", {}))


def named(names: list[str]) -> list[tuple[Study, str, str | None]]:
    """(study, result, variant) for names of studies, which mean all their variants, and names of results."""
    out = []
    for name in names:
        by_result = {result: s for s in studies().values() for result in s.results()}
        if name in studies():
            out += [(studies()[name], result, v) for result, v in studies()[name].results().items()]
        elif name in by_result:
            out.append((by_result[name], name, by_result[name].results()[name]))
        else:
            raise Refused(f"there is no study {name!r}: `python -m experiments list` shows them all")
    return out


# --- running ---------------------------------------------------------------------------------------------


def run(study: Study, result: str, variant: str | None, *, again: bool) -> None:
    """Computes a result and stores it, unless it is there."""
    path = result_path(result)
    if path.exists() and not again:
        print(f"{result}: there already, in {from_root(path)}; --again computes it anew")
        return
    missing = [f"{needed.kind} {needed.name}" for needed in study.needs(variant) if not needed.there]
    if missing:
        raise Refused(
            f"{result} needs {', '.join(missing)}: data are read from the folder that the environment variable "
            f"UNDE_DATA names (now {os.environ.get('UNDE_DATA')!r}), banks by `python -m experiments bank NAME`"
        )
    print(f"{result}: {study.title}", flush=True)
    start = time.monotonic()
    from experiments.shared import cells  # here and not above: `list` needs no torch
    from experiments.shared.sweep import sweep
    from unde import UndeError

    try:
        module = importlib.import_module(f"{PACKAGE}.{study.name}")
        found = sweep(cells.get(variant), module.learn) if hasattr(module, "learn") else module.run(variant)
    except (UndeError, SystemExit) as e:  # both come with a sentence for people
        raise Refused(f"{result}: {e}") from e
    store(result, found, time.monotonic() - start)


def store(result: str, found: dict[str, Any], seconds: float) -> Path:
    provenance = {"command": command(result), **machine(), "seconds": round(seconds)}
    write_json(path := result_path(result), {"results": found, "provenance": provenance})
    print(f"wrote {from_root(path)}")
    return path


def machine() -> dict[str, Any]:
    """What made a result, down to the instructions of the processor: sums are cut up differently by another."""
    import torch

    import unde

    model, instructions = cpu()
    return {
        "unde": unde.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs",
        "cpu": model,
        "instructions": instructions,
        "torch uses": torch.backends.cpu.get_cpu_capability(),
    }


def cpu(info: Path = Path("/proc/cpuinfo")) -> tuple[str, list[str]]:
    """Model name and vector instructions of the first processor; what `platform` knows where there is no such file."""
    if not info.exists():
        return platform.processor(), []
    lines = [line.partition(":") for line in info.read_text().split("\n\n")[0].splitlines()]
    fields = {key.strip(): value.strip() for key, _, value in lines}
    flags = fields.get("flags", fields.get("Features", "")).split()
    return fields.get("model name", platform.processor()), sorted(filter(_INSTRUCTIONS.match, flags))
