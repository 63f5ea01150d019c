"""An open index with its model, and the answers of the live page; independent of the web."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unde import methods
from unde.data import Rows
from unde.errors import UndeError, unknown
from unde.index import Index
from unde.methods import Damped, Method
from unde.scoring import GroupScores
from unde.scoring.base import Names
from unde.scoring.data_splits import shared
from unde.scoring.diagnostics import TOP, describe_hubs, hub_examples
from unde.setup import Setup
from unde.store.manifest import Manifest
from unde.tasks import Diffusion
from unde.ui.explorer.baselines import Baselines
from unde.ui.explorer.catalogue import KINDS, Catalogue, Marks
from unde.ui.explorer.jobs import BackgroundJob, Jobs, Unanswered
from unde.ui.explorer.query_builder import ExplorerQuery, Inquiry, QueryBuilder, read_method, subtract_means
from unde.ui.explorer.ranking import (
    Answer,
    Pool,
    ScoreCache,
    Sliders,
    by_source,
    move_sliders,
    scored,
    select_example,
)
from unde.ui.report.items import shaded_passage
from unde.ui.report.panels import has_tokens, pair_pieces
from unde.version import __version__
from unde.weights import Weights

UNWEIGHTED, YOURS, CALIBRATED = "unweighted", "your weights", "calibrated"
COUNT = 50  # examples on a side, at most
SHADED = 24  # passages that one job shades
FEWEST, MOST = 2, 64  # answers that are held: however large they are, and however small
SHADES = 2000  # shaded passages of one answer: every place of a slider gives others


class Session:
    """One index, one model, one task; all that the page shows comes from here.

    `weights` are named sets of weights; `names` what the queries of a role are called; `sources` a column and the
    source of each training example.
    """

    def __init__(
        self,
        index: Index,
        setup: Setup,
        weights: Mapping[str, Weights] | None = None,
        *,
        title: str = "What made it do that?",
        names: Mapping[str, Sequence[Any]] | None = None,
        sources: tuple[str, Names] | None = None,
    ) -> None:
        self.index, self.setup, self.title, self.sources = index, setup, title, sources
        rows = setup.train_data if index.train_data is None else index.train_data
        self.train = Catalogue(setup.rows(rows), setup, setup.ids if index.ids is None else index.ids)
        if len(self.train) != len(index):
            raise UndeError(
                f"{len(self.train)} training examples for an index of {len(index)}: give what it was made from"
            )
        self.train.load_true_labels()
        queries = {"eval": setup.eval_queries, "learn": setup.learn_queries}
        self.roles = {
            role: Catalogue(setup.rows(data), setup, (names or {}).get(role))
            for role, data in queries.items()
            if data is not None
        }
        self._calibration = index.calibration
        self.weights = dict(weights or {})
        if self._calibration is not None and self._calibration.weights is not None:
            self.weights.setdefault(CALIBRATED, self._calibration.weights)
        for name in self.weights:
            if name in (UNWEIGHTED, YOURS):
                raise UndeError(
                    f"weights named {name!r}, which the page calls something else: choose another name"
                )
        groups = index.groups.names
        self.bases = {UNWEIGHTED: torch.ones(len(groups))}
        self.bases |= {name: w.aligned_to(groups) for name, w in self.weights.items()}
        self.sliders = Sliders.for_groups(groups)
        self.methods = _methods(index, None if self._calibration is None else self._calibration.method)
        self.shaded = has_tokens(setup)
        self.jobs, self.marks = Jobs(), Marks(self.train)
        self.builder = QueryBuilder(index, setup, self.train, self.roles)
        self.pool = Pool(self.builder)
        self.baselines = Baselines(setup, self.train, index.memory)
        self._answers: OrderedDict[str, Answer] = OrderedDict()
        self._lock = threading.Lock()

    # --- what there is ----------------------------------------------------------------------------------

    def describe(self) -> dict[str, Any]:
        """What the page needs before the first question."""
        return {
            "version": __version__,
            "title": self.title,
            "index": self.index.manifest.id,
            "folder": str(self.index.folder),
            "examples": len(self.index),
            "groups": len(self.index.groups),
            "kind": self.train.kind,
            "named": self.train.names is not None,
            "sliders": [
                {"name": name, "groups": members}
                for name, members in zip(self.sliders.names, self.sliders.members)
            ],
            "weights": {
                name: {
                    "values": self.sliders.means(base).tolist(),
                    "groups": [base[self.sliders.of == b].tolist() for b in range(len(self.sliders.names))],
                    "uniform": bool((base == 1).all()),
                }
                for name, base in self.bases.items()
            },
            "methods": [
                {"name": name, "damping": m.damping if isinstance(m, Damped) else None}
                for name, m in self.methods.items()
            ],
            "asks": self.builder.ways(),
            "classes": self.builder.classes,
            "shaded": self.shaded,
            "baselines": self.baselines.names,
            "marks": KINDS,
            "by": None if self.sources is None else self.sources[0],
        }

    def method(self, name: str | None, damping: float | None) -> Method:
        if name is not None and name not in self.methods:
            raise unknown("method for this index", name[:40], self.methods)
        chosen = next(iter(self.methods.values())) if name is None else self.methods[name]
        if damping is None or not isinstance(chosen, Damped) or damping == chosen.damping:
            return chosen
        return replace(chosen, damping=damping)

    def check_unchanged(self) -> None:
        """Raise if the index on disk is not the one that was opened."""
        try:
            manifest = Manifest.read(self.index.folder)
        except UndeError as e:
            raise UndeError(
                f"the index is gone, or no longer whole ({e}): start `unde serve` again"
            ) from None
        if manifest != self.index.manifest:
            raise UndeError("the index was changed since the page was opened: start `unde serve` again")

    # --- asking -----------------------------------------------------------------------------------------

    def ask(self, inquiry: Inquiry, job: BackgroundJob) -> dict[str, Any]:
        """The training examples behind the mean of some questions, less the mean of others."""
        known = self._recall(inquiry.key)
        if known is None:
            self.check_unchanged()
            method = self.method(inquiry.method, inquiry.damping)
            plus = [self.builder.build(q, method, job) for q in inquiry.plus]
            minus = [self.builder.build(q, method, job) for q in inquiry.minus]
            job.tell("scoring")
            scores = self._score(subtract_means(plus, minus), method)
            held = ScoreCache.forward(scores)
            known = Answer(inquiry.key, scores, held, self.train, "train", plus + minus, method, len(plus))
            known.digests = [d for asked in known.asked for d in asked.digests if d]
            known.notes = self._notes(known, len(plus), len(minus))
            known.warnings = self._warnings(known)
            self._remember(known)
        return self._header(known, len(inquiry.plus))

    @property
    def calibration(self) -> str | None:
        """What the calibration of the index says, in a sentence."""
        return None if self._calibration is None else str(self._calibration)

    def _score(self, features: Any, method: Method) -> GroupScores:
        """Scores under a method; those of the calibration where it is the method of that."""
        calibrated = self._calibration is not None and method == self._calibration.method
        return self.index.score(features, None if calibrated else method)

    def influenced(self, at: int, body: Mapping[str, Any], job: BackgroundJob) -> dict[str, Any]:
        """The queries that a training example has influenced."""
        name, damping = read_method(body)
        method, at = self.method(name, damping), self.train.check(at)
        if bool(self.index.skipped[at]):
            raise UndeError(f"training example {at} has NaN gradients and was left out of the index")
        key = hashlib.blake2b(f"{at} {method} {self.pool.key(method)}".encode(), digest_size=12).hexdigest()
        known = self._recall(key)
        if known is None:
            self.check_unchanged()
            pool, features, note = self.pool.build(method, at, job)
            job.tell("scoring")
            scores = select_example(self._score(features, method), at)
            asked = [ExplorerQuery(self.builder.example(at), None, [], Rows([self.train.rows[at]]))]
            known = Answer(
                key, scores, ScoreCache.backward(scores), pool, "pool", asked, method, notes=[note]
            )
            self._remember(known)
        return self._header(known, 1)

    def _notes(self, answer: Answer, plus: int, minus: int) -> list[str]:
        notes = []
        if plus > 1 or minus:
            mean = "the query" if plus == 1 else f"the mean of {plus} queries"
            other = "another" if minus == 1 else f"the mean of {minus} others"
            notes.append(f"Question about {mean}{f', less {other}' if minus else ''}.")
        for name, w in self.weights.items():
            if shared(answer.digests, w.query_digests):
                notes.append(
                    f"The weights “{name}” were learned on this query: they say more of it than they should."
                )
        if self.index.skipped.any():
            notes.append(
                f"{int(self.index.skipped.sum())} training examples with NaN gradients were left out."
            )
        if answer.cache.contributions is None:
            notes.append(
                "There are too many groups and examples to hold: other weights take a pass over the features."
            )
        return notes

    def _warnings(self, answer: Answer) -> list[str]:
        """What to know before this answer is read; lists are compared with those of other questions that are held."""
        found = self.index.diagnose(answer.scores)
        with self._lock:
            others = [a for a in self._answers.values() if a.where == "train" and a.method == answer.method]
        count = min(TOP, len(self.index) // 10)
        rows = [
            a.cache.best(a.cache.total(self.bases[UNWEIGHTED]), count, None, True) for a in [*others, answer]
        ]
        lists = [[at for at, value in row if value] for row in rows]
        lists = [row for row in lists if row and len(row) == count]
        top = torch.tensor(lists) if lists else torch.zeros(0, 0, dtype=torch.int64)
        hubs = hub_examples(top, len(self.index))
        return found + ([describe_hubs(hubs, top, self.train.names)] if hubs else [])

    def _header(self, answer: Answer, plus: int) -> dict[str, Any]:
        return {
            "answer": answer.id,
            "where": answer.where,
            "kind": answer.of.kind,
            "asked": [a.header.as_dict(i >= plus) for i, a in enumerate(answer.asked)],
            "method": method_name(answer.method),
            "notes": answer.notes,
            "warnings": answer.warnings,
            "count": len(answer.of),
        }

    def _recall(self, key: str) -> Answer | None:
        with self._lock:
            if key in self._answers:
                self._answers.move_to_end(key)
            return self._answers.get(key)

    def _remember(self, answer: Answer) -> None:
        """The answers asked for last, as many as half of the budget holds."""
        budget = self.index.memory // 2
        with self._lock:
            held = self._answers
            held[answer.id] = answer
            while len(held) > FEWEST and (
                len(held) > MOST or sum(a.cache.nbytes for a in held.values()) > budget
            ):
                held.popitem(last=False)

    def answer(self, key: Any) -> Answer:
        answer = self._recall(key) if isinstance(key, str) else None
        if answer is None:
            raise Unanswered("this answer is not held any more: ask again", 410, gone=True)
        return answer

    # --- ranking ----------------------------------------------------------------------------------------

    def read_weights(self, body: Mapping[str, Any]) -> tuple[str, Tensor]:
        """The weights of a request, and their name."""
        name = body.get("weights") or UNWEIGHTED
        if not isinstance(name, str) or name not in self.bases:
            raise unknown("weights", str(name)[:40], self.bases)
        base = self.bases[name]
        w = move_sliders(self.sliders, base, body.get("values"))
        return (name if torch.equal(w, base) else YOURS), w

    def rank(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Proponents and opponents, unweighted and under the weights of the page."""
        answer = self.answer(body.get("answer"))
        count, filters = body.get("count", 10), body.get("filter") or {}
        if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= COUNT:
            raise UndeError(f"{str(count)[:20]} examples on a side: expected 1 to {COUNT}")
        if not isinstance(filters, Mapping):
            raise UndeError("filters are a JSON object: label, id and text")
        among = answer.of.matching(filters)
        name, w = self.read_weights(body)
        ways = {UNWEIGHTED: self.bases[UNWEIGHTED]}
        if not bool((w == 1).all()):
            ways[name] = w
        usable = (answer.cache.usable if among is None else answer.cache.usable & among).numpy()
        rows = [self._row(answer, *way, count, among) for way in ways.items()]
        if answer.where == "train":
            rows += self.baselines.rows(answer, body.get("baselines") or [], ways, count, among)
        by = self._by_source(answer, w) if answer.where == "train" else []
        return {
            "answer": answer.id,
            "rows": rows,
            "matched": int(usable.sum()),
            "marks": self.marks.version,
            "sources": by,
        }

    def _by_source(self, answer: Answer, w: Tensor) -> list[dict[str, Any]]:
        """Shares of the sources in this answer, and the means over the questions of this session that are held."""
        with self._lock:
            held = [a for a in self._answers.values() if a.where == "train" and a.method == answer.method]
        others = [a for a in held if a is not answer]
        return [] if self.sources is None else by_source([answer, *others], self.sources[1], w)

    def _row(self, answer: Answer, name: str, w: Tensor, count: int, among: Tensor | None) -> dict[str, Any]:
        cache = answer.cache
        total = cache.total(w)
        if not np.isfinite(total.numpy()).all():
            raise UndeError("these weights give scores that are not finite: bring the sliders back")
        high, low = (cache.best(total, count, among, largest) for largest in (True, False))
        signed = bool(total.numpy().min() < 0)
        if not total.any():  # neither for nor against: their order means nothing
            high, low = [], []
        if signed:  # of few examples, the last proponents would be opponents
            high, low = [one for one in high if one[1] > 0], [one for one in low if one[1] < 0]
        return {
            "name": name,
            "signed": signed,
            "high": [scored(*one) for one in high],
            "low": [scored(*one) for one in low],
        }

    def compare(self, body: Mapping[str, Any], job: BackgroundJob) -> dict[str, Any]:
        """Compute a baseline for an answer; `rank` shows it."""
        answer, name = self.answer(body.get("answer")), self.baselines.check(body.get("baseline"))
        if answer.where != "train":
            raise UndeError("baselines rank training examples: ask about a query")
        if name not in answer.baselines:
            plus, minus = answer.asked[: answer.plus], answer.asked[answer.plus :]
            answer.baselines[name] = self.baselines.score(name, plus, minus, job)
        return {"baseline": name}

    def shade(self, body: Mapping[str, Any], job: BackgroundJob) -> dict[str, Any]:
        """Passages of training examples, their tokens shaded by what they add to the score under some weights."""
        answer = self.answer(body.get("answer"))
        if not self.shaded or answer.where != "train":
            raise UndeError("tokens have no parts in these scores")
        wanted = body.get("at")
        if not isinstance(wanted, list) or not 0 < len(wanted) <= SHADED:
            raise UndeError(f"which passages? Expected 1 to {SHADED} positions")
        _, w = self.read_weights(body)
        passages, tokens, key = {}, None, w.numpy().tobytes()
        if len(answer.shades) > SHADES:
            answer.shades.clear()
        for done, at in enumerate(map(self.train.check, wanted)):
            job.tell("shading tokens", done, len(wanted))
            if (key, at) not in answer.shades:
                tokens = tokens or self.index.tokens(answer.scores, w)
                row = self.train.rows[at]
                answer.shades[key, at] = shaded_passage(pair_pieces(self.setup, row, at, tokens(0, row)))
            passages[at] = answer.shades[key, at]
        return {"passages": passages}


def method_name(method: Method) -> str:
    return method.name + ("-cosine" if getattr(method, "cosine", False) else "")


def _methods(index: Index, calibrated: Method | None) -> dict[str, Method]:
    """The methods that what is stored permits, the calibrated one and the index's own first."""
    built = index.method
    found = {method_name(built): built} if calibrated is None else {method_name(calibrated): calibrated}
    found.setdefault(method_name(built), built)
    for name in methods.NAMES:
        if name in found:
            continue
        try:
            method = index.method_for(name)
        except UndeError:
            continue
        journey = isinstance(method, methods.JourneyTRAK) and not isinstance(index.task, Diffusion)
        if not journey and (index.manifest.factors or not method.factors):
            found[name] = method
    return found
