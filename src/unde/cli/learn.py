"""`unde learn`: how much each group of parameters should count."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from unde import console
from unde.cli.options import (
    Data,
    Device,
    Engine,
    HFModel,
    IndexPath,
    MethodOfIndex,
    NoTrust,
    QueryField,
    SeqLen,
    Target,
    TextField,
    Threads,
    TrustRemoteCode,
    Uncalibrated,
    Workers,
    place_option,
    source_of,
)
from unde.cli.project import Project, kept_scores, saved_target
from unde.errors import UndeError, unknown
from unde.index import Index
from unde.parallel import named
from unde.store.remote import StorePath
from unde.weights import Weights, learn_weights

Number = TypeVar("Number", int, float)
OWN = "With queries of your own"


def learn(
    index: IndexPath,
    target: Target = None,
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
            rich_help_panel=OWN,
        ),
    ] = None,
    k: Annotated[
        str | None,
        typer.Option(
            metavar="NUMBER",
            help="top-ranked examples taken for true; auto (the default) tries several",
            rich_help_panel=OWN,
        ),
    ] = None,
    weight_decay: Annotated[
        str | None,
        typer.Option(
            metavar="NUMBER",
            help="pull towards the unweighted method; auto (the default) tries several",
            rich_help_panel=OWN,
        ),
    ] = None,
    loss: Annotated[
        str | None,
        typer.Option(help="top-k (the default), bottom-k, top-k-bottom-k or no-norm", rich_help_panel=OWN),
    ] = None,
    solver: Annotated[str | None, typer.Option(help="fixed-point or adamw", rich_help_panel=OWN)] = None,
    hf_model: HFModel = None,
    data: Data = None,
    text_field: TextField = None,
    seq_len: SeqLen = None,
    trust_remote_code: TrustRemoteCode = False,
    query_field: QueryField = None,
    uncalibrated: Uncalibrated = False,
    device: Device = None,
    engine: Engine = "serial",
    threads: Threads = None,
    workers: Workers = None,
) -> None:
    """Learn how much each group of parameters should count, without labels.

    With nothing but an index: training examples are perturbed, and weights are learned with which they find
    themselves; where weights would not help they stay uniform. With --queries: by the paper's objective, from data of
    the same kind that is neither trained on nor evaluated on.

    Examples:

    `unde learn --index runs/idx`

    `unde learn --index runs/idx --method ekfac --examples 100 --out ekfac.json`

    `unde learn --index runs/idx --queries learn.jsonl --out weights.json`

    `unde learn my_project.setup:make --index runs/idx --queries learn --k 10`
    """
    own = {"k": k, "weight-decay": weight_decay, "loss": loss, "solver": solver, "query-field": query_field}
    _check(queries, own, {"examples": examples, "perturb": perturb}, out)
    source = source_of(hf_model, data, text_field, seq_len, trust_remote_code)
    target = target or saved_target(index, source)
    texts = None if queries is None or (target is not None and queries == "learn") else Path(queries)
    project = Project(target, source, index=index, learn=texts, query_field=query_field, device=device)
    if queries is None:
        opened = project.index(
            index, named(engine, threads=threads, workers=workers), uncalibrated=uncalibrated
        )
        weights = opened.learn_weights(method, perturb, 200 if examples is None else examples, seed)
    else:
        asked = project.queries_apart("learn")
        opened = project.index(
            index, named(engine, threads=threads, workers=workers), uncalibrated=uncalibrated
        )
        weights = learn_weights(
            kept_scores(opened, asked, method),
            k=_number("k", k, int, "a whole number"),
            weight_decay=_number("weight-decay", weight_decay, float, "a number"),
            loss=loss or "top-k",
            solver=solver,
            seed=seed,
        )
    weights.save(out)
    if not no_trust:
        _show_trust(opened, weights, method, seed, perturb)
    console.echo(f"{out}: {weights}")


def _check(queries: str | None, own: dict[str, str | None], alone: dict[str, Any], out: StorePath) -> None:
    """Options that belong to the other way of learning, and a place to save that is not there, before hours of work."""
    given = [f"--{name}" for name, value in own.items() if value is not None]
    if queries is None and given:
        raise UndeError(
            f"{', '.join(given)} belong{'s' if len(given) == 1 else ''} to learning from queries of your own: add "
            "--queries FILE (with MODULE:FUNCTION: --queries learn), or leave it out to learn from the index alone"
        )
    given = [f"--{name}" for name, value in alone.items() if value is not None]
    if queries is not None and given:
        raise UndeError(
            f"{', '.join(given)} belong{'s' if len(given) == 1 else ''} to learning from the index alone: leave out "
            "--queries, or this"
        )
    if alone["perturb"] not in (None, "weights"):
        raise unknown("perturb", alone["perturb"], ("weights",))
    if out.is_dir():
        raise UndeError(f"--out {out} is a folder: give a file in it")
    if isinstance(out, Path) and not out.absolute().parent.is_dir():
        raise UndeError(f"no folder {out.parent} for --out {out}: make it, or save elsewhere")


def _number(name: str, text: str | None, kind: Callable[[str], Number], what: str) -> Number | str:
    if text is None or text == "auto":
        return "auto"
    try:
        return kind(text)
    except ValueError:
        raise UndeError(f"--{name} is {text!r}: expected {what}, or auto") from None


def _show_trust(index: Index, weights: Weights, method: str | None, seed: int, perturb: str | None) -> None:
    try:
        console.echo(index.trust(weights, method, seed=seed, perturb=perturb))
    except UndeError as e:  # the weights are there all the same
        console.note(str(e))
