"""Where the examples are in a layer's input, how often and how a layer is called: features stay right."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from cases import Waves, randomized
from oracles import assert_features, check, plan, slow_gradients, ways
from unde.data import Rows
from unde.gradients import Collector


class Net(nn.Module):
    """Modules by name, and a forward given as a function of (modules, input)."""

    def __init__(self, run, **parts):
        super().__init__()
        self.run = run
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x):
        return self.run(self, x)


def floats(*shape):
    return lambda n: torch.randn(n, *shape, dtype=torch.float64)


def ids(count, *shape):
    return lambda n: torch.randint(count, (n, *shape))


def folded(layer, shape, data=floats):
    """(B, n, ...) through the layer as (B·n, ...)."""
    return lambda: Net(lambda s, x: s.a(x.flatten(0, 1)).unflatten(0, x.shape[:2]), a=layer()), data(
        4, *shape
    )


def in_place(first):
    return lambda: Net(lambda s, x: s.b(F.relu_(s.a(x))), a=first, b=nn.Linear(6, 5))


def tied_pair(s, x):
    return s.b(s.a(x).tanh()) + s.head(s.embed(x.argmax(-1)))


def build_tied_pair():
    net = Net(tied_pair, a=nn.Linear(6, 6), b=nn.Linear(6, 6), embed=nn.Embedding(6, 6), head=nn.Linear(6, 6))
    net.b.weight, net.head.weight = net.a.weight, net.embed.weight
    return net


def lengths(s, x):
    """One layer, called on tensors of different lengths and numbers of axes."""
    return s.a(x)[:, :4] + s.a(x[:, :4].tanh()) + s.a(x.mean(1)).unsqueeze(1)


def part_without_gradient(s, x):
    with torch.no_grad():
        mask = (s.a(x) > 0).to(x.dtype)
    return s.a(x).tanh() * mask + s.a(x).detach()


def recomputed(s, x):
    h = s.a(x).tanh()
    h = checkpoint(lambda h: s.norm(s.b(h).tanh()), h, use_reentrant=False)
    return checkpoint(s.c, h, use_reentrant=False)


def recomputed_from_the_input(s, x):
    return checkpoint(lambda x: s.b(s.a(x).tanh()), x, use_reentrant=False)


# name: (model, data)
HOOKED = {
    "folded-linear": folded(lambda: nn.Linear(6, 7), (6,)),
    "folded-linear-3d": folded(lambda: nn.Linear(6, 7), (3, 6)),
    "folded-layer-norm": folded(lambda: nn.LayerNorm(6), (3, 6)),
    "folded-group-norm": folded(lambda: nn.GroupNorm(2, 6), (6, 3)),
    "folded-batch-norm": folded(lambda: nn.BatchNorm1d(6), (6, 3)),
    "folded-conv": folded(lambda: nn.Conv2d(2, 6, 2, padding=1), (2, 3, 3)),
    "folded-conv-groups": folded(lambda: nn.Conv1d(6, 6, 3, groups=2), (6, 5)),
    "folded-embedding": folded(lambda: nn.Embedding(8, 5), (3,), partial(ids, 8)),
    # As many steps as examples are tried, or a multiple: the shape alone does not tell the axes apart.
    **{
        f"time-first-{steps}": (
            lambda: Net(
                lambda s, x: s.b(s.norm(s.a(x.transpose(0, 1)))).transpose(0, 1),
                a=nn.Linear(6, 7),
                norm=nn.LayerNorm(7),
                b=nn.Linear(7, 5, bias=False),
            ),
            floats(steps, 6),
        )
        for steps in (2, 3, 6)
    },
    **{
        f"positions-{axes}d-{steps}": (
            lambda axes=axes: Net(
                lambda s, x: x + s.b(s.a(torch.arange(x.shape[1]).view([1] * (axes - 1) + [-1]))),
                a=nn.Embedding(9, 6),
                b=nn.Linear(6, 6),
            ),
            floats(steps, 6),
        )
        for axes in (1, 2)
        for steps in (3, 5, 6)
    },
    "several-lengths": (lambda: Net(lengths, a=nn.Linear(6, 7)), floats(6, 6)),
    "same-output-used-twice": (
        lambda: Net(lambda s, x: (h := s.a(x)) * h.tanh() + h, a=nn.Linear(6, 7)),
        floats(6),
    ),
    "tied-pair": (build_tied_pair, floats(6)),
    "in-place-relu-after-linear": (in_place(nn.Linear(6, 6)), floats(6)),
    "in-place-relu-after-linear-3d": (in_place(nn.Linear(6, 6)), floats(3, 6)),
    "in-place-relu-after-conv": (in_place(nn.Conv1d(2, 5, 2)), floats(2, 7)),
    "in-place-relu-after-norm": (in_place(nn.BatchNorm1d(6)), floats(6)),
    **{
        f"in-place-relu-behind-{name}": (
            lambda b=b: Net(
                lambda s, x: s.c(F.relu_(s.b(s.a(x).tanh()))), a=nn.Linear(6, 6), b=b, c=nn.Linear(6, 5)
            ),
            floats(3, 6),
        )
        for name, b in (
            ("linear-3d", nn.Linear(6, 6)),
            ("conv", nn.Conv1d(3, 3, 1)),
            ("norm", nn.LayerNorm(6)),
        )
    },
    "in-place-add-to-output": (
        lambda: Net(lambda s, x: s.b(s.a(x).add_(1).mul_(2).tanh_()), a=nn.Linear(6, 6), b=nn.Linear(6, 5)),
        floats(6),
    ),
    "keyword-argument": (
        lambda: Net(
            lambda s, x: s.b(input=s.norm(input=s.a(input=x))),
            a=nn.Conv1d(2, 5, 2),
            norm=nn.LayerNorm(6),
            b=nn.Linear(6, 5),
        ),
        floats(2, 7),
    ),
    "part-without-gradient": (lambda: Net(part_without_gradient, a=nn.Linear(6, 7)), floats(6)),
    "checkpointed": (
        lambda: Net(
            recomputed, a=nn.Linear(6, 7), b=nn.Linear(7, 7), norm=nn.LayerNorm(7), c=nn.Linear(7, 5)
        ),
        floats(6),
    ),
    "checkpointed-from-the-input": (
        lambda: Net(recomputed_from_the_input, a=nn.Linear(6, 7), b=nn.Linear(7, 5)),
        floats(6),
    ),
}
# Where the examples of hooked modules are; of all others in front.
LAYOUTS = {
    "time-first": {"second"},
    "positions": ["shared", "front"],  # what the second layer gets has an axis of examples already
}


def example_last(s, x):
    return s.a(x.transpose(0, 1).flatten(0, 1)).unflatten(0, (x.shape[1], -1)).transpose(0, 1)


def called_and_read(s, x):
    return s.a(x) + F.linear(x.tanh(), s.a.weight)


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def weight_normed():
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(6, 7))
    return Net(lambda s, x: s.b(s.a(x)), a=normed, b=nn.Linear(7, 5))


def low_rank():
    net = Net(lambda s, x: s.a(x) + x @ s.down.T @ s.up.T, a=nn.Linear(6, 7))
    net.down, net.up = nn.Parameter(torch.zeros(2, 6)), nn.Parameter(torch.zeros(7, 2))
    return net


def generated_weight():
    """A layer on one vector for the whole batch, whose output must keep its shape."""
    net = Net(lambda s, x: s.b(x @ s.a(s.latent).view(6, 4)), a=nn.Linear(5, 24), b=nn.Linear(4, 3))
    net.register_buffer("latent", torch.linspace(-1, 1, 5).view(1, 5))
    return net


def positions_cut_to_length():
    """Read as positions[:T]: on one copy for each example, this would cut the examples."""
    net = Net(lambda s, x: s.a(x + s.positions[: x.shape[1]]), a=nn.Linear(6, 7))
    net.positions = nn.Parameter(torch.zeros(4, 6))
    return net


# What the rules cannot do, the general ways do: nothing is dropped and nothing is wrong.
GENERAL = {
    "folded-the-other-way": (lambda: Net(example_last, a=nn.Linear(6, 7)), floats(4, 6), {"a.weight"}),
    "called-on-two-layouts": (
        lambda: Net(lambda s, x: s.a(x) + s.a(x.transpose(0, 1)).transpose(0, 1).tanh(), a=nn.Linear(6, 7)),
        floats(4, 6),
        {"a.weight"},
    ),
    "called-and-read": (lambda: Net(called_and_read, a=nn.Linear(6, 7)), floats(6), {"a.weight"}),
    "only-read": (
        lambda: Net(lambda s, x: F.linear(x, s.a.weight, s.a.bias), a=nn.Linear(6, 7)),
        floats(6),
        {"a.weight", "a.bias"},
    ),
    "weight-norm": (
        weight_normed,
        floats(6),
        {"a.parametrizations.weight.original0", "a.parametrizations.weight.original1"},
    ),
    "generated-weight": (generated_weight, floats(6), {"a.weight", "a.bias"}),
    "low-rank": (low_rank, floats(6), {"down", "up"}),
    "embedding-by-frequency": (
        lambda: Net(lambda s, x: s.a(x), a=nn.Embedding(6, 5, scale_grad_by_freq=True)),
        ids(6, 4),
        {"a.weight"},
    ),
    "transposed-conv": (
        lambda: Net(lambda s, x: s.a(x), a=nn.ConvTranspose1d(2, 3, 2)),
        floats(2, 5),
        {"a.weight", "a.bias"},
    ),
    "bilinear": (
        lambda: Net(lambda s, x: s.a(x, x.tanh()), a=nn.Bilinear(6, 6, 3)),
        floats(6),
        {"a.weight", "a.bias"},
    ),
}


PROJECTIONS = ["none", "kron(2)", "sjlt(5)"]


def check_network(build, data, projection):
    torch.manual_seed(1)
    model = randomized(build()).double().eval()
    return check(model, Waves(), Rows((data(8),)), projection, batch_size=7)


@pytest.mark.parametrize("projection", PROJECTIONS)
@pytest.mark.parametrize("name", HOOKED)
def test_hooked(name, projection):
    found, coverage = check_network(*HOOKED[name], projection)
    assert set(found.values()) == {"hook"}
    expected = next((layout for kind, layout in LAYOUTS.items() if name.startswith(kind)), {"front"})
    layouts = [use.layout for use in coverage.modules]
    assert (set(layouts) if isinstance(expected, set) else layouts) == expected


@pytest.mark.parametrize("projection", PROJECTIONS)
@pytest.mark.parametrize("name", GENERAL)
def test_general(name, projection):
    build, data, general = GENERAL[name]
    found, _ = check_network(build, data, projection)
    assert {n for n, way in found.items() if way in ("expanded", "vmap", "loop")} >= general
    assert "unused" not in found.values()


@pytest.mark.parametrize("projection", PROJECTIONS)
@pytest.mark.parametrize(
    ("build", "data"),
    [
        (lambda: Net(lambda s, x: s.a(x).tanh(), a=Doubled(6, 7)), floats(6)),
        (positions_cut_to_length, floats(4, 6)),
    ],
    ids=["subclass-with-its-own-forward", "positions-cut-to-length"],
)
def test_seen_through(build, data, projection):
    """What differs from the plain layer is elementwise, or a cut: no example needs a pass of its own."""
    found, _ = check_network(build, data, projection)
    assert not {"expanded", "vmap", "loop", "unused"} & set(found.values())


def test_a_module_that_cannot_be_hooked_leaves_the_others_hooked():
    model = Net(lambda s, x: s.c(s.b(s.a(x), x)), a=nn.Linear(6, 6), b=nn.Bilinear(6, 6, 6), c=Other(6, 5))
    torch.manual_seed(0)
    rows = Rows((torch.randn(4, 6, dtype=torch.float64),))
    units, coverage = plan(model.double(), Waves(), rows)
    found = ways(units, coverage)
    assert found["a.weight"] == found["a.bias"] == found["c.bias"] == "hook"
    assert found["b.weight"] != "hook"
    assert found["c.weight"] != "hook"


class Other(nn.Linear):
    """Looks like a linear layer, but something else has been done to its weight."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.register_forward_pre_hook(lambda _m, args: (args[0] * self.weight.sum(),))


