"""What an index is asked, in several processes: the same bits as in one."""

import pickle

import projects
import pytest
import small_jobs
import torch

import toy
import unde
from unde import Index, UndeError, methods
from unde.parallel import Array, Processes, Serial
from unde.parallel.model_transport import pack_model

N = 60
MEASURED = {
    "tracin": methods.TracIn(projection="none"),
    "trak": methods.TRAK(projection="none"),
    "trak, dual": methods.TRAK(projection="none", damping=0.2),
    "logra": methods.LoGRA(projection="kron(3)"),
    "ekfac": methods.EKFAC(projection="kron(3)"),
    "ekfac, sampled": methods.EKFAC(projection="kron(3)", fisher="sampled"),
    "ekfac, whitened": methods.EKFAC(projection="factored(2)"),
    "cosine": methods.TracIn(projection="none", cosine=True),
}


@pytest.fixture(scope="module", params=[1, 2, 4])
def workers(request):
    with_that_many = small_jobs.Workers(request.param)
    yield with_that_many
    with_that_many.close()


of_two = pytest.mark.parametrize("workers", [2], indirect=True)


def both(folder, method, workers, **options):
    """An index made and asked here, and one made and asked by workers; of each, what kernels leave on disk."""
    with small_jobs.blocks():
        options |= {"n": N, "method": method}
        yield toy.build(folder / "here", **options)
        yield toy.build(folder / "there", **options, executor=workers, recipe="projects:sixty")


def all_of(index):
    """Everything long that one can ask, as bytes."""
    with small_jobs.blocks():
        queries, w = toy.data(9, seed=5), torch.linspace(0, 2, len(index.groups))
        scores = index.score(queries)
        top, bottom = scores.top(7, w), scores.top(3, largest=False)
        found = {
            "features": scores.queries,
            "total": scores.total(w),
            "top": top.values,
            "at": top.indices,
            "bottom": bottom.indices,
            "own": index.self_influence(w, subset=[3, 50, 17]),
            "normalised": index.self_influence(normalize_top=5, subset=[0, 8, 41]),
            "rows": toy.training(index, index.method).block(1)[0],
        }
        return {name: value.numpy().tobytes() for name, value in found.items()}


@pytest.mark.parametrize(
    ("workers", "name", "states"),
    [
        *((2, name, None) for name in MEASURED),
        *((count, "ekfac, sampled", None) for count in (1, 4)),
        (2, "ekfac, sampled", toy.states(1, 2)),
    ],
    indirect=["workers"],
    ids=lambda x: "checkpoints" if isinstance(x, list) else None,
)
def test_the_same_bits_for_any_number_of_workers(tmp_path, workers, name, states):
    here, there = both(tmp_path, MEASURED[name], workers, checkpoints=states)
    assert all_of(there) == all_of(here)
    assert toy.content(there.folder) == toy.content(here.folder)
    assert not list(there.folder.glob("scratch/*"))


@of_two
def test_weights_of_perturbed_copies(tmp_path, workers):
    options = {"n": 600, "pass_size": 64, "method": MEASURED["logra"]}
    here = toy.build(tmp_path / "here", **options)
    there = toy.build(tmp_path / "there", **options, executor=workers, recipe="projects:many")
    one, other = here.learn_weights(), there.learn_weights()
    assert one.values.numpy().tobytes() == other.values.numpy().tobytes()
    assert one.provenance == other.provenance
    noisy = [index.learn_weights(perturb="weights", examples=40, seed=3) for index in (here, there)]
    assert noisy[0].values.tolist() == noisy[1].values.tolist()
    assert noisy[0].provenance["found"] == noisy[1].provenance["found"]


@of_two
def test_a_model_that_changed_since_the_build_is_refused(tmp_path, workers):
    """Whoever computes: a single pass runs here, several run where the model is made by the recipe."""
    model = toy.net()
    index = toy.build(tmp_path / "i", N, model=model, executor=workers, recipe="projects:sixty")
    model[0].weight.data = model[0].weight.data * 1.1
    for count in (2, 9):
        with pytest.raises(UndeError, match=r"weights are not those that .* was built with"):
            index.score(toy.data(count, seed=5))


def test_ties_go_to_the_earlier_example_wherever_it_is_scored(tmp_path, workers):
    same = projects.alike().train_data
    index = toy.build(tmp_path / "i", train_data=same, executor=workers, recipe="projects:alike")
    top = index.score(toy.data(3, seed=1)).top(12)
    for row in top.indices.tolist():
        first, second = row[0], row[6]  # four different examples, six times each, in four shards
        assert row == [*range(first % 4, 24, 4), *range(second % 4, 24, 4)]


