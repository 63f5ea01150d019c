"""Weights from an index alone: against a slow twin, on every kind of model, and with what people get wrong."""

import json
import math
import weakref
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import models
import toy
from unde import Index, UndeError, Weights
from unde.gradients import Collector
from unde.index.label_free import FEWEST, REPORTING, SEARCH_SIZES, Parts, WeightNoise, structure
from unde.methods import DAS, TRAK, JourneyTRAK, TracIn
from unde.tasks import CausalLM, Classification, Diffusion
from unde.tasks.perturb import InputNoise
from unde.weights.contributions import Contributions

COSINE = TracIn(projection="none", cosine=True)
FEW = 40  # examples to learn from where it does not matter


def labelled(n, seed=0):
    """Inputs with labels that a model can learn."""
    x, _ = toy.data(n, seed)
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 1).long()


def made(folder, n=640, **options):
    data = options.pop("train_data", None) or labelled(n)
    return toy.build(folder, train_data=data, **{"batch_size": 64, "groups": "tensor", **options})


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    return made(tmp_path_factory.mktemp("self") / "i")


@pytest.fixture(scope="module")
def cosine(tmp_path_factory):
    """Examples find themselves well, so that a strength must be searched."""
    return made(tmp_path_factory.mktemp("self") / "cosine", method=COSINE)


@pytest.fixture(scope="module")
def few(tmp_path_factory):
    return made(tmp_path_factory.mktemp("self") / "few", 130)


def jitter(example, strength, random):
    """A user's own: some inputs are set to zero."""
    x, y = example
    return x * torch.from_numpy(random.random(x.shape) > strength / 2), y


def sane(weights, index):
    """What must hold of weights whatever they are."""
    p = weights.provenance
    assert weights.groups == list(index.groups.names)
    assert (weights.values >= 0).all() and float(weights.values.mean()) == pytest.approx(1.0, abs=1e-5)
    assert p["how"] == "Algorithm 1 on perturbed training examples" and set(p["strength"]) == set(
        p["search"]
    ) == set(p["found"])
    for kind, tried in p["search"].items():
        assert p["strength"][kind] in [s for s, _ in tried]
    for found in p["found"].values():
        assert 0 <= found["unweighted"] <= 1 and 0 <= found["weighted"] <= 1
    for told in p["effect"].values():
        assert 1 <= told["groups"] <= len(weights) + 1e-6 and 1 <= told["examples"] <= len(index) + 1e-6
        assert 0 < told["cancellation"] <= 1 + 1e-6
    parts = [set(part) for part in p["examples"].values()]
    assert len(set.union(*parts)) == sum(map(len, parts)) == len(weights.query_digests)
    json.dumps(p)
    return weights


def slow_scores(index, which, strength, seed, weights=None):
    """(q, N) scores of copies, perturbed one by one and scored as any queries are."""
    x, y = index.train_data.data
    copies = [
        InputNoise()((x[n], y[n]), strength, np.random.default_rng([seed, 1, n])) for n in which.tolist()
    ]
    return index.score(copies).total(weights).double()


def slow_found(scores, which):
    others = scores.clone()
    others[torch.arange(len(which)), which] = -math.inf
    return (scores[torch.arange(len(which)), which] > others.amax(1)).double().mean().item()


@pytest.fixture(scope="module")
def learned(cosine):
    return cosine.learn_weights(examples=FEW, seed=3)


def test_provenance_tells_what_a_slow_twin_finds(cosine, learned):
    p = sane(learned, cosine).provenance
    parts = {name: torch.tensor(part) for name, part in p["examples"].items()}
    strength = p["strength"]["noise"]
    for tried, share in p["search"]["noise"]:
        scores = slow_scores(cosine, parts["search"], tried, 3)
        assert share == pytest.approx(slow_found(scores, parts["search"]), abs=1e-6)
    assert len(p["search"]["noise"]) == 5 and strength > InputNoise().least  # the search was needed
    report = p["found"]["noise"]
    for weights, key in ((None, "unweighted"), (learned, "weighted")):
        scores = slow_scores(cosine, parts["report"], strength, 3, weights)
        assert report[key] == pytest.approx(slow_found(scores, parts["report"]), abs=1e-6)
    assert report["copies"] == len(parts["report"])
    assert learned.query_digests == cosine.train_data.digests(
        [n for part in p["examples"].values() for n in part]
    )
    assert p["seed"] == 3 and p["method"] == "tracin" and p["scores"]["index"] == cosine.manifest.id


