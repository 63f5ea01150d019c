"""The tables of `unde attribute` on a terminal."""

import toy
from unde import Setup
from unde.cli.attribute import show_top, whole_queries, with_texts
from unde.data import Rows


def test_what_is_no_text_is_printed_as_ids(tmp_path, capsys):
    index = toy.build(tmp_path / "idx", 6, ids=[f"t{i}" for i in range(6)])
    setup = Setup(index.model, index.task, toy.data(6), eval_queries=toy.data(2, seed=1))
    queries, scores = Rows(setup.eval_queries), index.score(setup.eval_queries)

    def show(k: int, **options) -> str:
        show_top(with_texts(scores.top(k), setup, queries, whole_queries(queries), None), **options)
        return capsys.readouterr().out

    setup.show = lambda example: example[0]  # numbers, no text
    printed, best = show(2), scores.top(2)
    assert f"{best.ids[1][0]} ({best.values[1, 0]:.3g})" in printed and "to be" not in printed
    setup.show = lambda example: "\x1b[31mred[bold]" + "x" * 900
    printed = show(1, opponents=True, named=False)
    assert "Query: [31mred[bold]xxx" in " ".join(printed.split()) and "opponents" in printed
    assert "\x1b" not in printed
