"""A conversation: what the model reads of it when the context is full, and the file that keeps it. The model is a stand-in."""

import json
from types import SimpleNamespace

import pytest

from nanoinfer.cli.chat_session import ChatSession
from nanoinfer.errors import NanoinferError
from nanoinfer.sampling_params import SamplingParams

MAX_MODEL_LEN = 40


def render(messages, **more):
    """One token for each word."""
    words = [word for message in messages for word in message["content"].split()]
    return {"prompt": " ".join(words), "prompt_token_ids": list(range(len(words)))}


def conversation(system=None):
    llm = SimpleNamespace(info=SimpleNamespace(max_model_len=MAX_MODEL_LEN), render_chat=render)
    return ChatSession(llm, SamplingParams(), system)


def test_a_full_context_leaves_out_the_oldest_turns_and_keeps_the_system_message():
    talk = conversation(system="S S")
    seen = []
    for turn in "abcde":
        prompt, num_dropped = talk.render(f"{turn}? {turn}?")
        seen.append((prompt["prompt"], num_dropped))
        talk.add(f"{turn}? {turn}?", " ".join([turn] * 8), num_dropped)
    a, b, c, d = (f"{turn}? {turn}? " + " ".join([turn] * 8) for turn in "abcd")
    assert seen == [
        ("S S a? a?", 0),
        (f"S S {a} b? b?", 0),
        (f"S S {a} {b} c? c?", 0),
        (f"S S {c} d? d?", 4),  # 34 of 40 tokens would leave less than a quarter: now 14, at most half
        (f"S S {c} {d} e? e?", 4),  # a longer form of the prompt before it
    ]
    assert len(talk.messages) == 10  # nothing is lost for /save


def test_what_is_left_out_stays_left_out_only_if_the_turn_is_kept():
    talk = conversation()
    talk.add("a", "a " * 20, 0)
    prompt, num_dropped = talk.render("b " * 15)
    assert (len(prompt["prompt_token_ids"]), num_dropped) == (15, 2)
    prompt, num_dropped = talk.render("b")
    assert (len(prompt["prompt_token_ids"]), num_dropped) == (22, 0)


def test_a_saved_conversation_is_loaded_again(tmp_path):
    path = tmp_path / "talk.json"
    talk, other = conversation(system="Sé"), conversation()
    talk.add("How\nare you?", "\N{GRINNING FACE}", 0)
    talk.save(path)
    assert json.loads(path.read_text(encoding="utf-8"))[0] == {"role": "system", "content": "Sé"}
    other.num_dropped = 7
    other.load(path)
    assert (other.system, other.messages, other.num_dropped) == (talk.system, talk.messages, 0)
    talk.clear()
    talk.system = None
    talk.save(path)
    other.load(path)
    assert (other.system, other.messages) == (None, [])


def test_a_file_that_is_no_conversation_is_one_sentence_and_changes_nothing(tmp_path):
    path, talk = tmp_path / "talk.json", conversation(system="S")
    talk.add("a", "b", 0)
    for text, words in (
        (None, "cannot read"),
        ("", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("\udcff", "is not JSON"),
        ("{}", "must be a list"),
        ('["Hello"]', "must be a list"),
        ('[{"role": "user"}]', "must be a list"),
        ('[{"role": "user", "content": [{"type": "text", "text": "a"}]}]', "must be a list"),
        ('[{"role": ["user"], "content": "a"}]', "must be a list"),
        ('[{"role": "tool", "content": "a"}]', "must be a list"),
        ('[{"role": "user", "content": "a"}, {"role": "system", "content": "a"}]', "system message at 1"),
    ):
        if text is not None:
            path.write_bytes(text.encode(errors="surrogateescape"))
        with pytest.raises(NanoinferError, match=words):
            talk.load(path)
        assert (talk.system, len(talk.messages)) == ("S", 2)
