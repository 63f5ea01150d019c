"""`unde attribute`: the training examples that mattered most, on a terminal or for another program."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from unde import console, methods
from unde.cli.asked import use_samples
from unde.cli.options import (
    HF,
    Data,
    Device,
    Engine,
    HFModel,
    IndexPath,
    MethodOfIndex,
    QueryField,
    SeqLen,
    Target,
    TextField,
    Threads,
    TrustRemoteCode,
    WeightsFile,
    Workers,
    check_format,
    source_of,
)
from unde.cli.project import Project, kept_scores, remembered, weights_in
from unde.data import Rows
from unde.errors import UndeError
from unde.execution import named
from unde.recipe import Setup
from unde.report.panels import as_item
from unde.scores import Top

COLUMNS = ["query", "rank", "id", "index", "score"]


def attribute(
    index: IndexPath,
    target: Target = None,
    query: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="a text to ask about; repeatable", rich_help_panel=HF),
    ] = None,
    queries: Annotated[
        str | None,
        typer.Option(
            help="a file of texts as in --data; with MODULE:FUNCTION: eval (the default), learn, or a folder of saved "
            "samples"
        ),
    ] = None,
    hf_model: HFModel = None,
    data: Data = None,
    text_field: TextField = None,
    seq_len: SeqLen = None,
    trust_remote_code: TrustRemoteCode = False,
    query_field: QueryField = None,
    weights: WeightsFile = None,
    method: MethodOfIndex = None,
    top: Annotated[int, typer.Option(help="how many training examples for each query")] = 5,
    opponents: Annotated[
        bool, typer.Option("--opponents", help="the lowest scores instead of the highest")
    ] = False,
    format: Annotated[str, typer.Option(help="table, json or csv")] = "table",
    device: Device = None,
    engine: Engine = "serial",
    threads: Threads = None,
    workers: Workers = None,
) -> None:
    """Print the training examples that mattered most for each query.

    Examples:

    `unde attribute --index runs/idx --query "The state of the union is strong."`

    `unde attribute my_project.setup:make --index runs/idx --weights weights.json --format csv > top.csv`
    """
    check_format(format, "table", "json", "csv")
    if query and queries:
        raise UndeError("--query and --queries: give one of the two")
    source = source_of(hf_model, data, text_field, seq_len, trust_remote_code)
    target = target or remembered(index, source)
    if target is None and not query and not queries:
        raise UndeError('nothing to attribute: give --query "some text", or --queries FILE.jsonl')
    texts = query or (Path(queries) if queries and target is None else None)
    project = Project(target, source, index=index, evaluate=texts, query_field=query_field, device=device)
    opened = project.index(index, named(engine, threads=threads, workers=workers))
    role = queries if queries and target is not None else "eval"
    if target is not None and role not in ("eval", "learn") and Path(role).expanduser().is_dir():
        use_samples(project, Path(role), methods.on_index(method, opened.method))
        role = "eval"
    # Of texts that were typed nothing is learned and nothing measured: they may be training data.
    asked = project.queries(role) if query else project.queries_apart(role)
    scores = opened.score(asked, method) if query else kept_scores(opened, asked, method)
    learned = None if weights is None else weights_in(weights, scores)
    best = scores.top(top, learned, largest=not opponents)
    if format == "table":
        show_top(project.setup, asked, None if query else project.names(role), best, opponents)
    else:
        _write(best, format)


def _write(best: Top, format: str) -> None:
    """For other programs, on stdout."""
    rows = [
        dict(zip(COLUMNS, (q, rank, name, int(i), float(value))))
        for q, names in enumerate(best.ids)
        for rank, (i, value, name) in enumerate(zip(best.indices[q], best.values[q], names), 1)
    ]
    with console.printing() as out:
        if format == "json":
            json.dump(rows, out, indent=1)
            out.write("\n")
        else:
            writer = csv.DictWriter(out, COLUMNS)
            writer.writeheader()
            writer.writerows({name: console.cell(value) for name, value in row.items()} for row in rows)


def show_top(
    setup: Setup, queries: Rows, names: Sequence[str] | None, best: Top, opponents: bool = False
) -> None:
    """Print the top examples of each query: passages below the query where these are texts, else ids in one table.

    `names` are what the queries are called, if they have names.
    """
    title, top = "opponents" if opponents else "proponents", best.indices.shape[1]
    asked = [as_item(queries[q], q, setup.show) for q in range(len(queries))]
    if any(item.text is None for item in asked):
        rows = [
            [str(q), *(f"{name} ({value:.3g})" for name, value in zip(best.ids[q], best.values[q].tolist()))]
            for q in range(len(queries))
        ]
        console.show_table(title, ["query", *(f"{r + 1}." for r in range(top))], rows)
        return
    train = Rows(setup.train_data)
    for q, item in enumerate(asked):
        found = zip(best.indices[q].tolist(), best.values[q].tolist(), best.ids[q])
        passages = [
            [f"{r}.", f"{value:+.3g}", str(name), _brief(as_item(train[i], name, setup.show).text or "", 300)]
            for r, (i, value, name) in enumerate(found, 1)
        ]
        name = "Query" if names is None else f"Query {escape(names[q])}"
        asks = f"{name}: {escape(_brief(item.text or '', 600))}"
        console.show_table(asks, ["", "score", "id", title], passages)


def _brief(text: str, characters: int) -> str:
    """A text in one line for a terminal, cut between words.

    >>> _brief("to be\\nor  not\\x1b[31m to be", 12)
    'to be or …'
    """
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    if len(line) <= characters:
        return line
    space = line.rfind(" ", 0, characters - 1)
    return f"{line[: space if space > 0 else characters - 2]} …"
