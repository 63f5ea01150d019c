"""The command line: unde demo | plan | build | learn | attribute | evaluate | report | bench."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from unde import __version__, console
from unde.errors import UndeError
from unde.integrations.options import (
    PANEL,
    Data,
    HFModel,
    Queries,
    QueryField,
    SeqLen,
    TextField,
    source_of,
)
from unde.integrations.source import Source
from unde.learn_command import learn
from unde.options import (
    METHODS,
    BatchSize,
    Device,
    IndexPath,
    MethodName,
    NoTrust,
    Target,
    WeightsFile,
    WeightsFiles,
)
from unde.pages import show_top
from unde.plan_command import plan
from unde.project import Project, remembered

app = typer.Typer(
    name="unde",
    help="Which training examples made a trained model do that?\n\n"
    "A Hugging Face language model needs no Python: `unde build --hf-model DIR --data train.jsonl --out runs/idx`, "
    'then `unde attribute --index runs/idx --query "some text"`.\n\n'
    "Any other model is named as web servers name apps: my_project.setup:make, where make() returns an unde.Setup.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="folder for the page, the index and the weights")] = Path("demo"),
    method: Annotated[str, typer.Option(help="tracin or trak")] = "trak",
    seed: Annotated[int, typer.Option(help="of the training and the projection")] = 0,
) -> None:
    """Train a small ResNet on real digits and see which of them mattered, in a page.

    Example: `unde demo --out demo` writes demo/report.html
    """
    from unde.demo.run import run

    typer.echo(f"Open {run(out, method, seed).resolve()} in a browser.")


app.command()(plan)


@app.command()
def build(
    out: Annotated[Path, typer.Option("--out", help="folder for the index; a half-built one is finished")],
    target: Target = None,
    hf_model: HFModel = None,
    data: Data = None,
    text_field: TextField = None,
    seq_len: SeqLen = None,
    method: Annotated[str, typer.Option(help=METHODS)] = "trak",
    projection: Annotated[
        str | None,
        typer.Option(help="kron(16), pca(16), sjlt(4096), dense(512) or none (default: kron(16))"),
    ] = None,
    groups: Annotated[str, typer.Option(help="layer, tensor or consecutive(128)")] = "layer",
    exclude: Annotated[
        list[str] | None, typer.Option(help="regex of parameters to leave out; repeatable")
    ] = None,
    batch_size: BatchSize = 32,
    num_workers: Annotated[int, typer.Option(help="processes that read the data")] = 0,
    device: Device = None,
    store_dtype: Annotated[str, typer.Option(help="float32, float16 or bfloat16")] = "float32",
    memory: Annotated[
        str, typer.Option(help="budget for what is computed at once, besides the model")
    ] = "2GB",
    seed: Annotated[int, typer.Option(help="of the random projection")] = 0,
    on_bad: Annotated[str, typer.Option(help="NaN gradients: error, or skip and record")] = "error",
) -> None:
    """Compute the gradient features of the training data.

    Examples:

    `unde build --hf-model ./my-gpt2 --data train.jsonl --seq-len 512 --out runs/idx`

    `unde build my_project.setup:make --out runs/idx --method logra --projection "kron(64)"`
    """
    from dataclasses import replace

    from unde import methods
    from unde.index import Index

    chosen = methods.parse(method)
    if projection is not None:
        chosen = replace(chosen, projection=projection)
    project = Project(target, source_of(hf_model, data, text_field, seq_len), device=device)
    setup = project.setup
    index = Index.build(
        setup.model,
        setup.task,
        setup.train_data,
        out,
        method=chosen,
        groups=groups,
        exclude=exclude or (),
        collate=setup.collate,
        ids=setup.ids,
        batch_size=batch_size,
        num_workers=num_workers,
        store_dtype=store_dtype,
        memory=memory,
        seed=seed,
        on_bad=on_bad,
    )
    (project.source or Source(target=target)).remember(out)
    typer.echo(f"{out}: {len(index):,} examples in {len(index.groups)} groups")


app.command()(learn)


@app.command()
def attribute(
    index: IndexPath,
    target: Target = None,
    query: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="a text to ask about; repeatable", rich_help_panel=PANEL),
    ] = None,
    queries: Annotated[
        str | None,
        typer.Option(help="a file of texts as in --data; with MODULE:FUNCTION: eval (the default) or learn"),
    ] = None,
    hf_model: HFModel = None,
    data: Data = None,
    text_field: TextField = None,
    seq_len: SeqLen = None,
    query_field: QueryField = None,
    weights: WeightsFile = None,
    method: MethodName = None,
    top: Annotated[int, typer.Option(help="how many training examples for each query")] = 5,
    opponents: Annotated[
        bool, typer.Option("--opponents", help="the lowest scores instead of the highest")
    ] = False,
    format: Annotated[str, typer.Option(help="table, json or csv")] = "table",
    device: Device = None,
) -> None:
    """Print the training examples that mattered most for each query.

    Examples:

    `unde attribute --index runs/idx --query "The state of the union is strong."`

    `unde attribute my_project.setup:make --index runs/idx --weights weights.json --format csv > top.csv`
    """
    from unde.errors import unknown

    if format not in ("table", "json", "csv"):
        raise unknown("format", format, ("table", "json", "csv"))
    if query and queries:
        raise UndeError("--query and --queries: give one of the two")
    source = source_of(hf_model, data, text_field, seq_len)
    target = target or remembered(index, source)
    if target is None and not query and not queries:
        raise UndeError('nothing to attribute: give --query "some text", or --queries FILE.jsonl')
    texts = query or (Path(queries) if queries and target is None else None)
    project = Project(target, source, index=index, evaluate=texts, query_field=query_field, device=device)
    role = queries if queries and target is not None else "eval"
    scores = project.scores_of_anything(index, method) if query else project.scores(index, role, method)
    best = scores.top(top, project.weights(weights, scores), largest=not opponents)
    rows = [
        {"query": q, "rank": r + 1, "id": name, "index": int(i), "score": float(v)}
        for q in range(len(scores))
        for r, (i, v, name) in enumerate(zip(best.indices[q], best.values[q], best.ids[q]))
    ]
    if format == "json":
        json.dump(rows, sys.stdout, indent=1)
        sys.stdout.write("\n")
    elif format == "csv":
        writer = csv.DictWriter(sys.stdout, ["query", "rank", "id", "index", "score"])
        writer.writeheader()
        writer.writerows(rows)
    else:
        show_top(
            project.setup, project.queries(role), None if query else project.names(role), best, opponents
        )


@app.command()
def evaluate(
    index: IndexPath,
    bank: Annotated[Path, typer.Option(help="file of a retraining bank (unde.evaluate.Bank)")],
    target: Target = None,
    queries: Queries = None,
    hf_model: HFModel = None,
    data: Data = None,
    text_field: TextField = None,
    seq_len: SeqLen = None,
    query_field: QueryField = None,
    weights: WeightsFile = None,
    method: MethodName = None,
    utility: Annotated[str, typer.Option(help="which utility of the bank belongs to the queries")] = "eval",
    format: Annotated[str, typer.Option(help="table or json")] = "table",
    device: Device = None,
) -> None:
    """Measure the linear datamodeling score (LDS) of the queries, with and without weights.

    How well scores predict models that were retrained on parts of the data; such a bank is made with
    unde.evaluate.Bank.run.

    Examples:

    `unde evaluate --index runs/idx --queries eval.jsonl --bank runs/bank.npz --weights weights.json`

    `unde evaluate my_project.setup:make --index runs/idx --bank runs/bank.npz --weights weights.json`
    """
    from unde.errors import unknown
    from unde.evaluate import Bank, compare, lds

    if format not in ("table", "json"):
        raise unknown("format", format, ("table", "json"))
    source = source_of(hf_model, data, text_field, seq_len)
    target = target or remembered(index, source)
    project = Project(target, source, index=index, evaluate=queries, query_field=query_field, device=device)
    scores = project.scores(index, "eval", method)
    retrained = Bank.open(bank)
    if utility not in retrained.utility:
        raise unknown("utility of the bank", utility, retrained.utility)
    masks, values = retrained.masks, retrained.utility[utility]
    learned = project.weights(weights, scores)
    if learned is None:
        found = {"unweighted": lds(scores.total(), masks, values)}
    else:
        both = compare(scores, learned, masks, values)
        found = {"unweighted": both.unweighted, "weighted": both.weighted, "difference": both.difference}
    if format == "json":
        typer.echo(json.dumps({n: e.as_dict() for n, e in found.items()}, indent=1))
    else:
        console.show_table(
            "LDS (%)",
            ["", "mean", "95 % CI"],
            [[n, f"{100 * e.mean:.2f}", f"± {100 * e.ci95:.2f}"] for n, e in found.items()],
        )


@app.command()
def report(
    index: IndexPath,
    target: Target = None,
    queries: Queries = None,
    hf_model: HFModel = None,
    data: Data = None,
    text_field: TextField = None,
    seq_len: SeqLen = None,
    query_field: QueryField = None,
    out: Annotated[Path, typer.Option("--out", help="the page to write")] = Path("report.html"),
    weights: WeightsFiles = None,
    method: MethodName = None,
    first: Annotated[int, typer.Option(help="how many of the queries to show")] = 12,
    top: Annotated[int, typer.Option(help="training examples on each side")] = 5,
    no_trust: NoTrust = False,
    device: Device = None,
) -> None:
    """Write one self-contained HTML page: queries, their proponents and opponents, the weights, and how far to trust.

    Examples:

    `unde report --index runs/idx --queries eval.jsonl --weights weights.json --out report.html`

    `unde report my_project.setup:make --index runs/idx --weights weights.json --out report.html`

    `unde report my_project.setup:make --index runs/idx --weights subject=w1.json --weights style=w2.json`
    """
    source = source_of(hf_model, data, text_field, seq_len)
    target = target or remembered(index, source)
    project = Project(target, source, index=index, evaluate=queries, query_field=query_field, device=device)
    path = project.report(index, out, weights or (), method, first, top, not no_trust)
    typer.echo(f"Open {path.resolve()} in a browser.")


@app.command()
def bench(
    target: Target = None,
    hf_model: HFModel = None,
    data: Data = None,
    text_field: TextField = None,
    seq_len: SeqLen = None,
    rank: Annotated[int, typer.Option(help="rank of the two-sided projection")] = 16,
    batch_size: BatchSize = 32,
    runs: Annotated[int, typer.Option(help="how often each is timed, in turns")] = 15,
) -> None:
    """Measure the cost of features on your model, as a ratio to one plain training pass.

    Example: `unde bench my_project.setup:make --rank 16`, or with --hf-model and --data
    """
    from unde.bench import measure

    setup = Project(target, source_of(hf_model, data, text_field, seq_len)).setup
    typer.echo(measure(setup, rank=rank, batch_size=batch_size, runs=runs))


def _version(value: bool) -> None:
    if value:
        typer.echo(f"unde {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="print it")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run a command; an error is one clear line, without a traceback."""
    try:
        app()
    except UndeError as e:
        console.fail(str(e))
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        console.fail("interrupted; run the same command again to go on where it stopped")
        raise SystemExit(130) from None
