"""Names of modules, classes and public functions are words that the field uses; no two classes share one."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "unde"
PARTICIPLES = {
    "found", "made", "told", "asked", "said", "given", "kept", "carried", "settled", "shown", "drawn",
    "begun", "looked", "known", "noted", "taken", "meant", "gone", "held", "tried", "listed", "named",
    "opened", "wanted",
}  # fmt: skip
ADVERBS = {
    "own", "there", "here", "once", "behind", "within", "elsewhere", "also", "beside", "besides", "again",
    "anew", "ahead", "apart", "alike", "alone", "already", "luck", "living",
}  # fmt: skip
BANNED = PARTICIPLES | ADVERBS


def words(name: str) -> set[str]:
    """
    >>> sorted(words("_GivenRows_found"))
    ['found', 'given', 'rows']
    """
    spaced = "".join(f" {c}" if c.isupper() else c for c in name.replace("_", " "))
    return set(spaced.lower().split())


def names(source: Path) -> Iterator[tuple[str, str]]:
    """Each module, class and public function with where it is."""
    for file in sorted(source.rglob("*.py")):
        where = str(file.relative_to(source.parent))
        yield where, file.stem
        tree = ast.parse(file.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                yield where, node.name
                yield from (
                    (where, f.name) for f in node.body if isinstance(f, ast.FunctionDef) and f.name[0] != "_"
                )
        yield from ((where, f.name) for f in tree.body if isinstance(f, ast.FunctionDef) and f.name[0] != "_")


def test_names_are_plain_words():
    bad = [f"{where}: {name}" for where, name in names(SOURCE) if words(name) & BANNED]
    assert not bad, "\n" + "\n".join(bad)


def test_no_two_classes_share_a_name():
    where = defaultdict(list)
    for file in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                where[node.name.lstrip("_")].append(str(file.relative_to(SOURCE)))
    shared = {name: files for name, files in where.items() if len(files) > 1}
    assert not shared, "\n" + "\n".join(f"{name}: {', '.join(files)}" for name, files in shared.items())


@pytest.mark.parametrize(
    "text", ["class Given: ...", "def was_found(): ...", "class A:\n    def own(self): ..."]
)
def test_the_test_finds_names(tmp_path, text):
    (tmp_path / "unde").mkdir()
    (tmp_path / "unde" / "module.py").write_text(text)
    assert any(words(name) & BANNED for _, name in names(tmp_path / "unde"))
