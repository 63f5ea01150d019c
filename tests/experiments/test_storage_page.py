"""The tables of smaller stores, from results that are made up."""

import json

from experiments.pages.book import Book
from experiments.pages.storage import storage_table

from experiments import tables


def row(mean, half=0.001, error=0.02):
    difference = {"mean": mean, "ci95": half / 2, "ci95_total": half}
    return {"difference": difference, "error": error, "shared": 0.9, "recall": 0.5, "spearman": 0.99}


def book(tmp_path):
    """Two banks; in one store a cell is refused."""
    refused = {"refused": "at λ = 0.1 the rounding …"}
    for bank, (a, b) in {"mnist-resnet": (0.001, -0.003), "robots": (0.002, 0.004)}.items():
        stores = {
            "float32": {"bytes": 400.0, "methods": {"TracIn": row(0), "TRAK": row(0)}},
            "float16": {"bytes": 50.0, "methods": {"TracIn": row(a), "TRAK": refused}},
            "int8": {"bytes": 100.0, "methods": {"TracIn": row(a), "TRAK": row(b)}},
        }
        found = {"results": {"stores": stores, "examples": 10, "width": 100}, "provenance": {}}
        (tmp_path / f"storage_{bank}.json").write_text(json.dumps(found))
    return Book(tmp_path)


def cells(table):
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    return {line[0].strip("`"): line[1:] for line in lines[2:]}


def test_pooled_over_banks(tmp_path):
    """The mean over cells; methods of a bank have one error, banks have errors of their own."""
    found = cells(storage_table(book(tmp_path)))
    assert list(found) == ["float32", "int8", "float16"]  # the larger first
    half = (2 * (2 * 0.1 / 4) ** 2) ** 0.5
    assert found["int8"][:3] == ["4.0 (4.0 to 4.0)", "4 in 2 banks", f"+0.10 ± {half:.2f}"]
    assert found["int8"][3:] == ["−0.30", "2 %", "90.0 %", "50.0"]
    assert found["int8"][4:] == ["2 %", "90.0 %", "50.0"]
    assert found["float16"][0] == "8.0 (8.0 to 8.0)"
    assert found["float16"][2] == "+0.15 ± 0.07 (2 of 4 refused)"


def test_a_page_says_what_is_refused_and_missing(tmp_path):
    page = tables.placed(tables.sections()["Smaller stores"], book(tmp_path))
    assert "| MNIST, ResNet, TRAK | −0.30 ± 0.10 [2 %] | refused |" in page
    assert "Not measured: `python -m experiments run storage_cifar2`." in page
    assert "Not measured" in storage_table(Book(tmp_path / "none"))
