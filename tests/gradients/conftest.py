import pytest


@pytest.fixture(autouse=True, scope="module")
def _small_models(one_thread):
    pass
