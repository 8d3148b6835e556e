"""How tiny-tools was made: conversations whose answers can be copied, the tokens that count, and the folder that is written."""

import json
import random
import sys
from itertools import pairwise

import pytest

from nanoinfer import LLM, SamplingParams, parse_chat_answer
from tools.calls import documents, train
from tools.calls.documents import KINDS, TAGS, train_tokenizer, write_conversation

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def tokenizer():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents, "NUM_TOKENIZER_DOCUMENTS", 400)
        return train_tokenizer(train.SEED)


def conversations(kind=None, num=200):
    rng = random.Random(3)
    return [write_conversation(rng, kind=kind) for _ in range(num)]


def test_a_call_is_of_an_offered_tool_and_the_answer_ends_with_its_result():
    num_calls = 0
    for conversation in conversations():
        offered = {function["name"]: function["parameters"]["properties"] for function in conversation.functions}
        assert len(offered) == len(conversation.functions)
        for question, message in pairwise(conversation.messages):
            for call in message.get("tool_calls", []):
                num_calls += 1
                name, arguments = call["function"]["name"], call["function"]["arguments"]
                assert offered[name].keys() == arguments.keys()
                if not any(word in question["content"] for word in ("plus", "minus", "times", "divided")):
                    assert [value for value in arguments.values() if str(value) not in question["content"]] == []
            if question["role"] == "tool":
                assert message["content"].endswith(question["content"].removeprefix("Error: "))
    assert num_calls > 150


@pytest.mark.parametrize("kind", KINDS)
def test_the_tokens_that_count_are_the_replies_as_nanoinfer_parses_them(tokenizer, kind):
    for conversation in conversations(kind, num=20):
        ids, is_written = conversation.encode(tokenizer)
        text = "".join(tokenizer.decode([i]) if counts else "\0" for i, counts in zip(ids, is_written, strict=True))
        replies = [reply.removesuffix("<|im_end|>") for reply in text.split("\0") if reply]
        messages = [message for message in conversation.messages if message["role"] == "assistant"]
        assert len(replies) == len(messages)
        thinks = any(message["reasoning_content"] for message in messages)
        for reply, message in zip(replies, messages, strict=True):
            parsed = parse_chat_answer(reply.lstrip(), TAGS[0] if thinks else TAGS[1])
            calls = [call["function"] for call in message.get("tool_calls", [])]
            assert (parsed["content"] or "") == message["content"]
            assert message["reasoning_content"].startswith(parsed.get("reasoning", ""))
            found = [call["function"] for call in parsed.get("tool_calls", [])]
            assert [(f["name"], json.loads(f["arguments"])) for f in found] == [(f["name"], f["arguments"]) for f in calls]


def test_the_folder_is_written_and_loads(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(train, "train_tokenizer", {train.SEED: tokenizer}.__getitem__)
    monkeypatch.setattr(train, "NUM_HELD_OUT", 1)
    monkeypatch.setattr(sys, "argv", ["train", "--steps", "2", "--out", str(tmp_path)])
    train.main()
    card = (tmp_path / "tiny-tools" / "README.md").read_text()
    assert "--steps 2`: 2 steps of up to 1024 tokens" in card
    assert [kind for kind in KINDS if f"| {kind} | 0.0% | 0.0% |" not in card] == []
    [output] = LLM(tmp_path / "tiny-tools", kv_cache_memory=2**24).generate(
        "Hello", SamplingParams(max_tokens=3), use_tqdm=False
    )
    assert output.outputs[0].token_ids
