"""`unde learn` and `unde calibrate`: weights of groups of parameters, and the choice of a method."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from unde import console
from unde.cli.options import (
    FineTuningOptions,
    IndexPath,
    MethodOfIndex,
    ModelOptions,
    QueryField,
    Uncalibrated,
    WorkerOptions,
    check_out,
    option,
    place_option,
)
from unde.errors import UndeError, unknown
from unde.store.remote import StorePath

if TYPE_CHECKING:
    from unde.cli.project import Project


_queries_option = partial(option, panel="With --queries")


@dataclass(frozen=True)
class ObjectiveOptions:
    """What is learned from queries, and how."""

    objective: Annotated[
        str | None, _queries_option("top-k (the default), bottom-k, top-k-bottom-k or no-norm")
    ] = None
    k: Annotated[int | None, _queries_option("top-ranked examples taken for true (default: 5)")] = None
    weight_decay: Annotated[
        float | None,
        _queries_option("pull towards the unweighted method (default: 0.5; 0.1 of fixed-point)"),
    ] = None
    solver: Annotated[
        str | None, _queries_option("adamw (the paper's Algorithm 1, the default) or fixed-point")
    ] = None
    epochs: Annotated[int | None, _queries_option("epochs of adamw (default: 10)")] = None
    lr: Annotated[float | None, _queries_option("learning rate of adamw (default: 0.01)")] = None
    penalty: Annotated[
        float | None, _queries_option("λ of the paper's Eq. 6, beside the decay (default: 0)")
    ] = None
    noise: Annotated[
        float | None,
        _queries_option("noise on contributions, in standard deviations of each group (default: 0)"),
    ] = None

    @property
    def arguments(self) -> dict[str, Any]:
        """What was set, as arguments of `learn_weights`."""
        return {name: value for name, value in vars(self).items() if value is not None}


def learn(
    index: IndexPath,
    model: ModelOptions,
    worker: WorkerOptions,
    settings: ObjectiveOptions,
    out: Annotated[Any, place_option("where to save the weights", "--out")] = "weights.json",
    method: MethodOfIndex = None,
    examples: Annotated[int | None, option("training examples to learn from (default: 200)")] = None,
    perturb: Annotated[
        str | None,
        option(
            "weights: noise on the model's weights, for inputs that cannot be perturbed "
            "(default: what the task knows)"
        ),
    ] = None,
    seed: Annotated[int, option("of which examples are drawn, and of adamw")] = 0,
    queries: Annotated[
        str | None,
        _queries_option(
            "texts to learn from, as in --data; with MODULE:FUNCTION: learn, for its learn_queries",
            metavar="FILE",
        ),
    ] = None,
    query_field: QueryField = None,
    uncalibrated: Uncalibrated = False,
) -> None:
    """Learn how much each group of parameters should count, without labels.

    Without --queries, weights are learned with which perturbed training examples find their originals. With --queries,
    weights follow the paper's Algorithm 1; the queries must be neither in the training data nor in the evaluation data.

    Examples:

    `unde learn --index runs/idx`

    `unde learn --index runs/idx --method ekfac --examples 100 --out ekfac.json`

    `unde learn --index runs/idx --queries learn.jsonl --out weights.json`

    `unde learn my_project.setup:make --index runs/idx --queries learn --k 10`
    """
    from unde.cli.project import Project, cached_scores
    from unde.weights import learn_weights
    from unde.weights.retrieval import effect_in_words

    with_queries = settings.arguments | ({} if query_field is None else {"query-field": query_field})
    without = {"examples": examples, "perturb": perturb}
    _check(queries, with_queries, {k: v for k, v in without.items() if v is not None}, out)
    model = model.remembered(index, method)
    texts = None if queries is None or (model.target is not None and queries == "learn") else Path(queries)
    project = Project(model, index=index, learn=texts, query_field=query_field)
    if queries is None:
        opened = project.index(index, worker.executor(), uncalibrated=uncalibrated)
        weights = opened.learn_weights(None, method, perturb, 200 if examples is None else examples, seed)
    else:
        rows = project.disjoint_queries("learn")
        opened = project.index(index, worker.executor(), uncalibrated=uncalibrated)
        scores = cached_scores(opened, rows, method)
        weights = learn_weights(scores, seed=seed, **settings.arguments)
        console.note(effect_in_words(scores, weights))
    weights.save(out)
    console.echo(f"{out}: {weights}")


def _check(
    queries: str | None, with_queries: dict[str, Any], without: dict[str, Any], out: StorePath
) -> None:
    """Raise on options of the other way of learning, and where weights cannot be saved."""
    add = "add --queries FILE (with MODULE:FUNCTION: --queries learn), or leave it out to learn from the index alone"
    ways = (
        (queries is None, with_queries, f"from queries: {add}"),
        (queries is not None, without, "from the index alone: leave out --queries, or this"),
    )
    for refused, options, way in ways:
        if refused and options:
            named = ", ".join(f"--{name.replace('_', '-')}" for name in options)
            raise UndeError(f"{named} {'belongs' if len(options) == 1 else 'belong'} to learning {way}")
    if without.get("perturb", "weights") != "weights":
        raise unknown("perturb", without["perturb"], ("weights",))
    check_out(out)


def calibrate(
    index: IndexPath,
    model: ModelOptions,
    worker: WorkerOptions,
    tuning: FineTuningOptions,
    queries: Annotated[
        str | None,
        option(
            "texts like those that will be asked about, none of them trained on; with MODULE:FUNCTION: learn (the "
            "default, its learn_queries) or eval",
            metavar="FILE",
        ),
    ] = None,
    halves: Annotated[int, option("random halves to train on: 8 choose a setting, 16 fit weights too")] = 16,
    budget: Annotated[
        str | None, option("no model is begun after this, such as 30min or 2h", metavar="TIME")
    ] = None,
    how: Annotated[
        str, option("retrain, or local: one more epoch from the final model, which is cheaper")
    ] = "retrain",
    bank: Annotated[
        Any, place_option("a bank of retrained models of the same queries: nothing is trained", "--bank")
    ] = None,
    utility: Annotated[str | None, option("which utility of the bank belongs to the queries")] = None,
    seed: Annotated[int, option("of halves, trainings and folds")] = 0,
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
        training(project, how, **vars(tuning)) if bank is None else None,
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
    trained = f"{result.trainings} trainings, {console.duration(result.seconds)}"
    cost = trained if result.trainings else "nothing was trained"
    console.echo(f"{index}: {console.counted(len(result.settings), 'setting')} judged; {cost}")


def _bank(path: Any, utility: str | None) -> Any:
    from unde.evaluate import Bank

    bank = Bank.open(path)
    if utility is None:
        return bank
    if utility not in bank.utility:
        raise unknown("utility of the bank", utility, bank.utility)
    return bank.masks, bank.utility[utility]


def training(project: Project, how: str, **options: Any) -> Any:
    """How models are trained; `options` are those of a fine-tuning."""
    if project.source is not None:
        from unde.integrations.finetuning import fine_tuning

        remote = project.source.trust_remote_code
        return fine_tuning(
            project.setup,
            project.name,
            local=how == "local",
            itself=how == "choice",
            trust_remote_code=remote,
            **options,
        )
    superfluous = [f"--{name.replace('_', '-')}" for name, value in options.items() if value is not None]
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
