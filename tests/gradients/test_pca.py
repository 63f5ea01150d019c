"""pca directions against NumPy's eigenvectors of covariances gathered by hand, and on an index."""

import numpy as np
import pytest
import torch

import toy
from unde import Index, UndeError
from unde.data import Rows
from unde.gradients import pca as directions
from unde.index import pca as building
from unde.methods import LoGRA, TracIn
from unde.projection import Projection, Spec
from unde.store.layout import MATRICES
from unde.tasks import CausalLM, Classification


def covariances(n=22):
    """Of the inputs and output gradients of the second layer of toy.net, over all its examples."""
    model, kept = toy.net(), {}

    def keep(_m, args, out):
        kept["x"], kept["y"] = args[0].detach(), out

    handle = model[2].register_forward_hook(keep)
    loss = Classification().loss(model, toy.data(n))
    g = torch.autograd.grad(loss.sum(), kept["y"])[0]
    handle.remove()
    return (g.T @ g).double().numpy(), (kept["x"].T @ kept["x"]).double().numpy()


def fitted(r=2):
    names = [n for n, _ in toy.net().named_parameters()]
    rows = Rows(toy.data(22))
    task = Classification()
    with toy.cut():
        found = directions.compute_directions(
            toy.net(), task, rows, names, Spec("pca", r), seed=0, measure="loss", memory=2**30
        )
    assert found.size == 4
    return found.matrices


def test_directions_are_leading_eigenvectors():
    got = fitted()
    assert set(got) == {f"{side}/{n}.weight" for side in ("rows", "cols") for n in (0, 2)}
    for side, covariance in zip(("rows", "cols"), covariances()):
        want = np.linalg.eigh(covariance)[1][:, ::-1][:, :2].T
        matrix = got[f"{side}/2.weight"].double().numpy()
        np.testing.assert_allclose(np.abs((matrix * want).sum(1)), 1, rtol=1e-5)
        np.testing.assert_allclose(matrix @ matrix.T, np.eye(2), atol=1e-6)
        assert (matrix[np.arange(2), np.abs(matrix).argmax(1)] > 0).all()


def test_features_are_projected_on_them(tmp_path):
    index = toy.build(tmp_path / "i", method=TracIn(projection="pca(2)"))
    g = toy.gradients(toy.net(), Classification(), toy.data(22))
    directions, start, want = fitted(), 0, []
    for name, p in toy.net().named_parameters():
        block = g[:, start : start + p.numel()].view(22, *p.shape)
        start += p.numel()
        if p.dim() == 2:
            left, right = directions[f"rows/{name}"], directions[f"cols/{name}"]
            want.append((left @ block @ right.T).flatten(1))
        else:
            want.append(Projection("kron(2)", name, tuple(p.shape))(block))
    got = torch.cat([toy.stored(index).block(0, s) for s in range(3)])
    torch.testing.assert_close(got, torch.cat(want, 1), rtol=1e-4, atol=1e-6)


def test_more_of_the_gradient_is_kept_than_by_random_directions(tmp_path):
    g = toy.gradients(toy.net(), Classification(), toy.data(22))
    truth = g @ g.T
    errors = []
    for projection in ("pca(2)", "kron(2)"):
        index = toy.build(tmp_path / projection, method=TracIn(projection=projection))
        got = index.score(toy.data(22)).total()
        errors.append(float((got - truth).norm() / truth.norm()))
    assert errors[0] < 0.5 * errors[1]


def test_queries_and_reopening_use_the_same_directions(tmp_path):
    index = toy.build(tmp_path / "i", method=LoGRA(projection="pca(2)"))
    want = index.score(toy.data(4, seed=3)).total()
    torch.testing.assert_close(toy.reopen(index).score(toy.data(4, seed=3)).total(), want)


def test_a_resumed_build_reads_them_back(tmp_path, monkeypatch):
    method = LoGRA(projection="pca(2)")
    toy.build(tmp_path / "whole", method=method)
    cut = toy.build(tmp_path / "cut", method=method)
    toy.shard_files(cut)[1].unlink()
    monkeypatch.setattr(building, "_directions", lambda *a, **k: pytest.fail("fitted again"))
    toy.build(tmp_path / "cut", method=method)
    assert toy.content(tmp_path / "cut") == toy.content(tmp_path / "whole")


def test_lost_or_foreign_directions_are_refused_and_the_advice_restores_them(tmp_path):
    method = LoGRA(projection="pca(2)")
    index = toy.build(tmp_path / "i", method=method)
    other = toy.build(tmp_path / "o", method=LoGRA(projection="pca(3)"))
    path, whole = index.folder / MATRICES, toy.content(index.folder)
    for damage, said in (
        (lambda: path.write_bytes((other.folder / MATRICES).read_bytes()), "of another index"),
        (lambda: path.write_bytes(path.read_bytes()[:100]), "truncated or damaged"),
        (path.unlink, "missing"),
    ):
        damage()
        with pytest.raises(UndeError, match=rf"{said}.*queries cannot be projected.*delete .*{MATRICES}"):
            toy.reopen(index).score(toy.data(4, seed=3))
        path.unlink(missing_ok=True)
        toy.build(tmp_path / "i", method=method, memory="40MB")
        assert toy.content(index.folder) == whole
        damage()  # without deleting it, too
        toy.build(tmp_path / "i", method=method)
        assert toy.content(index.folder) == whole
    with pytest.raises(UndeError, match="already holds another index"):
        toy.build(tmp_path / "i", method=LoGRA(projection="pca(3)"))
    assert toy.content(index.folder) == whole


def test_embeddings_keep_random_rows_and_wide_sides_too(monkeypatch):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "n_positions": 12, "n_embd": 8, "n_layer": 1, "n_head": 2}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).eval()
    rows = Rows([{"input_ids": torch.randint(40, (9,))} for _ in range(6)], CausalLM().collate)
    names = [n for n, _ in model.named_parameters()]
    monkeypatch.setattr(directions, "LIMIT", 30)
    got = directions.compute_directions(
        model, CausalLM(), rows, names, Spec("pca", 3), seed=0, measure="loss", memory=2**30
    ).matrices
    assert "rows/transformer.wte.weight" not in got
    assert "cols/transformer.wte.weight" in got
    assert "rows/transformer.h.0.mlp.c_fc.weight" in got
    assert "cols/transformer.h.0.mlp.c_fc.weight" not in got  # 32 wide
    p = Projection("pca(3)", "transformer.wte.weight", (40, 8), 0, got)
    random = Projection("kron(3)", "transformer.wte.weight", (40, 8), 0)
    assert torch.equal(p.row_matrix, random.row_matrix)
    assert not torch.equal(p.col_matrix, random.col_matrix)


def test_a_build_interrupted_before_the_first_shard_goes_on(tmp_path, monkeypatch):
    method = LoGRA(projection="pca(2)")
    with monkeypatch.context() as m:
        m.setattr(
            "unde.index.feature_runner.try_coverage", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt)
        )
        with pytest.raises(KeyboardInterrupt):
            toy.build(tmp_path / "i", method=method)
    assert (tmp_path / "i" / MATRICES).exists()
    index = toy.build(tmp_path / "i", method=method)
    assert isinstance(index, Index)
