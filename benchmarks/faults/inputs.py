"""What people give by mistake, through Python and on the command line: each is refused with one message.

None of these may be accepted: a call that returns is counted as silently wrong.
"""

from __future__ import annotations

import io
import json
import os
import random
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

import numpy as np
import torch
from typer.testing import CliRunner

import unde
from benchmarks.faults import world
from benchmarks.faults.trial import Tally, tried
from unde import Groups, Index, Weights, evaluate, learn_weights
from unde.cli import app
from unde.evaluate import Bank
from unde.scoring.arrays import ArrayScores
from unde.tasks import Classification

PYTHON, COMMANDS = "bad inputs, Python", "bad inputs, command line"
X, Y = world.TRAIN
PROJECT = """
import unde
from benchmarks.faults import world
from unde.tasks import Classification

def make():
    return unde.Setup(world.net(), Classification(), world.TRAIN, learn_queries=world.data(4, 8),
                      eval_queries=world.data(3, 9), ids=[f"row {i}" for i in range(world.EXAMPLES)])

def nothing():
    return 3

def broken():
    raise FileNotFoundError(2, "No such file or directory", "model.pt")

def overlapping():
    setup = make()
    setup.eval_queries = world.TRAIN
    return setup
"""


def _changed(at: int, value: int) -> torch.Tensor:
    labels = Y.clone()
    labels[at] = value
    return labels


def _nan() -> torch.Tensor:
    inputs = X.clone()
    inputs[3] = float("nan")
    return inputs


class _Endless(torch.utils.data.IterableDataset):
    def __iter__(self) -> Iterator[int]:
        return iter(())


BAD_DATA: dict[str, Any] = {
    "none": None, "number": 3, "empty list": [], "empty columns": (X[:0], Y[:0]), "unequal columns": (X, Y[:5]),
    "iterator": iter([1]), "endless": _Endless(), "string": "train.csv", "label": (X, _changed(5, 9)),
    "negative label": (X, _changed(5, -3)), "text labels": (X, ["cat"] * len(Y)), "float labels": (X, Y.float()),
    "width": (X[:, :2], Y), "nan": (_nan(), Y), "three columns": (X, Y, Y), "one column": (X,), "nones": [None] * 5,
    "ragged": [(x[: 1 + i % 3], y) for i, (x, y) in enumerate(zip(X, Y))], "objects": [(object(), 0)] * 5,
    "dicts without labels": [{"input": x} for x in X], "scalars": (torch.tensor(1.0), torch.tensor(1)),
    "shuffled": torch.utils.data.DataLoader(list(zip(X, Y)), shuffle=True), "set": {1, 2, 3},
}  # fmt: skip
BAD_OPTIONS: dict[str, list[Any]] = {
    "method": ["", "trac", "TRAK ", 3, None, {"name": "trak", "damp": 1}, [], "das(1)"],
    "groups": ["", "layers", "consecutive(0)", "consecutive(999)", "consecutive(-1)", {"a": "["}, {"a": "^nothing$"},
               {"a": ".", "b": "."}, Groups({"x": ("nope",)}), {}],
    "batch_size": [0, -1], "num_workers": [-1], "store_dtype": ["", "float64", "int3", None],
    "memory": ["", "lots", "-2GB", 0, -5, "2 giga"], "on_bad": ["", "ignore", None],
    "ids": [[1, 2], [object()] * len(Y), ["a\ud800"] * len(Y), [None] * len(Y)],
    "exclude": [["["], ["nothing like this"], [".*"], "weight"], "checkpoints": [[], ["a.bin"], ["none.safetensors"],
               [{}], [{"0.weight": torch.ones(1)}], [world.net(1).state_dict() | {"more": torch.ones(1)}]],
    "checkpoint_weights": [[1.0, 2.0], [], [-1.0], [float("nan")], [0.0], [float("inf")]],
    "second_moments": [{}, {"0.weight": torch.ones(1)}], "device": ["gpu", "cuda:99", ""],
    "executor": ["", "processes", "processes:0", "processes:x", "threads:2"],
}  # fmt: skip


