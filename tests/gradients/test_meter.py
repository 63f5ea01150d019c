"""The meter against torch's own counter and against sums done by hand."""

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from unde.gradients.meter import Meter


def test_operations_as_torch_counts_them():
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64, 6),
        nn.Unflatten(1, (2, 3)),
        nn.Linear(3, 2),
    )
    with FlopCounterMode(display=False) as theirs, Meter() as ours:
        model(torch.randn(5, 2, 6, 6)).sum().backward()
    assert ours.flops == theirs.get_total_flops() > 0


def test_calls():
    with Meter() as found:
        x = torch.ones(3, 4)
        assert x.device.type == "cpu"
        _ = (x @ x.T).relu()
    assert found.calls == 4  # ones, transpose, product, relu


def test_operations_that_torch_leaves_out():
    """Attention of the CPU: two products forward, five backward with one that is made again; sums in place."""
    q = torch.randn(2, 3, 16, 8, requires_grad=True)
    with Meter() as forward:
        out = nn.functional.scaled_dot_product_attention(q, q, q)
    with Meter() as backward:
        out.sum().backward()
    product = 2 * 2 * 3 * 16 * 16 * 8
    assert (forward.flops, backward.flops) == (2 * product, 5 * product)
    with Meter() as added:
        torch.zeros(4, 5).addmm_(torch.ones(4, 6), torch.ones(6, 5))
    assert added.flops == 2 * 4 * 5 * 6


def test_bytes_alive():
    held, found = torch.zeros(1000), Meter()
    assert found.hold([held, held[3:]]) == 4000
    with found:
        a = held + 1  # 8000
        b = a.view(10, 100)  # a view adds nothing
        a = a.double()  # 16000: b still holds the first
        with_view = found.live
        del b
        after = found.live
        found.restart()
        _ = a[:250] * 2  # 12000 + 2000
    assert (with_view, after, found.peak) == (16000, 12000, 14000)


def test_a_graph_keeps_what_it_saves():
    x = torch.randn(100, requires_grad=True)
    with Meter() as found:
        y = x.exp()  # saved for its own backward pass
        z = y.sin()  # saves y
        del y
        assert found.live == 2 * 400
        z.sum().backward()
        del z
        assert found.live == 400  # the gradient


def test_sparse_tensors():
    with Meter() as found:
        index = torch.zeros(2, 5, dtype=torch.long)
        _s = torch.sparse_coo_tensor(index, torch.ones(5), (3, 3), check_invariants=True)
        assert found.live == 2 * 5 * 8 + 5 * 4
