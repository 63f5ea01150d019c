"""A user's project on the command line: its setup, its index, and the three roles of its data kept apart."""

from __future__ import annotations

import hashlib
import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor, nn

import unde
from unde import console
from unde.data import Rows
from unde.errors import UndeError, unknown
from unde.index import Index
from unde.index.self_retrieval import WeightNoise
from unde.index.trust import of_several
from unde.integrations.source import Source, remembered_target
from unde.pages import Tokens, query_panels, trust_panel, weights_panels
from unde.recipe import Setup
from unde.report import Page, TrustPanel
from unde.report.contributors import checked
from unde.scores import GroupScores
from unde.weights import Weights, learn_weights

if TYPE_CHECKING:
    from unde.index.tokens import TokenScores
    from unde.integrations.documents import Texts

UNWEIGHTED = "unweighted"


class Project:
    """`module:function`, or a Hugging Face model and texts, made real. Exactly one of the two ways.

    `index` is where a source that is not given is looked up; `learn` and `evaluate` are the texts of queries,
    for a Hugging Face model, whose setup brings none.
    """

    def __init__(
        self,
        target: str | None,
        source: Source | None = None,
        *,
        index: Path | None = None,
        learn: Texts | None = None,
        evaluate: Texts | None = None,
        query_field: str | None = None,
        device: str | None = None,
    ) -> None:
        said = source.said if source is not None else {}
        if target is not None and said:
            raise UndeError(
                f"{target} and --{'hf-model' if 'model' in said else next(iter(said)).replace('_', '-')}: give "
                "MODULE:FUNCTION, or --hf-model with --data, not both"
            )
        self.source: Source | None = None
        if target is not None:
            if learn is not None or evaluate is not None:
                raise UndeError(
                    f"queries as texts go with --hf-model: {target} brings its own, learn_queries and eval_queries"
                )
            self.name, self.setup = target, load(target)
        else:
            self.source = (source or Source()).settled(index)
            self.name, self.setup = _hugging_face(self.source, learn, evaluate, query_field)
            self.source = replace(self.source, seq_len=self.setup.train_data.length)
        if device is not None:
            _move(self.setup.model, device)

    def index(self, path: Path) -> Index:
        s = self.setup
        return Index.open(path, model=s.model, task=s.task, train_data=s.train_data, collate=s.collate)

    def queries(self, role: str) -> Rows:
        if role not in ("learn", "eval"):
            raise unknown("queries", role, ("learn", "eval"))
        data = self.setup.learn_queries if role == "learn" else self.setup.eval_queries
        if data is None and self.source is not None:
            other = (
                "to evaluate (--queries FILE.jsonl)"
                if role == "learn"
                else "to learn weights (--queries FILE.jsonl)"
            )
            raise UndeError(f"no queries: give texts that are not in the training data and not used {other}")
        if data is None:
            raise UndeError(f"{self.name} gives no {role}_queries: set Setup(..., {role}_queries=...)")
        return Rows(data, self.setup.collate or self.setup.task.collate)

    def names(self, role: str) -> list[str] | None:
        """What the queries of a file are called."""
        return self.queries(role).data.ids if self.source is not None else None

    def scores(self, path: Path, role: str, method: str | None) -> GroupScores:
        """Scores of one role's queries, after checking that the roles share no example."""
        queries = self.queries(role)
        self._check_roles(role, queries)
        return self._scores(self.index(path), queries, method)

    def learn(
        self,
        path: Path,
        method: str | None,
        *,
        k: int | str,
        weight_decay: float | str,
        loss: str,
        solver: str | None,
        seed: int,
    ) -> tuple[Index, Weights]:
        """The index, and weights from the queries to learn from by the paper's objective."""
        queries = self.queries("learn")
        self._check_roles("learn", queries)
        index = self.index(path)
        scores = self._scores(index, queries, method)
        return index, learn_weights(
            scores, k=k, weight_decay=weight_decay, loss=loss, solver=solver, seed=seed
        )

    def scores_of_anything(self, path: Path, method: str | None) -> GroupScores:
        """Scores of queries that nothing is learned from and nothing measured on: they may be training data."""
        return self.index(path).score(self.queries("eval"), method)

    def _scores(self, index: Index, queries: Rows, method: str | None) -> GroupScores:
        """Scores of queries whose features are kept, for the next command that asks for them."""
        key = hashlib.blake2b("".join(queries.digests()).encode(), digest_size=8).hexdigest()
        return index.score(index.features(queries, index.folder / "queries" / f"{key}.safetensors"), method)

    def _check_roles(self, role: str, queries: Rows) -> None:
        other = "eval" if role == "learn" else "learn"
        asked = f"{role}_queries" if self.source is None else "queries"
        taken = set(queries.digests())
        rest = self.setup.eval_queries if role == "learn" else self.setup.learn_queries
        for name, data in (("the training data", self.setup.train_data), (f"{other}_queries", rest)):
            if data is None:
                continue
            shared = taken & set(Rows(data).digests())
            if shared:
                raise UndeError(
                    f"{len(shared)} of the {asked} are also in {name}: training, weight learning and "
                    "evaluation need disjoint data. Remove them from one of the two"
                )

    def weights(self, path: Path | None, scores: GroupScores) -> Weights | None:
        """Weights from a file, refused for queries that they were learned on."""
        if path is None:
            return None
        if path.is_dir():
            raise UndeError(f"{path} is a folder: expected a file of weights, written by `unde learn`")
        weights = Weights.load(path)
        try:
            weights.aligned_to(scores.groups)
        except UndeError as e:
            raise UndeError(f"{path}: {e}") from None
        shared = set(weights.query_digests) & set(scores.query_digests)
        if shared:
            raise UndeError(
                f"{path} was learned on {len(shared)} of these queries: attribute and evaluate other ones"
            )
        return weights

    def report(
        self,
        path: Path,
        out: Path,
        weights: Sequence[str],
        method: str | None,
        first: int,
        top: int,
        trust: bool = True,
    ) -> Path:
        """Write the page of the first queries; `weights` are files, NAME=FILE if there are several."""
        files = named_files(weights)
        everything = self.queries("eval")
        known = self._contributors(len(everything))
        self._check_roles("eval", everything)
        queries = Rows([everything[q] for q in range(min(first, len(everything)))], everything.collate)
        index = self.index(path)
        scores = self._scores(index, queries, method)
        learned = {name: w for name, file in files.items() if (w := self.weights(file, scores)) is not None}
        ways: dict[str, Weights | None] = {UNWEIGHTED: None, **learned}
        count = min(top, scores.shape[1])
        steps = 2 * count * len(ways) * len(queries)
        with console.progress("tokens", steps, self._has_tokens) as advance:
            panels = query_panels(
                self.setup,
                queries,
                scores,
                ways,
                which=range(len(queries)),
                count=count,
                names=self.names("eval"),
                tokens=self._tokens(index, scores, advance) if self._has_tokens else None,
                contributors={name: flags[: len(queries)] for name, flags in known.items()},
            )
        page = Page(
            f"What made {Path(self.name.partition(':')[0]).name} do that?",
            f"{scores.shape[1]:,} training examples, {scores.method.name} attributions",
            queries=panels,
            weights=weights_panels(learned, scores.groups),
            trust=_trust(index, learned, method) if trust else None,
            provenance={"unde": unde.__version__, "index": str(path), **scores.provenance["method"]},
        )
        return page.write(out)

    def _contributors(self, queries: int) -> dict[str, np.ndarray]:
        shape = (queries, len(Rows(self.setup.train_data)))
        return checked(
            self.setup.contributors or {}, shape, "each of the setup's eval_queries and training examples"
        )

    @property
    def _has_tokens(self) -> bool:
        """Whether the parts that single tokens have in a score can be computed, and shown."""
        return self.setup.pieces is not None and hasattr(self.setup.task, "token_losses")

    def _tokens(self, index: Index, scores: GroupScores, advance: console.Advance) -> Tokens:
        made: dict[int, TokenScores] = {}

        def tokens(q: int, i: int, weights: Weights | None) -> Tensor:
            if id(weights) not in made:
                made[id(weights)] = index.tokens(scores, weights)
            advance(1)
            return made[id(weights)](q, self.setup.train_data[i])

        return tokens


