"""What the page is told is what the library says: answers, weights, methods, filters, sets, both directions."""

import csv
import io
import json
import sys
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import pages
from refusals import refused
from unde import Index, Setup, tasks
from unde.data import Rows
from unde.evaluate import baseline_scores
from unde.methods import DAS, TRAK, LoGRA, TracIn
from unde.ui.explorer import Session
from unde.ui.explorer.baselines import Baselines
from unde.ui.explorer.ranking import ScoreCache, Sliders, move_sliders

EVAL = {"kind": "eval", "at": 0}


def same(found, top):
    """Whether a side of a row is the library's own top of a query."""
    ids, values = top.indices[0].tolist(), top.values[0].tolist()
    assert [one["at"] for one in found] == ids
    assert [one["value"] for one in found] == pytest.approx(values, rel=1e-4, abs=1e-7)


def check(client, answer, scores, w=None, count=5, **how):
    """Both rows of a ranking, against `scores.top`."""
    rows = client.rank(answer, count=count, **how)["rows"]
    ways = [None] if w is None else [None, w]
    assert len(rows) == len(ways)
    for row, w in zip(rows, ways):
        for side, largest in (("high", True), ("low", False)):
            top = scores.top(count, w, largest)
            keep = (top.values[0] > 0) if largest else (top.values[0] < 0)
            if not row["signed"]:
                keep = torch.ones_like(keep)
            kept = replace(top, indices=top.indices[:, keep], values=top.values[:, keep])
            same(row[side], kept)
            assert len(row[side])


@pytest.mark.parametrize("method", ["trak", "tracin", "logra", "tracin-cosine"])
def test_a_held_out_query_under_every_method(pictures, method):
    session = pictures.session
    query = session.roles["eval"].rows[0]
    answer = pictures.ask(EVAL, method=method)
    scores = session.index.score([query], method)
    moved = [0.0, 2.5, 0.5]
    check(pictures, answer, scores)
    check(pictures, answer, scores, session.weights["learned"], weights="learned")
    check(pictures, answer, scores, torch.tensor(moved), values=moved)


def test_another_damping_is_another_answer(pictures):
    query = pictures.session.roles["eval"].rows[1]
    answer = pictures.ask({"kind": "eval", "at": 1}, method="logra", damping=3.0)
    check(pictures, answer, pictures.session.index.score([query], LoGRA(damping=3.0)))


def test_das_is_squared_after_its_weights(tmp_path):
    class Task(tasks.Classification):
        def measure(self, model, batch, *, name="loss", ids=None):
            if name == "residual":
                return self.loss(model, batch).detach() + 1
            return super().measure(model, batch, name="loss", ids=ids)

    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)), torch.randn(30, 4)
    y = x[:, 0].gt(0).long()
    setup = Setup(model, Task(), (x[:24], y[:24]), eval_queries=(x[24:], y[24:]))
    session = pages.session(setup, tmp_path / "das", DAS(projection="none"))
    answered = pages.ask(session, EVAL)
    w = torch.tensor([0.3, 1.7])
    [total] = session.index.score([session.roles["eval"].rows[0]]).total(w)
    held = session.answer(answered["answer"]).cache
    assert torch.allclose(held.total(w), total, rtol=1e-4)
    assert not torch.allclose(held.total(2 * w), 2 * held.total(w))
    row = session.rank({"answer": answered["answer"], "values": w.tolist(), "count": 3})["rows"][1]
    assert not row["signed"] and [one["at"] for one in row["high"]] == total.topk(3).indices.tolist()


def test_contributions_that_memory_does_not_hold(classifier, monkeypatch):
    scores = classifier.index.score([classifier.roles["eval"].rows[0]])
    held = ScoreCache.forward(scores)
    monkeypatch.setattr("unde.ui.explorer.ranking.SHARE", 10**9)
    streamed = ScoreCache.forward(scores)
    w = torch.tensor([0.3, 1.1, 0.9])
    assert held.contributions is not None and streamed.contributions is None
    assert torch.allclose(held.total(w), streamed.total(w), rtol=1e-4)


