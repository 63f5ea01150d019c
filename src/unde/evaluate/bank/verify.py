"""Check every byte of a bank, finished or not, against its checksum."""

from __future__ import annotations

from unde.errors import UndeError
from unde.evaluate.bank.bank_io import OLD_FORMATS, UnfinishedBank, read_bank
from unde.store.remote import StorePath, Unreachable, exists
from unde.store.verify_report import DAMAGED, VerifyReport

_AGAIN = "Bank.run with the same arguments"


def verify(path: StorePath) -> VerifyReport:
    """Check the file of a bank, or while there is none the results of its models."""
    report, folder = VerifyReport(path, "bank"), UnfinishedBank.of(path)
    if exists(path):
        try:
            content = read_bank(path)
            report.count(path)
            if content.provenance["format"] in OLD_FORMATS:
                report.notes.append("it has no checksum, as releases before 0.2 wrote none")
        except Unreachable:
            raise
        except UndeError as e:
            prefix = f"{path} is not a bank that can be read, or is damaged "
            reason = str(e).removeprefix(prefix).partition("): ")[0].lstrip("(")
            report.report(path, DAMAGED, reason, f"delete it, {_AGAIN} makes it anew")
        return report
    if not folder.exists():
        raise UndeError(f"there is no bank at {path}: make one with Bank.run")
    try:
        results, plan = folder.open()
    except Unreachable:
        raise
    except UndeError as e:
        cure = f"delete it, {_AGAIN} keeps all sound models"
        report.report(folder.plan_file, DAMAGED, str(e).partition(": ")[0], cure)
        return report
    report.count(folder.plan_file)
    done = 0
    for number, file in results.files():
        if number < plan.models and results.read(number) is not None:
            report.count(file)
            done += 1
        else:
            report.report(file, DAMAGED, "", f"delete it, {_AGAIN} trains this model again")
    report.unfinished = f"{done} of {plan.models} models are trained; {_AGAIN} goes on"
    return report
