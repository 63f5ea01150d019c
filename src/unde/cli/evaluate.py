"""`unde evaluate`: do scores predict models that were retrained?"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unde import console
from unde.cli.options import (
    IndexPath,
    MethodOfIndex,
    ModelOptions,
    Queries,
    QueryField,
    Uncalibrated,
    WeightsFile,
    WorkerOptions,
    check_format,
    place_option,
)
from unde.errors import UndeError, unknown

if TYPE_CHECKING:
    from unde.evaluate import Estimate
    from unde.index.calibration import Calibration

UNWEIGHTED = "unweighted"


def evaluate(
    index: IndexPath,
    bank: Annotated[Any, place_option(help="file of a retraining bank (unde.evaluate.Bank)")],
    model: ModelOptions,
    worker: WorkerOptions,
    queries: Queries = None,
    query_field: QueryField = None,
    weights: WeightsFile = None,
    method: MethodOfIndex = None,
    utility: Annotated[str, typer.Option(help="which utility of the bank belongs to the queries")] = "eval",
    format: Annotated[str, typer.Option(help="table or json")] = "table",
    uncalibrated: Uncalibrated = False,
) -> None:
    """Measure the linear datamodeling score (LDS) of the queries, with and without weights, beside simple baselines.

    The LDS measures how well scores predict models retrained on parts of the data. unde.evaluate.Bank.run makes such a
    bank. Baselines are BM25 (texts), hidden-state similarity and the training loss; the last column
    is the paired difference.

    Examples:

    `unde evaluate --index runs/idx --queries eval.jsonl --bank runs/bank.npz --weights weights.json`

    `unde evaluate my_project.setup:make --index runs/idx --bank runs/bank.npz --weights weights.json`
    """
    from unde.cli.project import Project, cached_scores, load_weights
    from unde.evaluate import Bank, compare, lds, paired
    from unde.evaluate.baselines import setup_baselines

    check_format(format, "table", "json")
    project = Project(model.remembered(index), index=index, evaluate=queries, query_field=query_field)
    rows = project.disjoint_queries("eval")
    opened = project.index(index, worker.executor(), uncalibrated=uncalibrated)
    scores = cached_scores(opened, rows, method)
    retrained = Bank.open(bank)
    if utility not in retrained.utility:
        raise unknown("utility of the bank", utility, retrained.utility)
    masks, values = retrained.masks, retrained.utility[utility]
    refuse_calibrated_on(scores.query_digests, opened.calibration if method is None else None)
    learned: Any = scores.default_weights if weights is None else load_weights(weights, scores)
    if learned is None:
        estimates = {UNWEIGHTED: lds(scores.total(), masks, values)}
    else:
        both = compare(scores, learned, masks, values)
        estimates = {UNWEIGHTED: both.unweighted, "weighted": both.weighted, "difference": both.difference}
    best = estimates.get("weighted", estimates[UNWEIGHTED])
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
        way = "weighted" if learned is not None else UNWEIGHTED
        lines = [[n, f"{100 * e.mean:.2f}", f"± {100 * e.ci95:.2f}", ""] for n, e in estimates.items()]
        lines += [
            [n, f"{100 * e.mean:.2f}", f"± {100 * e.ci95:.2f}", _signed(differences[n])]
            for n, e in baselines.items()
        ]
        console.show_table("LDS (%)", ["", "mean", "95 % CI", f"{way} − baseline"], lines)
    for name, difference in differences.items():
        if difference.mean + difference.ci95 < 0:
            console.note(
                f"the baseline {name} predicts the retrained models better than {scores.method.name}: "
                f"LDS {100 * baselines[name].mean:.1f} against {100 * best.mean:.1f}"
            )


def refuse_calibrated_on(digests: Sequence[str], calibration: Calibration | None) -> None:
    """Raise if queries to evaluate on are among those that chose the setting."""
    from unde.scoring.data_splits import shared

    seen = [] if calibration is None else shared(digests, calibration.query_digests)
    if seen:
        raise UndeError(
            f"the index was calibrated on {len(seen)} of these queries: evaluate on other ones, or leave the "
            "calibration out (--uncalibrated)"
        )


def _signed(difference: Estimate) -> str:
    return f"{100 * difference.mean:+.2f} ± {100 * difference.ci95:.2f}".replace("-", "−")