def in_python(folder: Path) -> dict[str, Callable[[], object]]:
    kind = world.KINDS[0]
    index = kind.build(folder / "asked")
    opened = Index.open(folder / "asked", model=world.MODEL, task=Classification())
    scores = index.score(world.QUERIES)
    names = list(scores.groups)
    masks, totals = np.zeros((4, len(Y)), bool), scores.total()
    masks[:, ::2] = True
    given = {"method": "tracin", "progress": False}
    calls: dict[str, Callable[[], object]] = {}

    def build(data: Any = world.TRAIN, **options: Any) -> Index:
        place = folder / f"refused-{len(list(folder.iterdir()))}"
        return Index.build(world.net(), Classification(), data, place, **(given | options))

    for name, data in BAD_DATA.items():
        calls[f"build from {name}"] = lambda data=data: build(data)
        if name not in ("label", "negative label", "nan", "text labels"):
            calls[f"score {name}"] = lambda data=data: opened.score(data)
    for option, values in BAD_OPTIONS.items():
        for value in values:
            calls[f"build with {option}={value!r}"[:80]] = lambda o=option, v=value: build(**{o: v})
    (folder / "file").write_text("mine")
    (folder / "other").mkdir()
    (folder / "other" / "thesis.tex").write_text("mine")
    one = ArrayScores(torch.randn(4, 9, 2), ["a", "b"])
    calls |= {
        "build in a file": lambda: kind.build(folder / "file"),
        "build in another's folder": lambda: kind.build(folder / "other"),
        "build another index": lambda: Index.build(
            world.net(9), Classification(), world.TRAIN, folder / "asked", **given
        ),
        "build without task": lambda: Index.build(world.net(), None, world.TRAIN, folder / "x"),  # ty: ignore
        "open nothing": lambda: Index.open(folder / "nothing"),
        "open a file": lambda: Index.open(folder / "file"),
        "open another's folder": lambda: Index.open(folder / "other"),
        "open with another model": lambda: Index.open(folder / "asked", model=world.net(3)),
        "open with other data": lambda: Index.open(folder / "asked", train_data=world.data(world.EXAMPLES, 7)),
        "open with less data": lambda: Index.open(folder / "asked", train_data=world.data(5)),
        "open with bad memory": lambda: Index.open(folder / "asked", memory="much"),
        "score without a model": lambda: Index.open(folder / "asked").score(world.QUERIES),
        "score under another projection": lambda: opened.score(world.QUERIES, unde.methods.TRAK(projection="none")),
        "score under no method": lambda: opened.score(world.QUERIES, "nope"),
        "top 0": lambda: scores.top(0),
        "top -1": lambda: scores.top(-1),
        "weights too short": lambda: scores.total(torch.ones(len(names) + 1)),
        "weights nan": lambda: scores.total(torch.full((len(names),), float("nan"))),
        "weights of others": lambda: scores.total(Weights.uniform(["x", "y"])),
        "regroup": lambda: scores.regroup(Groups({"x": ("nope",)})),
        "self-influence of -1": lambda: opened.self_influence(subset=[-1]),
        "self-influence of 10**9": lambda: opened.self_influence(subset=[10**9]),
        "self-influence of none": lambda: opened.self_influence(subset=[]),
        "self-influence of halves": lambda: opened.self_influence(subset=[0.5]),  # ty: ignore
        "weights of another length": lambda: Weights(torch.ones(3), ["a"]),
        "weights negative": lambda: Weights(torch.tensor([1.0, -1.0]), ["a", "b"]),
        "weights zero": lambda: Weights(torch.zeros(2), ["a", "b"]),
        "weights infinite": lambda: Weights(torch.tensor([1.0, float("inf")]), ["a", "b"]),
        "weights twice": lambda: Weights(torch.ones(2), ["a", "a"]),
        "weights of no group": lambda: Weights(torch.ones(0), []),
        "weights from nowhere": lambda: Weights.load(folder / "nothing.json"),
        "weights from text": lambda: Weights.load(folder / "file"),
        "weights to nowhere": lambda: world.weights().save(folder / "no" / "w.json"),
        "weights to a folder": lambda: world.weights().save(folder / "other"),
        "contributions of two axes": lambda: ArrayScores(torch.ones(2, 2), ["a"]),
        "learn with k=0": lambda: learn_weights(one, k=0, weight_decay=0.1),
        "learn with k=10**6": lambda: learn_weights(one, k=10**6, weight_decay=0.1),
        "learn with negative decay": lambda: learn_weights(one, k=2, weight_decay=-1.0),
        "learn with nan decay": lambda: learn_weights(one, k=2, weight_decay=float("nan")),
        "learn with another objective": lambda: learn_weights(one, k=2, weight_decay=0.1, objective="nope"),
        "learn with another solver": lambda: learn_weights(one, k=2, weight_decay=0.1, solver="nope"),
        "lds of other shapes": lambda: evaluate.lds(totals, masks[:, :5], np.ones((4, 3))),
        "lds of other queries": lambda: evaluate.lds(totals, masks, np.ones((4, 7))),
        "lds of other subsets": lambda: evaluate.lds(totals, masks, np.ones((9, 3))),
        "lds of nan": lambda: evaluate.lds(totals, masks, np.full((4, 3), np.nan)),
        "lds of text": lambda: evaluate.lds("totals", masks, np.ones((4, 3))),  # ty: ignore
        "mislabel auc of one class": lambda: evaluate.mislabel_auc(torch.rand(5), torch.zeros(5, dtype=torch.bool)),
        "mislabel auc of other shapes": lambda: evaluate.mislabel_auc(torch.rand(5), torch.ones(4, dtype=torch.bool)),
        "recall of other shapes": lambda: evaluate.recall_at_k(np.zeros((2, 3), int), np.ones((3, 9), bool)),
        "bank of nothing": lambda: _bank(folder, n_train=0),
        "bank of no subset": lambda: _bank(folder, subsets=0),
        "bank of all": lambda: _bank(folder, alpha=1.0),
        "bank of none": lambda: _bank(folder, alpha=0.0),
        "bank with nan": lambda: _bank(folder, alpha=float("nan")),
        "bank with a negative seed": lambda: _bank(folder, seed=-1),
        "bank with no process": lambda: _bank(folder, processes=0),
        "bank with no thread": lambda: _bank(folder, threads=0),
        "bank with labels of others": lambda: _bank(folder, stratify=np.zeros(5)),
        "bank that fails": lambda: _bank(folder, train=lambda indices, seed: 1 / 0),
        "bank that measures nan": lambda: _bank(folder, utility=lambda model: torch.tensor([float("nan")])),
        "bank that measures nothing": lambda: _bank(folder, utility=lambda model: {}),
        "bank that measures text": lambda: _bank(folder, utility=lambda model: "good"),
        "bank in a folder": lambda: Bank.open(folder / "other"),
        "bank from nowhere": lambda: Bank.open(folder / "nothing.npz"),
        "bank from text": lambda: Bank.open(folder / "file"),
    }  # fmt: skip
    return calls