def test_blocks_of_groups_keep_their_proportions():
    groups = [f"net.layers.{i}.{n}" for i in range(10) for n in ("q", "k", "v")]
    sliders = Sliders.for_groups(groups)
    assert len(sliders.names) == 10 and sliders.of.tolist() == [i for i in range(10) for _ in range(3)]
    base = torch.arange(30.0)
    base[3:6] = 0
    values = sliders.means(base)
    assert torch.equal(sliders.weights(base, values), base)  # not moved: exactly what they were
    values[1], values[2] = 2.0, 2 * values[2]
    moved = sliders.weights(base, values)
    assert moved[3:6].tolist() == [2, 2, 2] and moved[6:9].tolist() == [12, 14, 16]
    assert torch.equal(moved[9:], base[9:])
    assert sliders.names[:2] == ["layers.0", "layers.1"] and sliders.members[0] == ["q", "k", "v"]
    many = Sliders.for_groups([f"model.part.p{i}" for i in range(100)])
    assert (
        len(many.names) == 24 and many.names[0] == "part.p0 … part.p4" and many.members[0][:2] == ["p0", "p1"]
    )


def test_a_group_of_a_block_is_moved_by_itself():
    sliders = Sliders.for_groups([f"net.layers.{i}.{n}" for i in range(10) for n in ("q", "k", "v")])
    base = torch.arange(30.0)
    values = [*sliders.means(base).tolist()]
    values[1], values[2] = [5, 0.5, 0], 2 * values[2]
    moved = move_sliders(sliders, base, values)
    assert moved[3:6].tolist() == [5, 0.5, 0] and moved[6:9].tolist() == [12, 14, 16]
    assert torch.equal(moved[:3], base[:3]) and torch.equal(moved[9:], base[9:])
    for wrong in ([1, 2], [1, 2, -1], [1, 2, [3]], [1, 2, True], [1, 2, float("nan")]):
        refused("expected 10 numbers from 0", move_sliders, sliders, base, [wrong, *values[1:]])


def test_a_set_of_queries_is_its_mean_and_a_contrast(pictures):
    index, rows = pictures.session.index, pictures.session.roles["eval"].rows
    totals = index.score([rows[i] for i in range(4)]).total()
    answer = pictures.ask(*({"kind": "eval", "at": i} for i in (0, 1)), minus=({"kind": "eval", "at": 3},))
    expected = totals[:2].mean(0) - totals[3]  # TRAK is linear in the query
    found = pictures.rank(answer)["rows"][0]
    assert [one["at"] for one in found["high"]] == expected.topk(5).indices.tolist()
    assert [one["value"] for one in found["low"]] == pytest.approx(
        (-(-expected).topk(5).values).tolist(), rel=1e-3
    )
    assert answer["notes"] == ["Question about the mean of 2 queries, less another."]


def test_another_label_is_asked_about(pictures):
    session = pictures.session
    x, y = session.roles["eval"].rows[0]
    other = (int(y) + 1) % 4
    answer = pictures.ask({**EVAL, "label": other})
    asked = answer["asked"][0]
    assert asked["own"] == int(y) and asked["label"] == other
    assert asked["predicted"] == int(session.setup.model(x[None]).argmax())
    check(pictures, answer, session.index.score([(x, torch.tensor(other))]))
    assert "0 to 3" in pictures.ask({**EVAL, "label": 4})["error"]


def test_a_training_example_and_what_it_influences(pictures):
    session = pictures.session
    answer = pictures.ask({"kind": "train", "at": 7})
    check(pictures, answer, session.index.score([session.train.rows[7]]))
    reverse = pictures.job("/api/influenced", {"at": 7})
    queries = [session.roles[r].rows[i] for r, n in (("eval", 6), ("learn", 3)) for i in range(n)]
    for w, how in ((None, {}), (session.weights["learned"], {"weights": "learned"})):
        column = session.index.score(queries).total(w)[:, 7]
        row = pictures.rank(reverse, count=20, **how)["rows"][-1]
        found = {at: value for at, value in pages.values(row).items() if at < len(queries)}
        assert found == pytest.approx(dict(enumerate(column.tolist())), rel=1e-4, abs=1e-7)
    entry = pictures.post("/api/examples", {"where": "pool", "answer": reverse["answer"], "at": [6]})[0]
    assert entry["question"] == {"kind": "learn", "at": 0}


