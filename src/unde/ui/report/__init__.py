"""Reports: plain values in, one self-contained HTML page out.

A `Page` is put together from what the rest of the package found. Its parts read no models, indexes or files: `panels`
makes them of scores and weights, and a whole page of what an index says about some queries.

>>> from unde.ui.report import Item, Page, QueryPanel, Row, ScoredItem
>>> row = Row("unweighted", [ScoredItem(Item(12, label="cat"), 0.8)], [ScoredItem(Item(7, label="dog"), -0.3)])
>>> page = Page("Two cats", queries=[QueryPanel(Item("q0", label="cat"), [row], predicted="cat")])
>>> path = page.write("report.html")  # doctest: +SKIP
"""

from unde.ui.report.items import Item, Mark, ScoredItem
from unde.ui.report.mislabel import LabelEvidence, MislabelPanel, RocCurve
from unde.ui.report.page import Meaning, Page, meaning
from unde.ui.report.queries import QueryPanel, Row
from unde.ui.report.tables import Card, HeatmapPanel, ResultTable, Step
from unde.ui.report.weights import WeightsPanel

__all__ = [
    "Card",
    "HeatmapPanel",
    "Item",
    "LabelEvidence",
    "Mark",
    "Meaning",
    "MislabelPanel",
    "Page",
    "QueryPanel",
    "ResultTable",
    "RocCurve",
    "Row",
    "ScoredItem",
    "Step",
    "WeightsPanel",
    "meaning",
]
