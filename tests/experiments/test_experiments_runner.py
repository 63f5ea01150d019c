"""`python -m experiments`: every study is found, results are kept, and what is missing is said in a sentence."""

import json
import sys
import types

import numpy as np
import pytest
from experiments.shared import banks
from experiments.shared.paths import HERE

from experiments import __main__ as command
from experiments import runner, tables

TOY = '''"""A toy study.

More about it.
"""
PAPER = "Table 0"
VARIANTS = ("a", "b")
BANKS = {"b": ("toy-bank",)}
DATA = {"a": ("toy.npz",)}
runs = []


def run(variant):
    runs.append(variant)
    if variant == "b" and len(runs) > 5:
        raise ZeroDivisionError
    return {"variant": variant, "times": len(runs)}
'''


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """One study in a package of its own, results and banks in a folder of their own."""
    (tmp_path / "toystudies").mkdir()
    (tmp_path / "toystudies" / "toy.py").write_text(TOY)
    (tmp_path / "toy.npz").touch()
    found = runner.studies(tmp_path / "toystudies")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(runner, "PACKAGE", "toystudies")
    monkeypatch.setattr(runner, "studies", lambda: found)
    monkeypatch.setattr(runner, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(runner, "BANKS", tmp_path)
    monkeypatch.setenv("UNDE_DATA", str(tmp_path))
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("toystudies")]:
        del sys.modules[name]


def result(folder, name):
    return json.loads((folder / "results" / f"{name}.json").read_text())


def test_every_study_file_is_listed_and_shown_on_the_page():
    files = {path.stem for path in (HERE / "studies").glob("*.py")} - {"__init__"}
    assert files == set(runner.studies())
    assert [s.name for s in runner.studies().values() if not tables.shown_in(s)] == []


def test_every_variant_has_a_result_of_its_own():
    results = [(name, s.name) for s in runner.studies().values() for name in s.results()]
    assert len({name for name, _ in results}) == len(results) > 20
    for study in runner.studies().values():
        assert set(study.results().values()) == set(study.variants or [None])
        assert study.title and {*study.banks, *study.data} <= {*study.variants, None}


def test_every_result_file_belongs_to_a_study():
    known = {name for s in runner.studies().values() for name in s.results()}
    there = {path.stem for path in (HERE / "results").glob("*.json")}
    assert there - known == set()


def test_bank_studies_know_every_bank():
    from experiments.shared import cells, sweep

    assert set(sweep.EVERY_BANK) == set(cells.CELLS)
    assert set(runner.DATA_OF_BANK) <= set(sweep.EVERY_BANK)


def test_list_says_what_is_done_and_what_is_missing(toy, capsys):
    assert command.main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "toy: A toy study [Table 0]" in lines
    [a] = [line for line in lines if "toy_a " in line]
    [b] = [line for line in lines if "toy_b " in line]
    assert "not yet" in a and a.endswith("needs data toy.npz")
    assert b.endswith("needs bank toy-bank (missing)")


def test_a_result_is_kept_until_asked_for_again(toy, capsys):
    assert command.main(["run", "toy_a"]) == 0
    made = result(toy, "toy_a")
    assert made["results"] == {"variant": "a", "times": 1}
    assert made["provenance"]["command"] == "python -m experiments run toy_a"
    assert {"unde", "torch", "python", "machine", "cpu", "instructions", "seconds"} <= set(made["provenance"])
    assert command.main(["run", "toy_a"]) == 0
    assert "there already" in capsys.readouterr().out.splitlines()[-1]
    assert result(toy, "toy_a") == made
    assert command.main(["run", "toy_a", "--again"]) == 0
    assert result(toy, "toy_a")["results"]["times"] == 2


def test_a_missing_bank_is_made_by_its_own_command(toy, capsys, monkeypatch):
    made = []

    def make(name, processes=1):
        made.append((name, processes))
        (toy / f"{name}.npz").touch()
        return types.SimpleNamespace(masks=[0] * 64, seconds=np.ones(64))

    monkeypatch.setattr(banks, "make", make)
    assert command.main(["run", "toy_b"]) == 2
    [said] = capsys.readouterr().err.splitlines()
    assert "toy_b needs bank toy-bank" in said and "python -m experiments bank" in said
    assert not made and not (toy / "results").exists()
    assert command.main(["bank", "toy-bank", "--processes", "2"]) == 0
    assert command.main(["bank", "toy-bank"]) == 0 and made == [("toy-bank", 2)]
    assert "64 models, 1 s" in capsys.readouterr().out
    assert command.main(["run", "toy_b"]) == 0 and result(toy, "toy_b")["results"]["variant"] == "b"


def test_missing_data_is_one_sentence(toy, capsys, monkeypatch):
    monkeypatch.delenv("UNDE_DATA")
    assert command.main(["run", "toy_a"]) == 2
    [said] = capsys.readouterr().err.splitlines()
    assert "toy.npz" in said and "UNDE_DATA" in said


def test_all_goes_on_after_what_it_cannot_run(toy, capsys):
    assert command.main(["all"]) == 2  # toy_b has no bank
    assert result(toy, "toy_a") and "not run: toy_b" in capsys.readouterr().err
    (toy / "toy-bank.npz").touch()
    sys.modules["toystudies.toy"].runs += [None] * 5
    assert command.main(["all"]) == 1  # toy_b fails
    assert "failed: toy_b" in capsys.readouterr().err
    assert not (toy / "results" / "toy_b.json").exists()


def test_a_sentence_of_a_study_is_passed_on(toy, capsys, monkeypatch):
    from unde import UndeError

    def run(variant):
        raise UndeError("the moon is too far")

    runner.importlib.import_module("toystudies.toy").run = run
    assert command.main(["run", "toy_a"]) == 2
    assert capsys.readouterr().err == "toy_a: the moon is too far\n"


def test_unknown_names_and_arguments(toy, capsys):
    assert command.main(["run", "tos"]) == 2
    assert "no study 'tos'" in capsys.readouterr().err
    assert command.main(["bank", "tos"]) == 2
    with pytest.raises(SystemExit):
        command.main(["run", "toy_a", "--agian"])


def test_the_papers_scale_gets_what_follows(monkeypatch):
    asked = []
    fake = types.SimpleNamespace(run=lambda name, arguments: asked.append((name, arguments)))
    monkeypatch.setitem(sys.modules, "experiments.scale", fake)
    assert command.main(["run", "imagenet-resnet18", "--scale", "paper", "--data", "/x"]) == 0
    assert asked == [("imagenet-resnet18", ["--data", "/x"])]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("model name\t: A 1\nflags\t\t: fpu avx2 fma sse\n\nmodel name\t: B\n", ("A 1", ["avx2", "fma"])),
        ("processor : 0\nFeatures : fp asimd sve2\n", (None, ["asimd", "sve2"])),
    ],
)
def test_the_processor_is_recorded(tmp_path, text, expected):
    (tmp_path / "cpuinfo").write_text(text)
    name, instructions = runner.cpu(tmp_path / "cpuinfo")
    assert instructions == expected[1] and (expected[0] is None or name == expected[0])


def test_a_study_without_its_contract_is_refused(tmp_path):
    (tmp_path / "bad.py").write_text('"""Title."""\ndef run(variant): ...\n')
    with pytest.raises(runner.Refused, match=r"bad\.py says no title .* or no PAPER"):
        runner.studies(tmp_path)
