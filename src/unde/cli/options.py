"""Options that several commands share, and the groups of them that most commands take.

Nothing here imports torch: help and completion must be fast.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from unde import console
from unde.cli import completion
from unde.errors import UndeError, unknown
from unde.store.remote import StorePath, is_local, place

if TYPE_CHECKING:
    from unde.integrations.source import ModelSource
    from unde.methods import Method
    from unde.parallel import Executor
import os
from collections.abc import Sequence

# Copies of unde.methods.NAMES and unde.store.factored.NAMES, which import torch; a test compares them.
METHODS = ("tracin", "trak", "logra", "ekfac", "d-trak", "journey-trak", "das", "tracin-cosine")
CODECS = ("float32", "float16", "bfloat16", "int8", "int4", "factored(1)")
RUN_ON = "Where jobs run (the bytes are the same)"
HF = "Hugging Face language models (instead of MODULE:FUNCTION)"


def join_names(names: Iterable[str]) -> str:
    """Join names for a sentence.

    >>> join_names(["table", "json", "csv"])
    'table, json or csv'
    """
    *first, last = names
    return f"{', '.join(first)} or {last}" if first else last


def local_path(text: str) -> Path:
    """Parse a path of this machine; `~` is expanded.

    >>> local_path("~/runs").is_absolute()
    True
    """
    path = place(text)
    if not is_local(path):
        raise UndeError(f"{text} is a URL: expected a path of this machine")
    return path


def path_option(*names: str, help: str, metavar: str = "PATH", panel: str | None = None) -> Any:
    return typer.Option(*names, parser=local_path, metavar=metavar, help=help, rich_help_panel=panel)


def place_option(*names: str, help: str, complete: Callable[[str], list[str]] | None = None) -> Any:
    """Declare a path or URL. Annotate it with Any: typer has no unions."""
    return typer.Option(*names, parser=place, metavar="PATH", help=help, autocompletion=complete)


def _hf(help: str, metavar: str | None = None, **more: Any) -> Any:
    return typer.Option(help=help, metavar=metavar, rich_help_panel=HF, **more)


def _run_on(help: str, metavar: str | None = None) -> Any:
    return typer.Option(help=help, metavar=metavar, rich_help_panel=RUN_ON)


# --- single options -------------------------------------------------------------------------------------

Target = Annotated[
    str | None, typer.Argument(metavar="MODULE:FUNCTION", help="a function that returns an unde.Setup")
]
IndexPath = Annotated[
    Any,
    place_option(
        "--index",
        help="folder or URL of the index; it remembers what it was built from",
        complete=completion.indexes,
    ),
]
WeightsFile = Annotated[Any, place_option("--weights", help="weights from `unde learn`")]
WeightsFiles = Annotated[
    list[str] | None,
    typer.Option(
        "--weights", metavar="[NAME=]FILE", help="weights from `unde learn`; several: NAME=FILE each"
    ),
]
Device = Annotated[str | None, typer.Option(help="where the model runs: cpu, cuda, cuda:1, mps, …")]

_METHOD_HELP = f"{join_names(METHODS)}, or MODULE:NAME of your own"
MethodName = Annotated[
    str, typer.Option("--method", help=_METHOD_HELP, autocompletion=completion.one_of(*METHODS))
]
MethodOfIndex = Annotated[
    str | None,
    typer.Option(
        "--method", help=f"{_METHOD_HELP} (default: as built)", autocompletion=completion.one_of(*METHODS)
    ),
]
Projection = Annotated[
    str | None,
    typer.Option(
        help="none, kron(16), pca(16), sjlt(4096) or dense(512) (default: none for small models, else kron(16))"
    ),
]
GroupsName = Annotated[str, typer.Option("--groups", help="layer, tensor or consecutive(128)")]
Exclude = Annotated[list[str] | None, typer.Option(help="regex of parameters to leave out; repeatable")]
DTYPES = ("auto", *CODECS)
StoreDtype = Annotated[
    str,
    typer.Option(
        help=f"{join_names(DTYPES)}; auto is float32 up to 256 MiB and int8 beyond",
        autocompletion=completion.one_of(*DTYPES),
    ),
]
BatchSize = Annotated[
    int | None, typer.Option(help="examples in one pass (default: as many as fit --memory)")
]
Memory = Annotated[str, typer.Option(help="memory budget of computations, besides the model")]
Uncalibrated = Annotated[
    bool, typer.Option("--uncalibrated", help="ignore the calibration: the method as built, uniform weights")
]
NoTrust = Annotated[
    bool,
    typer.Option(
        "--no-trust", help="leave out how many training examples find themselves (300 passes of the model)"
    ),
]
Queries = Annotated[
    Path | None,
    path_option("--queries", metavar="FILE", help="texts to ask about, as in --data", panel=HF),
]
QueryField = Annotated[str | None, _hf("field of the text in the queries (default: as --text-field)", "NAME")]


# --- groups of options ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelOptions:
    """A model and its training data: MODULE:FUNCTION, or a Hugging Face model and texts."""

    target: Target = None
    hf_model: Annotated[
        str | None,
        _hf(
            "folder of save_pretrained, of a PEFT adapter, of a Trainer's run (its newest checkpoint), or a hub name",
            "DIR",
        ),
    ] = None
    data: Annotated[
        Path | None,
        _hf(
            "training data: .jsonl, .json, .csv, .txt (a text on each line), also as .gz; .parquet; a folder of "
            "datasets' save_to_disk. Fields: text, messages, or prompt and completion",
            "FILE",
            parser=local_path,
        ),
    ] = None
    text_field: Annotated[
        str | None,
        _hf(
            "field of the text or the messages (default: text, messages or prompt, whichever there is)",
            "NAME",
        ),
    ] = None
    seq_len: Annotated[
        int | None,
        _hf(
            "texts are cut into sequences of this length; each is an example with the id text:part (default: 512, or "
            "the model's context)",
            "TOKENS",
        ),
    ] = None
    trust_remote_code: Annotated[
        bool,
        typer.Option(
            "--trust-remote-code",
            help="run Python code that comes with --hf-model, if it has any; never done otherwise",
            rich_help_panel=HF,
        ),
    ] = False
    device: Device = None

    def source(self) -> ModelSource:
        """The Hugging Face model and texts, as far as they were named."""
        from unde.integrations.source import ModelSource

        return ModelSource(
            self.hf_model,
            None if self.data is None else str(self.data),
            self.text_field,
            self.seq_len,
            target_field=getattr(self, "target_field", None),
            checkpoints=getattr(self, "checkpoints", None),
            trust_remote_code=self.trust_remote_code,
        )

    def remembered(self, index: StorePath) -> ModelOptions:
        """Fill in the MODULE:FUNCTION that the index was built from, if no model is named."""
        from unde.integrations.source import trusted_target

        if self.target is not None or self.source().text_options:
            return self
        target = trusted_target(index)
        if target is not None:
            console.note(f"using {target}, as remembered by {index}")
        return replace(self, target=target)


@dataclass(frozen=True)
class TrainingOptions(ModelOptions):
    """The same for commands that read training data anew: with targets and checkpoints."""

    target_field: Annotated[
        str | None,
        _hf(
            "field of what the model was trained to give for the text; the loss is on it alone (default: completion, "
            "if there is a prompt)",
            "NAME",
        ),
    ] = None
    checkpoints: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="folder with several checkpoints of the model: a Trainer's run (checkpoint-100, …; learning rates of "
            "its log weigh them for tracin), a CheckpointRecorder's, or .safetensors files",
        ),
    ] = None


@dataclass(frozen=True)
class WorkerOptions:
    """The processes that compute."""

    engine: Annotated[
        str, _run_on("serial; processes:4 on this machine; array: one of many jobs of a cluster; ray")
    ] = "serial"
    threads: Annotated[
        int | None, _run_on("threads of each job (default: all of this machine; 1 of each worker)")
    ] = None
    workers: Annotated[
        int | None, _run_on("number of workers, for array and ray (default: as many as fit)")
    ] = None

    def executor(self, worker: str | None = None) -> Executor:
        from unde.parallel import get_executor

        options = {f.name: getattr(self, f.name) for f in fields(self)}
        return get_executor(options.pop("engine"), worker=worker, **options)


@dataclass(frozen=True)
class ClusterOptions(WorkerOptions):
    """The same for builds, which also run on clusters."""

    gpus: Annotated[float, _run_on("GPUs of each worker of ray")] = 0
    address: Annotated[
        str | None, _run_on("address of the Ray cluster (default: RAY_ADDRESS, or this machine)")
    ] = None
    timeout: Annotated[float | None, _run_on("seconds after which a job counts as hung", "SECONDS")] = None


def expand_groups(function: Callable[..., None]) -> Callable[..., None]:
    """Replace each parameter that is a group of options by the group's fields, as typer has plain parameters only."""
    hints = get_type_hints(function, include_extras=True)
    groups, parameters = dict[str, Any](), list[inspect.Parameter]()
    for p in inspect.signature(function).parameters.values():
        kind = hints[p.name]
        if is_dataclass(kind):
            groups[p.name], types = kind, get_type_hints(kind, include_extras=True)
            plain = [(f.name, types[f.name], f.default) for f in fields(kind)]
        else:
            plain = [(p.name, kind, p.default)]
        parameters += [
            inspect.Parameter(name, p.KEYWORD_ONLY, annotation=type_, default=default)
            for name, type_, default in plain
        ]

    @wraps(function)
    def run(**options: Any) -> None:
        for name, kind in groups.items():
            options[name] = kind(**{f.name: options.pop(f.name) for f in fields(kind)})
        function(**options)

    run.__signature__ = inspect.Signature(parameters)  # ty: ignore[missing-attribute]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run


