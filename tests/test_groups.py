import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from unde.errors import UndeError
from unde.groups import Groups, trainable


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))
        self.embed = nn.Embedding(4, 2)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)) for _ in range(2))
        self.head = nn.Linear(2, 4, bias=False)


BLOCKS = [f"blocks.{i}.{j}.{kind}" for i in range(2) for j in range(2) for kind in ("weight", "bias")]
NAMES = ["scale", "embed.weight", *BLOCKS, "head.weight"]


def test_trainable():
    model = Small()
    assert trainable(model) == NAMES
    model.embed.requires_grad_(False)
    assert trainable(model) == [n for n in NAMES if n != "embed.weight"]
    left = ["scale", "blocks.1.0.weight", "blocks.1.1.weight", "head.weight"]
    assert trainable(model, [r"^blocks\.0", r"bias$"]) == left
    model = Small()
    model.head.weight = model.embed.weight
    assert trainable(model) == NAMES[:-1]


@pytest.mark.parametrize(
    ("exclude", "message"),
    [
        (["nothing"], r"'nothing' matches no trainable parameter: 'scale', 'embed\.weight'.* and 5 more"),
        ([""], "leaves no trainable parameter"),
        (["("], r"'\(' is not a regular expression"),
        ("embed", r"string 'embed': write \['embed'\]"),
    ],
)
def test_bad_exclude(exclude, message):
    for make in (trainable, lambda m, e: Groups.by_layer(m, exclude=e)):
        with pytest.raises(UndeError, match=message):
            make(Small(), exclude)


def test_no_trainable_parameter():
    model = Small().requires_grad_(False)
    for make in (trainable, Groups.by_tensor, Groups.by_layer, lambda m: Groups.consecutive(m, 1)):
        with pytest.raises(UndeError, match="no trainable parameter: every requires_grad is False"):
            make(model)
    with pytest.raises(UndeError, match="no trainable parameter"):
        trainable(nn.Identity())


def test_by_tensor_and_by_layer():
    groups = Groups.by_tensor(Small())
    assert groups.members == {n: (n,) for n in NAMES}
    assert groups.names == groups.parameters == tuple(NAMES)
    assert len(groups) == 11
    layers = [f"blocks.{i}.{j}" for i in range(2) for j in range(2)]
    blocks = {layer: (f"{layer}.weight", f"{layer}.bias") for layer in layers}
    groups = Groups.by_layer(Small(), exclude=["embed"])
    assert groups.members == {"scale": ("scale",), **blocks, "head": ("head.weight",)}


def test_a_bare_layer_is_one_group():
    assert Groups.by_layer(nn.Linear(2, 3)).members == {"Linear": ("weight", "bias")}
    only_scale = Groups.by_layer(Small(), exclude=["embed", "blocks", "head"])
    assert only_scale.names == ("scale",)


def test_by_layer_keeps_a_module_and_its_children_apart():
    class Holder(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Module()
            self.inner.gain = nn.Parameter(torch.ones(1))
            self.inner.fc = nn.Linear(1, 1, bias=False)

    assert Groups.by_layer(Holder()).members == {"inner": ("inner.gain",), "inner.fc": ("inner.fc.weight",)}


def test_consecutive():
    groups = Groups.consecutive(Small(), 3)
    assert groups.names == ("0:scale", "1:blocks.0.1.weight", "2:blocks.1.0.bias")
    assert groups.parameters == tuple(NAMES)
    assert [len(m) for m in groups.members.values()] == [4, 3, 4]


class Many(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.p = nn.ParameterList(nn.Parameter(torch.zeros(1)) for _ in range(n))


@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 150), data=st.data())
def test_consecutive_groups_are_balanced_runs(n, data):
    count = data.draw(st.integers(1, n))
    groups = Groups.consecutive(Many(n), count)
    assert groups.parameters == tuple(f"p.{i}" for i in range(n))
    sizes = [len(m) for m in groups.members.values()]
    assert len(sizes) == count
    assert max(sizes) - min(sizes) <= 1
    assert list(groups.names) == sorted(groups.names, key=lambda name: int(name.split(":")[0]))
    assert all(name.split(":")[1] == m[0] for name, m in groups.members.items())
    assert len({len(name.split(":")[0]) for name in groups.names}) == 1


