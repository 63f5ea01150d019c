"""Documents as sequences: every token once, in order, and pieces of text that join to the text."""

import pytest
from hf_toy import LINES, tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from refusals import refused
from unde import UndeError
from unde.integrations import documents
from unde.integrations.documents import TextSequences, cut, pieces

TOKENIZER = tokenizer()


@given(st.integers(2, 200), st.integers(3, 40))
def test_parts_cover_a_document(count, length):
    parts = cut(count, length)
    assert sum(parts) == count
    assert max(parts) <= length
    assert min(parts) >= 2  # a token alone has nothing to predict
    assert all(part == length for part in parts[:-2])
    assert len(parts) == 1 or min(parts) >= length // 2
    assert len(parts) == -(-count // length)  # no more parts than needed


def test_sequences_hold_every_token_in_order():
    found = TextSequences(LINES, TOKENIZER, 8, 300)
    assert len(found) == len(found.ids) == len(set(found.ids))
    for d, line in enumerate(LINES):
        parts = [found[i]["input_ids"] for i, name in enumerate(found.ids) if name.startswith(f"{d}:")]
        assert [t for part in parts for t in part.tolist()] == TOKENIZER(line)["input_ids"]
        assert all(len(part) == 8 for part in parts[:-2])
    assert found.ids[:2] == ["0:1", "0:2"]
    assert found[-1]["input_ids"].equal(found[len(found) - 1]["input_ids"])
    with pytest.raises(IndexError):
        found[len(found)]


def test_batches_of_the_tokenizer_do_not_matter(monkeypatch):
    whole = TextSequences(LINES, TOKENIZER, 8, 300)
    monkeypatch.setattr(documents, "_AT_ONCE", 3)
    again = TextSequences(LINES, TOKENIZER, 8, 300)
    assert again.ids == whole.ids
    assert (again.tokens == whole.tokens).all() and (again.stops == whole.stops).all()


def test_bad_texts_are_named(tmp_path):
    with pytest.raises(UndeError, match=r"text 1: 'T' is 1 token long, expected at least 2"):
        TextSequences([LINES[0], "T"], TOKENIZER, 8, 300)
    most = max(TOKENIZER(LINES[2])["input_ids"])
    with pytest.raises(
        UndeError, match=rf"text 0: the tokenizer gives token {most}, the model knows 0 to {most - 1}"
    ):
        TextSequences(LINES[2:], TOKENIZER, 8, most)
    refused("sequences of 2 tokens", TextSequences, LINES, TOKENIZER, 2, 300)
    (tmp_path / "none.jsonl").write_text("\n")
    refused(r"none.jsonl holds no text", TextSequences, tmp_path / "none.jsonl", TOKENIZER, 8, 300)


@settings(max_examples=60, deadline=None)
@given(st.text(alphabet=st.characters(codec="utf-8"), min_size=1, max_size=40))
def test_pieces_join_to_the_text(text):
    tokens = TOKENIZER(text)["input_ids"]
    found = pieces(TOKENIZER, tokens)
    assert len(found) == len(tokens)
    assert "".join(found) == text


def test_a_character_of_several_tokens_is_whole():
    tokens = TOKENIZER("a🎈b")["input_ids"]  # the balloon is four bytes, four tokens
    assert pieces(TOKENIZER, tokens) == ["a", "", "", "", "🎈", "b"]
    assert pieces(TOKENIZER, tokens[:3]) == ["a", "", "\ufffd"]  # the rest of it is in the next sequence


def test_pieces_of_a_sentencepiece_tokenizer_keep_their_spaces():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<unk>": 0, "▁The": 1, "▁state": 2, "▁of": 3, "ment": 4}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    spaced = PreTrainedTokenizerFast(tokenizer_object=made)
    assert spaced.decode([2]) == "state"  # alone, it loses its space
    assert pieces(spaced, [1, 2, 4, 3]) == ["The", " state", "ment", " of"]
