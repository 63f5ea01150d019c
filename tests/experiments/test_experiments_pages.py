"""The page of results: from files to tables, what is missing included, and nothing out of date."""

import json
import re
import xml.etree.ElementTree as ET

import pytest
from experiments.pages import ablations, lds
from experiments.pages import book as book_module
from experiments.pages.bank_results import BANKS
from experiments.pages.book import Book, shown

from experiments import paper_numbers as paper
from experiments import runner, tables


def estimate(mean, ci95=0.01, total=0.02):
    return {"mean": mean, "ci95": ci95, "ci95_total": total, "queries": 9, "undefined": 0}


def rule(gain, **more):
    return {"estimate": estimate(0.1 + gain), "difference": estimate(gain), **more}


def cell(mean, gains):
    """One method in the format of the study of LDS; `gains` by rule."""
    rules = {
        "search": rule(gains["search"], chosen=[[5, 0.5], [10, 0.5]]),
        "fixed": rule(gains["fixed"], weights=[0.5, 1.5]),
        "best": rule(0.06, chosen=[20, 0.1], unweighted=estimate(mean)),
        "calibrated": rule(0.02, used=3, of=4),
    }
    by_k = {"unweighted": estimate(mean)} | {
        k: rule(g) for k, g in (("1", -0.05), ("5", -0.005), ("10", 0.05))
    }
    return {
        "groups": ["body", "head"],
        "by damping": [0.1, 0.2],
        "dampings": [0.1, 1.0],
        "unweighted": estimate(mean),
        "rules": rules,
        "by k": by_k,
    }


LDS = {
    "methods": {
        "TracIn": cell(0.1, {"search": 0.0567, "fixed": -0.0421}),
        "TRAK": cell(0.2, {"search": 0.001, "fixed": 0.001}),
    },
    "baselines": {"BM25": estimate(0.1234, total=None)},
}
RELIABILITY = {"models": 64, "twice": 16, "r": 0.5, "ci95": 0.1, "ceiling": 0.7071, "accuracy": None}
SWEEP = {
    "TracIn": {
        "unweighted": estimate(0.1),
        "columns": {c: {"estimate": estimate(0.1 + g), "difference": estimate(g)} for c, g in
                    (("1", -0.05), ("5", -0.005), ("10", 0.05))},
    }
}  # fmt: skip
STRENGTH = {
    "TracIn": {
        "all": estimate(0.1),
        "groups": {"h.0.a": [0.02, 0.01], "h.0.b": [-0.01, 0.01], "h.1.a": [0.03, 0.01]},
        "block of": {"h.0.a": "h.0", "h.0.b": "h.0", "h.1.a": "h.1"},
        "blocks": {"h.0": [0.02, 0.01], "h.1": [0.03, 0.01]},
        "components": {"a": [0.04, 0.01], "b": [-0.01, 0.01]},
    },
    "TRAK": {"groups": {"h.0.a": [0.02, 0.01], "h.0.b": [0.01, 0.01], "h.1.a": [0.01, 0.01]}},
}
STRENGTH["TRAK"] |= {
    "block of": STRENGTH["TracIn"]["block of"],
    "blocks": {"h.0": [0.1, 0.01]},
    "components": {"a": [0.1, 0.01]},
}


@pytest.fixture
def book(tmp_path):
    files = {
        "lds_sotu-gpt2": LDS,
        "reliability_sotu-gpt2": RELIABILITY,
        "noise_sensitivity_sotu-gpt2": SWEEP,
        "group_strength_sotu-gpt2": STRENGTH,
    }
    for name, results in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps({"results": results, "provenance": {}}))
    return Book(tmp_path)


def section(book, heading):
    return tables.placed(tables.sections()[heading], book)


def row(text, *words):
    """The one line of a table that has all the words."""
    [line] = [line for line in text.splitlines() if line.startswith("|") and all(w in line for w in words)]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_no_page_is_out_of_date():
    changed = tables.render(check=True)
    assert changed == [], "run `python -m experiments render`"


def test_links_and_figures_of_the_page_lead_somewhere():
    text = tables.RESULTS_PAGE.read_text()
    for link in re.findall(r"\]\(([^)#h][^)]*)\)", text):
        assert (tables.DOCS / link).exists(), link
    headings = {
        re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in re.findall(r"^## (.*)", text, re.M)
    }
    assert set(re.findall(r"\]\(#([^)]+)\)", text)) <= headings


def test_tables_of_the_paper_agree_with_each_other():
    """Numbers that the paper prints twice were copied twice: a slip in one of them shows."""
    for method, (none, own, *_) in paper.LOSS_ABLATION.items():
        assert (none, own) == paper.LDS_DIFFUSION["ArtBench-2"][method]
    for where, methods in paper.TRANSFER_DATA_SETS.items():
        for method, (none, own, _) in methods.items():
            assert (none, own) == tuple(mean for mean, _ in paper.LDS_DIFFUSION[where][method])
    for method, (none, *weights) in paper.TRANSFER_METHODS.items():
        own = weights[paper.METHODS.index(method)]
        assert (none, own) == tuple(mean for mean, _ in paper.LDS_DIFFUSION["ArtBench-2"][method])
    cells = [(w, m, values) for w, methods in paper.SENSITIVITY_TO_K.items() for m, values in methods.items()]
    for where, method, values in cells:
        plain, weighted = paper.LDS_DIFFUSION[where][method]
        assert values[0] == plain[0] and max(values) == weighted[0] and len(values) == len(paper.K)
    for split in paper.RECALL.values():
        for *parts, total in split.values():
            assert sum(parts) == pytest.approx(total, abs=0.25)
    for numbers in (paper.TAIL_PATCH_WIKITEXT, paper.TAIL_PATCH_LLAMA):
        for plain, weighted, gain in numbers.values():
            assert gain is None or weighted - plain == pytest.approx(gain[0], abs=0.015)


