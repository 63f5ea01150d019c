"""`unde verify`: check every byte of an index, a bank or a file of weights against its checksum."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unde import console
from unde.cli import completion
from unde.errors import UndeError
from unde.store.files import read_start
from unde.store.remote import StorePath, exists, place

if TYPE_CHECKING:
    from unde.store.verify_report import VerifyReport


def verify(
    path: Annotated[
        Any,
        typer.Argument(
            parser=place,
            metavar="INDEX|BANK|WEIGHTS",
            help="folder or URL of an index, or a file",
            show_default=False,
            autocompletion=completion.indexes,
        ),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="for another program")] = False,
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
