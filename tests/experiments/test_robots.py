"""The robots: structure, sameness, and that each attribute can be seen in the pictures."""

import hashlib
from collections import Counter
from importlib.metadata import version
from importlib.util import find_spec

import numpy as np
import pytest

pytest.importorskip("PIL")
if find_spec("robohash") is None:  # only its files are read
    pytest.skip("robohash is not installed", allow_module_level=True)

from experiments.datasets import pretraining_robots, robot_queries, robots, scenes
from experiments.datasets.robot_sets import CATEGORIES, OTHER
from experiments.datasets.styles import OTHER_STYLES, STYLES

from refusals import refused
from unde.evaluate import recall_at_k

ATTRIBUTES = ("subject", "style", "background")


@pytest.fixture(scope="module")
def data():
    return robots()


def digest(images):
    return hashlib.sha256(np.ascontiguousarray(images).tobytes()).hexdigest()[:16]


def test_three_attributes_of_ten_categories_of_twenty_images(data):
    assert data.images.shape == (600, 32, 32, 3) and data.images.dtype == np.uint8
    shown = Counter()
    for i in range(600):
        [attribute] = [a for a in ATTRIBUTES if data.labels[a][i] >= 0]  # one and only one
        category = int(data.labels[attribute][i])
        assert data.prompts[i] == data.categories[attribute][category]
        shown[attribute, category] += 1
    assert shown == {(a, c): 20 for a in ATTRIBUTES for c in range(10)}
    assert len({image.tobytes() for image in data.images}) == 600


def test_contributors_of_a_query_are_the_twenty_of_each_of_its_categories(data):
    queries = data.queries("validation")
    assert len(queries.prompts) == 500
    for attribute in ATTRIBUTES:
        truth = data.contributors(queries.labels, attribute)
        assert truth.shape == (500, 600) and (truth.sum(axis=1) == 20).all()
        for q, n in np.argwhere(truth)[::97]:
            assert data.prompts[n] in queries.prompts[q]
        best = np.argsort(~truth, axis=1, kind="stable")[:, :10]
        assert recall_at_k(best, truth).mean == 1.0


def test_queries_name_categories_of_their_split_only(data):
    assert data.train_categories["style"] == data.categories["style"][:5]
    assert data.validation_categories["style"] == data.categories["style"][5:]
    for split, names in (("train", data.train_categories), ("validation", data.validation_categories)):
        queries = data.queries(split)
        assert Counter(Counter(queries.prompts).values()) == {4: 125}
        for q in range(0, 500, 41):
            style, rest = queries.prompts[q].split(" of ", 1)
            subject, background = rest.split(", ")
            assert (
                style in names["style"] and subject in names["subject"] and background in names["background"]
            )
            assert style == data.categories["style"][queries.labels["style"][q]]


def test_queries_for_one_attribute_leave_the_others_open(data):
    prompts, labels = data.queries("train", ["background"], repeats=40)
    assert Counter(prompts) == dict.fromkeys(data.train_categories["background"], 40)
    assert (labels["subject"] == -1).all() and (labels["style"] == -1).all()
    assert not data.contributors(labels, "subject").any()  # −1 is no category, though images have it too
    assert (data.contributors(labels, "background").sum(axis=1) == 20).all()


def test_another_seed_gives_other_pictures_of_the_same(data):
    other = robots(seed=1)
    assert other.prompts == data.prompts and all(
        (other.labels[a] == data.labels[a]).all() for a in ATTRIBUTES
    )
    assert not {i.tobytes() for i in other.images} & {i.tobytes() for i in data.images}


@pytest.mark.skipif(version("robohash") != "2.0", reason="the digests are of the art of robohash 2.0")
def test_every_machine_draws_the_same_bytes(data):
    """Also seen with NumPy 1.26 and 2.4, Pillow 10 and 13, with and without vector instructions."""
    lists = (scenes.SUBJECTS.values(), STYLES.values(), scenes.BACKGROUNDS.values())
    large = [scenes.render(*parts, 64, "digest") for parts in zip(*lists)]
    assert digest(data.images) == "c77deab83c3867a7"
    assert digest(large) == "5da089ad1e4874aa"
    assert digest(pretraining_robots(60).images) == "eb7f1c05cdc6ccc7"


