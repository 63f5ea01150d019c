"""A pipeline of diffusers: prompts are generated first, pictures are encoded, and both are asked about."""

import pytest

pytest.importorskip("diffusers")
pytest.importorskip("peft")

import sd_toy
import torch

import pages
from unde.data import Rows
from unde.integrations.diffusers import (
    diffusion_setup,
    encode_images,
    encode_prompts,
    query_columns,
    sample_pipeline,
)
from unde.methods import DTRAK, JourneyTRAK

PROMPT = {"kind": "prompt", "text": "a red dog", "seed": 5}


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    folder = tmp_path_factory.mktemp("diffusion")
    pipeline = sd_toy.trained(sd_toy.load(sd_toy.save(folder)))
    setup = diffusion_setup(pipeline, sd_toy.pixels(8), sd_toy.PROMPTS * 2, timesteps=2)
    made = pages.session(setup, folder / "idx", DTRAK(projection="kron(4)"))
    made.pipeline = pipeline
    return made


def best(session, answer):
    return pages.values(session.rank({"answer": answer["answer"], "count": 8})["rows"][0])


def test_a_prompt_is_generated_with_its_seed(session):
    told, job = [], pages.quiet_job()
    tell = job.tell
    job.tell = lambda *said: (told.append(said), tell(*said))
    answer = pages.ask(session, PROMPT, job=job)
    assert [said[1:] for said in told if said[0] == "generating the image" and said[1:]][-1] == (50, 50)
    samples = sample_pipeline(session.pipeline, ["a red dog"], [5], progress=False)
    scores = session.index.score(Rows(query_columns(samples), session.setup.task.collate))
    assert best(session, answer) == pytest.approx(dict(enumerate(scores.total()[0].tolist())), rel=1e-3)
    shown = answer["asked"][0]
    assert "a red dog" in shown["html"] and "data:image/png" in shown["html"]
    assert shown["notes"] == ["Generated with seed 5."]


def test_a_picture_is_encoded_with_its_prompt(session):
    image = sd_toy.pixels(8)[3]
    picture = pages.encoded(image.permute(1, 2, 0).numpy())
    digest = session.builder.keep(picture)["picture"]
    answer = pages.ask(session, {"kind": "picture", "picture": digest, "text": "a fish"})
    latents = encode_images(session.pipeline, image[None], progress=False)  # noise follows from their bits
    prompt = encode_prompts(session.pipeline, ["a fish"])
    assert torch.allclose(latents[0], session.train.rows[3]["latents"], atol=1e-6)
    columns = {"latents": latents, "encoder_hidden_states": prompt, "text": ["a fish"]}
    [total] = session.index.score(Rows(columns, session.setup.task.collate)).total()
    assert best(session, answer) == pytest.approx(dict(enumerate(total.tolist())), rel=1e-3)
    large = session.builder.keep(pages.png((20, 12), "RGB", "white"))["picture"]  # as bright as can be
    [asked] = pages.ask(session, {"kind": "picture", "picture": large})["asked"]
    assert "resized from 20 × 12" in asked["notes"][0]


def test_what_is_generated_is_influenced_too(session):
    pages.ask(session, PROMPT)
    told = session.influenced(2, {}, pages.quiet_job())
    assert "asked in this session" in told["notes"][0]
    entry = session.answer(told["answer"]).of.entry(0)
    assert entry["question"]["kind"] in ("prompt", "picture")
    assert session.builder.recent(session.index.method)
    assert not session.builder.recent(JourneyTRAK())  # whose features are of a trajectory


def test_prompts_can_be_searched(session):
    session.train.read("texts", pages.quiet_job())
    found = session.train.matching({"text": "red"})
    assert torch.equal(found, torch.tensor(["red" in p for p in sd_toy.PROMPTS * 2]))
    assert session.describe()["asks"]["prompted"] is True
