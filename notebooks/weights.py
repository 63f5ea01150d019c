# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Weights, and whether to believe them
#
# Scores are sums over groups of parameters. Weights say how much each group counts; they are learned without
# labels. Whether they help is measured: against models that are retrained on parts of the data. Here the models
# are so small that this takes seconds. Needs `pip install 'unde[examples]'`.

# %%
import tempfile

import torch
from sklearn.datasets import load_digits
from torch import nn

import unde

folder = tempfile.mkdtemp()
x, y = (torch.as_tensor(a) for a in load_digits(return_X_y=True))
x = x.float() / 16
n, queries = 600, (x[600:660], y[600:660])


def train(rows, seed):
    """A model trained on some of the examples."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(80):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
    return model


task = unde.tasks.Classification()
model = train(torch.arange(n), seed=0)
index = unde.Index.build(model, task, (x[:n], y[:n]), f"{folder}/digits", method="trak", progress=False)

# %% [markdown]
# ## What the groups say
#
# `by_group` has the parts of every score, and they add up to it.

# %%
scores = index.score(queries)
parts = scores.by_group()  # (queries, examples, groups)
print(scores.groups, tuple(parts.shape))
print("largest difference:", float((parts.sum(2) - scores.total()).abs().max()))

# %% [markdown]
# ## Learned weights
#
# Training examples are perturbed, and weights are sought with which they find themselves. One index serves both
# methods. A line says what the weights do; only retrained models tell whether they help.

# %%
weights = {method: index.learn_weights(method=method) for method in ("tracin", "trak")}
for method, w in weights.items():
    print(method, dict(zip(w.groups, [round(v, 2) for v in w.values.tolist()])))

# %% [markdown]
# ## Do scores predict retrained models?
#
# LDS, the linear datamodeling score: models are retrained on random halves, and for each query the correlation is
# taken between how well they do on it and the sum of the scores of the examples they had.


# %%
def utility(model):
    """Higher is better: −loss of each query."""
    with torch.no_grad():
        return {"eval": -task.loss(model, queries)}


bank = unde.evaluate.Bank.run(f"{folder}/bank.npz", train=train, utility=utility, n_train=n, subsets=24)
masks, measured = bank.masks, bank.utility["eval"]
for method, w in weights.items():
    print(method)
    print(unde.evaluate.compare(index.score(queries, method=method), w, masks, measured), end="\n\n")

# %% [markdown]
# The first interval is over queries, the second also counts the noise of the retrained models and is the one to
# believe: 24 models are few. The same on models that are larger is in the documentation, under results.