def test_weights_can_be_used_and_kept(index, tmp_path, capsys):
    weights = sane(index.learn_weights(), index)
    said = " ".join(capsys.readouterr().err.split())
    assert "weights from 200 perturbed training examples (Algorithm 1): " in said
    effect, found = weights.provenance["effect"]["weighted"], weights.provenance["found"]["noise"]
    assert f"→ {effect['groups']:.1f} of {len(weights)} groups count" in said
    assert (
        f"→ {100 * found['weighted']:.0f} % of copies (noise) find their original. Only `unde calibrate`"
        in said
    )
    weights.save(tmp_path / "w.json")
    again = Weights.load(tmp_path / "w.json")
    assert torch.equal(again.values, weights.values) and again.provenance["seed"] == 0
    scores = index.score(toy.data(3, seed=9))
    assert scores.total(again).shape == (3, 640)
    weights = sane(index.learn_weights(method=TRAK(projection="none"), examples=FEW), index)
    assert weights.provenance["method"] == "trak"


def test_a_seed_decides(index):
    torch.manual_seed(1)
    np.random.seed(1)
    one = index.learn_weights(seed=1)
    torch.manual_seed(2)
    two, other = index.learn_weights(seed=1), index.learn_weights(seed=2)
    assert torch.equal(one.values, two.values) and one.provenance == two.provenance
    assert one.query_digests == two.query_digests
    assert one.provenance["examples"] != other.provenance["examples"]
    assert not torch.equal(one.values, other.values)
    state = torch.get_rng_state()
    index.learn_weights(examples=FEW)
    assert torch.equal(torch.get_rng_state(), state)  # nobody else's numbers are drawn


def test_parts_are_disjoint_by_content(tmp_path):
    """Every content three times, with an example apart: twins never serve two roles."""
    x, y = labelled(300)
    data = (x.repeat(3, 1), y.repeat(3))
    index = made(tmp_path / "i", train_data=data, method=COSINE)
    p = sane(index.learn_weights(examples=FEW), index).provenance
    content = {name: {n % 300 for n in part} for name, part in p["examples"].items()}
    assert sum(map(len, content.values())) == len(set.union(*content.values()))
    assert len(set.union(*content.values())) == sum(map(len, p["examples"].values())) <= 300
    # Twins tie with the original at any strength and do not hide it.
    assert p["search"]["noise"][0][1] > 0.5


def drawn(n, examples, kinds, seed=0, content=None, skipped=()):
    flags = torch.zeros(n, dtype=torch.bool)
    flags[list(skipped)] = True
    content = torch.arange(n) if content is None else content
    return Parts.draw(SimpleNamespace(stored=SimpleNamespace(skipped=flags)), content, examples, kinds, seed)


@pytest.mark.parametrize("kinds", [1, 2])
@pytest.mark.parametrize("examples", [20, 37, 200, 1000])
def test_how_many_examples_are_needed(examples, kinds):
    with pytest.raises(UndeError, match="different training examples are too few") as error:
        drawn(3, examples, kinds)
    need = int(str(error.value).split("at least ")[1].split(".")[0])
    with pytest.raises(UndeError, match=f"{need - 1} different training examples are too few"):
        drawn(need - 1, examples, kinds)
    parts = drawn(need, examples, kinds)
    assert min(len(p) for p in (parts.search, parts.learn, parts.report)) >= FEWEST * kinds
    assert len(parts.used) == len(set(parts.used.tolist())) <= need
    plenty = drawn(5000, examples, kinds)
    sizes = [len(p) for p in (plenty.search, plenty.learn, plenty.report)]
    assert sizes == [SEARCH_SIZES[kinds][0] * kinds, examples, REPORTING]


def test_skipped_examples_serve_nothing():
    parts = drawn(408, 200, 1, skipped=range(60))
    assert int(parts.used.min()) >= 60


@pytest.fixture
def counted():
    """How many queries' features are computed, in each batch; the few that coverage is checked on are no part."""
    rows = []

    class Counting(Collector):
        def __call__(self, batch, ids, out=None):
            rows.append(len(ids))
            return super().__call__(batch, ids, out)

    with mock.patch("unde.gradients.feature_pass.Collector", Counting):
        yield rows


def test_it_costs_540_passes_at_most(cosine, counted):
    p = cosine.learn_weights(examples=200).provenance
    assert len(p["search"]["noise"]) == SEARCH_SIZES[1][1]  # all that may be tried were
    assert sum(counted) == 5 * SEARCH_SIZES[1][0] + 200 + REPORTING


