"""Options that several commands share, and the groups of them that most commands take.

Nothing here imports torch: help and completion must be fast.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unde import console
from unde.errors import UndeError, unknown
from unde.store.layout import MANIFEST
from unde.store.remote import StorePath, is_local, place

if TYPE_CHECKING:
    from unde.integrations.source import ModelSource
    from unde.parallel import Executor


# Copies of unde.methods.NAMES and unde.store.codec.CODECS, which import torch; a test compares them.
METHODS = ("tracin", "trak", "logra", "ekfac", "d-trak", "journey-trak", "das", "tracin-cosine")
CODECS = ("float32", "float16", "int8")
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


_DEEP = 3  # folders below what was typed
_MOST = 500  # folders that are looked at


def one_of(*names: str) -> Callable[[str], list[str]]:
    """
    >>> one_of("serial", "processes:4", "array")("s")
    ['serial']
    """

    def complete(incomplete: str) -> list[str]:
        return [name for name in names if name.startswith(incomplete)]

    return complete


def indexes(incomplete: str) -> list[str]:
    """Folders below the typed one that hold an index. Without any, shells complete files."""
    folder, begun = os.path.split(incomplete)
    home, found = os.path.expanduser(folder) or ".", []
    for number, (path, folders, files) in enumerate(os.walk(home)):
        where = os.path.relpath(path, home)
        depth = 0 if where == "." else 1 + where.count(os.sep)
        if depth and MANIFEST in files:
            found.append(os.path.join(folder, where))
        ended = (depth and MANIFEST in files) or depth == _DEEP or number >= _MOST
        start = "" if depth else begun
        folders[:] = [f for f in folders if not ended and f.startswith(start) and (start or f[0] != ".")]
    return sorted(found)


def option(help: str, *names: str, metavar: str | None = None, panel: str | None = None, **more: Any) -> Any:
    """Declare an option; `panel` is the part of the help page that it is in."""
    return typer.Option(*names, help=help, metavar=metavar, rich_help_panel=panel, **more)


path_option = partial(option, metavar="PATH", parser=local_path)
place_option = partial(option, metavar="PATH", parser=place)  # or a URL; of type Any, as typer has no unions
hf_option = partial(option, panel=HF)
_run_option = partial(option, panel="Where jobs run (the bytes are the same)")


# --- single options -------------------------------------------------------------------------------------

IndexPath = Annotated[
    Any,
    place_option(
        "folder or URL of the index; it remembers what it was built from", "--index", autocompletion=indexes
    ),
]
WeightsFile = Annotated[Any, place_option("weights from `unde learn`", "--weights")]
WeightsFiles = Annotated[
    list[str] | None,
    option("weights from `unde learn`; several: NAME=FILE each", "--weights", metavar="[NAME=]FILE"),
]
_METHOD_HELP = f"{join_names(METHODS)}, or MODULE:NAME of your own"
MethodName = Annotated[str, option(_METHOD_HELP, "--method", autocompletion=one_of(*METHODS))]
MethodOfIndex = Annotated[
    str | None, option(f"{_METHOD_HELP} (default: as built)", "--method", autocompletion=one_of(*METHODS))
]
Memory = Annotated[str, option("memory for computations, besides the model")]
Uncalibrated = Annotated[
    bool, option("ignore the calibration: the method as built, uniform weights", "--uncalibrated")
]
QueryList = Annotated[
    list[str] | None,
    option(
        "just this query: a text, a number of the held-out queries from 0 on, or the file of an image; repeatable",
        "--query",
        metavar="TEXT|NUMBER|IMAGE",
    ),
]
QuerySet = Annotated[
    str | None,
    option(
        "texts to ask about, as in --data; with MODULE:FUNCTION: eval (the default), learn, or a folder of saved "
        "samples",
        "--queries",
        metavar="PATH",
    ),
]
Queries = Annotated[
    Path | None, path_option("texts to ask about, as in --data", "--queries", metavar="FILE", panel=HF)
]
QueryField = Annotated[
    str | None, hf_option("field of the text in the queries (default: as --text-field)", metavar="NAME")
]

Span = Annotated[
    str | None,
    hf_option(
        "words of the query, as they are written there: ask why the model says just these", metavar="TEXT"
    ),
]


# --- groups of options ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelOptions:
    """A model and its training data: MODULE:FUNCTION, or a Hugging Face model and texts."""

    target: Annotated[
        str | None, typer.Argument(metavar="MODULE:FUNCTION", help="a function that returns an unde.Setup")
    ] = None
    hf_model: Annotated[
        str | None,
        hf_option(
            "folder of save_pretrained, of a PEFT adapter, of a Trainer's run (its newest checkpoint), or a hub name",
            metavar="DIR",
        ),
    ] = None
    data: Annotated[
        Path | None,
        hf_option(
            "training data: .jsonl, .json, .csv, .txt (a text on each line), also as .gz; .parquet; a folder of "
            "datasets' save_to_disk. Fields: text, messages, or prompt and completion",
            metavar="FILE",
            parser=local_path,
        ),
    ] = None
    text_field: Annotated[
        str | None,
        hf_option(
            "field of the text or the messages (default: text, messages or prompt, whichever there is)",
            metavar="NAME",
        ),
    ] = None
    seq_len: Annotated[
        int | None,
        hf_option(
            "texts are cut into sequences of this length; each is an example with the id text:part (default: 512, or "
            "the model's context)",
            metavar="TOKENS",
        ),
    ] = None
    trust_remote_code: Annotated[
        bool,
        hf_option(
            "run Python code that comes with --hf-model, if it has any; never done otherwise",
            "--trust-remote-code",
        ),
    ] = False
    device: Annotated[str | None, option("where the model runs: cpu, cuda, cuda:1, mps, …")] = None
    device_memory: Annotated[
        str | None, option("memory on that device, besides the model (default: 80 % of what is free there)")
    ] = None

    def source(self) -> ModelSource:
        """The Hugging Face model and texts, as far as they were named."""
        from unde.integrations.source import ModelSource

        return ModelSource(
            self.hf_model,
            None if self.data is None else str(self.data),
            self.text_field,
            self.seq_len,
            target_field=getattr(self, "target_field", None),
            loss_on=getattr(self, "loss_on", None),
            beta=getattr(self, "beta", None),
            checkpoints=getattr(self, "checkpoints", None),
            trust_remote_code=self.trust_remote_code,
        )

    def remembered(self, index: StorePath, method: str | None = None) -> ModelOptions:
        """Fill in the MODULE:FUNCTION that the index was built from, if no model is named.

        An index that is not there, or does not fit the method, is refused before a model is loaded.
        """
        from unde import methods
        from unde.integrations.source import trusted_target
        from unde.store.manifest import Manifest
        from unde.tasks.base import kind_of

        with suppress(OSError):  # what cannot be read is said where the index is opened
            if self.target is None and not index.is_dir():
                raise UndeError(f"no folder {index}: make an index with unde build")
            if method is not None and (index / MANIFEST).exists():
                m = Manifest.read(index)
                methods.on_index(method, methods.parse(m.method), kind_of(m.task), m.examples)
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
        hf_option(
            "field of what the model was trained to give for the text; the loss is on it alone (default: completion, "
            "if there is a prompt)",
            metavar="NAME",
        ),
    ] = None
    loss_on: Annotated[
        str | None,
        hf_option(
            "tokens of conversations, or of prompts with completions, that the training took a loss on: answers (the "
            "default) or all (TRL's default for conversations)",
            metavar="NAME",
            autocompletion=one_of("answers", "all"),
        ),
    ] = None
    beta: Annotated[
        float | None,
        hf_option("β of a training with DPO, on records with chosen and rejected answers (default: 0.1)"),
    ] = None
    checkpoints: Annotated[
        str | None,
        option(
            "folder with several checkpoints of the model: a Trainer's run (checkpoint-100, …; learning rates of "
            "its log weigh them for tracin), a CheckpointRecorder's, or .safetensors files",
            metavar="DIR",
        ),
    ] = None


@dataclass(frozen=True)
class WorkerOptions:
    """The processes that compute."""

    engine: Annotated[
        str, _run_option("serial; processes:4 on this machine; array: one of many jobs of a cluster; ray")
    ] = "serial"
    threads: Annotated[
        int | None, _run_option("threads of each job (default: all of this machine; 1 of each worker)")
    ] = None
    workers: Annotated[
        int | None, _run_option("number of workers, for array and ray (default: as many as fit)")
    ] = None

    def executor(self, worker: str | None = None) -> Executor:
        from unde.parallel import get_executor

        options = {f.name: getattr(self, f.name) for f in fields(self)}
        return get_executor(options.pop("engine"), worker=worker, **options)


@dataclass(frozen=True)
class ClusterOptions(WorkerOptions):
    """The same for builds, which also run on clusters."""

    gpus: Annotated[float, _run_option("GPUs of each worker of ray")] = 0
    address: Annotated[
        str | None, _run_option("address of the Ray cluster (default: RAY_ADDRESS, or this machine)")
    ] = None
    timeout: Annotated[
        float | None, _run_option("seconds after which a job counts as hung", metavar="SECONDS")
    ] = None


_BUILT = ("auto", *METHODS)
_PROJECTIONS = ("auto", "none", "factored(4)", "kron(16)", "sjlt(4096)", "dense(512)")
_DTYPES = ("auto", *CODECS)


@dataclass(frozen=True)
class FeatureOptions:
    """What a build computes and stores, and within which budgets."""

    method: Annotated[
        str,
        option(
            f"{_METHOD_HELP}; auto: trak for small models, d-trak for diffusion models, ekfac for others",
            autocompletion=one_of(*_BUILT),
        ),
    ] = "auto"
    projection: Annotated[
        str,
        option(
            f"features: {join_names(_PROJECTIONS)}; auto: whole gradients (none), factored(c) or kron(r), the most "
            "accurate that fit --disk and --memory",
            autocompletion=one_of(*_PROJECTIONS),
        ),
    ] = "auto"
    groups: Annotated[str, option("parameters that share a weight: layer, tensor or consecutive(128)")] = (
        "layer"
    )
    exclude: Annotated[list[str] | None, option("regex of parameters to leave out; repeatable")] = None
    batch_size: Annotated[
        int | None, option("examples in one pass (default: as many as fit --memory)", min=1)
    ] = None
    store_dtype: Annotated[
        str,
        option(
            f"precision on disk: {join_names(_DTYPES)}; auto is float32 up to 256 MiB and int8 beyond",
            autocompletion=one_of(*_DTYPES),
        ),
    ] = "auto"
    disk: Annotated[str, option("space that --projection auto may take")] = "20GB"
    memory: Memory = "2GB"

    @property
    def arguments(self) -> dict[str, Any]:
        """The same as arguments of `Index.build` and `plan`."""
        return vars(self) | {"exclude": self.exclude or ()}


@dataclass(frozen=True)
class FineTuningOptions:
    """How a Hugging Face model was fine-tuned, for commands that train it again."""

    base: Annotated[str | None, hf_option("checkpoint that fine-tuning started from", metavar="DIR")] = None
    epochs: Annotated[
        float | None, hf_option("of the fine-tuning (default: as Trainer recorded it, or 3)")
    ] = None
    lr: Annotated[float | None, hf_option("its learning rate (default: as Trainer recorded it, or 5e-5)")] = (
        None
    )
    batch_size: Annotated[
        int | None, hf_option("its examples in a step (default: as Trainer recorded it, or 8)")
    ] = None


# --- checks ---------------------------------------------------------------------------------------------


def check_format(value: str, *known: str) -> None:
    if value not in known:
        raise unknown("format", value, known)


def check_out(out: StorePath) -> None:
    """Raise where a file cannot be written, before hours of work."""
    if out.is_dir():
        raise UndeError(f"--out {out} is a folder: give a file in it")
    if is_local(out) and not out.absolute().parent.is_dir():
        raise UndeError(f"no folder {out.parent} for --out {out}: make it, or write elsewhere")
