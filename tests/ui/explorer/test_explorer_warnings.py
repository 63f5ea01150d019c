"""What to know before an answer is read is told with it."""

import torch
from torch import nn

import pages
from unde import Index, Setup, tasks
from unde.methods import TracIn
from unde.ui.explorer import Session


class Hinge(tasks.Task):
    def loss(self, model, batch):
        return (1 - (2.0 * batch[1] - 1) * model(batch[0])[:, 0]).relu()


def outliers() -> Setup:
    """A hinge that most examples meet, and one example with a gradient far larger than all others."""
    x = torch.linspace(-3, 3, 60)[:, None].repeat(1, 2)
    y = (x[:, 0] > 0).long()
    x[7], y[7] = 50.0, 0
    model = nn.Linear(2, 1)
    with torch.no_grad():
        model.weight.fill_(0.5)
        model.bias.zero_()
    q = torch.stack(
        [torch.tensor([0.1 + 0.1 * i, 0.5 - 0.1 * i]) for i in range(5)] + [torch.full((2,), 9.0)]
    )
    labels = torch.tensor([0, 0, 0, 0, 0, 1])
    return Setup(model, Hinge(), (x, y), eval_queries=(q, labels))


def test_warnings_come_with_answers(tmp_path):
    setup = outliers()
    options = {"method": TracIn(projection="none"), "progress": False}
    index = Index.build(setup.model, setup.task, setup.train_data, tmp_path / "i", **options)
    with pages.client(Session(index, setup)) as client:
        [zero] = client.ask({"kind": "eval", "at": 5})["warnings"][1:]
        assert zero.startswith("The query has a gradient of zero: all its scores are 0.")
        answer = client.ask({"kind": "eval", "at": 5})
        assert [(row["high"], row["low"]) for row in client.rank(answer)["rows"]] == [([], [])]
        told = [client.ask({"kind": "eval", "at": i})["warnings"] for i in range(5)]
    few = told[0]
    assert len(few) == 1 and "of 60 training examples have a gradient of zero" in few[0]
    assert told[1] == told[2] == few  # three lists are too few to compare
    assert told[3][0] == few[0] and told[3][1].startswith("The top 6 hardly depend on the query")
    assert "7" in told[3][1]


def test_an_answer_without_warnings_has_none(pictures):
    answer = pictures.ask({"kind": "eval", "at": 0})
    assert all("fitted" in sentence for sentence in answer["warnings"])  # its model was never trained
    assert pictures.ask({"kind": "eval", "at": 0})["warnings"] == answer["warnings"]