def test_a_language_model(tmp_path, counted):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = models.gpt2().eval()
    random = np.random.default_rng(0)
    texts = [{"input_ids": random.integers(1, 23, random.integers(4, 10)).tolist()} for _ in range(150)]
    index = Index.build(
        model, CausalLM(), texts, tmp_path / "i", method="trak", batch_size=64, progress=False
    )
    weights = sane(index.learn_weights(examples=FEW), index)
    assert set(weights.provenance["strength"]) == {"replaced tokens"}
    assert weights.provenance["search"]["replaced tokens"][0][1] > 0.25  # they find themselves
    assert sum(counted) <= 540


@pytest.fixture(scope="module")
def diffusion(tmp_path_factory):
    from diffusers import DDPMScheduler

    def build(method):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = models.Denoiser().eval()
        task = Diffusion(DDPMScheduler(num_train_timesteps=100, clip_sample=False), timesteps=2)
        images = torch.rand(235, 2, 4, 4, generator=torch.Generator().manual_seed(0)) * 2 - 1
        folder = tmp_path_factory.mktemp("diffusion") / "i"
        return Index.build(model, task, images, folder, method=method, batch_size=64, progress=False)

    return build


@pytest.mark.parametrize(
    ("built", "asked"),
    [
        ("trak", None),
        ("trak", JourneyTRAK(inference_steps=3)),
        (JourneyTRAK(training="per-step", inference_steps=2), None),
        ("das", None),
        (DAS(weigh="after"), None),
    ],
    ids=["trak", "journey-trak", "journey-trak per step", "das", "das after"],
)
def test_a_denoiser(diffusion, counted, built, asked):
    index = diffusion(built)
    weights = sane(index.learn_weights(method=asked, examples=FEW), index)
    assert set(weights.provenance["strength"]) == {"augmented", "noise"}
    assert weights.provenance["method"] == (asked or index.method).name
    steps = index.manifest.terms
    assert sum(counted) <= 540 * steps


def test_das_learns_on_scores_with_a_sign(diffusion):
    weights = diffusion("das").learn_weights(examples=FEW)
    assert weights.provenance["scores"]["method"]["weigh"] == "signed"


@pytest.mark.parametrize("method", [TracIn(projection="none"), TRAK(projection="none"), COSINE], ids=str)
@pytest.mark.parametrize("perturb", [None, "weights"])
def test_several_checkpoints(tmp_path, method, perturb):
    states = toy.states(1, 2, 3)
    index = made(tmp_path / "i", 130, method=method, checkpoints=states)
    before = {k: v.clone() for k, v in index.model.state_dict().items()}
    sane(index.learn_weights(examples=FEW, perturb=perturb), index)
    assert all(torch.equal(v, before[k]) for k, v in index.model.state_dict().items())


@pytest.mark.parametrize(
    ("perturb", "name"), [(jitter, "jitter"), (InputNoise("mine", 0.1, 0.2), "mine"), ("weights", None)]
)
def test_perturbations_of_ones_own(few, perturb, name):
    weights = sane(few.learn_weights(perturb=perturb, examples=FEW), few)
    (kind,) = weights.provenance["strength"]
    assert kind == (name or WeightNoise().name)
    if name == "mine":
        assert 0.1 <= weights.provenance["strength"]["mine"] <= 0.2


def test_a_users_strengths_go_from_a_twentieth_to_one(few):
    asked = set()

    def nothing(example, strength, random):
        asked.add(strength)
        return example

    weights = few.learn_weights(perturb=nothing, method=COSINE, examples=FEW)
    assert weights.provenance["search"]["nothing"] == [(0.05, 1.0), (1.0, 1.0)]  # copies are the originals
    assert asked == {0.05, 1.0} and weights.provenance["strength"]["nothing"] == 1.0


def test_the_collate_function_of_a_loader_is_used(tmp_path):
    rows = list(zip(*labelled(130)))

    def collate(examples):  # no other knows what to do with names
        return torch.stack([x for _, x, _ in examples]), torch.stack([y for _, _, y in examples])

    def blurred(example, strength, random):
        return example[0], InputNoise()(example[1], strength, random), example[2]

    loader = DataLoader([(None, x, y) for x, y in rows], batch_size=16, collate_fn=collate)
    built = made(tmp_path / "i", train_data=loader)
    opened = Index.open(built.folder, model=built.model, task=built.task, train_data=loader)
    one, two = (i.learn_weights(perturb=blurred, examples=FEW) for i in (built, opened))
    assert torch.equal(one.values, two.values)


