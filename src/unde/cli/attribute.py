"""`unde attribute`: the training examples that mattered most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Annotated, Any

from rich.markup import escape

from unde import console
from unde.cli.options import (
    IndexPath,
    MethodOfIndex,
    ModelOptions,
    QueryField,
    QueryList,
    QuerySet,
    Span,
    Uncalibrated,
    WeightsFile,
    WorkerOptions,
    check_format,
    check_out,
    option,
    place_option,
)
from unde.errors import UndeError
from unde.store.remote import StorePath, exists

if TYPE_CHECKING:
    from unde.cli.project import Project
    from unde.data import Rows
    from unde.evaluate.sources import SourceShares
    from unde.scoring import ExactScores, GroupScores, Pieces, Top
    from unde.setup import Setup


TABLE = "table"
_SOURCES = 12  # on the terminal
_exact_option = partial(option, panel="Without an index")


@dataclass(frozen=True)
class ExactOptions:
    """Scores by whole gradients, without an index."""

    exact: Annotated[
        bool, _exact_option("read the training data once instead of an index, and write none", "--exact")
    ] = False
    groups: Annotated[
        str | None, _exact_option("parameters that share a weight, as in `unde build` (default: layer)")
    ] = None
    exclude: Annotated[list[str] | None, _exact_option("regex of parameters to leave out; repeatable")] = None
    batch_size: Annotated[
        int | None, _exact_option("examples in one pass (default: as many as fit --memory)", min=1)
    ] = None
    memory: Annotated[
        str | None, _exact_option("memory for computations, besides the model (default: 2GB)")
    ] = None
    cg: Annotated[
        int | None,
        _exact_option(
            "steps of conjugate gradients after EKFAC, for a few queries: each is a pass for each query"
        ),
    ] = None
    query_rank: Annotated[
        int | None, _exact_option("outer products held of each matrix of a query (default: whole queries)")
    ] = None

    @property
    def arguments(self) -> dict[str, Any]:
        """What was set, as arguments of `unde.attribute`."""
        return {k: v for k, v in vars(self).items() if v not in (None, []) and k != "exact"}

    def check(self, index: Any, uncalibrated: bool) -> None:
        """Raise for options that go with an index where there is none, and the other way."""
        if not self.exact:
            if index is None:
                raise UndeError(
                    "give --index DIR, the index to ask; or --exact, which needs none and reads all training data"
                )
            named = [f.name for f in fields(self) if getattr(self, f.name)]
            if named:
                raise UndeError(
                    f"--{named[0].replace('_', '-')} goes with --exact: the index was built with its own"
                )
        elif index is not None or uncalibrated:
            other = "--index" if index is not None else "--uncalibrated"
            raise UndeError(f"--exact and {other}: exact scores come from no index, give one of the two")


def attribute(
    model: ModelOptions,
    worker: WorkerOptions,
    whole_gradients: ExactOptions,
    index: IndexPath = None,
    query: QueryList = None,
    queries: QuerySet = None,
    query_field: QueryField = None,
    span: Span = None,
    weights: WeightsFile = None,
    method: MethodOfIndex = None,
    top: Annotated[int, option("how many training examples for each query")] = 5,
    opponents: Annotated[bool, option("the lowest scores instead of the highest", "--opponents")] = False,
    by: Annotated[
        str,
        option(
            "what is ranked: example; document (ids document:piece), label, or a column of the training data, such as "
            "author: scores added up"
        ),
    ] = "example",
    format: Annotated[
        str | None, option("table, csv, json, jsonl or parquet (default: table, or as --out ends)")
    ] = None,
    out: Annotated[Any, place_option("file to write, .csv, .json, .jsonl or .parquet", "--out")] = None,
    overwrite: Annotated[bool, option("replace --out if it is there", "--overwrite")] = False,
    uncalibrated: Uncalibrated = False,
) -> None:
    """Print the training examples that mattered most for each query, or write them to a file.

    A query that is cut into sequences is one query: the scores of its pieces are added up. With --exact there is no
    index: scores come from whole gradients, in one pass over the training data.

    Examples:

    `unde attribute --index runs/idx --query "The state of the union is strong."`

    `unde attribute --index runs/idx --queries eval.jsonl --by document --out top.parquet`

    `unde attribute my_project.setup:make --index runs/idx --by label`

    `unde attribute my_project.setup:make --index runs/idx --weights weights.json --format csv > top.csv`

    `unde attribute my_project.setup:make --exact --method ekfac`

    `unde attribute my_project.setup:make --exact --cg 20`
    """
    from unde import methods
    from unde.cli.project import Project, cached_scores, load_weights, select_queries
    from unde.evaluate.sources import source_shares
    from unde.scoring import GroupScores
    from unde.scoring.data_splits import describe_trained
    from unde.scoring.documents import name_pieces
    from unde.tasks import Classification

    format = _check_output(format, out, overwrite)
    whole_gradients.check(index, uncalibrated)
    model = model if index is None else model.remembered(index, method)
    if model.target is None and not query and not queries:
        raise UndeError('nothing to attribute: give --query "some text", or --queries FILE.jsonl')
    texts = (queries or query) if model.target is None else None
    project = Project(model, index=index, evaluate=texts, query_field=query_field, span=span)
    opened = None if index is None else project.index(index, worker.executor(), uncalibrated=uncalibrated)
    ids = getattr(project.setup.train_data, "ids", project.setup.ids) if opened is None else opened.ids
    named = None if by == "example" else project.sources(by, ids)  # refused before anything is computed
    built = methods.parse(method or "ekfac") if opened is None else opened.method
    selection = select_queries(project, built, method, query or [], queries)
    rows = selection.rows  # nothing is learned or measured: they may be training data
    scores: GroupScores | ExactScores
    if opened is None:
        scores = _exact_scores(project, rows, method, whole_gradients, worker)
    else:
        scores = opened.score(rows, method) if query else cached_scores(opened, rows, method)
    whole = None if named is None else name_pieces(named, scores.shape[1], "training examples")
    top = top if whole is None else min(top, len(whole))
    learned = None if weights is None else load_weights(weights, scores.groups, scores.query_digests)
    wholes = whole_queries(rows, selection.names)
    best = scores.top(top, learned, largest=not opponents, by=whole, queries=wholes)
    lists = best if whole is None and not opponents else None
    if opened is None:
        assert not isinstance(scores, GroupScores)
        said = scores.diagnose(lists, wholes)
    else:
        assert isinstance(scores, GroupScores)
        said = opened.diagnose(scores, learned, top=lists, queries=wholes)
    for sentence in said:
        console.note(sentence)
    inside = describe_trained(scores.trained_on(), wholes)
    if inside:
        console.note(inside)
    if not selection.labelled and isinstance(project.setup.task, Classification):
        console.note("labels of these queries are the predictions of the model")
    if by in ("example", "document"):
        best = with_texts(best, project.setup, rows, wholes, whole)
    _give(best, format, out, by, opponents, named=not query or selection.held_out is not None)
    if whole is not None and format == TABLE:
        _show_sources(source_shares(scores, whole, learned, queries=wholes), by)


def _show_sources(shares: SourceShares, by: str) -> None:
    """Print the sources with the largest shares of the influence on all queries."""
    from unde.evaluate.sources import describe_sources

    lines = describe_sources(shares)
    title = f"influence by {by}" + (
        f", the first {_SOURCES} of {len(lines):,}" if len(lines) > _SOURCES else ""
    )
    console.show_table(title, [by, "share of influence", "of examples", "total"], lines[:_SOURCES])


def _exact_scores(
    project: Project, rows: Rows, method: str | None, options: ExactOptions, worker: WorkerOptions
) -> ExactScores:
    """Scores by whole gradients, of the training data of the project."""
    from unde import methods
    from unde.index.exact import AUTO, attribute
    from unde.methods import TracIn

    setup = project.setup
    by_rates = project.rates and method is not None and isinstance(methods.parse(method), TracIn)
    return attribute(
        setup.model,
        setup.task,
        setup.train_data,
        rows,
        method or AUTO,
        ids=setup.ids,
        checkpoint_weights=project.rates if by_rates else project.shares,
        executor=worker.executor(),
        threads=worker.threads,
        **project.arguments,
        **options.arguments,
    )


def _give(best: Top, format: str, out: StorePath | None, by: str, opponents: bool, named: bool) -> None:
    """Print the top examples, or write them."""
    if format == TABLE:
        show_top(best, opponents, named=named)
    elif out is None:
        with console.printing() as stdout:
            stdout.writelines(best.table().text(format))
    else:
        best.table().save(out, format)
        console.echo(f"{out}: {len(best):,} queries, {best.indices.shape[1]} {by}s each")


def _check_output(format: str | None, out: StorePath | None, overwrite: bool) -> str:
    """Return the format of the output, after checking that it can be written: before a large model is loaded."""
    from unde.scoring.top import FORMATS, format_of
    from unde.scoring.top import check_format as check_library

    if format is not None:
        check_format(format, TABLE, *FORMATS)
    if out is None:
        if format == "parquet":
            raise UndeError("parquet is no text for a terminal: say where it goes, --out top.parquet")
        if overwrite:
            raise UndeError("--overwrite without --out: there is no file to replace")
        return format or TABLE
    if format == TABLE:
        raise UndeError(
            f"--format table is for a terminal: leave it out, or write {' or '.join(FORMATS)} to {out}"
        )
    check_out(out)
    if exists(out, links=True) and not overwrite:
        raise UndeError(f"--out {out} is there already: --overwrite replaces it")
    format = format or format_of(out)
    check_library(format)
    return format


def whole_queries(rows: Rows, names: Sequence[Any] | None = None) -> Pieces:
    """Group the queries: sequences of one text, whose ids are record:part, are one query."""
    import torch

    from unde.integrations.documents import TextSequences
    from unde.scoring import Pieces, documents

    ids = getattr(rows.data, "ids", None) or names or range(len(rows))
    texts = isinstance(rows.data, TextSequences)
    return documents(ids) if texts else Pieces(torch.arange(len(rows)), list(ids))


def with_texts(best: Top, setup: Setup, rows: Rows, queries: Pieces, by: Pieces | None) -> Top:
    """Add the texts of queries and training examples, where they are texts."""
    from unde.data import Rows

    train = Rows(setup.train_data)
    query_texts = [_text(setup, rows, queries.rows(q)) for q in range(len(queries))]
    if all(text is None for text in query_texts) and _text(setup, train, [0]) is None:
        return best

    @cache
    def text(i: int) -> str | None:
        return _text(setup, train, [i] if by is None else by.rows(i))

    texts = [[text(i) for i in row] for row in best.indices.tolist()]
    return replace(best, query_texts=query_texts, texts=texts)


def _text(setup: Setup, rows: Rows, pieces: list[int]) -> str | None:
    """The text of some rows, in one."""
    import torch

    from unde.integrations.documents import TextSequences

    examples = [rows[i] for i in pieces]
    if len(examples) > 1 and isinstance(rows.data, TextSequences):  # tokens may share a character
        keys = [k for k, v in examples[0].items() if isinstance(v, torch.Tensor) and v.ndim == 1]
        examples = [{k: torch.cat([e[k] for e in examples]) for k in keys}]
    known = [text for text in map(setup.text, examples) if text is not None]
    return "\n".join(known) if known else None


def show_top(best: Top, opponents: bool = False, named: bool = True) -> None:
    """Print the top examples of each query: passages below the query where these are texts, else ids in one table."""
    title, top = "opponents" if opponents else "proponents", best.indices.shape[1]
    names = [str(i) for i in (range(len(best)) if best.query_ids is None else best.query_ids)]
    if best.texts is None or best.query_texts is None or None in best.query_texts:
        rows = [
            [name, *(f"{i} ({value:.3g})" for i, value in zip(best.ids[q], best.values[q].tolist()))]
            for q, name in enumerate(names)
        ]
        console.show_table(title, ["query", *(f"{r + 1}." for r in range(top))], rows)
        return
    for q, text in enumerate(best.query_texts):
        ranked = zip(best.values[q].tolist(), best.ids[q], best.texts[q])
        passages = [
            [f"{r}.", f"{value:+.3g}", str(name), _brief(passage or "", 300)]
            for r, (value, name, passage) in enumerate(ranked, 1)
        ]
        name = f"Query {escape(names[q])}" if named else "Query"
        console.show_table(f"{name}: {escape(_brief(text or '', 600))}", ["", "score", "id", title], passages)


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
