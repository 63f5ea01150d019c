"""examples/stable_diffusion_lora.py, as it is, on a tiny pipeline."""

import csv
import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import sd_toy
import torch
from sd_toy import ddim, pixels

from refusals import refused
from unde.integrations.diffusers import add_lora, encode_images

pytest.importorskip("diffusers")
pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def example():
    path = Path(__file__).parents[2] / "examples" / "stable_diffusion_lora.py"
    spec = importlib.util.spec_from_file_location("stable_diffusion_lora", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def folder_of_images(path, n=6):
    from PIL import Image

    for i, image in enumerate(pixels(n)):
        file = path / ("ukiyo-e", "post_impressionism")[i % 2] / f"{i}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.asarray(image.permute(1, 2, 0))).save(file)
    return path


SMALL = (
    "--rank 2 --size 8 --epochs 1 --batch-size 3 --learn 3 --evaluate 2 --steps 2 --timesteps 2 --groups 8 "
    "--rows 2 --top 2 --device cpu"
)


def small(saved, images, out):
    return ["--model", str(saved), "--images", str(images), "--out", str(out), *SMALL.split()]


def test_the_example_runs_and_goes_on(saved, tmp_path, monkeypatch, capsys):
    script, images = example(), folder_of_images(tmp_path / "art")
    arguments = small(saved, images, tmp_path / "out")
    script.main(arguments)
    with (tmp_path / "out" / "top.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * 2 * 2
    assert {row["prompt"] for row in rows} == {"a ukiyo-e painting", "a post impressionism painting"}
    assert {row["seed"] for row in rows} == {"3", "4"}  # 0 to 2 are for learning
    assert all((images / row["image"]).exists() for row in rows)
    page = (tmp_path / "out" / "report.html").read_text()
    assert "seed 3" in page and "a ukiyo-e painting" in page
    from safetensors.torch import load_file

    lora = load_file(tmp_path / "out" / "lora" / script.LORA)
    moved = [t for name, t in lora.items() if "lora_B" in name]
    assert moved and all(t.abs().max() > 0 for t in moved)  # zero before training
    before = (tmp_path / "out" / "top.csv").read_text()
    (tmp_path / "out" / "top.csv").unlink()
    monkeypatch.setattr(script, "simple_loss", None)  # nothing is trained or generated again
    monkeypatch.setattr(script, "sample_pipeline", None)
    script.main(arguments)
    assert (tmp_path / "out" / "top.csv").read_text() == before
    refused("was begun with --rank 2, not 3: choose another --out", script.main, [*arguments, "--rank", "3"])
    capsys.readouterr()


def test_the_example_with_captions_and_journeys(saved, tmp_path, capsys):
    script, images = example(), tmp_path / "captions"
    folder_of_images(images)
    lines = [{"file_name": f"ukiyo-e/{i}.png", "text": f"a wave {'abc'[i // 2]}"} for i in (0, 2, 4)]
    (images / "metadata.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "asked.txt").write_text("a boat\n")
    arguments = small(saved, images, tmp_path / "out")
    script.main([*arguments, "--method", "journey-trak", "--query-prompts", str(tmp_path / "asked.txt")])
    text = (tmp_path / "out" / "top.csv").read_text()
    assert "a boat" in text and "a wave" not in text and "ukiyo-e/" in text
    capsys.readouterr()


def test_training_does_not_depend_on_how_many_rows_fit(saved, tmp_path, monkeypatch):
    """And is what a plain loop over its own draws gives: AdamW on the mean loss of a batch."""
    from safetensors.torch import load_file

    script, images = example(), folder_of_images(tmp_path / "art")
    calls, real = [], script.simple_loss

    def noted(unet, scheduler, *columns):
        calls.append([c.clone() for c in columns])
        return real(unet, scheduler, *columns)

    monkeypatch.setattr(script, "simple_loss", noted)
    monkeypatch.setattr(script, "generate", lambda *_: sys.exit())
    found = []
    for rows in ("1", "3"):
        calls.clear()
        with pytest.raises(SystemExit):
            script.main([*small(saved, images, tmp_path / rows), "--rows", rows])
        found.append(load_file(tmp_path / rows / "lora" / script.LORA))
    assert len(calls) == 2  # batches of 3
    pipeline = sd_toy.load(saved)
    parameters = add_lora(pipeline.unet, 2)
    data = script.read(images, 8, "a {class} painting")
    either = [encode_images(pipeline, x) for x in (data.images, data.images.flip(-1))]
    flipped = [float((either[1] - x).abs().flatten(1).sum(1).min()) < 1e-4 for call in calls for x in call[0]]
    assert {True, False} == set(flipped)
    optimizer = torch.optim.AdamW(parameters, lr=3e-4, weight_decay=1e-6)
    for step, (x, noise, t, given) in enumerate(calls):
        a = ddim().alphas_cumprod[t].view(-1, 1, 1, 1)
        out = pipeline.unet(a.sqrt() * x + (1 - a).sqrt() * noise, t, given).sample
        for group in optimizer.param_groups:  # half a cosine over two steps; the warm-up of a tenth is none
            group["lr"] = 3e-4 * (1, 0.5)[step]
        optimizer.zero_grad()
        (out - noise).square().mean().backward()
        optimizer.step()
    want = {n.replace(".default", ""): p for n, p in pipeline.unet.named_parameters() if "lora_" in n}
    for name, value in found[0].items():
        torch.testing.assert_close(value, found[1][name], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(value, want[name].detach(), rtol=1e-5, atol=1e-6)


def test_mistakes_in_the_folder(tmp_path):
    script = example()
    refused("give --images FOLDER, or --plan", script.main, [])
    refused("no folder", script.main, ["--images", str(tmp_path / "none")])
    refused(r"holds neither metadata.jsonl nor subfolders", script.main, ["--images", str(tmp_path)])
    (tmp_path / "metadata.jsonl").write_text('{"file_name": "a.png"}\n')
    refused("record 0 has no 'text', only file_name", script.main, ["--images", str(tmp_path)])


def test_the_plan_needs_no_weights(tmp_path, capsys):
    net = sd_toy.unet(
        block_out_channels=(8,), down_block_types=("DownBlock2D",), up_block_types=("UpBlock2D",)
    )
    net.save_config(tmp_path / "unet")
    wanted = "--rank 2 --size 8 --timesteps 4 --rows 16 --groups 8 --learn 3 --projection kron(2)"
    example().main(["--plan", "--model", str(tmp_path), *wanted.split()])
    out = capsys.readouterr().out
    assert "features          20,000  forward and backward, no weight gradients (5,000 × 4 timesteps)" in out
    assert "fine-tuning      500,000  forward and backward (100 epochs × 5,000)" in out
    assert "generating       100,300  forward (1,003 images × 50 steps × 2)" in out
    assert "5,000 examples; d-trak, kron(2)" in out


def test_lora_of_stable_diffusion_has_the_papers_size():
    script = example()
    net, whole = script.on_meta(script.options([]))
    assert whole == 859_520_964
    trained = {name: p for name, p in net.named_parameters() if p.requires_grad}
    assert len(trained) == 256
    assert sum(p.numel() for p in trained.values()) == 25_509_888  # 25.5 M
