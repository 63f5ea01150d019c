"""Names of classes: where they come from, and that a right prediction is never marked wrong because of them."""

from types import SimpleNamespace

import pytest
import torch

from refusals import refused
from report_dom import parse, words
from unde import Index, Setup
from unde.data import Rows
from unde.tasks import Classification
from unde.ui.report import Item, Page, QueryPanel, Row, ScoredItem
from unde.ui.report.example_view import ExampleView, class_name, class_names
from unde.ui.report.panels import query_panels
from unde.ui.report.queries import queries_section

NAMES = ["cat", "dog", "fox"]
EVIL = "</dd><script>alert(1)</script><img src=x onerror=alert(1)>"


def model():
    """Says the class of the largest of three inputs."""
    made = torch.nn.Linear(3, 3)
    with torch.no_grad():
        made.weight.copy_(torch.eye(3))
        made.bias.zero_()
    return made


def points(n, seed=0):
    x = torch.randn(n, 3, generator=torch.Generator().manual_seed(seed))
    return x, x.argmax(1)


@pytest.fixture
def asked(tmp_path):
    """Panels of a setup: of five queries, four answered right and the last one, whose label is off, wrong."""
    x, y = points(5, seed=1)
    y[4] = (y[4] + 1) % 3

    def panels(**options):
        setup = Setup(model(), Classification(), points(12), **options)
        index = Index.build(setup.model, setup.task, setup.train_data, tmp_path / "idx", method="tracin")
        scores = index.score((x, y))
        return query_panels(setup, Rows((x, y)), scores, {"unweighted": None}, which=range(5), count=2)

    return panels, y.tolist(), x.argmax(1).tolist()


def facts(panel):
    return [words(fact) for fact in parse(queries_section([panel])).all(".facts div")]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"classes": NAMES},
        {"show": lambda example: {"label": NAMES[example[1]]}},  # names that only `show` knows
        {"show": lambda example: {"label": NAMES[example[1]]}, "classes": NAMES},
        {"show": lambda example: {"label": int(example[1])}, "classes": NAMES},
        {"show": lambda example: {"text": "a text without a label"}, "classes": NAMES},
    ],
)
def test_right_is_told_by_the_number_of_a_class(asked, options):
    panels, given, predicted = asked[0](**options), *asked[1:]
    assert [panel.is_right for panel in panels] == [True] * 4 + [False]
    called = NAMES if options else [0, 1, 2]
    assert [panel.query.label for panel in panels] == [called[y] for y in given]
    assert [panel.predicted for panel in panels[:4]] == [called[y] for y in predicted[:4]]
    if "classes" in options or not options:
        assert panels[4].predicted == called[predicted[4]]
    else:
        assert panels[4].predicted == f"class {predicted[4]}"
    labels = {s.item.label for panel in panels for row in panel.rows for s in row.proponents}
    assert labels <= set(called)


def test_true_predicted_and_asked_about_stand_apart():
    row = Row("trak", [ScoredItem(Item(1, label="dog"), 1.0), ScoredItem(Item(2, label="cat"), 0.5)])
    panel = QueryPanel(Item(0, label="dog", true_label="cat"), [row], predicted="cat")
    assert facts(panel) == ["true labelcat", "predictedcat✓right", "asked aboutdog"]
    shown = parse(queries_section([panel]))
    assert [len(li.all(".differs")) for li in shown.all("ol.examples li")] == [0, 1]  # from what was asked
    assert "1 of 2 proponents with the label asked about" in words(shown.one(".row-head .note"))
    unknown = QueryPanel(Item(0), [row], predicted="cat", asked="cat")
    assert facts(unknown) == ["predictedcat", "asked aboutcat"]  # nobody knows whether that is right


def test_a_name_and_a_number_are_not_compared():
    row = Row("trak", [ScoredItem(Item(1), 1.0)])
    assert QueryPanel(Item(0, label="cat"), [row], predicted=3).is_right is None
    assert QueryPanel(Item(0, label="cat"), [row], predicted="dog").is_right is False
    assert QueryPanel(Item(0, label=3), [row], predicted="3").is_right is True
    assert QueryPanel(Item(0, label="7"), [row]).is_right is None
    assert QueryPanel(Item(0), [row], predicted=7).is_right is None


def test_names_of_a_hugging_face_config_and_data_set():
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(
        {"x": datasets.Value("float32"), "label": datasets.ClassLabel(names=["no", "yes"])}
    )
    data = datasets.Dataset.from_dict({"x": [0.0], "label": [1]}, features=features)
    assert class_names(Setup(model(), Classification(), data)) == ["no", "yes"]
    assert class_names(Setup(model(), Classification(), data, classes=NAMES)) == NAMES  # what was said first
    configured = model()
    configured.config = SimpleNamespace(id2label={0: "cat", 1: "dog", 2: "fox"})
    assert class_names(Setup(configured, Classification(), points(2)), 3) == NAMES
    assert class_names(Setup(configured, Classification(), points(2)), 2) is None  # of other outputs
    configured.config.id2label = {i: f"LABEL_{i}" for i in range(3)}  # made up by the config
    assert class_names(Setup(configured, Classification(), points(2))) is None


@pytest.mark.parametrize(
    ("classes", "says"),
    [
        ("cat", r"Setup\(classes='cat'\): expected a list of names"),
        (["cat", 3], "holds 3, a int: expected names"),
        (["cat", "cat"], "names 'cat' twice"),
        ([], "is empty"),
        ({1: "cat", 2: "dog"}, r"numbers its classes \[1, 2\]…: expected 0 to 1"),
    ],
)
def test_classes_that_are_none_are_refused(classes, says):
    refused(says, Setup, model(), Classification(), points(2), classes=classes)


def test_another_number_of_classes_is_refused(asked):
    refused("has 2 names, the model has 3 classes: expected one for each", asked[0], classes=["cat", "dog"])


def test_labels_out_of_range_stay_numbers():
    assert class_name(7, NAMES) == 7 and class_name(-1, NAMES) == -1 and class_name(True, NAMES) is True


def test_hostile_names_stay_text(asked):
    panels = asked[0](classes=[f"{name}{EVIL}" for name in NAMES])
    markup = Page("t", queries=panels).html()
    assert "<script" not in markup and "<img src=x" not in markup
    assert parse(markup).text.count(EVIL) > 5


def test_images_and_texts_of_columns_are_found():
    picture = torch.rand(3, 4, 4)
    setup = Setup(
        model(), Classification(), [{"pixel_values": picture, "labels": torch.tensor(1)}], classes=NAMES
    )
    item = ExampleView(setup).example(0)
    assert item.label == "dog" and item.image is picture
