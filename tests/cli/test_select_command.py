"""`unde select` and `unde evaluate --counterfactual`: tables, files, controls, and what is refused."""

import json
from functools import partial
from pathlib import Path

import pytest
from commands import TRAINED, add_project, invoke, run

import unde
from refusals import refused
from unde.setup import Recipe


@pytest.fixture
def project(tmp_path, monkeypatch):
    name = add_project(tmp_path, monkeypatch, TRAINED, "choosing")
    run("build", f"{name}:trained", "--out", "idx", "--method", "tracin")
    return f"{name}:trained"


def test_select_writes_what_the_library_chooses_and_compares(project):
    setup = Recipe(project).make()
    index = unde.Index.open("idx", model=setup.model, task=setup.task, train_data=setup.train_data)
    chosen = unde.select(index, {"learn": setup.learn_queries}, 6)
    text = invoke("select", project, "--index", "idx", "--budget", "10%", "--out", "chosen.jsonl")
    assert "6 of 60 examples" in text and "next: train on it" in text
    records = [json.loads(line) for line in Path("chosen.jsonl").read_text().splitlines()]
    assert [r["id"] for r in records] == [f"row-{i}" for i in chosen.indices.tolist()]
    assert records[0]["unde_score"] == pytest.approx(float(chosen.scores.max()))
    base = partial(run, "select", project, "--index", "idx", "--budget")
    table = base("0.2", "--target", "a=learn", "--target", "b=eval", "--strategy", "round-robin", "--compare",
                 "--seeds", 2)  # fmt: skip
    assert "12 of 60" in table and "random" in table and "loss, a" in table and "loss, b" in table
    for budget, options, message in (
        (6, ("--out", "chosen.jsonl"), "is there already"),
        (6, ("--out", "chosen.csv"), "ends in .jsonl"),
        (6, ("--out", "no/where.jsonl"), "no folder no"),
        (6, ("--overwrite",), "without --out"),
        (61, (), "holds 60"),
        (6, ("--strategy", "best"), "unknown --strategy"),
        (6, ("--target", "a=file.jsonl"), "brings its own queries"),
        (6, ("--target", "learn", "--target", "learn"), "another name"),
        (6, ("--epochs", 2), "--epochs goes with --compare"),
    ):
        refused(message, base, budget, *options)


def test_counterfactual_of_an_index(project):
    base = partial(run, "evaluate", project, "--index", "idx", "--counterfactual", "--k", 5, "--seeds", 2)
    text = base("--first", 2, "--format", "json")
    result = json.loads(text[text.index("{") :])
    assert result["trainings"] == 2 * (1 + 1 + 2) and set(result["rankings"]) == {"tracin", "random"}
    table = base("--first", 2)  # nothing is trained again
    assert "8 trainings" in table and "flipped" in table and "idx.removals" in table
    refused("one of the two", run, "evaluate", project, "--index", "idx")
    refused("one of the two", base, "--bank", "bank.npz")
    refused("unknown --of", base, "--of", "all")
    refused("from 1 to 59", base, "--k", 60)


def test_conversations_are_written_whole(tmp_path, monkeypatch):
    hf_toy = pytest.importorskip("hf_toy")
    monkeypatch.chdir(tmp_path)
    hf_toy.save(tmp_path / "model")
    words = hf_toy.tokenizer()
    words.chat_template = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    words.save_pretrained("model")
    talks = [
        {"messages": [{"role": "user", "content": a}, {"role": "assistant", "content": b}], "source": i}
        for i, (a, b) in enumerate(zip(hf_toy.LINES, hf_toy.LINES[1:]))
    ]
    for name, some in (("train", talks[:5]), ("law", talks[5:6]), ("sea", talks[6:])):
        Path(f"{name}.jsonl").write_text("".join(json.dumps(t) + "\n" for t in some))
    run("build --hf-model model --data train.jsonl --seq-len 16 --out idx --method tracin")
    run("select --index idx --target law.jsonl --target sea.jsonl --budget 6 --duplicates 1 --out some.jsonl")
    records = [json.loads(line) for line in Path("some.jsonl").read_text().splitlines()]
    assert all(r["messages"] == talks[r["source"]]["messages"] for r in records)
    assert len({r["source"] for r in records}) == len(records) <= 5  # cut into pieces, written once
    assert {r["unde_target"] for r in records} <= {"law", "sea"}
    run("select --index idx --target law.jsonl --budget 2 --out folder")
    assert len(pytest.importorskip("datasets").load_from_disk("folder")) == 2
    refused("no target", run, "select --index idx --budget 2")
    refused("two or more", run, "select --index idx --target law.jsonl --budget 2 --compare --base model")


def test_pieces_of_texts_keep_the_other_columns_and_the_model_itself_can_be_trained(tmp_path, monkeypatch):
    hf_toy = pytest.importorskip("hf_toy")
    monkeypatch.chdir(tmp_path)
    hf_toy.save(tmp_path / "model")
    texts = [" ".join(pair) for pair in zip(hf_toy.LINES, hf_toy.LINES[1:])]
    rows = [{"id": f"d{i}", "text": text, "author": i % 2} for i, text in enumerate(texts)]
    Path("train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    hf_toy.write_jsonl(Path("law.jsonl"), hf_toy.LINES[:4])
    hf_toy.write_jsonl(Path("new.jsonl"), ["Nothing like it was ever written here."])
    run("build --hf-model model --data train.jsonl --seq-len 16 --out idx --method tracin")
    ask = "select --index idx --target law.jsonl --budget 5 --duplicates 1 --out some.jsonl"
    table = run(f"{ask} --compare --base model --epochs 1 --seeds 2", both=True)
    assert "gain over random" in table
    records = [json.loads(line) for line in Path("some.jsonl").read_text().splitlines()]
    assert len(records) == 5  # a piece each
    for record in records:
        whole = rows[int(record["id"][1])]
        assert record["author"] == whole["author"] and record["text"] in whole["text"] != record["text"]
    refused(
        "--base model is the model itself",
        run,
        "calibrate --index idx --queries new.jsonl --halves 4 --base model",
    )
