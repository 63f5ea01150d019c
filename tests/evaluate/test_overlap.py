"""Overlaps of queries with training data against a slow search, on texts, images and rows."""

import random
import re

import pytest
import torch

from refusals import refused
from unde import Setup
from unde.evaluate.overlap import EXACT, NEAR, SHINGLE, SPAN, find_overlaps, text_overlaps
from unde.tasks import Classification


def words(text):
    return re.findall(r"\w+", text.lower())


def longest_run(a, b):
    """The longest common run of words, place by place."""
    best = 0
    for i in range(len(a)):
        for j in range(len(b)):
            n = 0
            while i + n < len(a) and j + n < len(b) and a[i + n] == b[j + n]:
                n += 1
            best = max(best, n)
    return best


def test_texts_against_a_slow_search():
    draw = random.Random(0)
    some = [f"w{i}" for i in range(12)]  # few words, so that runs repeat
    train = [" ".join(draw.choices(some, k=draw.randint(3, 40))) for _ in range(25)]
    queries = [" ".join(draw.choices(some, k=draw.randint(6, 30))) + "!" for _ in range(15)]
    queries += [train[3].upper(), train[4] + " " + train[5], "no such words at all here"]
    result = text_overlaps(train, queries, span_words=SHINGLE)
    assert all(o.kind in (EXACT, NEAR, SPAN) for o in result)
    for q, query in enumerate(queries):
        slow = {}
        asked = words(query)
        shingles = {tuple(asked[i : i + SHINGLE]) for i in range(len(asked) - SHINGLE + 1)}
        for n, text in enumerate(train):
            held = words(text)
            common = shingles & {tuple(held[i : i + SHINGLE]) for i in range(len(held) - SHINGLE + 1)}
            if common:
                slow[n] = len(common) / len(shingles), longest_run(asked, held)
        fast = {o.example: (o.share, o.words) for o in result if o.query == q}
        assert all(fast[n] == slow[n] for n in fast) and len(fast) == min(5, len(slow))
        assert not fast or min(v for v in fast.values()) >= min(sorted(slow.values())[-5:])
        assert all(len(words(o.passage)) == o.words for o in result if o.query == q)
    kinds = {o.query: o.kind for o in reversed(result)}
    assert kinds[15] == EXACT and len(queries) - 1 not in kinds


def test_short_runs_do_not_count_and_short_texts_are_compared_as_they_are():
    train = ["a b c d e f g h i j k l m n o p", "Yes, we can."]
    query = "1 2 3 4 5 6 7 8 9 a b c d e f g h 10 11 12"
    assert not text_overlaps(train, [query])
    (one,) = text_overlaps(train, [query], span_words=8)
    assert (one.kind, one.words, one.passage) == (SPAN, 8, "a b c d e f g h")
    assert text_overlaps(train, ["yes we can"])[0].kind == EXACT and not text_overlaps(train, ["yes we"])
    refused("expected at least 5", text_overlaps, train, [query], span_words=2)


@pytest.fixture
def images():
    g = torch.Generator().manual_seed(0)
    x = torch.rand(40, 3, 8, 8, generator=g)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())
    return Setup(model.append(torch.nn.Linear(8, 2)), Classification(), (x, torch.zeros(40).long()))


def test_images_are_found_again_under_another_label_noisy_and_mirrored(images):
    x = images.train_data[0]
    noisy = x[9] + 0.02 * torch.randn(3, 8, 8, generator=torch.Generator().manual_seed(1))
    other = torch.rand(3, 8, 8, generator=torch.Generator().manual_seed(2))
    queries = torch.stack([x[5], noisy, x[11].flip(-1), other])
    result = find_overlaps(images, images.rows((queries, torch.ones(4).long())))
    assert [(o.query, o.example, o.kind) for o in result][:2] == [(0, 5, EXACT), (1, 9, NEAR)]
    assert {o.query for o in result} <= {0, 1, 2}


def test_rows_of_a_table_are_compared_by_their_values():
    x = torch.randn(30, 5, generator=torch.Generator().manual_seed(0))
    setup = Setup(torch.nn.Linear(5, 2), Classification(), (x, torch.zeros(30).long()))
    (one,) = [o for o in find_overlaps(setup, setup.rows((x[7:8], torch.ones(1).long()))) if o.kind == EXACT]
    assert one.example == 7


def test_capital_letters_that_become_two_characters_and_one_text_for_a_list():
    train = ["İstanbul saw the army of the north in the year 1803 and wrote it down"]
    (one,) = text_overlaps(
        train, ["İİ He said: the army of the north in the year 1803, indeed"], span_words=8
    )
    assert one.passage == "the army of the north in the year 1803"
    refused("train_texts is one text: expected a list", text_overlaps, train[0], train)
