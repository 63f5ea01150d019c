"""Which task a Hugging Face model gets, by its config, and the data that go with it."""

from string import ascii_lowercase as LETTERS

import pytest
import torch
from hf_toy import LINES, save, tokenizer
from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from refusals import refused
from unde import UndeError
from unde.integrations import model_types as kinds
from unde.integrations.language import hf_setup, load_model
from unde.tasks import CausalLM, Classification, MaskedLM, Seq2SeqLM, TokenClassification
from zoo import bart, encoder, t5

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
    refused(r"text 0: no field 'target'.*--target-field", hf_setup, folder, [{"source": "a b c"}])


def test_texts_with_classes(tmp_path):
    names = {0: "war", 1: "peace", 2: "money"}
    build = encoder(
        "Bert", "SequenceClassification", id2label=names, label2id={v: k for k, v in names.items()}, **WORDS
    )
    folder = saved(tmp_path, build)
    setup = hf_setup(folder, [{"text": LINES[0], "label": "peace"}, {"text": LINES[1], "label": 2}])
    assert isinstance(setup.task, Classification)
    assert [int(e["labels"]) for e in setup.train_data] == [1, 2]
    for odd in ("love", 3, None, -1):
        with pytest.raises(
            UndeError, match=rf"text 0: the label is {odd!r}, expected 0 to 2 or one of 'war'"
        ):
            hf_setup(folder, [{"text": LINES[0], "label": odd}])


NAMES = {0: "O", 1: "PER", 2: "LOC"}


def words(**more):
    """A tokenizer of letters that begins and ends each text as BERT does: [CLS] is 1, [SEP] 2, "a" 4."""
    known = {t: i for i, t in enumerate(("[PAD]", "[CLS]", "[SEP]", "[MASK]"))}
    known |= {
        start + c: len(known) + 26 * far + i
        for far, start in enumerate(("", "##"))
        for i, c in enumerate(LETTERS)
    }
    made = Tokenizer(WordPiece(known, unk_token="[MASK]"))
    made.pre_tokenizer = Whitespace()
    made.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    special = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}
    return PreTrainedTokenizerFast(tokenizer_object=made, **special, **more)


def model_of(what, **config):
    torch.manual_seed(0)
    made = encoder("Bert", what, vocab_size=56, max_position_embeddings=16, **config)()
    return made.eval()


def test_every_part_of_a_masked_text_is_begun_and_ended():
    setup = hf_setup(model_of("MaskedLM"), ["abcdefghijklmno", "c"], tokenizer=words(), seq_len=8)
    parts = [e["input_ids"].tolist() for e in setup.train_data]
    assert setup.ids == ["0:1", "0:2", "0:3", "1:1"]
    assert all(part[0] == 1 and part[-1] == 2 and len(part) <= 8 for part in parts)
    assert [t for part in parts[:3] for t in part[1:-1]] == words()("abcdefghijklmno")["input_ids"][1:-1]
    assert parts[3] == [1, 6, 2]
    hidden = setup.task.hide_tokens(setup.task.collate(list(setup.train_data)), 56)
    asked = hidden["labels"] != -100
    assert asked.any(1).all()
    original = setup.task.collate(list(setup.train_data))["input_ids"]
    assert not (asked & (original < 4)).any()  # special tokens and padding
    refused("sequences of 2 tokens", hf_setup, model_of("MaskedLM"), ["abc"], tokenizer=words(), seq_len=2)


def test_what_is_cut_off_keeps_its_end():
    model = model_of("SequenceClassification", num_labels=2)
    setup = hf_setup(model, [{"text": "a b c d e f", "label": 1}], tokenizer=words(), seq_len=5)
    assert setup.train_data[0]["input_ids"].tolist() == [1, 4, 5, 6, 2]


def tagging():
    return model_of("TokenClassification", id2label=NAMES, label2id={v: k for k, v in NAMES.items()})