def test_without_queries_training_examples_are_looked_at(tmp_path):
    setup = pages.classification()
    setup.eval_queries = setup.learn_queries = None
    session = pages.session(setup, tmp_path / "idx", TracIn(projection="none"))
    told = session.influenced(3, {}, pages.quiet_job())
    assert "no queries yet" in told["notes"][0]
    row = session.rank({"answer": told["answer"], "count": 50})["rows"][0]
    column = session.index.score(setup.train_data).total()[:, 3]
    assert pages.values(row) == pytest.approx(dict(enumerate(column.tolist())), rel=1e-4, abs=1e-7)


def test_a_picture_becomes_what_the_model_sees(pictures):
    session = pictures.session
    sent = pictures.web.post("/api/picture", content=pages.png((8, 8), value=51)).json()
    answer = pictures.ask({"kind": "picture", "picture": sent["picture"], "label": 2})
    check(pictures, answer, session.index.score([(torch.full((1, 8, 8), 0.2), torch.tensor(2))]))
    assert answer["asked"][0]["notes"] == []
    large = pictures.web.post("/api/picture", content=pages.png((20, 30), "RGB", "red", "JPEG")).json()
    answer = pictures.ask({"kind": "picture", "picture": large["picture"]})
    assert "resized from 20 × 30 to 8 × 8" in answer["asked"][0]["notes"][0]
    assert answer["asked"][0]["label"] == answer["asked"][0]["predicted"]


@pytest.mark.parametrize(("low", "high", "value"), [(-1.0, 1.0, -0.6), (0.0, 255.0, 51.0), (-2.0, 3.0, -1.0)])
def test_pictures_in_other_ranges(low, high, value):
    from unde.integrations.pictures import ImageFormat, decode_picture

    x = torch.rand(9, 3, 4, 4) * (high - low) + low
    x[0, :, 0, 0], x[0, :, 0, 1] = low, high
    made, _ = ImageFormat.of(Rows((x, torch.arange(9)))).fit(
        decode_picture(pages.png((4, 4), "RGB", (51, 51, 51)))
    )
    assert torch.allclose(made[0], torch.full((3, 4, 4), value), atol=1e-5)


def test_filters_choose_before_the_best_are_taken(pictures):
    session = pictures.session
    answer = pictures.ask(EVAL)
    [total] = session.index.score([session.roles["eval"].rows[0]]).total()
    labels = session.setup.train_data[1]
    first = pictures.rank(answer, filter={"label": "2"})
    assert first["read"] == "labels"
    pictures.job("/api/read", {"what": "labels"})
    found = pictures.rank(answer, filter={"label": "2"})
    expected = total.masked_fill(labels != 2, -torch.inf).topk(5)
    expected = [i for i, v in zip(expected.indices.tolist(), expected.values.tolist()) if v > 0]
    assert [one["at"] for one in found["rows"][0]["high"]] == expected and found["matched"] == int(
        (labels == 2).sum()
    )
    found = pictures.rank(answer, filter={"id": "img-7, img-31"})
    shown = {one["at"] for side in ("high", "low") for one in found["rows"][0][side]}
    assert shown == {7, 31} and found["matched"] == 2
    assert pictures.rank(answer, filter={"id": "none"})["rows"][0]["high"] == []
    assert "label, id or text" in pictures.rank(answer, filter={"colour": "red"})["error"]


