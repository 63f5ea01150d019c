"""The live page of an index that was calibrated."""

from dataclasses import replace

import numpy as np
import torch

import toy
import unde
from unde.methods import EKFAC
from unde.tasks import Classification
from unde.ui.explorer.app import page
from unde.ui.explorer.session import Session


def test_the_page_takes_the_setting_and_weights_of_the_calibration(tmp_path):
    model, train = toy.net(), toy.data(22)
    index = toy.build(tmp_path / "i", model=model, method=EKFAC(projection="none"))
    rng = np.random.default_rng(0)
    bank = rng.random((6, 22)) < 0.5, rng.random((6, 12))
    made = index.calibrate(queries=toy.data(12, seed=3), bank=bank, baselines=False)
    weights = unde.Weights(torch.linspace(0.5, 1.5, len(index.groups)), list(index.groups.names))
    index._calibration = replace(made, weights=weights)
    session = Session(index, unde.Setup(model, Classification(), train, eval_queries=toy.data(5, seed=4)))
    assert session.calibration == str(index.calibration)
    assert next(iter(session.methods.values())) == made.method
    assert session.describe()["methods"][0]["damping"] == getattr(made.method, "damping", None)
    torch.testing.assert_close(session.bases["calibrated"], weights.values)
    features = index.features(toy.data(2, seed=4))
    assert session._score(features, made.method).default_weights is weights
    shown = page(session.title, 22, session.calibration)
    assert 'id="calibration"' in shown and "retrained models" in shown
    plain = Session(index.uncalibrated(), session.setup)
    assert plain.calibration is None and "calibrated" not in plain.bases
    assert 'id="calibration"' not in page(plain.title, 22, plain.calibration)
