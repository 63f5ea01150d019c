"""Stand-ins for the paper's data, a few pixels and words large."""

import json
import sys
from pathlib import Path

import numpy as np
from experiments.scale.study import Place
from PIL import Image

sys.path.append(str(Path(__file__).parents[1] / "integrations"))  # hf_toy and sd_toy

ESTIMATE = {"mean", "ci95", "ci95_total", "queries", "undefined"}


def place(tmp_path, folder, **more):
    return Place(
        data=str(folder),
        out=tmp_path / "out",
        results=tmp_path / "results",
        rows=4,
        memory="1GB",
        **more,
    )


def images(folder, classes, each, side=12, seed=0):
    """CLASS/number.png, every class with a colour of its own."""
    rng = np.random.default_rng(seed)
    for c, name in enumerate(classes):
        (folder / name).mkdir(parents=True)
        for i in range(each):
            pixels = rng.integers(0, 120, (side, side, 3)) + 40 * np.array([c == 0, c == 1, c > 1])
            Image.fromarray(pixels.astype(np.uint8)).save(folder / name / f"{i}.png")
    return folder


def captioned(folder, count, side=8):
    folder.mkdir(parents=True)
    rng, lines = np.random.default_rng(0), []
    for i in range(count):
        Image.fromarray(rng.integers(0, 256, (side, side, 3)).astype(np.uint8)).save(folder / f"{i}.png")
        lines.append(json.dumps({"file_name": f"{i}.png", "text": f"a fish {'abcdefgh'[i % 8]}"}))
    (folder / "metadata.jsonl").write_text("\n".join(lines))
    return folder


def tables(folder, rows, suffix="jsonl"):
    """A table of texts for each split."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, texts in rows.items():
        lines = [json.dumps({"text": text}) for text in texts]
        (folder / f"{split}.{suffix}").write_text("\n".join(lines) + "\n")
    return folder


def results(path):
    found = json.loads(Path(path).read_text())
    assert set(found) == {"results", "provenance"}
    return found["results"]


def check_patch(entry):
    """Tail-patch of one method."""
    [difference] = entry["differences"].values()
    assert set(difference) == ESTIMATE
    plain, weighted = (entry[kind]["per_token"]["mean"] for kind in ("unweighted", "weighted"))
    np.testing.assert_allclose(difference["mean"], weighted - plain, atol=1e-9)


def check_lds(entry):
    """One method of an LDS table, with every column of the study."""
    assert {"search", "fixed", "best"} <= set(entry["rules"])
    assert set(entry["unweighted"]) == ESTIMATE and len(entry["grid"]) >= 3
    for rule in entry["rules"].values():
        assert set(rule["estimate"]) == set(rule["difference"]) == ESTIMATE
    assert len(entry["rules"]["fixed"]["weights"]) == len(entry["groups"]) > 1