def test_texts_are_cut_found_and_shaded(texts):
    session = texts.session
    asked = "The people are free and the state of the union is strong."
    answer = texts.ask({"kind": "text", "text": asked})
    rows = Rows(session.setup.ask.text(asked), session.setup.task.collate)
    scores = session.index.score(rows)
    check(texts, answer, scores, count=3)
    texts.job("/api/read", {"what": "texts"})
    found = texts.rank(answer, filter={"text": "SAID THE"})
    known = [i for i in range(len(session.train)) if "said the" in session.train.text(i)]
    assert found["matched"] == len(known) == 4 - 1  # the third of them says nothing
    w = session.weights["learned"]
    at = int(scores.top(1, w).indices[0, 0])
    shaded = texts.job("/api/shade", {"answer": answer["answer"], "at": [at], "weights": "learned"})[
        "passages"
    ]
    values = session.index.tokens(scores, w)(0, session.train.rows[at])
    assert f"{float(values.abs().max()):.3g}" in shaded[str(at)].replace("−", "").replace("+", "")
    assert float(values.sum()) == pytest.approx(float(scores.top(1, w).values[0, 0]), rel=1e-3)
    long = texts.ask({"kind": "text", "text": " ".join([asked] * 5)})
    assert "parts: scores are of their mean" in long["asked"][0]["notes"][0]


def test_what_training_data_say_is_escaped(texts):
    for entry in texts.post("/api/examples", {"at": list(range(len(texts.session.train)))}):
        assert "<script" not in entry["html"] and "<img" not in entry["html"] and "<b " not in entry["html"]
    assert "&lt;script&gt;" in texts.post("/api/examples", {"at": [8]})[0]["html"]
    assert "<script" not in texts.get("/api/example?at=8")["whole"]


def test_marks_are_kept_and_exported(texts):
    for at, mark in ((8, "remove"), (11, "duplicate"), (2, "label"), (2, None)):
        texts.post("/api/mark", {"at": at, "mark": mark})
    assert texts.get("/api/marks")["marks"] == {"8": "remove", "11": "duplicate"}
    lines = [json.loads(line) for line in texts.web.get("/api/export?format=jsonl").text.splitlines()]
    assert [(row["index"], row["id"], row["mark"]) for row in lines] == [
        (8, "8:1", "remove"),
        (11, "10:2", "duplicate"),
    ]
    assert lines[0]["text"] == pages.HOSTILE[0]
    rows = list(csv.DictReader(io.StringIO(texts.web.get("/api/export?format=csv").text)))
    assert [row["mark"] for row in rows] == ["remove", "duplicate"]
    assert "expected one of" in texts.post("/api/mark", {"at": 1, "mark": "nice"})["error"]
    for at in (8, 11):
        texts.post("/api/mark", {"at": at, "mark": None})
    assert "no example is marked" in texts.get("/api/export?format=csv")["error"]


def test_halves_of_characters_are_told_and_exported(texts, monkeypatch):
    monkeypatch.setattr(texts.session.train, "text", lambda at: "half of a \ud83d face")
    assert texts.web.post("/api/mark", json={"at": 1, "mark": "remove"}).status_code == 200
    assert texts.get("/api/marks")["listed"][0]["text"] == "half of a \ud83d face"
    for format in ("csv", "jsonl"):
        found = texts.web.get(f"/api/export?format={format}")
        assert found.status_code == 200 and b"half of a" in found.content
    texts.post("/api/mark", {"at": 1, "mark": None})


def test_classes_have_names_and_wrong_labels_a_sign(tmp_path):
    setup = pages.classification()
    true = setup.train_data[1].clone()
    true[5] = (true[5] + 1) % 4
    setup.classes, setup.true_labels = ["north", "east", "south", "<west>"], true
    session = pages.session(setup, tmp_path / "idx")
    assert session.describe()["classes"] == setup.classes
    entry, whole = session.train.entry(5), session.train.entry(6)
    assert entry["label"] == setup.classes[int(setup.train_data[1][5])]
    assert "mislabelled" in entry["html"] and "mislabelled" not in whole["html"]
    session.train.read("labels", pages.quiet_job())
    for number, name in enumerate(setup.classes):
        assert torch.equal(session.train.matching({"label": name}), setup.train_data[1] == number)