# --- checks ---------------------------------------------------------------------------------------------


def build_method(name: str, projection: str | None) -> Method:
    """The method to build for; None leaves the projection to the index."""
    from unde import methods

    method = methods.parse(name)
    return method if projection is None else replace(method, projection=projection)


def check_format(value: str, *known: str) -> None:
    if value not in known:
        raise unknown("format", value, known)


def check_out(out: StorePath) -> None:
    """Raise where a file cannot be written, before hours of work."""
    if out.is_dir():
        raise UndeError(f"--out {out} is a folder: give a file in it")
    if is_local(out) and not out.absolute().parent.is_dir():
        raise UndeError(f"no folder {out.parent} for --out {out}: make it, or write elsewhere")


UNWEIGHTED = "unweighted"  # the name of scores without weights


def weight_paths(texts: Sequence[str]) -> dict[str, StorePath]:
    """Parse files of weights by name: one path is "weighted", several are NAME=FILE each.

    >>> weight_paths(["subject=w1.json", "style=w2.json"])["style"].name
    'w2.json'
    """
    files: dict[str, StorePath] = {}
    for text in texts:
        name, equals, file = text.partition("=")
        # A path may hold the sign too, as in runs/lr=0.1/w.json.
        if not equals or os.sep in name or os.path.exists(text):
            if len(texts) > 1:
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
