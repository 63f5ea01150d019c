"""A language model of Hugging Face and a file of texts as a Setup, without Python to write."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from unde import console
from unde.errors import UndeError, explain
from unde.integrations import model_types as kinds
from unde.integrations import require
from unde.integrations.documents import SUFFIXES, Texts, TextSequences, check_file, pieces
from unde.integrations.examples import ANSWERS, causal_examples
from unde.integrations.labelled import LabelledExamples, RecordReader, classified, tagged, translations
from unde.integrations.model_types import predictor
from unde.integrations.preferences import LENGTH, holds_pairs, pair_pieces, read_pairs
from unde.integrations.trainer import home_of, newest
from unde.setup import Ask, Setup
from unde.store.files import read_json
from unde.tasks import Classification, Preference, Reward, Task
from unde.tasks.tokens import text_config, token_limits

SEQ_LEN = 512
ModelLike = str | os.PathLike[str] | nn.Module
_ADAPTER = "adapter_config.json"
_TOKENIZER = (
    *("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt"),
    *("spiece.model", "tokenizer_config.json"),
)


def hf_setup(
    model: ModelLike,
    data: Texts,
    *,
    text_field: str | None = None,
    target_field: str | None = None,
    seq_len: int | None = None,
    learn_queries: Texts | None = None,
    eval_queries: Texts | None = None,
    query_field: str | None = None,
    tokenizer: Any = None,
    trust_remote_code: bool = False,
    loss_on: str = ANSWERS,
    beta: float = 0.1,
) -> Setup:
    """Everything unde needs to know about a language model and its training texts.

    The task follows from the model: `CausalLM`, `MaskedLM`, `Seq2SeqLM` (records with `source` and `target`), for
    classifiers of texts `Classification` and its kin (records with `text` and `label`), and for those of tokens
    `TokenClassification` (lists of `tokens` and `ner_tags`). Queries of the last three may come without a target: they
    ask about what the model itself says.

    `model` is a folder that `save_pretrained` wrote, the folder of a PEFT adapter, that of a run of Trainer (its newest
    checkpoint), a name on the hub, or a model that is loaded already, together with its `tokenizer`. `data` and the
    queries are files (.jsonl, .json, .csv, .txt, .parquet; all but the last also .gz), folders of `datasets`, or lists
    of texts or dicts. Texts are cut into consecutive sequences of `seq_len` tokens (512, or the model's context if that
    is shorter), nothing dropped; each is an example with the id "document:part", the document named by its field "id",
    or else by its line. A record is a `text`, a conversation (`messages`, through the tokenizer's chat template, with a
    loss on what the assistant says), or a `prompt` with its `completion`, which alone has a loss. Other names are given
    as `text_field` and `target_field`, that of queries as `query_field`. Code that comes with a model is run with
    `trust_remote_code=True` alone, and pickles are never loaded. With loss_on="all" conversations and prompts carry
    loss on all tokens, which is TRL's default for conversations.

    Records with `chosen` and `rejected` answers (see `read_pairs`) are those of a reward model, `Reward`, if the model
    classifies texts, and else of DPO with `beta`, `Preference`; then they need reference log-probabilities
    (`add_reference`). Queries may be pairs or texts.
    """
    for texts in (data, learn_queries, eval_queries):
        if isinstance(texts, (str, os.PathLike)):
            check_file(Path(texts).expanduser())  # before a large model is loaded
    name = "the model" if isinstance(model, nn.Module) else newest(os.path.expanduser(model))
    if isinstance(model, nn.Module) and tokenizer is None:
        raise UndeError("a model that is loaded already needs its tokenizer=")
    if tokenizer is None or isinstance(tokenizer, (str, os.PathLike)):
        tokenizer = _load_tokenizer(name if tokenizer is None else os.fspath(tokenizer), trust_remote_code)
    loaded = model if isinstance(model, nn.Module) else load_model(name, trust_remote_code)
    if not any(p.requires_grad for p in loaded.parameters()):
        raise UndeError(
            f"{name} has no trainable parameter, so there is no gradient to attribute with: load an adapter with "
            "is_trainable=True, or call requires_grad_() on what was trained"
        )
    kind = kinds.kind_of_model(loaded)
    config = text_config(loaded)
    if kind is kinds.SEQUENCE and getattr(config, "pad_token_id", 0) is None:
        config.pad_token_id = tokenizer.pad_token_id  # by which it tells where a text ends
    paired = kind in (kinds.CAUSAL, kinds.SEQUENCE) and holds_pairs(data)
    rewarded = paired and kind is kinds.SEQUENCE
    pair_task = Reward() if rewarded else Preference(beta)
    task = pair_task if paired else kinds.task_for(kind, loaded, tokenizer)
    rows, context = _rows(loaded, tokenizer, name), token_limits(loaded)[1]
    if seq_len is not None and seq_len > context:
        raise UndeError(
            f"sequences of {seq_len} tokens, but the context of {name} is {context}: --seq-len {context}"
        )
    length = min(LENGTH if paired else SEQ_LEN, context) if seq_len is None else seq_len
    classes = getattr(config, "label2id", None) or {}
    says = predictor(loaded, task, length)

    def examples(
        texts: Texts, text: str | None, target: str | None, asked: bool = False
    ) -> TextSequences | LabelledExamples:
        if kind is kinds.MASKED:
            return TextSequences(texts, tokenizer, length, rows, text or "text", framed=True)
        if paired and (rewarded or holds_pairs(texts)):
            return read_pairs(texts, tokenizer, length, rewarded, rows)
        if kind is kinds.CAUSAL:
            return causal_examples(texts, tokenizer, length, rows, text, target, loss_on)
        reader = RecordReader(tokenizer, length, rows, says if asked else None)
        if kind is kinds.SEQ2SEQ:
            return translations(texts, reader, text, target)
        if kind is kinds.TOKEN:
            return tagged(texts, reader, text, target, classes)
        return classified(texts, reader, text, target, classes, not isinstance(task, Classification))

    def queries(texts: Texts | None) -> TextSequences | LabelledExamples | None:
        if texts is None:
            return None
        listed: Any = [] if isinstance(texts, (str, os.PathLike)) else texts
        typed = len(listed) > 0 and all(isinstance(t, str) for t in listed)
        files = (t for t in listed if typed and t.endswith(SUFFIXES))
        file = next((t for t in files if Path(t).expanduser().is_file()), None)
        if file is not None:
            raise UndeError(
                f"the query {file!r} is a file, and a text was expected: ask what is in it with --queries {file}"
            )
        target, field = None if typed else target_field, query_field or text_field
        return examples(texts, field, target, asked=True)

    train = examples(data, text_field, target_field)
    names = ("input_ids", "labels") if kind is kinds.SEQ2SEQ else ("input_ids",)  # the last has a loss

    def show(example: Any) -> str:
        if "chosen_ids" in example:
            return "".join(pair_pieces(tokenizer, example))
        return " → ".join(tokenizer.decode(example[n].tolist(), skip_special_tokens=True) for n in names)

    def show_pieces(example: Any) -> list[str]:
        if "chosen_ids" in example:
            return pair_pieces(tokenizer, example)
        return pieces(tokenizer, example[names[-1]].tolist())

    return Setup(
        loaded,
        task,
        train,
        learn_queries=queries(learn_queries),
        eval_queries=queries(eval_queries),
        show=show,
        pieces=show_pieces,
        ids=train.ids,
        ask=Ask(text=lambda text: queries([text])),
    )


def load_model(name: str, trust_remote_code: bool = False) -> nn.Module:
    """A language model in float32, from a folder or the hub, as its config names it; an adapter with its base model."""
    transformers = require("transformers")
    adapter = (Path(name) / _ADAPTER).exists()
    _check_folder(name, ("config.json", _ADAPTER), "model")
    _refuse_pickles(name)
    safe = {"trust_remote_code": trust_remote_code, "use_safetensors": True}
    missing: list[str] = []
    try:
        if adapter:
            _refuse_pickles(_base(name))
            kind, model = _adapted(name, safe)
        else:
            config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
            kind = kinds.kind_of(config)
            auto = getattr(transformers, f"AutoModelFor{kind.auto}")
            model, info = auto.from_pretrained(name, output_loading_info=True, **safe)
            missing = sorted(info["missing_keys"])
    except Exception as e:  # whatever a foreign file, an old format or a missing network leads to
        raise _cannot("model", name, e, trust_remote_code) from e
    if missing:
        raise UndeError(
            f"{name} does not hold all weights of a {kind.label}: {missing[0]!r} is missing"
            + (f" (and {len(missing) - 1} more)" if missing[1:] else "")
            + f". Save it with AutoModelFor{kind.auto} … save_pretrained"
        )
    model.config.use_cache = False  # keys and values of past tokens are for generating
    return model.float()  # half precision is very slow on a CPU, and loses small gradients anywhere


def _adapted(name: str, safe: Mapping[str, Any]) -> tuple[kinds.Kind, Any]:
    transformers, peft = require("transformers"), require("peft", "peft")
    base, task_type = _base(name), read_json(Path(name) / _ADAPTER, follow=True).get("task_type")
    config = transformers.AutoConfig.from_pretrained(base, trust_remote_code=safe["trust_remote_code"])
    kind = kinds.kind_of_adapter(task_type, config)
    auto = getattr(peft, f"AutoPeftModelFor{kind.auto}", None)
    if auto is not None:
        return kind, auto.from_pretrained(name, is_trainable=True, **safe)
    whole = getattr(transformers, f"AutoModelFor{kind.auto}").from_pretrained(base, **safe)
    return kind, peft.PeftModel.from_pretrained(whole, name, is_trainable=True)


def _refuse_pickles(name: str) -> None:
    """Weights that run code when they are read are refused by name, before anything looks for others."""
    folder = Path(name)
    if not folder.is_dir() or any(folder.glob("*.safetensors")):
        return
    pickles = sorted(p.name for ending in ("*.bin", "*.pt", "*.pth") for p in folder.glob(ending))
    if pickles:
        raise UndeError(
            f"{name} holds its weights as a pickle ({pickles[0]}), which could run code: pickles are never loaded. "
            "Load it where you trust it, and save it again with save_pretrained, which writes .safetensors"
        )


def _load_tokenizer(name: str, trust_remote_code: bool) -> Any:
    transformers = require("transformers")
    run = home_of(name)
    if run is not None and not _holds(name, _TOKENIZER) and _holds(str(run), _TOKENIZER):
        name = str(run)  # Trainer saves a tokenizer with its checkpoints only if it was given one
    if (Path(name) / _ADAPTER).exists() and not _holds(name, _TOKENIZER):
        name = _base(name)
    _check_folder(name, _TOKENIZER, "tokenizer")
    try:
        return transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    except Exception as e:
        raise _cannot("tokenizer", name, e, trust_remote_code) from e


def _base(adapter: str) -> str:
    path = Path(adapter) / _ADAPTER
    with explain(f"{path} names no base model ({{kind}}: {{e}})", ValueError, KeyError, TypeError, OSError):
        return read_json(path, follow=True)["base_model_name_or_path"]


def _holds(folder: str, files: tuple[str, ...]) -> bool:
    return any((Path(folder) / file).exists() for file in files)


def _check_folder(name: str, files: tuple[str, ...], what: str) -> None:
    path = Path(name)
    if path.is_dir() and not _holds(str(path), files):
        there = sorted(p.name for p in path.iterdir())
        raise UndeError(
            f"{name} holds no {what}: expected {' or '.join(files[:2])}, as save_pretrained of the {what} writes, "
            f"there is {', '.join(there[:5]) or 'nothing'}{', …' if there[5:] else ''}"
        )
    if path.is_file():
        raise UndeError(f"{name} is a file: expected the folder that save_pretrained wrote, or a hub name")
    if not path.exists() and (name.startswith((".", "/", "~")) or name.count("/") > 1):
        raise UndeError(f"no folder {name}: expected one that save_pretrained wrote, or a hub name")
    if not path.exists():
        console.note(f"no folder {name} here: looking for the {what} on the Hugging Face hub")


def asks_to_run_code(name: str) -> UndeError:
    return UndeError(
        f"{name} comes with Python code of its own, which is not run: read it, and if you trust it, say so with "
        "--trust-remote-code (in Python trust_remote_code=True)"
    )


def _cannot(what: str, name: str, error: Exception, trusted: bool) -> UndeError:
    if isinstance(error, UndeError):
        return error
    if not trusted and "trust_remote_code" in str(error):
        return asks_to_run_code(name)
    why = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    where = "in its folder" if Path(name).is_dir() else "no such folder here, and not found on the hub"
    return UndeError(f"cannot load the {what} {name}, {where} ({type(error).__name__}: {why})")


def _rows(model: nn.Module, tokenizer: Any, name: str) -> int:
    """How many tokens the model knows, after checking that the tokenizer has no more.

    Tokens added to a tokenizer are not counted, as one for padding is often beyond the model's and never used
    here; a text that uses such a token is refused by name.
    """
    get = getattr(model, "get_input_embeddings", lambda: None)
    weight = getattr(get(), "weight", None)
    if weight is None:
        raise UndeError(
            f"{name} ({type(model).__name__}) has no table of token embeddings: expected a causal LM"
        )
    if tokenizer.vocab_size > weight.shape[0]:
        raise UndeError(
            f"the tokenizer knows {tokenizer.vocab_size} tokens, {name} {weight.shape[0]}: it is not the model's. "
            "Save the tokenizer that the model was trained with beside it"
        )
    return weight.shape[0]


def model_of_config(path: Path, trust_remote_code: bool = False) -> tuple[nn.Module, Task]:
    """The model of a config.json or of the folder that holds it, on the meta device, and the task it is trained on."""
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise UndeError(
            f"{file} does not exist: expected the config.json of a Hugging Face model, or the folder that holds "
            "it. Nothing is downloaded; save one with config.save_pretrained(folder)"
        )
    transformers = require("transformers")
    try:
        config = transformers.AutoConfig.from_pretrained(
            str(file), local_files_only=True, trust_remote_code=trust_remote_code
        )
        with torch.device("meta"):
            auto = getattr(transformers, f"AutoModelFor{kinds.kind_of(config).auto}")
            model = auto.from_config(config, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, ImportError) as e:
        if not trust_remote_code and "trust_remote_code" in str(e):
            raise asks_to_run_code(str(file)) from None
        first = str(e).strip().partition("\n")[0]
        raise UndeError(
            f"no language model can be made from {file} ({first}): for other models, plan with "
            "MODULE:FUNCTION"
        ) from None
    return model, kinds.task_for(kinds.kind_of_model(model), model, None)
