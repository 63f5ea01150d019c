"""Hugging Face models as they come, small: what `test_huggingface.py` and its neighbours run over."""

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

import models
from cases import Case, images, ragged
from unde.data import Rows
from unde.tasks import CausalLM, MaskedLM, Seq2SeqLM, TokenClassification

pytest.importorskip("transformers")
SMALL = dict.fromkeys(["bos_token_id", "eos_token_id", "pad_token_id"], 0)
SMALL |= {"vocab_size": 23, "max_position_embeddings": 16}
SMALL |= {"hidden_size": 12, "intermediate_size": 16, "num_hidden_layers": 2, "head_dim": 4}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2}  # grouped queries


def language_model(family, **options):
    """A decoder of this family, by the names that transformers gives its classes."""

    def build():
        import transformers

        config = getattr(transformers, f"{family}Config")(**(SMALL | options))
        return getattr(transformers, f"{family}ForCausalLM")(config)

    return build


def gpt2(tied):
    def build():
        from transformers import GPT2LMHeadModel

        config = models.gpt2().config
        config.tie_word_embeddings = tied
        return GPT2LMHeadModel(config)

    return build


def bert():
    from transformers import BertConfig, BertForSequenceClassification

    layers = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    config = BertConfig(vocab_size=23, max_position_embeddings=16, num_labels=3, **layers)
    return BertForSequenceClassification(config)


def texts(n):
    """Texts of 3 to 12 tokens with a class."""
    return [
        {"input_ids": torch.randint(1, 23, (3 + 5 * i % 10,)), "labels": torch.tensor(i % 3)}
        for i in range(n)
    ]


def gemma3():
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    return Gemma3ForCausalLM(Gemma3TextConfig(**(SMALL | GEMMA)))


