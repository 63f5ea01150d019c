"""The page in a browser: what it shows is what the library says, and nothing that training data say is run."""

import csv
import json
import os
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlencode

import pytest
import torch

import pages
from unde import UndeError
from unde.ui.explorer import Session

CHROMIUM = "/usr/bin/chromium"
ARGUMENTS = [
    "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--no-first-run",
]  # fmt: skip
EVAL = {"kind": "eval", "at": 0}
PATIENCE = 10_000  # milliseconds


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api")
    if not os.path.exists(CHROMIUM):
        pytest.skip(f"no browser at {CHROMIUM}")
    with playwright.sync_playwright() as running:
        made = running.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield made
        made.close()


@contextmanager
def tabs(browser, count=1, **options):
    """Tabs whose errors fail the test: scripts that break, and all that the policy had to stop."""
    context, problems = browser.new_context(**options), []
    made = []
    for _ in range(count):
        tab = context.new_page()
        tab.set_default_timeout(PATIENCE)
        tab.on("pageerror", lambda error: problems.append(str(error)))
        tab.on("console", lambda said: problems.append(said.text) if said.type == "error" else None)
        made.append(tab)
    yield made
    context.close()
    assert not problems


def link(client, *plus, **state):
    return f"{client.address}#{urlencode({'q': json.dumps(plus), **state})}" if plus else client.address


def opened(tab, client, *plus, **state):
    """The page on a question, once it is answered."""
    tab.goto(link(client, *plus, **state))
    answered(tab)


def answered(tab):
    tab.wait_for_selector("#result:not([hidden]):not([aria-busy])")


