"""OpenAI's own client, which checks every response against its types: all shapes, and the tokens of LLM.generate."""

import openai
import pytest

from nanoinfer import SamplingParams

PROMPT = "Once upon a time"
MESSAGES = [{"role": "system", "content": "Tell stories."}, {"role": "user", "content": "Hello"}]


def reference(llm, prompt, **params):
    return llm.generate(prompt, SamplingParams(**{"temperature": 0.7} | params), use_tqdm=False)[0]


@pytest.mark.parametrize("options", [{}, {"n": 3, "temperature": 0.9}, {"temperature": 0}, {"stop": [" the", "."]}])
def test_a_completion_is_the_text_of_generate(client, lenient_client, llm, options):
    expected = reference(llm, PROMPT, max_tokens=12, seed=5, **options)
    whole = client.completions.create(model="tiny-qwen3", prompt=PROMPT, max_tokens=12, seed=5, **options)
    assert whole.object == "text_completion"
    assert [choice.text for choice in whole.choices] == [answer.text for answer in expected.outputs]
    assert [choice.finish_reason for choice in whole.choices] == [answer.finish_reason for answer in expected.outputs]
    assert [choice.index for choice in whole.choices] == list(range(len(expected.outputs)))
    assert whole.usage.prompt_tokens == len(expected.prompt_token_ids)
    assert whole.usage.completion_tokens == sum(len(answer.token_ids) for answer in expected.outputs)

    texts = [""] * len(expected.outputs)
    reasons = {}
    stream = lenient_client.completions.create(model="alias", prompt=PROMPT, max_tokens=12, seed=5, stream=True, **options)
    for chunk in stream:
        assert chunk.model == "alias"
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    assert texts == [answer.text for answer in expected.outputs]
    assert reasons == {answer.index: answer.finish_reason for answer in expected.outputs}


def test_several_prompts_have_n_choices_each(client, lenient_client, llm):
    prompts, params = [PROMPT, "The cat"], {"max_tokens": 6, "seed": 2, "n": 2}
    expected = [answer.text for prompt in prompts for answer in reference(llm, prompt, **params).outputs]
    whole = client.completions.create(model="tiny-qwen3", prompt=prompts, **params)
    assert [choice.text for choice in whole.choices] == expected
    texts = [""] * 4
    for chunk in lenient_client.completions.create(model="tiny-qwen3", prompt=prompts, stream=True, **params):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == expected


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_is_the_text_of_llm_chat(client, llm, stream):
    expected = llm.chat(MESSAGES, SamplingParams(temperature=0.7, max_tokens=10, seed=9, n=2), use_tqdm=False)[0]
    options = {"model": "tiny-qwen3", "messages": MESSAGES, "max_completion_tokens": 10, "seed": 9, "n": 2}
    answers = [{"content": "", "reason": None, "role": None} for _ in range(2)]
    if stream:
        chunks = list(client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **options))
        for chunk in chunks[:-1]:
            assert chunk.object == "chat.completion.chunk"
            assert chunk.usage is None
            for choice in chunk.choices:
                answer = answers[choice.index]
                answer["content"] += choice.delta.content or ""
                answer["role"] = answer["role"] or choice.delta.role
                answer["reason"] = choice.finish_reason
        assert chunks[-1].choices == []
        usage = chunks[-1].usage
    else:
        whole = client.chat.completions.create(**options)
        for choice in whole.choices:
            answers[choice.index] = {
                "content": choice.message.content,
                "reason": choice.finish_reason,
                "role": choice.message.role,
            }
        usage = whole.usage
    assert [one["content"] for one in answers] == [answer.text for answer in expected.outputs]
    assert [one["reason"] for one in answers] == [answer.finish_reason for answer in expected.outputs]
    assert {one["role"] for one in answers} == {"assistant"}
    assert usage.prompt_tokens == len(expected.prompt_token_ids)
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def test_the_client_sends_what_openai_does_not_know_and_what_only_openai_knows(client, llm):
    ours = {"top_k": 5, "min_p": 0.01, "repetition_penalty": 1.1, "min_tokens": 3, "bad_words": [" there"]}
    expected = reference(llm, PROMPT, max_tokens=10, seed=7, logit_bias={300: 2.0}, **ours)
    theirs = {"user": "me", "logit_bias": {"300": 2.0}}
    whole = client.completions.create(
        model="tiny-qwen3", prompt=PROMPT, max_tokens=10, seed=7, extra_body=ours | {"return_token_ids": True}, **theirs
    )
    assert whole.choices[0].token_ids == expected.outputs[0].token_ids
    client.chat.completions.create(
        model="tiny-qwen3", messages=MESSAGES, max_tokens=1, store=False, metadata={"a": "b"}, service_tier="auto",
        parallel_tool_calls=True, safety_identifier="x", user="me",
    )  # fmt: skip


@pytest.mark.parametrize("seed", [0, -(2**63), 2**63 - 1, -2])
def test_any_64_bit_seed_is_the_seed_of_generate(client, llm, seed):
    expected = reference(llm, PROMPT, max_tokens=8, seed=seed % 2**64).outputs[0].text
    assert client.completions.create(model="tiny-qwen3", prompt=PROMPT, max_tokens=8, seed=seed).choices[0].text == expected


