"""Which task a Hugging Face model gets, by its config, and the data that go with it."""

import pytest
import torch
from hf_toy import LINES, save, tokenizer

from unde import UndeError
from unde.integrations import kinds
from unde.integrations.language import hf_setup, load_model
from unde.tasks import CausalLM, Classification, MaskedLM, Seq2SeqLM
from zoo import bart, encoder, t5

pytestmark = pytest.mark.usefixtures("one_thread")
WORDS = {"vocab_size": 301, "max_position_embeddings": 64}


def saved(folder, build, mask=False):
    torch.manual_seed(0)
    build().save_pretrained(folder)
    own = tokenizer()
    own.add_special_tokens({"pad_token": "<|endoftext|>"} | ({"mask_token": "<mask>"} if mask else {}))
    own.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("build", "kind"),
    [
        (encoder("Bert", "MaskedLM"), kinds.MASKED),
        (encoder("Roberta", "MaskedLM"), kinds.MASKED),
        (encoder("Bert", "SequenceClassification"), kinds.SEQUENCE),
        (encoder("Bert", "TokenClassification"), kinds.TOKEN),
        (t5(), kinds.SEQ2SEQ),
        (bart(), kinds.SEQ2SEQ),
    ],
    ids=["bert", "roberta", "sequence", "token", "t5", "bart"],
)
def test_models_are_loaded_as_what_they_were_saved_as(tmp_path, build, kind):
    torch.manual_seed(0)
    model = build()
    model.save_pretrained(tmp_path)
    found = load_model(str(tmp_path))
    assert type(found) is type(model)
    assert kinds.kind_of_model(found) is kinds.kind_of(found.config) is kind
    assert torch.equal(next(found.parameters()), next(model.parameters()))


def test_configs_without_a_class():
    from transformers import BertConfig, GPT2Config, T5Config

    assert kinds.kind_of(BertConfig()) is kinds.MASKED
    assert kinds.kind_of(BertConfig(is_decoder=True)) is kinds.CAUSAL
    assert kinds.kind_of(GPT2Config()) is kinds.CAUSAL
    assert kinds.kind_of(T5Config()) is kinds.SEQ2SEQ
    assert kinds.kind_of_adapter("SEQ_CLS", GPT2Config()) is kinds.SEQUENCE
    assert kinds.kind_of_adapter(None, BertConfig()) is kinds.MASKED


def test_masked_models_hide_tokens_of_their_texts(tmp_path):
    folder = saved(tmp_path, encoder("Bert", "MaskedLM", **WORDS), mask=True)
    setup = hf_setup(folder, LINES)
    assert isinstance(setup.task, MaskedLM) and setup.task.mask_token_id == 300
    setup.task.check(setup.model.eval(), setup.task.collate([setup.train_data[0]]))
    assert setup.show(setup.train_data[0]) == LINES[0]


def test_pairs_of_texts(tmp_path):
    folder = saved(tmp_path, bart(**WORDS))
    pairs = [{"source": a, "target": b, "id": f"p{i}"} for i, (a, b) in enumerate(zip(LINES, LINES[1:]))]
    setup = hf_setup(folder, pairs, seq_len=32)
    assert isinstance(setup.task, Seq2SeqLM) and setup.ids[:2] == ["p0", "p1"]
    first = setup.train_data[0]
    assert first["labels"].tolist() == tokenizer()(LINES[1])["input_ids"][:32]
    assert setup.task.loss(setup.model, setup.task.collate([first])).isfinite().all()
    with pytest.raises(UndeError, match=r"text 0: no field 'target'.*--target-field"):
        hf_setup(folder, [{"source": "a b c"}])


def test_texts_with_classes(tmp_path):
    names = {0: "war", 1: "peace", 2: "money"}
    build = encoder(
        "Bert", "SequenceClassification", id2label=names, label2id={v: k for k, v in names.items()}, **WORDS
    )
    folder = saved(tmp_path, build)
    setup = hf_setup(folder, [{"text": LINES[0], "label": "peace"}, {"text": LINES[1], "label": 2}])
    assert isinstance(setup.task, Classification)
    assert [int(e["labels"]) for e in setup.train_data.examples] == [1, 2]
    for odd in ("love", 3, None, -1):
        with pytest.raises(
            UndeError, match=rf"text 0: the label is {odd!r}, expected 0 to 2 or one of 'war'"
        ):
            hf_setup(folder, [{"text": LINES[0], "label": odd}])


def test_classes_of_tokens_are_for_python(tmp_path):
    folder = saved(tmp_path, encoder("Bert", "TokenClassification", **WORDS))
    with pytest.raises(UndeError, match=r"is a classifier of tokens.*unde\.tasks\.TokenClassification"):
        hf_setup(folder, LINES)


def test_causal_models_stay_what_they_were(tmp_path):
    assert isinstance(hf_setup(save(tmp_path), LINES).task, CausalLM)
