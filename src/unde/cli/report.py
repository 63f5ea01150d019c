"""`unde report`: one page of what an index says about some queries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from unde import console
from unde.cli.options import (
    UNWEIGHTED,
    IndexPath,
    MethodOfIndex,
    ModelOptions,
    NoTrust,
    QueryField,
    Uncalibrated,
    WeightsFiles,
    join_names,
    path_option,
    weight_paths,
)
from unde.errors import UndeError, unknown
from unde.store.remote import StorePath

if TYPE_CHECKING:
    from unde.cli.project import Project
    from unde.index import Index
    from unde.ui.report.page import Page

LABELS = "Wrong labels"
# A copy of the keys of unde.index.labels.RANKINGS, the default first; a test compares them.
RANKINGS = ("adjusted-loss", "loss", "margin", "self-influence", "normalised", "opposition")
SUSPECTS = 48  # on a page


def report(
    index: IndexPath,
    model: ModelOptions,
    query: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT|NUMBER|IMAGE",
            help="just this query: a text, a number of the held-out queries from 0 on, or the file of an image; "
            "repeatable",
        ),
    ] = None,
    queries: Annotated[
        Path | None,
        path_option(
            "--queries", metavar="PATH", help="texts to ask about, as in --data; a folder of saved samples"
        ),
    ] = None,
    labels: Annotated[
        bool, typer.Option("--labels", help="look for wrong labels among the training examples instead")
    ] = False,
    by: Annotated[
        str, typer.Option(help=f"ranking of --labels: {join_names(RANKINGS)}", rich_help_panel=LABELS)
    ] = RANKINGS[0],
    csv: Annotated[
        Path | None,
        path_option("--csv", metavar="FILE", help="the ranking of --labels of all examples", panel=LABELS),
    ] = None,
    query_field: QueryField = None,
    out: Annotated[Path, path_option("--out", help="the page to write")] = Path("report.html"),
    weights: WeightsFiles = None,
    method: MethodOfIndex = None,
    first: Annotated[
        int | None,
        typer.Option(min=1, help=f"how many queries to show (default: 12), or suspects ({SUSPECTS})"),
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="training examples on each side")] = 5,
    no_trust: NoTrust = False,
    uncalibrated: Uncalibrated = False,
    no_baselines: Annotated[
        bool,
        typer.Option(
            "--no-baselines",
            help="leave out BM25 and hidden-state similarity (a pass of the model over the training texts)",
        ),
    ] = False,
) -> None:
    """Write one self-contained HTML page: queries, their proponents and opponents, the weights, and how far to trust.
    With --labels: the training examples of a classifier whose labels are suspicious.

    Examples:

    `unde report --index runs/idx --queries eval.jsonl --weights weights.json --out report.html`

    `unde report my_project.setup:make --index runs/idx --weights weights.json --query 17`

    `unde report my_project.setup:make --index runs/idx --weights subject=w1.json --weights style=w2.json`

    `unde report my_project.setup:make --index runs/idx --labels --csv suspects.csv`
    """
    from unde.cli.project import Project
    from unde.index.labels import classifier

    _check(labels, query, queries, csv, by)
    model = model.remembered(index)
    texts = (queries or query) if model.target is None else None
    project = Project(model, index=index, evaluate=texts, query_field=query_field)
    files, named = weight_paths(weights or ()), Path(project.name.partition(":")[0]).name
    if labels:
        classifier(project.setup.task)  # refused before anything is computed
    opened = project.index(index, uncalibrated=uncalibrated)
    if labels:
        page = _labels(project, opened, files, named, by, csv, first or SUSPECTS, method)
    else:
        parts = {"trust": not no_trust and not query, "baselines": not no_baselines}
        page = _queries(project, opened, files, named, query or [], queries, first, top, method, parts)
    console.echo(f"Open {page.write(out).resolve()} in a browser.")


def _queries(
    project: Project,
    opened: Index,
    files: Mapping[str, StorePath],
    named: str,
    query: Sequence[str],
    queries: Path | None,
    first: int | None,
    top: int,
    method: str | None,
    parts: Mapping[str, bool],
) -> Page:
    from unde.cli.project import cached_scores, load_weights
    from unde.cli.queries import select_queries
    from unde.data import Rows
    from unde.ui.report.example_view import label_predictions
    from unde.ui.report.index_page import page_of
    from unde.ui.report.items import contributor_flags

    everything = select_queries(project, opened.method, query, queries, method)
    selection = everything.first(first or (len(query) if query else 12))
    setup = project.setup
    answers = label_predictions(
        setup, selection.rows
    )  # so that names of classes that do not fit are refused at once
    known = {} if selection.held_out is None else setup.contributors or {}
    if known:
        of = (len(project.queries("eval")), len(Rows(setup.train_data)))
        flags = contributor_flags(known, of, "each of the setup's eval_queries and training examples")
        known = {name: some[list(selection.held_out or ())] for name, some in flags.items()}
    rows = selection.rows
    scores = opened.score(rows, method) if query else cached_scores(opened, rows, method)
    return page_of(
        opened,
        setup,
        rows,
        scores,
        {name: load_weights(file, scores) for name, file in files.items()},
        title=f"What made {named} do that?",
        count=top,
        names=selection.names,
        contributors=known,
        answers=answers,
        labelled=selection.labelled,
        **parts,
    )


def _labels(
    project: Project,
    opened: Index,
    files: Mapping[str, StorePath],
    named: str,
    by: str,
    csv: Path | None,
    first: int,
    method: str | None,
) -> Page:
    from unde.index import labels
    from unde.ui.report.example_view import class_names
    from unde.ui.report.labels_page import MANY, label_page
    from unde.weights import Weights

    if labels.RANKINGS[by].cost == "pairs" and len(opened) > MANY:
        console.note(
            f"comparing {len(opened):,} training examples with each other, which can take long: "
            f"--by {RANKINGS[0]} needs one pass of the model"
        )
    ways = {UNWEIGHTED: None, **{name: Weights.load(file) for name, file in files.items()}}
    page, rankings = label_page(
        opened,
        project.setup,
        ways,
        title=f"Which labels of {named} look wrong?",
        by=by,
        count=first,
        method=method,
    )
    if csv is not None:
        suspects = rankings[by]
        suspects.to_csv(csv, class_names(project.setup, suspects.classes), rankings)
        console.note(f"{len(suspects.order):,} examples, the most suspicious first, are in {csv}")
    return page


def _check(
    labels: bool, query: Sequence[str] | None, queries: Path | None, csv: Path | None, by: str
) -> None:
    if by not in RANKINGS:
        raise unknown("ranking of --labels", by, RANKINGS)
    if labels and (query or queries):
        raise UndeError(
            "--labels looks at training examples: leave out --query and --queries, or --labels to ask about these"
        )
    if not labels and (csv is not None or by != RANKINGS[0]):
        raise UndeError(f"--{'csv' if csv is not None else 'by'} goes with --labels: add it, or leave it out")
