"""`unde evaluate`: how good scores are, by a bank of retrained models or by removals."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from unde import console
from unde.cli.options import (
    FineTuningOptions,
    IndexPath,
    MethodOfIndex,
    ModelOptions,
    Queries,
    QueryField,
    Uncalibrated,
    WeightsFile,
    WorkerOptions,
    check_format,
    check_out,
    one_of,
    option,
    place_option,
)
from unde.errors import UndeError, unknown
from unde.store.remote import place

if TYPE_CHECKING:
    from unde.cli.project import Project
    from unde.data import Rows
    from unde.index import Index
    from unde.scoring import GroupScores

UNWEIGHTED = "unweighted"
QUERIES = 10  # by default, where each is retrained for
_removal = partial(option, panel="With --counterfactual")


@dataclass(frozen=True)
class _ClassPrediction:
    """The class that a model predicts for each query."""

    task: Any
    rows: Rows

    def __call__(self, model: Any) -> Any:
        from unde.index.labels import predict_labels

        return predict_labels(model, self.task, self.rows).predicted


@dataclass(frozen=True)
class RemovalOptions:
    """Models trained without some examples, in place of a bank."""

    counterfactual: Annotated[
        bool,
        _removal("remove top examples, train again, and compare with random removal", "--counterfactual"),
    ] = False
    k: Annotated[list[int] | None, _removal("examples to remove; repeatable (default: 10 and 50)", "--k")] = (
        None
    )
    of: Annotated[
        str,
        _removal(
            "query: the top k of each query are removed for it alone; set: those of all queries, at once",
            autocompletion=one_of("query", "set"),
        ),
    ] = "query"
    first: Annotated[
        int | None, _removal("how many queries (default: 10 with --of query, all with --of set)")
    ] = None
    seeds: Annotated[int, _removal("trainings of every subset")] = 3
    seed: Annotated[int, _removal("of random removals and trainings")] = 0
    remove_baselines: Annotated[
        bool,
        _removal("also remove what BM25, hidden-state similarity and the loss rank first", "--baselines"),
    ] = False
    models: Annotated[
        Any, _removal("folder of results, to resume (default: INDEX.removals)", "--models", parser=place)
    ] = None

    def run(
        self,
        project: Project,
        opened: Index,
        rows: Rows,
        method: str | None,
        weights: Any,
        train: Any,
        executor: Any,
        format: str,
    ) -> None:
        from unde.cli.project import load_weights
        from unde.evaluate import QueryUtility, counterfactual
        from unde.evaluate.baselines import setup_baselines
        from unde.tasks import Classification

        count = (
            len(rows) if self.first is None and self.of == "set" else min(self.first or QUERIES, len(rows))
        )
        rows = rows.subset(range(count))
        scores = opened.score(rows, method)
        learned = None if weights is None else load_weights(weights, scores.groups, scores.query_digests)
        rankings: dict[str, Any] = {scores.method.name: scores.total(learned)}
        if self.remove_baselines:
            rankings |= setup_baselines(project.setup, rows)
        task, path = project.setup.task, self.models or place(f"{opened.folder}.removals")
        result = counterfactual(
            rankings, train, QueryUtility(task, rows), self.k or [10, 50], of=self.of, seeds=self.seeds,
            seed=self.seed, predict=_ClassPrediction(task, rows) if isinstance(task, Classification) else None,
            path=path, executor=executor,
        )  # fmt: skip
        opened.close()
        if format == "json":
            console.echo(json.dumps(result.as_dict(), indent=1))
            return
        head = ["removed", "k", "rise of the loss", "more than random"]
        console.show_table(
            f"{console.counted(count, 'query')}, {console.counted(self.seeds, 'seed')}, "
            f"{result.trainings:,} trainings; 95 % intervals",
            head if result.flips is None else [*head, "flipped predictions"],
            result.rows(),
        )
        console.echo(f"{path}: results of the trained models")
        name, most = scores.method.name, result.ks[-1]
        excess = result.excess(name, most)
        if excess.mean <= (excess.ci95_total or excess.ci95):
            console.note(
                f"removing the top {most} of {name} does not do significantly more than random removals: try a larger "
                "--k, --of set, or unde calibrate to choose another method"
            )


def evaluate(
    index: IndexPath,
    model: ModelOptions,
    worker: WorkerOptions,
    removal: RemovalOptions,
    tuning: FineTuningOptions,
    bank: Annotated[Any, place_option("file of a retraining bank (unde.evaluate.Bank)")] = None,
    queries: Queries = None,
    query_field: QueryField = None,
    weights: WeightsFile = None,
    method: MethodOfIndex = None,
    utility: Annotated[str, option("which utility of the bank belongs to the queries")] = "eval",
    search: Annotated[
        bool, option("choose k and weight decay by the bank, as in the paper, and measure that cross-fitted")
    ] = False,
    out: Annotated[Any, place_option("where to save the weights of --search", "--out")] = None,
    format: Annotated[str, option("table or json")] = "table",
    uncalibrated: Uncalibrated = False,
) -> None:
    """Measure scores by retrained models: the LDS of a bank, or what happens without the top training examples.

    With --bank: the linear datamodeling score (LDS), how well scores predict models retrained on parts of the data,
    with and without weights, beside BM25 (texts), hidden-state similarity and the training loss. The last column is
    the paired difference. unde.evaluate.Bank.run makes a bank.

    With --counterfactual: models are trained without the top k training examples, and without k random ones. Removals
    of a query that flip its prediction are counted. An interrupted run resumes.

    Examples:

    `unde evaluate --index runs/idx --queries eval.jsonl --bank runs/bank.npz --weights weights.json`

    `unde evaluate my_project.setup:make --index runs/idx --bank runs/bank.npz --weights weights.json`

    `unde evaluate my_project.setup:make --index runs/idx --bank runs/bank.npz --search --out weights.json`

    `unde evaluate my_project.setup:make --index runs/idx --counterfactual --k 10 --k 50 --first 5`
    """
    from unde.cli.learn import training
    from unde.cli.project import Project, cached_scores, load_weights
    from unde.evaluate import Bank, compare, lds, paired
    from unde.evaluate.baselines import setup_baselines
    from unde.scoring.data_splits import shared

    check_format(format, "table", "json")
    if removal.of not in ("query", "set"):
        raise unknown("--of", removal.of, ("query", "set"))
    if removal.counterfactual == (bank is not None):
        raise UndeError(
            "give --bank FILE for the LDS, or --counterfactual to remove examples: one of the two"
        )
    if search and (weights is not None or removal.counterfactual):
        raise UndeError(
            "--search learns weights of its own by a bank: leave out --weights and --counterfactual"
        )
    if out is not None:
        if not search:
            raise UndeError("--out saves the weights of --search: add --search, or leave it out")
        check_out(out)
    project = Project(model.remembered(index, method), index=index, evaluate=queries, query_field=query_field)
    rows = project.disjoint_queries("eval")
    opened = project.index(index, worker.executor(), uncalibrated=uncalibrated)
    if removal.counterfactual:
        train = training(project, "retrain", **vars(tuning))
        removal.run(project, opened, rows, method, weights, train, worker.executor(), format)
        return
    scores = cached_scores(opened, rows, method)
    retrained = Bank.open(bank)
    if utility not in retrained.utility:
        raise unknown("utility of the bank", utility, retrained.utility)
    masks, values = retrained.masks, retrained.utility[utility]
    calibration = opened.calibration if method is None else None
    seen = [] if calibration is None else shared(scores.query_digests, calibration.query_digests)
    if seen:
        raise UndeError(
            f"the index was calibrated on {len(seen)} of these queries: evaluate on other ones, or leave the "
            "calibration out (--uncalibrated)"
        )
    if search:
        _search(scores, masks, values, out, format)
        return
    learned: Any = scores.default_weights
    if weights is not None:
        learned = load_weights(weights, scores.groups, scores.query_digests)
    if learned is None:
        estimates = {UNWEIGHTED: lds(scores.total(), masks, values)}
    else:
        both = compare(scores, learned, masks, values)
        estimates = {UNWEIGHTED: both.unweighted, "weighted": both.weighted, "difference": both.difference}
    way = UNWEIGHTED if learned is None else "weighted"
    best = estimates[way]
    draws = 0 if best.subset_bootstrap is None else len(best.subset_bootstrap.means)
    baselines = {
        name: lds(baseline, masks, values, bootstrap=draws)
        for name, baseline in setup_baselines(project.setup, rows).items()
    }
    differences = {name: paired(baseline, best) for name, baseline in baselines.items()}
    if format == "json":
        summary: dict[str, Any] = {n: e.as_dict() for n, e in estimates.items()}
        summary["baselines"] = {
            name: e.as_dict() | {"difference": differences[name].as_dict()} for name, e in baselines.items()
        }
        console.echo(json.dumps(summary, indent=1))
    else:
        signed = {
            n: f"{100 * d.mean:+.2f} ± {100 * d.ci95:.2f}".replace("-", "−") for n, d in differences.items()
        }
        lines = [
            [n, f"{100 * e.mean:.2f}", f"± {100 * e.ci95:.2f}", signed.get(n, "")]
            for n, e in (estimates | baselines).items()
        ]
        console.show_table("LDS (%)", ["", "mean", "95 % CI", f"{way} − baseline"], lines)
    for name, difference in differences.items():
        if difference.mean + difference.ci95 < 0:
            console.note(
                f"the baseline {name} predicts the retrained models better than {scores.method.name}: "
                f"LDS {100 * baselines[name].mean:.1f} against {100 * best.mean:.1f}"
            )


def _search(scores: GroupScores, masks: Any, utility: Any, out: Any, format: str) -> None:
    """Print what the paper's search finds on these queries, and save its weights."""
    from unde.evaluate import search

    result = search(scores, (masks, utility))
    if format == "json":
        console.echo(json.dumps(result.as_dict(), indent=1))
    else:
        console.echo(f"{result.table()}\n{result}")
    if out is not None:
        result.weights.save(out)
        console.note(f"{out}: {result.weights}. They were learned on these queries: use them on other ones")
