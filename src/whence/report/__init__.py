"""Reports: plain values in, one self-contained HTML page out.

A `Page` is put together from what the rest of the package found; nothing here reads models, indexes or files.

>>> from whence.report import Item, Page, QueryPanel, Row, Scored
>>> row = Row("unweighted", [Scored(Item(12, label="cat"), 0.8)], [Scored(Item(7, label="dog"), -0.3)])
>>> page = Page("Two cats", queries=[QueryPanel(Item("q0", label="cat"), [row], predicted="cat")])
>>> path = page.write("report.html")  # doctest: +SKIP
"""

from whence.report.contributors import Mark
from whence.report.heatmap import HeatmapPanel
from whence.report.items import Item, Scored
from whence.report.mislabel import MislabelPanel, RocCurve
from whence.report.page import Page
from whence.report.queries import QueryPanel, Row
from whence.report.tables import Card, Step, Table
from whence.report.weights import WeightsPanel

__all__ = [
    "Card",
    "HeatmapPanel",
    "Item",
    "Mark",
    "MislabelPanel",
    "Page",
    "QueryPanel",
    "RocCurve",
    "Row",
    "Scored",
    "Step",
    "Table",
    "WeightsPanel",
]
