"""Which training images made Stable Diffusion draw that? LoRA, D-TRAK and learned weights, as in the paper.

    python examples/stable_diffusion_lora.py --images art/ --out runs/art
    python examples/stable_diffusion_lora.py --plan          # what that will need; nothing is downloaded

Fine-tunes a Stable Diffusion pipeline with LoRA on the images of a folder, generates images to learn weights on and
others to ask about, builds an index, learns weights, and writes top.csv and report.html. The folder has either
metadata.jsonl, with {"file_name": ..., "text": the prompt} in each line, or a subfolder for each class. What was
finished in --out is not done again. Defaults are the settings of the paper for ArtBench-2.
"""

from __future__ import annotations

import argparse
import csv
import json
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unde import Index, Setup, UndeError, Weights, console, methods
from unde.data import Rows
from unde.diffusion import Samples
from unde.integrations.diffusers import (
    ROWS,
    add_lora,
    diffusion_setup,
    encode_images,
    encode_prompts,
    query_columns,
    sample_pipeline,
    training_scheduler,
)
from unde.plan import plan
from unde.scoring import GroupScores
from unde.tasks import Diffusion
from unde.ui.report import Item, Page
from unde.ui.report.panels import query_panels
from unde.ui.report.weights import weights_panel

WEIGHT_DECAY, WARM_UP = 1e-6, 0.1
LORA = "pytorch_lora_weights.safetensors"  # as diffusers names it
ARTBENCH = 5000  # images, where a plan is made without a folder
SD1_UNET = {  # all else are defaults of UNet2DConditionModel
    "sample_size": 32, "block_out_channels": (320, 640, 1280, 1280), "cross_attention_dim": 768,
    "attention_head_dim": 8, "layers_per_block": 2,
}  # fmt: skip


def options(arguments: Sequence[str] | None) -> argparse.Namespace:
    p = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0] if __doc__ else "",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    p.add_argument("--images", type=Path, help="folder of training images")
    p.add_argument("--model", default="lambdalabs/miniSD-diffusers", help="folder or hub name")
    p.add_argument("--prompt", default="a {class} painting", help="for subfolders named after classes")
    p.add_argument("--query-prompts", type=Path, help="file, one in a line (default: the images')")
    p.add_argument("--out", type=Path, default=Path("runs/stable-diffusion"))
    p.add_argument("--size", type=int, default=256, help="pixels; images are cropped to squares")
    p.add_argument("--rank", type=int, default=128, help="of LoRA")
    p.add_argument("--epochs", type=int, default=100)
    p.add_argument("--batch-size", type=int, default=64, help="images of a training step")
    p.add_argument("--lr", type=float, default=3e-4)
    p.add_argument("--learn", type=int, default=1000, help="generated images to learn weights on")
    p.add_argument("--evaluate", type=int, default=1000, help="generated images to ask about")
    p.add_argument("--steps", type=int, default=50, help="of DDIM")
    p.add_argument("--guidance", type=float, default=7.5)
    p.add_argument("--method", default="d-trak", help="d-trak, das, journey-trak, trak or tracin")
    p.add_argument("--projection", default="kron(10)", help="kron(10) of 256 matrices: 25,600 features")
    p.add_argument("--timesteps", type=int, default=50, help="over which a gradient is averaged")
    p.add_argument("--groups", type=int, default=128, help="consecutive parameter groups: 128 or 256")
    p.add_argument("--top", type=int, default=10, help="training images for each query")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--rows", type=int, default=ROWS, help="noisy images in the UNet at once")
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--plan", action="store_true", help="print what all this will need, and stop")
    return p.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    args = options(arguments)
    if args.plan:
        print(planned(args))
        return
    if args.images is None:
        raise UndeError("nothing to train on: give --images FOLDER, or --plan")
    data = read(args.images, args.size, args.prompt)
    same_settings(args)
    pipeline = load(args.model).to(args.device)
    parameters = add_lora(pipeline.unet, args.rank, args.seed)
    setup = diffusion_setup(
        pipeline, data.images, data.prompts, timesteps=args.timesteps, ids=data.files, rows=args.rows, seed=args.seed
    )  # fmt: skip
    fine_tune(pipeline, parameters, setup, data, args)
    learn = generate(pipeline, data, args, "learn")
    evaluate = generate(pipeline, data, args, "evaluate", apart_from=learn)
    journey = args.method == "journey-trak"
    setup.learn_queries, setup.eval_queries = query_columns(learn, journey), query_columns(evaluate, journey)
    index = Index.build(
        setup.model,
        setup.task,
        setup.train_data,
        args.out / "index",
        method=replace(methods.parse(args.method), projection=args.projection),
        groups=f"consecutive({args.groups})",
        ids=setup.ids,
        seed=args.seed,
    )
    weights = index.learn_weights(queries=setup.learn_queries, seed=args.seed)
    weights.save(args.out / "weights.json")
    results(setup, data, evaluate, index.score(setup.eval_queries), weights, args)


