"""What documents name exists: commands and their options, extras, modules, names of the package, files."""

import importlib
import re

import pytest
from blocks import DOCS, PAGES, ROOT, SHELL, blocks, inline, prose
from shell import check, commands, options

import unde

NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
SCRIPTS = [*ROOT.glob("examples/*.py"), *ROOT.glob("benchmarks/**/*.py"), *ROOT.glob("experiments/**/*.py")]


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_commands_in_blocks_exist(page):
    for block in blocks(page):
        if block.language in SHELL:
            for command in commands(block.code):
                try:
                    check(command.words)
                except AssertionError as e:
                    raise AssertionError(f"{block.where}: {e}") from None


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_commands_in_the_text_exist(page):
    for code in inline(page):
        words = code.split()
        if words[0] in ("unde", "make", "pip", "python") and len(words) > 1:
            [command] = commands(code)
            if "…" not in command.words[1]:
                check(command.words)


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_options_and_names_in_the_text_exist(page):
    scripts = "".join(path.read_text() for path in SCRIPTS)
    known = options()
    for code in inline(page):
        if re.match(r"--[a-z]", code):
            option = re.match(r"--[a-z-]+", code)[0]
            foreign = {"--gpus", "--array"}  # of SLURM too
            assert option in known | foreign or f'"{option}"' in scripts, f"no command has {option}"
        for dotted in re.findall(r"(?<![\w./-])unde(?:\.[A-Za-z_]\w*)+", code):
            resolve(dotted)


def resolve(dotted):
    """The module, and what is in it."""
    parts = dotted.split(".")
    found, depth = importlib.import_module(parts[0]), 1
    while depth < len(parts):
        if not hasattr(found, parts[depth]):
            try:
                importlib.import_module(".".join(parts[: depth + 1]))
            except ModuleNotFoundError:
                raise AssertionError(f"there is no {dotted}") from None
        found, depth = getattr(found, parts[depth]), depth + 1


def test_blocks_that_are_not_run_say_why():
    for page in PAGES:
        for block in blocks(page):
            if block.not_run is not None:
                assert len(block.not_run.split()) >= 3, f"{block.where}: {block.not_run!r} is no reason"


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_links_lead_somewhere(page):
    anchors = {}
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name}: {link} leads nowhere"
        if anchor and target.suffix == ".md":
            if target not in anchors:
                anchors[target] = {slug(line) for line in headings(target)}
            assert anchor in anchors[target], f"{page.name}: no section {link}"


def headings(page):
    return re.findall(r"^#+ (.*)$", prose(page), re.M)


def slug(heading):
    """As code hosts and the site make them."""
    plain = re.sub(r"[`*]|\[([^]]*)\]\([^)]*\)", r"\1", heading)
    return re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")


def test_every_page_is_in_the_site():
    listed = set()
    for page in DOCS.rglob("*.md"):
        for _, inside in re.findall(
            r"^```\{toctree\}\n((?::[^\n]*\n)*)(.*?)^```", page.read_text(), re.M | re.S
        ):
            listed |= {
                (page.parent / name.split("<")[-1].strip(" >")).resolve()
                for name in inside.split("\n")
                if name
            }
    pages = {page.with_suffix("").resolve() for page in DOCS.rglob("*.md")} - {(DOCS / "index").resolve()}
    assert pages - listed == set(), "not in any toctree"
    assert listed - pages == set(), "there is no such page"


def test_every_task_is_on_its_page():
    text = (DOCS / "tasks.md").read_text()
    assert [name for name in unde.tasks.__all__ if f"`{name}" not in text] == []


def test_a_wrong_option_is_noticed():
    with pytest.raises(AssertionError, match="--bath-size"):
        check(["unde", "build", "a:b", "--out", "x", "--bath-size", "3"])
    with pytest.raises(AssertionError, match="no command"):
        check(["unde", "biuld"])
    with pytest.raises(AssertionError, match="no extra"):
        check(["pip", "install", "unde[everything]"])
