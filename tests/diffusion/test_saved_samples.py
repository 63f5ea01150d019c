"""Samples in a folder: the same bits come back, and nothing else is taken for samples."""

import importlib
import json
import os

import pytest
import torch

from refusals import refused
from unde import UndeError
from unde.diffusion import Samples
from unde.diffusion.sample import NAME, settings_checksum


def samples(count=3, seed=0, prompts=True):
    g = torch.Generator().manual_seed(seed)
    return Samples(
        torch.randn(count, 4, 2, 2, generator=g),
        torch.randn(count, 5, 4, 2, 2, generator=g),
        torch.tensor([801, 601, 401, 201, 1]).repeat(count, 1),
        [2**70 + i for i in range(count)],
        {"encoder_hidden_states": torch.randn(count, 2, 6, generator=g).bfloat16().transpose(1, 2)},
        ["a cat", "\ud800 </script>", "é\n"][:count] if prompts else None,
    )


def same(a, b):
    def bits(t):
        return t.contiguous().view(torch.uint8)

    pairs = [(a.latents, b.latents), (a.trajectory, b.trajectory), (a.timesteps, b.timesteps)]
    pairs += [(a.given[k], b.given[k]) for k in a.given]
    return (
        all(x.dtype == y.dtype and x.shape == y.shape and torch.equal(bits(x), bits(y)) for x, y in pairs)
        and list(a.given) == list(b.given)
        and (a.seeds, a.prompts) == (b.seeds, b.prompts)
    )


@pytest.mark.parametrize("prompts", [True, False])
def test_the_same_bits_come_back(tmp_path, prompts):
    made = samples(prompts=prompts)
    made.latents[0, 0, 0, 0] = -0.0
    made.save(tmp_path / "some" / "where")
    found = Samples.load(str(tmp_path / "some" / "where"))
    assert same(made, found)
    assert [*found.queries(journey=True)] == [*made.queries(journey=True)]


def test_saving_again_replaces_what_was_there(tmp_path):
    samples().save(tmp_path / "s")
    samples(2, seed=1).save(tmp_path / "s")
    assert same(Samples.load(tmp_path / "s"), samples(2, seed=1))
    assert len(list((tmp_path / "s").iterdir())) == 2


def test_a_kill_on_the_way_leaves_what_was_there(tmp_path, monkeypatch):
    samples().save(tmp_path / "s")

    def killed(path, content):
        if path.name == NAME:
            raise KeyboardInterrupt
        real(path, content)

    saved = importlib.import_module("unde.diffusion.sample")
    real = saved.write_bytes
    monkeypatch.setattr(saved, "write_bytes", killed)
    with pytest.raises(KeyboardInterrupt):
        samples(2, seed=1).save(tmp_path / "s")
    assert same(Samples.load(tmp_path / "s"), samples())
    monkeypatch.undo()
    samples(2, seed=1).save(tmp_path / "s")
    assert len(list((tmp_path / "s").iterdir())) == 2  # what the kill left is gone


def test_without_trajectories(tmp_path):
    samples().save(tmp_path / "s", journey=False)
    found = Samples.load(tmp_path / "s")
    assert torch.equal(found.latents, samples().latents) and "trajectory" not in found.queries()
    refused("saved without their trajectories, which Journey-TRAK follows", found.queries, journey=True)
    found.save(tmp_path / "again")
    assert same(Samples.load(tmp_path / "again"), found)


def test_other_files_are_not_overwritten(tmp_path):
    (tmp_path / "thesis.tex").write_text("mine")
    refused(r"holds 'thesis.tex' and no samples", samples().save, tmp_path)
    refused("is a file: samples are saved in a folder", samples().save, tmp_path / "thesis.tex")
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


def forged(folder, **changes):
    about = json.loads((folder / NAME).read_text()) | changes
    (folder / NAME).write_text(json.dumps(about | {"checksum": settings_checksum(about)}))


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda f: (f / NAME).write_text("{"), "damaged"),
        (lambda f: (f / NAME).write_text("[]"), "it is no file of samples"),
        (lambda f: (f / NAME).write_text((f / NAME).read_text().replace("a cat", "a dog")), "its checksum"),
        (lambda f: next(f.glob("*.safetensors")).unlink(), "damaged"),
        (lambda f: next(f.glob("*.safetensors")).write_bytes(b"x" * 100), "does not match its checksum"),
        (lambda f: forged(f, version=2), "the version 2, expected 1"),
        (lambda f: forged(f, tensors="../samples-1.safetensors"), "names '../samples-1.safetensors'"),
        (lambda f: forged(f, seeds=[1]), "their parts do not fit"),
        (lambda f: forged(f, prompts="abc"), "their parts do not fit"),
        (lambda f: forged(f, seeds=7), "their parts do not fit"),
    ],
)
def test_wrong_files_are_refused(tmp_path, damage, says):
    folder = tmp_path / "s"
    samples().save(folder)
    damage(folder)
    refused(says, Samples.load, folder)


def test_folders_that_are_none(tmp_path):
    with pytest.raises(UndeError, match=r"which is not there: expected a folder that Samples.save has made"):
        Samples.load(tmp_path / "nowhere")
    refused(r"holds no samples.json", Samples.load, tmp_path)
    samples().save(tmp_path / "s")
    tensors = next((tmp_path / "s").glob("*.safetensors"))
    os.rename(tensors, tmp_path / "elsewhere")
    tensors.symlink_to(tmp_path / "elsewhere")
    refused("it is a link", Samples.load, tmp_path / "s")
