"""Emoji from a file, and queries held out of training."""

from itertools import product

import numpy as np
import pytest
from experiments.datasets import emoji

from refusals import refused

SIZES = {"subject": 4, "style": 9, "background": 3}


@pytest.fixture
def file(tmp_path):
    rows = np.array(list(product(*map(range, SIZES.values()))))
    names = {
        "subject": np.array(["cat-face", "bear", "house", "hot-beverage"]),
        "style": np.array([f"set{i}" for i in range(9)]),
        "background": np.array(["white", "striped", "dotted"]),
    }
    captions = [
        f"a {names['subject'][s].replace('-', ' ')} in {names['style'][t]} style "
        f"on a {names['background'][b]} background"
        for s, t, b in rows
    ]
    path = tmp_path / "emoji.npz"
    np.savez(
        path,
        x=np.random.RandomState(0).randint(256, size=(108, 8, 8, 3)).astype(np.uint8),
        caption=np.array(captions),
        style_license=np.array(["MIT"] * 8 + ["CC-BY-4.0"]),
        **{a: rows[:, i].astype(np.uint8) for i, a in enumerate(SIZES)},
        **{f"{a}_names": names[a] for a in SIZES},
    )
    return path


def test_emoji_are_read_as_they_are(file):
    data, raw = emoji(file), np.load(file)
    assert (data.images == raw["x"]).all()
    for i in range(len(data)):
        assert (
            data.prompt(**{a: int(data.labels[a][i]) for a in SIZES}) == raw["caption"][i] == data.prompts[i]
        )
    assert len(data.train_categories["style"]) == 5 and len(data.validation_categories["style"]) == 4
    assert "set8: CC-BY-4.0" in data.licence
    assert data.prompt(background=1) == "on a striped background"


def test_contributors_share_the_category(file):
    data = emoji(file)
    truth = data.contributors({"style": np.array([7, 0])}, "style")
    assert [[n for n in range(108) if data.labels["style"][n] == s] for s in (7, 0)] == [
        np.flatnonzero(row).tolist() for row in truth
    ]


@pytest.mark.parametrize(("split", "styles"), [("train", range(5)), ("validation", range(5, 9))])
def test_held_out_combinations_are_not_trained_on(file, split, styles):
    data = emoji(file)
    rest, queries = data.hold_out(6, split, seed=3)
    assert len(queries) == 6 and len(rest) == 102
    assert set(queries.labels["style"]) <= set(styles)
    assert not set(queries.prompts) & set(rest.prompts)
    assert sorted(queries.prompts + rest.prompts) == sorted(data.prompts)
    for part in (rest, queries):  # pictures, prompts and labels stay together
        for image, prompt, style in zip(part.images, part.prompts, part.labels["style"]):
            i = data.prompts.index(prompt)
            assert (image == data.images[i]).all() and style == data.labels["style"][i]
    assert data.hold_out(6, split, seed=3)[1].prompts == queries.prompts
    assert data.hold_out(6, split, seed=4)[1].prompts != queries.prompts


def test_all_images_of_a_held_out_combination_leave(file):
    data = emoji(file)
    twice = data.take(np.tile(np.arange(108), 2))
    rest, queries = twice.hold_out(5)
    assert len(queries) == 10 and not set(queries.prompts) & set(rest.prompts)


def test_too_many_combinations_are_refused(file):
    data = emoji(file)
    refused("cannot hold out 8 combinations: the validation categories have 8", data.hold_out, 8)
