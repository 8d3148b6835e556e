"""The training script: its batches, an interrupted run that ends as a whole one does, and the model folders it writes."""

import random
import re
import sys

import pytest
import torch
import transformers

from nanoinfer import LLM, SamplingParams
from nanoinfer_lab import stories
from tools.stories import documents, measure, train
from tools.stories.documents import train_tokenizer
from tools.stories.measure import hero_is_right

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def few_documents():
    """A tenth of the documents have nearly all words."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents, "NUM_TOKENIZER_DOCUMENTS", 2000)
        yield


@pytest.fixture(scope="module")
def tokenizer(few_documents):
    return train_tokenizer(train.SEED)


@pytest.fixture
def tiny(tokenizer):
    """A very small model, fast to train."""
    torch.manual_seed(0)
    size = {"vocab_size": len(tokenizer), "n_positions": 512, "n_embd": 8, "n_layer": 1, "n_head": 1}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**size, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))


def test_the_tokenizer_has_one_token_per_word_and_spells_other_text_in_bytes(tokenizer):
    assert 1900 <= len(tokenizer) <= 2048
    words = re.findall(r" \w+", stories.write(random.Random(2)))
    assert [word for word in words if len(tokenizer.encode(word)) > 1] == []
    for text in ("🦊", "狐狸とうさぎ", "naïve\n\tzebra", "<|im_start|>"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_an_interrupted_run_ends_with_the_weights_of_a_whole_one(tokenizer, tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(train, "STEPS_BETWEEN_SAVES", 3)
    untrained = {name: tensor.clone() for name, tensor in tiny.state_dict().items()}
    train.train(tiny, tokenizer, 8, tmp_path / "whole.pt")
    whole = {name: tensor.clone() for name, tensor in tiny.state_dict().items()}
    assert not any(torch.equal(whole[name], untrained[name]) for name, _ in tiny.named_parameters())
    real_batch, calls = train.make_batch, []

    def interrupted_batch(tokenizer, course, step):
        calls.append(step)
        if step == 5 and calls.count(5) == 1:
            raise KeyboardInterrupt
        return real_batch(tokenizer, course, step)

    monkeypatch.setattr(train, "make_batch", interrupted_batch)
    tiny.load_state_dict(untrained)
    with pytest.raises(KeyboardInterrupt):
        train.train(tiny, tokenizer, 8, tmp_path / "interrupted.pt")
    tiny.load_state_dict(untrained)  # a new process would build the model anew
    train.train(tiny, tokenizer, 8, tmp_path / "interrupted.pt")
    assert calls == [0, 1, 2, 3, 4, 5, 3, 4, 5, 6, 7]
    with pytest.raises(SystemExit, match=r"is of a run with --steps 8.* give the same --steps again, or delete it"):
        train.train(tiny, tokenizer, 9, tmp_path / "interrupted.pt")
    assert all(torch.equal(tensor, whole[name]) for name, tensor in tiny.state_dict().items())


def test_both_models_are_made_and_a_finished_one_is_left_alone(tokenizer, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(train, "train_tokenizer", {train.SEED: tokenizer}.__getitem__)  # 8 s of CPU at each call
    monkeypatch.setattr(measure, "NUM_STORIES", 2)
    monkeypatch.setattr(measure, "NUM_DOCUMENTS", 2)
    monkeypatch.setattr(measure, "BATCH_SIZE", 1)
    monkeypatch.setattr(measure, "TEMPERATURES", (1.0,))
    monkeypatch.setattr(sys, "argv", ["train", "--steps", "2", "--out", str(tmp_path)])
    train.main()
    for name in train.BUILDERS:
        assert "--steps 2`: 2 steps of 1024 tokens" in (tmp_path / name / "README.md").read_text()
        assert not (tmp_path / name / "training.pt").exists()
        [output] = LLM(tmp_path / name, kv_cache_memory=2**24).generate("Once", SamplingParams(max_tokens=3), use_tqdm=False)
        assert output.outputs[0].token_ids
    weights = (tmp_path / "tiny-gpt2" / "model.safetensors").read_bytes()
    capsys.readouterr()
    train.main()
    assert "tiny-gpt2 is finished; delete it to train it anew" in capsys.readouterr().out
    assert (tmp_path / "tiny-gpt2" / "model.safetensors").read_bytes() == weights


def test_hero_is_right_only_if_the_first_name_is_the_last_and_never_another():
    story = stories.write(random.Random(9), "Felix")
    names = list(stories.NAME.finditer(story))
    assert hero_is_right(story)
    assert hero_is_right(story, "Felix")
    assert not hero_is_right(story, "Lily")
    assert not hero_is_right(story[: names[-1].start()] + "Oscar" + story[names[-1].end() :])
    assert not hero_is_right(story[: names[1].start()])  # the name never came back
    returns = next(name for name in names[1:] if name[0] == "Felix")
    assert not hero_is_right(story[: returns.start()] + "Oscar" + story[returns.end() :])
