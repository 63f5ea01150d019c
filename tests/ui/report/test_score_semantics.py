"""What scores are said to mean, and that the sign is as it is said."""

import pytest
import torch

from report_dom import parse, words
from unde import Index
from unde.methods import DAS, DTRAK, EKFAC, METHODS, TRAK, JourneyTRAK, LoGRA, Method, TracIn
from unde.tasks import CausalLM, Classification, Diffusion
from unde.tasks.base import Task
from unde.ui.report import Item, Page, QueryPanel, Row, ScoredItem
from unde.ui.report.page import meaning


def after(model, measure, example, other, step):
    """How the measure of `other` changes when the model takes a step that raises (or with −: lowers) that of
    `example`."""
    parameters = list(model.parameters())
    grads = torch.autograd.grad(measure(model, example).sum(), parameters)
    with torch.no_grad():
        before = measure(model, other).sum()
        for p, g in zip(parameters, grads):
            p += step * g
        change = measure(model, other).sum() - before
        for p, g in zip(parameters, grads):
            p -= step * g
    return float(change)


def test_training_on_a_proponent_lowers_the_loss_of_the_query(tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)).double()
    x, y = torch.randn(12, 4).double(), torch.randint(3, (12,))
    task = Classification()
    index = Index.build(model, task, (x[:10], y[:10]), tmp_path / "idx", method=TracIn("none"))
    scores = index.score((x[10:], y[10:])).total()
    assert "lowers" in meaning(TracIn(), task).helps and "raises" in (meaning(TracIn(), task).hurts or "")
    for q in range(2):
        for n in range(10):
            rows = slice(n, n + 1), slice(10 + q, 11 + q)
            loss = after(model, task.loss, (x[rows[0]], y[rows[0]]), (x[rows[1]], y[rows[1]]), -1e-6)
            assert (loss < 0) == (scores[q, n] > 0)  # a step of training on n


class Size(Task):
    """The mean square of an output, as D-TRAK differentiates it."""

    def loss(self, model, batch):
        return (model(batch[0]) - batch[1]).square().mean(1)

    def measure(self, model, batch, *, name="loss", ids=None):
        return model(batch[0]).square().mean(1)


class Squares(TracIn):
    measure = "square"


def test_a_proponent_of_d_trak_says_nothing_about_a_loss(tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4)).double()
    x, target, task = torch.randn(22, 4).double(), torch.randn(22, 4).double(), Size()

    index = Index.build(model, task, (x[:20], target[:20]), tmp_path / "idx", method=Squares("none"))
    scores = index.score((x[20:], target[20:])).total()
    trained = []
    for q in range(2):
        for n in range(20):
            a, b = [(x[i : i + 1], target[i : i + 1]) for i in (n, 20 + q)]
            size = after(model, lambda m, e: task.measure(m, e), a, b, 1e-6)
            assert (size > 0) == (scores[q, n] > 0)  # "the same way"
            trained.append((after(model, task.loss, a, b, -1e-6) < 0) == (scores[q, n] > 0))
    assert not all(trained)  # and so nothing is said about losses
    told = meaning(DTRAK())
    assert (
        "predict more noise for the image too" in told.helps
        and "does not say that training on it lowered a loss" in told.note
    )


@pytest.mark.parametrize("method", [TracIn(), TRAK(), LoGRA(), EKFAC(), JourneyTRAK()], ids=str)
def test_methods_on_the_loss_say_so(method):
    told = meaning(method)
    assert told.helps.startswith("training on it lowers") and told.hurts == "training on it raises that loss"


def test_tasks_have_words_of_their_own():
    assert "label asked about" in meaning(TRAK(), Classification()).helps
    assert "text becomes likelier" in meaning(TRAK(), CausalLM()).helps
    task = Diffusion.__new__(Diffusion)
    assert "denoising loss" in meaning(TRAK(), task).helps
    assert "sampler passed" in meaning(JourneyTRAK(), task).helps
    assert "cosines" in meaning(TracIn(cosine=True)).note


def test_squares_have_no_opponents():
    told = meaning(DAS())
    assert told.hurts is None and "whichever way" in told.helps and "no opponents" in told.note
    assert meaning(DAS(weigh="signed")).hurts is not None
    row = Row("das", [ScoredItem(Item(1), 2.0)], [ScoredItem(Item(2), 0.0)])
    page = Page("t", queries=[QueryPanel(Item(0), [row])], meaning=told)
    text = words(parse(page.html()).one("aside"))
    assert "High scores ▲: leaving it out would change" in text and "negative" not in text


def test_every_method_and_measures_of_ones_own_have_a_meaning():
    for made in METHODS.values():
        assert meaning(made()).in_words

    class Custom(Method):
        measure = "surprise"

    assert "the task’s measure “surprise”" in meaning(Custom()).in_words
