"""TRL's trainers, end to end: what SFTTrainer and DPOTrainer minimise is the loss here, on what they have saved."""

import json

import pytest
import torch
import torch.nn.functional as F
from commands import run
from hf_toy import LINES, gpt2, tokenizer

from unde import Index
from unde.integrations.language import hf_setup
from unde.integrations.transformers import add_reference, read_pairs, span_queries
from unde.methods import TracIn
from unde.tasks import CausalLM, Preference, Reward

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<|endoftext|>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
COMMON = {"report_to": [], "use_cpu": True, "bf16": False, "max_steps": 2, "per_device_train_batch_size": 2}
COMMON |= {"disable_tqdm": True, "logging_steps": 1, "save_steps": 1, "max_length": 64}


def words():
    made = tokenizer()
    made.pad_token, made.chat_template = made.eos_token, TEMPLATE
    return made


def answers(i):
    return LINES[i].partition(", ")[2] or LINES[i][:20]


PAIRS = [
    {"id": f"p{i}", "prompt": "Speak. ", "chosen": answers(i), "rejected": answers(i - 1)} for i in range(6)
]
CHATS = [
    {
        "id": f"c{i}",
        "messages": [{"role": "user", "content": "Speak."}, {"role": "assistant", "content": answers(i)}],
    }
    for i in range(6)
]


@pytest.fixture(scope="module")
def trl():
    return pytest.importorskip("trl", reason="TRL is not installed: pip install trl")


@pytest.fixture(scope="module")
def preferred(trl, tmp_path_factory):
    """A finished run of DPOTrainer on an adapter, saved as its users do."""
    from peft import LoraConfig

    from datasets import Dataset

    folder = tmp_path_factory.mktemp("dpo")
    gpt2().save_pretrained(folder / "base")
    words().save_pretrained(folder / "base")
    arguments = trl.DPOConfig(str(folder / "run"), beta=0.3, precompute_ref_log_probs=True, **COMMON)
    trainer = trl.DPOTrainer(
        str(folder / "base"),
        args=arguments,
        train_dataset=Dataset.from_list(PAIRS),
        processing_class=words(),
        peft_config=LoraConfig(
            r=2, target_modules=["c_attn"], task_type="CAUSAL_LM", init_lora_weights=False
        ),
    )
    trainer.train()
    trainer.save_model(str(folder / "adapter"))
    trainer.train_dataset.save_to_disk(folder / "pairs")
    return folder, trainer


def gradient(model, loss, retain=False):
    parameters = [p for p in model.parameters() if p.requires_grad]
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters, retain_graph=retain)])


def test_losses_of_preferences_are_those_of_trl(preferred):
    _, trainer = preferred
    model, task = trainer.model.eval(), Preference(beta=0.3)
    rows = [trainer.train_dataset[i] for i in range(6)]
    losses = task.loss(model, task.collate(rows))
    for i, row in enumerate(rows):
        theirs = trainer.compute_loss(model, trainer.data_collator([row]))
        torch.testing.assert_close(losses[i], theirs, rtol=1e-5, atol=1e-6)
        expected = gradient(model, theirs)
        torch.testing.assert_close(gradient(model, losses[i], True), expected, rtol=1e-3, atol=1e-6)


def test_our_tokens_and_references_are_those_of_trl(preferred):
    _, trainer = preferred
    model = trainer.model
    pairs = read_pairs(PAIRS, words())
    assert pairs.ids == [p["id"] for p in PAIRS]
    with model.disable_adapter():
        pairs = add_reference(pairs, model, batch_size=4)
    for ours, theirs in zip(pairs, trainer.train_dataset):
        for name in ("prompt_ids", "chosen_ids", "rejected_ids"):
            assert ours[name] == theirs[name]
        for name in ("ref_chosen_logps", "ref_rejected_logps"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-5)
    whole = [
        {
            k: [{"role": "user", "content": p["prompt"]}, {"role": "assistant", "content": p[k]}]
            for k in p
            if k in ("chosen", "rejected")
        }
        for p in PAIRS[:2]
    ]
    split = [{k: v[1:] for k, v in p.items()} | {"prompt": p["chosen"][:1]} for p in whole]
    assert read_pairs(whole, words()) == read_pairs(split, words())


