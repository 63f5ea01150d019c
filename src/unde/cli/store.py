"""`unde push`, `pull` and `verify`: copy or check an index, a bank or weights."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unde import console
from unde.cli.options import indexes, option
from unde.errors import UndeError
from unde.store.files import read_start
from unde.store.layout import CARD, MANIFEST
from unde.store.remote import StorePath, exists, is_local, place

if TYPE_CHECKING:
    from unde.store.layout import VerifyReport
    from unde.store.sync import CopyCount


Local = Annotated[
    Any,
    typer.Argument(parser=place, metavar="DIR", help="folder of an index, or file of a bank or of weights"),
]
Url = Annotated[Any, typer.Argument(parser=place, metavar="URL", help="such as s3://bucket/idx")]


def push(source: Local, url: Url) -> None:
    """Copy an index, a bank or weights to an object store, and check them on the way.

    Equal files are skipped, so an interrupted copy resumes. A target that holds something else is refused. Beside an
    index a card is written, README.md, as model hubs show it: model, data, method, calibration, how to ask. A README.md
    that somebody else wrote stays.

    Examples:

    `unde push runs/idx s3://bucket/idx`

    `unde push runs/idx hf://datasets/me/idx`

    `unde push weights.json gs://bucket/weights.json`
    """
    from unde.index.card import write_card

    _transfer(source, url, source, url, "push DIR URL")
    if (source / MANIFEST).exists():
        if write_card(url):
            console.echo(f"{url / CARD}: what the index is and how to ask it")
        else:
            console.note(f"{url / CARD} is not of unde push: it stays as it is")


def pull(url: Url, target: Local) -> None:
    """Copy an index, a bank or weights from an object store, and check them on the way.

    Equal files are skipped, so an interrupted copy resumes. A target that holds something else is refused.

    Example:

    `unde pull s3://bucket/idx runs/idx`
    """
    _transfer(url, target, target, url, "pull URL DIR")


def _transfer(source: StorePath, target: StorePath, local: StorePath, url: StorePath, usage: str) -> None:
    """Copy from source to target, of which one is local and the other a URL."""
    if not is_local(local) or is_local(url):
        wrong = local if not is_local(local) else url
        raise UndeError(
            f"{wrong} is {'a URL' if wrong is local else 'no URL'}: expected unde {usage}, with a URL such as "
            "s3://bucket/idx"
        )
    count = _copy(source, target)
    unchanged = f", {count.unchanged} of them were there already" if count.unchanged else ""
    console.echo(f"{target}: {console.counted(count.files, 'file')}{unchanged}")


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


def verify(
    path: Annotated[
        Any,
        typer.Argument(
            parser=place,
            metavar="INDEX|BANK|WEIGHTS",
            help="folder or URL of an index, or a file",
            show_default=False,
            autocompletion=indexes,
        ),
    ],
    as_json: Annotated[bool, option("for another program", "--json")] = False,
) -> None:
    """Check every byte of an index, a bank or weights; say what is damaged and what restores it.

    The exit code is 1 if anything is damaged. Unfinished parts are listed and are no damage.

    Examples:

    `unde verify runs/idx`

    `unde verify runs/bank.npz --json`
    """
    result = verify_path(path)
    if as_json:
        typer.echo(json.dumps(result.as_dict(), indent=1))
    else:
        console.echo(str(result))
    if not result:
        raise typer.Exit(1)


def verify_path(path: StorePath) -> VerifyReport:
    """Verify an index (a folder), a bank (an archive of arrays), or else weights (JSON)."""
    from unde.evaluate.bank.bank_io import unfinished_bank, verify_bank
    from unde.index import verify as index
    from unde.weights import weights

    unfinished = unfinished_bank(path)
    if unfinished is not None:
        return verify_bank(unfinished)
    if path.is_dir():
        return index.verify(path)
    if not path.is_file():
        what = "is no plain file" if exists(path) else "is not there"
        raise UndeError(f"{path} {what}: expected the folder of an index, a bank or a file of weights")
    if path.suffix == ".npz" or read_start(path, 2) == b"PK":  # an archive
        return verify_bank(path)
    return weights.verify(path)
