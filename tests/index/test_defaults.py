"""method="auto" and projection="auto": what is chosen by task, model and budgets, what is said and what is recorded."""

from collections import namedtuple

import pytest
import torch
from torch import nn

import toy
import unde
from unde import Index, UndeError
from unde.index import choice
from unde.index.choice import WHOLE_MOST, choose, free_bytes
from unde.index.labels import label_rankings
from unde.index.sizes import IndexSizes
from unde.methods import CHOICES, DAS, DTRAK, EKFAC, TRAK, JourneyTRAK, LoGRA, TracIn
from unde.plan import plan
from unde.store.factored import Factored
from unde.tasks import CausalLM, Classification

GB = 10**9


def wide(width: int = 100, layers: int = 2) -> nn.Module:
    """About 20,000 parameters, more than small models have."""
    sizes = [toy.FEATURES, *[width] * layers, toy.CLASSES]
    pairs = zip(sizes, sizes[1:])
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(*(m for a, b in pairs for m in (nn.Linear(a, b), nn.Tanh())))


def sizes(model: nn.Module, examples: int = 1000, task=None, **options) -> IndexSizes:
    names = [n for n, p in model.named_parameters() if p.requires_grad]
    return IndexSizes(model, task or Classification(), None, names, examples, **options)


def chosen(model, disk=20 * GB, method="auto", projection="auto", **options):
    return choose(method, projection, sizes(model, **options), disk).method


def meta(make):
    with torch.device("meta"):
        return make()


def bytes_of(model, projection, **options):
    return sizes(model, **options).files(EKFAC(projection)).total


class Mine(Classification):
    """A task of one's own."""


class OfDiffusion(Classification):
    """A task of the kind of diffusion models."""

    def identity(self):
        return {"name": "OfDiffusion", "settings": {"alphas": "", "timesteps": 3}}


@pytest.mark.parametrize(
    ("task", "kind"),
    [
        (CausalLM(), "language"),
        (Classification(), "classification"),
        (OfDiffusion(), "diffusion"),
        (Mine(), ""),
    ],
)
def test_methods_by_task(task, kind):
    assert chosen(wide(), task=task).name == CHOICES.get(kind, "ekfac")
    assert chosen(toy.net(), task=task) == TRAK("none").resolve(kind)


def test_diffusion_models_take_d_trak_with_any_features():
    assert chosen(wide(), task=OfDiffusion()).name == "d-trak"
    assert chosen(wide(), task=OfDiffusion(), projection="sjlt(64)").name == "d-trak"


def test_projections_that_ekfac_cannot_take_are_for_trak():
    assert chosen(wide(), projection="sjlt(64)").name == "trak"
    assert chosen(wide(), projection="kron(16)") == EKFAC("kron(16)").resolve("classification")
    weighed = choose("auto", "auto", sizes(wide()), GB, weighed=True).method
    assert (weighed.name, weighed.projection) == ("trak", "kron(16)")


def test_features_by_disk():
    """Every rung of the ladder, as the budget shrinks; a budget is enough for what it is the bytes of."""
    model = wide(400, 3)
    ladder = ["none", *(f"factored({c})" for c in (64, 32, 16, 8, 4, 2, 1)), "kron(32)", "kron(16)"]
    seen, disk = [], 40 * GB
    while True:
        try:
            method = chosen(model, disk, examples=10**5)
        except UndeError:
            break
        seen.append(method.projection)
        taken = bytes_of(model, method.projection, examples=10**5)
        assert taken <= disk and chosen(model, taken, examples=10**5).projection == seen[-1]
        disk = taken - 1
    assert [p for p in seen if p in ladder] == [p for p in ladder if p in seen]
    assert {*ladder} <= {*seen}


@pytest.mark.parametrize(
    "method", [EKFAC("none"), EKFAC("factored(2)"), EKFAC("kron(8)"), TracIn("none")], ids=str
)
def test_bytes_are_those_of_a_build(tmp_path, method):
    told = sizes(wide(), 22).files(method).total
    index = toy.build(tmp_path / "i", model=wide(), method=method, pass_size=22)
    toy.training(index, index.method)
    files = {
        p: p.stat().st_size for p in index.folder.rglob("*.safetensors") if not p.name.startswith("probe")
    }
    assert told == pytest.approx(sum(files.values()), rel=0.05)


