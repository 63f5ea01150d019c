"""Pictures of diffusion models without a `show` of one's own: of pixels, through a VAE, and for as long as there is."""

from types import SimpleNamespace

import denoisers
import numpy as np
import pytest
import torch

from report_dom import parse
from unde import Index, Setup
from unde.data import Rows
from unde.diffusion import Samples
from unde.integrations.diffusers import query_columns
from unde.tasks import Diffusion
from unde.ui.report import Page
from unde.ui.report.example_view import ExampleView
from unde.ui.report.panels import query_panels

pytest.importorskip("diffusers")


class VAE(torch.nn.Module):
    """Decodes two channels into three of twice the side."""

    def __init__(self):
        super().__init__()
        self.p = torch.nn.Parameter(torch.ones(1))
        self.config, self.decoded = SimpleNamespace(scaling_factor=0.5), 0

    def decode(self, latents):
        self.decoded += len(latents)
        large = latents.repeat_interleave(2, 2).repeat_interleave(2, 3)
        return SimpleNamespace(sample=torch.cat([large, large[:, :1]], 1))


def setup(vae=None, **options):
    data = {"latents": denoisers.images(8) / 2, "text": [f"prompt {i}" for i in range(8)]}
    return Setup(denoisers.toy(), Diffusion(denoisers.ddpm(), 2, vae=vae), data, **options)


def eight_bits(image):
    """(C, H, W) in [−1, 1] as (H, W, C) from 0 to 255."""
    return ((image.clamp(-1, 1) + 1) * 127.5).round().permute(1, 2, 0).numpy().astype(np.uint8)


def test_latents_are_decoded_and_prompts_shown():
    vae = VAE()
    made = setup(vae)
    shown = ExampleView(made)
    item = shown.example(3)
    large = made.train_data["latents"][3].repeat_interleave(2, 1).repeat_interleave(2, 2) / 0.5
    np.testing.assert_array_equal(item.image, eight_bits(torch.cat([large, large[:1]])))
    assert item.prompt == "prompt 3"
    assert shown.example(3) is item and vae.decoded == 1  # once


def test_pixels_are_shown_as_they_are():
    x = torch.rand(4, 3, 5, 5, generator=torch.Generator().manual_seed(0)) * 2 - 1
    task = Diffusion(denoisers.ddpm(), 2)
    for data in (x, {"images": x}, {"latents": x}, (x,)):
        item = ExampleView(Setup(denoisers.toy(), task, data)).example(2)
        np.testing.assert_allclose(item.image.astype(int), eight_bits(x[2]).astype(int), atol=1)
    for data in (torch.rand(4, 2, 5, 5), {"latents": torch.rand(4, 4, 5, 5)}):  # nobody can see these
        assert ExampleView(Setup(denoisers.toy(), task, data)).example(2).image is None


def asked(made, tmp_path, **options):
    """A page about samples that were saved and loaded."""
    samples = Samples(
        denoisers.images(2, 1), torch.zeros(2, 0, 2, 4, 4), torch.zeros(2, 0), [1, 2], {}, ["a", "b"]
    )
    samples.save(tmp_path / "samples")
    queries = Rows(query_columns(Samples.load(tmp_path / "samples")))
    index = Index.build(made.model, made.task, made.train_data, tmp_path / "idx", method="d-trak")
    shown = ExampleView(made, **options)
    ways = {"unweighted": None}
    panels = query_panels(made, queries, index.score(queries), ways, which=[0, 1], count=3, view=shown)
    return parse(Page("t", queries=panels, note=shown.missing_note).html()), shown


def test_a_page_has_pictures_of_queries_and_examples(tmp_path):
    vae = VAE()
    root, shown = asked(setup(vae), tmp_path)
    assert len(root.all(".rows .picture")) == 12 and not root.all(".missing") and not shown.omitted
    assert len(root.all(".asked .picture")) == 2
    assert vae.decoded <= 8 + 2  # none of them twice


def test_pictures_that_take_too_long_are_left_out_and_that_is_said(tmp_path, monkeypatch):
    notes, vae = [], VAE()
    monkeypatch.setattr("unde.console.note", notes.append)
    ticks = iter(range(1000))
    monkeypatch.setattr("unde.ui.report.example_view.time", SimpleNamespace(monotonic=lambda: next(ticks)))
    root, shown = asked(setup(vae), tmp_path, seconds=3)
    assert vae.decoded == 3  # the queries first
    assert len(root.all(".asked .picture")) == 2 and not root.all(".asked .missing")
    assert shown.omitted == len({n.text for n in root.all(".missing")}) > 0
    assert f"{shown.omitted} pictures could not be drawn within 3 s" in root.one("aside").text
    assert any("could not be drawn" in note for note in notes)
