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
# # Finding wrong labels
#
# The model finds a wrong label unlikely, and other training examples speak against it.
# Here every tenth label of 1,200 real digits is made wrong, and we look for them. Needs `pip install
# 'unde[examples]'`.

# %%
import tempfile

import torch
from PIL import Image
from sklearn.datasets import load_digits
from torch import nn

import unde
from unde.index.labels import label_rankings

torch.manual_seed(0)
pixels, true = (torch.as_tensor(a) for a in load_digits(return_X_y=True))
images = (pixels.float() / 16).view(-1, 1, 8, 8)
labels = true.clone()
wrong = torch.zeros(1200, dtype=torch.bool)
wrong[::10] = True
labels[:1200][wrong] = (labels[:1200][wrong] + torch.randint(1, 10, (120,))) % 10

# %% [markdown]
# ## A model that has fitted them

# %%
model = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
    nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(512, 10),
)  # fmt: skip
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for _ in range(12):
    for batch in torch.randperm(1200).split(64):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
        optimizer.step()
with torch.no_grad():
    correct = (model(images[1200:]).argmax(1) == true[1200:]).float().mean()
print(f"accuracy on other digits: {correct:.1%}")

# %% [markdown]
# ## An index, and an audit of the labels

# %%
folder = tempfile.mkdtemp()
index = unde.Index.build(
    model,
    unde.tasks.Classification(),
    (images[:1200], labels[:1200]),
    f"{folder}/digits",
    progress=False,
)
frame = index.audit_labels(progress=False)
count, precision = int(frame.is_label_issue.sum()), frame.attrs["expected_precision"]
print(f"{count} labels look wrong, expected precision {precision:.0%}")
for name, ranking in label_rankings(index, progress=False).items():
    print(f"{name}: AUC {ranking.auc(true[:1200]):.3f}")

# %% [markdown]
# Of the first so many suspects, how many are wrong indeed? By chance it would be a tenth.

# %%
suspects = torch.tensor(frame.sort_values("label_quality").index.to_numpy())
for first in (20, 60, 120):
    print(f"{first:>4} suspects: {int(wrong[suspects[:first]].sum())} wrong labels")

# %% [markdown]
# ## Look at them
#
# The twenty first suspects, and the label that they carry:


# %%
def sheet(which):
    row = torch.cat([nn.functional.pad(images[i, 0], (1, 1, 1, 1), value=0.5) for i in which], 1)
    picture = Image.fromarray((row * 255).byte().numpy())
    return picture.resize((picture.width * 4, picture.height * 4), Image.Resampling.NEAREST)


print(labels[suspects[:20]].tolist())
sheet(suspects[:20])

# %% [markdown]
# Who speaks against the first one? Its opponents carry the label that would be right more often than not.

# %%
first = suspects[:1]
against = index.score((images[first], labels[first])).top(5, largest=False)
print(
    f"labelled {int(labels[first])}, is a {int(true[first])}; opponents:", labels[against.indices[0]].tolist()
)
