"""The code of docs/other-libraries.md runs, and does what the page says."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parent.parent.parent / "docs" / "other-libraries.md"


def test_the_page_runs_as_printed(tmp_path, monkeypatch):
    pd = pytest.importorskip("pandas")
    monkeypatch.chdir(tmp_path)
    text = re.sub(r"<!-- not run:.*?-->\n```python\n.*?```", "", PAGE.read_text(), flags=re.S)
    text = re.sub(r"<!-- run:\n(.*?)-->", r"```python\n\1```", text, flags=re.S)
    names: dict = {"__name__": "page"}
    for code in re.findall(r"```python\n(.*?)```", text, re.S):
        exec(compile(code, str(PAGE), "exec"), names)
    assert names["weights"].values[0] > 1.2  # the signal counts for more
    compared = names["unde"].evaluate.compare(*(names[n] for n in ("ask", "weights", "masks", "utility")))
    assert compared.difference.mean > 0.05 and compared.checked
    table = pd.read_csv("top.csv")
    assert len(table) == 150 and table["id"][0].startswith("row-")
    page = Path("report.html").read_text()
    assert page.count("<article") >= 3 and "weighted" in page
