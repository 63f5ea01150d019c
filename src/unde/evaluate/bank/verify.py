"""Every byte of a bank against its checksum, finished or not."""

from __future__ import annotations

from unde.errors import UndeError
from unde.evaluate.bank.bank_io import OLD_FORMATS, PartsFolder
from unde.evaluate.bank.finished import read_bank
from unde.evaluate.bank.subsets import described
from unde.store.remote import StorePath, Unreachable, exists
from unde.store.verify_report import DAMAGED, Verified

_AGAIN = "Bank.run with the same arguments"


def verify(path: StorePath) -> Verified:
    """The file of a bank, or while there is none the models that are kept for it."""
    found, folder = Verified(path, "bank"), PartsFolder(path)
    if exists(path):
        try:
            content = read_bank(path)
            found.found(path)
            if content.provenance["format"] in OLD_FORMATS:
                found.notes.append("it has no checksum, as releases before 0.2 wrote none")
        except Unreachable:
            raise
        except UndeError as e:
            why = (
                str(e).removeprefix(f"{path} is not a bank that can be read, or is damaged ").partition("): ")
            )
            found.report(path, DAMAGED, why[0].lstrip("("), f"delete it, {_AGAIN} makes it anew")
        return found
    if not folder.begun:
        raise UndeError(f"there is no bank at {path}: make one with Bank.run")
    try:
        parts, config = folder.kept()
    except Unreachable:
        raise
    except UndeError as e:
        found.report(
            folder.plan, DAMAGED, str(e).partition(": ")[0], f"delete it, {_AGAIN} keeps all sound models"
        )
        return found
    found.found(folder.plan)
    models, done = described(config).models, 0
    for number, file in parts.files():
        if number < models and parts.read(number) is not None:
            found.found(file)
            done += 1
        else:
            found.report(file, DAMAGED, "", f"delete it, {_AGAIN} trains this model again")
    found.unfinished = f"{done} of {models} models are trained; {_AGAIN} goes on"
    return found
