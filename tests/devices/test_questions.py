"""Questions to an index on a device: the numbers of the CPU, computed there, within its memory."""

import pickle
from contextlib import nullcontext
from functools import partial

import pytest
import settings
import torch
from settings import assert_near

import toy
import unde
from unde import Index
from unde.data import Rows
from unde.devices import Compute
from unde.diffusion import sample
from unde.evaluate import Bank, TrainingSpec, baseline_scores, tail_patch
from unde.evaluate.bank.training import QueryUtility
from unde.index.calibrate import Candidates
from unde.index.nearest import nearest_labels
from unde.index.select import select
from unde.kernels import Diagonal, Gram, ParameterColumns, TensorSource, fit_kernel
from unde.methods import EKFAC, TRAK, LoGRA, TracIn
from unde.tasks import Classification
from unde.ui.explorer.ranking import ScoreCache
from unde.weights.retrieval import describe

PLAIN, KERNEL = 1e-5, 1e-4  # tolerance, and through a kernel
SIMPLE = ("tracin", "cosine", "int8")
QUERIES, LEARNING = toy.data(4, seed=5), toy.data(24, seed=9)
LAYERS = Gram(0.1, blocks="layer")
TOP = [[0, 1], [2, 3], [4, 5], [6, 7]]
METHODS = {
    "tracin": (TracIn(projection="none"), {}),
    "cosine": (TracIn(projection="none", cosine=True), {}),
    "int8": (TracIn(projection="none"), {"store_dtype": "int8"}),
    "diagonal": (TracIn(projection="none", metric="diagonal"), {}),
    "trak": (TRAK(projection="none"), {}),
    "dual": (TRAK(projection="none", form="dual"), {}),
    "logra": (LoGRA(projection="kron(4)"), {}),
    "ekfac": (EKFAC(projection="kron(4)"), {}),
    "whole": (EKFAC(projection="none"), {}),
    "factored": (EKFAC(projection="factored(1)"), {}),
    "checkpoints": (TRAK(projection="none"), {"checkpoints": toy.states(0, 1)}),
}


def moved(index, device, **options):
    """The same index, opened with its model on the device."""
    state = index._state
    given = {"task": state.task, "train_data": state.rows.data, "checkpoints": state.checkpoints} | options
    return Index.open(index.folder, model=toy.net().to(device), **given)


def within(index, device, budget):
    """The same index with so many bytes of the device."""
    out = moved(index, device)
    out._state.stored.compute = Compute(torch.device(device, 0), budget)
    return out


@pytest.fixture(scope="module")
def indexes(tmp_path_factory, device):
    """(on the CPU, on the device), each made once."""
    made = {}

    def get(name):
        if name not in made:
            method, options = METHODS[name]
            here = toy.build(tmp_path_factory.mktemp(name), method=method, **options)
            made[name] = here, moved(here, device)
        return made[name]

    return get


@pytest.mark.parametrize("name", METHODS)
def test_scores(indexes, operations, name):
    here, there = indexes(name)
    w, tolerance = torch.linspace(0.5, 1.5, len(here.groups.names)), PLAIN if name in SIMPLE else KERNEL
    a, b = here.score(QUERIES), there.score(QUERIES)
    for ask in (
        lambda s: s.total(w),
        lambda s: s.by_group(),
        lambda s: s.top(5, w).values,
        lambda s: s.top(5, w, largest=False).values,
    ):
        before = operations()
        found = ask(b)
        assert operations() > before
        assert found.device.type == "cpu"
        assert_near(found, ask(a), tolerance)
    assert a.top(3, w).ids == b.top(3, w).ids
    before = operations()
    found = there.self_influence(w, normalize_top=3, subset=[3, 1, 9])
    assert operations() > before
    assert_near(found, here.self_influence(w, normalize_top=3, subset=[3, 1, 9]), tolerance)


def attributed(_index, device, method, **options):
    data = Classification(), toy.data(22), QUERIES
    return unde.attribute(toy.net().to(device), *data, method, progress=False, **options).total()


def patched(_index, device):
    data = Classification(), toy.data(22), QUERIES, TOP
    result = tail_patch(toy.net().to(device), *data, optimizer=torch.optim.AdamW, lr=0.01)
    return torch.from_numpy(result.summed.per_query)


def trained(index, device):
    """Models of a bank, one of them in a stack, on queries."""
    task, rows = Classification(), Rows(QUERIES)
    spec = TrainingSpec(
        lambda seed: toy.net(seed).to(device),
        toy.data(22),
        task.loss,
        torch.optim.AdamW,
        epochs=2,
        batch_size=8,
    )
    measure = QueryUtility(task, rows)
    bank = Bank.run(index.folder / f"bank-{device}", train=spec, utility=measure, n_train=22, subsets=2)
    return torch.from_numpy(bank.utility["queries"])


