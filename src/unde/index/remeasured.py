"""Some training examples, and queries, measured once more under another projection: nothing is stored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from unde.checkpoints import loaded
from unde.data import Rows
from unde.errors import BadExample
from unde.fingerprints import Watch, reads_differently, to_signed
from unde.gradients import make_units, plan_coverage
from unde.gradients.coverage import recorded
from unde.gradients.feature_pass import exclusive
from unde.gradients.feature_pass import settle as settle_passes
from unde.index import matrices
from unde.index.build_context import Context, checkpoint_of, step_of
from unde.index.failing_example import blaming
from unde.index.reader import Stored
from unde.index.running import close_on_error
from unde.index.session import Session
from unde.methods import Method
from unde.parallel.model_transport import BuildInputs
from unde.store.manifest import Manifest


class Remeasured:
    """The model, task and data of an index under another projection: coverage and passes are settled anew."""

    def __init__(self, stored: Stored, given: BuildInputs, method: Method) -> None:
        """`method` names the projection and what is differentiated; the model was found to be that of the index."""
        self.stored, self.method = stored, method
        with exclusive(given.model):
            manifest = self._settled(given)
        self.context = Context(stored.folder, manifest, given)
        measured = Stored(stored.folder, manifest, stored.memory)
        watch = Watch(given.model, given.checkpoints)
        self.session = Session(measured, given.model, given.task, given.checkpoints, watch=watch)
        self._digests = stored.values("digest")

    @property
    def manifest(self) -> Manifest:
        return self.context.manifest

    def queries(self, rows: Rows) -> Tensor:
        """(C, Q, D) features of queries."""
        return self.session.features(rows).features

    def close(self) -> None:
        """The model as it was."""
        self.context.close()

    def rows(self, where: Sequence[int]) -> tuple[list[Tensor], Tensor]:
        """Features (n, D) of training examples under each checkpoint, and what the method keeps beside them."""
        m, given, found, beside = self.manifest, self.context.given, [], torch.empty(0)
        wanted = self._digests[torch.tensor(where)].tolist()
        size = m.settled.pass_size
        passes = [where[a : a + size] for a in range(0, len(where), size)]
        with (
            exclusive(given.model),
            blaming(given.model, given.task, given.rows, lambda: where),
            close_on_error(self.context),
        ):
            for c in range(m.terms):
                run, out, kept = self.context.running(c), torch.empty(len(where), m.width), []
                batches = (
                    (self.context.drawn(r), batch, digests)
                    for r, batch, digests in given.rows.batches(passes)
                )
                for i, made in enumerate(run.over(batches)):
                    here = slice(i * size, i * size + len(passes[i]))
                    self._check(passes[i], made.features, made.digests, wanted[here])
                    out[here] = made.features
                    kept.append(made.beside)
                found.append(out)
                beside = torch.cat(kept)
            if m.terms > 1:
                self.context.close()  # the weights of a checkpoint go
        return found, beside

    def _check(
        self, where: Sequence[int], features: Tensor, digests: Sequence[str], wanted: Sequence[int]
    ) -> None:
        changed = [i for i, d, then in zip(where, digests, wanted) if to_signed(d) != then]
        if changed:
            raise reads_differently(changed[0])
        bad = (~features.isfinite().all(1)).nonzero()[:, 0].tolist()
        if bad:
            raise BadExample(
                f"the gradient of example {where[bad[0]]} is NaN or infinite: leave it out of the candidates"
            )

    def _settled(self, given: BuildInputs) -> Manifest:
        m, method, memory = self.stored.manifest, self.method, self.stored.memory
        found = matrices.read(matrices.home(self.stored.folder), m)
        units = make_units(given.model, m.unit_names, str(method.projection), m.seed, found)
        m = replace(
            m,
            method=method.describe(),
            units=[{"name": u.name, "shape": list(u.shape), "size": u.stop - u.start} for u in units],
            factors=False,
            settled=replace(m.settled, coverage=None, rows=None),
        )
        draft, decided = Context(self.stored.folder, m, given), []
        for c in range(len(m.models)):
            with loaded(given.model, checkpoint_of(given.checkpoints, c)):
                coverage = plan_coverage(
                    given.model, given.task, given.rows, draft.units, draft.measurement.measure
                )
                task = step_of(given.task, method, c)
                size, rows = settle_passes(
                    given.model, task, given.rows, draft.measurement, coverage, memory // 2
                )
                decided.append((size, rows, recorded(coverage)))
        size, rows, _ = min(decided, key=lambda d: d[0])
        settled = replace(m.settled, pass_size=size, rows=rows, coverage=[d[2] for d in decided])
        return replace(m, settled=settled)