def test_an_adapter_of_dpo_from_the_command_line(preferred, tmp_path, monkeypatch):
    folder, _ = preferred
    monkeypatch.chdir(tmp_path)
    run(
        "build --out idx --method tracin --projection none --beta 0.3 --hf-model",
        folder / "adapter",
        "--data",
        folder / "pairs",
    )
    asked = [
        json.loads(x)
        for x in run("attribute --index idx --top 6 --format jsonl --query", LINES[0]).splitlines()
    ]
    setup = hf_setup(str(folder / "adapter"), str(folder / "pairs"), beta=0.3, eval_queries=[LINES[0]])
    index = Index.open("idx", model=setup.model, task=setup.task, train_data=setup.train_data)
    assert [r["score"] for r in asked] == pytest.approx(
        index.score(setup.eval_queries).top(6).values[0].tolist()
    )
    assert "[rejected]" in asked[0]["text"]
    page = run("report --index idx --out page.html --no-baselines --query", LINES[0], both=True)
    assert "page.html" in page
    # The pairs of a query may be asked about, too: which other pairs taught the same preference?
    scores = index.score([setup.train_data[2]])
    assert scores.trained_on() == [0]
    parts = index.tokens(scores)(0, setup.train_data[2])
    assert len(parts) == len(setup.pieces(setup.train_data[2]))
    assert float(parts.sum()) == pytest.approx(float(scores.total()[0, 2]), rel=1e-3)


@pytest.mark.parametrize("loss_on", ["all", "answers"])
def test_a_chat_run_of_sft(trl, tmp_path, loss_on):
    """The loss of a batch of TRL is the mean over its tokens: one example at a time it is ours."""
    from datasets import Dataset

    arguments = trl.SFTConfig(str(tmp_path / "run"), assistant_only_loss=False, **COMMON)
    trainer = trl.SFTTrainer(
        gpt2(), args=arguments, train_dataset=Dataset.from_list(CHATS), processing_class=words()
    )
    if loss_on == "all":
        trainer.train()
    model = trainer.model.eval()
    setup = hf_setup(model, CHATS, tokenizer=words(), loss_on=loss_on)
    assert setup.ids[0] == "c0:1"
    for i in range(3):
        batch = trainer.data_collator([trainer.train_dataset[i]])
        assert batch["input_ids"][0].tolist() == setup.train_data[i]["input_ids"].tolist()
        theirs = F.cross_entropy(model(batch["input_ids"]).logits[0, :-1], batch["labels"][0, 1:])
        ours = CausalLM().loss(model, CausalLM().collate([setup.train_data[i]]))[0]
        assert (abs((ours - theirs).item()) < 1e-5) == (loss_on == "all")


def test_rewards_from_a_trainer(trl, tmp_path):
    from transformers import GPT2Config, GPT2ForSequenceClassification

    from datasets import Dataset

    sizes = {"vocab_size": 300, "n_positions": 64, "n_embd": 8, "n_layer": 1, "n_head": 2, "num_labels": 1}
    model = GPT2ForSequenceClassification(GPT2Config(**sizes, pad_token_id=0, bos_token_id=0, eos_token_id=0))
    arguments = trl.RewardConfig(str(tmp_path / "run"), **COMMON)
    trainer = trl.RewardTrainer(
        model, args=arguments, train_dataset=Dataset.from_list(PAIRS), processing_class=words()
    )
    setup = hf_setup(trainer.model.eval(), PAIRS, tokenizer=words())
    assert isinstance(setup.task, Reward)
    for ours, row in zip(setup.train_data, trainer.train_dataset):
        assert {k: row[k] for k in ours} == ours
        loss = setup.task.loss(model, setup.task.collate([ours]))[0]
        torch.testing.assert_close(loss, trainer.compute_loss(model, trainer.data_collator([row])))
    index = Index.build(
        model,
        setup.task,
        setup.train_data,
        tmp_path / "idx",
        method=TracIn(projection="none"),
        progress=False,
    )
    assert index.score([setup.train_data[1]]).top(1).indices.tolist() == [[1]]


def test_the_words_of_a_span_are_asked_about(tmp_path):
    """Labels are on the tokens of the span alone, whatever the tokenizer cut."""
    setup = hf_setup(gpt2(), LINES, tokenizer=words(), eval_queries=[LINES[1]])
    [example] = span_queries(setup, "honest money")
    labels = example["labels"]
    inside = [i for i, label in enumerate(labels.tolist()) if label != -100]
    assert torch.equal(labels[inside], example["input_ids"][inside])
    said = tokenizer().decode(labels[inside])
    assert "honest money" in said and len(said) <= len("honest money") + 4
    index = Index.build(
        setup.model,
        setup.task,
        setup.train_data,
        tmp_path / "idx",
        method=TracIn(projection="none"),
        progress=False,
    )
    model, task = setup.model, CausalLM()
    parts = CausalLM("sum").token_losses(model, task.collate([setup.eval_queries[0]]))[0, inside].mean()
    train = task.loss(model, task.collate([setup.train_data[4]]))[0]
    expected = gradient(model, parts) @ gradient(model, train)
    assert float(index.score([example]).total()[0, 4]) == pytest.approx(float(expected), rel=1e-3)