def until(tab, true):
    """Waits for an expression; the policy of the page lets no string be run inside of it."""
    for _ in range(PATIENCE // 50):
        if tab.evaluate(true):
            return
        tab.wait_for_timeout(50)
    raise AssertionError(f"{true} did not come true")


def ranked(tab, row=0, side=".pro"):
    """(position, score) of what a side of a row shows."""
    items = tab.locator(f"#rows > .row >> nth={row}").locator(f"{side} li.example")
    return items.evaluate_all("some => some.map(x => [Number(x.dataset.at), Number(x.dataset.value)])")


def same(found, total, largest=True):
    """Whether a side is the best of all scores (N,), of the right sign."""
    top = total.topk(10, largest=largest)
    kept = [(i, v) for i, v in zip(top.indices.tolist(), top.values.tolist()) if (v > 0) == largest]
    assert [i for i, _ in found] == [i for i, _ in kept]
    assert [v for _, v in found] == pytest.approx([v for _, v in kept], rel=1e-4, abs=1e-7)
    assert len(kept) > 1


def slide(tab, which, value):
    """Moves a slider as a hand does."""
    with tab.expect_response("**/api/rank"):
        tab.locator(f"#slider-{which}").evaluate(
            "(x, value) => { x.value = value; x.dispatchEvent(new Event('input', {bubbles: true})); }", value
        )
    tab.wait_for_timeout(100)


def test_asking_sliding_and_a_link(browser, pictures):
    session = pictures.session
    rows = session.roles["eval"].rows
    scores = session.index.score([rows[0], rows[2]])
    with tabs(browser, 2) as (tab, other):
        tab.goto(link(pictures))
        tab.locator("#pane-eval .pick").nth(2).click()
        answered(tab)
        [total] = scores.select(torch.tensor([1])).total()
        same(ranked(tab), total)
        same(ranked(tab, 0, ".opp"), total, largest=False)
        assert tab.locator("#rows > .row").count() == 1
        slide(tab, 0, 0)
        slide(tab, 2, 2.5)
        tab.wait_for_selector("#rows > .row[data-row='your weights']")
        w = torch.tensor([0.0, 1.0, 2.5])
        [weighted] = scores.select(torch.tensor([1])).total(w)
        same(ranked(tab, 1), weighted)
        same(ranked(tab), total)
        tab.wait_for_url("**values=*")
        other.goto(tab.url)  # the same, from its address
        answered(other)
        same(ranked(other, 1), weighted)
        assert other.locator("#slider-2").input_value() == "2.5"
        other.locator("#reset").click()
        until(other, "document.querySelectorAll('#rows > .row').length === 1")
        other.locator("[name=weights]").select_option("learned")
        other.wait_for_selector("#rows > .row[data-row='learned']")
        same(ranked(other, 1), scores.select(torch.tensor([1])).total(session.weights["learned"])[0])
        other.locator("[name=method]").select_option("tracin-cosine")
        until(other, "document.querySelector('#subtitle').textContent.includes('tracin-cosine')")
        cosine = session.index.score([rows[2]], "tracin-cosine").total(session.weights["learned"])[0]
        other.wait_for_timeout(150)
        same(ranked(other, 1), cosine)
        other.go_back()
        until(other, "document.querySelector('#subtitle').textContent.includes('trak')")


def test_a_block_opens_to_its_groups(browser, classifier, monkeypatch):
    monkeypatch.setattr("unde.ui.explorer.ranking.SLIDERS", 2)  # three groups: a block of two, and one
    session = Session(classifier.index, classifier.setup)
    [scores] = [session.index.score([session.roles["eval"].rows[0]])]
    with pages.client(session) as client, tabs(browser, 2) as (tab, other):
        opened(tab, client, EVAL)
        assert tab.locator("#slider-0-1").count() == 0
        tab.locator("#weighing summary", has_text="2 groups").click()
        for which, value, w in (
            ("0-1", 0, [1, 0, 1]),
            (0, 2, [4, 0, 1]),
            ("0-1", 1.5, [4, 1.5, 1]),
            (1, 0, [4, 1.5, 0]),
        ):
            slide(tab, which, value)
            same(ranked(tab, 1), scores.total(torch.tensor(w, dtype=torch.float32))[0])
        assert float(tab.locator("#slider-0").input_value()) == pytest.approx(2.75)
        tab.wait_for_url("**values=*1.5*")
        other.goto(tab.url)
        answered(other)
        same(ranked(other, 1), scores.total(torch.tensor([4, 1.5, 0]))[0])


def test_labels_sets_and_the_other_direction(browser, pictures):
    session = pictures.session
    x, y = session.roles["eval"].rows[0]
    with tabs(browser) as (tab,):
        opened(tab, pictures, EVAL)
        other = (int(y) + 1) % 4
        with tab.expect_response("**/api/rank"):
            tab.locator("#asked-label").select_option(str(other))
        answered(tab)
        tab.wait_for_timeout(100)
        same(ranked(tab), session.index.score([(x, torch.tensor(other))]).total()[0])
        tab.get_by_text("− subtract").click()
        tab.locator("#asked-label").select_option(str(int(y)))
        answered(tab)
        with tab.expect_response("**/api/rank"):
            tab.locator("#pane-eval .pick").nth(1).click()
        answered(tab)
        tab.wait_for_timeout(100)
        totals = session.index.score([session.roles["eval"].rows[i] for i in (0, 1)]).total()
        same(ranked(tab), totals[0] - totals[1])
        assert tab.locator(".chip").count() == 2
        at = ranked(tab)[0][0]
        tab.locator(".pro .open").first.click()
        with tab.expect_response("**/api/rank"):
            tab.get_by_role("button", name="What does it influence?").click()
        answered(tab)
        tab.wait_for_timeout(100)
        queries = [session.roles[r].rows[i] for r, n in (("eval", 6), ("learn", 3)) for i in range(n)]
        column = session.index.score(queries).total()[:, at]
        found = dict([*ranked(tab), *ranked(tab, 0, ".opp")])
        assert {i: v for i, v in found.items() if i < 9} == pytest.approx(
            dict(enumerate(column.tolist())), rel=1e-4, abs=1e-7
        )
        tab.locator(".open").first.click()  # a query: it is asked about
        until(tab, "document.querySelector('#asked').textContent.includes('query #')")


def test_a_picture_and_a_file_that_is_none(browser, pictures, tmp_path):
    (tmp_path / "good.png").write_bytes(pages.png((16, 16), value=51))
    (tmp_path / "bad.png").write_bytes(b"not a picture")
    with tabs(browser) as (tab,):
        tab.goto(link(pictures))
        tab.get_by_role("tab", name="Picture").click()
        tab.locator("#picture").set_input_files(tmp_path / "good.png")
        answered(tab)
        assert "resized from 16 × 16" in tab.locator("#asked").inner_text()
        label = int(tab.locator("#asked-label").input_value())
        scores = pictures.session.index.score([(torch.full((1, 8, 8), 0.2), torch.tensor(label))])
        same(ranked(tab), scores.total()[0])
    # A refused file is an error of the network to the console, and a line to people.
    context = browser.new_context()
    tab = context.new_page()
    tab.goto(link(pictures))
    tab.get_by_role("tab", name="Picture").click()
    tab.locator("#picture").set_input_files(tmp_path / "bad.png")
    tab.wait_for_selector("#error:not([hidden])")
    assert "no PNG or JPEG" in tab.locator("#error").inner_text()
    context.close()


def test_filters(browser, pictures):
    session = pictures.session
    session.train._known["labels"] = [str(int(y)) for y in session.setup.train_data[1]]
    [total] = session.index.score([session.roles["eval"].rows[0]]).total()
    labels = session.setup.train_data[1]
    with tabs(browser) as (tab,):
        opened(tab, pictures, EVAL)
        with tab.expect_response("**/api/rank"):
            tab.locator("[name=label]").select_option("1")
        until(tab, "document.querySelector('#matched').textContent.includes('match')")
        same(ranked(tab, 0, ".opp"), total.masked_fill(labels != 1, torch.inf), largest=False)
        tab.locator("[name=label]").select_option("")
        tab.locator("[name=id]").fill("img-3")
        names = [i for i in range(40) if "img-3" in f"img-{i}"]
        until(tab, f"document.querySelector('#matched').textContent.startsWith('{len(names)} ')")
        assert {i for i, _ in ranked(tab)} <= set(names)
        assert "id=img-3" in tab.url


def test_texts_that_would_like_to_be_markup(browser, texts):
    session = texts.session
    with tabs(browser) as (tab,):
        dialogs = []
        tab.on("dialog", lambda dialog: dialogs.append(dialog.message))
        tab.goto(link(texts))
        tab.locator("#text").fill('The people "><img src=x onerror=alert(1)> are free')
        tab.locator("#text").press("Control+Enter")
        answered(tab)
        asked = session.setup.ask.text('The people "><img src=x onerror=alert(1)> are free')
        [total] = session.index.score(asked).total()
        shown = ranked(tab)
        assert dict(shown) == pytest.approx({i: float(total[i]) for i, _ in shown}, rel=1e-3, abs=1e-6)
        tab.wait_for_selector(".passage.shaded")
        until(
            tab,
            "document.querySelectorAll('.example .shaded').length === document.querySelectorAll('.example').length",
        )
        words = " ".join(tab.locator(".example .passage").all_inner_texts())
        assert "<script>" in words and "onerror=" in words
        texts.post("/api/mark", {"at": 8, "mark": "remove"})
        tab.reload()
        tab.wait_for_selector("#marked-list td")
        assert "<script>" in tab.locator("#marked-list").inner_text()
        texts.post("/api/mark", {"at": 8, "mark": None})
        assert tab.title() != "taken" and not dialogs
        assert tab.locator("main img, main b[onmouseover], #rows script").count() == 0
        tab.wait_for_timeout(100)


def test_marks_in_two_tabs_and_their_list(browser, pictures):
    with tabs(browser, 2) as (tab, other):
        for each in (tab, other):
            opened(each, pictures, EVAL)
        at = ranked(tab)[0][0]
        tab.locator(".pro .open").first.focus()
        tab.keyboard.press("Enter")
        tab.get_by_label("wrong label").check()
        tab.wait_for_selector("#marked-list td")
        tab.keyboard.press("Escape")
        assert (
            tab.evaluate("document.activeElement.className") == "open"
            or tab.locator("dialog[open]").count() == 0
        )
        assert pictures.session.marks.all() == {at: "label"}
        other.wait_for_selector(f"li[data-at='{at}'] .marked.label")  # told by the server, a little later
        with tab.expect_download() as saved:
            tab.get_by_role("button", name="Save as CSV").click()
        rows = list(csv.DictReader(Path(saved.value.path()).read_text().splitlines()))
        assert [(row["index"], row["id"], row["mark"]) for row in rows] == [
            (str(at), f"img-{at}", "wrong label")
        ]
        pictures.post("/api/mark", {"at": at, "mark": None})


def test_a_phone_has_room_for_it(browser, pictures):
    with tabs(browser, viewport={"width": 390, "height": 844}, color_scheme="dark") as (tab,):
        opened(tab, pictures, EVAL, weights="learned")
        assert tab.evaluate("document.documentElement.scrollWidth") <= 396
        page = tab.evaluate("getComputedStyle(document.body).backgroundColor")
        assert page == "rgb(19, 22, 25)"


@pytest.mark.parametrize(
    "state", [{"q": "{", "from": "-"}, {"values": "[1]", "weights": "gone", "count": "x"}]
)
def test_a_wrong_address_does_not_break_the_page(browser, pictures, state):
    with tabs(browser) as (tab,):
        tab.goto(f"{pictures.address}#{urlencode(state)}")
        tab.locator("#pane-eval .pick").first.click()
        answered(tab)


def test_baselines_are_columns_to_switch_on(browser, texts):
    with tabs(browser, viewport={"width": 1500, "height": 900}) as [tab]:
        opened(tab, texts, EVAL)
        assert tab.locator("#rows > .row").count() == 1
        assert tab.locator(".baselines input").evaluate_all("some => some.map(x => x.checked)") == [
            False,
            False,
        ]
        tab.get_by_label("show BM25").check()
        tab.wait_for_selector('#rows > [data-row="BM25"]')
        tab.get_by_label("show hidden-state similarity").check()
        tab.wait_for_selector('#rows > [data-row="hidden-state similarity"]')
        answer = texts.ask(EVAL)
        rows = texts.rank(answer, count=10, baselines=["BM25", "hidden-state similarity"])["rows"]
        for number, row in enumerate(rows[1:], 1):
            assert [at for at, _ in ranked(tab, number, ".high")] == [one["at"] for one in row["high"]]
            head = tab.locator(f"#rows > .row >> nth={number}").locator(".row-head").inner_text()
            assert f"shares {row['baseline']['shared']['unweighted']} of its top 10 with “unweighted”" in head
        lefts = tab.locator("#rows > .row").evaluate_all(
            "some => some.map(x => x.getBoundingClientRect().left)"
        )
        assert lefts == sorted(set(lefts))  # beside each other
        address = tab.url
        tab.get_by_label("show BM25").uncheck()
        until(tab, "document.querySelectorAll('#rows > .row').length === 2")
        tab.goto("about:blank")
        tab.goto(address)  # a link brings them back
        answered(tab)
        until(tab, "document.querySelectorAll('#rows > .row').length === 3")
        tab.locator("#rows > .row >> nth=1").locator(".open").first.click()
        tab.wait_for_selector("#detail[open]")


def test_a_baseline_that_fails_is_switched_off(browser, pictures, monkeypatch):
    def broken(*_):
        raise UndeError("no hidden states today")

    monkeypatch.setattr(pictures.session.baselines, "score", broken)
    with tabs(browser) as [tab]:
        opened(tab, pictures, {"kind": "eval", "at": 1})
        tab.get_by_label("show hidden-state similarity").click()  # it may be off again at once
        tab.wait_for_selector("#error:not([hidden])")
        assert "no hidden states today" in tab.locator("#error").inner_text()
        assert not tab.get_by_label("show hidden-state similarity").is_checked()
        assert tab.locator("#rows > .row").count() == 1 and "baselines" not in tab.url


def test_shares_of_sources(browser, tmp_path):
    """A table under the answer; from the second question on with the mean of the session and its interval."""
    session = pages.session(pages.classification(), tmp_path / "idx")
    session.sources = ("author", [f"author {i % 3}" for i in range(len(session.train))])
    pages.ask(session, {"kind": "eval", "at": 1})
    with pages.client(session) as client, tabs(browser) as (tab,):
        opened(tab, client, EVAL)
        assert tab.inner_text("#sources summary") == "Influence by author"
        cells = [row.inner_text() for row in tab.query_selector_all("#sources tbody tr")]
        assert len(cells) == 3 and all("±" in row and "%" in row for row in cells)
        assert "MEAN OF 2 QUESTIONS" in tab.inner_text("#sources thead").upper()
