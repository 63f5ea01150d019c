"""`unde serve`: the live page on an open index."""

from __future__ import annotations

import importlib
from contextlib import closing, suppress
from pathlib import Path
from typing import Annotated

import typer

from unde import console
from unde.cli.options import (
    IndexPath,
    ModelOptions,
    Queries,
    QueryField,
    Uncalibrated,
    WeightsFiles,
    weight_paths,
)
from unde.errors import UndeError

PORT = 8765


def serve(
    index: IndexPath,
    model: ModelOptions,
    queries: Queries = None,
    query_field: QueryField = None,
    weights: WeightsFiles = None,
    host: Annotated[
        str, typer.Option(help="the address to listen at; another than this is open to others")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0: any that is free")] = PORT,
    open: Annotated[bool, typer.Option("--open", help="open the page in a browser")] = False,
    uncalibrated: Uncalibrated = False,
) -> None:
    """Open a live page on an index: type, drop or choose a query, move weights, filter, mark examples.

    Examples:

    `unde serve --index runs/idx --weights weights.json --open`

    `unde serve my_project.setup:make --index runs/idx`
    """
    _check_extra()
    from unde.cli.project import Project
    from unde.ui.explorer.app import open_socket
    from unde.ui.explorer.app import serve as run
    from unde.ui.explorer.session import Session
    from unde.weights import Weights

    with closing(open_socket(host, port)) as listening:
        project = Project(model.remembered(index), index=index, evaluate=queries, query_field=query_field)
        files = weight_paths(weights or ())
        for file in files.values():
            if file.is_dir():
                raise UndeError(f"{file} is a folder: expected a file of weights, written by `unde learn`")
        weight_sets = {name: Weights.load(file) for name, file in files.items()}
        names = {"eval": project.names("eval")} if project.setup.eval_queries is not None else {}
        with project.index(index, uncalibrated=uncalibrated) as opened:
            for name, w in weight_sets.items():
                try:
                    w.aligned_to(opened.groups.names)
                except UndeError as e:
                    raise UndeError(f"{files[name]}: {e}") from None
            title = f"What made {Path(project.name.partition(':')[0]).name} do that?"
            session = Session(
                opened, project.setup, weight_sets, title=title, names={k: v for k, v in names.items() if v}
            )
            with suppress(KeyboardInterrupt):  # how one ends it
                run(session, listening, host, open)
            console.note("the page is closed")


def _check_extra() -> None:
    for library in ("starlette", "uvicorn", "PIL"):
        try:
            importlib.import_module(library)
        except ImportError:
            raise UndeError(f"the live page needs {library}: pip install 'unde[serve]'") from None
