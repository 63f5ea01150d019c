"""The code of every page runs, block by block in order, in an empty folder with what its readers have at hand."""

import contextlib
import io
import json
import re
import sys
from pathlib import Path

import pytest
from blocks import PAGES, ROOT, SHELL, blocks
from shell import commands, run
from worlds import WORLDS, World

NAMES = [str(page.relative_to(ROOT)) for page in PAGES]


def runnable(command):
    """`serve` does not end by itself, and `demo` has a test of its own."""
    return command.words[0] == "unde" and command.words[1] not in ("serve", "demo")


def runs(block):
    """Other commands than those of unde (pip, make, …) are only checked, in test_docs_commands."""
    if block.not_run is not None:
        return False
    if block.language in SHELL:
        return any(map(runnable, commands(block.code)))
    return block.language == "python" or block.file is not None


PLANS = {"docs/plan.md", "docs/tutorials/cluster.md"}  # elsewhere they are only checked: they take seconds
WITH_CODE = [name for name, page in zip(NAMES, PAGES) if any(runs(b) for b in blocks(page))]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A current folder whose modules nobody else sees."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        found = getattr(sys.modules[name], "__file__", None)
        if (found and Path(found).is_relative_to(tmp_path)) or name == "my_project":
            del sys.modules[name]


@pytest.mark.parametrize("name", WITH_CODE)
def test_code_of_a_page_runs(name, folder):
    world = WORLDS.get(name, World())
    page = [block for block in blocks(ROOT / name) if runs(block)]
    written = "".join(block.code for block in page)
    assert [text for text in world.smaller if text not in written] == [], "not on the page any more"
    with contextlib.redirect_stdout(io.StringIO()) as said:
        names = dict(world.make(), __name__="__page__")
        for block in page:
            code = block.code
            for text, instead in world.smaller.items():
                code = code.replace(text, instead)
            if block.file is not None:
                Path(block.file).parent.mkdir(parents=True, exist_ok=True)
                Path(block.file).write_text(code)
            elif block.language in SHELL:
                for command in commands(code):
                    if runnable(command) and (command.words[1] != "plan" or name in PLANS):
                        run(command)
            else:
                # Tracebacks name the page and its line.
                exec(compile("\n" * (block.line - 1) + code, str(block.page), "exec"), names)
    if name in CHECKS:
        CHECKS[name](names, said.getvalue())


def check_quickstart(names, said):
    """It does what the text says: proponents of a digit show that digit, and LDS is said without and with weights."""
    assert re.search(r"cross-fitted LDS [\d.]+ % without and [\d.]+ % with weights", " ".join(said.split()))
    [(digits, proponents)] = re.findall(r"digits (\[.*?\]) proponents (\[\[.*\]\])", said)
    pairs = zip(json.loads(digits), json.loads(proponents))
    agree = sum(p == digit for digit, row in pairs for p in row)
    assert agree >= 15, f"{agree} of 25 proponents show their query's digit"


def check_other_libraries(names, said):
    assert names["weights"].values[0] > 1.2  # the signal counts for more
    compared = names["unde"].evaluate.compare(*(names[n] for n in ("ask", "weights", "masks", "utility")))
    assert compared.difference.mean > 0.05 and compared.checked
    [head, first, *rest] = Path("top.csv").read_text().splitlines()
    assert len(rest) == 149 and first.split(",")[head.split(",").index("id")].startswith("row-")
    page = Path("report.html").read_text()
    assert page.count("<article") >= 3 and "weighted" in page


def check_robots(names, said):
    text = (ROOT / "docs" / "robots.md").read_text()
    assert names["test"].prompts[0] in text
    assert names["learn"].prompts[0] in names["data"].train_categories["style"]
    printed = dict(line.split() for line in said.splitlines())
    assert all(0.02 < float(value) < 0.05 for value in printed.values())  # 500 × 10 draws at 20 / 600
    for attribute, categories in names["data"].categories.items():
        assert attribute in printed
        assert f"| {attribute} | {', '.join(categories[:5])} | {', '.join(categories[5:])} |" in text


CHECKS = {
    "README.md": check_quickstart,
    "docs/other-libraries.md": check_other_libraries,
    "docs/robots.md": check_robots,
}


def test_quickstart_is_short():
    [code] = [b.code for b in blocks(ROOT / "README.md") if b.language == "python"]
    assert len([line for line in code.splitlines() if line.strip()]) <= 22


def test_pages_that_tests_prepare_exist():
    assert set(WORLDS) <= set(NAMES)
