"""`unde report`, `serve` and `demo`: pages of what an index says."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from unde import console
from unde.cli.options import (
    IndexPath,
    MethodName,
    MethodOfIndex,
    ModelOptions,
    Queries,
    QueryField,
    QueryList,
    QuerySet,
    Span,
    Uncalibrated,
    WeightsFiles,
    option,
    path_option,
)
from unde.errors import UndeError
from unde.integrations import require
from unde.store.remote import StorePath, place

if TYPE_CHECKING:
    from unde.cli.project import Project


UNWEIGHTED = "unweighted"  # the name of scores without weights


def report(
    index: IndexPath,
    model: ModelOptions,
    query: QueryList = None,
    queries: QuerySet = None,
    labels: Annotated[bool, typer.Option("--labels", hidden=True)] = False,
    query_field: QueryField = None,
    span: Span = None,
    out: Annotated[Path, path_option("the page to write", "--out")] = Path("report.html"),
    weights: WeightsFiles = None,
    method: MethodOfIndex = None,
    first: Annotated[int | None, option("how many queries to show (default: 12)", min=1)] = None,
    top: Annotated[int, option("training examples on each side", min=1)] = 5,
    by: Annotated[
        str | None, option("add influence by source: document, label, or a column of the training data")
    ] = None,
    uncalibrated: Uncalibrated = False,
    no_baselines: Annotated[
        bool,
        option(
            "leave out BM25 and hidden-state similarity (a pass of the model over the training texts)",
            "--no-baselines",
        ),
    ] = False,
) -> None:
    """Write one self-contained HTML page: queries, their proponents and opponents, and the weights.

    Examples:

    `unde report --index runs/idx --queries eval.jsonl --weights weights.json --out report.html`

    `unde report my_project.setup:make --index runs/idx --weights weights.json --query 17`

    `unde report my_project.setup:make --index runs/idx --weights subject=w1.json --weights style=w2.json`
    """
    from unde.cli.project import Project, cached_scores, load_weights, select_queries
    from unde.data import Rows
    from unde.evaluate.sources import source_shares
    from unde.ui.report.example_view import label_predictions
    from unde.ui.report.items import contributor_flags
    from unde.ui.report.panels import page_of
    from unde.ui.report.tables import SourcesPanel

    if labels:
        raise UndeError(f"wrong labels are found by a command of their own: unde audit --index {index}")
    model = model.remembered(index, method)
    texts = (queries or query) if model.target is None else None
    project = Project(model, index=index, evaluate=texts, query_field=query_field, span=span)
    files, setup = weight_paths(weights or ()), project.setup
    opened = project.index(index, uncalibrated=uncalibrated)
    sources = None if by is None else project.sources(by, opened.ids)
    asked = query or []
    everything = select_queries(project, opened.method, method, asked, queries)
    selection = everything.first(first or len(asked) or 12)
    rows = selection.rows
    answers = label_predictions(setup, rows)  # refuses names of classes that do not fit, at once
    known = {} if selection.held_out is None else setup.contributors or {}
    if known:
        of = (len(project.queries("eval")), len(Rows(setup.train_data)))
        flags = contributor_flags(known, of, "each of the setup's eval_queries and training examples")
        known = {name: some[list(selection.held_out or ())] for name, some in flags.items()}
    scores = opened.score(rows, method) if query else cached_scores(opened, rows, method)
    loaded = {name: load_weights(file, scores.groups, scores.query_digests) for name, file in files.items()}
    page = page_of(
        opened,
        setup,
        rows,
        scores,
        loaded,
        title=_title(project),
        count=top,
        names=selection.names,
        contributors=known,
        answers=answers,
        labelled=selection.labelled,
        baselines=not no_baselines,
    )
    if by is not None and sources is not None:
        last = next(reversed(loaded.values()), None)
        page = replace(page, sources=SourcesPanel(by, source_shares(scores, sources, last), len(scores)))
    console.echo(f"Open {page.write(out).resolve()} in a browser.")


def _title(project: Project) -> str:
    return f"What made {Path(project.name.partition(':')[0]).name} do that?"


def serve(
    index: IndexPath,
    model: ModelOptions,
    queries: Queries = None,
    query_field: QueryField = None,
    weights: WeightsFiles = None,
    host: Annotated[
        str, option("the address to listen at; another than this is open to others")
    ] = "127.0.0.1",
    port: Annotated[int, option("0: any that is free")] = 8765,
    open: Annotated[bool, option("open the page in a browser", "--open")] = False,
    uncalibrated: Uncalibrated = False,
    by: Annotated[
        str | None, option("add influence by source: document, label, or a column of the training data")
    ] = None,
) -> None:
    """Open a live page on an index: type, drop or choose a query, move weights, filter, mark examples.

    Examples:

    `unde serve --index runs/idx --weights weights.json --open`

    `unde serve my_project.setup:make --index runs/idx --by label`
    """
    for library in ("starlette", "uvicorn", "PIL"):
        require(library, "unde[serve]")
    from unde.cli.project import Project, load_weights
    from unde.ui.explorer.app import open_socket
    from unde.ui.explorer.app import serve as run
    from unde.ui.explorer.session import Session

    with closing(open_socket(host, port)) as listening:
        project = Project(model.remembered(index), index=index, evaluate=queries, query_field=query_field)
        files = weight_paths(weights or ())
        names = {"eval": project.names("eval")} if project.setup.eval_queries is not None else {}
        with project.index(index, uncalibrated=uncalibrated) as opened:
            weight_sets = {name: load_weights(file, opened.groups.names) for name, file in files.items()}
            sources = None if by is None else (by, project.sources(by, opened.ids))
            known, title = {k: v for k, v in names.items() if v}, _title(project)
            session = Session(opened, project.setup, weight_sets, title=title, names=known, sources=sources)
            with suppress(KeyboardInterrupt):  # how one ends it
                run(session, listening, host, open)
            console.note("the page is closed")


def demo(
    out: Annotated[Path, path_option("folder for the page, the index and the weights")] = Path("demo"),
    method: MethodName = "tracin",
    seed: Annotated[int, option("seed of the data and the training")] = 0,
) -> None:
    """Fine-tune a small model on real digits, calibrate, and see which digits mattered, in a page.

    Example: `unde demo --out demo` writes demo/report.html
    """
    from unde.ui.demo.run import run

    console.echo(f"Open {run(out, method, seed).resolve()} in a browser.")


def weight_paths(texts: Sequence[str]) -> dict[str, StorePath]:
    """Parse files of weights by name: one path is "weighted", several are NAME=FILE each.

    >>> weight_paths(["subject=w1.json", "style=w2.json"])["style"].name
    'w2.json'
    """
    files: dict[str, StorePath] = {}
    for text in texts:
        name, equals, file = text.partition("=")
        # A path may hold the sign too, as in runs/lr=0.1/w.json.
        if not equals or os.sep in name or os.path.exists(text):
            if len(texts) > 1:
                raise UndeError(
                    f"--weights {text} has no name: with several, name each, as in --weights subject={text}"
                )
            name, file = "weighted", text
        if not name or not file:
            raise UndeError(f"cannot read --weights {text}: expected FILE or NAME=FILE, such as style=w.json")
        if name in files:
            raise UndeError(f"--weights {name}=… is given twice: give each set a name of its own")
        if name == UNWEIGHTED:
            raise UndeError(
                f"--weights {text}: {UNWEIGHTED!r} names the scores without weights, choose another"
            )
        files[name] = place(file)
    return files
