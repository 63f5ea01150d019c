"""The pretended device refuses and counts what it says: each test breaks one of its rules."""

import pytest
import torch


@pytest.fixture
def x(pretended):
    return torch.arange(12.0).view(3, 4).to(pretended.NAME)


@pytest.mark.parametrize(
    "misuse",
    [
        lambda x: x + torch.ones(3, 4),
        lambda x: x @ torch.ones(4, 2, device="pretended:1"),
        lambda x: x.numpy(),
        lambda x: x.double(),
        lambda x: x.to_sparse(),
        lambda x: torch.ones(2, device="pretended:7"),
        lambda x: torch.zeros(3, 4).add_(x),
    ],
)
def test_misuse_is_refused(x, misuse):
    with pytest.raises((RuntimeError, TypeError, NotImplementedError)):
        misuse(x)


def test_numbers_are_those_of_the_cpu(x):
    torch.testing.assert_close((x.mT @ x).cpu(), x.cpu().mT @ x.cpu(), rtol=0, atol=0)
    assert x.mT[1].tolist() == [1.0, 5.0, 9.0]


def test_operations_copies_and_waits_are_counted(pretended):
    host = torch.ones(3, 4)
    here = pretended.counts[0]
    x = host.to(pretended.NAME)
    assert (here.up, here.up_bytes, here.waits) == (1, 48, 1)
    y = host.to(pretended.NAME, non_blocking=True)
    assert (here.up, here.waits) == (2, 1)
    (x * y).view(-1)[0].item()
    assert here.names == {"mul": 1, "_local_scalar_dense": 1} and here.waits == 2
    x.cpu()
    assert (here.down, here.down_bytes, here.waits) == (1, 48, 3)
    x.nonzero(), torch.equal(x, y)
    assert here.waits == 5


def test_copies_that_do_not_block_hold_garbage_until_synchronised(x, pretended):
    y = x.to("cpu", non_blocking=True)
    assert y.isnan().all()
    torch.pretended.synchronize()
    assert y[2].tolist() == [8.0, 9.0, 10.0, 11.0]


def test_bytes_are_counted_and_limited(x, pretended):
    with pretended.limited(100) as here:
        before = here.live
        y = x + 1
        assert here.live == before + 48
        view = y[1:]
        assert here.live == before + 48
        with pytest.raises(torch.OutOfMemoryError):
            torch.zeros(60, device=pretended.NAME)
        assert torch.pretended.mem_get_info() == (52, here.limit)
        del y
        assert here.live == before + 48  # the view holds it
        del view
        assert here.live == before


def test_gradients_and_ordinals(pretended):
    with torch.autograd.set_multithreading_enabled(False):
        x = torch.ones(3, device="pretended:1", requires_grad=True)
        (2 * x).sum().backward()
    assert x.grad.tolist() == [2.0] * 3
    assert pretended.counts[1].operations > 0 == pretended.counts[0].operations


def test_autocast(x):
    with torch.autocast("pretended", dtype=torch.bfloat16):
        assert (x @ x.mT).dtype == torch.bfloat16