def _trust(index: Index, weights: dict[str, Weights], method: str | None) -> TrustPanel | None:
    """The panel, or None where copies cannot be made or examples are few, which is said in a line."""
    try:
        return trust_panel(of_several(index, weights, method, perturb=_perturb(weights)), weights, UNWEIGHTED)
    except UndeError as e:
        console.note(f"the page has no panel of trust: {e}")
        return None


def _perturb(weights: dict[str, Weights]) -> str | None:
    """Noise on the model's weights where that is what weights were learned with: the task may know nothing else."""
    kinds = [set(w.provenance.get("strength", ())) for w in weights.values()]
    return "weights" if kinds and all(kind == {WeightNoise().name} for kind in kinds) else None


def remembered(index: Path, source: Source) -> str | None:
    """The MODULE:FUNCTION that an index remembers, said in a line; None if a model was named or none is there."""
    target = None if source.said else remembered_target(index)
    if target is not None:
        console.note(f"using {target}, as remembered by {index}")
    return target


def named_files(given: Sequence[str]) -> dict[str, Path]:
    """Files of weights by name: one path is "weighted", several are NAME=FILE each.

    >>> named_files(["subject=w1.json", "style=w2.json"])["style"].name
    'w2.json'
    """
    files: dict[str, Path] = {}
    for text in given:
        name, equals, file = text.partition("=")
        # A path may hold the sign too, as in runs/lr=0.1/w.json.
        if not equals or os.sep in name or os.path.exists(text):
            if len(given) > 1:
                raise UndeError(
                    f"--weights {text} has no name: with several, name each, as in --weights subject={text}"
                )
            name, file = "weighted", text
        if not name or not file:
            raise UndeError(f"cannot read --weights {text}: expected FILE or NAME=FILE, such as style=w.json")
        if name in files:
            raise UndeError(f"--weights {name}=… is given twice: give each set a name of its own")
        if name == UNWEIGHTED:
            raise UndeError(
                f"--weights {text}: {UNWEIGHTED!r} names the scores without weights, choose another"
            )
        files[name] = Path(file)
    return files


