import pytest
import torch
from torch import nn

from cases import BY_NAME
from refusals import refused
from unde.tasks import Classification


def by_hand(logits, labels):
    """−log of the softmax at the label, one example at a time."""
    return torch.stack([torch.logsumexp(z, 0) - z[y] for z, y in zip(logits, labels.tolist())])


@pytest.fixture
def linear():
    torch.manual_seed(0)
    return nn.Linear(4, 3).double(), torch.randn(5, 4).double(), torch.tensor([0, 2, 1, 1, 0])


@pytest.mark.parametrize("kind", [tuple, list])
def test_pairs(linear, kind):
    model, x, y = linear
    found = Classification().loss(model, kind([x, y]))
    torch.testing.assert_close(found, by_hand(model(x), y), rtol=1e-12, atol=0)
    torch.testing.assert_close(Classification().measure(model, (x, y), ids=range(5)), found, rtol=0, atol=0)


@pytest.mark.parametrize("label", ["labels", "label"])
def test_dicts_are_the_arguments_of_the_model(linear, label):
    inner, x, y = linear

    class Named(nn.Module):
        def forward(self, left, right, gain):
            return inner(left + right) * gain

    batch = {"left": x, label: y, "right": x.flip(0), "gain": torch.tensor(2.0)}
    expected = by_hand(inner(x + x.flip(0)) * 2.0, y)
    torch.testing.assert_close(Classification().loss(Named(), batch), expected, rtol=1e-12, atol=0)


def test_equal_to_the_loss_of_hugging_face():
    model, task, rows = BY_NAME["vit"].make(torch.float64)
    with torch.no_grad():
        ours = task.loss(model, rows.batch(range(5)))
        theirs = torch.stack([model(**rows.batch([i])).loss for i in range(5)])
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=0)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64])
def test_labels_of_any_integer_type(linear, dtype):
    model, x, y = linear
    torch.testing.assert_close(Classification().loss(model, (x, y.to(dtype))), by_hand(model(x), y))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, y: x, "is .inputs, labels. or a dict with 'labels', got Tensor"),
        (lambda x, y: (x, y, y), "got tuple of length 3"),
        (lambda x, y: {"x": x, "y": y}, r"needs 'labels': this one has \['x', 'y'\]"),
        (lambda x, y: (x, y[:4]), r"logits of shape \(5, 3\) for labels of shape \(4,\)"),
        (
            lambda x, y: (x, y.unsqueeze(1)),
            r"for labels of shape \(5, 1\).*expected \(B, classes\) and \(B,\)",
        ),
        (lambda x, y: (x.unsqueeze(1), y), r"logits of shape \(5, 1, 3\)"),
        (lambda x, y: (x, y + 0.5), r"labels of type torch\.float32: expected class numbers"),
        (lambda x, y: (x, torch.eye(3)[y]), "expected class numbers"),
    ],
    ids=["tensor", "three", "no-labels", "fewer", "column", "3d", "float", "probabilities"],
)
def test_refused(linear, change, message):
    model, x, y = linear
    refused(message, Classification().loss, model, change(x, y))


def test_a_model_that_returns_something_else(linear):
    _, x, y = linear

    class Pair(nn.Module):
        def forward(self, x):
            return x, x

    refused("the model returned a tuple: expected logits", Classification().loss, Pair(), (x, y))