# --- data -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Data:
    files: list[str]
    images: Tensor  # (N, 3, H, W) uint8
    prompts: list[str]


def listed(folder: Path, template: str) -> list[tuple[str, str]]:
    """(file, prompt) of every image in the folder."""
    if not folder.is_dir():
        raise UndeError(f"no folder {folder}: expected one of training images")
    metadata = folder / "metadata.jsonl"
    if metadata.exists():
        rows = [json.loads(line) for line in metadata.read_text().splitlines() if line.strip()]
        for i, row in enumerate(rows):
            missing = [key for key in ("file_name", "text") if key not in row]
            if missing:
                raise UndeError(f"{metadata}: record {i} has no {missing[0]!r}, only {', '.join(row)}")
        return [(row["file_name"], row["text"]) for row in rows]
    kinds = (".png", ".jpg", ".jpeg", ".webp")
    found = sorted(p for p in folder.glob("*/*") if p.suffix.lower() in kinds)
    if not found:
        raise UndeError(
            f"{folder} holds neither metadata.jsonl nor subfolders with images: expected one of the two"
        )
    return [
        (str(p.relative_to(folder)), template.replace("{class}", p.parent.name.replace("_", " ")))
        for p in found
    ]


def read(folder: Path, size: int, template: str) -> Data:
    from PIL import Image, ImageOps

    rows = listed(folder, template)
    images = torch.empty(len(rows), 3, size, size, dtype=torch.uint8)
    with console.progress("reading images", len(rows), unit="images") as advance:
        for i, (file, _) in enumerate(rows):
            with Image.open(folder / file) as image:
                square = ImageOps.fit(image.convert("RGB"), (size, size), Image.Resampling.LANCZOS)
            images[i] = torch.from_numpy(np.array(square)).permute(2, 0, 1)
            advance(1)
    return Data([file for file, _ in rows], images, [prompt for _, prompt in rows])


def same_settings(args: argparse.Namespace) -> None:
    """What is in --out already must have been made in the same way."""
    free = ("out", "device", "rows", "top", "plan")
    now = {name: str(value) for name, value in vars(args).items() if name not in free}
    file = args.out / "settings.json"
    if file.exists():
        before = json.loads(file.read_text())
        differ = [name for name in now if before.get(name) != now[name]]
        if differ:
            raise UndeError(
                f"{args.out} was begun with --{differ[0].replace('_', '-')} {before.get(differ[0])}, not "
                f"{now[differ[0]]}: choose another --out"
            )
    args.out.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(now, indent=1))


def load(name: str) -> Any:
    from diffusers import StableDiffusionPipeline

    try:
        return StableDiffusionPipeline.from_pretrained(
            name, torch_dtype=torch.float32, safety_checker=None, requires_safety_checker=False,
            use_safetensors=True, trust_remote_code=False,
        )  # fmt: skip
    except (OSError, ValueError) as e:
        raise UndeError(f"cannot load the pipeline {name} ({str(e).strip().splitlines()[0]})") from e


# --- the model --------------------------------------------------------------------------------------------