def _hugging_face(
    source: Source, learn: Texts | None, evaluate: Texts | None, query_field: str | None
) -> tuple[str, Setup]:
    from unde.integrations.language import hf_setup

    assert source.model is not None
    assert source.data is not None
    setup = hf_setup(
        source.model,
        source.data,
        text_field=source.text_field or "text",
        seq_len=source.seq_len,
        learn_queries=learn,
        eval_queries=evaluate,
        query_field=query_field,
    )
    return source.model, setup


def _move(model: nn.Module, device: str) -> None:
    try:
        model.to(device)
    except (RuntimeError, AssertionError) as e:
        raise UndeError(f"cannot use the device {device!r} ({str(e).splitlines()[0]})") from None


def load(target: str) -> Setup:
    """The Setup that `module:function` returns; modules are found from the current folder too."""
    module_name, colon, attribute = target.partition(":")
    if not colon or not module_name or not attribute:
        hint = f". For the model in this folder: --hf-model {target}" if os.path.isdir(target) else ""
        raise UndeError(
            f"cannot read {target!r}: expected MODULE:FUNCTION, for example my_project.setup:make{hint}"
        )
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as e:
        if e.name and (module_name == e.name or module_name.startswith(f"{e.name}.")):
            raise UndeError(
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
        raise UndeError(
            f"{target} gave a {type(setup).__name__}: expected an unde.Setup(model, task, train_data, …)"
        )
    return setup
