import os
import subprocess
import sys
import tracemalloc
from collections import UserDict, namedtuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
)

from unde.data import Rows, choose_collate, digest, evenly, map_tensors, to_device
from unde.errors import UndeError

X = torch.arange(15.0).view(5, 3)
Y = torch.tensor([0, 1, 0, 2, 1])


class Pairs(Dataset):
    def __len__(self):
        return 5

    def __getitem__(self, i):
        if not 0 <= i < 5:
            raise IndexError(i)
        return X[i], Y[i]


def hugging_face():
    datasets = pytest.importorskip("datasets")
    return datasets.Dataset.from_dict({"x": X.tolist(), "y": Y.tolist()}).with_format("torch")


PAIRS = {
    "columns": lambda: (X, Y),
    "array columns": lambda: (X.numpy(), Y.numpy()),
    "list columns": lambda: (list(X), Y),
    "list of tuples": lambda: list(zip(X, Y)),
    "tensor data set": lambda: TensorDataset(X, Y),
    "map-style data set": Pairs,
    "loader": lambda: DataLoader(Pairs(), batch_size=2),
    "loader over columns": lambda: DataLoader(TensorDataset(X, Y), batch_size=3, drop_last=True),
    "loader of single examples": lambda: DataLoader(Pairs(), batch_size=None),
    "loader with its own batches": lambda: DataLoader(
        Pairs(), batch_sampler=BatchSampler(SequentialSampler(Pairs()), 2, False)
    ),
    "rows": lambda: Rows((X, Y)),
}
DICTS = {
    "dict of columns": lambda: {"x": X, "y": Y},
    "mapping of columns": lambda: UserDict(x=X, y=Y.numpy()),
    "list of dicts": lambda: [{"x": x, "y": y} for x, y in zip(X, Y)],
    "hugging face data set": hugging_face,
    "loader of dicts": lambda: DataLoader([{"x": x, "y": y} for x, y in zip(X, Y)], batch_size=5),
}


@pytest.mark.parametrize("kind", PAIRS)
def test_pairs(kind):
    rows = Rows(PAIRS[kind]())
    assert len(rows) == 5
    x, y = rows[3]
    assert np.array_equal(x, X[3])
    assert int(y) == 2
    x, y = rows.batch([4, 0])
    assert torch.equal(x, X[[4, 0]])
    assert torch.equal(y, Y[[4, 0]])


@pytest.mark.parametrize("kind", DICTS)
def test_dicts(kind):
    rows = Rows(DICTS[kind]())
    assert len(rows) == 5
    assert set(rows[3]) == {"x", "y"}
    batch = rows.batch([4, 0])
    assert set(batch) == {"x", "y"}
    assert torch.equal(batch["x"], X[[4, 0]])
    assert torch.equal(batch["y"], Y[[4, 0]])


def test_single_tensors_and_named_tuples():
    rows = Rows(X)
    assert len(rows) == 5
    assert torch.equal(rows.batch([1, 3]), X[[1, 3]])
    Pair = namedtuple("Pair", "x y")
    rows = Rows([Pair(x, y) for x, y in zip(X, Y)])
    assert len(rows) == 5
    assert torch.equal(rows.batch([2, 3]).x, X[2:4])


def test_whose_collate():
    own, given_one = (lambda examples: ("own", len(examples))), (lambda examples: ("given", len(examples)))
    assert Rows(DataLoader(Pairs(), collate_fn=own)).batch([0, 1]) == ("own", 2)
    assert Rows(DataLoader(Pairs(), collate_fn=own), given_one).batch([0]) == ("given", 1)
    assert Rows(Rows((X, Y), own)).batch([0, 1, 2]) == ("own", 3)
    assert Rows(Rows((X, Y), own), given_one).batch([0]) == ("given", 1)
    own, tasks = (lambda examples: "own"), (lambda examples: "task's")
    for brings in (DataLoader(Pairs(), collate_fn=own), Rows((X, Y), own)):
        assert (
            choose_collate(tasks, brings) is None
            and Rows(brings, choose_collate(tasks, brings)).batch([0]) == "own"
        )
    for plain in (DataLoader(Pairs()), DataLoader(Pairs(), batch_size=None), Rows((X, Y)), (X, Y), Pairs()):
        assert Rows(plain, choose_collate(tasks, plain)).batch([0]) == "task's"