def _bank(folder: Path, **options: Any) -> Bank:
    given: dict[str, Any] = {"train": world.train, "utility": world.utility, "n_train": 12, "subsets": 3}
    return Bank.run(folder / f"bank-{len(list(folder.iterdir()))}.npz", **(given | options))


LINES = """
build | build {p}:make | build --out new | build {p} --out new | build {p}:nope --out new | build nope:make --out new
build {p}:nothing --out new | build {p}:broken --out new | build {p}:make --out file | build {p}:make --out taken
build {p}:make --out new --method nope | build {p}:make --out new --projection kron
build {p}:make --out new --groups x
build {p}:make --out new --projection kron(0) | build {p}:make --out new --projection dense(-1)
build {p}:make --out new --memory x | build {p}:make --out new --store-dtype x | build {p}:make --out new --on-bad x
build {p}:make --out new --seed x | build {p}:make --out new --num-workers -1 | build {p}:make --out new --engine x
build {p}:make --out new --device x | build {p}:make --out new --exclude [ | build {p}:make --out new --exclude .*
build {p}:make --out new --trust-remote-code | build --hf-model nope --out new | build --data t.jsonl --out new
build --hf-model ./nope --data t.jsonl --out new | build --hf-model file --data t.jsonl --out new
build --hf-model taken --data t.jsonl --out new | build --hf-model ./nope --data nope.jsonl --out new
build --hf-model ./nope --data file --out new | build {p}:make --data t.jsonl --out new | build :: --out new
plan | plan {p}:make --hf-config taken | plan --hf-config taken | plan --hf-config nope --examples 3 --seq-len 4
plan {p}:make --format x | plan {p}:make --method x | plan {p}:make --examples 0 | plan {p}:make --checkpoints 0
learn | learn --index nope | learn --index taken | learn --index file | learn {p}:make --index idx --k 3
learn {p}:make --index idx --queries learn --k x | learn {p}:make --index idx --queries learn --k 0
learn {p}:make --index idx --queries learn --weight-decay x | learn {p}:make --index idx --queries learn --loss x
learn {p}:make --index idx --queries learn --solver x | learn {p}:make --index idx --out no/w.json
learn {p}:make --index idx --out taken | learn {p}:make --index idx --perturb x
learn {p}:make --index idx --examples 0
learn {p}:make --index idx --queries learn --examples 3 | learn {p}:make --index idx --queries nope.jsonl
attribute | attribute --index nope | attribute --index taken | attribute {p}:make --index taken
attribute {p}:make --index idx --format x | attribute {p}:make --index idx --top 0
attribute {p}:make --index idx --top -3
attribute {p}:make --index idx --queries nope | attribute {p}:make --index idx --weights nope.json
attribute {p}:make --index idx --weights file | attribute {p}:make --index idx --weights taken
attribute {p}:make --index idx --method nope | attribute {p}:make --index idx --query x --queries y
attribute {p}:overlapping --index idx | attribute {p}:make --index idx --query text
attribute --index idx --hf-model x
attribute {p}:make --index idx --device x | attribute {p}:make --index idx --method das
evaluate | evaluate {p}:make --index idx | evaluate {p}:make --index idx --bank nope.npz
evaluate {p}:make --index idx --bank file | evaluate {p}:make --index idx --bank taken
evaluate {p}:make --index idx --bank bank.npz | evaluate {p}:make --index idx --bank bank.npz --utility nope
evaluate {p}:make --index idx --bank bank.npz --utility queries --format x
report | report {p}:make --index nope | report {p}:make --index idx --out taken
report {p}:make --index idx --weights =
report {p}:make --index idx --weights a=file --weights a=file | report {p}:make --index idx --weights nope.json
report {p}:make --index idx --top 0 | report {p}:make --index idx --first 0
verify | verify nope | verify file | verify t.jsonl | bench | bench {p}:make --rank 0 --runs 1
bench {p}:make --batch-size 0
nope | --nope
"""


