import doctest
import importlib
import pkgutil

import pytest

import unde.evaluate

MODULES = [f"unde.evaluate.{module.name}" for module in pkgutil.iter_modules(unde.evaluate.__path__)]
MADE = {"Comparison", "FineGrained"}  # by functions, and shown there
PUBLIC = [name for name in unde.evaluate.__all__ if name not in MADE]


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_the_docstrings_run(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_has_an_example(name):
    finder = doctest.DocTestFinder()
    found = finder.find(getattr(unde.evaluate, name), name)
    assert any(test.examples for test in found)
