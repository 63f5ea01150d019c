"""`unde leaks`: queries that are in the training data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from unde import console
from unde.cli.options import (
    IndexPath,
    MethodOfIndex,
    ModelOptions,
    QueryField,
    check_out,
    option,
    path_option,
    place_option,
)

_LINES = 12  # on the terminal
_WORDS = 12  # a copy of unde.evaluate.overlap.SPAN_WORDS, which imports torch


def leaks(
    index: IndexPath,
    model: ModelOptions,
    queries: Annotated[
        Path | None,
        path_option(
            "texts to look for, as in --data (default: eval_queries)",
            "--queries",
            metavar="FILE",
        ),
    ] = None,
    query_field: QueryField = None,
    words: Annotated[int, option("the shortest verbatim run that counts, in words", min=5)] = _WORDS,
    out: Annotated[Path, path_option("the page to write", "--out")] = Path("leaks.html"),
    csv: Annotated[Any, place_option("a table of all overlaps", "--csv", metavar="FILE")] = None,
    first: Annotated[int, option("how many queries the page shows", min=1)] = 24,
    method: MethodOfIndex = None,
) -> None:
    """Find test data in the training data: exact and near duplicates and verbatim runs, beside influence.

    Texts are compared by their words, images by their hidden states and pixels. Each overlap comes with the rank of the
    training example by influence.

    Examples:

    `unde leaks --index runs/idx --queries test.jsonl --out leaks.html --csv leaks.csv`

    `unde leaks my_project.setup:make --index runs/idx`
    """
    from unde.cli.project import Project, cached_scores
    from unde.evaluate.overlap import find_overlaps
    from unde.ui.report.leaks_page import LeakReview

    if csv is not None:
        check_out(csv)
    model = model.remembered(index)
    project = Project(model, index=index, evaluate=queries, query_field=query_field)
    rows = project.queries("eval")
    opened = project.index(index)
    overlaps = find_overlaps(project.setup, rows, span_words=words)
    scores = cached_scores(opened, rows, method)
    names = project.names("eval") or range(len(rows))
    review = LeakReview(opened, project.setup, rows, scores, overlaps, names)
    console.echo(review.summary)
    heads, lines = review.lines(_LINES)
    if lines:
        console.show_table(f"The first {len(lines)} of {len(overlaps):,} overlaps", heads, lines)
    if csv is not None:
        review.table.save(csv, "csv")
        console.echo(f"{csv}: all {len(overlaps):,} overlaps.")
    name = Path(project.name.partition(":")[0]).name
    page = review.page(f"Which queries did {name} train on?", first)
    console.echo(f"Open {page.write(out).resolve()} in a browser.")
    if overlaps:
        console.echo(
            "Leave these queries out of the evaluation, or their training examples out of the training (unde remove "
            "--ids) and train again."
        )