@pytest.mark.parametrize("count", [0, -1, 12, 10**6])
def test_consecutive_errors(count):
    with pytest.raises(UndeError, match=f"cannot form {count} consecutive groups: expected 1 to 11"):
        Groups.consecutive(Small(), count)


def test_by_pattern():
    patterns = {
        "biases": r"bias$",
        "block 0": r"^blocks\.0.*weight$",
        "block 1": r"^blocks\.1.*weight$",
        "rest": r"^(scale|embed)",
    }
    groups = Groups.by_pattern(Small(), patterns, exclude=["head"])
    assert groups.members == {
        "biases": ("blocks.0.0.bias", "blocks.0.1.bias", "blocks.1.0.bias", "blocks.1.1.bias"),
        "block 0": ("blocks.0.0.weight", "blocks.0.1.weight"),
        "block 1": ("blocks.1.0.weight", "blocks.1.1.weight"),
        "rest": ("scale", "embed.weight"),
    }


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        ({"w": "weight"}, r"5 parameters match no pattern: 'scale', 'blocks\.0\.0\.bias'.*exclude"),
        ({"all": ".", "none": "never"}, "group 'none' has no parameter"),
        ({"all": "["}, r"'\[' is not a regular expression"),
        ({}, "11 parameters match no pattern"),
        # an overlap: the parameter and both patterns
        (
            {"a": "weight", "b": "embed", "c": "scale|bias"},
            r"'embed\.weight' matches the patterns of \['a', 'b'\]",
        ),
    ],
)
def test_by_pattern_errors(patterns, message):
    with pytest.raises(UndeError, match=message):
        Groups.by_pattern(Small(), patterns)


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"a": ("x", "y"), "b": ("y",)}, "parameter 'y' is in groups 'a' and 'b'"),
        ({"a": ("x", "x")}, "parameter 'x' is in groups 'a' and 'a'"),
        ({"a": ("x",), "b": ()}, "group 'b' has no parameter"),
    ],
)
def test_a_partition_has_no_overlap_and_no_empty_group(members, message):
    with pytest.raises(UndeError, match=message):
        Groups(members)


def test_of():
    groups = Groups({"late": ("c", "a"), "early": ("b",)})
    assert groups.of(["a", "b", "c"]) == [0, 1, 0]
    assert groups.of(["b", "c", "a"]) == [1, 0, 0]


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        (["a", "b", "c", "d"], "leave out 'd'.*exclude"),
        (["a", "b"], "name unknown 'c'"),
        (["a", "b", "d"], "leave out 'd' and name unknown 'c'"),
    ],
)
def test_of_checks_the_partition(parameters, message):
    with pytest.raises(UndeError, match=f"do not fit the {len(parameters)} attributed.*{message}"):
        Groups({"late": ("c", "a"), "early": ("b",)}).of(parameters)


def test_every_constructor_partitions_what_is_trainable():
    model = Small()
    model.blocks[0].requires_grad_(False)
    patterns = {"all": "."}
    consecutive, by_pattern = Groups.consecutive(model, 5), Groups.by_pattern(model, patterns)
    for groups in (Groups.by_tensor(model), Groups.by_layer(model), consecutive, by_pattern):
        numbers = groups.of(trainable(model))
        assert set(numbers) == set(range(len(groups)))
        with pytest.raises(UndeError, match="leave out 'blocks"):
            groups.of(trainable(Small()))


def test_parse():
    model = Small()
    ready = Groups.by_layer(model)
    assert Groups.parse(ready, model) is ready
    assert Groups.parse("tensor", model) == Groups.by_tensor(model)
    assert Groups.parse("layer", model, ["head"]) == Groups.by_layer(model, exclude=["head"])
    assert Groups.parse("consecutive(4)", model, ["head"]) == Groups.consecutive(model, 4, exclude=["head"])
    patterns = {"biases": "bias$", "rest": "weight$|scale"}
    assert Groups.parse(patterns, model) == Groups.by_pattern(model, patterns)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("layers", r"unknown groups 'layers'.*Did you mean 'layer'\?"),
        ("tensors", r"Did you mean 'tensor'\?"),
        ("consecutive", r"Did you mean 'consecutive\(128\)'\?"),
        ("consecutive(x)", r"Did you mean 'consecutive\(128\)'\?"),
        ("zzz", "expected one of 'tensor', 'layer', .*128\\)'$"),
    ],
)
def test_parse_errors(text, message):
    with pytest.raises(UndeError, match=message):
        Groups.parse(text, Small())
