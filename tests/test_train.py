"""The training script: what it reads, that an interrupted run ends where a whole one does, and what it writes on a card."""

import math
import random

import pytest
import torch
import transformers

from nanoinfer.checkpoints import documents, measure, stories, train
from nanoinfer.checkpoints.documents import Document, train_tokenizer, write_document


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(train.SEED)


@pytest.fixture
def tiny(tokenizer):
    """A model that learns fast and nothing much."""
    torch.manual_seed(0)
    size = {"vocab_size": len(tokenizer), "n_positions": 512, "n_embd": 8, "n_layer": 1, "n_head": 1}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**size, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))


def test_the_tokenizer_has_one_token_for_a_word_and_spells_all_else_in_bytes(tokenizer):
    assert 1900 <= len(tokenizer) <= 2048
    words = {word for word in stories.write(random.Random(2)).replace('"', "").split() if word.isalpha()}
    assert all(len(tokenizer.encode(f" {word}")) == 1 for word in words)
    for text in ("🦊", "狐狸とうさぎ", "naïve\n\tzebra", "<|im_start|>"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_chat_ends_its_turn_and_then_the_text_and_a_story_only_the_text(tokenizer):
    assert tokenizer.decode(Document("The end.").encode(tokenizer)) == "The end.<|endoftext|>"
    assert tokenizer.decode(Document("Yes.", "No?").encode(tokenizer)) == (
        "<|im_start|>user\nNo?<|im_end|>\n<|im_start|>assistant\nYes.<|im_end|>\n<|endoftext|>"
    )


def test_the_probability_of_a_document_counts_what_kind_it_is_its_question_and_its_hero_once():
    rng = random.Random(4)
    story = stories.write(rng, "Lily")
    alone = stories.read(story).log_prob
    assert Document(story).log_prob == pytest.approx(math.log(0.8) + alone)
    weights = [1, 1 / math.sqrt(2), 1 / math.sqrt(3)]  # the three ways to ask
    for question, weight in zip(("Tell {}", "Please tell {}.", "Can you tell {}?"), weights, strict=True):
        chat = Document(story, question.format("me a story about Lily"))
        # The question names one of 24 heroes, and so does the story: but there the name is known by then.
        assert chat.log_prob == pytest.approx(math.log(0.2) + math.log(weight / sum(weights)) + alone)


def test_one_document_in_five_is_a_chat():
    rng = random.Random(0)
    chats = sum(write_document(rng).question is not None for _ in range(1000))
    assert abs(chats - 1000 * documents.CHAT_SHARE) < 6 * math.sqrt(1000 * 0.2 * 0.8)  # 6 standard deviations, seed fixed


def test_the_courses_are_tales_then_stories_then_long_rows(tokenizer):
    shapes = [tuple(train.make_batch(tokenizer, step, 16).shape) for step in (0, 1, 11, 12, 15)]
    assert shapes == [(16, 64), (8, 128), (8, 128), (2, 512), (2, 512)]
    tale = tokenizer.decode(train.make_batch(tokenizer, 0, 16)[0])
    assert stories.GRAMMAR.read(tale.split("<|endoftext|>")[0], "tale").is_complete
    story = tokenizer.decode(train.make_batch(tokenizer, 12, 16)[1]).split("<|endoftext|>")
    assert story[0] == ""  # every second row starts with the token that ends a text
    assert Document(story[1]).log_prob > -math.inf or story[1].startswith("<|im_start|>user")


def test_an_interrupted_run_ends_with_the_weights_of_a_whole_one(tokenizer, tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(train, "STEPS_BETWEEN_SAVES", 3)
    untrained = {name: tensor.clone() for name, tensor in tiny.state_dict().items()}
    train.train(tiny, tokenizer, 8, tmp_path / "whole.pt")
    whole = {name: tensor.clone() for name, tensor in tiny.state_dict().items()}
    assert any(not torch.equal(whole[name], untrained[name]) for name in whole)

    real_batch, calls = train.make_batch, []

    def interrupted_batch(tokenizer, step, steps):
        calls.append(step)
        if step == 5 and calls.count(5) == 1:
            raise KeyboardInterrupt
        return real_batch(tokenizer, step, steps)

    monkeypatch.setattr(train, "make_batch", interrupted_batch)
    tiny.load_state_dict(untrained)
    with pytest.raises(KeyboardInterrupt):
        train.train(tiny, tokenizer, 8, tmp_path / "interrupted.pt")
    tiny.load_state_dict(untrained)  # a new process would build the model anew
    train.train(tiny, tokenizer, 8, tmp_path / "interrupted.pt")
    assert calls == [0, 1, 2, 3, 4, 5, 3, 4, 5, 6, 7]
    assert all(torch.equal(tensor, whole[name]) for name, tensor in tiny.state_dict().items())


def test_a_run_of_other_steps_is_not_gone_on_with(tokenizer, tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(train, "STEPS_BETWEEN_SAVES", 1)
    train.train(tiny, tokenizer, 2, tmp_path / "training.pt")
    with pytest.raises(SystemExit, match="is of a run with --steps 2: give the same again, or delete it"):
        train.train(tiny, tokenizer, 3, tmp_path / "training.pt")


def test_every_weight_of_both_models_is_trained(tokenizer):
    for build in train.BUILDERS.values():
        model = build(len(tokenizer), tokenizer.eos_token_id)
        train.next_token_loss(model, train.make_batch(tokenizer, 1, 1)).backward()
        assert [name for name, weight in model.named_parameters() if weight.grad is None or not weight.grad.any()] == []


def test_the_loss_of_padded_rows_is_the_sum_of_each_row_alone(tiny):
    tiny.eval()
    rows = [[0, 5, 6], [0, 7], [0, 5, 6, 8, 9]]
    alone = 0.0
    for row in rows:
        log_probs = tiny(torch.tensor([row])).logits[0].log_softmax(-1)
        alone -= sum(log_probs[i, token].item() for i, token in enumerate(row[1:]))
    assert measure.total_loss(tiny, rows) == pytest.approx(alone, rel=1e-5)


def test_no_model_loses_less_than_the_entropy(tokenizer, tiny, monkeypatch):
    monkeypatch.setattr(measure, "NUM_DOCUMENTS", 20)
    entropy, loss = measure.entropy_and_loss(tiny.eval(), tokenizer)
    assert 0.4 < entropy < 0.6
    assert loss == pytest.approx(math.log(len(tokenizer)), rel=0.05)  # untrained: about uniform


def test_hero_is_right_only_if_the_first_name_is_the_last_and_never_another():
    story = stories.write(random.Random(9), "Felix")
    names = list(stories.NAME.finditer(story))
    assert stories.hero_is_right(story)
    assert stories.hero_is_right(story, "Felix")
    assert not stories.hero_is_right(story, "Lily")
    assert not stories.hero_is_right(story[: names[-1].start()] + "Oscar" + story[names[-1].end() :])
    assert not stories.hero_is_right(story[: names[1].start()])  # the name never came back
    returns = next(name for name in names[1:] if name[0] == "Felix")
    assert not stories.hero_is_right(story[: returns.start()] + "Oscar" + story[returns.end() :])
    assert stories.hero_is_right(story.replace("One", "Another"))  # no story of the grammar, but the hero is right
