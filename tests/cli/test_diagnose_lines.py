"""What is said before answers are read: on the line, and on the page."""

from pathlib import Path

import pytest
from commands import extend_project, invoke

from report_dom import parse, words

HINGE = """

class Hinge(unde.tasks.Task):
    def loss(self, model, batch):
        return (1 - (2.0 * batch[1] - 1) * model(batch[0])[:, 0]).relu()

def hinge():
    x = torch.linspace(-3, 3, 40)[:, None].repeat(1, 2)
    y = (x[:, 0] > 0).long()
    model = torch.nn.Linear(2, 1)
    with torch.no_grad():
        model.weight.fill_(0.5), model.bias.zero_()
    return unde.Setup(model, Hinge(), (x, y), eval_queries=(x[[5, 18, 21]] + 0.01, y[[5, 18, 21]]))
"""


@pytest.fixture
def hinge(project):
    return extend_project(project, HINGE, "hinge", "--method", "tracin")


def test_zero_gradients_on_the_line_and_on_the_page(hinge):
    said = " ".join(invoke("attribute", hinge, "--index", "idx").split())
    assert "26 of 40 training examples have a gradient of zero: their scores are 0 for all queries." in said
    assert "1 of 3 queries has a gradient of zero (query 0): all its scores are 0." in said
    said = " ".join(invoke("report", hinge, "--index", "idx", "--out", "p.html").split())
    assert "1 of 3 queries has a gradient of zero (query 0)" in said
    root = parse(Path("p.html").read_text())
    [panel] = root.all("aside.warnings")
    text = words(panel)
    assert text.startswith("Read this first") and "26 of 40 training examples" in text and "(query 0)" in text
    notes = [words(row) for row in root.all("section.row div.row-head")]
    assert ["neither proponents nor opponents" in note for note in notes] == [True, False, False]


def test_a_model_that_fitted_nothing(built):
    assert "The model has hardly fitted its training data: the mean training loss is" in invoke(
        "attribute", built, "--index", "idx"
    )
