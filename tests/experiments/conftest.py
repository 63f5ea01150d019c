"""Tests that read data by the datasets library have a cache of their own."""

import pytest


@pytest.fixture(autouse=True)
def _datasets_cache(request, tmp_path, monkeypatch):
    if "scale_toy" in vars(request.module):
        monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