def test_both_sizes_show_the_same_picture(data):
    def halved(image):
        return image.reshape(32, 2, 32, 2, 3).mean(axis=(1, 3))

    other = list(scenes.OTHER_BACKGROUNDS.values())
    for i, subject in enumerate(scenes.SUBJECTS.values()):
        small, large = (
            scenes.render(subject, STYLES["a cyanotype"], other[i], size, f"{i}").astype(float)
            for size in (32, 64)
        )
        moved = np.roll(small, 2, axis=1)
        assert np.abs(halved(large) - small).mean() < 0.5 * np.abs(halved(large) - moved).mean()


def test_pretraining_shows_nothing_of_the_ten_categories():
    for attribute in ATTRIBUTES:
        assert not set(CATEGORIES[attribute]) & set(OTHER[attribute])
    assert not set(STYLES.values()) & set(OTHER_STYLES.values())
    here, there = (
        {
            f
            for pattern in patterns.values()
            if isinstance(pattern, str)
            for f in scenes._matches(f"backgrounds/{pattern}.png")
        }
        for patterns in (scenes.BACKGROUNDS, scenes.OTHER_BACKGROUNDS)
    )
    assert len(here) == 10 and len(there) == 7 and not here & there
    # what makes a subject itself: the face of robots, monsters and droids, the hat or hair of people, the cat
    own = ("#02Face/", "#03Faces/", "#01BaseFace/", "#Top/", "#00body/")
    here, there = (
        [
            f
            for s in subjects.values()
            for p in s.parts
            if any(o in p for o in own)
            for f in scenes._matches(f"sets/{p}")
        ]
        for subjects in (scenes.SUBJECTS, scenes.OTHER_SUBJECTS)
    )
    assert len(here) == len(set(here)) == 10 and len(there) == 24 and not set(here) & set(there)


def test_pretraining_prompts_name_what_is_shown():
    data = pretraining_robots(300)
    named = Counter()
    for i, prompt in enumerate(data.prompts):
        parts = {a: data.categories[a][data.labels[a][i]] for a in ATTRIBUTES}
        shown = frozenset(a for a in ATTRIBUTES if parts[a] in prompt)
        named[shown] += 1
        assert data.prompt(**{a: int(data.labels[a][i]) for a in shown}) == prompt
        assert "style" in shown or parts["style"] == "a drawing"
    assert len(named) == 7 and 120 < named[frozenset(ATTRIBUTES)] < 180  # half of them name everything
    assert all(len(set(data.labels[a])) == len(data.categories[a]) for a in ATTRIBUTES)
    assert (pretraining_robots(20).images == data.images[:20]).all()  # more images do not change the first


def test_attributes_can_be_seen_in_combinations_never_seen_together():
    linear = pytest.importorskip("sklearn.linear_model")

    def pictures(seed, repeats):
        splits = [robot_queries(split, repeats, seed=seed) for split in ("train", "validation")]
        labels = {a: np.concatenate([s.labels[a] for s in splits]) for a in ATTRIBUTES}
        return np.concatenate([s.images for s in splits]).reshape(250 * repeats, -1) / 255, labels

    x, seen = pictures(seed=1, repeats=2)
    z, new = pictures(seed=2, repeats=1)
    held = np.random.RandomState(0).permutation(250)[:50]
    train = ~np.isin(np.arange(500) // 2, held)
    accuracy = {}
    for attribute in ATTRIBUTES:
        model = linear.RidgeClassifier(100.0).fit(x[train], seen[attribute][train])
        accuracy[attribute] = model.score(z[held], new[attribute][held])
    # chance is 0.1, or 0.2 for one who knows the split; pixels alone give 1.0, 0.78 and 0.72
    assert accuracy["style"] > 0.95 and accuracy["subject"] > 0.65 and accuracy["background"] > 0.6, accuracy


def test_the_licence_names_every_artist(data):
    for artist in ("Zikri Kader", "Hrvoje Novakovic", "Julian Peter Arias", "David Revoy", "Pablo Stanley"):
        assert artist in data.licence


def test_mistakes_are_named(data, monkeypatch):
    refused("size is 48: the pictures are drawn at 32 or 64", robots, size=48)
    refused(r"unknown attribute 'styles'.*Did you mean 'style'", data.contributors, data.labels, "styles")
    refused("unknown split 'test'", data.queries, "test")
    scenes._matches.cache_clear()
    monkeypatch.setattr(scenes, "find_spec", lambda name: None)
    refused(r"pip install 'unde\[examples\]'", robots)
