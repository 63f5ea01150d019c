"""The options of commands that take a Hugging Face model and texts instead of MODULE:FUNCTION."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from unde.integrations.source import Source

PANEL = "Hugging Face language models (instead of MODULE:FUNCTION)"

HFModel = Annotated[
    str | None,
    typer.Option(
        metavar="DIR",
        help="folder of save_pretrained, of a PEFT adapter, or a hub name",
        rich_help_panel=PANEL,
    ),
]
Data = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="training texts: .jsonl, .json, .csv, .txt (a text on each line), also as .gz; .parquet",
        rich_help_panel=PANEL,
    ),
]
TextField = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="field that holds the text (default: text)", rich_help_panel=PANEL),
]
SeqLen = Annotated[
    int | None,
    typer.Option(
        metavar="TOKENS",
        help="a text is cut into consecutive sequences of this length, the last ones shorter; each is an "
        "example with the id text:part (default: 512, or the model's context)",
        rich_help_panel=PANEL,
    ),
]
Queries = Annotated[
    Path | None,
    typer.Option("--queries", metavar="FILE", help="texts to ask about, as in --data", rich_help_panel=PANEL),
]
QueryField = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", help="the same of the queries (default: as --text-field)", rich_help_panel=PANEL
    ),
]


def source_of(hf_model: str | None, data: Path | None, text_field: str | None, seq_len: int | None) -> Source:
    """What was said on the command line."""
    return Source(hf_model, None if data is None else str(data), text_field, seq_len)
