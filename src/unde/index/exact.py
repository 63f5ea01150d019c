"""Attribution without an index: gradients of queries are held with K applied, those of training examples stream by.

    score(q, n)_j = Σ_c η_c ⟨ [K_c g^c(q)]_j, g_j^c(n) ⟩

Gradients are whole, so nothing is lost to a projection, and none of a training example is stored. K must not mix
parameters, so that it acts on the query side: EKFAC, and TracIn in both metrics.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from unde import console, methods
from unde.checkpoints import Checkpoint, resolve_checkpoint_weights
from unde.data import Collate, Rows, choose_collate, evenly, parse_bytes
from unde.default_device import host_default
from unde.devices import CPU, Compute, budget, device_of, move, put
from unde.errors import UndeError
from unde.fingerprints import reads_differently, to_digest
from unde.gradients import describe_units, make_units
from unde.gradients.coverage import EXAMPLES
from unde.gradients.feature_pass import largest, torch_threads
from unde.groups import Groups, trainable, unwrap_compiled
from unde.index import builder
from unde.index.builder import BuildSettings
from unde.index.choice import settle_damping
from unde.index.feature_runner import FeatureRunner, raise_failing_example
from unde.index.gradient_kernel import (
    KERNELS,
    Kept,
    apply_in_place,
    fit_to_gradients,
    gradient_dampings,
    solve,
    split_memory,
)
from unde.index.gradient_stream import OWNER, GradientStream
from unde.index.query_factors import QueryFactors, check_rank, queries_in_memory
from unde.index.query_features import BadQuery
from unde.index.state import parse_ids
from unde.methods import EKFAC, Method, TracIn
from unde.parallel import Executor, close_workers, get_executor
from unde.parallel.model_transport import BuildInputs
from unde.projection import Spec
from unde.scoring.blocks import TINY, ScoreRange, cut
from unde.scoring.exact import MOST, ExactScores, PairNorms, empty_scores
from unde.setup import Recipe
from unde.store.manifest import ResolvedSettings
from unde.store.shards import scratch
from unde.tasks.base import Task, check_task

AUTO = "auto"
PROBED = 4  # training examples whose scores tell how much is lost where queries are held as outer products
PASS_SHARE = 2  # passes are chosen as if the budget was 1/2 of it: they take half of that


@host_default
def attribute(
    model: nn.Module,
    task: Task,
    train_data: Any,
    queries: Any,
    method: str | Method = AUTO,
    groups: Groups | str | Mapping[str, str] = "layer",
    *,
    memory: int | str = "2GB",
    device_memory: int | str | None = None,
    exclude: Sequence[str] = (),
    collate: Collate | None = None,
    ids: Sequence[Any] | None = None,
    query_ids: Sequence[Any] | None = None,
    checkpoints: Sequence[Checkpoint] | None = None,
    checkpoint_weights: Sequence[float] | None = None,
    executor: str | Executor = "serial",
    threads: int | None = None,
    recipe: str | Recipe | None = None,
    device: str | torch.device | None = None,
    batch_size: int | None = None,
    cg: int = 0,
    query_rank: int | None = None,
    progress: bool = True,
) -> ExactScores:
    """Score all training examples for each query by whole gradients, in one pass over the training data.

    No index is written. Queries whose gradients do not fit half of the memory budget are asked in several passes. EKFAC
    takes two passes more, over at most 4096 training examples.

    Args:
        model: The trained model, a PyTorch module.
        task: What the model is trained for: one of `unde.tasks`, or a `Task` of your own.
        train_data: The training examples: a data set, a loader, a list, or a tuple or dict of tensors.
        queries: Data like the training data.
        method: "ekfac" or "tracin", or a method with its settings; "auto" is EKFAC.
        groups: The groups of parameters that scores are resolved by: "layer", "block", …, or {pattern: group}.
        memory: The memory budget of the host, such as "2GB".
        device_memory: The memory budget on the device beside the weights, as in `Index.build`.
        exclude: Regular expressions of parameters to leave out.
        collate: Puts examples into a batch; by default that of the loader or the task.
        ids: The user's ids of the training examples.
        query_ids: The user's ids of the queries.
        checkpoints: State dicts or .safetensors files; scores are means over them.
        checkpoint_weights: η_c of each checkpoint; equal by default.
        executor: "serial", "processes:4", "ray", or an Executor.
        threads: Threads of torch for each job.
        recipe: As in `Index.build`: how other processes make the model.
        device: Where to run the model; by default where it is.
        batch_size: Examples in a pass; by default `memory` and what is fast decide.
        cg: Steps of conjugate gradients that solve (G + λ) x = g(q) for the Gauss-Newton matrix G, with EKFAC as the
            preconditioner; 0 leaves EKFAC as it is. Each step takes a pass over at most 4096 training examples for
            each query.
        query_rank: Outer products that are held of each matrix of a query, such as 16; None holds whole queries. Where
            these take several passes, this saves memory, and so passes; what it leaves out is told.
        progress: Whether to show what is done, and a bar.

    Returns:
        Scores like those of `index.score(queries)`: `scores.top(10)` lists the strongest examples of each query.

    Raises:
        UndeError: The method mixes parameters, the budget does not hold the gradient of a query, the model cannot run
            on an example, or a gradient is NaN or infinite.

    >>> unde.attribute(model, unde.tasks.Classification(), data, queries).top(10)  # doctest: +SKIP
    """
    check_task(task, "unde.attribute(model, task, train_data, queries)")
    rows = Rows(train_data, collate or choose_collate(task.collate, train_data))
    runs, model = get_executor(executor, threads=threads), unwrap_compiled(model)
    if not runs.exclusive:
        raise UndeError("an array of workers shares an index: use executor='processes:4' or 'ray' here")
    place = None if device is None else str(device)
    recipe = Recipe(recipe) if isinstance(recipe, str) else recipe
    inputs = BuildInputs(model, task, rows, checkpoints, recipe, place)
    asked = Rows(queries, choose_collate(rows.collate, queries))
    if query_ids is not None and len(query_ids) != len(asked):
        raise UndeError(f"{len(query_ids)} query_ids for {len(asked)} queries: expected one for each")
    wanted = check_method(method)
    check_cg(cg, wanted)
    check_rank(query_rank)
    with ExitStack() as stack:
        stack.enter_context(console.silent(not progress))
        move(model, device)
        stack.enter_context(close_workers(executor, runs))
        folder = None if runs.in_process else stack.enter_context(scratch(None))
        most = None if device_memory is None else parse_bytes(device_memory, "device_memory")
        there = budget(device_of(model), parse_bytes(memory), most)
        parameters = dict(model.named_parameters())
        if query_rank is None:
            queries_in_memory(sum(parameters[name].numel() for name in trainable(model, exclude)), cg, there)
        choice = settle_damping(wanted, inputs, exclude)
        for line in choice.lines() if progress else ():
            console.line(line)
        settings = BuildSettings(
            choice.method,
            parse_bytes(memory),
            groups=groups,
            exclude=exclude,
            ids=parse_ids(rows, ids),
            checkpoint_weights=checkpoint_weights,
            threads=threads or runs.threads,
            batch_size=batch_size,
        )
        stack.enter_context(torch_threads(settings.threads))
        if folder is not None:
            inputs = inputs.portable(folder, rows)
        runner, partition = _runner(inputs, choice.method, settings, there)
        factors = None if query_rank is None else QueryFactors(query_rank, runner.manifest.units)
        stream = GradientStream(runner, partition, settings.ids, folder, factors)
        return _OnePass(stream, choice.method, asked, settings.memory, runs, there, cg).scores(query_ids)


def check_method(method: str | Method) -> Method:
    """The method on whole gradients; raises for one whose kernel mixes parameters.

    >>> check_method("auto").projection
    'none'
    """
    chosen = EKFAC() if method == AUTO else methods.parse(method)
    name = type(chosen).__name__
    final = chosen.linear or isinstance(chosen, TracIn)
    apart = isinstance(chosen.kernel, KERNELS) and final and not chosen.groupwise
    if not apart or chosen.steps > 1 or chosen.extra_measures:
        raise UndeError(
            f"{name} needs the features of all training examples at once, and exact scores keep none: use 'ekfac' or "
            f"'tracin', or build an index for it, Index.build(…, method={chosen.name or name!r})"
        )
    if chosen.projection is not None and Spec.parse(chosen.projection).kind != "none":
        raise UndeError(
            f"{name} with projection {chosen.projection!r}: exact scores are those of whole gradients. Leave the "
            "projection out, or build an index with it"
        )
    return replace(chosen, projection="none")


def check_cg(steps: int, method: Method) -> None:
    """Raise unless conjugate gradients can refine this method."""
    if steps < 0:
        raise UndeError(f"cg={steps}: expected a number of steps, such as 20, or 0 for none")
    if steps and not isinstance(method, EKFAC):
        raise UndeError(
            f"cg={steps} with {type(method).__name__}: conjugate gradients refine EKFAC, use method='ekfac'"
        )


def _runner(
    inputs: BuildInputs, method: Method, settings: BuildSettings, there: Compute
) -> tuple[FeatureRunner, Groups]:
    """Units, coverage and pass size, as an index of whole gradients has them."""
    names, partition, _ = settings.check(inputs, method)
    shares = resolve_checkpoint_weights(settings.checkpoint_weights, len(inputs.models), method.terms)
    units = make_units(inputs.model, names, "none", 0)
    draft = builder.draft_manifest(
        method,
        inputs.task,
        len(inputs.rows),
        partition,
        store_dtype="float32",
        models=inputs.models,
        checkpoint_weights=shares,
        data=inputs.data,
        factors=False,
        units=describe_units(units),
        resolved=ResolvedSettings(0, 0, settings.threads or torch.get_num_threads()),
    )
    runner = FeatureRunner(Path(OWNER), draft, inputs)
    runner.units = units
    with _naming_examples(inputs, settings.ids):
        within = split_memory(method, draft, there.memory, there)
        runner.manifest = runner.choose_passes(inputs.rows, within // PASS_SHARE, settings.batch_size)
    return runner, partition


def _naming_examples(inputs: BuildInputs, ids: Sequence[Any] | None) -> Any:
    """Errors of the model name one of the examples that are tried first."""
    rows = inputs.rows
    return raise_failing_example(
        inputs.model, inputs.task, rows, lambda: sorted({*evenly(len(rows), EXAMPLES), largest(rows)}), ids
    )


@dataclass
class _OnePass:
    """Queries on their way through the training data."""

    stream: GradientStream
    method: Method
    queries: Rows
    memory: int
    executor: Executor
    there: Compute  # where K is applied
    cg: int = 0
    query_digests: list[str] = field(default_factory=list)
    probe: Tensor = field(default_factory=lambda: torch.empty(0))  # gradients of a few training examples
    errors: Tensor = field(default_factory=lambda: torch.zeros(2, dtype=torch.float64))

    def scores(self, query_ids: Sequence[Any] | None) -> ExactScores:
        m, partition = self.stream.runner.manifest, self.stream.partition
        blocks = self._query_blocks()
        for _ in self.stream.runner.passes(self.queries.subset([0]), 0):
            pass  # what the model cannot run on raises before the kernel is fitted, which takes longer
        shape = len(self.queries), m.examples, len(partition)
        _check_room(shape)
        values = empty_scores(shape, self.memory)
        norms = PairNorms(torch.zeros(shape[0], shape[2]), torch.zeros(shape[1], shape[2]))
        out = values if isinstance(values, Tensor) else torch.from_numpy(values)
        digests: list[str] = []
        sizes = ScoreRange(len(self.queries))
        for c, eta in enumerate(m.checkpoint_weights):
            kept: Kept = {}
            for i, block in enumerate(blocks):
                held = self._hold(block, c, kept, norms)
                if i == len(blocks) - 1:
                    kept.clear()  # eigenvectors are large
                title = "exact scores" + (f", {i + 1} of {len(blocks)}" if len(blocks) > 1 else "")
                first = c == 0 and i == 0
                digests = digests or [""] * m.examples
                for rows, part in self.stream.over(held, c, self.executor, title):
                    out[block, rows] += sizes.update(block, eta * part["parts"])
                    if i == 0:
                        norms.train[rows] += eta * part["norms"]
                    _note_digests(digests, rows, part["digest"], first)
                del held
        return ExactScores(
            values,
            partition.names,
            self.memory,
            method=self.method,
            query_digests=self.query_digests,
            train_digests=digests,
            norms=norms,
            provenance=self._provenance(),
            ids=self.stream.ids,
            query_ids=query_ids,
        )

    def _provenance(self) -> dict[str, Any]:
        m = self.stream.runner.manifest
        made = {"method": self.method.describe(), "model": m.models, "data": m.data, "task": m.task["name"]}
        options = {"cg": self.cg, "query_rank": self.stream.factors and self.stream.factors.rank}
        return made | {"exact": True} | {name: value for name, value in options.items() if value}

    def _query_blocks(self) -> list[slice]:
        """Queries whose gradients are in memory together."""
        m, factors, count = self.stream.runner.manifest, self.stream.factors, len(self.queries)
        width = m.width if factors is None or self.cg else factors.width
        within = Compute(self.there.device, self._within(self.there.memory))
        step, each = queries_in_memory(width, self.cg, within), 4 * width
        option = "memory=" if self.there.device == CPU else "device_memory="
        blocks = list(cut(slice(0, count), step))
        if len(blocks) > 1:
            console.line(
                f"{count} queries take {len(blocks)} passes over the training data: the gradients of {step} "
                f"({console.size(each)} each) fit what the memory budget has for them. {option} raises it"
                + (", query_rank=16 takes less of each" if factors is None else "")
            )
        return blocks

    def _within(self, memory: int) -> int:
        return split_memory(self.method, self.stream.runner.manifest, memory, self.there)

    def _hold(self, block: slice, c: int, kept: Kept, norms: PairNorms) -> Tensor:
        """K g(q) of a block of queries under checkpoint c, (q, D)."""
        runner, inputs = self.stream.runner, self.stream.inputs
        with _naming_examples(inputs, self.stream.ids):
            fitted = fit_to_gradients(
                self.method, runner, inputs.rows, c, self._within(self.memory), self.there, kept
            )
        factors = None if self.cg else self.stream.factors
        width = runner.manifest.width if factors is None else factors.width
        held = torch.empty(block.stop - block.start, width, device=self.there.device)
        for here, part in runner.passes(self.queries.subset(range(block.start, block.stop)), c):
            features = put(part["features"], self.there.device)
            bad = (~features.isfinite().all(1)).nonzero()[:, 0].tolist()
            if bad:
                raise BadQuery(block.start + here.start + bad[0], len(bad))
            rows = slice(block.start + here.start, block.start + here.stop)
            squares = self.stream.squared_norms(features).cpu()
            norms.queries[rows] += runner.manifest.checkpoint_weights[c] * squares
            features = features if self.cg else apply_in_place(fitted, features)
            held[here.start : here.stop] = features if factors is None else self._pack(features, c)
            if c == 0:
                self.query_digests += [to_digest(d) for d in part["digest"].tolist()]
        if self.cg:
            dampings = gradient_dampings(self.method, runner, c, kept)
            held, residual = solve(self.method, runner, inputs.rows, c, fitted, dampings, held, self.cg)
            console.line(
                f"conjugate gradients: {self.cg} steps leave {float(residual.median()):.1%} of a gradient unexplained, "
                f"at most {float(residual.max()):.1%}"
            )
            held = held if self.stream.factors is None else self._pack(held, c)
        if self.stream.factors is not None:
            off, size = self.errors.tolist()
            console.line(
                f"queries held as {self.stream.factors.rank} outer products of each matrix: scores of "
                f"{len(self.probe)} examples are off by {(off / max(size, TINY)) ** 0.5:.1%}"
            )
        return held

    def _pack(self, queries: Tensor, c: int) -> Tensor:
        """What is held of queries (q, D), after a look at how much their scores with a few examples change."""
        factors, runner = self.stream.factors, self.stream.runner
        assert factors is not None
        if not len(self.probe):
            rows = self.stream.inputs.rows
            passes = runner.passes(rows.subset(evenly(len(rows), PROBED)), c)
            self.probe = torch.cat([put(part["features"], self.there.device) for _, part in passes])
        held = factors.pack(queries)
        self.errors += factors.error(queries, held, self.probe).cpu().double()
        return held


def _check_room(shape: tuple[int, int, int]) -> None:
    need = 4 * shape[0] * shape[1] * shape[2]
    if need > MOST:
        raise UndeError(
            f"scores of {shape[0]:,} queries × {shape[1]:,} examples × {shape[2]} groups take {need / 2**30:.3g} GiB, "
            f"more than {MOST / 2**30:.3g} GiB: ask fewer queries, or use coarser groups="
        )


def _note_digests(digests: list[str], rows: slice, signed: Tensor, first: bool) -> None:
    """Keep the digests of training examples; raise if one reads differently than before."""
    found = [to_digest(d) for d in signed.tolist()]
    if not first:
        for i, then, now in zip(range(rows.start, rows.stop), digests[rows], found):
            if then != now:
                raise reads_differently(i)
    digests[rows] = found
