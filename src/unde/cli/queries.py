"""Queries of a command line: held-out ones, some of them by number, texts, image files, or saved samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from unde import console, methods
from unde.cli.project import Project
from unde.data import Rows
from unde.diffusion import Samples
from unde.errors import UndeError
from unde.integrations.diffusers import query_columns
from unde.integrations.pictures import ImageFormat, decode_picture, with_label
from unde.methods import JourneyTRAK, Method
from unde.tasks import Classification, Diffusion
from unde.ui.report.example_view import label_predictions


@dataclass(frozen=True)
class QuerySelection:
    """Queries, their names, and their positions among the setup's eval_queries, if they are some of them."""

    rows: Rows
    names: Sequence[int | str] | None = None
    held_out: Sequence[int] | None = None
    labelled: bool = True  # false: labels are predictions, the true ones are unknown

    def first(self, count: int) -> QuerySelection:
        """The first of them."""
        return self.some(range(min(count, len(self.rows))))

    def some(self, which: Sequence[int]) -> QuerySelection:
        rows = Rows([self.rows[q] for q in which], self.rows.collate)
        names = [q if self.names is None else self.names[q] for q in which]
        held_out = None if self.held_out is None else [self.held_out[q] for q in which]
        return QuerySelection(rows, names, held_out, self.labelled)


def select_queries(
    project: Project, built: Method, query: Sequence[str], queries: Path | None, method: str | None
) -> QuerySelection:
    """Select what `--query` and `--queries` name, or the eval_queries of the setup.

    `built` is the method of the index and `method` another to score with: Journey-TRAK wants trajectories.
    """
    if project.source is not None:
        typed = bool(query) and queries is None
        selection = QuerySelection(
            project.queries("eval") if typed else project.disjoint_queries("eval"), project.names("eval")
        )
        if typed:
            return QuerySelection(
                selection.rows, ["your text"] if len(selection.rows) == 1 else selection.names
            )
    elif queries is not None:
        use_samples(project, queries, methods.on_index(method, built))
        selection = QuerySelection(project.disjoint_queries("eval"))
    elif query and not _positions(query):
        return _from_text(project, query)
    else:
        rows = project.disjoint_queries("eval")
        selection = QuerySelection(rows, held_out=range(len(rows)))
    return selection.some(_positions_in(query, len(selection.rows))) if query else selection


def use_samples(project: Project, folder: Path, method: Method) -> None:
    """Make saved samples the eval_queries of the project, a diffusion model's."""
    if not isinstance(project.setup.task, Diffusion):
        raise UndeError(
            f"--queries {folder}: {project.name} brings its own queries, eval_queries. A folder of samples is for "
            "diffusion models, and a file of texts goes with --hf-model"
        )
    columns = query_columns(Samples.load(folder), isinstance(method, JourneyTRAK))
    project.setup = replace(project.setup, eval_queries=columns, contributors=None)


def _positions(query: Sequence[str]) -> bool:
    return all(text.isascii() and text.isdigit() for text in query)


def _positions_in(query: Sequence[str], count: int) -> list[int]:
    if not _positions(query):
        raise UndeError(f"--query {query[0]!r} with --queries: expected a number, which of them")
    which = [int(text) for text in query]
    beyond = next((n for n in which if n >= count), None)
    if beyond is not None:
        raise UndeError(f"--query {beyond}: there are {count} queries, numbered from 0 to {count - 1}")
    return which


def _from_text(project: Project, query: Sequence[str]) -> QuerySelection:
    """Read texts and image files as the setup does. Labels of images are unknown: they are the model's predictions."""
    setup = project.setup
    train = setup.rows(setup.train_data)
    files = [Path(text).expanduser() for text in query]
    pictured = [path.is_file() for path in files]
    if not all(pictured) and (setup.ask.text is None or any(pictured)):
        raise UndeError(
            f"--query {query[pictured.index(False)]!r} is no file: expected the file of an image, or a number, which "
            f"of the eval_queries of {project.name} to show. Texts go with --hf-model, or Setup(ask=Ask(text=...))"
        )
    if setup.ask.text is not None and not any(pictured):
        examples = [row for text in query for row in _rows(setup.ask.text(text))]
        one_each = len(examples) == len(query)
        names = ["your text"] if len(examples) == 1 else list(query) if one_each else None
        return QuerySelection(Rows(examples, train.collate), names, labelled=False)
    alike = None if setup.ask.picture is not None else ImageFormat.of(train)
    examples = [_read_image(project, text, path, alike) for text, path in zip(query, files)]
    rows = Rows(examples, train.collate)
    predictions = label_predictions(setup, rows) if setup.ask.picture is None else None
    if predictions is not None:
        rows = Rows(
            [with_label(e, int(y)) for e, y in zip(examples, predictions.predicted, strict=True)],
            train.collate,
        )
    return QuerySelection(rows, [path.name for path in files], labelled=False)


def _read_image(project: Project, text: str, path: Path, alike: ImageFormat | None) -> Any:
    """Read the image in a file as one example."""
    setup = project.setup
    try:
        image = decode_picture(path.read_bytes())
        if setup.ask.picture is not None:
            return _rows(setup.ask.picture(image, ""))[0]
        if alike is None:
            raise UndeError(
                "training examples are not images (and a label), so it is not known how to read one. Put the image "
                "into the eval_queries of the setup, and ask by its number, or give Setup(ask=Ask(picture=...))"
            )
        example, notes = alike.fit(image)
    except UndeError as e:
        raise UndeError(f"--query {text}: {e}") from None
    for note in notes:
        console.note(f"{text}: {note}")
    return with_label(example, 0) if isinstance(setup.task, Classification) else example


def _rows(data: Any) -> list[Any]:
    rows = Rows(data)
    return [rows[i] for i in range(len(rows))]
