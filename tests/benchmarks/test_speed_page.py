"""docs/speed.md and the tables of other pages, from results."""

import pytest

from benchmarks import other_tables, speed_figure, speed_page


def estimate(ratio, spread=0.01):
    return {"ratio": ratio, "interval95": [ratio - spread, ratio + spread]}


def result(found):
    machine = {"processor": "Some CPU", "instructions": "AVX512", "sets": ["AVX2"], "threads": 2}
    return {"provenance": {"machine": machine, "versions": {"torch": "2.13"}}, "found": found}


def case(build, to_ours, error="AssertionError: no"):
    def rank(ratio, overhead):
        keys = (
            "build to plain of its pass size",
            "plain of its pass size",
            "overhead of plain of its pass size",
        )
        return {
            "pass_size": 128, "rows": None, "build": estimate(ratio), "frozen": estimate(ratio - overhead),
            "overhead": estimate(overhead), "planning": {"seconds": 0.2, "interval95": [0.1, 0.3]},
        } | {key: estimate(0.5) for key in keys}  # fmt: skip

    peer = {"note": "linear layers", "version": "2", "numbers": {"16": 256, "64": 4096}}
    peer |= {r: estimate(build * to_ours) | {"to ours": estimate(to_ours)} for r in ("16", "64")}
    mb = 2**20
    return {
        "case": "gpt2", "batch": 8, "examples": 16, "plain": {"seconds": 1.0, "interval95": [1, 1]},
        "ranks": {"16": rank(build, 0.05), "64": rank(build + 0.3, 0.3)},
        "peers": {"bergson": peer, "captum": {"error": error}},
        "small": {"examples": 32, "rank": 16, "ours": {"seconds": 0.3, "interval95": [0.2, 0.4]},
                  "bergson": {"seconds": 0.1, "interval95": [0.1, 0.1]}},
        "peak_bytes": {"plain": 100 * mb, "build, rank 16": 300 * mb, "build, rank 64": 400 * mb,
                       "build at batch, rank 16": 120 * mb, "build at batch, rank 64": 180 * mb},
    }  # fmt: skip


def test_the_page_says_where_a_peer_is_ahead():
    found = {"features.gpt2": result(case(0.8, 0.9)), "features.llama": result(case(0.7, 1.2))}
    verdict = speed_page.verdict(found)
    assert (
        "Ahead of us: bergson on GPT-2 at rank 16 (0.90 of our time) and bergson on GPT-2 at rank 64"
        in verdict
    )
    assert "Llama" not in verdict
    assert "Even, within the noise: bergson on GPT-2" in speed_page.verdict(
        {"features.gpt2": result(case(0.8, 1.0))}
    )
    assert "No library that keeps as much" in speed_page.verdict({"features.gpt2": result(case(0.8, 1.3))})


def test_tables_have_the_numbers_of_the_results():
    found = {"features.gpt2": result(case(0.8, 0.9))}
    assert "| 0.80 [0.79, 0.81] | 1.10 [1.09, 1.11] |" in speed_page.features(found)
    goals = speed_page.goals(found)
    assert "over that are GPT-2 at rank 64 (0.30)" in goals and "rank 16 (" not in goals
    peers = speed_page.peers("16")(found)
    assert (
        "| bergson | 0.72 [0.71, 0.73] |" in peers
        and "| captum | cannot |" in peers
        and "| dattri | – |" in peers
    )
    notes = speed_page.peer_notes(found)
    assert "256 and 4,096 numbers (GPT-2)" in notes and "cannot run GPT-2: `AssertionError: no`" in notes
    memory = speed_page.memory(found)
    assert "| 100 MiB | +20 MiB | +80 MiB | 300 MiB | 400 MiB |" in memory and "over that are GPT-2" in memory
    assert "Some CPU (AVX2), torch 2.13" in speed_page.machine(found)
    text = speed_page.filled("a\n<!-- bench: features -->\nold\n<!-- end -->\nb", found)
    assert "old" not in text and "0.80 [0.79, 0.81]" in text and text.endswith("<!-- end -->\nb")


