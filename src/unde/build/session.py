"""A session with a model: what queries need is settled once, so that the hundredth pays for one pass alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property

import torch
from torch import Tensor, nn

from unde import console
from unde.build import matrices
from unde.build.checkpoints import Checkpoint, fingerprints, loaded
from unde.build.context import checkpoint_of, step_of
from unde.build.fingerprints import SAMPLED, Watch, reads_differently
from unde.build.queries import BadQuery, QueryFeatures
from unde.build.stored import Stored
from unde.data import Rows, evenly
from unde.errors import UndeError
from unde.features import Coverage, Unit, make_units, plan_coverage
from unde.features.coverage import restored
from unde.features.run import FeaturePass, Measurement, cuts, exclusive, resized
from unde.tasks.base import Task

MANY = 8  # queries from which on it is worth while to put weights into another order
Under = Callable[[], AbstractContextManager[None]]
_FOREIGN = (RuntimeError, TypeError, ValueError, KeyError, IndexError, AttributeError)


class Session:
    """The model and task of an open index."""

    def __init__(
        self, stored: Stored, model: nn.Module, task: Task, checkpoints: Sequence[Checkpoint] | None
    ) -> None:
        self.stored, self.model, self.checkpoints = stored, model, checkpoints
        self.task = resized(task, stored.manifest.settled.rows)
        self._watch = Watch(model)  # the model was found to be the index's own
        self._coverages: dict[int, Coverage] = {}

    @cached_property
    def units(self) -> list[Unit]:
        m = self.stored.manifest
        found = matrices.read(self.stored.folder, m)
        return make_units(self.model, m.unit_names, str(self.stored.method.projection), m.seed, found)

    def check_model(self, full: bool = False) -> None:
        """Raises if the weights are not those of the index; reads all of them only if something points to a change."""
        if not full and self._watch.unchanged():
            return
        if fingerprints(self.model, self.checkpoints) != self.stored.manifest.models:
            raise UndeError(
                f"the model's weights are not those that {self.stored.folder} was built with: they changed since. "
                "Restore them, or build another index"
            )
        self._watch.renew()

    def features(self, rows: Rows, under: Under = nullcontext) -> QueryFeatures:
        """Features of queries under every checkpoint of the index; `under` may change the model meanwhile."""
        where = evenly(len(rows), SAMPLED)
        before = rows.digests(where)  # not after: a pass puts back the random numbers that examples may draw
        with exclusive(self.model):
            self.check_model()
            m = self.stored.manifest
            features, losses = torch.empty(m.terms, len(rows), m.width), torch.empty(m.terms, len(rows))
            digests: list[str] = []
            with console.progress("features of queries", len(rows) * self.stored.manifest.terms) as advance:
                for c in range(self.stored.manifest.terms):
                    with loaded(self.model, checkpoint_of(self.checkpoints, c)), under():
                        digests = self._pass(c, rows, advance, features[c], losses[c])
            if self.checkpoints is not None or under is not nullcontext:
                self._watch.renew()  # weights went away and came back
        self._check_finite(features)
        changed = [i for i, seen in zip(where, before) if seen != digests[i]]
        if changed:
            raise reads_differently(f"{changed[0]} of the queries")
        return QueryFeatures(self.stored.manifest.id, features, losses, digests)

    def _pass(
        self, c: int, rows: Rows, advance: console.Advance, features: Tensor, losses: Tensor
    ) -> list[str]:
        """Fills in features and losses; the digests of what was read."""
        method, done = self.stored.method, 0
        what = Measurement(self.units, method.measure)
        task, digests = step_of(self.task, method, c), []
        try:
            many = len(rows) >= MANY
            with FeaturePass(self.model, task, what, self._coverage(c, rows), many) as run:
                for found in run.over(
                    rows.batches(cuts(range(len(rows)), self.stored.manifest.settled.pass_size))
                ):
                    here = slice(done, done := done + len(found.where))
                    features[here], losses[here] = found.features, found.values
                    digests += found.digests
                    advance(len(found.where))
        except UndeError:
            raise
        except _FOREIGN as e:
            raise UndeError(
                f"the model cannot run on these queries ({type(e).__name__}: {e}): expected examples like those "
                "it was indexed on"
            ) from e
        return digests

    def _coverage(self, c: int, rows: Rows) -> Coverage:
        """As it was settled; for releases that did not record it, decided on the first queries."""
        if c not in self._coverages:
            noted, method = self.stored.manifest.settled.coverage, self.stored.method
            if noted is not None:
                made = restored(noted[min(c, len(noted) - 1)], self.model, self.units)
            else:
                made = plan_coverage(self.model, self.task, rows, self.units, method.measure)
            self._coverages[c] = made
        return self._coverages[c]

    def _check_finite(self, features: Tensor) -> None:
        for whole in features:
            largest = torch.maximum(whole.amax(1), -whole.amin(1))  # NaN if one is; isfinite would copy all
            bad = (~largest.isfinite()).nonzero()[:, 0].tolist()
            if bad:
                raise BadQuery(bad[0], len(bad))