def predicted(index, _device):
    """What a calibration compares: predictions of all settings for subsets."""
    masks = torch.rand(6, 22, generator=torch.Generator().manual_seed(0)).numpy() < 0.5
    found = Candidates(index._state, Rows(QUERIES), masks).predictions
    return torch.cat(
        [torch.from_numpy(found[name]).double() / abs(found[name]).max() for name in sorted(found)]
    )


def neighbours(_index, device):
    rows = Rows(toy.data(22))
    return nearest_labels(toy.net().to(device), Classification(), rows, torch.full((22,), -1), k=3).float()


def selected(index, _device):
    """Scores of LESS, with near duplicates passed over."""
    return select(index, {"a": QUERIES}, 5, duplicates=0.9).scores


def hubs(index, _device):
    """What is said of weights."""
    scores = index.score(LEARNING)
    found = describe(scores, torch.linspace(0.5, 1.5, len(scores.groups)))
    return torch.tensor(list(found.values()))


def live(index, _device):
    """What the live page holds of a query."""
    held = ScoreCache.forward(index.score(QUERIES).select(torch.tensor([1])))
    return held.total(torch.linspace(0.5, 1.5, len(index.groups.names)))


def changed(index, _device):
    index.append(toy.data(3, seed=7), progress=False)
    index.remove([1, 23])
    return index.score(QUERIES).total()


ASKED = {
    "rescore": ("tracin", lambda index, _: index.score(QUERIES).rescore(5).total()),
    "rescore through a kernel": ("ekfac", lambda index, _: index.score(QUERIES).rescore(5).total()),
    "attribute": ("tracin", partial(attributed, method="ekfac")),
    "attribute by cosine": ("tracin", partial(attributed, method=TracIn(cosine=True))),
    "conjugate gradients": ("tracin", partial(attributed, method="ekfac", cg=3)),
    "learn": ("ekfac", lambda index, _: unde.learn_weights(index.score(LEARNING), k=5, epochs=2).values),
    "learn by cosine": (
        "cosine",
        lambda index, _: unde.learn_weights(index.score(LEARNING), k=5, epochs=1).values,
    ),
    "learn by fixed point": (
        "tracin",
        lambda index, _: unde.learn_weights(index.score(LEARNING), k=5, solver="fixed-point").values,
    ),
    "tail-patch": ("tracin", patched),
    "bank": ("tracin", trained),
    "live page": ("cosine", live),
    "calibration": ("trak", predicted),
    "hubs": ("trak", hubs),
    "select": ("tracin", selected),
    "audit": ("tracin", neighbours),
    "baselines": (
        "tracin",
        lambda _, device: baseline_scores(toy.net().to(device), Classification(), toy.data(22), QUERIES)[
            "hidden-state similarity"
        ],
    ),
}


@pytest.mark.parametrize("name", ASKED)
def test_what_else_is_asked(indexes, device, operations, name):
    method, ask = ASKED[name]
    here, there = indexes(method)
    want, before = ask(here, "cpu"), operations()
    got = ask(there, device)
    assert operations() > before
    assert_near(got, want, KERNEL)


def test_changed_indexes(tmp_path, device, operations):
    here = toy.build(tmp_path / "a", method=TRAK(projection="none"))
    there = moved(toy.build(tmp_path / "b", method=TRAK(projection="none")), device)
    assert_near(changed(there, device), changed(here, "cpu"), KERNEL)
    assert operations() > 0


def test_weights_from_copies_of_training_examples(tmp_path, device, operations):
    here = toy.build(tmp_path, 120, method=TracIn(projection="none"), pass_size=32)
    there, want = moved(here, device), here.learn_weights(examples=40).values
    before = operations()
    assert_near(there.learn_weights(examples=40).values, want, KERNEL)
    assert operations() > before


@pytest.mark.parametrize("refused", ["jvp", "_loop_over_tokens"])
def test_tokens(refused, tmp_path, monkeypatch, device, operations):
    """By a backward pass for each token, and by forward mode."""

    def refuse(*_):
        raise NotImplementedError

    monkeypatch.setattr(f"unde.index.token_scores.{refused}", refuse)
    here = settings.build("gpt2", tmp_path, method="tracin")
    model, task, rows = settings.make("gpt2", device)
    there = Index.open(tmp_path, model=model, task=task, train_data=rows)
    want, got = (index.tokens(index.score(rows.subset([0, 1])))(1, rows[3]) for index in (here, there))
    assert operations() > 0
    assert_near(got, want)


@pytest.mark.parametrize("method", ["d-trak", "das", "journey-trak"])
def test_diffusion(tmp_path, device, operations, method):
    here = settings.build("unet", tmp_path, method=method)
    model, task, rows = settings.make("unet", device)
    there = Index.open(tmp_path, model=model, task=task, train_data=rows)
    before = operations()
    asked = rows[:2], rows[:2]
    if method == "journey-trak":  # asked with samples, which are made on the device too
        asked = [
            sample(index.model, task.scheduler, (2, 8, 8), range(2), steps=3, progress=False).queries(
                journey=True
            )
            for index in (here, there)
        ]
        assert_near(asked[1]["trajectory"], asked[0]["trajectory"], KERNEL)
    a, b = here.score(asked[0]), there.score(asked[0])
    assert_near(b.total(), a.total(), KERNEL)
    assert_near(there.self_influence(), here.self_influence(), KERNEL)
    assert operations() > before


