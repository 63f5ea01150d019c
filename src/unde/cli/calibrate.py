"""`unde calibrate`: choose method, damping and weights by models retrained on random halves."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unde import console
from unde.cli.options import HF, IndexPath, ModelOptions, QueryField, WorkerOptions, place_option
from unde.errors import UndeError, unknown

if TYPE_CHECKING:
    from unde.cli.project import Project


def calibrate(
    index: IndexPath,
    model: ModelOptions,
    worker: WorkerOptions,
    queries: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="texts like those that will be asked about, none of them trained on; with MODULE:FUNCTION: learn (the "
            "default, its learn_queries) or eval",
        ),
    ] = None,
    halves: Annotated[
        int, typer.Option(help="random halves to train on: 8 choose a setting, 16 fit weights too")
    ] = 16,
    budget: Annotated[
        str | None, typer.Option(metavar="TIME", help="no model is begun after this, such as 30min or 2h")
    ] = None,
    how: Annotated[
        str, typer.Option(help="retrain, or local: one more epoch from the final model, which is cheaper")
    ] = "retrain",
    bank: Annotated[
        Any, place_option("--bank", help="a bank of retrained models of the same queries: nothing is trained")
    ] = None,
    utility: Annotated[
        str | None, typer.Option(help="which utility of the bank belongs to the queries")
    ] = None,
    seed: Annotated[int, typer.Option(help="of halves, trainings and folds")] = 0,
    base: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="checkpoint that fine-tuning started from", rich_help_panel=HF),
    ] = None,
    epochs: Annotated[
        float | None,
        typer.Option(help="of the fine-tuning (default: as Trainer recorded it, or 3)", rich_help_panel=HF),
    ] = None,
    lr: Annotated[
        float | None,
        typer.Option(help="learning rate (default: as Trainer recorded it, or 5e-5)", rich_help_panel=HF),
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(help="examples in a step (default: as Trainer recorded it, or 8)", rich_help_panel=HF),
    ] = None,
    query_field: QueryField = None,
) -> None:
    """Choose method, damping and weights by models retrained on random halves, and measure the LDS of the choice.

    Retrained models judge every setting of the index on the queries. The index stores the choice, and attribute,
    report, serve and learn use it. An interrupted calibration resumes.

    Examples:

    `unde calibrate my_project.setup:make --index runs/idx --halves 16 --budget 2h`

    `unde calibrate --index runs/lm --queries held-out.jsonl --base ./gpt2`

    `unde calibrate --index runs/lm --queries held-out.jsonl --how local`

    `unde calibrate my_project.setup:make --index runs/idx --bank bank.npz --utility learn`
    """
    from unde.cli.project import Project
    from unde.evaluate.baselines import setup_baselines

    if how not in ("retrain", "local"):
        raise unknown("--how", how, ("retrain", "local"))
    model = model.remembered(index)
    if model.target is None and queries is None:
        raise UndeError("no queries: give texts that are not in the training data (--queries FILE.jsonl)")
    texts = None if model.target is not None else Path(str(queries))
    project = Project(model, index=index, learn=texts, query_field=query_field)
    role = "learn"
    if model.target is not None:
        role = queries or ("learn" if project.setup.learn_queries is not None else "eval")
    rows = project.disjoint_queries(role)
    opened = project.index(index, worker.executor())
    result = opened.calibrate(
        None if bank is not None else _training(project, how, base, epochs, lr, batch_size),
        rows,
        halves=halves,
        budget=budget,
        how=how,
        bank=None if bank is None else _bank(bank, utility),
        seed=seed,
        baselines=setup_baselines(project.setup, rows),
    )
    opened.close()
    console.echo(result.table())
    cost = (
        f"{result.trainings} trainings, {console.duration(result.seconds)}"
        if result.trainings
        else "nothing was trained"
    )
    console.echo(f"{index}: {console.counted(len(result.settings), 'setting')} judged; {cost}")


def _bank(path: Any, utility: str | None) -> Any:
    from unde.evaluate import Bank

    bank = Bank.open(path)
    if utility is None:
        return bank
    if utility not in bank.utility:
        raise unknown("utility of the bank", utility, bank.utility)
    return bank.masks, bank.utility[utility]


def _training(
    project: Project,
    how: str,
    base: str | None,
    epochs: float | None,
    lr: float | None,
    batch_size: int | None,
) -> Any:
    if project.source is not None:
        from unde.integrations.finetuning import fine_tuning

        return fine_tuning(
            project.setup,
            project.name,
            base=base,
            epochs=epochs,
            lr=lr,
            batch_size=batch_size,
            local=how == "local",
            trust_remote_code=project.source.trust_remote_code,
        )
    options = {"--base": base, "--epochs": epochs, "--lr": lr, "--batch-size": batch_size}
    superfluous = [name for name, value in options.items() if value is not None]
    if superfluous:
        raise UndeError(
            f"{superfluous[0]} goes with --hf-model: {project.name} says how to train, Setup(train=...)"
        )
    if project.setup.train is None:
        raise UndeError(
            f"there is no way to train: {project.name} gives none. Set Setup(..., train=...), a function (indices, "
            "seed) -> model or an unde.evaluate.TrainingSpec, or give a --bank of retrained models"
        )
    return project.setup.train
