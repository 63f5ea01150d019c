"""`unde append`, `remove` and `merge`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from unde import console
from unde.cli.options import IndexPath, TrainingOptions, WorkerOptions, option
from unde.errors import UndeError
from unde.store.remote import place

_REMOVE = "remove"  # the mark of the live page


def append(index: IndexPath, model: TrainingOptions, worker: WorkerOptions) -> None:
    """Add training examples to an index. Examples that it holds already, by content, are skipped.

    Give all training data, or only the new part. The index remembers the model and its settings. After a kill the index
    is unchanged, and the same command resumes.

    Examples:

    `unde append --index runs/idx --data train-grown.jsonl`

    `unde append my_project.setup:make --index runs/idx`
    """
    from unde.cli.project import Project
    from unde.index import Index
    from unde.index.updates import finish

    project = Project(model.remembered(index), index=index)
    setup = project.setup
    opened = project.index(index, worker.executor(), whole=False)
    rows = setup.rows(setup.train_data)
    known = opened.holds(rows)
    if known.all() and finish(index):  # the same command was killed after it committed
        console.echo(f"{index}: {len(opened):,} examples now")
        return
    if known.all():
        raise UndeError(
            f"all {len(rows):,} examples are in {index} already: give the training data with what is new"
        )
    new = (~known).nonzero()[:, 0].tolist()
    ids = None
    if opened.ids is not None and setup.ids is not None:
        file = None if project.source is None else project.source.data
        ids = _distinct([setup.ids[i] for i in new], opened.ids, file)
    with opened:
        opened.append(rows.subset(new), ids=ids)
    try:
        Index.open(index, train_data=setup.train_data, verify=False)
        project.memory.save(index)
    except UndeError:
        console.note(
            "this is not all training data of the index: commands that show or perturb training examples need all of "
            "it (--data FILE, in any order)"
        )
    skipped = f" ({int(known.sum()):,} were there already)" if known.any() else ""
    console.echo(f"{index}: {len(new):,} examples appended{skipped}, {len(opened):,} now")


def _distinct(ids: list[Any], taken: Sequence[Any], data: str | None) -> list[Any]:
    """Put the name of the file before numbers of its lines that are ids of the index already."""
    if data is None or set(taken).isdisjoint(ids):
        return ids
    prefixed = [f"{Path(data).name}:{i}" for i in ids]
    if not set(taken).isdisjoint(prefixed):
        raise UndeError(
            f"examples called {prefixed[0]!r} and so on are in the index already: give each record of {data} a field id"
        )
    console.note(f"the new ids start with the name of the file, since others are taken: {prefixed[0]}")
    return prefixed


def remove(
    index: IndexPath,
    ids: Annotated[
        str,
        option(
            "ids, documents (doc-10 stands for doc-10:1, doc-10:2, …), or positions where the index has no ids: in a "
            "list, or a file: .txt with one on each line, .csv, .jsonl or .parquet with a column id, such as the marks "
            "of the live page",
            metavar="FILE|1,2,3",
        ),
    ],
    model: TrainingOptions,
    mark: Annotated[
        list[str] | None,
        option("of a file with a column mark, take those marked so; repeatable (default: remove)"),
    ] = None,
) -> None:
    """Remove training examples from an index and erase their bytes.

    Only the shards that hold them are rewritten. EKFAC needs the model, since its covariances are sums over examples.
    Copies (push, backups) are not changed.

    Examples:

    `unde remove --index runs/idx --ids 17,42,108`

    `unde remove --index runs/idx --ids doc-10,doc-11:2`, all parts of one text and part 2 of another

    `unde remove --index runs/idx --ids marks.csv --mark remove --mark "wrong label"`
    """
    from unde.cli.project import Project
    from unde.index import Index

    names = _read_names(ids, mark)
    opened = Index.open(index)
    if opened.manifest.factors:
        opened = Project(model.remembered(index), index=index).index(index)
    if opened.ids is None:
        odd = [name for name in names if not name.isascii() or not name.isdigit()]
        if odd:
            raise UndeError(
                f"{index} has no ids, its examples are named by position: {odd[0]!r} is no number from 0 on"
            )
        opened.remove(indices=[int(name) for name in names])
    else:
        by_text = {str(i): i for i in opened.ids}
        unquoted = (name if name in by_text else name.removeprefix("'") for name in names)  # of spreadsheets
        opened.remove([by_text.get(name, name) for name in unquoted])
    console.echo(f"{index}: {len(opened):,} examples left, the removed ones are erased")


def merge(
    out: Annotated[Any, typer.Argument(parser=place, metavar="OUT", help="folder or URL for the new index")],
    indexes: Annotated[
        list[str], typer.Argument(metavar="A B …", help="indexes of the same model, task and settings")
    ],
) -> None:
    """Merge indexes of the same model, task, method, projection and groups into a new one.

    The old indexes stay unchanged. Nothing is computed again.

    Example:

    `unde merge runs/all runs/monday runs/tuesday`
    """
    from unde.index import Index

    merged = Index.merge(list(indexes), out)
    console.echo(f"{out}: {len(merged):,} examples of {len(indexes)} indexes in {len(merged.groups)} groups")


def _read_names(option: str, marks: list[str] | None) -> list[str]:
    """The ids in a file, or in the list itself."""
    path = Path(option).expanduser()
    is_file = os.path.isfile(path)
    if marks and not is_file:
        raise UndeError(f"--mark goes with a file that has marks: there is no file {option}")
    parts = (part.strip() for part in option.split(","))
    names = _read_file(path, marks) if is_file else [part for part in parts if part]
    if not names:
        raise UndeError(f"--ids {option} names no example: expected ids such as 17,42 or a file of them")
    return names


def _read_file(file: Path, marks: list[str] | None) -> list[str]:
    from unde.integrations.documents import read_records

    records = list(read_records(file, ("id", "mark")))
    odd = next((r for r in records if r.fields.get("id") is None), None)
    if odd is not None:
        raise UndeError(f"{odd.where}: no 'id': expected one in each record")
    marked = any("mark" in r.fields for r in records)
    if marks and not marked:
        raise UndeError(f"{file} has no column 'mark', of which --mark {marks[0]} would choose")
    chosen, present = set(marks or [_REMOVE]), {str(r.fields.get("mark")) for r in records}
    if marks and not chosen <= present:
        missing, known = sorted(chosen - present)[0], ", ".join(sorted(present))
        raise UndeError(f"{file}: nothing is marked {missing!r}, there is {known}")
    return [str(r.fields["id"]) for r in records if not marked or r.fields.get("mark") in chosen]
