"""Baselines of the live page: computed when they are switched on; the training side is computed once."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from unde import console
from unde.data import Rows
from unde.errors import UndeError, unknown
from unde.evaluate.baselines import BM25, HIDDEN_STATES, WordIndex
from unde.evaluate.hidden_states import HiddenStates
from unde.setup import Setup
from unde.tasks import Diffusion
from unde.ui.explorer.catalogue import Catalogue
from unde.ui.explorer.jobs import BackgroundJob, Unanswered
from unde.ui.explorer.query_builder import ExplorerQuery
from unde.ui.explorer.ranking import Answer, scored

TOP = 10  # examples that are compared with those of the method
SHARE = 4  # hidden states are held if they take at most this fraction of the budget, 1 in 4
_STEP = 500  # texts between two reports of progress


class Baselines:
    """Scores of the baselines for answers of the page; `memory` is the budget of the index, in bytes."""

    def __init__(self, setup: Setup, train: Catalogue, memory: int) -> None:
        self.setup, self.train, self.memory = setup, train, memory
        self.names: list[str] = []
        if not isinstance(setup.task, Diffusion):
            readable = train.kind == "text" and setup.text(train.rows[0]) is not None
            if readable and importlib.util.find_spec("bm25s") is not None:
                self.names.append(BM25)
            elif readable:
                console.note(
                    f"the page has no {BM25}: it comes from the package bm25s, pip install 'unde[hf]'"
                )
            self.names.append(HIDDEN_STATES)
        self._words: WordIndex | None = None
        self._reader: HiddenStates | None = None
        self._hidden: Tensor | None = None  # (N, d), of length 1 each

    def check(self, name: object) -> str:
        """The name of a baseline, if this page has it."""
        if not isinstance(name, str) or name not in self.names:
            raise unknown("baseline for this index", str(name)[:40], self.names)
        return name

    def score(
        self, name: str, plus: Sequence[ExplorerQuery], minus: Sequence[ExplorerQuery], job: BackgroundJob
    ) -> Tensor:
        """(N,) scores for the mean of some queries, less the mean of others."""
        score = self._score_words if name == BM25 else self._score_states
        each = score([*plus, *minus], job)  # (Q, N)
        total = each[: len(plus)].mean(0)
        return total - each[len(plus) :].mean(0) if minus else total

    def rows(
        self, answer: Answer, names: Any, ways: Mapping[str, Tensor], count: int, among: Tensor | None
    ) -> list[dict[str, Any]]:
        """The `count` top examples of each baseline, and how many of its first 10 are among those of each of `ways`."""
        if not isinstance(names, list):
            raise UndeError("baselines are a list of names")
        rows, held = [], answer.cache
        for name in map(self.check, names):
            if name not in answer.baselines:
                raise Unanswered(f"{name} is not computed yet", 409, baseline=name)
            best = held.best(answer.baselines[name], max(count, TOP), among, True)
            first = {at for at, _ in best[:TOP]}
            shared = {
                way: sum(at in first for at, _ in held.best(held.total(w), TOP, among, True))
                for way, w in ways.items()
            }
            high = [scored(*one) for one in best[:count]]
            compared = {"shared": shared, "of": len(first)}
            rows.append({"name": name, "signed": False, "high": high, "low": [], "baseline": compared})
        return rows

    def _score_words(self, queries: Sequence[ExplorerQuery], job: BackgroundJob) -> Tensor:
        if self._words is None:
            texts, count = [], len(self.train)
            for at in range(count):
                if at % _STEP == 0:
                    job.tell("reading texts", at, count)
                texts.append(self.setup.text(self.train.rows[at]) or "")
            self._words = WordIndex(texts)
        texts = ([self.setup.text(q.rows[i]) or "" for i in range(len(q.rows))] for q in queries)
        return self._words.score([" ".join(parts) for parts in texts])

    def _score_states(self, queries: Sequence[ExplorerQuery], job: BackgroundJob) -> Tensor:
        if self._reader is None:
            self._reader = HiddenStates(self.setup.model, self.setup.task, self.train.rows)
        reader = self._reader
        if reader.problem:
            raise UndeError(f"no {HIDDEN_STATES}: {reader.problem}")
        wanted = [
            torch.cat([self._states(reader, asked.rows, r) for r in reader.ranges(asked.rows)])
            for asked in queries
        ]
        if self._hidden is not None:
            return torch.stack([(rows @ self._hidden.T).mean(0) for rows in wanted])
        train, held = self.train.rows, []
        scores = torch.empty(len(queries), len(train))
        fits = 4 * len(train) * wanted[0].shape[1] <= self.memory // SHARE
        for r in reader.ranges(train):
            job.tell("reading hidden states", r.start, len(train))
            states = self._states(reader, train, r)
            scores[:, r.start : r.stop] = torch.stack([(rows @ states.T).mean(0) for rows in wanted])
            if fits:
                held.append(states)
        self._hidden = torch.cat(held) if fits else None
        return scores

    @staticmethod
    def _states(reader: HiddenStates, rows: Rows, which: range) -> Tensor:
        hidden = reader.read(rows, which).hidden
        assert hidden is not None  # the reader has no problem
        return F.normalize(hidden, dim=1).cpu()  # where they are held
