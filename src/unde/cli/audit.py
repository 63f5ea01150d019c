"""`unde audit`: training examples of a classifier whose labels look wrong."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from unde import console
from unde.cli.options import (
    IndexPath,
    MethodOfIndex,
    ModelOptions,
    WeightsFile,
    check_out,
    option,
    path_option,
    place_option,
)

if TYPE_CHECKING:
    from unde.ui.report.labels_page import LabelReview

SUSPECTS = 48  # on a page
_LINES = 12  # on the terminal


def audit(
    index: IndexPath,
    model: ModelOptions,
    out: Annotated[Path, path_option("the page to write", "--out")] = Path("labels.html"),
    csv: Annotated[
        Any, place_option("a table of all examples, the most suspicious first", "--csv", metavar="FILE")
    ] = None,
    parquet: Annotated[Any, place_option("the same as Parquet", "--parquet", metavar="FILE")] = None,
    first: Annotated[int, option("how many suspects the page shows", min=1)] = SUSPECTS,
    weights: WeightsFile = None,
    method: MethodOfIndex = None,
) -> None:
    """Find wrong labels: how many there are likely to be, which ones, and what should stand there instead.

    For classifiers of images, texts, tokens and table rows. A label is suspicious where the model finds it unlikely and
    the most similar training examples carry another one; proponents and opponents are those of the index (--weights and
    --method are for these). In Python: index.audit_labels().

    Examples:

    `unde audit my_project.setup:make --index runs/idx --out labels.html --csv suspects.csv`

    `unde audit --index runs/idx --parquet suspects.parquet --first 100`
    """
    from unde.cli.project import Project, load_weights
    from unde.index.labels import classifier
    from unde.scoring.top import check_format
    from unde.ui.report.labels_page import LabelReview

    for path in (csv, parquet):
        if path is not None:
            check_out(path)
    if parquet is not None:
        check_format("parquet")
    project = Project(model.remembered(index, method), index=index)
    classifier(project.setup.task)  # refused before anything is computed
    opened = project.index(index)
    loaded = None if weights is None else load_weights(weights, opened.groups.names)
    review = LabelReview(opened, project.setup, loaded, first, method)
    name = Path(project.name.partition(":")[0]).name
    page = review.page(f"Which labels of {name} look wrong?")
    _show(review)
    for path, format in ((csv, "csv"), (parquet, "parquet")):
        if path is not None:
            review.audit.table(review.view.classes, suspicious_first=True).save(path, format)
            console.echo(f"{path}: all {len(opened):,} examples with suggestions, the most suspicious first.")
    console.echo(f"Open {page.write(out).resolve()} in a browser; mend what is wrong, train and build again.")


def _show(review: LabelReview) -> None:
    """The first suspects as a table, and how many there are."""
    table, count = review.audit.table(review.view.classes, suspicious_first=True), len(review.audit.issues)
    console.echo(review.audit.summary)
    lines = [
        [
            str(row.get("file", row["id"])),
            str(row["given_label"]),
            f"{row['suggested_label']} ({row['confidence']:.0%})",
            str(row["predicted_label"]),
            f"{row['label_quality']:.2g}",
        ]
        for row, _ in zip(table.rows(), range(min(_LINES, count)))
    ]
    if lines:
        heads = ["file" if "file" in table.columns else "id", "given", "suggested", "predicted", "quality"]
        console.show_table(f"The first {len(lines)} of {count:,}", heads, lines)
        console.echo(review.audit.estimate)