def test_noise_on_weights_is_the_same_noise_taken_further():
    model, seen = toy.net(), {}
    own = [p.detach().clone() for p in model.parameters()]
    for strength in (0.1, 0.2):
        with WeightNoise().on(model, strength, seed=4):
            seen[strength] = [p.detach() - v for p, v in zip(model.parameters(), own)]
        assert all(torch.equal(p, v) for p, v in zip(model.parameters(), own))
    for v, weak, strong in zip(own, seen[0.1], seen[0.2]):
        torch.testing.assert_close(2 * weak, strong, rtol=1e-3, atol=1e-6)
        ratio = float(strong.square().mean().sqrt() / v.square().mean().sqrt())
        assert 0.2 / 3 < ratio < 0.2 * 3  # of a few numbers
    with WeightNoise().on(model, 0.1, seed=5):
        assert not torch.allclose(next(model.parameters()) - own[0], seen[0.1][0])


class Failing(Classification):
    """Raises as soon as it meets another model than the one that it was given."""

    def __init__(self, error):
        self._aside = {"own": None, "error": error, "met": 0}

    def loss(self, model, batch):
        weight = model[0].weight.detach()
        if self._aside["own"] is None:
            self._aside["own"] = weight.clone()
        if not torch.equal(weight, self._aside["own"]):
            self._aside["met"] += 1
            if self._aside["met"] > 3:
                raise self._aside["error"]
        return super().loss(model, batch)