@pytest.mark.parametrize(
    ("limit", "value", "held"), [("unde.Index.memory", 1000, 1), ("unde.ui.explorer.session.MOST", 3, 3)]
)
def test_only_so_many_answers_are_held(tmp_path, monkeypatch, limit, value, held):
    session = pages.session(pages.classification(), tmp_path / "idx", TRAK(projection="none"))
    monkeypatch.setattr(limit, value)
    told = [pages.ask(session, {"kind": "eval", "at": i}) for i in range(5)]
    for one in told[-held:]:
        assert session.rank({"answer": one["answer"]})["rows"]
    for one in told[:2]:
        with pytest.raises(Exception, match="not held any more"):
            session.rank({"answer": one["answer"]})


def test_loaders_put_batches_together_themselves(tmp_path):
    setup = pages.classification()
    x, y = setup.train_data

    def doubled(examples):
        return torch.stack([2 * image for image, _ in examples]), torch.stack(
            [label for _, label in examples]
        )

    given = list(zip(x, y))
    setup.train_data, setup.learn_queries = DataLoader(given[:30], collate_fn=doubled), None
    setup.eval_queries, setup.ids = DataLoader(given[30:], collate_fn=doubled), None
    session = pages.session(setup, tmp_path / "idx", TracIn(projection="none"))
    told = pages.ask(session, {"kind": "eval", "at": 3})
    row = session.rank({"answer": told["answer"], "count": 30})["rows"][0]

    def gradient(i):
        loss = nn.functional.cross_entropy(setup.model(2 * x[i : i + 1]), y[i : i + 1])
        parts = torch.autograd.grad(loss, list(setup.model.parameters()))
        return torch.cat([part.flatten() for part in parts])

    alike = {i: float(gradient(33) @ gradient(i)) for i in range(30)}
    assert pages.values(row) == pytest.approx(alike, rel=1e-3, abs=1e-5)


def test_what_sliders_shade_is_not_held_for_ever(texts, monkeypatch):
    session = texts.session
    monkeypatch.setattr("unde.ui.explorer.session.SHADES", 3)
    answer = texts.ask({"kind": "text", "text": "The state of the union is strong and free."})
    held = session.answer(answer["answer"]).shades
    for step in range(6):
        values = [1 + step / 10] * len(session.sliders.names)
        said = {"answer": answer["answer"], "at": [0, 1], "values": values}
        assert set(texts.job("/api/shade", said)["passages"]) == {"0", "1"}
        assert len(held) <= 3 + 2


def test_questions_that_take_the_place_of_others_are_looked_at(texts, monkeypatch):
    monkeypatch.setattr("unde.ui.explorer.query_builder.HELD", 1)
    ranked = []
    for asked in ("The people are free and strong, said one.", "The state is strong, said the other."):
        texts.ask({"kind": "text", "text": asked})
        answer = texts.job("/api/influenced", {"at": 1})
        last = answer["count"] - 1
        sent = {"where": "pool", "answer": answer["answer"], "at": [last]}
        assert texts.post("/api/examples", sent)[0]["question"]["text"] == asked
        ranked.append(answer["answer"])
    assert len(set(ranked)) == 2


def test_weights_that_saw_the_query_say_so(tmp_path):
    session = pages.session(pages.classification(), tmp_path / "idx")
    rows = session.roles["learn"].rows
    seen = replace(session.weights["learned"], query_digests=rows.digests())
    other = Session(session.index, session.setup, {"learned": seen})
    told = pages.ask(other, {"kind": "learn", "at": 1})
    assert "were learned on this query" in told["notes"][0]
    assert not pages.ask(other, EVAL)["notes"]


def test_an_index_that_changes_is_not_asked_any_more(tmp_path):
    session = pages.session(pages.classification(), tmp_path / "idx")
    with pages.client(session) as client:
        answer = client.ask(EVAL)
        other = pages.classification()
        other.train_data = pages.images(44, 9)
        (tmp_path / "idx").rename(tmp_path / "old")
        assert "is gone" in client.ask({"kind": "eval", "at": 2})["error"]
        Index.build(
            other.model, other.task, other.train_data, tmp_path / "idx", method="trak", progress=False
        )
        assert "was changed since" in client.ask({"kind": "eval", "at": 2})["error"]
        assert client.rank(answer)["rows"]  # what is held is as it was