def test_one_position_for_all_examples():
    """A batch of sequences of length one, when longer ones were tried at the start."""
    model = Net(
        lambda s, x: (s.b(s.a(x) + s.pos(torch.arange(x.shape[1])))).mean(1),
        a=nn.Linear(6, 6),
        pos=nn.Embedding(9, 6),
        b=nn.Linear(6, 5),
    )
    torch.manual_seed(0)
    model = randomized(model).double()
    long, short = Rows((torch.randn(4, 5, 6).double(),)), Rows((torch.randn(4, 1, 6).double(),))
    units, coverage = plan(model, Waves(), long)
    with Collector(model, Waves(), units, coverage) as collector:
        features, _ = collector(short.batch(range(4)), list(range(4)))
    assert_features(features, slow_gradients(model, Waves(), short), units, 1e-10)


def test_layouts_that_are_guessed_right_take_no_pass_of_their_own():
    seen = []

    def run(s, x):
        seen.append(len(x))
        return s.b(s.a(x).tanh()) + s.table(torch.arange(4)[None])

    net = Net(run, a=nn.Linear(6, 6), b=nn.Linear(6, 6), table=nn.Embedding(4, 6)).double()
    rows = Rows((floats(4, 6)(9), torch.zeros(9)))
    units, coverage = plan(net, Waves(), rows)
    assert set(ways(units, coverage).values()) == {"hook"}
    assert seen[:3] == [1, 1, 3]  # two references, then all that were tried
    assert seen[3:] == [1, 3, 1, 2, 1, 3]  # examples that are alike: values, then gradients
    layouts = {use.name: use.layout for use in coverage.modules}
    assert layouts == {"a": "front", "b": "front", "table": "shared"}