@pytest.mark.parametrize("error", [RuntimeError("no luck"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_weights_are_as_before_when_the_task_raises(tmp_path, error):
    task = Failing(error)
    index = made(tmp_path / "i", 130, task=task)
    before = {k: v.clone() for k, v in index.model.state_dict().items()}
    with pytest.raises((UndeError, KeyboardInterrupt)):
        index.learn_weights(perturb="weights", examples=FEW)
    assert task._aside["met"] > 3
    assert all(torch.equal(v, before[k]) for k, v in index.model.state_dict().items())
    index.learn_weights(examples=FEW)  # and the index can go on


@pytest.mark.parametrize(
    ("method", "memory"),
    [(TracIn(projection="none"), 800_000), (COSINE, 2_000_000), (COSINE, 5_500_000)],
    ids=["all streamed", "some kept", "all kept"],
)
def test_copies_stay_within_the_memory_budget(cosine, memory, method):
    live, most = weakref.WeakSet(), [0]
    init = Contributions.__init__

    def noted(self, *arguments, **options):
        init(self, *arguments, **options)
        live.add(self)
        kept = [c._cache for c in live if c._cache is not None]
        most[0] = max(most[0], sum(4 * k.numel() for k in kept))

    small = toy.reopen(cosine, train_data=cosine.train_data, memory=memory)
    with mock.patch.object(Contributions, "__init__", noted):
        got = small.learn_weights(method=method, examples=FEW, seed=3)
    want = cosine.learn_weights(method=method, examples=FEW, seed=3)
    torch.testing.assert_close(got.values, want.values, rtol=1e-5, atol=1e-5)
    assert got.provenance["strength"] == want.provenance["strength"]
    assert most[0] <= memory
    assert (most[0] == 0) == (memory == 800_000)


def test_an_index_that_was_opened_without(index):
    data = index.train_data
    for given, words in (
        ({}, "model, task, train_data: pass model=, task=, train_data= to Index.open"),
        ({"model": index.model, "task": index.task}, "its train_data: pass train_data= to Index.open"),
        ({"model": index.model, "train_data": data}, "its task: pass task= to Index.open"),
        ({"task": index.task, "train_data": data}, "its model: pass model= to Index.open"),
    ):
        with pytest.raises(UndeError, match=f"opened without .*{words}"):
            Index.open(index.folder, **given).learn_weights()


def cropped(example, strength, random):
    return example[0][:-1], example[1]


def unlabelled(example, strength, random):
    return example[0]


def as_double(example, strength, random):
    return example[0].double(), example[1]


@pytest.mark.parametrize(
    ("perturb", "words"),
    [
        (cropped, r"cropped made .*float32 \(4,\).* of example 0, which is .*float32 \(5,\)"),
        (unlabelled, r"unlabelled made float32 \(5,\) of example 0.*expected the same structure"),
        (as_double, r"as_double made .*float64 \(5,\)"),
        (lambda e, s, r: (e[0] + torch.randn(5), e[1]), "<lambda> gives another copy of example 0 when called again"),
        (3, r"perturb is 3: expected a function \(example, strength, random\) -> example, 'weights', or None"),
        ("wights", r"perturb is 'wights': expected a function"),
    ],
)  # fmt: skip
def test_bad_perturbations(index, perturb, words):
    with pytest.raises(UndeError, match=words):
        index.learn_weights(perturb=perturb)


def test_a_perturbation_that_changes_the_model(tmp_path):
    index = made(tmp_path / "i", 130)

    def meddling(example, strength, random):
        with torch.no_grad():
            index.model[0].bias.add_(1e-3)
        return example

    with pytest.raises(UndeError, match=r"perturb= changed the model's weights: it may change examples only"):
        index.learn_weights(perturb=meddling)


def test_a_perturbation_that_changes_the_training_data(tmp_path):
    """In place: the data of the user would no longer be what was indexed."""
    x, y = labelled(130)
    index = made(tmp_path / "i", train_data=(x, y))
    before = x.clone()

    def in_place(example, strength, random):
        example[0].mul_(1 + strength)
        return example

    with pytest.raises(UndeError, match=r"in_place changes example 0 itself: .*return a new one"):
        index.learn_weights(perturb=in_place)
    assert torch.equal(x, before)

    def in_an_array(example, strength, random):
        example[0][:] = random.random(5)
        return example

    arrays = toy.reopen(index, train_data=(x.numpy(), y))
    with pytest.raises(UndeError, match="in_an_array changes example 0 itself"):
        arrays.learn_weights(perturb=in_an_array)


def test_too_little_data(tmp_path):
    index = made(tmp_path / "i", 72)
    words = "72 different training examples are too few"
    with pytest.raises(UndeError, match=rf"{words} .* at least 73\. Stay with the"):
        index.learn_weights()
    repeated = tuple(c.repeat(2, *[1] * (c.dim() - 1)) for c in labelled(72))
    twice = made(tmp_path / "twice", train_data=repeated)
    with pytest.raises(UndeError, match=words):
        twice.learn_weights()
    for options, said in (
        ({"examples": 5}, "examples is 5: expected at least 20"),
        ({"seed": -1}, "seed is -1: expected a whole number, 0 or larger"),
    ):
        with pytest.raises(UndeError, match=said):
            index.learn_weights(**options)


class Fragile(Classification):
    """Of inputs beyond the training data the loss is NaN."""

    def loss(self, model, batch):
        beyond = batch[0].abs().amax(1) > 6
        return super().loss(model, batch) * torch.where(beyond, torch.nan, 1.0)


def far(example, strength, random):
    return example[0] + 20 * (random.random() < 0.1), example[1]


def test_copies_whose_loss_is_not_a_number(tmp_path):
    index = made(tmp_path / "i", 400, task=Fragile())
    words = r"the copy of training example \d+ at strength 0\.05 \(far\) has a loss or gradient that is NaN"
    with pytest.raises(UndeError, match=words) as error:
        index.learn_weights(perturb=far)
    n = int(str(error.value).split("example ")[1].split()[0])
    assert np.random.default_rng([0, 1, n]).random() < 0.1  # it is the right one
    assert "gentler perturb=" in str(error.value)
    words = r"at strength 0\.05 \(<lambda>\) has a loss or gradient that is NaN or infinite"
    with pytest.raises(UndeError, match=words):
        index.learn_weights(perturb=lambda example, strength, random: (example[0] + 20, example[1]))


class Odd(Classification):
    def __init__(self, kinds):
        self._aside = kinds

    def perturbations(self, model, examples):
        return self._aside


@pytest.mark.parametrize("kinds", [[], [InputNoise(), InputNoise("more"), InputNoise("most")]])
def test_a_task_knows_one_perturbation_or_two(tmp_path, kinds):
    index = made(tmp_path / "i", 130, task=Odd(kinds))
    words = rf"Odd\.perturbations gave {len(kinds)} kinds of perturbation: expected one or two"
    with pytest.raises(UndeError, match=words):
        index.learn_weights()


def test_inputs_that_nobody_knows_how_to_perturb(tmp_path):
    ids = torch.randint(19, (130, 5), generator=torch.Generator().manual_seed(0))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = models.TokenClassifier(models.Recurrent(nn.LSTM), out=3).eval()
    index = made(tmp_path / "i", model=model, train_data=(ids, ids[:, 0] % 3), method="tracin")
    with pytest.raises(UndeError, match=r"it has no floating inputs.*perturb='weights'"):
        index.learn_weights(examples=FEW)
    sane(index.learn_weights(perturb="weights", examples=FEW), index)
    with pytest.raises(UndeError, match="it has no floating inputs"):
        index.learn_weights(perturb=InputNoise())


def test_forms():
    assert structure({"x": np.zeros(2), "y": [1, 2]}) == {"x": "float64 (2,)", "y": "list of 2"}
    assert structure((torch.zeros(2), 1)) == ("float32 (2,)", "int")
    assert structure([torch.zeros(2)]) != structure((torch.zeros(2),))