def on_the_command_line(folder: Path) -> dict[str, Callable[[], object]]:
    name = f"faults_{abs(hash(str(folder)))}"
    (folder / f"{name}.py").write_text(PROJECT)
    (folder / "file").write_text("mine")
    (folder / "taken").mkdir()
    (folder / "taken" / "thesis.tex").write_text("mine")
    (folder / "t.jsonl").write_text(json.dumps({"text": "some text"}) + "\n")
    world.run_bank(folder / "bank.npz")
    sys.path.insert(0, str(folder))
    build = ["build", f"{name}:make", "--out", "idx", "--method", "tracin", "--projection", "none"]
    with _inside(folder):
        made = CliRunner().invoke(app, build)
    assert made.exit_code == 0, made.output
    lines = [line.strip() for line in LINES.replace("\n", " | ").split(" | ") if line.strip()]
    return {line: lambda line=line: _invoked(folder, line.format(p=name).split()) for line in lines}


@contextmanager
def _inside(folder: Path) -> Generator[None]:
    before = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def _invoked(folder: Path, arguments: list[str]) -> None:
    with _inside(folder):
        result = CliRunner().invoke(app, arguments, input="y\n")
    if result.exception is not None:
        raise result.exception
    if result.exit_code:
        raise SystemExit(result.exit_code)


def run(tally: Tally, folder: Path, chance: random.Random, share: float = 1.0) -> None:
    for category, make in ((PYTHON, in_python), (COMMANDS, on_the_command_line)):
        place = folder / category.rpartition(" ")[2]
        place.mkdir()
        with redirect_stderr(io.StringIO()):
            calls = make(place)
            names = sorted(calls) if share == 1.0 else chance.sample(sorted(calls), round(share * len(calls)))
            for name in names:
                outcome, why = tried(lambda call=calls[name]: _refused(call))
                tally.note(category, outcome, f"{name}: {why}")


def _refused(call: Callable[[], object]) -> bool:
    """Only an error is right."""
    call()
    return False