def test_summary_counts_cells_by_rule(book):
    text = lds.rules_summary(book)
    assert row(text, "searched on learning")[1:] == ["–", "–", "1 / 0, of 2", "+2.89 ± 2.00"]
    assert row(text, "k = 5, λ′ = 0.5")[3] == "0 / 1, of 2"
    sure = {**RELIABILITY, "r": 0.6}
    (book.folder / "reliability_sotu-gpt2.json").write_text(json.dumps({"results": sure}))
    book_module._read.cache_clear()
    assert row(lds.summary_table(book), "searched on learning")[1] == "1 / 0, of 2"
    empty = lds.summary_table(Book(book.folder / "none"))
    assert row(empty, "calibrated")[1:] == ["–", "–", "–", "–"]


def test_a_cell_stands_below_the_papers_with_its_verdict(book):
    text = section(book, "LDS, language models (Table 2)")
    assert row(text, "paper: WikiText-103", "**TracIn**")[2:4] == ["6.31 ± 0.88", "+2.92 (to 9.23 ± 0.96)"]
    [ours] = [x for x in text.splitlines() if "State of the Union" in x and "10.00 ± 1.00 (2.00)" in x]
    assert "−4.21 ± 1.00 (2.00) ▼" in ours and "+5.67 ± 1.00 (2.00) ▲" in ours
    assert row(text, "**BM25**")[2] == "12.34 ± 1.00"
    assert "`python -m experiments run lds_wikitext-gpt2`" in text
    assert row(text, "GPT-2-like, TracIn")[1:] == [
        "10.0 / 20.0", "0.1, 1.0", "5, 0.5; 10, 0.5", "20, 0.1", "3 of 4"
    ]  # fmt: skip


def test_reliability_shows_what_is_known(book):
    text = lds.reliability(book)
    assert row(text, "State of the Union")[1:] == ["64 + 16", "0.50 ± 0.10", "70.71", "–"]
    assert text.count("not measured") == len(BANKS) - 1


def test_every_section_says_what_is_not_measured(tmp_path):
    """Nothing is left out: an empty folder gives a page of commands, each of which there is."""
    empty = Book(tmp_path)
    known = {*runner.studies(), *(r for s in runner.studies().values() for r in s.results())}
    for heading in tables.sections():
        text = section(empty, heading)
        named = re.findall(r"python -m experiments run ([^`]+)`", text)
        assert named or heading == "Roles of data (Table 7)", heading
        for name in " ".join(named).split():
            assert name in known, name
        if heading not in ("Gallery (Figure 4)", "Roles of data (Table 7)"):
            assert "ot measured" in text, heading


def test_sweeps_mark_gains_and_losses(book):
    text = ablations.sensitivity_to_k(book)
    cells = row(text, "State of the Union", "TracIn")
    assert cells[1:5] == ["10.00 ± 1.00 (2.00)", "5.00 ▼", "9.50", "15.00 ▲"]
    assert row(text, "paper: SB-Pokemon, TRAK")[1:3] == ["10.68", "11.83"]


def test_figures_are_sound_and_shown_once(book):
    page = tables.placed(tables.TEMPLATE.read_text(), book)
    assert len(book.figures) >= 6
    for name, svg in book.figures.items():
        assert page.count(f"(figures/{name})") == 1
        root = ET.fromstring(svg)
        assert root.tag.endswith("svg") and "nan" not in svg
    strength = book.figures["strength-sotu-gpt2-groups.svg"]
    assert strength.count("<rect") >= 3 and "h.0.b: 1.00 ± 1.00 %" in strength


def test_only_marked_places_are_filled(book):
    text = "a\n<!-- table: summary -->\nold 1.23\n<!-- end -->\nb\n\n    <!-- table: summary -->\n    <!-- end -->\n"
    made = tables.filled(text, book)
    assert "old" not in made and made.startswith("a\n<!-- table: summary -->\n| weights |")
    assert made.endswith("<!-- end -->\nb\n\n    <!-- table: summary -->\n    <!-- end -->\n")
    assert tables.filled(made, book) == made
    with pytest.raises(runner.Refused, match="no table is called 'nothing'"):
        tables.filled("<!-- table: nothing -->\n<!-- end -->\n", book)


def test_every_table_can_be_made_without_results(tmp_path):
    for page in tables.pages():
        for name in re.findall(r"^<!-- table: ([\w-]+) -->", page.read_text(), re.M):
            assert isinstance(tables.part(Book(tmp_path), name), str), name


def test_check_finds_a_page_that_was_changed(monkeypatch, tmp_path):
    """A page edited by hand, and a figure that nothing shows any more."""
    monkeypatch.setattr(tables, "RESULTS_PAGE", tmp_path / "results.md")
    monkeypatch.setattr(tables, "FIGURES", tmp_path / "figures")
    monkeypatch.setattr(tables, "pages", list)
    tables.render()
    assert tables.render(check=True) == []
    page = tmp_path / "results.md"
    page.write_text(page.read_text().replace("17.63", "71.63", 1))
    (tmp_path / "figures" / "old.svg").touch()
    assert tables.render(check=True) == [page, tmp_path / "figures" / "old.svg"]
    assert "71.63" in page.read_text()
    tables.render()
    assert tables.render(check=True) == [] and not (tmp_path / "figures" / "old.svg").exists()


def test_estimates_without_intervals():
    assert shown({"mean": 0.1}) == "10.00" and shown(None) == "–"
