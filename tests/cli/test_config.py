"""Options in a file: what they mean, what is refused, and that the file of an index builds it again."""

import json
from pathlib import Path

import pytest
from commands import run

import toy
from refusals import refused
from unde import Index, UndeError
from unde.index.verify import verify
from unde.store import layout


def test_the_file_of_an_index_builds_it_again(project):
    run("build", f"{project}:make", "--out", "old", "--method", "logra", "--projection", "kron(4)", "--seed", 3,
        "--exclude", r"^0\.bias$", "--store-dtype", "float16", "--memory", "1GB", "--groups", "tensor",
        "--engine", "serial", "--threads", 1)  # fmt: skip
    run("build", "--config", "old/run.toml", "--out", "new")
    old, new = toy.content(Path("old")), toy.content(Path("new"))
    assert old == new and {"manifest.json", "run.toml", "source.json"} <= set(old)
    text = Path("old/run.toml").read_text()
    assert "threads = 1" in text and 'projection = "kron(4)"' in text and "engine" not in text
    # What was not said is there too.
    run("build", f"{project}:make", "--out", "plain")
    run("build", "--config", "plain/run.toml", "--out", "plainer")
    assert toy.content(Path("plain")) == toy.content(Path("plainer"))
    plain = Path("plain/run.toml").read_text()
    assert 'projection = "none"' in plain and "threads = " in plain


def test_the_command_line_wins(project):
    Path("run.toml").write_text(
        f'target = "{project}:make"\nout = "idx"\nmethod = "tracin"\nprojection = "none"\nstore_dtype = "float16"\n'
    )
    run("build", "--config", "run.toml", "--projection", "kron(2)", "--seed", 7)
    m = Index.open("idx").manifest
    assert (m.store_dtype, m.seed, str(Index.open("idx").method.projection)) == ("float16", 7, "kron(2)")
    assert Index.open("idx").method.name == "tracin"


def test_a_plan_takes_the_file_of_a_build(project):
    Path("run.toml").write_text(f'target = "{project}:make"\nout = "idx"\nmethod = "tracin"\nseed = 3\n')
    told = json.loads(run("plan", "--config", "run.toml", "--format", "json"))
    assert "tracin" in str(told["method"]) and not Path("idx").exists()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('methd = "trak"', "unknown key of run.toml 'methd': .* Did you mean 'method'"),
        ("seq_leng = 3", "Did you mean 'seq-len'"),
        ("trust-remote-code = true", "trust-remote-code is no key: whose code to run is said on the command"),
        ("method = true", "run.toml: method is true: expected a text or number"),
        ("exclude = 'x'", 'run.toml: exclude is "x": expected a list of texts'),
        ("[build]\nseed = 1", "unknown key of run.toml 'build'"),
        ("method = [1]", r"method is \[1\]: expected a text or number"),
        ("method trak", "run.toml is not TOML: .*line 1"),
        ('config = "other.toml"', "unknown key of run.toml 'config'"),
    ],
)
def test_mistakes(project, text, says):
    Path("run.toml").write_text(text + "\n")
    refused(says, run, "build", f"{project}:make", "--out", "idx", "--config", "run.toml")
    assert not Path("idx").exists()


def test_a_file_that_is_not_there(project):
    with pytest.raises(UndeError, match=r"no file nowhere.toml: expected a TOML file of options"):
        run("build", f"{project}:make", "--out", "idx", "--config", "nowhere.toml")


def test_the_file_of_a_foreign_index_runs_nothing(project, tmp_path, monkeypatch):
    run("build", f"{project}:make", "--out", "idx")
    Path("idx/run.toml").write_text('target = "os:abort"\n')
    with pytest.raises(UndeError, match="names 'os:abort', which is not what idx was built from"):
        run("build", "--config", "idx/run.toml", "--out", "new")
    Path("idx/run.toml").write_text(f'target = "{project}:make"\n')
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another home"))
    refused("the index was built by somebody else", run, "build", "--config", "idx/run.toml", "--out", "new")


def test_the_file_is_part_of_the_index(project):
    assert layout.is_index_path("run.toml") and layout.is_index_name("run.toml")
    run("build", f"{project}:make", "--out", "idx")
    assert verify(Path("idx"))
    path = Path("idx/run.toml")
    path.write_text(path.read_text().replace("seed = 0", "seed = 1"))
    assert "run.toml" in str(verify(Path("idx"))) and not verify(Path("idx"))
    path.unlink()
    assert verify(Path("idx"))
