"""Options that several commands have, each said once; what they mean to the library is said here too."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from unde import methods
from unde.cli import completion
from unde.errors import UndeError, unknown
from unde.integrations.source import Source
from unde.store.factored import AUTO
from unde.store.factored import NAMES as CODECS
from unde.store.remote import place

HF = "Hugging Face language models (instead of MODULE:FUNCTION)"


def listed(names: Iterable[str]) -> str:
    """Names in a sentence.

    >>> listed(["table", "json", "csv"])
    'table, json or csv'
    """
    *first, last = names
    return f"{', '.join(first)} or {last}" if first else last


def path_of(text: str) -> Path:
    """A path as it is typed, also where no shell has looked at it; of this machine.

    >>> path_of("~/runs").is_absolute()
    True
    """
    found = place(text)
    if not isinstance(found, Path):
        raise UndeError(f"{text} is a URL: expected a path of this machine")
    return found


def path_option(*names: str, help: str, metavar: str = "PATH", panel: str | None = None) -> Any:
    return typer.Option(*names, parser=path_of, metavar=metavar, help=help, rich_help_panel=panel)


def place_option(*names: str, help: str, complete: Callable[[str], list[str]] | None = None) -> Any:
    """A path or a URL: annotated with Any, as typer knows no unions."""
    return typer.Option(*names, parser=place, metavar="PATH", help=help, autocompletion=complete)


METHODS = f"{listed(methods.NAMES)}, or MODULE:NAME of your own"

# --- what a command works on ----------------------------------------------------------------------------

Target = Annotated[
    str | None, typer.Argument(metavar="MODULE:FUNCTION", help="a function that returns an unde.Setup")
]
IndexPath = Annotated[
    Any,
    place_option(
        "--index",
        help="folder or URL of the index; remembers what it was built from",
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

# --- how an index is built, or planned ------------------------------------------------------------------

_COMPLETED = completion.one_of(*methods.NAMES)
Method = Annotated[str, typer.Option(help=METHODS, autocompletion=_COMPLETED)]
Projection = Annotated[
    str | None, typer.Option(help="kron(16), pca(16), sjlt(4096), dense(512) or none (default: kron(16))")
]
Groups = Annotated[str, typer.Option(help="layer, tensor or consecutive(128)")]
Exclude = Annotated[list[str] | None, typer.Option(help="regex of parameters to leave out; repeatable")]
PassSize = Annotated[
    int | None, typer.Option("--batch-size", help="examples in one pass (default: as many as fit --memory)")
]
BatchSize = Annotated[int, typer.Option(help="examples in one pass; fewer need less memory")]
DTYPES = (AUTO, *CODECS)
STORED = f"{listed(DTYPES)}; auto is float32 up to 256 MiB and int8 beyond"
StoreDtype = Annotated[str, typer.Option(help=STORED, autocompletion=completion.one_of(*DTYPES))]
PackedDtype = Annotated[str, typer.Option(help=listed(CODECS), autocompletion=completion.one_of(*CODECS))]
Memory = Annotated[str, typer.Option(help="budget for what is computed at once, besides the model")]

Checkpoints = Annotated[
    str | None,
    typer.Option(
        metavar="DIR",
        help="folder with several checkpoints of the model: a Trainer's run (checkpoint-100, …; learning rates of its "
        "log weigh them for tracin), a CheckpointRecorder's, or .safetensors files",
    ),
]

# --- who computes ---------------------------------------------------------------------------------------

WHO = "Who computes (the bytes are the same)"
Engine = Annotated[
    str,
    typer.Option(
        help="serial; processes:4 on this machine; array: one of many jobs of a cluster; ray",
        rich_help_panel=WHO,
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(help="of each job (default: all of this machine; 1 of each worker)", rich_help_panel=WHO),
]
Workers = Annotated[
    int | None,
    typer.Option(help="how many, for array and ray (default: what there is room for)", rich_help_panel=WHO),
]
Worker = Annotated[
    str | None,
    typer.Option(
        metavar="3/64",
        help="which of how many, for array (default: SLURM, PBS or torchrun tell)",
        rich_help_panel=WHO,
    ),
]
Gpus = Annotated[float, typer.Option(help="of each worker of ray", rich_help_panel=WHO)]
Address = Annotated[
    str | None,
    typer.Option(help="of the Ray cluster (default: RAY_ADDRESS, or this machine)", rich_help_panel=WHO),
]
Timeout = Annotated[
    float | None,
    typer.Option(metavar="SECONDS", help="after which a job is taken for hung", rich_help_panel=WHO),
]

# --- how an index is asked ------------------------------------------------------------------------------

MethodOfIndex = Annotated[
    str | None,
    typer.Option(
        "--method",
        help=f"{METHODS} (default: as built)",
        autocompletion=_COMPLETED,
    ),
]
Uncalibrated = Annotated[
    bool,
    typer.Option(
        "--uncalibrated", help="leave the calibration of the index out: the method as built, uniform weights"
    ),
]
NoTrust = Annotated[
    bool,
    typer.Option(
        "--no-trust", help="leave out how many training examples find themselves (300 passes of the model)"
    ),
]
NoBaselines = Annotated[
    bool,
    typer.Option(
        "--no-baselines",
        help="leave out BM25 and hidden-state similarity (a pass of the model over the training texts)",
    ),
]

# --- a Hugging Face model and texts ---------------------------------------------------------------------

HFModel = Annotated[
    str | None,
    typer.Option(
        metavar="DIR",
        help="folder of save_pretrained, of a PEFT adapter, of a Trainer's run (its newest checkpoint), or a hub name",
        rich_help_panel=HF,
    ),
]
Data = Annotated[
    Path | None,
    typer.Option(
        parser=path_of,
        metavar="FILE",
        help="training data: .jsonl, .json, .csv, .txt (a text on each line), also as .gz; .parquet; a folder of "
        "datasets' save_to_disk. Fields: text, messages, or prompt and completion",
        rich_help_panel=HF,
    ),
]
TextField = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="field that holds the text or the messages (default: text, messages or prompt, whichever there is)",
        rich_help_panel=HF,
    ),
]
TargetField = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="field that holds what the model was trained to give for the text; the loss is on it alone "
        "(default: completion, if there is a prompt)",
        rich_help_panel=HF,
    ),
]
SeqLen = Annotated[
    int | None,
    typer.Option(
        metavar="TOKENS",
        help="a text is cut into consecutive sequences of this length, the last ones shorter; each is an "
        "example with the id text:part (default: 512, or the model's context)",
        rich_help_panel=HF,
    ),
]
TrustRemoteCode = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code",
        help="run Python code that comes with --hf-model, if it has any; never done otherwise",
        rich_help_panel=HF,
    ),
]
Queries = Annotated[
    Path | None,
    path_option("--queries", metavar="FILE", help="texts to ask about, as in --data", panel=HF),
]
QueryField = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", help="the same of the queries (default: as --text-field)", rich_help_panel=HF
    ),
]


def source_of(
    hf_model: str | None,
    data: Path | None,
    text_field: str | None,
    seq_len: int | None,
    trust_remote_code: bool = False,
    target_field: str | None = None,
    checkpoints: str | None = None,
) -> Source:
    """What was said on the command line."""
    file = None if data is None else str(data)
    return Source(
        hf_model,
        file,
        text_field,
        seq_len,
        target_field=target_field,
        checkpoints=checkpoints,
        trust_remote_code=trust_remote_code,
    )


def method_of(name: str, projection: str | None) -> methods.Method:
    """The method to build for; its projection is the usual one if none was named."""
    method = methods.parse(name)
    return method if projection is None else replace(method, projection=projection)


def check_format(given: str, *known: str) -> None:
    if given not in known:
        raise unknown("format", given, known)
