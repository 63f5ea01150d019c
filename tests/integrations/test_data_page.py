"""The commands of docs/data.md run as printed, on the data that is printed there."""

import re
import shlex
from pathlib import Path

import pytest
from hf_toy import gpt2, tokenizer
from typer.testing import CliRunner

from unde import cli

PAGE = Path(__file__).parent.parent.parent / "docs" / "data.md"
pytestmark = pytest.mark.usefixtures("one_thread")
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<|endoftext|>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_the_page_runs_as_printed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = PAGE.read_text()
    for name, content in re.findall(r"^`([\w.]+)`:\n\n```(?:json|toml)\n(.*?)```", text, re.M | re.S):
        Path(name).write_text(content)
    tok = tokenizer()
    tok.chat_template = TEMPLATE
    for step, folder in ((0, "model"), (1, "out/checkpoint-100"), (2, "out/checkpoint-200")):
        gpt2(seed=step).save_pretrained(folder)
        tok.save_pretrained(folder)
        if step:
            state = (
                '{"log_history": [{"step": 100, "learning_rate": 0.1}, {"step": 200, "learning_rate": 0.05}]}'
            )
            Path(folder, "trainer_state.json").write_text(state)
    lines = [
        line for block in re.findall(r"```sh\n(.*?)```", text, re.S) for line in block.splitlines() if line
    ]
    assert len(lines) == 7 and all(line.startswith("unde ") for line in lines)
    for line in lines:
        result = CliRunner().invoke(cli.app, shlex.split(line)[1:])
        assert result.exit_code == 0, (line, result.output, result.exception)
    one, two = (
        {
            str(p.relative_to(folder)): p.read_bytes()
            for p in sorted(Path(folder).rglob("*"))
            if p.is_file() and p.name not in (".lock", "log.jsonl")
        }
        for folder in ("runs/one", "runs/two")
    )
    assert one == two