def test_baselines_are_computed_when_they_are_switched_on(texts):
    setup, index = texts.session.setup, texts.session.index
    names = ["BM25", "hidden-state similarity"]
    assert texts.get("/api/session")["baselines"] == names
    answer = texts.ask({"kind": "eval", "at": 0})
    rank = texts.web.post("/api/rank", json={"answer": answer["answer"], "baselines": names})
    assert rank.status_code == 409 and rank.json()["baseline"] == "BM25"
    for name in names:
        said = {"answer": answer["answer"], "baseline": name}
        assert texts.job("/api/baseline", said) == {"baseline": name}
    plain, *rows = texts.rank(answer, baselines=names)["rows"]
    queries = setup.rows(setup.eval_queries)
    words = setup.texts(setup.rows(setup.train_data)), setup.texts(queries)
    expected = baseline_scores(setup.model, setup.task, setup.train_data, queries, texts=words)
    best = set(index.score(queries).top(10).indices[0].tolist())
    for row in rows:
        scores = expected[row["name"]][0]
        order = scores.sort(descending=True, stable=True).indices.tolist()
        assert [one["at"] for one in row["high"]] == order[:5] and row["low"] == []
        assert [one["value"] for one in row["high"]] == pytest.approx(scores[order[:5]].tolist(), abs=1e-5)
        assert row["baseline"] == {"shared": {"unweighted": len(best & set(order[:10]))}, "of": 10}
    assert [row["name"] for row in rows] == names and "baseline" not in plain
    weighted = texts.rank(answer, baselines=names, weights="learned")["rows"]
    assert list(weighted[2]["baseline"]["shared"]) == ["unweighted", "learned"]
    filtered = texts.rank(answer, baselines=["BM25"], filter={"id": "2"})["rows"][1]
    assert [one["at"] for one in filtered["high"]] == [
        one["at"] for one in sorted(filtered["high"], key=lambda one: -one["value"])
    ]
    assert filtered["baseline"]["of"] < 10


def test_baselines_of_sets_and_of_typed_texts(texts):
    names = ["BM25", "hidden-state similarity"]

    def scores(answer, name):
        texts.job("/api/baseline", {"answer": answer["answer"], "baseline": name})
        return texts.session.answer(answer["answer"]).baselines[name]

    one, two = ({"kind": "train", "at": at} for at in (1, 2))
    typed = {"kind": "text", "text": "Our navy guards the coast."}
    for name in names:
        alone = [scores(texts.ask(question), name) for question in (one, two, typed)]
        both = scores(texts.ask(one, two, minus=(typed,)), name)
        torch.testing.assert_close(both, (alone[0] + alone[1]) / 2 - alone[2], rtol=1e-5, atol=1e-5)
        if name == "BM25":
            assert alone[0].argmax() == 1 and alone[2].argmax() == 3


def test_hidden_states_that_memory_does_not_hold(texts):
    baselines = texts.session.baselines
    asked = [texts.session.answer(texts.ask({"kind": "train", "at": 1})["answer"]).asked[0]]
    job = pages.quiet_job()
    held = baselines.score("hidden-state similarity", asked, [], job)
    assert baselines._hidden is not None
    again = Baselines(baselines.setup, baselines.train, memory=100)
    torch.testing.assert_close(again.score("hidden-state similarity", asked, [], job), held)
    assert again._hidden is None


def test_bm25_without_its_package(texts, monkeypatch, capfd):
    monkeypatch.setitem(sys.modules, "bm25s", None)
    baselines = texts.session.baselines
    found = Baselines(baselines.setup, baselines.train, memory=100)
    assert found.names == ["hidden-state similarity"]
    assert "the page has no BM25" in capfd.readouterr().err


