"""LDS against bytes: the study on a toy bank, and its page from results that are made up."""

import json
import types

import numpy as np
import torch
from experiments.pages import quality as page
from experiments.pages.book import Book
from experiments.studies import quality
from torch import nn

from unde import Index
from unde.tasks import Classification


def test_a_bank_is_measured_and_its_index_deleted(tmp_path, monkeypatch):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)), torch.randn(60, 6)
    masks = np.random.default_rng(0).random((40, 60)) < 0.5
    utility = masks @ np.random.default_rng(1).normal(size=(60, 12))
    cell = types.SimpleNamespace(
        name="toy",
        bank=types.SimpleNamespace(masks=masks, utility={"learn": utility, "eval": utility}),
        queries=lambda role: (x[:12], x[:12, :3].argmax(1)),
        build=lambda folder, method, **options: Index.build(
            model, Classification(), (x, x[:, :3].argmax(1)), folder, method=method, progress=False, **options
        ),
    )
    monkeypatch.setattr(quality.cells, "get", lambda name: cell)
    monkeypatch.setattr(quality, "RUNS", tmp_path)
    monkeypatch.setattr(quality, "DRAWS", 1)
    monkeypatch.setattr(quality.calibration, "HALVES", (8,))
    for features, families in {"factored-1": {"EKFAC"}, "none": {"TracIn", "TRAK", "LoGRA", "EKFAC"}}.items():
        found = quality.run(f"mnist-vit_{features}")
        assert {name.partition(",")[0] for name in found["settings"]} == families
        assert found["bytes"] > 0 and "draws" not in found["8"] and -1 <= found["8"]["judged"] <= 1
    assert not list((tmp_path / "quality").iterdir())
    json.dumps(found)


def test_the_page_has_what_is_there_and_says_what_is_not(tmp_path, monkeypatch):
    for features, size, lds in (("kron-16", 10192, 0.214), ("factored-4", 82261, 0.572)):
        found = {"examples": 10, "bytes": size, "besides": 0, "seconds": {"build": 35.1, "settings": 1.0},
                 "settings": {"EKFAC, damping 0.1": lds}, "best": "EKFAC, damping 0.1",
                 "8": {"judged": lds}, "16": {"judged": lds + 0.01}}  # fmt: skip
        path = tmp_path / f"quality_finetuned-gpt2_{features}.json"
        path.write_text(json.dumps({"results": found}))
    monkeypatch.setattr(page, "PEERS", tmp_path / "peers.json")
    book = Book(tmp_path)
    assert "| `kron(16)` | 10.2 kB | 35 | – | – | – | 21.4 | 21.4 | 22.4 |" in page.quality_table(book)
    assert "| 21.4 / 22.4 (10.2 kB) | 57.2 / 58.2 (82.3 kB) |" in page.quality_short(book)
    missing = page.quality_missing(book)
    assert "fine-tuning, GPT-2-like (kron(64), factored(1), factored(16), none); CIFAR-2 (kron(16)" in missing
    seconds = {"before queries": 60.0, "queries": 20.0}
    peer = {"lds": {"mean": 0.3, "ci95": 0.02}, "seconds": seconds, "bytes": 4e7}
    page.PEERS.write_text(json.dumps({"results": {"dattri": peer}}))
    assert "| dattri | 30.0 ± 2.0 | 60 | 20 | 40 MB |" in page.quality_peers(book)
    assert page.quality_figure(book).endswith("(figures/quality.svg)")
    assert "dattri" in book.figures["quality.svg"] and "fine-tuning" in book.figures["quality.svg"]