def test_chat_logprobs_are_those_of_generate(client, llm):
    expected = llm.chat(MESSAGES, SamplingParams(temperature=0.7, max_tokens=6, seed=9, logprobs=3), use_tqdm=False)[0].outputs[
        0
    ]
    options = {"model": "tiny-qwen3", "messages": MESSAGES, "max_tokens": 6, "seed": 9, "logprobs": True, "top_logprobs": 3}
    whole = client.chat.completions.create(**options).choices[0].logprobs.content
    streamed = [
        one
        for chunk in client.chat.completions.create(stream=True, **options)
        for choice in chunk.choices
        if choice.logprobs
        for one in choice.logprobs.content
    ]
    for content in (whole, streamed):
        assert [one.logprob for one in content] == pytest.approx(
            [position[i].logprob for i, position in zip(expected.token_ids, expected.logprobs, strict=True)], abs=1e-4
        )
        assert "".join(one.token for one in content) == expected.text
        assert all(bytes(one.bytes).decode() == one.token for one in content)
        for one in content:
            top = [other.logprob for other in one.top_logprobs]
            assert len(top) == 3
            assert top == sorted(top, reverse=True)


@pytest.mark.parametrize("as_ids", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 1, 4])
def test_echo_has_the_log_probabilities_of_the_prompt(lenient_client, llm, as_ids, max_tokens):
    """What lm-eval's local-completions sends and reads."""
    expected = reference(llm, PROMPT, max_tokens=max(max_tokens, 1), temperature=0, prompt_logprobs=1, logprobs=1)
    ids, answer = expected.prompt_token_ids, expected.outputs[0]
    positions = [*expected.prompt_logprobs, *answer.logprobs[:max_tokens]]
    all_ids = ids + answer.token_ids[:max_tokens]
    text = PROMPT + (answer.text if max_tokens else "")
    options = {"model": "tiny-qwen3", "prompt": ids if as_ids else PROMPT, "max_tokens": max_tokens, "temperature": 0}
    options |= {"echo": True, "logprobs": 1}
    completion = lenient_client.completions.create(**options)
    assert completion.usage.completion_tokens == max_tokens
    whole = completion.choices[0]
    chunks = [choice for chunk in lenient_client.completions.create(stream=True, **options) for choice in chunk.choices]
    for choices in ([whole], chunks):
        assert "".join(choice.text for choice in choices) == text
        logprobs = [choice.logprobs for choice in choices if choice.logprobs]
        values = [value for one in logprobs for value in one.token_logprobs]
        assert values[0] is None
        wanted = [position[i].logprob for i, position in zip(all_ids[1:], positions[1:], strict=True)]
        assert values[1:] == pytest.approx(wanted, abs=1e-4)
        tokens = [token for one in logprobs for token in one.tokens]
        assert "".join(tokens) == text
        assert [o for one in logprobs for o in one.text_offset] == [len("".join(tokens[:i])) for i in range(len(tokens))]
        tops = [top for one in logprobs for top in one.top_logprobs]
        assert tops[0] is None
        assert all(token in top for token, top in zip(tokens[1:], tops[1:], strict=True))


@pytest.mark.slow
def test_prefixes_are_shared_only_with_requests_of_the_same_salt(server, client):
    text = "A prompt that no other test has sent to this server. " * 8
    bodies = {
        "/v1/completions": {"prompt": text},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": text}]},
        "/v1/messages": {"messages": [{"role": "user", "content": text}]},
        "/v1/responses": {"input": text},
    }
    for path, body in bodies.items():
        cached = []
        for salt in (f"a{path}", f"b{path}", f"a{path}"):
            limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
            usage = server.post(path, body | {limit: 1, "cache_salt": salt}).json()["usage"]
            details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
            cached.append(details.get("cached_tokens", usage.get("cache_read_input_tokens")))
        assert cached[:2] == [0, 0], path
        assert cached[2] > 0, path
    assert server.post("/v1/completions", {"prompt": text, "cache_salt": ""}).json()["error"]["param"] == "cache_salt"


def test_cached_tokens_are_reported(client):
    prompt = [300 + i for i in range(200)]
    counts = [
        client.completions.create(model="tiny-qwen3", prompt=prompt, max_tokens=1).usage.prompt_tokens_details.cached_tokens
        for _ in range(2)
    ]
    assert counts[0] == 0
    assert 0 < counts[1] < 200


def test_models_are_listed(client):
    assert [model.id for model in client.models.list()] == ["tiny-qwen3", "alias"]
    assert client.models.retrieve("alias").owned_by == "nanoinfer"
    with pytest.raises(openai.NotFoundError) as raised:
        client.models.retrieve("gpt-5")
    assert raised.value.code == "model_not_found"


def test_the_client_raises_its_own_errors(client, server):
    with pytest.raises(openai.BadRequestError) as raised:
        client.completions.create(model="tiny-qwen3", prompt=[5] * 600)
    assert raised.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="temperature must be finite and >= 0, got -1"):
        client.completions.create(model="tiny-qwen3", prompt="x", temperature=-1)
    with pytest.raises(openai.NotFoundError) as raised:
        client.completions.create(model="other", prompt="x")
    assert raised.value.code == "model_not_found"
    assert server.post("/v1/completions", {"prompt": "x", "max_tokens": 1}).json()["model"] == "tiny-qwen3"
