"""`unde evaluate`: do scores predict models that were retrained?"""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from unde import console
from unde.cli.options import (
    Data,
    Device,
    Engine,
    HFModel,
    IndexPath,
    MethodOfIndex,
    Queries,
    QueryField,
    SeqLen,
    Target,
    TextField,
    Threads,
    TrustRemoteCode,
    WeightsFile,
    Workers,
    check_format,
    place_option,
    source_of,
)
from unde.cli.project import Project, kept_scores, remembered, weights_in
from unde.errors import unknown
from unde.evaluate import Bank, compare, lds
from unde.execution import named


def evaluate(
    index: IndexPath,
    bank: Annotated[Any, place_option(help="file of a retraining bank (unde.evaluate.Bank)")],
    target: Target = None,
    queries: Queries = None,
    hf_model: HFModel = None,
    data: Data = None,
    text_field: TextField = None,
    seq_len: SeqLen = None,
    trust_remote_code: TrustRemoteCode = False,
    query_field: QueryField = None,
    weights: WeightsFile = None,
    method: MethodOfIndex = None,
    utility: Annotated[str, typer.Option(help="which utility of the bank belongs to the queries")] = "eval",
    format: Annotated[str, typer.Option(help="table or json")] = "table",
    device: Device = None,
    engine: Engine = "serial",
    threads: Threads = None,
    workers: Workers = None,
) -> None:
    """Measure the linear datamodeling score (LDS) of the queries, with and without weights.

    How well scores predict models that were retrained on parts of the data; such a bank is made with
    unde.evaluate.Bank.run.

    Examples:

    `unde evaluate --index runs/idx --queries eval.jsonl --bank runs/bank.npz --weights weights.json`

    `unde evaluate my_project.setup:make --index runs/idx --bank runs/bank.npz --weights weights.json`
    """
    check_format(format, "table", "json")
    source = source_of(hf_model, data, text_field, seq_len, trust_remote_code)
    target = target or remembered(index, source)
    project = Project(target, source, index=index, evaluate=queries, query_field=query_field, device=device)
    asked = project.queries_apart("eval")
    scores = kept_scores(project.index(index, named(engine, threads=threads, workers=workers)), asked, method)
    retrained = Bank.open(bank)
    if utility not in retrained.utility:
        raise unknown("utility of the bank", utility, retrained.utility)
    masks, values = retrained.masks, retrained.utility[utility]
    if weights is None:
        found = {"unweighted": lds(scores.total(), masks, values)}
    else:
        both = compare(scores, weights_in(weights, scores), masks, values)
        found = {"unweighted": both.unweighted, "weighted": both.weighted, "difference": both.difference}
    if format == "json":
        console.echo(json.dumps({n: e.as_dict() for n, e in found.items()}, indent=1))
    else:
        console.show_table(
            "LDS (%)",
            ["", "mean", "95 % CI"],
            [[n, f"{100 * e.mean:.2f}", f"± {100 * e.ci95:.2f}"] for n, e in found.items()],
        )