def opt():
    from transformers import OPTConfig, OPTForCausalLM

    sides = {"hidden_size": 12, "word_embed_proj_dim": 12, "ffn_dim": 16}
    tokens = {"vocab_size": 23, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 0}
    layers = {"num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 16}
    return OPTForCausalLM(OPTConfig(**sides, **tokens, **layers))


def padded(examples):
    """As transformers' DataCollatorWithPadding does it."""
    ids = [e["input_ids"] for e in examples]
    return {
        "input_ids": pad_sequence(ids, batch_first=True),
        "attention_mask": pad_sequence([torch.ones_like(x) for x in ids], batch_first=True),
        "labels": torch.stack([e["labels"] for e in examples]),
    }


def left_padded(examples):
    """Texts padded on the left, as tokenizers do for generation."""
    length = max(len(e["input_ids"]) for e in examples)
    rows = [[0] * (length - len(e["input_ids"])) + list(e["input_ids"]) for e in examples]
    masks = [[0] * (length - len(e["input_ids"])) + [1] * len(e["input_ids"]) for e in examples]
    return {"input_ids": torch.tensor(rows), "attention_mask": torch.tensor(masks)}


def encoder(family, head, **options):
    """A BERT of this family, by the names that transformers gives its classes."""

    def build():
        import transformers

        small = SMALL | {
            "num_labels": 3,
            "type_vocab_size": 1,
            "max_position_embeddings": 18,
            "pad_token_id": 1,
        }
        small = {k: v for k, v in small.items() if k not in ("num_key_value_heads", "head_dim")}
        config = getattr(transformers, f"{family}Config")(**(small | options))
        return getattr(transformers, f"{family}For{head}")(config)

    return build


def t5(**options):
    def build():
        from transformers import T5Config, T5ForConditionalGeneration

        small = {"vocab_size": 23, "d_model": 12, "d_kv": 4, "d_ff": 16, "num_layers": 2, "num_heads": 3}
        small |= {"relative_attention_num_buckets": 6, "relative_attention_max_distance": 9}
        return T5ForConditionalGeneration(T5Config(**(small | {"decoder_start_token_id": 0} | options)))

    return build


def bart(**options):
    def build():
        from transformers import BartConfig, BartForConditionalGeneration

        small = {"vocab_size": 23, "d_model": 12, "max_position_embeddings": 16, "decoder_start_token_id": 2}
        for side in ("encoder", "decoder"):
            small |= {f"{side}_layers": 1, f"{side}_attention_heads": 2, f"{side}_ffn_dim": 16}
        return BartForConditionalGeneration(BartConfig(**(small | options)))

    return build


def pairs(n):
    """Sources of 3 to 12 tokens and targets of 2 to 8, some of which are not asked for."""
    made = []
    for i in range(n):
        labels = torch.randint(3, 23, (2 + 3 * i % 7,))
        labels[0] = -100 if i % 3 == 1 else labels[0]
        made.append({"input_ids": torch.randint(3, 23, (3 + 5 * i % 10,)), "labels": labels})
    return made


def hidden(n):
    """Texts with a few tokens shown as token 4, and the labels that say what they were."""
    made = []
    for text in ragged(n):
        ids = text["input_ids"].clamp(min=5)
        asked = (torch.rand(len(ids)) < 0.3) | (torch.arange(len(ids)) == 1)
        made.append({"input_ids": ids.masked_fill(asked, 4), "labels": ids.masked_fill(~asked, -100)})
    return made


def tagged(n):
    """Texts with a class for most tokens."""
    made = []
    for text in ragged(n):
        ids = text["input_ids"].clamp(min=5)
        labels = torch.randint(3, (len(ids),)).masked_fill(torch.rand(len(ids)) < 0.3, -100)
        labels[1] = 2
        made.append({"input_ids": ids, "labels": labels})
    return made


MOE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
GEMMA = {"query_pre_attn_scalar": 4, "sliding_window": 4}
RELATIVE = {r"relative_attention_bias": "deferred"}

LANGUAGE = [
    Case("gpt2-tied", gpt2(True), ragged, CausalLM),
    Case("gpt2-untied", gpt2(False), ragged, CausalLM),
    Case("llama", language_model("Llama"), ragged, CausalLM),
    Case("llama-tied", language_model("Llama", tie_word_embeddings=True), ragged, CausalLM),
    Case("qwen2", language_model("Qwen2"), ragged, CausalLM),
    Case("qwen3", language_model("Qwen3"), ragged, CausalLM),
    Case("qwen3-tied", language_model("Qwen3", tie_word_embeddings=True), ragged, CausalLM),
    Case("mistral", language_model("Mistral", sliding_window=4), ragged, CausalLM),
]
MASKED = [
    Case("bert-mlm", encoder("Bert", "MaskedLM"), hidden, MaskedLM),
    Case("roberta-mlm", encoder("Roberta", "MaskedLM"), hidden, MaskedLM),
]
GATED = t5(feed_forward_proj="gated-gelu", tie_word_embeddings=False, num_layers=1)
SEQ2SEQ = [
    Case("t5", t5(), pairs, Seq2SeqLM, RELATIVE),
    Case("t5-gated-untied", GATED, pairs, Seq2SeqLM, RELATIVE),
    Case("bart", bart(), pairs, Seq2SeqLM),
]
TAGGERS = [Case("bert-tokens", encoder("Bert", "TokenClassification"), tagged, TokenClassification)]
GPT_OSS = language_model("GptOss", **(MOE | {"sliding_window": 4}))
DECODERS = [
    Case("gemma", language_model("Gemma"), ragged, CausalLM),
    Case("gemma2", language_model("Gemma2", **GEMMA), ragged, CausalLM),
    Case("gemma3", gemma3, ragged, CausalLM),
    Case("opt", opt, ragged, CausalLM),
    Case("mixtral", language_model("Mixtral", **MOE), ragged, CausalLM),
    Case("qwen2-moe", language_model("Qwen2Moe", shared_expert_intermediate_size=8, **MOE), ragged, CausalLM),
    Case("qwen3-moe", language_model("Qwen3Moe", norm_topk_prob=True, **MOE), ragged, CausalLM),
    Case("gpt-oss", GPT_OSS, ragged, CausalLM, {"sinks": "deferred"}),
]
FAMILIES = [*DECODERS, *MASKED, *SEQ2SEQ, *TAGGERS]
CLASSIFIERS = [
    Case("bert", bert, texts),
    Case("vit", models.vit, images(8), ways={r"cls_token|position_embeddings": "expanded"}),
    Case("resnet", models.resnet, images(16)),
]
BY_NAME = {case.name: case for case in [*LANGUAGE, *FAMILIES, *CLASSIFIERS]}


def make(case, dtype=torch.float64, examples=7):
    """Model, task and rows; texts with a class come with their own way to pad."""
    model, task, rows = case.make(dtype, examples)
    return model, task, Rows(rows.data, padded) if case.data is texts else rows


def their_gradients(model, rows):
    """{parameter: (N, *shape)} of the loss that transformers computes itself, one example at a time."""
    named = {n: p for n, p in model.named_parameters() if p.requires_grad}
    found = {n: [] for n in named}
    for i in range(len(rows)):
        batch = rows.batch([i])
        labels = batch["labels"] if "labels" in batch else batch["input_ids"]
        loss = model(**(batch | {"labels": labels})).loss
        grads = torch.autograd.grad(loss, list(named.values()))
        for n, g in zip(named, grads):
            found[n].append(g.detach())
    return {n: torch.stack(g) for n, g in found.items()}


def assert_rounded(features, truth, rough, units):
    """No further off the truth than `rough`, gradients by torch in bfloat16, which keeps 8 bits.

    A batch rounds differently than single examples, so a unit may be off by half as much again and by the
    rounding of its own entries. Norms are over all examples: single ones can be lucky.
    """
    for u in units:
        exact = truth[u.name].flatten(1)
        ours = (features[:, u.columns] - exact).norm()
        theirs = (rough[u.name].flatten(1).float() - exact).norm()
        assert ours <= 1.5 * theirs + 2**-8 * exact.norm(), (
            f"{u.name}: off by {ours:.3g}, torch by {theirs:.3g}"
        )