class Stream(IterableDataset):
    def __iter__(self):
        yield from zip(X, Y)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ((X, Y[:4]), r"different lengths \{0: 5, 1: 4\}.*pass a list"),
        ({"x": X, "y": Y[:2]}, r"different lengths \{'x': 5, 'y': 2\}"),
        ((X[0], torch.tensor(1)), "column 1 is a single Tensor.*pass a list"),
        ((X, 3), "column 1 is a single int"),
        ([], "empty"),
        ((), "empty"),
        ({}, "empty"),
        ((X[:0], Y[:0]), "empty"),
        (TensorDataset(X[:0]), "empty"),
        (Stream(), "type Stream cannot be read by position.*map-style"),
        (DataLoader(Stream()), "type Stream cannot be read by position"),
        (iter(Pairs()), "cannot be read by position"),
        ({1, 2}, "type set cannot be read"),
        (None, "type NoneType cannot be read"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_refused(data, message):
    with pytest.raises(UndeError, match=message):
        Rows(data)


def test_refused_hugging_face_stream():
    with pytest.raises(UndeError, match="type IterableDataset cannot be read by position"):
        Rows(hugging_face().to_iterable_dataset())


def shuffled_batches():
    return BatchSampler(RandomSampler(Pairs()), 2, False)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"shuffle": True}, "RandomSampler"),
        ({"sampler": SubsetRandomSampler([0, 1])}, "SubsetRandomSampler"),
        ({"sampler": [4, 3, 2, 1, 0]}, "list"),
        ({"batch_sampler": shuffled_batches()}, "RandomSampler"),
        ({"batch_sampler": [[1, 0], [3, 2]]}, "list"),
        ({"batch_size": None, "shuffle": True}, "RandomSampler"),
    ],
    ids=["shuffle", "subset", "sampler", "batch-sampler", "batches", "single-examples"],
)
def test_loaders_in_another_order_are_refused(options, named):
    with pytest.raises(UndeError, match=rf"another order \({named}\).*shuffle=False"):
        Rows(DataLoader(Pairs(), **options))


RANGES = [range(2), range(2, 4), range(4, 5)]


@pytest.mark.parametrize("workers", [0, 2])
def test_batches(workers):
    rows = Rows(Pairs())
    found = list(rows.batches(RANGES, workers))
    assert [r for r, _, _ in found] == RANGES
    for r, (x, y), digests in found:
        assert torch.equal(x, X[r.start : r.stop])
        assert torch.equal(y, Y[r.start : r.stop])
        assert digests == [digest((X[i], Y[i])) for i in r] == rows.digests(r)
    assert rows.digests() == [d for _, _, digests in found for d in digests]


def test_any_ranges_in_any_order():
    found = list(Rows(Pairs()).batches([range(3, 5), range(1)]))
    assert [x[:, 0].tolist() for _, (x, _), _ in found] == [[9.0, 12.0], [0.0]]


def test_positions_are_listed_batch_by_batch():
    """Not those of all batches at once, which may be as many as there are examples."""
    tracemalloc.start()
    batches = Rows(Pairs()).batches([range(2), range(300_000)])
    next(batches)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    batches.close()
    assert peak < 1e6


DIFFERENT = [
    torch.zeros(2),
    -torch.zeros(2),
    torch.ones(2, dtype=torch.bfloat16).view(torch.int16),
    *(torch.ones(2, dtype=t) for t in (torch.float32, torch.float64, torch.float16, torch.bfloat16)),
    *(torch.ones(2, dtype=t) for t in (torch.int64, torch.bool)),
    *(torch.ones(shape) for shape in ((1,), (), (1, 2), (2, 1))),
    torch.tensor([[1.0, 2.0], [3.0, 4.0]]),
    torch.tensor([[1.0, 2.0], [3.0, 4.0]]).T,
    *(1, 1.0, True, None, "1", b"1", "None"),
    *([1], [[1]], [1, 1], [11]),
    *({"a": 1}, {"a": "i1;"}, {"ai1;": None}, {"b": 1}, {1: 1}, {"1": 1}),
    *(["ab", "c"], ["abs1:c"], ["a", "bc"], ["absc"], [["a"], "b"], ["a", ["b"]], [[], []], [[[]]]),
    *(np.array([x, None], dtype=object) for x in "ab"),
    np.array(["a", "b"]),
]


def test_digests_tell_examples_apart():
    digests = [digest(x) for x in DIFFERENT]
    for i, a in enumerate(digests):
        for j, b in enumerate(digests[:i]):
            assert a != b, (DIFFERENT[i], DIFFERENT[j])


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (torch.arange(6).view(2, 3).T, torch.arange(6).view(2, 3).T.contiguous()),
        (torch.arange(3.0), torch.arange(3.0, requires_grad=True)),
        (torch.arange(3), np.arange(3)),
        (torch.arange(6)[::2], torch.tensor([0, 2, 4])),
        (np.asfortranarray(np.eye(3) + 1), np.eye(3) + 1),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ({"a": 1}, UserDict(a=1)),
        ((1, "x"), [1, "x"]),
        (np.array(["a", None], dtype=object), np.array(["".join(["a"]), None], dtype=object)),
    ],
    ids=["view", "requires-grad", "array", "strided", "order", "keys", "mapping", "tuple", "objects"],
)
def test_equal_content_has_equal_digests(a, b):
    assert digest(a) == digest(b)


LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=4), st.binary(max_size=4)
)
EXAMPLES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=2), inner, max_size=3)
    ),
    max_leaves=6,
)


def written(value):
    """The same for equal content only."""
    if isinstance(value, dict):
        return f"{{{[(k, written(value[k])) for k in sorted(value)]}}}"
    if isinstance(value, list):
        return f"[{[written(v) for v in value]}]"
    return f"{type(value).__name__}:{value!r}"


@settings(max_examples=150, deadline=None)
@given(a=EXAMPLES, b=EXAMPLES)
def test_digests_are_equal_for_equal_examples_only(a, b):
    assert (digest(a) == digest(b)) == (written(a) == written(b))


def test_images():
    image = pytest.importorskip("PIL.Image")
    black, grey = image.new("L", (4, 6)), image.new("L", (4, 6), 7)
    others = [grey, image.new("L", (6, 4)), image.new("RGB", (4, 2))]
    assert digest(black) == digest(image.new("L", (4, 6)))
    assert len({digest(x) for x in [black, *others]}) == 4


def test_what_has_no_content_is_refused():
    with pytest.raises(UndeError, match=r"type object are equal.*Convert it"):
        digest({"x": object()})


def test_the_same_in_another_process():
    """Nothing of hashing order, addresses or the environment goes in."""
    code = (
        "import numpy as np, torch; from unde.data import digest;"
        "print(digest({'x': torch.arange(6.).view(2, 3).T, 'y': [1, 2.5, None, 'é', b'z'], "
        "'z': np.array(['a', None], dtype=object)}))"
    )
    there = subprocess.check_output(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": "1"}, text=True
    )
    example = {"z": np.array(["a", None], dtype=object), "x": torch.arange(6.0).view(2, 3).T}
    assert there.strip() == digest(example | {"y": [1, 2.5, None, "é", b"z"]})
    # Written down when the format was fixed: an index is resumed by comparing with digests on disk.
    assert digest((torch.arange(4), "a", 1)) == "492a29311a0260e5"


def test_map_tensors():
    Pair = namedtuple("Pair", "x y")
    batch = {
        "a": torch.ones(2),
        "b": [torch.ones(1), "text", (torch.ones(3), None)],
        "c": Pair(torch.ones(1), 4),
    }
    found = map_tensors(batch, lambda x: x + 1)
    assert torch.equal(found["a"], torch.full((2,), 2.0))
    assert found["b"][1:] == ["text", (found["b"][2][0], None)]
    assert torch.equal(found["b"][2][0], torch.full((3,), 2.0))
    assert isinstance(found["c"], Pair)
    assert found["c"].y == 4
    assert isinstance(map_tensors(UserDict(a=torch.ones(1)), torch.neg), UserDict)
    assert torch.equal(batch["a"], torch.ones(2))


@pytest.mark.parametrize(("device", "waits"), [("cpu", True), ("meta", False)])
def test_copies_to_the_host_are_waited_for(monkeypatch, device, waits):
    """Copies to an accelerator are ordered by its stream; one to the host could be read before it has arrived."""
    calls, to = [], torch.Tensor.to

    def recorded(self, target, non_blocking=False):
        calls.append((target.type, non_blocking))
        return to(self, target, non_blocking=non_blocking)

    monkeypatch.setattr(torch.Tensor, "to", recorded)
    to_device({"x": torch.ones(2), "y": (torch.zeros(1), "text")}, torch.device(device))
    assert calls == [(device, not waits)] * 2


def test_to_device():
    found = to_device([{"x": torch.ones(2)}, "text"], torch.device("meta"))
    assert found[0]["x"].device.type == "meta"
    assert found[1] == "text"


@pytest.mark.parametrize(
    ("n", "count"), [(1, 1), (1, 3), (2, 3), (3, 3), (7, 3), (1000, 64), (64, 64), (65, 64)]
)
def test_evenly_spaced_positions(n, count):
    found = evenly(n, count)
    assert len(found) == min(n, count)
    assert found[0] == 0
    assert found[-1] == (n - 1 if count > 1 else 0)
    steps = {b - a for a, b in zip(found, found[1:])}
    assert not steps or max(steps) - min(steps) <= 1
    assert 0 not in steps