def test_baselines_that_are_refused(texts, pictures):
    assert pictures.get("/api/session")["baselines"] == ["hidden-state similarity"]
    answer = pictures.ask({"kind": "eval", "at": 0})
    refused = pictures.job("/api/baseline", {"answer": answer["answer"], "baseline": "BM25"})
    assert "unknown baseline for this index 'BM25'" in refused["error"]
    assert "list of names" in pictures.rank(answer, baselines="BM25")["error"]
    reverse = pictures.job("/api/influenced", {"at": 3})
    said = {"answer": reverse["answer"], "baseline": "hidden-state similarity"}
    assert "baselines rank training examples" in pictures.job("/api/baseline", said)["error"]
    assert len(pictures.rank(reverse, baselines=["hidden-state similarity"])["rows"]) == 1


class Records(tasks.Classification):
    """A task of a user whose examples are dicts with names of their own."""

    def split(self, batch):
        return batch["pixels"], batch["digit"]


def test_labels_of_any_name_in_dicts(tmp_path):
    def records(n, seed):
        x, y = pages.images(n, seed)
        return [{"number": i, "digit": int(y[i]), "pixels": x[i]} for i in range(n)]

    setup = Setup(pages.classifier(), Records(), records(40, 0), eval_queries=records(6, 2))
    session = pages.session(setup, tmp_path)
    row = setup.eval_queries[1]
    answer = pages.ask(session, {"kind": "eval", "at": 1})
    assert answer["asked"][0]["own"] == answer["asked"][0]["label"] == row["digit"]
    assert session.train.entry(3)["label"] == str(setup.train_data[3]["digit"])
    other = (row["digit"] + 1) % 4
    found = session.answer(pages.ask(session, {"kind": "eval", "at": 1, "label": other})["answer"])
    [expected] = session.index.score([row | {"digit": other}]).total()
    assert torch.allclose(found.cache.total(torch.ones(3)), expected, rtol=1e-4)


def test_the_query_just_asked_is_looked_at_from_the_other_side(classifier, monkeypatch):
    monkeypatch.setattr("unde.ui.explorer.ranking.MOST", 2)
    session = Session(classifier.index, classifier.setup)

    def names(at):
        pool = session.answer(session.influenced(at, {}, pages.quiet_job())["answer"]).of
        return [pool.name(i) for i in range(len(pool))]

    assert len(names(5)) == 2
    own = session.roles["eval"].rows[3][1].item()
    for question in ({"kind": "eval", "at": 3}, {"kind": "train", "at": 5}, {"kind": "train", "at": 6}):
        pages.ask(session, question)
    pages.ask(session, {"kind": "eval", "at": 3, "label": (own + 1) % 4})
    expected = ["held-out query #3", "training example img-6", f"held-out query #3 as {(own + 1) % 4}"]
    assert names(5)[2:] == expected


def test_influence_by_source_of_an_answer_and_of_the_session(tmp_path):
    session = pages.session(pages.classification(), tmp_path / "idx")
    names = [f"author {i % 3}" for i in range(len(session.train))]
    session.sources = ("author", names)
    told = [pages.ask(session, {"kind": "eval", "at": i}) for i in range(3)]
    found = session.rank({"answer": told[0]["answer"]})["sources"]
    totals = [
        session.answer(one["answer"]).cache.total(torch.ones(len(session.index.groups))) for one in told
    ]
    of = torch.tensor([i % 3 for i in range(len(names))])
    shares = torch.stack(
        [
            torch.stack([t.clamp(min=0)[of == s].sum() for s in range(3)]) / t.clamp(min=0).sum()
            for t in totals
        ]
    )  # (questions, sources)
    for row in found:
        s = int(row["name"][-1])
        assert row["share"] == pytest.approx(float(shares[0, s]), rel=1e-4)
        assert row["mean"] == pytest.approx(float(shares[:, s].mean()), rel=1e-4)
        assert row["total"] == pytest.approx(float(totals[0][of == s].sum()), rel=1e-3)
        assert row["questions"] == 3 and row["ci95"] > 0
    assert session.describe()["by"] == "author"
    assert [row["share"] for row in found] == sorted((row["share"] for row in found), reverse=True)
