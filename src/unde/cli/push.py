"""`unde push` and `unde pull`: copy an index, a bank or weights to an object store and back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from unde import console
from unde.errors import UndeError
from unde.store.layout import MANIFEST
from unde.store.remote import StorePath, is_local, place

if TYPE_CHECKING:
    from unde.store.sync import CopyCount

Local = Annotated[
    Any,
    typer.Argument(parser=place, metavar="DIR", help="folder of an index, or file of a bank or of weights"),
]
Url = Annotated[Any, typer.Argument(parser=place, metavar="URL", help="such as s3://bucket/idx")]


def push(source: Local, url: Url) -> None:
    """Copy an index, a bank or weights to an object store, and check them on the way.

    Equal files are skipped, so an interrupted copy resumes. A target that holds something else is refused.

    Examples:

    `unde push runs/idx s3://bucket/idx`

    `unde push weights.json gs://bucket/weights.json`
    """
    _check(source, url, "push DIR URL")
    _report(url, _copy(source, url))


def pull(url: Url, target: Local) -> None:
    """Copy an index, a bank or weights from an object store, and check them on the way.

    Equal files are skipped, so an interrupted copy resumes. A target that holds something else is refused.

    Example:

    `unde pull s3://bucket/idx runs/idx`
    """
    _check(target, url, "pull URL DIR")
    _report(target, _copy(url, target))


def _check(local: StorePath, url: StorePath, usage: str) -> None:
    if not is_local(local) or is_local(url):
        wrong = local if not is_local(local) else url
        raise UndeError(
            f"{wrong} is {'a URL' if wrong is local else 'no URL'}: expected unde {usage}, with a URL such as "
            "s3://bucket/idx"
        )


def _copy(source: StorePath, target: StorePath) -> CopyCount:
    from unde.evaluate import Bank
    from unde.store.sync import copy_file, copy_index
    from unde.weights import Weights

    if (source / MANIFEST).exists():
        return copy_index(source, target)
    if source.is_dir():
        raise UndeError(
            f"{source} holds no unde index: there is no {MANIFEST} in it. Build one with unde build"
        )
    if not source.exists():
        raise UndeError(f"there is nothing at {source}: expected an index, a bank or weights")
    content = source.read_bytes()
    Bank.open(source) if content[:2] == b"PK" else Weights.load(source)
    return copy_file(content, target)


def _report(target: StorePath, count: CopyCount) -> None:
    unchanged = f", {count.unchanged} of them were there already" if count.unchanged else ""
    console.echo(f"{target}: {console.counted(count.files, 'file')}{unchanged}")