def fine_tune(
    pipeline: Any, parameters: list[Any], setup: Setup, data: Data, args: argparse.Namespace
) -> None:
    """AdamW with a cosine schedule after a warm-up; each image is flipped every other time on average."""
    from diffusers.optimization import get_cosine_schedule_with_warmup
    from peft.utils import set_peft_model_state_dict
    from safetensors.torch import load_file

    unet, folder = pipeline.unet, args.out / "lora"
    if (folder / LORA).exists():
        console.say(f"{folder} is there: not trained again")
        set_peft_model_state_dict(unet, load_file(folder / LORA))
        return
    given = setup.train_data["encoder_hidden_states"]
    both = torch.stack([setup.train_data["latents"], encode_images(pipeline, data.images.flip(-1))])
    scheduler, count = training_scheduler(pipeline), len(data.files)
    generator = torch.Generator().manual_seed(args.seed)
    optimizer = torch.optim.AdamW(parameters, lr=args.lr, weight_decay=WEIGHT_DECAY)
    total = args.epochs * -(-count // args.batch_size)
    schedule = get_cosine_schedule_with_warmup(optimizer, int(WARM_UP * total), total)
    with console.progress("fine-tuning", total, estimate="steps") as advance:
        for _ in range(args.epochs):
            for batch in torch.randperm(count, generator=generator).split(args.batch_size):
                x = both[torch.randint(2, (len(batch),), generator=generator), batch]
                noise = torch.randn(x.shape, generator=generator)
                t = torch.randint(scheduler.config.num_train_timesteps, (len(x),), generator=generator)
                conditions = torch.stack([given[int(i)] for i in batch])
                for parts in zip(*(column.split(args.rows) for column in (x, noise, t, conditions))):
                    loss = simple_loss(unet, scheduler, *(part.to(args.device) for part in parts))
                    (loss * len(parts[0]) / len(batch)).backward()
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                advance(1)
    unfinished = args.out / "lora.unfinished"
    unet.save_lora_adapter(unfinished)
    unfinished.rename(folder)


def simple_loss(unet: Any, scheduler: Any, x: Tensor, noise: Tensor, t: Tensor, conditions: Tensor) -> Tensor:
    velocity = scheduler.config.prediction_type == "v_prediction"
    target = scheduler.get_velocity(x, noise, t) if velocity else noise
    out = unet(scheduler.add_noise(x, noise, t), t, encoder_hidden_states=conditions).sample
    return torch.nn.functional.mse_loss(out, target)


def generate(
    pipeline: Any, data: Data, args: argparse.Namespace, role: str, apart_from: Samples | tuple[()] = ()
) -> Samples:
    """Images of seeds that no other role has, with prompts in random order, each as often as any other."""
    from safetensors.torch import load_file, save_file

    start, count = (0, args.learn) if role == "learn" else (args.learn, args.evaluate)
    lines = data.prompts if args.query_prompts is None else args.query_prompts.read_text().splitlines()
    different = [line for line in dict.fromkeys(lines) if line.strip()]
    random.Random(f"{args.seed} {role}").shuffle(different)
    prompts = [different[i % len(different)] for i in range(count)]
    file, unfinished = args.out / f"{role}.safetensors", args.out / f"{role}.unfinished"
    if not file.exists():
        console.say(f"generating {count} images: {role}")
        made = sample_pipeline(
            pipeline, prompts, range(start, start + count), steps=args.steps, guidance=args.guidance, size=args.size,
            batch_size=args.rows, apart_from=apart_from,
        )  # fmt: skip
        if args.method != "journey-trak":  # nobody looks at trajectories
            made = replace(made, trajectory=made.trajectory[:, :0], timesteps=made.timesteps[:, :0])
        columns = {"latents": made.latents, "trajectory": made.trajectory, "timesteps": made.timesteps}
        columns["seeds"] = torch.tensor(made.seeds)
        save_file({name: column.contiguous() for name, column in columns.items()}, unfinished)
        unfinished.rename(file)
    columns = load_file(file)
    given = {"encoder_hidden_states": encode_prompts(pipeline, prompts)}
    seeds = columns.pop("seeds").tolist()
    return Samples(**columns, seeds=seeds, given=given, prompts=prompts)


# --- what was found ---------------------------------------------------------------------------------------


def results(
    setup: Setup, data: Data, asked: Samples, scores: GroupScores, weights: Weights, args: argparse.Namespace
) -> None:
    ways, prompts = {"unweighted": None, "weighted": weights}, asked.prompts or []
    count, first = min(args.top, len(data.files)), range(min(12, len(asked)))
    tops = {name: scores.top(count, w) for name, w in ways.items()}
    with (args.out / "top.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["query", "seed", "prompt", "scores", "rank", "image", "score"])
        for q, (seed, prompt) in enumerate(zip(asked.seeds, prompts)):
            for name, top in tops.items():
                for r, (image, value) in enumerate(zip(top.ids[q], top.values[q].tolist()), 1):
                    writer.writerow([q, seed, prompt, name, r, image, value])
    best = tops["weighted"].ids
    console.show_table(
        "training images with the highest weighted scores",
        ["query", "prompt", "first", "second", "third"][: 2 + count],
        [[str(q), prompts[q], *map(str, best[q][:3])] for q in first],
    )
    panels = query_panels(
        setup,
        Rows(setup.eval_queries),
        scores,
        ways,
        which=first,
        count=min(5, count),
        names=[f"seed {s}" for s in asked.seeds],
        item=lambda i: Item(data.files[i], label=data.prompts[i], image=data.images[i]),
    )
    page = Page(
        "Which training images made it draw that?",
        f"{args.model} with LoRA of rank {args.rank} on {len(data.files):,} images; {args.method}, with and without "
        f"weights learned on {args.learn:,} generated images",
        queries=panels,
        weights=weights_panel(weights),
        provenance={name: str(value) for name, value in vars(args).items()},
    )
    print(f"Open {page.write(args.out / 'report.html').resolve()} in a browser.")


# --- the plan ---------------------------------------------------------------------------------------------


def planned(args: argparse.Namespace) -> str:
    """What a run will need, from shapes: of the UNet in the folder --model, or else of Stable Diffusion 1."""
    from diffusers import DDPMScheduler

    count = ARTBENCH if args.images is None else len(listed(args.images, args.prompt))
    unet, whole = on_meta(args)
    method = replace(methods.parse(args.method), projection=args.projection)
    task = Diffusion(DDPMScheduler(), timesteps=args.timesteps, rows=args.rows)
    found = plan(unet, task, n_examples=count, method=method, groups=f"consecutive({args.groups})")
    generated, twice = args.learn + args.evaluate, 2 if args.guidance > 1 else 1
    lines = [
        f"LoRA of rank {args.rank}: {found.parameters:,} parameters in {len(found.groups)} groups, on a UNet "
        f"of {whole:,}",
        "noisy images through the UNet:",
        f"  fine-tuning  {args.epochs * count:>11,}  forward and backward ({args.epochs} epochs × {count:,})",
        f"  generating   {generated * args.steps * twice:>11,}  forward ({generated:,} images × {args.steps} steps × "
        f"{twice})",
        f"  features     {count * args.timesteps:>11,}  forward and backward, no weight gradients ({count:,} × "
        f"{args.timesteps} timesteps)",
        f"  queries      {generated * args.timesteps:>11,}  the same ({generated:,} × {args.timesteps})",
    ]
    return "\n".join([*lines, "", str(found)])


def on_meta(args: argparse.Namespace) -> tuple[Any, int]:
    """The UNet with LoRA, without weights, and how many parameters the UNet itself has."""
    from diffusers import UNet2DConditionModel

    folder = Path(args.model)
    config = json.loads((folder / "unet" / "config.json").read_text()) if folder.is_dir() else SD1_UNET
    with torch.device("meta"):
        unet: Any = UNet2DConditionModel.from_config(config)
        whole = sum(p.numel() for p in unet.parameters())
        add_lora(unet, args.rank)
    return unet, whole


if __name__ == "__main__":
    try:
        main()
    except UndeError as e:
        console.fail(str(e))
        sys.exit(1)
