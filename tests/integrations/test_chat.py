"""Conversations and completions: the tokens that the template gives, a loss on what the model was trained to say."""

import json

import pytest
import torch
from hf_toy import LINES, gpt2, gradient, index_of, tokenizer

from refusals import refused
from unde import UndeError
from unde.integrations.examples import AnswerSequences, causal_examples
from unde.integrations.language import hf_setup

PLAIN = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<|endoftext|>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
MARKED = (
    "{% for m in messages %}<{{ m['role'] }}>{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] }}<|endoftext|>{% endgeneration %}{% else %}{{ m['content'] }}<|endoftext|>"
    "{% endif %}{{ '\n' }}{% endfor %}"
)
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Is the union strong?"},
    {"role": "assistant", "content": "It is."},
    {"role": "user", "content": "And the debt?"},
    {"role": "assistant", "content": "Paid in part."},
]


def talking(template=PLAIN):
    made = tokenizer()
    made.chat_template = template
    return made


def read(records, tok, length=512, **fields):
    return causal_examples(records, tok, length, 300, **fields)


def labelled(tok, example):
    """The texts that carry loss, one for each run of tokens, after checking that labels are the tokens."""
    ids, labels = example["input_ids"], example["labels"]
    counts = labels != -100
    assert torch.equal(labels[counts], ids[counts])
    runs, before = [], False
    for token, here in zip(ids.tolist(), counts.tolist()):
        if here and not before:
            runs.append([])
        if here:
            runs[-1].append(token)
        before = here
    return [tok.decode(run) for run in runs]


@pytest.mark.parametrize(
    ("template", "said", "told"),
    [
        (MARKED, ["It is.<|endoftext|>", "Paid in part.<|endoftext|>"], "as the chat template marks them"),
        (PLAIN, ["It is.<|endoftext|>\n", "Paid in part.<|endoftext|>\n"], "turn by turn"),
    ],
    ids=["marked", "prefixes"],
)
def test_the_loss_is_on_the_assistants_turns(template, said, told, capsys):
    tok = talking(template)
    [example] = read([{"messages": TALK}], tok)
    whole = "".join(f"<{m['role']}>{m['content']}<|endoftext|>\n" for m in TALK)
    assert example["input_ids"].tolist() == tok(whole, add_special_tokens=False)["input_ids"]
    assert labelled(tok, example) == said
    assert told in capsys.readouterr().err


def test_a_tokenizer_without_places_gives_the_same(monkeypatch):
    tok = talking()
    [expected] = read([{"messages": TALK}], tok)
    monkeypatch.setattr(type(tok), "is_fast", False)
    [found] = read([{"messages": TALK}], tok)
    assert torch.equal(found["input_ids"], expected["input_ids"])
    assert labelled(tok, found) == labelled(tok, expected)


def test_prompts_with_completions(capsys):
    tok = talking()
    records = [
        {"prompt": "The state of", "completion": " the union is strong.", "source": "x"},
        {"prompt": "", "completion": "Peace.<|endoftext|>", "source": "y"},
    ]
    one, two = read(records, tok)
    assert labelled(tok, one) == [" the union is strong.<|endoftext|>"]
    assert tok.decode(one["input_ids"]) == "The state of the union is strong.<|endoftext|>"
    assert labelled(tok, two) == ["Peace.<|endoftext|>"]
    printed = capsys.readouterr().err
    assert "the loss is on 'completion' alone" in printed and "the model does not read 'source'" in printed
    [named] = read([{"q": "The state of", "a": " the union"}], tok, text_field="q", target_field="a")
    assert labelled(tok, named) == [" the union<|endoftext|>"]


def test_prompts_and_completions_that_are_messages():
    for template in (PLAIN, MARKED):  # the prompt is masked, also what an assistant said in it
        tok = talking(template)
        [example] = read([{"prompt": TALK[:4], "completion": TALK[4:]}], tok)
        [said] = labelled(tok, example)
        assert said.removeprefix("<assistant>") == "Paid in part.<|endoftext|>\n"


def test_a_header_that_the_answer_does_not_have():
    """Some templates open an answer with room for thoughts, which a finished conversation has not."""
    tok = talking(PLAIN.replace("<assistant>{% endif %}", "<assistant><think></think>{% endif %}"))
    [example] = read([{"messages": TALK[1:3]}], tok)
    assert labelled(tok, example) == ["It is.<|endoftext|>\n"]