def test_a_page_of_nothing_says_so():
    page = speed_page.page(speed_page.TEMPLATE.read_text(), {})
    assert "{{" not in page and "Not measured yet: `python -m benchmarks run growth`" in page


def test_the_documents_are_what_render_makes():
    found = speed_page.results()
    assert speed_page.PAGE.read_text() == speed_page.page(speed_page.TEMPLATE.read_text(), found)
    for path in speed_page.OTHERS:
        text = path.read_text()
        assert "<!-- bench: " in text and speed_page.filled(text, found) == text, (
            f"{path}: python -m benchmarks render"
        )
    if "growth" in found:
        assert speed_page.FIGURE.read_text() == speed_page.speed_figure.drawn(found["growth"]["found"])


def test_the_figure_is_drawn_to_scale():
    curve = {"sizes": [10, 100, 1000], "seconds": [0.01, 0.1, 1.0], "exponent": 1.0, "interval95": [1, 1]}
    svg = speed_figure.drawn({"examples": {"features": curve}})
    points = svg.split('points="')[1].split('"')[0].split()
    (ax, ay), (bx, by), (cx, cy) = (map(float, p.split(",")) for p in points)
    assert bx - ax == pytest.approx(cx - bx) and by - ay == pytest.approx(cy - by) and cy < ay
    assert "white" not in svg and "#fff" not in svg


SOLVER = {"seconds": 2.0, "bytes_beside_contributions": 3 * 2**20}
OTHERS = {
    "fixed": (
        {"goals": {"gpt2": 0.3}, "rows": [{
            "case": "gpt2", "rank": 16, "now": {"intercept": 0.25, "interval95": [0.2, 0.3], "first_build": 1.1}}]},
        "| GPT-2, rank 16 | 0.25 s [0.20, 0.30] | 0.3 s | 1.10 s |",
    ),
    "scoring": (
        {"queries": 1000, "examples": 50000, "features": 4096,
         "totals": {"totals": {"ratio": 1.05, "range": [1.0, 1.1], "seconds": 2.5}},
         "disk": [{"store": "int8", "queries": 1, "ratio": 0.4, "seconds": 0.05}]},
        "| int8, 1 query, from the disk | float32 | 0.40 | 50 ms |",
    ),
    "weights": (
        {"solvers": [{"k": 10, "shape": [5, 6000, 7], "fixed-point": SOLVER, "adamw": SOLVER | {"seconds": 30.0},
                      "times_faster": 15.0, "objective_ratio": 1.001}]},
        "| fixed point, 5 × 6,000 × 7, k = 10 | 2.0 s | 3 MiB | 15.0 times as fast, objective 1.0010 of the other's |",
    ),
    "banks": (
        {"rows": [{"case": "mlp", "chosen": "stacked", "ways": {
            "loop": {"ms": 4.0, "times_plain": 1}, "x": {"error": "no"}, "stacks": {"ms": 1.0, "times_plain": 4}}}]},
        "| mlp | 4.00 ms | 1.00 ms | stacks | 4.00 | stacked |",
    ),
    "storage": (
        {"examples": 2000, "width": 99, "stores": {
            name: {"bytes": size, "times smaller": 400 / size, "build": 1.1, "score": {"1, disk": size / 400}}
            for name, size in (("float32", 400), ("int8", 100))}},
        "| int8 | 100 | 4.0 | 1.10 | 0.25 |",
    ),
}  # fmt: skip


def test_banks_say_what_arithmetic_allows():
    found, row = OTHERS["banks"]
    (case,) = found["rows"]
    floor = {"gflop": 0.12, "gflop_per_second": {"torch": 200.0, "oneDNN": 400.0}, "ms": 0.3}
    both = {"rows": [case | {"floor": floor}, case | {"case": "old"}]}
    assert row in other_tables.banks(both).splitlines()
    assert other_tables.bank_rates(both) == "200 by torch and 400 by oneDNN"
    assert other_tables.bank_floors(both).splitlines()[2:] == ["| mlp | 0.12 | 0.3 ms | 13.3 | 30 % |"]


@pytest.mark.parametrize("name", OTHERS)
def test_sections_of_other_benchmarks(name):
    found, row = OTHERS[name]
    assert row in other_tables.PARTS[name][1](found).splitlines()
