"""A session with a model: what queries need is settled once, so that the hundredth pays for one pass alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from unde.checkpoints import Checkpoint, fingerprints
from unde.data import Rows, evenly
from unde.errors import UndeError
from unde.fingerprints import SAMPLED, Watch, reads_differently, to_digest, to_signed
from unde.gradients import Coverage, Unit, make_units
from unde.gradients.feature_pass import FeaturePass, Measurement, cuts, exclusive, resized
from unde.gradients.record import restored
from unde.index import matrices
from unde.index.build_context import checkpoint_of, step_of
from unde.index.failing_example import blaming
from unde.index.query_features import BadQuery, QueryFeatures
from unde.index.reader import Stored
from unde.index.running import Running, close_on_error
from unde.parallel import SERIAL, Executor, Job, shown
from unde.parallel.model_transport import Carried, Elsewhere, carried, made
from unde.setup import Recipe
from unde.store.job_results import Results, scratch
from unde.store.layout import SCRATCH
from unde.tasks.base import Task

MANY = 8  # queries from which on it is worth while to put weights into another order
Under = Callable[[nn.Module], AbstractContextManager[Any]]
_FOREIGN = (RuntimeError, TypeError, ValueError, KeyError, IndexError, AttributeError)


class Session:
    """The model and task of an open index."""

    def __init__(
        self,
        stored: Stored,
        model: nn.Module,
        task: Task,
        checkpoints: Sequence[Checkpoint] | None,
        executor: Executor = SERIAL,
        recipe: Recipe | Carried | Elsewhere | None = None,
        device: str | None = None,
        watch: Watch | None = None,
    ) -> None:
        """`watch` looks at the model and checkpoints since they were last compared with the index; without one the
        first question compares them."""
        self.stored, self.model, self.checkpoints = stored, model, checkpoints
        self.executor, self.recipe, self.device = executor, recipe, device
        self.task = resized(task, stored.manifest.settled.rows)
        self._watch = watch
        self._coverages: dict[int, Coverage] = {}

    @cached_property
    def units(self) -> list[Unit]:
        m = self.stored.manifest
        found = matrices.read(self.stored.folder, m)
        units = make_units(self.model, m.unit_names, str(self.stored.method.projection), m.seed, found)
        if [u.columns for u in units] != m.columns:
            raise UndeError(f"the manifest of {self.stored.folder} contradicts itself: build the index again")
        return units

    def check_model(self, full: bool = False) -> None:
        """Raises if weights or buffers are not those of the index. All of them are read the first time, unless they
        were compared before, and whenever something points to a change."""
        if not full and self._watch is not None and self._watch.unchanged():
            return
        if fingerprints(self.model, self.checkpoints) != self.stored.manifest.models:
            raise UndeError(
                f"the model's weights are not those that {self.stored.folder} was built with: they changed since. "
                "Restore them, or build another index"
            )
        self._watch = Watch(self.model, self.checkpoints)

    def features(self, rows: Rows, under: Under = nullcontext) -> QueryFeatures:
        """Features of queries under every checkpoint of the index; `under(model)` may change the model meanwhile."""
        where = evenly(len(rows), SAMPLED)
        before = rows.digests(where)  # not after: a pass puts back the random numbers that examples may draw
        with exclusive(self.model):
            self.check_model()
            m = self.stored.manifest
            features, losses = torch.empty(m.terms, len(rows), m.width), torch.empty(m.terms, len(rows))
            digests = self._asked(rows, under, features, losses)
            if self.checkpoints is not None or under is not nullcontext:
                self._watch = Watch(self.model, self.checkpoints)  # weights went away and came back
        made = QueryFeatures(self.stored.manifest.lineage, features, losses, digests)
        self._check_finite(made.features)
        changed = [i for i, seen in zip(where, before) if seen != made.digests[i]]
        if changed:
            raise reads_differently(f"{changed[0]} of the queries")
        return made

    def _asked(self, rows: Rows, under: Under, features: Tensor, losses: Tensor) -> list[str]:
        """Fills in features (C, Q, D) and losses (C, Q), pass by pass, in other processes where there are some and
        several passes; the digests of what was read."""
        m, digests = self.stored.manifest, [""] * len(rows)
        passes = cuts(range(len(rows)), m.settled.pass_size)
        asking = Asking(self, rows, under, passes)
        jobs: list[Job] = [(c, i) for c in range(m.terms) for i in range(len(passes))]
        executor = SERIAL if len(jobs) == 1 else self.executor
        if not executor.here and self.recipe is None:
            folder = self.stored.folder / SCRATCH
            self.recipe = carried(self.model, self.task, rows.data, rows.collate, folder)
        elsewhere = nullcontext() if executor.here else scratch(self.stored.folder)
        with elsewhere as asking.results.folder, closing(asking):
            for c, i in shown(
                executor,
                ask,
                asking,
                jobs,
                "features of queries",
                called=lambda job: (
                    f"queries {passes[job[1]][0]} to {passes[job[1]][-1]} (checkpoint {job[0]})"
                ),
                size=lambda job: len(passes[job[1]]),
                unit="examples",
            ):
                here, found = slice(passes[i].start, passes[i].stop), asking.results.take((c, i))
                features[c, here], losses[c, here] = found["features"], found["values"]
                digests[here] = [to_digest(int(d)) for d in found["digest"]]
        return digests

    def coverage(self, c: int, rows: Rows) -> Coverage:
        """Which way each parameter goes, as it was decided when the index was built."""
        if c not in self._coverages:
            records = self.stored.manifest.settled.coverage
            assert records is not None
            self._coverages[c] = restored(records[min(c, len(records) - 1)], self.model, self.units)
        return self._coverages[c]

    def _check_finite(self, features: Tensor) -> None:
        for whole in features:
            largest = torch.maximum(whole.amax(1), -whole.amin(1))  # NaN if one is; isfinite would copy all
            bad = (~largest.isfinite()).nonzero()[:, 0].tolist()
            if bad:
                raise BadQuery(bad[0], len(bad))


class Asking:
    """Queries that are being asked: each pass under each checkpoint is a job. It travels by the recipe of the model."""

    def __init__(self, session: Session, rows: Rows, under: Under, passes: list[range]) -> None:
        self.session, self.rows, self.under, self.passes = session, rows, under, passes
        self.results = Results(session.stored.manifest.id)
        self.passing = Running()

    def __getstate__(self) -> dict[str, Any]:
        at = self.session
        made = (at.recipe, at.checkpoints, at.device)
        return {
            "stored": at.stored,
            "made": made,
            "rest": (self.rows, self.under, self.passes),
            "results": self.results,
        }

    def __setstate__(self, sent: dict[str, Any]) -> None:
        given, stored = made(*sent["made"]), sent["stored"]
        given.must_be(stored.manifest, stored.folder)
        watch = Watch(given.model, given.checkpoints)
        session = Session(stored, given.model, given.task, given.checkpoints, watch=watch)
        self.__init__(session, *sent["rest"])
        self.results = sent["results"]

    def running(self, c: int) -> FeaturePass:
        """The pass under checkpoint or step c."""
        at, method = self.session, self.session.stored.method

        def made() -> FeaturePass:
            what, many = Measurement(at.units, method.measure), len(self.rows) >= MANY
            return FeaturePass(at.model, step_of(at.task, method, c), what, at.coverage(c, self.rows), many)

        return self.passing.under(c, at.model, checkpoint_of(at.checkpoints, c), made, self.under)

    def close(self) -> None:
        """The model as it was."""
        self.passing.close()


def ask(asking: Asking, c: int, i: int) -> None:
    """Pass i of the queries under checkpoint c."""
    at, asked = asking.session, asking.passes[i]
    try:
        with blaming(at.model, at.task, asking.rows, lambda: asked, what="query"), close_on_error(asking):
            [found] = asking.running(c).over(asking.rows.batches([asked]))
    except UndeError:
        raise
    except _FOREIGN as e:
        raise UndeError(
            f"the model cannot run on these queries ({type(e).__name__}: {e}): expected examples like those "
            "it was indexed on"
        ) from e
    digest = torch.tensor([to_signed(d) for d in found.digests], dtype=torch.int64)
    asking.results.put((c, i), {"features": found.features, "values": found.values, "digest": digest})
