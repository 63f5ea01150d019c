"""The source of each training example: a column of the data, its label, or the document it is a part of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from unde.errors import UndeError, unknown
from unde.integrations.documents import columns_of, read_records
from unde.scoring.documents import Names, documents
from unde.setup import Setup
from unde.tasks import Classification

DOCUMENT, LABEL = "document", "label"


def source_names(
    setup: Setup, column: str, ids: Sequence[Any] | None = None, file: str | None = None
) -> Names:
    """The source of each training example by the name of a column.

    Args:
        setup: The setup.
        column: "document": what ids document:part are parts of. "label": the class of a classifier. Else a column of
            the training data, or a field of its records.
        ids: Ids of the training examples.
        file: The file of texts that the training data were read from.

    Raises:
        UndeError: There is no such column; the message lists those that there are.

    >>> import torch
    >>> from unde.tasks import Task
    >>> setup = Setup(torch.nn.Linear(1, 1), Task(), [{"author": "ann"}, {"author": "bob"}])
    >>> source_names(setup, "author")
    ['ann', 'bob']
    """
    rows = setup.rows(setup.train_data)
    if column == DOCUMENT:
        return documents(ids or range(len(rows)))
    data: Any = rows.data
    columns = list(data) if isinstance(data, Mapping) else list(getattr(data, "column_names", None) or ())
    if column in columns:
        return [_plain(value, column) for value in data[column]]
    if file is not None:
        columns = columns_of(file)
        if column in columns:
            return _of_records(file, column, ids or ())
    first = None if columns else rows[0]
    if isinstance(first, Mapping):
        columns = list(first)
        if column in first:
            return [_plain(rows[i][column], column) for i in range(len(rows))]
    if column == LABEL and isinstance(setup.task, Classification):
        labels = [int(setup.task.split(rows.batch([i]))[1]) for i in range(len(rows))]
        return labels if setup.classes is None else [list(setup.classes)[y] for y in labels]
    known = [
        "example",
        DOCUMENT,
        *([LABEL] if isinstance(setup.task, Classification) else []),
        *map(str, columns),
    ]
    raise unknown("--by", column, known)


def _of_records(file: str, column: str, ids: Sequence[Any]) -> Names:
    """The field of the record that each part, with an id record:part, comes from."""
    records = list(read_records(file, (column,)))
    parts = documents(ids)
    if [r.name for r in records] == parts.names:
        values = [r.fields.get(column) for r in records]
    else:  # records without a training example
        by_name = {r.name: r.fields.get(column) for r in records}
        missing = next((name for name in parts.names if name not in by_name), None)
        if missing is not None:
            raise UndeError(
                f"{file} has no record {missing!r} any more: say where the training texts are (--data)"
            )
        values = [by_name[name] for name in parts.names]
    return [_plain(values[d], column) for d in parts.of.tolist()]


def _plain(value: Any, column: str) -> Any:
    if getattr(value, "shape", None) == ():
        value = value.item()
    if isinstance(value, (str, int, float, bool)) or value is None:
        return "(none)" if value is None else value
    raise UndeError(
        f"the column {column!r} holds a {type(value).__name__}: expected a name or a number, to add up by"
    )