def test_precisions_of_ones_own_leave_outer_products_out():
    whole = bytes_of(wide(), "none", store_dtype="int8")
    assert chosen(wide(), whole, store_dtype="int8").projection == "none"
    assert chosen(wide(), whole - 1, store_dtype="int8").projection.startswith("kron")


def test_memory_bounds_whole_gradients():
    model = wide(300)
    count = sum(p.numel() for p in model.parameters())
    assert chosen(model, method="tracin", memory=16 * count).projection == "none"
    tight = choose("tracin", "auto", sizes(model, memory=16 * count - 1), GB)
    assert tight.method.projection == "kron(64)"
    assert "(with memory='1.5MB': none)" in tight.words[0]


def test_large_models_are_not_kept_whole():
    def large():
        return nn.Sequential(*(nn.Linear(1000, 1000) for _ in range(WHOLE_MOST // 10**6 + 1)))

    model = meta(large)
    assert chosen(model, 10**15, memory=10**12).projection == "factored(64)"
    for name, p in list(model.named_parameters()):
        p.requires_grad_(name.startswith("0."))
    assert chosen(model, 10**15, memory=10**12).projection == "none"


def adapters(width: int, rank: int, layers: int) -> nn.Module:
    """LoRA on all linear layers of a Llama of this width, without what is frozen."""

    def layer() -> nn.ModuleDict:
        outputs = {
            "q": width,
            "k": width // 4,
            "v": width // 4,
            "o": width,
            "up": 7 * width // 2,
            "gate": 7 * width // 2,
        }
        pairs = {name: (width, out) for name, out in outputs.items()} | {"down": (7 * width // 2, width)}
        return nn.ModuleDict(
            {f"{name}_lora_A": nn.Linear(n, rank, bias=False) for name, (n, _) in pairs.items()}
            | {f"{name}_lora_B": nn.Linear(rank, m, bias=False) for name, (_, m) in pairs.items()}
        )

    return nn.Sequential(*(layer() for _ in range(layers)))


def test_adapters_are_not_projected():
    """LoRA of rank 16 on a model of 8 B parameters, in 2 GB of memory."""
    model = meta(lambda: adapters(4096, 16, 32))
    options = {"task": CausalLM(), "memory": 2 * GB}
    assert 4e7 < sizes(model).parameters < 5e7
    kinds = [chosen(model, examples=n, **options).projection for n in (100, 200, 1000, 5000)]
    assert kinds == ["none", "factored(64)", "factored(4)", "factored(1)"]
    with pytest.raises(
        UndeError, match=r"the smallest, 'factored\(1\)', take 2\d.* GB.*name a smaller projection"
    ):
        chosen(model, examples=10_000, **options)


def test_whitening_takes_rounds_where_memory_is_small():
    """The layers of GPT-2 small: covariances of all take more than 2 GB, those of one do not."""
    shapes = [(768, 2304), (768, 768), (768, 3072), (3072, 768)] * 12
    model = meta(lambda: nn.Sequential(nn.Embedding(50257, 768), *(nn.Linear(a, b) for a, b in shapes)))
    made = {gb: plan(model, CausalLM(), n_examples=1000, memory=f"{gb}GB") for gb in (2, 50)}
    assert {str(p.method["projection"]) for p in made.values()} == {"factored(64)"}
    assert made[50].sample_passes == 1 < made[2].sample_passes < 6


@pytest.mark.parametrize("method", [TRAK(), LoGRA(), DTRAK(), DAS(), JourneyTRAK()], ids=lambda m: m.name)
def test_methods_that_mix_parameters_project(method):
    assert chosen(wide(400), method=method).projection == "kron(16)"
    assert chosen(toy.net(), method=method).projection == "none"


def test_diffusion_models_project():
    assert chosen(wide(400), method="tracin", task=OfDiffusion()).projection == "kron(16)"


def test_a_projection_beside_a_method(tmp_path):
    index = toy.build(tmp_path / "i", method="tracin", projection="kron(2)")
    assert index.method == TracIn("kron(2)")
    assert toy.build(tmp_path / "i", method=TracIn("kron(2)"), projection=" kron( 2 )").method == index.method
    assert toy.build(tmp_path / "i", method=TracIn("kron(2)"), projection="auto").method == index.method
    with pytest.raises(
        UndeError, match=r"projection 'none' with TracIn\(projection='kron\(2\)'.*names another"
    ):
        toy.build(tmp_path / "i", method=TracIn("kron(2)"), projection="none")


def test_it_is_said_in_two_lines_and_recorded(tmp_path, capsys):
    options = {"model": wide(), "method": "auto", "progress": True}
    index = toy.build(tmp_path / "i", **options)
    assert index.manifest.method == index.method.describe()
    assert (index.method.name, index.method.projection) == ("ekfac", "none")
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("chosen: method ekfac (classification); projection none: ")
    assert lines[0].endswith(" of disk='20GB'; damping 0.1 (ekfac, classification)")
    assert lines[1] == "`unde calibrate` measures which setting predicts retrained models best"
    half = bytes_of(wide(), "none", examples=22) - 1
    toy.build(tmp_path / "half", disk=half, **options)
    assert "(with disk=" in capsys.readouterr().err.splitlines()[0]
    toy.build(tmp_path / "named", **(options | {"method": TracIn("none")}))
    assert "chosen" not in (said := capsys.readouterr().err) and "calibrate" not in said


def test_a_build_goes_on_with_what_was_chosen(tmp_path, capsys):
    index = toy.build(tmp_path / "i", model=wide(), method="auto")
    toy.shard_files(index)[1].unlink()
    again = toy.build(tmp_path / "i", model=wide(), method="auto", disk="1kB", progress=True)
    assert again.manifest.id == index.manifest.id and again.method == index.method
    assert "chosen: method ekfac (as recorded); projection none" in capsys.readouterr().err
    toy.build(tmp_path / "trak", model=wide(), method=TRAK("kron(4)", damping=3))
    assert toy.build(tmp_path / "trak", model=wide(), method="auto").method.damping == 3.0
    with pytest.raises(UndeError, match="already holds another index"):
        toy.build(tmp_path / "i", model=wide(), method="auto", projection="kron(16)")


def test_the_plan_says_the_same(tmp_path):
    data, model = toy.data(22), wide()
    for disk in ("20GB", "300kB"):
        made = plan(model, Classification(), data, disk=disk)
        index = Index.build(model, Classification(), data, tmp_path / disk, disk=disk, progress=False)
        assert made.method == index.method.describe()
    assert made.method["projection"].startswith("factored")
    title, line, advice, *_ = str(made).splitlines()
    assert title.startswith("Sequential in float32") and advice == choice.ADVICE
    assert line.startswith("chosen: method ekfac") and line.endswith("about 1 s")
    assert made.as_dict()["choice"][0] == "method ekfac (classification)"


def test_every_operation_of_what_is_chosen(tmp_path):
    """Whole gradients and outer products of a classifier, where nothing is named."""
    data, queries = toy.data(220), toy.data(12, seed=3)
    for disk, kind in (("20GB", "none"), ("1.2MB", "factored")):
        index = Index.build(
            wide(70), Classification(), data, tmp_path / kind, disk=disk, memory="200MB", progress=False
        )
        assert str(index.method.projection).startswith(kind)
        assert index.score(queries).total().shape == (12, 220)
        assert len(label_rankings(index, names=["normalised"], progress=False)["normalised"].order) == 220
        scores = index.score(queries)
        assert unde.learn_weights(scores, k=3).values.shape == (3,)
        assert index.diagnose(scores) is not None
        chance = torch.Generator().manual_seed(0)
        bank = (
            (torch.rand(8, 220, generator=chance) < 0.5).numpy(),
            torch.rand(8, 12, generator=chance).numpy(),
        )
        found = index.calibrate(queries=queries, bank=bank, baselines=False)
        assert found.method.projection == index.method.projection


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"disk": "much"}, r"cannot read disk 'much'"),
        ({"disk": 0}, r"disk 0: expected a number of bytes"),
        (
            {"disk": "1kB"},
            r"no features of ekfac fit disk='1kB'.*'kron\(8\)', take .*Give disk='\d.*name a smaller proj",
        ),
        (
            {"disk": "1kB", "method": "trak"},
            r"no features of trak fit disk='1kB'.*the smallest, 'kron\(16\)'",
        ),
        ({"projection": "kron"}, r"projection 'kron': expected"),
        ({"projection": "best"}, r"unknown projection 'best'"),
        ({"method": "autos"}, r"unknown method 'autos'"),
        (
            {"projection": "none", "memory": "1.2MB"},
            r"'none' takes .*one has 366,\d+ numbers.*'kron\(16\)' takes",
        ),
        ({"projection": "factored(2)", "memory": "1.2MB"}, r"memory='1.5MB' is enough for whole gradients"),
    ],
)
def test_bad_input(tmp_path, options, said):
    for run in (Index.build, plan):
        where = {} if run is plan else {"path": tmp_path / "i"}
        with pytest.raises(UndeError, match=said):
            run(wide(600), Classification(), toy.data(22), **where, **options)
    assert not (tmp_path / "i").exists()


def test_gradients_of_a_model_beyond_all_budgets():
    model = meta(lambda: nn.Sequential(nn.Linear(2**16, 2**16), nn.Linear(2**16, 2**16)))
    with pytest.raises(
        UndeError, match=r"'none' takes .*34.4 GB in float32.*'kron\(16\)' takes .*'factored\(1\)'"
    ):
        plan(model, Classification(), n_examples=1000, projection="none")
    assert plan(model, Classification(), n_examples=1000).method["projection"].startswith("kron")


def test_free_space_is_a_budget(tmp_path, monkeypatch, capsys):
    model = wide()
    whole = bytes_of(model, "none", examples=22)
    assert free_bytes(tmp_path / "not" / "there") > 0
    usage = namedtuple("usage", ("free",))
    monkeypatch.setattr(choice.shutil, "disk_usage", lambda path: usage(whole - 1))
    index = toy.build(tmp_path / "i", model=model, method="auto", memory="2GB", progress=True)
    assert index.manifest.codec.__class__ is Factored
    assert f" of {whole / 1e6:.2f} MB free (with" in capsys.readouterr().err
    with pytest.raises(UndeError, match=r"'none' takes .*has .* free. 'factored\(1\)' takes"):
        toy.build(tmp_path / "none", model=model, method="ekfac", projection="none", memory="2GB")


def test_queries_that_no_memory_holds(tmp_path, monkeypatch):
    index = toy.build(tmp_path / "i", model=wide(), method="auto")
    each = 4 * index.manifest.width
    monkeypatch.setattr("unde.index.query_features.machine_memory", lambda: 4 * each)
    assert len(index.features(toy.data(4))) == 4
    with pytest.raises(UndeError, match=r"5 queries take .* under projection 'none'.*ask up to 2 at a time"):
        index.features(toy.data(5))


def test_labels_of_whitened_gradients_cannot_be_added(tmp_path):
    index = toy.build(tmp_path / "i", method=EKFAC("factored(2)"))
    with pytest.raises(UndeError, match="built with whitened gradients: build it anew with fisher='true'"):
        index.add_fisher("true", progress=False)


def test_second_moments_and_whitening_are_refused(tmp_path):
    moments = {name: torch.ones_like(p) for name, p in toy.net().named_parameters()}
    with pytest.raises(UndeError, match="EKFAC needs the two sides of a gradient apart"):
        toy.build(tmp_path / "i", method=EKFAC("factored(2)"), second_moments=moments)
    index = toy.build(tmp_path / "j", model=wide(), method="auto", second_moments="gradients")
    assert (index.method.name, index.method.projection) == ("trak", "kron(16)")
