"""Label audits of other packages, each run by the Python of an environment of its own: no import of ours in here.

    python label_peers.py cleanlab|opendataval IN.npz OUT.npz

IN holds x, y (N,) with wrong labels, probabilities (N, C) out of sample, valid_x, valid_y with right labels. OUT holds
for each method its values (N,), low for suspicious labels, and its issues (N,) bool by the cut-off of the package.
"""

import sys

import numpy as np

MODELS = 100  # bagged ones of DataOob


def cleanlab(data):
    from cleanlab.filter import find_label_issues
    from cleanlab.rank import get_label_quality_scores

    y, p = data["y"], data["probabilities"]
    values = get_label_quality_scores(y, p)  # self-confidence, the default
    return {"cleanlab": (values, find_label_issues(y, p))}  # prune by noise rate, the default


def opendataval(data):
    import torch
    from opendataval.dataval import DataOob, KNNShapley
    from opendataval.experiment.util import oned_twonn_clustering
    from opendataval.metrics import accuracy
    from opendataval.model import ClassifierSkLearnWrapper
    from sklearn.linear_model import LogisticRegression

    x, valid_x = (torch.from_numpy(data[k]).float() for k in ("x", "valid_x"))
    classes = int(data["probabilities"].shape[1])
    y, valid_y = (torch.eye(classes)[torch.from_numpy(data[k])] for k in ("y", "valid_y"))
    out = {}
    for name, evaluator in (
        ("DataOob", DataOob(num_models=MODELS, random_state=0)),
        ("KNNShapley", KNNShapley(k_neighbors=10, random_state=0)),
    ):
        evaluator.input_data(x, y, valid_x, valid_y)
        if name == "DataOob":
            evaluator.input_model(ClassifierSkLearnWrapper(LogisticRegression, classes, max_iter=200))
            evaluator.input_metric(accuracy)
        values = np.asarray(evaluator.train_data_values().evaluate_data_values()).reshape(-1)
        issues = np.zeros(len(x), dtype=bool)
        issues[np.asarray(list(oned_twonn_clustering(values)[0]), dtype=int)] = True
        out[name] = values, issues
    return out


if __name__ == "__main__":
    package, source, target = sys.argv[1:]
    with np.load(source) as file:
        result = {"cleanlab": cleanlab, "opendataval": opendataval}[package](dict(file))
    arrays = {
        f"{name}, {part}": a for name, pair in result.items() for part, a in zip(("values", "issues"), pair)
    }
    np.savez(target, **arrays)
