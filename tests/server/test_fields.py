"""Fields of a request: what other servers' clients send, which names an error has, and what vLLM adds to an answer."""

import pytest

from nanoinfer import SamplingParams
from tests.helpers.doors import events_of, post

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "Hello"}]
COMPLETION_BODY = {"prompt": "Once upon", "max_tokens": 3, "seed": 1}
CHAT_BODY = {"messages": MESSAGES, "max_tokens": 3, "seed": 1}
BODIES = {CHAT: CHAT_BODY, COMPLETIONS: COMPLETION_BODY}
SPECIAL = "<|im_start|>"


def choices(server, body, path=COMPLETIONS):
    return post(server, path, body)["choices"]


def chunks(server, body, path=COMPLETIONS):
    return events_of(server.post(path, body | {"stream": True}).text)


def test_typos_are_corrected_and_at_most_ten_are_listed(server):
    error = server.post(CHAT, CHAT_BODY | {"temperture": 1, "max_token": 2, "verbosity": "low"}).json()["error"]
    assert error["message"] == (
        "temperture is an unknown field (did you mean temperature?); max_token is an unknown field (did you mean max_tokens?); "
        "verbosity='low' is not supported (ask for the length in a message)"
    )
    assert error["param"] == "temperture"
    many = server.post(CHAT, CHAT_BODY | {f"unknown{i}" * 100: i for i in range(1000)}).json()["error"]
    assert many["message"].count("unknown field") == 10
    assert len(many["message"]) < 2000
    nested = CHAT_BODY | {"stream": True, "stream_options": {"include_usages": True}}
    assert "did you mean include_usage?" in server.post(CHAT, nested).json()["error"]["message"]


def test_unknown_fields_can_be_ignored(server, ignoring):
    fields = {"temperture": 0, "verbosity": "low", "stream_options": {"x": 1}, "stream": False}
    refused = ignoring.post(COMPLETIONS, COMPLETION_BODY | fields)
    assert refused.json()["error"]["param"] == "stream_options"  # known fields are checked
    del fields["stream_options"]
    assert choices(ignoring, COMPLETION_BODY | fields) == choices(server, COMPLETION_BODY)
    assert ignoring.post("/tokenize", {"prompt": "x", "y": 1}).status_code == 200


# ---- vLLM's fields of answers


def test_the_ids_that_could_be_drawn_come_with_each_choice_and_chunk(server):
    body = COMPLETION_BODY | {"return_sampling_mask": True, "top_k": 3, "return_token_ids": True}
    [choice] = choices(server, body)
    assert [len(mask) for mask in choice["sampling_mask"]] == [3] * len(choice["token_ids"])
    assert all(token_id in mask for token_id, mask in zip(choice["token_ids"], choice["sampling_mask"], strict=True))
    streamed = [mask for chunk in chunks(server, body) for one in chunk["choices"] for mask in one.get("sampling_mask") or ()]
    assert streamed == choice["sampling_mask"]
    assert "sampling_mask" not in choices(server, COMPLETION_BODY)[0]


def test_the_ids_of_the_prompt_come_with_those_of_the_answer(server):
    body = CHAT_BODY | {"return_token_ids": True, "n": 2}
    ids = server.post("/tokenize", {"messages": MESSAGES}).json()["tokens"]
    whole = server.post(CHAT, body).json()
    streamed = chunks(server, body, CHAT)
    assert whole["prompt_token_ids"] == ids
    assert [chunk["prompt_token_ids"] for chunk in streamed if "prompt_token_ids" in chunk] == [ids]
    assert "prompt_token_ids" in streamed[0]
    assert "prompt_token_ids" not in server.post(CHAT, CHAT_BODY).json()

    prompts = [[300, 301], [302]]
    body = {"prompt": prompts, "max_tokens": 2, "return_token_ids": True}
    assert [choice["prompt_token_ids"] for choice in choices(server, body)] == prompts
    first = {}
    for chunk in chunks(server, body):
        for choice in chunk["choices"]:
            first.setdefault(choice["index"], choice.get("prompt_token_ids"))
    assert first == {0: prompts[0], 1: prompts[1]}


