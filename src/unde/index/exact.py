"""Attribution without an index, from gradients that are computed anew (`gradient_scores`).

Gradients are whole, so nothing is lost to a projection, and none of a training example is stored. K must not mix
parameters, so that it acts on the query side: EKFAC, and TracIn in both metrics.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from unde import console, methods
from unde.checkpoints import Checkpoint, resolve_checkpoint_weights
from unde.data import Collate, Rows, choose_collate, parse_bytes
from unde.default_device import host_default
from unde.devices import CPU, Compute, budget, device_of, move
from unde.errors import UndeError
from unde.fingerprints import reads_differently, to_digest
from unde.gradients import describe_units, make_units
from unde.gradients.feature_pass import torch_threads
from unde.groups import Groups, trainable, unwrap_compiled
from unde.index.builder import BuildSettings
from unde.index.choice import settle_damping
from unde.index.feature_runner import FeatureRunner, raise_failing_sample
from unde.index.gradient_kernel import KERNELS, QueryFactors, split_memory
from unde.index.gradient_scores import OWNER, GradientScores, GradientStream
from unde.index.reader import parse_ids
from unde.index.sizes import draft_manifest
from unde.methods import EKFAC, Method, TracIn
from unde.parallel import Executor, close_workers, get_executor
from unde.parallel.model_transport import BuildInputs
from unde.projection import Spec
from unde.scoring.blocks import cut
from unde.scoring.exact import MOST, ExactScores, PairNorms, empty_scores
from unde.setup import Recipe
from unde.store.manifest import ResolvedSettings
from unde.store.shards import scratch
from unde.tasks.base import Task, check_task

AUTO = "auto"
CG_VECTORS = 6  # conjugate gradients hold so many vectors for each query
QUERY_SHARE = 2  # gradients of queries take at most 1/2 of the memory budget
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
        choice = settle_damping(wanted, inputs, trainable(model, exclude))
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
        scores = GradientScores(stream, choice.method, asked, settings.memory, there, runs, cg=cg)
        return _score(scores, query_ids)


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
    draft = draft_manifest(
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
    with raise_failing_sample(inputs, settings.ids):
        within = split_memory(method, draft, there.memory, there)
        runner.manifest = runner.choose_passes(inputs.rows, within // PASS_SHARE, settings.batch_size)
    return runner, partition


def _score(scores: GradientScores, query_ids: Sequence[Any] | None) -> ExactScores:
    """Scores of all training examples."""
    stream = scores.stream
    m, partition = stream.runner.manifest, stream.partition
    blocks = _query_blocks(scores)
    scores.check_model()
    shape = len(scores.queries), m.examples, len(partition)
    _check_room(shape)
    values = empty_scores(shape, scores.memory)
    norms = PairNorms(scores.query_squares, torch.zeros(shape[1], shape[2]))
    out = values if isinstance(values, Tensor) else torch.from_numpy(values)
    digests = [""] * m.examples
    for c, i, rows, part in scores.parts(blocks, "exact scores"):
        out[blocks[i], rows] += part["parts"]
        if i == 0:
            norms.train[rows] += part["norms"]
        _note_digests(digests, rows, part["digest"], first=c == i == 0)
    return ExactScores(
        values,
        partition.names,
        scores.memory,
        method=scores.method,
        query_digests=scores.query_digests,
        train_digests=digests,
        norms=norms,
        provenance=_provenance(scores),
        ids=stream.ids,
        query_ids=query_ids,
    )


def _provenance(scores: GradientScores) -> dict[str, Any]:
    m, factors = scores.stream.runner.manifest, scores.stream.factors
    made = {"method": scores.method.describe(), "model": m.models, "data": m.data, "task": m.task["name"]}
    options = {"cg": scores.cg, "query_rank": factors and factors.rank}
    return made | {"exact": True} | {name: value for name, value in options.items() if value}


def _query_blocks(scores: GradientScores) -> list[slice]:
    """Queries whose gradients are in memory together."""
    factors, there, count = scores.stream.factors, scores.there, len(scores.queries)
    width = scores.stream.runner.manifest.width if factors is None or scores.cg else factors.width
    step = queries_in_memory(width, scores.cg, Compute(there.device, scores.split(there.memory)))
    option = "memory=" if there.device == CPU else "device_memory="
    blocks = list(cut(slice(0, count), step))
    if len(blocks) > 1:
        console.line(
            f"{count} queries take {len(blocks)} passes over the training data: the gradients of {step} "
            f"({console.size(4 * width)} each) fit what the memory budget has for them. {option} raises it"
            + (", query_rank=16 takes less of each" if factors is None else "")
        )
    return blocks


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


def check_rank(rank: int | None) -> None:
    """Raise unless it is a number of outer products, or None."""
    if rank is not None and rank < 1:
        raise UndeError(
            f"query_rank={rank}: expected a number of outer products, such as 16, or None for whole queries"
        )


def queries_in_memory(parameters: int, cg: int, there: Compute) -> int:
    """How many queries are held at once; raises unless it is one, at least."""
    each = 4 * parameters * (CG_VECTORS if cg else 1)
    if step := there.memory // QUERY_SHARE // each:
        return step
    option = "memory=" if there.device == CPU else "device_memory="
    what = (
        f"the {CG_VECTORS} vectors that cg={cg} holds for one query take"
        if cg
        else "the gradient of one query takes"
    )
    raise UndeError(
        f"{what} {console.size(each)} ({parameters:,} parameters), and the memory budget has "
        f"{console.size(there.memory // QUERY_SHARE)} for them: raise {option}, leave parameters out with exclude=, or "
        "build an index"
    )
