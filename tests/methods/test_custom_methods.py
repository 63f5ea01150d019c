"""Methods of a user's own: built, scored, learned with, opened again, sent to others; or refused in a sentence."""

import importlib
import json
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from sharp_methods import Margins, Sharp, Softer, Unhashable
from torch.func import functional_call

import toy
import unde
from unde import Index, UndeError, methods
from unde.kernels import Gram
from unde.methods import TRAK, Method

PAGE = Path(__file__).parent.parent.parent / "docs" / "own-methods.md"
QUERIES = toy.data(4, seed=1)


def gradients(model, data):
    """(n, D), of the margin, one example at a time."""
    params = {k: v.detach() for k, v in model.named_parameters()}

    def margin(p, x, y):
        logits = functional_call(model, p, (x[None],))[0]
        rest = torch.cat([logits[:y], logits[y + 1 :]])
        return logits[y] - rest.logsumexp(0)

    rows = []
    for x, y in zip(*data):
        found = torch.func.grad(margin)(params, x, int(y))
        rows.append(torch.cat([g.flatten() for g in found.values()]))
    return torch.stack(rows).double()


def oracle(model, weights=None, n=22):
    q, g = gradients(model, QUERIES), gradients(model, toy.data(n))
    k = torch.linalg.inv(g.T @ g / n + 0.5 * torch.eye(g.shape[1], dtype=torch.float64))
    w = torch.ones(q.shape[1]) if weights is None else weights
    return 2.0 * (q * w @ k @ g.T).tanh()


def built(folder, **options):
    return toy.build(folder, task=Margins(), method=Sharp(projection="none"), **options)


def test_an_own_kernel_final_and_measure_against_autograd(tmp_path):
    index = built(tmp_path / "i")
    scores = index.score(QUERIES)
    torch.testing.assert_close(scores.total().double(), oracle(index.model), rtol=1e-4, atol=1e-5)
    sizes = [sum(p.numel() for p in layer.parameters()) for layer in index.model if list(layer.parameters())]
    w = torch.cat([torch.full((size,), value) for size, value in zip(sizes, (0.2, 1.8))])
    total = scores.total([0.2, 1.8]).double()
    torch.testing.assert_close(total, oracle(index.model, w), rtol=1e-4, atol=1e-5)
    own = index.self_influence()
    whole = index.score(toy.data(22)).total()
    torch.testing.assert_close(own, whole.diagonal(), rtol=1e-4, atol=1e-5)
    learned = unde.learn_weights(scores, k=3, weight_decay=1.0, epochs=2)
    assert learned.groups == scores.groups and learned.provenance["method"] == "sharp"


def test_it_is_the_same_after_opening(tmp_path):
    index = built(tmp_path / "i")
    again = Index.open(tmp_path / "i", model=toy.net(), task=Margins())
    assert again.method == Sharp(projection="none") and type(again.method) is Sharp
    assert torch.equal(again.score(QUERIES).total(), index.score(QUERIES).total())
    described = json.loads((tmp_path / "i" / "manifest.json").read_text())["method"]
    assert described["custom"]["class"] == "sharp_methods:Sharp" and described["name"] == "sharp"
    built(tmp_path / "i")  # goes on with it
    with pytest.raises(UndeError, match=r"already holds another index. What differs: method"):
        toy.build(tmp_path / "i", task=Margins(), method=Sharp(projection="none", scale=3.0))
    assert again.verify()


def test_a_subclass_is_not_its_parent_and_if_unknown_others_score(tmp_path, monkeypatch):
    index = toy.build(tmp_path / "i", method=Softer(projection="none"))
    assert Index.open(tmp_path / "i").method == Softer(projection="none", fisher="empirical")
    trak = toy.build(tmp_path / "j", method=TRAK(projection="none", damping=3.0))
    want = trak.score(QUERIES).total()
    assert torch.equal(index.score(QUERIES).total(), want)
    assert torch.equal(trak.score(QUERIES, method=Softer()).total(), want)
    assert not torch.equal(trak.score(QUERIES, method="tracin").total(), want)
    want = index.score(QUERIES, method="tracin").total()
    monkeypatch.delitem(sys.modules, "sharp_methods")
    again = Index.open(tmp_path / "i", model=toy.net(), task=unde.tasks.Classification())
    assert torch.equal(again.score(QUERIES, method="tracin").total(), want)


def test_what_is_not_imported_is_named_and_not_run(tmp_path, monkeypatch):
    built(tmp_path / "i")
    said = "`from sharp_methods import Sharp` before this, or name another method"
    with monkeypatch.context() as patch:
        patch.delitem(sys.modules, "sharp_methods")
        index = Index.open(tmp_path / "i")
        assert "sharp_methods" not in sys.modules and "(not imported)" in repr(index)
        assert index.verify() and index.method.measure == "margin"
        index = Index.open(tmp_path / "i", model=toy.net(), task=Margins())
        with pytest.raises(UndeError, match=said):
            index.score(QUERIES).total()
        with pytest.raises(UndeError, match="differentiates 'loss'"):
            index.score(QUERIES, method="tracin")
    other = Index.open(tmp_path / "i", model=toy.net(), task=Margins())
    torch.testing.assert_close(other.score(QUERIES).total().double(), oracle(toy.net()), rtol=1e-4, atol=1e-5)
    monkeypatch.setattr(Sharp, "measure", "loss")
    with pytest.raises(UndeError, match=r"sharp_methods:Sharp is not what it was .* 'margin'.* now .*'loss'"):
        Index.open(tmp_path / "i")