def test_prompt_logprobs_are_those_of_generate(server, llm):
    expected = llm.generate("Once upon", SamplingParams(max_tokens=1, prompt_logprobs=2), use_tqdm=False)[0].prompt_logprobs
    choice = choices(server, {"prompt": "Once upon", "max_tokens": 1, "prompt_logprobs": 2})[0]
    assert choice["prompt_logprobs"][0] is None
    for entry, position in zip(choice["prompt_logprobs"][1:], expected[1:], strict=True):
        assert [int(token_id) for token_id in entry] == list(position)
        assert [one["rank"] for one in entry.values()] == [one.rank for one in position.values()]
        assert [one["decoded_token"] for one in entry.values()] == [one.decoded_token for one in position.values()]
        assert [one["logprob"] for one in entry.values()] == pytest.approx([one.logprob for one in position.values()], abs=1e-4)
    assert server.post(CHAT, CHAT_BODY | {"prompt_logprobs": 0}).json()["prompt_logprobs"][0] is None


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_each_chunk_has_the_usage_so_far(server, path):
    options, body, num_tokens = {"include_usage": True, "continuous_usage_stats": True}, BODIES[path] | {"n": 2}, 0
    streamed = chunks(server, body | {"stream_options": options, "return_token_ids": True}, path)
    for chunk in streamed:
        if not any("role" in choice.get("delta", {}) for choice in chunk["choices"]):
            num_tokens += sum(len(choice["token_ids"]) for choice in chunk["choices"])
            assert chunk["usage"]["completion_tokens"] == num_tokens
    assert num_tokens == server.post(path, body).json()["usage"]["completion_tokens"] > 0
    assert len({chunk["usage"]["prompt_tokens"] for chunk in streamed}) == 1


def test_tokens_as_ids(server):
    body = COMPLETION_BODY | {"return_tokens_as_token_ids": True, "return_token_ids": True, "logprobs": 1}
    choice = choices(server, body)[0]
    assert choice["logprobs"]["tokens"] == [f"token_id:{i}" for i in choice["token_ids"]]
    assert all(name.startswith("token_id:") for top in choice["logprobs"]["top_logprobs"] for name in top)
    body = CHAT_BODY | {"return_tokens_as_token_ids": True, "return_token_ids": True, "logprobs": True}
    choice = choices(server, body, CHAT)[0]
    assert [one["token"] for one in choice["logprobs"]["content"]] == [f"token_id:{i}" for i in choice["token_ids"]]


def test_the_last_message_is_continued_and_echoed(server, llm):
    messages = [*MESSAGES, {"role": "assistant", "content": "Once upon a"}]
    body = {"messages": messages, "max_tokens": 4, "temperature": 0, "continue_final_message": True, "return_token_ids": True}
    continued = {"add_generation_prompt": False, "continue_final_message": True}
    prompt, params = llm.render_chat(messages, **continued), SamplingParams(temperature=0, max_tokens=4)
    assert prompt["prompt"].endswith("assistant\nOnce upon a")
    expected = llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].text
    assert llm.chat(messages, params, False, **continued)[0].outputs[0].text == expected
    for echo, text in ((False, expected), (True, "Once upon a" + expected)):
        deltas = [choice["delta"] for chunk in chunks(server, body | {"echo": echo}, CHAT) for choice in chunk["choices"]]
        assert "".join(delta.get("content") or "" for delta in deltas) == text
        whole = post(server, CHAT, body | {"echo": echo})
        assert whole["choices"][0]["message"]["content"] == text
        assert whole["prompt_token_ids"] == prompt["prompt_token_ids"]
    tokens = {"messages": messages, "continue_final_message": True}
    assert post(server, "/tokenize", tokens)["tokens"] == prompt["prompt_token_ids"]
    # A question is not echoed, because the answer is another message.
    assert choices(server, CHAT_BODY | {"echo": True}, CHAT) == choices(server, CHAT_BODY, CHAT)


