"""The examples in the docstrings of projections, groups, data and tasks run as printed."""

import doctest
import importlib

import pytest

MODULES = [
    "projection",
    "groups",
    "unet",
    "data",
    "errors",
    "tasks.base",
    "tasks.classification",
    "tasks.cutting",
    "tasks.identity",
    "tasks.syntax",
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_run_as_printed(name):
    found = doctest.testmod(importlib.import_module(f"unde.{name}"))
    assert found.attempted > 0
    assert found.failed == 0
