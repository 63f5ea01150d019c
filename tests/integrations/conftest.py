"""A tiny Stable Diffusion pipeline in a folder."""

import pytest


@pytest.fixture(scope="session")
def saved(tmp_path_factory):
    import sd_toy

    return sd_toy.save(tmp_path_factory.mktemp("pipeline"))