@pytest.mark.parametrize(("stream", "skip", "as_ids"), [(False, False, True), (False, True, False), (True, True, True)])
def test_offsets_fit_the_text_with_special_tokens(server, llm, stream, skip, as_ids):
    """The prompt keeps its special tokens. Those of the answer are skipped, or not."""
    special = llm.get_tokenizer().convert_tokens_to_ids(SPECIAL)
    ids = [special, 300, special, 301]
    prompt = ids if as_ids else llm.get_tokenizer().decode(ids)
    body = {"prompt": prompt, "echo": True, "logprobs": 0, "max_tokens": 6, "temperature": 1, "seed": 1}
    body |= {"skip_special_tokens": skip, "logit_bias": {str(special): 100}, "min_tokens": 6, "no_repeat_ngram_size": 2}
    parts = [choice for chunk in chunks(server, body) for choice in chunk["choices"]] if stream else choices(server, body)
    text = "".join(part["text"] for part in parts)
    tokens, offsets = (
        [x for part in parts if part["logprobs"] for x in part["logprobs"][name]] for name in ("tokens", "text_offset")
    )
    assert text.startswith(llm.get_tokenizer().decode(ids))
    assert SPECIAL in tokens[4:], "the answer has one, so that the test can fail"
    for token, offset in zip(tokens, offsets, strict=True):
        if token != SPECIAL or not skip:
            assert text[offset : offset + len(token)] == token
    assert (SPECIAL in text[offsets[4] :]) is not skip


def test_a_refusal_is_a_text_part(server):
    def count(part):
        messages = [*MESSAGES, {"role": "assistant", "content": [part]}, *MESSAGES]
        return server.post("/tokenize", {"messages": messages}).json()["count"]

    assert count({"type": "refusal", "refusal": "I cannot"}) == count({"type": "text", "text": "I cannot"})


def test_the_last_tokens_of_a_prompt_are_kept_and_special_tokens_can_be_left_out(server):
    def prompt_ids(path, body):
        whole = post(server, path, body | {"max_tokens": 1, "return_token_ids": True})
        return whole.get("prompt_token_ids") or whole["choices"][0]["prompt_token_ids"]

    text = "Once upon a time there was a dog. " * 100
    ids = server.post("/tokenize", {"prompt": text}).json()["tokens"]
    assert len(ids) > 512, "more than the context"
    for given in (text, ids):
        assert prompt_ids(COMPLETIONS, {"prompt": given, "truncate_prompt_tokens": 7}) == ids[-7:]
        assert prompt_ids(COMPLETIONS, {"prompt": given, "truncate_prompt_tokens": -1}) == ids[-511:]
    echoed = server.post(COMPLETIONS, {"prompt": text, "truncate_prompt_tokens": 7, "echo": True, "max_tokens": 0}).json()
    assert text.endswith(echoed["choices"][0]["text"])
    messages = [{"role": "user", "content": text}]
    rendered = server.post("/tokenize", {"messages": messages}).json()["tokens"]
    assert prompt_ids(CHAT, {"messages": messages, "truncate_prompt_tokens": 9}) == rendered[-9:]
    assert prompt_ids(CHAT, {"messages": MESSAGES, "add_special_tokens": False}) == prompt_ids(CHAT, {"messages": MESSAGES})
    for adds in (True, False):
        tokens = server.post("/tokenize", {"prompt": "Once", "add_special_tokens": adds}).json()["tokens"]
        assert prompt_ids(COMPLETIONS, {"prompt": "Once", "add_special_tokens": adds}) == tokens


def test_the_usage_of_a_chat_says_what_was_thought(tool_server):
    think, end = (tool_server.async_llm.llm.get_tokenizer().convert_tokens_to_ids(tag) for tag in ("<think>", "</think>"))
    messages = {"messages": [{"role": "user", "content": "How warm?"}], "max_tokens": 5}
    for num_thoughts, body in (
        (5, {"logit_bias": {str(think): 100}}),
        (15, {"n": 3, "logit_bias": {str(think): 100}}),
        (4, {"logit_bias": {str(think): 100}, "thinking_token_budget": 2}),
        (0, {"logit_bias": {str(end): 100}}),
    ):
        whole = post(tool_server, CHAT, messages | body)
        [*_, last] = chunks(tool_server, messages | body | {"stream_options": {"include_usage": True}}, CHAT)
        for usage in (whole["usage"], last["usage"]):
            assert usage["completion_tokens_details"] == {"reasoning_tokens": num_thoughts}