def test_float64_on_the_device(indexes, pretended, device):
    """Kernels are fitted there where the device has float64."""
    here, _ = indexes("logra")
    with pretended.with_float64():
        there = moved(here, device)
        method = LoGRA(projection="kron(4)", damping=0.3)
        assert_near(there.score(QUERIES, method).total(), here.score(QUERIES, method).total(), KERNEL)
        assert pretended.counts[0].names["linalg_cholesky_ex"] > 0


def test_waits_of_a_query_do_not_grow_with_the_parameters(tmp_path, pretended, device):
    waits = []
    for name in ("mlp", "resnet-batchnorm"):
        index = settings.build(name, tmp_path / name, device, method="tracin")
        query = index.train_data.subset([0])
        for _ in range(2):
            pretended.counts[0].restart()
            index.score(query).total()
        waits.append(pretended.counts[0].waits)
    assert len(index.groups) > 10 and max(waits) <= 10, waits


@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize(
    ("kernel", "width"),
    [(Diagonal(), 5), (Gram(0.1), 5), (Gram(0.1, form="dual"), 5), (LAYERS, 5), (LAYERS, 40)],
    ids=["diagonal", "primal", "dual", "layers", "dual layers"],
)
def test_a_fit_waits_and_copies_the_same_for_more_parameters(pretended, kernel, width, double):
    """With float64 on the device, and without."""
    counts = pretended.counts[0]

    def cost(layers):
        features = torch.randn(30, width * layers, generator=torch.Generator().manual_seed(0))
        parts = [ParameterColumns(f"{i}.weight", slice(width * i, width * (i + 1))) for i in range(layers)]
        cuts = [slice(0, 20), slice(20, 30)]
        here, there = (TensorSource(x, parts, cuts) for x in (features, features.to(pretended.NAME)))
        with pretended.with_float64() if double else nullcontext():
            counts.restart()
            fitted = fit_kernel(kernel, there)
            seen = counts.waits, counts.down
            assert_near(
                fitted.apply(there.features[:3]).cpu(), fit_kernel(kernel, here).apply(features[:3]), KERNEL
            )
        return seen

    few, many = cost(2), cost(12)
    assert few == many and max(many) <= 10


def test_waits_do_not_grow_with_the_examples(tmp_path, pretended, device):
    waits = []
    for n in (22, 88):
        here = toy.build(tmp_path / str(n), n, method=TracIn(projection="none"))
        scores = within(here, device, 60_000).score(QUERIES)
        counts = pretended.counts[0]
        for ask in (scores.total, partial(scores.top, 3)):
            ask()
            counts.restart()
            ask()
            waits.append(counts.waits)
    assert waits[:2] == waits[2:]
    assert max(waits) < 8


@pytest.mark.parametrize("name", ["tracin", "int8", "ekfac", "cosine"])
def test_memory_of_the_device(tmp_path, pretended, device, name):
    budget = 40_000
    method, options = METHODS[name]
    here = toy.build(tmp_path, 100, method=method, **options)
    there = within(here, device, budget)
    scores = there.score(toy.data(40, seed=3))
    with pretended.limited(budget) as counts:
        before = counts.live
        for ask in (scores.total, partial(scores.top, 5), scores.by_group, there.self_influence):
            ask()
        assert 0 < counts.peak - before <= budget


def test_a_kernel_beyond_the_memory_of_the_device(tmp_path, pretended, device):
    here = toy.build(tmp_path, method=TRAK(projection="none"))
    with pytest.raises(
        unde.UndeError, match=rf"the memory budget of {pretended.NAME}:0 is .*: raise device_memory="
    ):
        within(here, device, 1000).score(QUERIES)


def test_workers_share_the_device(tmp_path, pretended, device):
    """A reader that goes to another process opens there on a device of the kind, with its share of the memory."""
    here = toy.build(tmp_path, method=TracIn(projection="none"))
    alone, shared = (moved(here, device, executor=name)._state.stored for name in ("serial", "processes:4"))
    copy = pickle.loads(pickle.dumps(shared))
    assert copy.compute.device == torch.device(pretended.NAME, 0)  # two workers for each of two
    assert copy.compute.memory == pytest.approx(alone.compute.memory // 2, rel=0.01)
    assert pickle.loads(pickle.dumps(here._state.stored)).compute.device.type == "cpu"


def test_gradients_of_queries_that_the_device_does_not_hold(device):
    data = Classification(), toy.data(22), QUERIES
    with pytest.raises(unde.UndeError, match=r"raise device_memory="):
        unde.attribute(toy.net().to(device), *data, device_memory=300, progress=False)
