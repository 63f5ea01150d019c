"""What is released: a wheel and a source archive that install and run, with metadata that is true."""

import ast
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from email import message_from_string
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import unde

ROOT = Path(__file__).parent.parent
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
SMOKE = """
import sys, torch, unde
x = torch.randn(20, 3)
task = unde.tasks.Classification()
index = unde.Index.build(torch.nn.Linear(3, 2), task, (x, (x[:, 0] > 0).long()), "idx", progress=False)
assert index.score((x[:2] + 1, torch.tensor([0, 1]))).top(1).indices.shape == (2, 1)
print(unde.__file__)
"""


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    """The wheel and the archive, made by `make dist` of a copy: nothing is written here."""
    pytest.importorskip("build")
    folder = tmp_path_factory.mktemp("release")
    for name in ("src", "docs", "examples", "notebooks", "tests"):
        shutil.copytree(
            ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info")
        )
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, folder)
    command = [sys.executable, "-m", "build", "--no-isolation", "--skip-dependency-check", "."]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    [wheel], [archive] = folder.glob("dist/*.whl"), folder.glob("dist/*.tar.gz")
    return wheel, archive


def test_wheel_holds_the_package_and_nothing_else(dist):
    names = zipfile.ZipFile(dist[0]).namelist()
    assert {name.split("/")[0] for name in names} == {"unde", f"unde-{unde.__version__}.dist-info"}
    package = {
        str(path.relative_to(ROOT / "src"))
        for path in (ROOT / "src" / "unde").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert package == {name for name in names if name.startswith("unde/")}
    assert "unde/py.typed" in names
    assert f"unde-{unde.__version__}.dist-info/licenses/LICENSE" in names


def test_archive_holds_what_people_look_for(dist):
    top = f"unde-{unde.__version__}/"
    with tarfile.open(dist[1]) as archive:
        names = {name.removeprefix(top) for name in archive.getnames()}
    wanted = {"README.md", "CHANGELOG.md", "CITATION.cff", "LICENSE", "pyproject.toml", "docs/index.md"}
    assert wanted <= names
    assert not [name for name in names if name.startswith(("tests/", "experiments/", "benchmarks/"))]


def test_wheel_installs_and_runs(dist, tmp_path):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "env"], check=True)
    python = tmp_path / "env" / "bin" / "python"
    [site] = (tmp_path / "env" / "lib").glob("*/site-packages")
    # Dependencies are those of this environment; a .pth that is reached by another one is not read.
    (site / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"])
    options = ["install", "--quiet", "--no-deps", "--no-index"]
    pip = [sys.executable, "-m", "pip", "--python", python, *options, dist[0]]
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    run = {"cwd": tmp_path, "env": clean, "capture_output": True, "text": True, "check": False}
    done = subprocess.run(pip, **run)
    assert done.returncode == 0, done.stderr
    said = subprocess.run([tmp_path / "env" / "bin" / "unde", "--version"], **run)
    assert said.stdout.strip() == f"unde {unde.__version__}", said.stderr
    smoke = subprocess.run([python, "-c", SMOKE], **run)
    assert smoke.returncode == 0, smoke.stderr
    assert smoke.stdout.strip().startswith(str(site)), "the package that was installed"


def test_metadata_is_true(dist):
    with zipfile.ZipFile(dist[0]) as wheel:
        about = message_from_string(wheel.read(f"unde-{unde.__version__}.dist-info/METADATA").decode())
    listed = [c.split(" :: ")[-1] for c in about.get_all("Classifier") if "Python :: 3." in c]
    assert (tuple(listed), about["Requires-Python"]) == (PYTHONS, f">={PYTHONS[0]}")
    required = [Requirement(text) for text in about.get_all("Requires-Dist")]
    extras = set(about.get_all("Provides-Extra"))
    whole = next(r for r in required if r.name == "unde")
    assert whole.extras | {"all", "quantized", "notebooks"} == extras  # torchao warns on import
    for extra in extras - {"all"}:
        assert any(r.marker and r.marker.evaluate({"extra": extra}) for r in required), extra


def test_one_version_everywhere_and_sections_that_readers_know():
    citation = re.search(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.M)[1]
    [newest, *_] = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert {citation, newest} == {unde.__version__}
    text = (ROOT / "CHANGELOG.md").read_text()
    versions = re.findall(r"^## (\d+\.\d+\.\d+\S*) \((?:unreleased|\d{4}-\d\d-\d\d)\)$", text, re.M)
    assert len(versions) == len(re.findall(r"^## ", text, re.M)), (
        "a heading is: ## VERSION (date or unreleased)"
    )
    kinds = set(re.findall(r"^### (.*)$", text, re.M))
    assert kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


NEWER = {  # than the oldest Python: what has no other name there
    "tomllib", "Self", "override", "assert_never", "StrEnum", "batched", "UTC", "ExceptionGroup",
    "NotRequired", "LiteralString", "TypeVarTuple", "Unpack", "add_note",
}  # fmt: skip


@pytest.mark.parametrize(
    "package", sorted(p.name for p in (ROOT / "src" / "unde").iterdir() if p.name[0] != "_")
)
def test_the_oldest_python_can_read_it(package):
    path = ROOT / "src" / "unde" / package
    for file in [path] if path.suffix == ".py" else path.rglob("*.py"):
        tree = ast.parse(file.read_text(), str(file), feature_version=tuple(map(int, PYTHONS[0].split("."))))
        found = {
            a.name for n in ast.walk(tree) if isinstance(n, (ast.Import, ast.ImportFrom)) for a in n.names
        }
        named = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)} | found
        assert named & NEWER == set(), f"{file.name} uses what Python {PYTHONS[0]} has not"
