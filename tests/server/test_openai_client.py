"""OpenAI's own client, which checks every response against its types: several prompts, log-probabilities, models and errors."""

import openai
import pytest

from nanoinfer import SamplingParams
from tests.helpers.doors import Completions, ask

PROMPT = "Once upon a time"
MESSAGES = [{"role": "system", "content": "Tell stories."}, {"role": "user", "content": "Hello"}]


def reference(llm, prompt, **params):
    return llm.generate(prompt, SamplingParams(**{"temperature": 0.7} | params), use_tqdm=False)[0]


def test_several_prompts_have_n_choices_each(server, llm):
    prompts, params = [PROMPT, "The cat"], {"max_tokens": 6, "seed": 2, "n": 2}
    expected = [answer.text for prompt in prompts for answer in reference(llm, prompt, **params).outputs]
    assert ask(server, Completions, prompts, **params).texts == expected


def test_a_negative_seed_is_that_of_its_64_bits(server, llm):
    for seed in (-(2**63), -2):
        expected = reference(llm, PROMPT, max_tokens=8, seed=seed % 2**64).outputs[0].text
        assert ask(server, Completions, PROMPT, max_tokens=8, seed=seed).texts == [expected]


def test_chat_logprobs_are_those_of_generate(client, llm):
    expected = reference(llm, llm.render_chat(MESSAGES), max_tokens=6, seed=9, logprobs=3).outputs[0]
    options = {"model": "tiny-qwen3", "messages": MESSAGES, "max_tokens": 6, "seed": 9, "logprobs": True, "top_logprobs": 3}
    choices = [choice for chunk in client.chat.completions.create(stream=True, **options) for choice in chunk.choices]
    streamed = [one for choice in choices if choice.logprobs for one in choice.logprobs.content]
    for content in (client.chat.completions.create(**options).choices[0].logprobs.content, streamed):
        wanted = [position[i].logprob for i, position in zip(expected.token_ids, expected.logprobs, strict=True)]
        assert [one.logprob for one in content] == pytest.approx(wanted, abs=1e-4)
        assert "".join(one.token for one in content) == expected.text
        assert all(bytes(one.bytes).decode() == one.token for one in content)
        for one in content:
            top = [other.logprob for other in one.top_logprobs]
            assert (len(top), top) == (3, sorted(top, reverse=True))


@pytest.mark.parametrize(("as_ids", "max_tokens"), [(False, 0), (True, 1), (False, 4)])
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


def test_models_are_listed_and_the_client_raises_its_own_errors(client, server):
    assert [model.id for model in client.models.list()] == ["tiny-qwen3", "alias"]
    assert client.models.retrieve("alias").owned_by == "nanoinfer"
    for ask_another in (client.models.retrieve, lambda name: client.completions.create(model=name, prompt="x")):
        with pytest.raises(openai.NotFoundError) as raised:
            ask_another("gpt-5")
        assert raised.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as raised:
        client.completions.create(model="alias", prompt=[5] * 600)
    assert raised.value.code == "context_length_exceeded"
    assert server.post("/v1/completions", {"prompt": "x", "max_tokens": 1}).json()["model"] == "tiny-qwen3"
