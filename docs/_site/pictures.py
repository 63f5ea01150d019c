"""Take the screenshots of docs/ with Chromium: `python docs/_site/pictures.py demo explorer language`.

`demo` and `explorer` need the folder of `unde demo` (--demo, default demo/).
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from playwright.sync_api import Browser, sync_playwright

DOCS = Path(__file__).parent.parent
CHROMIUM = "/usr/bin/chromium"
PATIENCE = 300_000  # milliseconds
MOVE = "(x, value) => { x.value = value; x.dispatchEvent(new Event('input', {bubbles: true})); }"


def unde(*words: str) -> list[str]:
    return [sys.executable, "-m", "unde", *words]


def demo(browser: Browser, folder: Path) -> None:
    """The first screen of the demo's report."""
    tab = browser.new_page(viewport={"width": 1300, "height": 860})
    tab.goto((folder / "report.html").resolve().as_uri())
    tab.screenshot(path=DOCS / "demo.png")


def explorer(browser: Browser, folder: Path) -> None:
    """The live page of the demo's index on a query, two sliders moved."""
    words = unde("serve", "--index", str(folder / "index"), "--port", "0")
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as server:
        assert server.stdout is not None
        try:
            address = next(m[0] for line in server.stdout if (m := re.search(r"http://\S+", line)))
            tab = browser.new_page(viewport={"width": 1440, "height": 1425})
            tab.set_default_timeout(PATIENCE)
            query = {"q": json.dumps([{"kind": "eval", "at": 4}])}
            tab.goto(f"{address}#{urlencode(query)}")
            answered = "#result:not([hidden]):not([aria-busy])"
            tab.wait_for_selector(answered)
            for slider, value in (("#slider-0", 0), ("#slider-1", 0.2)):
                tab.locator(slider).evaluate(MOVE, value)
                tab.wait_for_selector(answered)
            tab.wait_for_timeout(5000)
            tab.screenshot(path=DOCS / "explorer.png")
        finally:
            server.terminate()


def language(browser: Browser, _: Path) -> None:
    """The report of a small language model, trained as in notebooks/language_model.py."""
    import jupytext

    cells = jupytext.read(DOCS.parent / "notebooks" / "language_model.py").cells
    code = [cell.source for cell in cells if cell.cell_type == "code"]
    names: dict[str, Any] = {"__name__": "__main__"}
    exec("\n\n".join(code[:2]).replace("range(4)", "range(20)"), names)  # data, tokenizer, a longer training
    with tempfile.TemporaryDirectory() as folder:
        names["model"].save_pretrained(f"{folder}/my-gpt2")
        names["tokenizer"].save_pretrained(f"{folder}/my-gpt2")
        rows = "".join(json.dumps({"text": text}) + "\n" for text in names["passages"])
        Path(folder, "train.jsonl").write_text(rows)
        model = ("--hf-model", "my-gpt2", "--data", "train.jsonl", "--seq-len", "96", "--out", "idx")
        query = "The army and the navy have fought with great courage in this war."
        report = ("--index", "idx", "--query", query, "--weights", "w.json", "--out", "report.html")
        for words in (("build", *model), ("learn", "--index", "idx", "--out", "w.json"), ("report", *report)):
            subprocess.run(unde(*words), cwd=folder, check=True)
        tab = browser.new_page(viewport={"width": 1200, "height": 1100})
        tab.goto(Path(folder, "report.html").as_uri())
        tab.get_by_text("Queries and the examples behind them").evaluate("x => x.scrollIntoView()")
        tab.screenshot(path=DOCS / "language.png")


PICTURES: dict[str, Callable[[Browser, Path], None]] = {
    "demo": demo,
    "explorer": explorer,
    "language": language,
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="+", choices=PICTURES)
    parser.add_argument("--demo", type=Path, default=Path("demo"))
    options = parser.parse_args()
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"]
        )
        for name in options.names:
            PICTURES[name](chromium, options.demo)