def test_files_of_a_kernel_are_those_of_its_version(tmp_path, monkeypatch):
    index = built(tmp_path / "i")
    first = index.score(QUERIES).total()
    import sharp_methods

    def apply(self, rows):
        return (2 * rows.double() @ self.inverse).to(rows.dtype)

    monkeypatch.setattr(sharp_methods.Made, "apply", apply)
    monkeypatch.setattr(sharp_methods.Whitened, "version", 2, raising=False)
    again = Index.open(tmp_path / "i", model=toy.net(), task=Margins()).score(QUERIES).total()
    want = 2 * (2 * (first.double() / 2).atanh()).tanh()
    torch.testing.assert_close(again.double(), want, rtol=1e-3, atol=1e-3)


def test_with_workers_it_is_the_same(tmp_path):
    one = built(tmp_path / "i", threads=1)
    with built(tmp_path / "j", executor="processes:2", threads=1, recipe="sharp_methods:make") as many:
        assert torch.equal(many.score(QUERIES).total(), one.score(QUERIES).total())
        assert torch.equal(many.score(QUERIES).top(5).values, one.score(QUERIES).top(5).values)


@dataclass(frozen=True)
class Held(Method):
    """A field that no file can hold."""

    tensor: object = None


@dataclass(frozen=True)
class Forgetful(Method):
    """A setting that is no field."""

    projection: str | None = None
    seen: list = field(default_factory=list, compare=True)


class Handmade(Method):
    def __init__(self):
        object.__setattr__(self, "projection", None)


@dataclass(frozen=True)
class NoKernel(Method):
    @property
    def kernel(self):
        return "gram"


def test_what_an_index_could_not_hold_is_refused(tmp_path):
    @dataclass(frozen=True)
    class Local(Method):
        pass

    cases = {
        "Local is defined inside a function, so that an index could not name it: define": Local(),
        "tensor of the method Held is a Tensor: expected numbers and names": Held(tensor=torch.ones(2)),
        "seen of the method Forgetful is a list": Forgetful(),
        "Handmade cannot be given a projection .* @dataclass": Handmade(),
        "kernel of the method NoKernel is a str without bind and fisher": NoKernel(),
        "kernel of the method Unhashable is a list": Unhashable(),
    }
    index = toy.build(tmp_path / "i")
    for said, method in cases.items():
        with pytest.raises(UndeError, match=said):
            toy.build(tmp_path / "j", method=method)
        assert not (tmp_path / "j").exists()
        with pytest.raises(UndeError, match=said):
            index.score(QUERIES, method=method)


def test_what_cannot_be_sent_is_refused(monkeypatch):
    from unde.methods.registry import check_picklable

    check_picklable(Sharp())
    monkeypatch.setattr(Sharp, "__module__", "__main__")
    said = "Sharp cannot be sent to other processes .Sharp is defined in the script"
    with pytest.raises(UndeError, match=said):
        check_picklable(Sharp())
    with pytest.raises(UndeError, match=r"Held cannot be sent to other processes .*pickle"):
        check_picklable(Held(tensor=lambda: 0))


OWN = {"measure": "loss", "extra_measures": [], "steps": 1}
WRONG = ({"class": "os"}, {"measure": 3}, {"extra_measures": [1]}, {"steps": 10**9})


@pytest.mark.parametrize("own", [None, {}, *({"class": "os:system"} | OWN | wrong for wrong in WRONG)])
def test_descriptions_that_no_method_wrote(own):
    with pytest.raises(UndeError, match=r"unknown method|not described as methods are"):
        methods.parse({"name": "x", "projection": "none", "custom": own})


def test_names_and_descriptions_make_methods_only():
    assert methods.parse("sharp_methods:Sharp") == Sharp()
    with pytest.raises(UndeError, match=r"sharp_methods:make is a function: expected an unde.methods.Method"):
        methods.parse("sharp_methods:make")
    with pytest.raises(UndeError, match="no module 'nowhere'"):
        methods.parse("nowhere:Sharp")
    assert Softer().kernel == Gram(3.0)
    own = OWN | {"class": "subprocess:Popen"}
    found = methods.parse({"name": "x", "projection": "none", "args": "ls", "custom": own})
    assert repr(found) == "subprocess:Popen (not imported)"
    with pytest.raises(UndeError, match="before this"):
        _ = found.kernel


def test_the_page_runs_as_printed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    blocks = re.findall(r"(?:<!-- file: (.*?) -->\n)?```python\n(.*?)```", PAGE.read_text(), re.S)
    names: dict = {"__name__": "page"}
    for file, code in blocks:
        if file:
            Path(file).write_text(code)
        else:
            exec(compile(code, str(PAGE), "exec"), names)
    mine = importlib.import_module("my_methods")
    try:
        index, (x, y) = names["index"], names["ask"]
        phi = toy.stored(index).rows(torch.arange(len(index)))[0].double()
        asked = index.features(names["ask"]).features[0].double()
        mean = phi.square().mean(0)
        k = 1 / (mean + 0.5 * mean.mean())
        total = index.score((x, y)).total().double()
        torch.testing.assert_close(total, asked * k @ phi.T, rtol=1e-4, atol=1e-4 * float(total.abs().max()))
        gram = phi.T @ phi
        unit = gram.diagonal().mean() * torch.eye(len(gram), dtype=torch.float64)
        inverse = torch.linalg.inv(gram + 0.1 * unit)
        leverage = (phi @ inverse * phi).sum(1)
        relative = index.score((x, y), method=mine.Relative()).total().double()
        torch.testing.assert_close(relative, asked @ inverse @ phi.T / leverage.sqrt(), rtol=1e-3, atol=1e-4)
    finally:
        del sys.modules["my_methods"]
