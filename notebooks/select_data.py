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
# # Choose fine-tuning data for a target
#
# A model was trained on upright digits and should become better at digits that lie on their side. The pool holds
# upright, turned and mirrored digits, and nothing says which is which. Sixty examples of the target choose 10 % of
# the pool, in the manner of LESS. Training on them is compared with training on random examples and on the ones
# with the most similar hidden states. Needs `pip install 'unde[examples,tables]'`.

# %%
import tempfile

import torch
from sklearn.datasets import load_digits
from torch import nn

import unde
from unde.evaluate import compare_choices, representation_similarity
from unde.integrations.training import Recorder, read_record

folder = tempfile.mkdtemp()
pixels, labels = (torch.as_tensor(a) for a in load_digits(return_X_y=True))
images = (pixels.float() / 16).view(-1, 8, 8)
order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
kinds = {
    "upright": lambda x: x,
    "turned": lambda x: x.rot90(1, (1, 2)),
    "mirrored": lambda x: x.flip(2),
}


def digits(start, stop, kind="upright"):
    rows = order[start:stop]
    return kinds[kind](images[rows]).flatten(1), labels[rows]


upright = digits(0, 500)
parts = [digits(500 + 300 * i, 800 + 300 * i, kind) for i, kind in enumerate(kinds)]
pool = tuple(torch.cat(columns) for columns in zip(*parts))
target, measured = digits(1400, 1460, "turned"), digits(1460, 1797, "turned")
kind_of = [kind for kind in kinds for _ in range(300)]
print(len(pool[1]), "digits in the pool,", len(target[1]), "examples of the target")

# %% [markdown]
# ## The model, and a short training on some of the pool
#
# LESS scores the pool with a model that has seen a little of it. A `Recorder` keeps checkpoints, learning rates and
# Adam's second moments, which the index takes.


# %%
def fit(model, data, steps, lr, seed=0):
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    for step in range(steps):
        rows = torch.randint(len(data[1]), (16,), generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(data[0][rows]), data[1][rows]).backward()
        yield optimizer, step
        optimizer.step()


def fresh():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


base = fresh()
for _ in fit(base, upright, 600, 3e-3):
    pass
state = {name: value.clone() for name, value in base.state_dict().items()}


def accuracy(model, data):
    return float((model(data[0]).argmax(1) == data[1]).float().mean())


print(f"upright {accuracy(base, digits(1460, 1797)):.0%}, turned {accuracy(base, measured):.0%}")

some = torch.randperm(len(pool[1]), generator=torch.Generator().manual_seed(1))[:45]
warm = fresh()
warm.load_state_dict(state)
steps = fit(warm, tuple(column[some] for column in pool), 60, 1e-3)
optimizer, _ = next(steps)
with Recorder(f"{folder}/recorded", warm, optimizer, every=30):
    for _ in steps:
        pass

# %% [markdown]
# ## Choose
#
# The index holds the gradients of the pool. Each digit is a target of its own, and the targets choose in turns: the
# mean gradient of one large target would spend the budget on the digits with the largest errors. `unde select` does
# the same on the command line.

# %%
index = unde.Index.build(
    warm,
    unde.tasks.Classification(),
    pool,
    f"{folder}/pool",
    method="tracin",
    progress=False,
    **read_record(f"{folder}/recorded").options(),
)
targets = {str(digit): tuple(column[target[1] == digit] for column in target) for digit in range(10)}
chosen = unde.select(index, targets, budget="10%", strategy="round-robin")
print(chosen)
chosen.table.head()

# %% [markdown]
# ## Does it help?
#
# The base model is trained on each choice, with three seeds, and measured on other turned digits. Which kind the
# chosen digits are of is only known here because we made the pool.

# %%
alike = representation_similarity(warm, unde.tasks.Classification(), pool, target, layer="1")
choices = {
    "LESS": chosen.indices,
    "similar hidden states": alike.mean(0).topk(len(chosen.indices)).indices,
}


def train(rows, seed):
    model = fresh()
    model.load_state_dict(state)
    for _ in fit(model, tuple(column[torch.as_tensor(rows)] for column in pool), 60, 1e-3, seed):
        pass
    return model


@torch.no_grad()
def utility(model):
    return {"turned": -nn.functional.cross_entropy(model(measured[0]), measured[1], reduction="none")}


result = compare_choices(choices, train, utility, len(pool[1]), seeds=3, path=f"{folder}/models")
for row in result.rows():
    print("  ".join(f"{cell:24}" for cell in row))
for name, rows in choices.items():
    share = sum(kind_of[int(i)] == "turned" for i in rows) / len(rows)
    print(f"{name}: {share:.0%} of the choice are turned digits (a third of the pool is)")

# %% [markdown]
# The columns are the choice, its size, the loss on turned digits, and how much lower it is than after a random
# choice, with a 95 % interval. If a simple choice does as well, take the simple one. The page
# [Choose fine-tuning data](../docs/select.md) says what to do next.
