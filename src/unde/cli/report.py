"""`unde report`: one page of what an index says about some queries."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from unde import console
from unde.cli.options import (
    Data,
    Device,
    HFModel,
    IndexPath,
    MethodOfIndex,
    NoBaselines,
    NoTrust,
    QueryField,
    SeqLen,
    Target,
    TextField,
    TrustRemoteCode,
    Uncalibrated,
    WeightsFiles,
    listed,
    path_option,
    source_of,
)
from unde.cli.project import Project, kept_scores, saved_target, weights_in
from unde.cli.queries import asked_about
from unde.data import Rows
from unde.errors import UndeError, unknown
from unde.index import Index
from unde.index.labels import DEFAULT, RANKINGS, classifier
from unde.store.remote import StorePath, place
from unde.ui.report.classes import answers_to, class_names
from unde.ui.report.contributors import checked
from unde.ui.report.index_page import UNWEIGHTED, page_of
from unde.ui.report.labels_page import MANY, SUSPECTS, label_page
from unde.ui.report.page import Page
from unde.weights import Weights

LABELS = "Wrong labels"


def report(
    index: IndexPath,
    target: Target = None,
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
        str, typer.Option(help=f"ranking of --labels: {listed(RANKINGS)}", rich_help_panel=LABELS)
    ] = DEFAULT,
    csv: Annotated[
        Path | None,
        path_option("--csv", metavar="FILE", help="the ranking of --labels of all examples", panel=LABELS),
    ] = None,
    hf_model: HFModel = None,
    data: Data = None,
    text_field: TextField = None,
    seq_len: SeqLen = None,
    trust_remote_code: TrustRemoteCode = False,
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
    no_baselines: NoBaselines = False,
    device: Device = None,
) -> None:
    """Write one self-contained HTML page: queries, their proponents and opponents, the weights, and how far to trust.
    With --labels: the training examples of a classifier whose labels are suspicious.

    Examples:

    `unde report --index runs/idx --queries eval.jsonl --weights weights.json --out report.html`

    `unde report my_project.setup:make --index runs/idx --weights weights.json --query 17`

    `unde report my_project.setup:make --index runs/idx --weights subject=w1.json --weights style=w2.json`

    `unde report my_project.setup:make --index runs/idx --labels --csv suspects.csv`
    """
    _check(labels, query, queries, csv, by)
    source = source_of(hf_model, data, text_field, seq_len, trust_remote_code)
    target = target or saved_target(index, source)
    texts = (queries or query) if target is None else None
    project = Project(target, source, index=index, evaluate=texts, query_field=query_field, device=device)
    files, named = named_files(weights or ()), Path(project.name.partition(":")[0]).name
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
    everything = asked_about(project, opened.method, query, queries, method)
    asked = everything.first(first or (len(query) if query else 12))
    setup = project.setup
    answers = answers_to(setup, asked.rows)  # so that names of classes that do not fit are refused at once
    known = {} if asked.held_out is None else setup.contributors or {}
    if known:
        of = (len(project.queries("eval")), len(Rows(setup.train_data)))
        flags = checked(known, of, "each of the setup's eval_queries and training examples")
        known = {name: some[list(asked.held_out or ())] for name, some in flags.items()}
    scores = opened.score(asked.rows, method) if query else kept_scores(opened, asked.rows, method)
    return page_of(
        opened,
        setup,
        asked.rows,
        scores,
        {name: weights_in(file, scores) for name, file in files.items()},
        title=f"What made {named} do that?",
        count=top,
        names=asked.names,
        contributors=known,
        answers=answers,
        labelled=asked.labelled,
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
    if RANKINGS[by].cost == "pairs" and len(opened) > MANY:
        console.note(
            f"comparing {len(opened):,} training examples with each other, which can take long: "
            f"--by {DEFAULT} needs one pass of the model"
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
    if not labels and (csv is not None or by != DEFAULT):
        raise UndeError(f"--{'csv' if csv is not None else 'by'} goes with --labels: add it, or leave it out")


def named_files(given: Sequence[str]) -> dict[str, StorePath]:
    """Files of weights by name: one path is "weighted", several are NAME=FILE each.

    >>> named_files(["subject=w1.json", "style=w2.json"])["style"].name
    'w2.json'
    """
    files: dict[str, StorePath] = {}
    for text in given:
        name, equals, file = text.partition("=")
        # A path may hold the sign too, as in runs/lr=0.1/w.json.
        if not equals or os.sep in name or os.path.exists(text):
            if len(given) > 1:
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
