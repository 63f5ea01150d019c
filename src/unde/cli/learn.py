"""`unde learn`: how much each group of parameters should count."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from unde import console
from unde.cli.options import (
    IndexPath,
    MethodOfIndex,
    ModelOptions,
    NoTrust,
    QueryField,
    Uncalibrated,
    WorkerOptions,
    check_out,
    place_option,
)
from unde.errors import UndeError, unknown
from unde.store.remote import StorePath

Number = TypeVar("Number", int, float)
WITH_QUERIES = "With --queries"


def learn(
    index: IndexPath,
    model: ModelOptions,
    worker: WorkerOptions,
    out: Annotated[Any, place_option("--out", help="where to save the weights")] = "weights.json",
    method: MethodOfIndex = None,
    examples: Annotated[
        int | None, typer.Option(help="training examples to learn from (default: 200)")
    ] = None,
    perturb: Annotated[
        str | None,
        typer.Option(
            help="weights: noise on the model's weights, for inputs that cannot be perturbed "
            "(default: what the task knows)"
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="of which examples are drawn, and of the adamw solver")] = 0,
    no_trust: NoTrust = False,
    queries: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="texts to learn from, as in --data; with MODULE:FUNCTION: learn, for its learn_queries",
            rich_help_panel=WITH_QUERIES,
        ),
    ] = None,
    k: Annotated[
        str | None,
        typer.Option(
            metavar="NUMBER",
            help="top-ranked examples taken for true; auto (the default) tries several",
            rich_help_panel=WITH_QUERIES,
        ),
    ] = None,
    weight_decay: Annotated[
        str | None,
        typer.Option(
            metavar="NUMBER",
            help="pull towards the unweighted method; auto (the default) tries several",
            rich_help_panel=WITH_QUERIES,
        ),
    ] = None,
    loss: Annotated[
        str | None,
        typer.Option(
            help="top-k (the default), bottom-k, top-k-bottom-k or no-norm", rich_help_panel=WITH_QUERIES
        ),
    ] = None,
    solver: Annotated[
        str | None, typer.Option(help="fixed-point or adamw", rich_help_panel=WITH_QUERIES)
    ] = None,
    query_field: QueryField = None,
    uncalibrated: Uncalibrated = False,
) -> None:
    """Learn how much each group of parameters should count, without labels.

    Without --queries, weights are learned with which perturbed training examples find their originals; weights that
    would not help stay uniform. With --queries, weights follow the paper's objective; the queries must be neither in
    the training data nor in the evaluation data.

    Examples:

    `unde learn --index runs/idx`

    `unde learn --index runs/idx --method ekfac --examples 100 --out ekfac.json`

    `unde learn --index runs/idx --queries learn.jsonl --out weights.json`

    `unde learn my_project.setup:make --index runs/idx --queries learn --k 10`
    """
    from unde.cli.project import Project, cached_scores
    from unde.weights import learn_weights

    with_queries = {
        "k": k,
        "weight-decay": weight_decay,
        "loss": loss,
        "solver": solver,
        "query-field": query_field,
    }
    _check(queries, with_queries, {"examples": examples, "perturb": perturb}, out)
    model = model.remembered(index)
    texts = None if queries is None or (model.target is not None and queries == "learn") else Path(queries)
    project = Project(model, index=index, learn=texts, query_field=query_field)
    if queries is None:
        opened = project.index(index, worker.executor(), uncalibrated=uncalibrated)
        weights = opened.learn_weights(None, method, perturb, 200 if examples is None else examples, seed)
    else:
        rows = project.disjoint_queries("learn")
        opened = project.index(index, worker.executor(), uncalibrated=uncalibrated)
        weights = learn_weights(
            cached_scores(opened, rows, method),
            k=_number("k", k, int, "a whole number"),
            weight_decay=_number("weight-decay", weight_decay, float, "a number"),
            loss=loss or "top-k",
            solver=solver,
            seed=seed,
            judge=opened,
        )
    weights.save(out)
    if not no_trust:
        try:
            console.echo(opened.trust(weights, method, seed=seed, perturb=perturb))
        except UndeError as e:  # the weights are saved all the same
            console.note(str(e))
    console.echo(f"{out}: {weights}")


def _check(
    queries: str | None, with_queries: dict[str, str | None], without: dict[str, Any], out: StorePath
) -> None:
    """Raise on options of the other way of learning, and where weights cannot be saved."""
    misplaced = [f"--{name}" for name, value in with_queries.items() if value is not None]
    if queries is None and misplaced:
        raise UndeError(
            f"{', '.join(misplaced)} belong{'s' if len(misplaced) == 1 else ''} to learning from queries: add "
            "--queries FILE (with MODULE:FUNCTION: --queries learn), or leave it out to learn from the index alone"
        )
    misplaced = [f"--{name}" for name, value in without.items() if value is not None]
    if queries is not None and misplaced:
        raise UndeError(
            f"{', '.join(misplaced)} belong{'s' if len(misplaced) == 1 else ''} to learning from the index alone: "
            "leave out --queries, or this"
        )
    if without["perturb"] not in (None, "weights"):
        raise unknown("perturb", without["perturb"], ("weights",))
    check_out(out)


def _number(name: str, text: str | None, kind: Callable[[str], Number], what: str) -> Number | str:
    if text is None or text == "auto":
        return "auto"
    try:
        return kind(text)
    except ValueError:
        raise UndeError(f"--{name} is {text!r}: expected {what}, or auto") from None
