"""A page on a small classifier and one on a small language model, each made once for a file of tests."""

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("httpx")

import pages


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    return pages.session(pages.classification(), tmp_path_factory.mktemp("classifier") / "idx")


@pytest.fixture(scope="module")
def language(tmp_path_factory):
    pytest.importorskip("transformers")
    return pages.session(pages.language(), tmp_path_factory.mktemp("language") / "idx")


@pytest.fixture(scope="module")
def pictures(classifier):
    with pages.client(classifier) as made:
        yield made


@pytest.fixture(scope="module")
def texts(language):
    with pages.client(language) as made:
        yield made
