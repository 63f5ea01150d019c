"""The study of other libraries' settings: its facts, its measures and its page; and images that are fine-tuned on."""

import json
import types

import pytest
import torch
from experiments.pages import outside as page
from experiments.pages.book import Book
from experiments.shared import facts


def test_facts_are_told_four_times_and_asked_for_in_another_wording():
    train, queries, relevant, (told, asked) = facts.told()
    assert len(told) == 1920 and len(asked) == 200 and (relevant.sum(1) == 4).all()
    for text, rows in zip(asked, relevant, strict=True):
        sources = [told[i] for i in rows.nonzero().flatten()]
        assert text not in sources and len(set(sources)) == 4
        assert {source.split()[-1] for source in sources} == {text.split()[-1]}
    answers = (queries["labels"] != -100).sum(1)
    assert (answers == 1).all() and ((train["labels"] != -100).sum(1) > 3).all()


def test_retrieval_counts_the_first_hit_and_the_share_of_all():
    relevant = torch.zeros(2, 20, dtype=torch.bool)
    relevant[0, [0, 1, 2, 3]] = relevant[1, [4, 5, 18, 19]] = True
    found = facts._retrieval(-torch.arange(20.0).repeat(2, 1), relevant)
    assert found["MRR"].tolist() == [1.0, 0.2]
    assert found["Recall@4"].tolist() == [1.0, 0.0] and found["Recall@10"].tolist() == [1.0, 0.5]


def test_the_page_has_our_figures_beside_published_ones(tmp_path):
    empty = Book(tmp_path / "none")
    assert "run outside_lr" in page.mnist(empty) and "run outside_facts" in page.facts(empty)
    e = {"mean": 0.5, "ci95": 0.01, "ci95_total": 0.02}
    results = {
        "outside_lr": {
            "one model": {"default: TRAK": e}, "reliability": 0.9,
            "calibrated": {"setting": "TRAK, damping 1", "weighted": True, "expected": e, "estimate": e},
            "ensembles": {n: {"TRAK": e} for n in ("1", "10", "50")},
        },
        "outside_quanda": {"chance": {"class detection": {"score": 0.1, "low": 0.08, "high": 0.12}}},
        "outside_facts": {"right": 0.9, "methods": {"BM25": {"MRR": e}}},
    }  # fmt: skip
    for name, found in results.items():
        (tmp_path / f"{name}.json").write_text(json.dumps({"results": found}))
    book = Book(tmp_path)
    assert "IF-CG, published by dattri* | 80.0 |" in page.mnist(book)
    assert "TRAK, damping 1, weighted; 50.0 ± 1.0 (2.0) expected" in page.mnist(book)
    assert "run outside_mlp" in page.mnist(book)
    assert "published by dattri* | 41.0 | 64.0 | 68.0 |" in page.ensembles(book)
    assert "| chance | 0.100 [0.080, 0.120] |" in page.quanda(book)
    assert "| BM25 | 50.0 ± 1.0 (2.0) |" in page.facts(book) and page.facts_right(book) == "90 %"


@pytest.mark.parametrize("architecture", ["resnet", "vit"])
def test_fine_tuning_starts_from_the_checkpoint_and_leaves_statistics_alone(architecture, monkeypatch):
    from experiments.shared import image_finetuning as study

    torch.set_num_threads(1)
    before = study._network(architecture, 6)
    monkeypatch.setattr(study, "pretrained", lambda name: before)
    x = torch.randn(12, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(study, "images", lambda: types.SimpleNamespace(train=(x, torch.arange(12) % 4)))
    monkeypatch.setitem(study.FINETUNING, architecture, (2, 4, 1e-3))
    after, old = study.training(architecture)(range(12), 0), dict(before.state_dict())
    same = [
        k for k, v in after.state_dict().items() if k in old and v.shape == old[k].shape and v.equal(old[k])
    ]
    assert all(("running" in name) or ("batches" in name) for name in same)
    assert len([n for n in same if "running" in n]) == len([n for n in old if "running" in n])
    assert after(x).logits.shape == (12, 4)
