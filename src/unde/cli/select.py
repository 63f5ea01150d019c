"""`unde select`: choose fine-tuning data for targets."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from unde import console
from unde.cli.options import (
    IndexPath,
    MethodOfIndex,
    ModelOptions,
    QueryField,
    WorkerOptions,
    hf_option,
    one_of,
    option,
    place_option,
)
from unde.errors import UndeError, unknown
from unde.store.remote import StorePath, exists, is_local

if TYPE_CHECKING:
    from unde.cli.project import Project
    from unde.data import Rows
    from unde.index.select import Selection

STRATEGIES = ("max", "mean", "round-robin")  # of unde.index.select, which imports torch
_SHOWN = 5  # chosen examples that are printed


def select(
    index: IndexPath,
    model: ModelOptions,
    worker: WorkerOptions,
    budget: Annotated[
        str, option("how many examples, or which share of the pool: 500, 5% or 0.05", metavar="NUMBER|SHARE")
    ],
    targets: Annotated[
        list[str] | None,
        option(
            "texts of what the model is to become better at, as in --data; repeatable; with MODULE:FUNCTION: learn "
            "(the default, its learn_queries) or eval",
            "--target",
            metavar="[NAME=]FILE",
        ),
    ] = None,
    strategy: Annotated[
        str,
        option(
            "max: by the best score for any target; mean: by the mean; round-robin: targets choose in turns",
            autocompletion=one_of(*STRATEGIES),
        ),
    ] = "max",
    method: MethodOfIndex = None,
    duplicates: Annotated[
        float, option("cosine of features from which an example is a near duplicate of one chosen before")
    ] = 0.95,
    out: Annotated[
        Any, place_option("what was chosen: a .jsonl file, or a folder for the datasets library", "--out")
    ] = None,
    overwrite: Annotated[bool, option("replace --out if it is there", "--overwrite")] = False,
    compare: Annotated[
        bool,
        option(
            "train on the choice, on as many random examples and on those of BM25, and measure the loss on half of "
            "each target's queries, which are kept out of the choice",
            "--compare",
        ),
    ] = False,
    seeds: Annotated[int, option("trainings on each choice, with --compare")] = 3,
    seed: Annotated[int, option("of the random examples and trainings, with --compare")] = 0,
    base: Annotated[
        str | None, hf_option("checkpoint that --compare fine-tunes, such as a small model", metavar="DIR")
    ] = None,
    epochs: Annotated[
        float | None, hf_option("of these fine-tunings (default: as Trainer recorded, or 3)")
    ] = None,
    lr: Annotated[float | None, hf_option("their learning rate (default: as recorded, or 5e-5)")] = None,
    batch_size: Annotated[
        int | None, hf_option("their examples in a step (default: as recorded, or 8)")
    ] = None,
    query_field: QueryField = None,
) -> None:
    """Choose the training data that are worth most for some targets, in the manner of LESS.

    The index is that of the pool to choose from. Build it from checkpoints of a short training on some of the pool:
    `unde build --checkpoints DIR`.

    Examples:

    `unde select --index runs/pool --target questions.jsonl --budget 5% --out chosen.jsonl`

    `unde select --index runs/pool --target law=law.jsonl --target chat=chat.jsonl --budget 500 --strategy round-robin`

    `unde select my_project.setup:make --index runs/idx --budget 30 --compare`
    """
    from unde.cli.project import Project
    from unde.index.select import parse_budget
    from unde.index.select import select as choose

    if strategy not in STRATEGIES:
        raise unknown("--strategy", strategy, STRATEGIES)
    _check_out(out, overwrite)
    model = model.remembered(index)
    named = _named(targets or [], model.target)
    texts = None if model.target is not None else _read_targets(named, query_field or model.text_field)
    project = Project(model, index=index, evaluate=texts, query_field=query_field)
    queries = _target_rows(project, named)
    held_out: Mapping[str, Rows] = {}
    if compare:
        queries, held_out = _halves(queries)
    train = (
        _training(project, base=base, epochs=epochs, lr=lr, batch_size=batch_size)
        if compare
        else _refuse_training_options(base=base, epochs=epochs, lr=lr, batch_size=batch_size)
    )
    opened = project.index(index, worker.executor())
    parse_budget(budget, len(opened))
    chosen = choose(opened, queries, budget, strategy, method=method, duplicates=duplicates)
    _show(chosen, project)
    if out is not None:
        records = _records(chosen, project)
        _write(out, records)
        console.echo(f"{out}: {console.counted(len(records), 'record')}")
    if compare:
        _compare(chosen, project, queries, held_out, train, budget, strategy, seeds, seed, worker)
    elif out is not None:
        console.note("next: train on it; --compare tells whether it beats a random choice and BM25")
    else:
        console.note("next: --out chosen.jsonl writes the data to train on; --compare tries it")
    opened.close()


def _check_out(out: StorePath | None, overwrite: bool) -> None:
    """Raise where what is chosen cannot be written."""
    if out is None:
        if overwrite:
            raise UndeError("--overwrite without --out: there is no file to replace")
        return
    if out.suffix not in (".jsonl", ""):
        raise UndeError(f"--out {out}: expected a name that ends in .jsonl, or a folder for datasets")
    if not out.suffix and not is_local(out):
        raise UndeError(
            f"--out {out}: a folder for datasets is written on this machine, a .jsonl file anywhere"
        )
    if is_local(out) and not out.absolute().parent.is_dir():
        raise UndeError(f"no folder {out.parent} for --out {out}: make it, or write elsewhere")
    if exists(out, links=True) and not overwrite:
        raise UndeError(f"--out {out} is there already: --overwrite replaces it")


def _named(target: list[str], function: str | None) -> dict[str, str]:
    """{name: file}, or {role: role} of a MODULE:FUNCTION."""
    named: dict[str, str] = {}
    for text in target:
        name, equals, file = text.partition("=")
        name, file = (name, file) if equals else (Path(text).name.partition(".")[0], text)
        if not name or not file or name in named:
            raise UndeError(f"--target {text}: expected NAME=FILE with another name for each")
        named[name] = file
    if function is None and not named:
        raise UndeError(
            "no target: give texts of what the model is to become better at, --target questions.jsonl"
        )
    for name, role in named.items():
        if function is not None and role not in ("learn", "eval"):
            raise UndeError(
                f"--target {name}={role}: {function} brings its own queries, expected learn or eval; files go with "
                "--hf-model"
            )
    return named


def _read_targets(named: Mapping[str, str], field: str | None) -> list[dict[str, Any]]:
    """The records of all targets, called "target/record"."""
    from unde.integrations.documents import columns_of, read_records

    records = []
    for name, file in named.items():
        columns = columns_of(file) or [field or "text"]
        here = [r.fields | {"id": f"{name}/{r.name}"} for r in read_records(file, columns)]
        if not here:
            raise UndeError(f"{file} holds no text: target {name!r} needs some, such as 10 to 100")
        records += here
    return records


def _target_rows(project: Project, named: Mapping[str, str]) -> dict[str, Rows]:
    if project.source is not None:
        rows = project.queries("eval")
        ids = rows.data.ids
        return {
            name: _some(rows, [i for i, text in enumerate(ids) if text.startswith(f"{name}/")])
            for name in named
        }
    default = "learn" if project.setup.learn_queries is not None else "eval"
    return {name: project.disjoint_queries(role) for name, role in (named or {default: default}).items()}


def _some(rows: Rows, which: list[int]) -> Rows:
    """Rows that keep their ids."""
    some = rows.subset(which)
    some.data.ids = [rows.data.ids[i] for i in which]
    return some


def _halves(queries: Mapping[str, Rows]) -> tuple[dict[str, Rows], dict[str, Rows]]:
    """Queries to choose for, and others to measure on: every second one, pieces of a text together."""
    halves: tuple[dict[str, Rows], dict[str, Rows]] = {}, {}
    for name, rows in queries.items():
        ids = getattr(rows.data, "ids", None) or range(len(rows))
        texts = [str(i).rpartition(":")[0] or i for i in ids]
        number = {text: k for k, text in enumerate(dict.fromkeys(texts))}
        if len(number) < 2:
            raise UndeError(
                f"target {name!r} has one query: --compare needs two or more, half of them to measure on"
            )
        for half, of in enumerate(halves):
            of[name] = rows.subset([i for i, text in enumerate(texts) if number[text] % 2 == half])
    return halves


def _training(project: Project, **options: Any) -> Any:
    from unde.cli.learn import training

    return training(project, "choice", **options)


def _refuse_training_options(**options: Any) -> None:
    given = [name for name, value in options.items() if value is not None]
    if given:
        raise UndeError(f"--{given[0].replace('_', '-')} goes with --compare, which trains")


def _show(chosen: Selection, project: Project) -> None:
    console.show_table(
        f"{len(chosen):,} of {chosen.scores.shape[1]:,} examples; {chosen.duplicates:,} near duplicates passed over",
        ["target", "chosen for it", "mean score of all chosen", "of the pool", "best"],
        chosen.summary(),
    )
    rows = project.setup.rows(project.setup.train_data)
    first = [
        [str(r["rank"]), str(r["id"]), r["target"], f"{r['score']:+.3f}"] for r in _head(chosen.rows().rows())
    ]
    texts = [project.setup.text(rows[i]) for i in chosen.indices[:_SHOWN].tolist()]
    known = all(text is not None for text in texts)
    if known:
        first = [[*row, " ".join(str(text).split())[:80]] for row, text in zip(first, texts)]
    console.show_table("first", ["", "id", "target", "score", *(["text"] if known else [])], first)


def _head(rows: Any) -> list[dict[str, Any]]:
    return [row for row, _ in zip(rows, range(_SHOWN))]


def _records(chosen: Selection, project: Project) -> list[dict[str, Any]]:
    """What is written of each chosen example: its record in the data; of a text its piece, with the other columns.

    Conversations and prompts are written whole, and once.
    """
    setup, source = project.setup, project.source
    marks = [
        {"unde_rank": r["rank"], "unde_target": r["target"], "unde_score": r["score"]}
        for r in chosen.rows().rows()
    ]
    rows, indices = setup.rows(setup.train_data), chosen.indices.tolist()
    ids = [i if setup.ids is None else setup.ids[i] for i in indices]
    field = "text" if source is None or source.text_field is None else source.text_field
    records = {} if source is None else _source_records(str(source.data), field)
    out: dict[Any, dict[str, Any]] = {}
    for i, name, mark in zip(indices, ids, marks):
        document = name if str(name) in records else str(name).rpartition(":")[0]
        record = records.get(str(document), {})
        piece = document != name and isinstance(record.get(field), str)  # of a plain text
        if record and not (piece and source is not None and source.target_field is None):
            out.setdefault(document, record | mark)
            continue
        text = setup.text(rows[i])
        out[name] = record | {"id": name} | ({} if text is None else {field: text}) | mark
    return list(out.values())


def _source_records(data: str, field: str) -> dict[str, dict[str, Any]]:
    from unde.integrations.documents import columns_of, read_records

    return {r.name: dict(r.fields) for r in read_records(data, columns_of(data) or [field])}


def _write(out: StorePath, records: list[dict[str, Any]]) -> None:
    from unde.store.files import write_bytes

    if out.suffix == ".jsonl":
        text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
        write_bytes(out, text.encode("utf-8", "surrogatepass"))
        return
    from unde.integrations import require

    require("datasets").Dataset.from_list(records).save_to_disk(str(out))


def _compare(
    chosen: Selection,
    project: Project,
    queries: Mapping[str, Rows],
    held_out: Mapping[str, Rows],
    train: Any,
    budget: str,
    strategy: str,
    seeds: int,
    seed: int,
    worker: WorkerOptions,
) -> None:
    """Train on the choice and on the controls, and print the losses on the held-out queries."""
    from unde.evaluate import TargetUtility, compare_choices
    from unde.index.select import choose_by_words

    setup = project.setup
    choices: dict[str, Any] = {"unde select": chosen.indices}
    texts = setup.texts(setup.rows(setup.train_data))
    words = {name: setup.texts(rows) for name, rows in queries.items()}
    known = {name: some for name, some in words.items() if some is not None}
    if texts is not None and len(known) == len(words):
        try:
            choices["BM25"] = choose_by_words(texts, known, len(chosen), strategy)
        except UndeError as e:
            console.note(f"no BM25: {e}")
    result = compare_choices(
        choices, train, TargetUtility(setup.task, held_out), chosen.scores.shape[1], seeds=seeds, seed=seed,
        executor=worker.executor(), name=f"select {budget} of {project.name}",
    )  # fmt: skip
    head = [cell for name in result.targets for cell in (f"loss, {name}", "gain over random")]
    console.show_table(
        f"trained on each, {seeds} seeds; 95 % intervals", ["choice", "examples", *head], result.rows()
    )
    for name in result.targets:
        gain = result.gain("unde select", name)
        if gain.mean <= (gain.ci95_total or gain.ci95):
            console.note(f"for {name}, the choice is not significantly better than a random one")