def test_array_workers_at_any_time_and_a_last_call(tmp_path):
    method, said = (
        MEASURED["ekfac, sampled"],
        r"is not finished: \d+ shards were not written yet .*unde finish",
    )
    whole = toy.build(tmp_path / "whole", N, method=method)
    for number in (3, 1):  # counted from 1: of 3, number 2 never came
        part = toy.build(tmp_path / "i", N, method=method, executor=Array(worker=number, of=3))
        with pytest.raises(UndeError, match=said):
            part.score(toy.data(2, seed=1))
    counts = [len(list((tmp_path / name / "shards").iterdir())) for name in ("i", "whole")]
    assert 0 < counts[0] < counts[1]
    with pytest.raises(UndeError, match="shards are missing"):
        Index.open(tmp_path / "i")
    toy.build(tmp_path / "i", N, method=method)
    assert toy.content(tmp_path / "i") == toy.content(whole.folder)


def test_the_last_of_all_array_workers_can_be_asked_and_no_array_asks(tmp_path):
    for number in range(3):
        part = toy.build(tmp_path / "i", executor=f"array:{number}/3")
    want = toy.build(tmp_path / "j").score(toy.data(2, seed=1)).total()
    assert torch.equal(part.score(toy.data(2, seed=1)).total(), want)
    with pytest.raises(UndeError, match="does a share of a build"):
        Index.open(tmp_path / "i", executor="array:0/2")


def test_a_worker_does_not_touch_what_another_is_writing(tmp_path):
    toy.build(tmp_path / "i", executor=Array(worker=0, of=3))
    (tmp_path / "i" / "shards" / "c00-000001.safetensors.abcd.partial").write_bytes(b"half")
    toy.build(tmp_path / "i", executor=Array(worker=2, of=3))
    assert list((tmp_path / "i" / "shards").glob("*.partial"))
    toy.build(tmp_path / "i")
    assert not list((tmp_path / "i" / "shards").glob("*.partial"))


def test_threads_of_each_job_are_settled(tmp_path):
    processes = {"executor": Processes(1, threads=2), "recipe": "projects:make"}
    for i, (options, threads) in enumerate(
        (({"threads": 2}, 2), ({"executor": Serial(3)}, 3), (processes, 2))
    ):
        assert toy.build(tmp_path / str(i), **options).manifest.resolved.threads == threads


def test_a_model_of_transformers_needs_no_recipe(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=20, n_positions=8)
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config)
    model.transformer.wpe.weight.requires_grad_(False)
    ids = torch.randint(20, (12, 8), generator=torch.Generator().manual_seed(0))
    data = [{"input_ids": row, "labels": row} for row in ids]
    options = {"model": model, "task": unde.tasks.CausalLM(), "train_data": data, "method": MEASURED["logra"]}
    here = toy.build(tmp_path / "here", **options)
    there = toy.build(tmp_path / "there", **options, executor="processes:1")
    one, other = toy.content(here.folder), toy.content(there.folder)
    assert other == {n: c for n, c in other.items() if n.startswith("scratch")} | {
        n: c for n, c in one.items() if not n.startswith("scratch")
    }
    queries = [{"input_ids": row, "labels": row} for row in ids[:5].flip(1)]
    assert torch.equal(there.score(queries).total(), here.score(queries).total())
    there.close()
    del there
    assert not list((tmp_path / "there").glob("scratch/*"))


def test_a_model_of_diffusers_needs_no_recipe(tmp_path):
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    blocks = {"down_block_types": ("DownBlock2D",) * 2, "up_block_types": ("UpBlock2D",) * 2}
    size = {"sample_size": 8, "block_out_channels": (8, 8), "layers_per_block": 1, "norm_num_groups": 4}
    model = diffusers.UNet2DModel(in_channels=1, out_channels=1, **size, **blocks).half()
    sent = pack_model(model, unde.tasks.Classification(), [1], None, tmp_path)
    made = pickle.loads(pickle.dumps(sent)).make().model
    types = [{n: p.dtype for n, p in m.named_parameters()} for m in (made, model)]
    assert types[0] == types[1]
    assert all(torch.equal(a, b) for a, b in zip(made.state_dict().values(), model.state_dict().values()))
