"""Questions to an index on a device: the numbers of the CPU, computed there, within its memory."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

import toy
from unde import Index
from unde.methods import EKFAC, TRAK, LoGRA, TracIn
from unde.tasks import Classification

QUERIES = toy.data(4, seed=5)
CLOSE = {"rtol": 1e-4, "atol": 1e-5}  # through a kernel
METHODS = {
    "tracin": (TracIn(projection="none"), {}),
    "cosine": (TracIn(projection="none", cosine=True), {}),
    "int8": (TracIn(projection="none"), {"store_dtype": "int8"}),
    "int4": (TracIn(projection="none"), {"store_dtype": "int4"}),
    "adam": (TracIn(projection="none", metric="diagonal"), {}),
    "trak": (TRAK(projection="none"), {}),
    "dual": (TRAK(projection="none", form="dual"), {}),
    "svd": (TRAK(projection="none", form="svd(4)"), {}),
    "logra": (LoGRA(projection="kron(4)"), {}),
    "ekfac": (EKFAC(projection="kron(4)"), {}),
    "factored": (EKFAC(projection="factored(1)"), {}),
    "checkpoints": (TRAK(projection="none"), {"checkpoints": toy.states(0, 1)}),
}


@contextmanager
def counted(pretended) -> Iterator:
    """What the device does inside, at least one operation."""
    here = pretended.counts[0]
    here.restart()
    yield here
    assert here.operations > 0


def moved(index: Index, folder, device, **options) -> Index:
    """The index, opened with its model on the device."""
    given = {"checkpoints": index._state.checkpoints} | options
    return Index.open(
        folder, model=toy.net().to(device), task=Classification(), train_data=toy.data(22), **given
    )


@pytest.mark.parametrize("name", METHODS)
def test_scores_are_those_of_the_cpu(tmp_path, pretended, device, name):
    method, options = METHODS[name]
    here = toy.build(tmp_path, method=method, **options)
    there = moved(here, tmp_path, device)
    w = torch.linspace(0.5, 1.5, len(here.groups.names))
    a, b = here.score(QUERIES), there.score(QUERIES)
    close = {"rtol": 1e-4, "atol": 1e-5 * float(a.total().abs().max())}
    for ask in (
        lambda s: s.total(w),
        lambda s: s.by_group(),
        lambda s: s.top(5, w).values,
        lambda s: s.top(5, w, largest=False).values,
        lambda s: s.contributions(slice(1, 3)).cpu(),
    ):
        expected = ask(a)
        with counted(pretended):
            torch.testing.assert_close(ask(b), expected, **close)
    assert a.top(3, w).ids == b.top(3, w).ids
    expected = here.self_influence(w, normalize_top=3, subset=[3, 1, 9])
    with counted(pretended):
        torch.testing.assert_close(
            there.self_influence(w, normalize_top=3, subset=[3, 1, 9]), expected, **CLOSE
        )
