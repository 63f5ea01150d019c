"""A user's project on the command line: its setup, its index, and the three roles of its data kept apart."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

import whence
from whence.data import Rows
from whence.errors import WhenceError, unknown
from whence.index import Index
from whence.pages import query_panels, weights_panel
from whence.report import Page
from whence.scores import GroupScores
from whence.setup import Setup
from whence.weights import Weights


class Project:
    """`module:function` made real. Nothing is computed before it is needed."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.setup = load(target)

    def index(self, path: Path) -> Index:
        s = self.setup
        return Index.open(path, model=s.model, task=s.task, train_data=s.train_data, collate=s.collate)

    def queries(self, role: str) -> Rows:
        if role not in ("learn", "eval"):
            raise unknown("queries", role, ("learn", "eval"))
        data = self.setup.learn_queries if role == "learn" else self.setup.eval_queries
        if data is None:
            raise WhenceError(f"{self.target} gives no {role}_queries: set Setup(..., {role}_queries=...)")
        return Rows(data, self.setup.collate or self.setup.task.collate)

    def scores(self, path: Path, role: str, method: str | None) -> GroupScores:
        """Scores of one role's queries, after checking that the roles share no example."""
        queries = self.queries(role)
        self._check_roles(role, queries)
        index = self.index(path)
        return index.score(index.features(queries, index.folder / "queries" / f"{role}.safetensors"), method)

    def _check_roles(self, role: str, queries: Rows) -> None:
        other = "eval" if role == "learn" else "learn"
        taken = set(queries.digests())
        rest = self.setup.eval_queries if role == "learn" else self.setup.learn_queries
        for name, data in (("the training data", self.setup.train_data), (f"{other}_queries", rest)):
            if data is None:
                continue
            shared = taken & set(Rows(data).digests())
            if shared:
                raise WhenceError(
                    f"{len(shared)} of the {role}_queries are also in {name}: training, weight learning and "
                    "evaluation need disjoint data. Remove them from one of the two"
                )

    def weights(self, path: Path | None, scores: GroupScores) -> Weights | None:
        """Weights from a file, refused for queries that they were learned on."""
        if path is None:
            return None
        weights = Weights.load(path)
        weights.aligned_to(scores.groups)
        shared = set(weights.query_digests) & set(scores.query_digests)
        if shared:
            raise WhenceError(
                f"{path} was learned on {len(shared)} of these queries: attribute and evaluate other ones"
            )
        return weights

    def report(
        self, path: Path, out: Path, weights: Path | None, method: str | None, first: int, top: int
    ) -> Path:
        scores = self.scores(path, "eval", method)
        learned = self.weights(weights, scores)
        queries = self.queries("eval")
        ways = {"unweighted": None} if learned is None else {"unweighted": None, "weighted": learned}
        count = min(top, scores.shape[1])
        panels = query_panels(
            self.setup, queries, scores, ways, which=range(min(first, len(queries))), count=count
        )
        page = Page(
            f"What made {self.target.partition(':')[0]} do that?",
            f"{scores.shape[1]:,} training examples, {scores.method.name} attributions",
            queries=panels,
            weights=None if learned is None else weights_panel(learned),
            provenance={"whence": whence.__version__, "index": str(path), **scores.provenance["method"]},
        )
        return page.write(out)


def load(target: str) -> Setup:
    """The Setup that `module:function` returns; modules are found from the current folder too."""
    module_name, colon, attribute = target.partition(":")
    if not colon or not module_name or not attribute:
        raise WhenceError(
            f"cannot read {target!r}: expected MODULE:FUNCTION, for example my_project.setup:make"
        )
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as e:
        if e.name and (module_name == e.name or module_name.startswith(f"{e.name}.")):
            raise WhenceError(
                f"no module {module_name!r} here: expected a file {module_name.replace('.', '/')}.py below "
                f"{os.getcwd()}, or an installed package"
            ) from None
        raise
    make = getattr(module, attribute, None)
    if make is None:
        raise unknown(
            f"function of {module_name}", attribute, [n for n in vars(module) if not n.startswith("_")]
        )
    setup = make() if callable(make) else make
    if not isinstance(setup, Setup):
        raise WhenceError(
            f"{target} gave a {type(setup).__name__}: expected a whence.Setup(model, task, train_data, …)"
        )
    return setup