def test_thoughts_that_only_a_last_turn_has():
    """Templates of models that think write an earlier turn otherwise than a last one."""
    tok = talking(
        "{% for m in messages %}<{{ m['role'] }}>"
        "{% if m['role'] == 'assistant' and loop.last %}<think></think>{% endif %}"
        "{{ m['content'] }}<|endoftext|>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    [example] = read([{"messages": TALK}], tok)
    assert labelled(tok, example) == ["It is.<|endoftext|>", "<think></think>Paid in part.<|endoftext|>"]


def test_what_tables_leave_empty_is_left_out():
    tok = talking(PLAIN.replace("<{{", "{% if 'name' in m %}{{ raise_exception('name') }}{% endif %}<{{"))
    assert len(read([{"messages": [{**m, "name": None} for m in TALK]}], tok)) == 1


def test_tools_go_to_the_template():
    tok = talking("{% for t in tools or [] %}[{{ t['name'] }}]{% endfor %}" + PLAIN)
    tools = [{"name": "search"}]
    for given in (tools, json.dumps(tools)):
        [example] = read([{"messages": TALK[1:3], "tools": given}], tok)
        assert tok.decode(example["input_ids"]).startswith("[search]<user>")


def test_long_conversations_are_cut_and_parts_without_an_answer_left_out(capsys):
    tok = talking()
    long = [{"role": "user", "content": " ".join(LINES)}, {"role": "assistant", "content": "It is."}]
    records = [{"messages": long, "id": "long"}, {"messages": TALK[1:3], "id": "short"}]
    whole = read(records, tok)
    found = read(records, tok, 40)
    assert found.ids[-1] == "short:1" and len(found.ids) < 10 and len(whole) == 2
    parts = [e for e, name in zip(found, found.ids) if name.startswith("long")]
    assert "".join("".join(labelled(tok, e)) for e in parts) == "It is.<|endoftext|>\n"
    assert all((e["labels"][1:] != -100).any() and len(e["input_ids"]) <= 40 for e in found)
    assert "1 record longer than 40 tokens" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("record", "says"),
    [
        ({"messages": []}, "'messages' is an empty list, expected a list of messages"),
        ({"messages": "Hello"}, "line 2: 'messages' is str, expected a list"),
        ({"messages": None}, "line 2: 'messages' is NoneType, expected a list"),
        ({"messages": ["Hello"]}, "line 2: message 1 is str, expected an object"),
        ({"messages": [TALK[1], {"content": "x"}]}, "line 2: message 2 has no 'role', there is 'content'"),
        ({"messages": [{"role": 3, "content": "x"}]}, "line 2: message 1: 'role' is int, expected a text"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "message 1: 'content' is list, expected a text"),
        ({"messages": [{"role": "user"}]}, "message 1: 'content' is NoneType, expected a text"),
        ({"messages": TALK[:2]}, "line 2: no message of the role 'assistant', there is 'system', 'user'"),
        ({"message": TALK}, "line 2: no field 'messages', there is 'message'"),
        ({"messages": [*TALK, {"role": "pirate", "content": "Arr"}]}, "template refuses .*no pirates"),
    ],
)
def test_mistakes_name_the_record(tmp_path, record, says):
    path = tmp_path / "chat.jsonl"
    path.write_text(json.dumps({"messages": TALK}) + "\n" + json.dumps(record) + "\n")
    no = "{% for m in messages %}{% if m['role'] == 'pirate' %}{{ raise_exception('no pirates') }}{% endif %}"
    refused(says, read, path, talking(no + "{% endfor %}" + PLAIN))


@pytest.mark.parametrize(
    ("records", "says"),
    [
        ([{"prompt": "a", "completion": " "}], "text 0: 'completion' is empty"),
        ([{"prompt": "a", "completion": 3}], "'completion' is int, expected a text"),
        ([{"prompt": TALK, "completion": "x"}], "'prompt' is list and 'completion' str, expected two texts"),
        (
            [{"prompt": "a", "completion": "b", "text": "c"}],
            "--text-field text or .*--target-field completion",
        ),
        ([{"messages": TALK, "text": "c"}], "'messages' and 'text', .*more than one way"),
    ],
)
def test_mistakes_in_pairs(records, says):
    refused(says, read, records, talking())


def test_a_tokenizer_without_a_template():
    with pytest.raises(UndeError, match="text 0 holds messages, and the tokenizer has no chat template"):
        read([{"messages": TALK}], tokenizer())


def test_a_template_that_rewrites_earlier_turns_is_refused():
    tok = talking("{{ messages | length }}" + PLAIN)
    refused("text 0: the chat template writes earlier turns otherwise", read, [{"messages": TALK}], tok)


def test_a_field_of_another_name_may_hold_messages():
    tok = talking()
    found = read([{"talk": TALK, "text": "x"}], tok, text_field="talk")
    assert isinstance(found, AnswerSequences) and len(labelled(tok, found[0])) == 2


def test_scores_are_those_of_the_masked_loss(tmp_path):
    """An index of conversations against gradients of transformers' own loss with the same labels."""
    tok = talking()
    talks = [[{"role": "user", "content": a}, {"role": "assistant", "content": b}] for a, b in
             (("Peace?", "Yes."), ("Trade?", "Soon."), ("War?", "No, never."))]  # fmt: skip
    *train, query = [{"messages": t} for t in talks]
    setup = hf_setup(gpt2(), train, tokenizer=tok, eval_queries=[query])
    index = index_of(setup, tmp_path / "i")

    def of_answer(talk):
        text = f"<user>{talk[0]['content']}<|endoftext|>\n<assistant>"
        said = f"{talk[1]['content']}<|endoftext|>\n"
        ids, start = tok(text + said)["input_ids"], len(tok(text)["input_ids"])
        return gradient(ids, [-100] * start + ids[start:])

    expected = torch.stack([of_answer(talks[2]) @ of_answer(t) for t in talks[:2]])
    torch.testing.assert_close(index.score(setup.eval_queries).total()[0], expected, rtol=1e-4, atol=1e-6)
