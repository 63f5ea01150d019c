"""Every result of the paper, one command.

    python -m experiments list                     what there is, what it needs, what is done
    python -m experiments run lds_cifar2           one result; `run lds` all results of a study
    python -m experiments all                      every result that is not there yet
    python -m experiments render                   docs/results.md and the tables of other pages, from the results
    python -m experiments bank cifar10-resnet      retrain the models that LDS is measured against

Results are kept in experiments/results and not computed twice. Retraining is hours of work, which no study begins by
itself; what was interrupted goes on where it stopped.
"""

from __future__ import annotations

import argparse
import sys
import traceback

from experiments import runner
from experiments.runner import Refused


def main(argv: list[str] | None = None) -> int:
    """0 if all went well, 1 if something failed or a page is out of date, 2 if something was refused."""
    arguments, rest = _parser().parse_known_args(argv)
    if rest and getattr(arguments, "scale", None) is None:
        _parser().error(f"unknown arguments: {' '.join(rest)}")
    try:
        return arguments.do(arguments, rest)
    except Refused as e:
        print(e, file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m experiments", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, do, words: str) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=words, description=words, allow_abbrev=False)
        made.set_defaults(do=do)
        return made

    command("list", list_studies, "every study: its place in the paper, its results, what they need")
    one = command("run", run, "run studies, or single results of them")
    one.add_argument("names", nargs="+", metavar="NAME", help="a study, or one of its results (see `list`)")
    every = command("all", run_all, "run everything whose result is not there")
    for sub in (one, every):
        sub.add_argument("--again", action="store_true", help="compute results anew that are there")
    one.add_argument(
        "--scale",
        choices=["paper"],
        help="at the size of the paper, on your own data and machines; what follows goes to experiments.scale",
    )
    page = command(
        "render", render, "write docs/results.md, its figures, and the marked tables of other pages"
    )
    page.add_argument("--check", action="store_true", help="write nothing; fail if a page is out of date")
    bank = command("bank", make_bank, "retrain the models of a bank, or go on with it")
    bank.add_argument("name", metavar="NAME")
    bank.add_argument("--processes", type=int, help="models that are trained at the same time; one a core")
    return parser


def list_studies(arguments: argparse.Namespace, rest: list[str]) -> int:
    for study in runner.studies().values():
        print(f"\n{study.name}: {study.title}" + (f" [{study.paper}]" if study.paper else ""))
        for result, variant in study.results().items():
            path = runner.result_path(result)
            state = "done" if path.exists() else "not yet"
            needs = ", ".join(map(str, study.needs(variant)))
            print(f"  {result:36} {state:8} {runner.from_root(path)}" + (f"  needs {needs}" if needs else ""))
    return 0


def run(arguments: argparse.Namespace, rest: list[str]) -> int:
    if arguments.scale == "paper":
        from experiments.scale import run as run_at_scale
        from unde import UndeError

        for name in arguments.names:
            try:
                run_at_scale(name, rest)
            except UndeError as e:
                raise Refused(str(e)) from e
        return 0
    for study, result, variant in runner.named(arguments.names):
        runner.run(study, result, variant, again=arguments.again)
    return 0


def run_all(arguments: argparse.Namespace, rest: list[str]) -> int:
    """What cannot be run is passed over and listed at the end: a night's work should not end at the first of them."""
    refused: dict[str, str] = {}
    failed: list[str] = []
    for study, result, variant in runner.named(list(runner.studies())):
        try:
            runner.run(study, result, variant, again=arguments.again)
        except Refused as e:
            refused[result] = str(e)
        except Exception:
            traceback.print_exc()
            failed.append(result)
    for result, why in refused.items():
        print(f"not run: {result}: {why}", file=sys.stderr)
    for result in failed:
        print(f"failed: {result} (its error is above)", file=sys.stderr)
    return 1 if failed else 2 if refused else 0


def render(arguments: argparse.Namespace, rest: list[str]) -> int:
    from experiments import tables

    changed = tables.render(check=arguments.check)
    for path in changed:
        print(f"{'out of date: ' if arguments.check else 'wrote '}{runner.from_root(path)}")
    if arguments.check and changed:
        print("`python -m experiments render` writes them", file=sys.stderr)
        return 1
    return 0


def make_bank(arguments: argparse.Namespace, rest: list[str]) -> int:
    from experiments.shared import banks
    from unde import UndeError

    path = runner.bank_path(arguments.name)
    if path.exists():
        print(f"{arguments.name}: there already, in {runner.from_root(path)}")
        return 0
    try:
        made = banks.make(arguments.name, processes=arguments.processes)
    except UndeError as e:
        raise Refused(str(e)) from e
    print(f"{arguments.name}: {len(made.masks)} models, {made.seconds.mean():.0f} s for each on average")
    return 0


if __name__ == "__main__":
    sys.exit(main())