@pytest.mark.parametrize(
    "record",
    [
        {"tokens": ["ab", "c", "def"], "ner_tags": [1, 0, 2]},
        {"words": ["ab", "c", "def"], "tags": ["PER", "O", "LOC"]},
    ],
)
def test_words_with_classes(record):
    setup = hf_setup(tagging(), [record], tokenizer=words())
    assert isinstance(setup.task, TokenClassification)
    example = setup.train_data[0]
    assert example["input_ids"].tolist() == [1, 4, 31, 6, 7, 34, 35, 2]
    assert example["labels"].tolist() == [-100, 1, -100, 0, 2, -100, -100, -100]
    assert setup.task.loss(setup.model, setup.task.collate([example])).isfinite().all()


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"tokens": ["a", "b"], "ner_tags": [1]}, "2 words and 1 in 'ner_tags': expected one for each"),
        ({"tokens": ["a"], "ner_tags": [3]}, "the label is 3, expected 0 to 2 or one of 'O', 'PER', 'LOC'"),
        ({"tokens": "a b", "ner_tags": [1, 1]}, "'tokens' is str, expected a list"),
        ({"tokens": [], "ner_tags": []}, "'tokens' is an empty list"),
        ({"tokens": ["a", 3], "ner_tags": [1, 1]}, "word 2 is int, expected a text"),
        ({"tokens": ["a"], "ner_tags": [-100]}, "no word has a class"),
        (
            {"tokens": ["a"], "pos": [1]},
            "no field 'ner_tags', there is 'tokens', 'pos'.*the classes of words.*--target",
        ),
        ({"sentence": "a", "pos": [1]}, "no field 'tokens'.*holds the words.*--text-field"),
    ],
)
def test_words_without_proper_classes(record, said):
    refused(f"^text 0: {said}", hf_setup, tagging(), [record], tokenizer=words())


def test_queries_without_a_target_ask_what_the_model_says(capsys):
    """Equal to what the model is asked for here, without a mask or a batch."""
    model, text = model_of("SequenceClassification", num_labels=5), "a b c"
    ids = torch.tensor([words()(text)["input_ids"]])
    with torch.no_grad():
        expected = model(ids).logits.argmax().item()
        model.classifier.bias[(expected + 1) % 5] += 9  # so that it is not the first answer by chance
    data = [{"text": "b c", "label": 0}]
    setup = hf_setup(model, data, tokenizer=words(), eval_queries=[text])
    assert setup.eval_queries[0]["labels"].item() == (expected + 1) % 5
    assert "without 'label': asked about what the model itself says" in capsys.readouterr().err
    given = hf_setup(model, data, tokenizer=words(), eval_queries=[{"text": text, "label": 3}])
    assert given.eval_queries[0]["labels"].item() == 3
    asked = {"eval_queries": [{"text": text}], "query_field": "review"}
    refused(r"no field 'review'.*--query-field", hf_setup, model, data, tokenizer=words(), **asked)
    with pytest.raises(UndeError, match=r"no field 'label'.*the label \(--target-field\)"):
        hf_setup(model, [{"text": "b c"}], tokenizer=words())

    model = tagging()
    setup = hf_setup(model, [{"tokens": ["a"], "tags": [1]}], tokenizer=words(), eval_queries=["ab c"])
    with torch.no_grad():
        best = model(torch.tensor([[1, 4, 31, 6, 2]])).logits[0].argmax(-1).tolist()
    assert setup.eval_queries[0]["labels"].tolist() == [-100, best[1], -100, best[3], -100]

    model = bart(vocab_size=56, max_position_embeddings=16)().eval()
    setup = hf_setup(
        model, [{"source": "a", "target": "b"}], tokenizer=words(), eval_queries=[text], seq_len=6
    )
    query = setup.eval_queries[0]
    start = torch.tensor([[model.config.decoder_start_token_id]])
    for label in query["labels"].tolist():  # greedy, token by token
        with torch.no_grad():
            logits = model(ids, decoder_input_ids=start).logits[0, -1]
        forced = model.generation_config.forced_eos_token_id if start.shape[1] == 5 else None
        assert label == (logits.argmax().item() if forced is None else forced)
        start = torch.cat([start, torch.tensor([[label]])], 1)


def test_a_file_where_a_text_is_wanted(tmp_path):
    (tmp_path / "q.txt").write_text("a b c")
    with pytest.raises(UndeError, match=r"is a file, and a text was expected.*--queries"):
        hf_setup(model_of("MaskedLM"), ["abc"], tokenizer=words(), eval_queries=[str(tmp_path / "q.txt")])


def test_causal_models_stay_what_they_were(tmp_path):
    assert isinstance(hf_setup(save(tmp_path), LINES).task, CausalLM)


def test_classifiers_that_predict_from_the_last_token():
    """Its place is told by the token for padding: the tokenizer's, where the config names none."""
    from transformers import LlamaConfig, LlamaForSequenceClassification

    small = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForSequenceClassification(LlamaConfig(vocab_size=56, **small)).eval()
    assert model.config.pad_token_id is None
    data = [{"text": "a b c", "label": 0}, {"text": "d", "label": 1}]
    setup = hf_setup(model, data, tokenizer=words())
    examples = list(setup.train_data)
    alone = torch.cat([setup.task.loss(model, setup.task.collate([e])) for e in examples])
    torch.testing.assert_close(setup.task.loss(model, setup.task.collate(examples)), alone)
