"""`unde report`: one page of what an index says about some queries."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from unde import console
from unde.cli.options import (
    Data,
    Device,
    HFModel,
    IndexPath,
    MethodOfIndex,
    NoTrust,
    Queries,
    QueryField,
    SeqLen,
    Target,
    TextField,
    TrustRemoteCode,
    WeightsFiles,
    path_option,
    source_of,
)
from unde.cli.project import Project, kept_scores, remembered, weights_in
from unde.data import Rows
from unde.errors import UndeError
from unde.report.contributors import checked
from unde.report.of_index import UNWEIGHTED, page_of
from unde.store.remote import Place, place


def report(
    index: IndexPath,
    target: Target = None,
    queries: Queries = None,
    hf_model: HFModel = None,
    data: Data = None,
    text_field: TextField = None,
    seq_len: SeqLen = None,
    trust_remote_code: TrustRemoteCode = False,
    query_field: QueryField = None,
    out: Annotated[Path, path_option("--out", help="the page to write")] = Path("report.html"),
    weights: WeightsFiles = None,
    method: MethodOfIndex = None,
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
    source = source_of(hf_model, data, text_field, seq_len, trust_remote_code)
    target = target or remembered(index, source)
    project = Project(target, source, index=index, evaluate=queries, query_field=query_field, device=device)
    files, setup = named_files(weights or ()), project.setup
    everything = project.queries_apart("eval")
    known = checked(
        setup.contributors or {},
        (len(everything), len(Rows(setup.train_data))),
        "each of the setup's eval_queries and training examples",
    )
    shown = Rows([everything[q] for q in range(min(first, len(everything)))], everything.collate)
    opened = project.index(index)
    scores = kept_scores(opened, shown, method)
    page = page_of(
        opened,
        setup,
        shown,
        scores,
        {name: weights_in(file, scores) for name, file in files.items()},
        title=f"What made {Path(project.name.partition(':')[0]).name} do that?",
        count=top,
        names=project.names("eval"),
        contributors={name: flags[: len(shown)] for name, flags in known.items()},
        trust=not no_trust,
    )
    console.echo(f"Open {page.write(out).resolve()} in a browser.")


def named_files(given: Sequence[str]) -> dict[str, Place]:
    """Files of weights by name: one path is "weighted", several are NAME=FILE each.

    >>> named_files(["subject=w1.json", "style=w2.json"])["style"].name
    'w2.json'
    """
    files: dict[str, Place] = {}
    for text in given:
        name, equals, file = text.partition("=")
        # A path may hold the sign too, as in runs/lr=0.1/w.json.
        if not equals or os.sep in name or os.path.exists(text):
            if len(given) > 1:
                raise UndeError(
                    f"--weights {text} has no name: with several, name each, as in --weights subject={text}"
                )
            name, file = "weighted", text
        if not name or not file:
            raise UndeError(f"cannot read --weights {text}: expected FILE or NAME=FILE, such as style=w.json")
        if name in files:
            raise UndeError(f"--weights {name}=… is given twice: give each set a name of its own")
        if name == UNWEIGHTED:
            raise UndeError(
                f"--weights {text}: {UNWEIGHTED!r} names the scores without weights, choose another"
            )
        files[name] = place(file)
    return files
