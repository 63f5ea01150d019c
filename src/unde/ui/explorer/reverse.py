"""The other direction: which queries a training example has influenced."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from unde.data import Rows, evenly
from unde.index.query_features import QueryFeatures
from unde.methods import Method
from unde.scoring import GroupScores
from unde.scoring.train_features import SelectedFeatures
from unde.ui.explorer.catalogue import Catalogue
from unde.ui.explorer.jobs import BackgroundJob
from unde.ui.explorer.query_builder import QueryBuilder, joined

MOST = 200  # queries, evenly spaced: each takes a pass of the model, once
AT_ONCE = 8  # between two words about how far it is


class Pool:
    """Queries to look at from a training example: held-out ones, and those asked about in this session.

    Where there are neither, other training examples take their place.
    """

    def __init__(self, builder: QueryBuilder) -> None:
        self.builder = builder
        self._kept: tuple[list[str], QueryFeatures] | None = None  # of the queries that do not change

    def key(self, method: Method) -> list[str]:
        """What it is made of, beside the queries that do not change."""
        return [asked.key for asked in self.builder.recent(method)]

    def build(self, method: Method, job: BackgroundJob) -> tuple[Catalogue, QueryFeatures, str]:
        """What is ranked, its features, and what it is in words."""
        builder, own = self.builder, self.builder.recent(method)
        rows: list[Any] = []
        names: list[str] = []
        questions: list[dict[str, Any]] = []
        total = sum(map(len, builder.roles.values()))
        held_out = [(role, i) for role, some in builder.roles.items() for i in range(len(some))]
        chosen = [held_out[i] for i in evenly(len(held_out), MOST)] if held_out else []
        for role, i in chosen:
            some = builder.roles[role]
            rows.append(some.rows[i])
            names.append(f"{'held-out' if role == 'eval' else 'learning'} {some.item(i).name}")
            questions.append({"kind": role, "at": i})
        note = f"Looked at {len(chosen)} of {total:,} queries of the setup" if chosen else ""
        if not rows and not own:
            some = evenly(len(builder.train), MOST)
            rows = [builder.train.rows[i] for i in some]
            names = [f"training {builder.train.item(i).name}" for i in some]
            questions = [{"kind": "train", "at": i} for i in some]
            note = f"There are no queries yet: looked at {len(rows)} of the training examples instead"
        if rows:
            method.check_query(rows[0])
        parts = [self._of(rows, list(names), job)] if rows else []
        for asked in own:
            assert asked.features is not None
            rows.append(asked.rows[0])
            names.append(f"{asked.header.name} {len(names) + 1}")
            questions.append(asked.header.question or {})
            parts.append(replace(asked.features, digests=[""]))
        if own:
            session = f"the {len(own)} asked in this session"
            note = f"{note}, and {session}" if note else f"Looked at {session}"
        return (
            Catalogue(Rows(rows, builder.collate), builder.setup, names, questions),
            joined(parts),
            note + ".",
        )

    def _of(self, rows: list[Any], names: list[str], job: BackgroundJob) -> QueryFeatures:
        if self._kept is None or self._kept[0] != names:
            parts = []
            for start in range(0, len(rows), AT_ONCE):
                job.tell("computing features of the queries, once", start, len(rows))
                parts.append(
                    self.builder.index.features(Rows(rows[start : start + AT_ONCE], self.builder.collate))
                )
            self._kept = names, joined(parts)
        return self._kept[1]


def seen_from(scores: GroupScores, at: int) -> GroupScores:
    """The same scores against one training example alone."""
    return replace(scores, train=SelectedFeatures(scores.train, torch.tensor([at])))
