"""A chat ends at the EOS that its template writes, too. A text ends where the checkpoint says."""

import asyncio
import json
import shutil

import pytest

from nanoinfer import LLM, AsyncLLM, BeamSearchParams, SamplingParams, StructuredOutputsParams
from nanoinfer.loading.checkpoint import BUNDLED

DOCUMENT_END, TURN_END = 0, 2  # <|endoftext|> and <|im_end|> in tiny-qwen3
CHAT = [{"role": "user", "content": "Tell me a story about Lily"}]
ENGINE = {"kv_cache_memory": 2**22, "enforce_eager": True}
BIAS = {TURN_END: 100}  # every token is the end of a turn, where it is allowed


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A checkpoint whose generation_config.json has only the end of a document."""
    path = shutil.copytree(BUNDLED / "tiny-qwen3", tmp_path_factory.mktemp("ends") / "model")
    changed = {"tokenizer_config.json": {"eos_token": "<|im_end|>"}, "generation_config.json": {"eos_token_id": 0}}
    for name, changes in changed.items():
        (path / name).write_text(json.dumps(json.loads((path / name).read_text()) | changes))
    return path


@pytest.fixture(scope="module")
def llm(path):
    return LLM(path, **ENGINE)


def params(**more):
    return SamplingParams(**{"temperature": 0, "max_tokens": 6, "logit_bias": BIAS} | more)


def test_a_chat_ends_at_the_tokenizers_eos_if_the_template_writes_it(llm):
    prompt = llm.render_chat(CHAT)
    outputs = [*llm.chat(CHAT, params(), use_tqdm=False), *llm.generate([prompt], params(), use_tqdm=False)]
    outputs += [delta.output for delta in llm.stream(prompt, params()) if delta.output is not None]
    for output in outputs:
        [answer] = output.outputs
        assert (answer.token_ids, answer.text) == ([TURN_END], "")
        assert (answer.finish_reason, answer.stop_reason) == ("stop", None)
    for template in ("{{ messages[0].content }}", "{{ messages[0].content }}{% if false %}<|im_end|>{% endif %}"):
        [answer] = llm.chat(CHAT, params(), use_tqdm=False, chat_template=template)[0].outputs
        assert (answer.token_ids, answer.finish_reason) == ([TURN_END] * 6, "length")
    later = "{{ messages[0].content }}{% for m in messages if m.role == 'assistant' %}{{ m.content + eos_token }}{% endfor %}"
    assert llm.chat(CHAT, params(), use_tqdm=False, chat_template=later)[0].outputs[0].token_ids == [TURN_END]


def test_a_text_ends_as_in_transformers(llm):
    text = llm.render_chat(CHAT)["prompt"]
    for prompt in (text, {"prompt": text}, {"prompt": text, "prompt_token_ids": llm.get_tokenizer().encode(text)}):
        [answer] = llm.generate(prompt, params(), use_tqdm=False)[0].outputs
        assert (answer.token_ids, answer.finish_reason) == ([TURN_END] * 6, "length")
    [answer] = llm.generate(text, params(logit_bias={DOCUMENT_END: 100}), use_tqdm=False)[0].outputs
    assert answer.token_ids == [DOCUMENT_END]


def test_the_end_of_a_chat_obeys_min_tokens_ignore_eos_and_a_format(llm):
    def answer(**more):
        return llm.chat(CHAT, params(**more), use_tqdm=False)[0].outputs[0]

    short = answer(min_tokens=3).token_ids
    assert (len(short), short.index(TURN_END)) == (4, 3)
    assert answer(ignore_eos=True).token_ids == [TURN_END] * 6
    assert answer(logit_bias={DOCUMENT_END: 100}).token_ids == [DOCUMENT_END]
    form = StructuredOutputsParams(choice=["yes"])
    formed = answer(structured_outputs=form, max_tokens=9, logit_bias={TURN_END: 100, DOCUMENT_END: -100})
    assert (formed.text, formed.token_ids[-1], formed.finish_reason) == ("yes", TURN_END, "stop")


def test_beams_of_a_chat_end_there(llm):
    prompt, search = llm.render_chat(CHAT), BeamSearchParams(beam_width=1, max_tokens=9)
    [beam] = llm.beam_search(prompt, search)[0].sequences
    end = beam.token_ids[4]
    [ended] = llm.beam_search(prompt | {"eos_token_ids": [end]}, search)[0].sequences
    assert ended.token_ids == beam.token_ids[: beam.token_ids.index(end) + 1]
    assert (beam.finish_reason, ended.finish_reason) == ("length", "stop")


def test_a_chat_over_http_ends_there_by_every_endpoint_and_a_completion_does_not(path):
    pytest.importorskip("fastapi", reason='fastapi is not installed; pip install -e ".[server]"')
    from nanoinfer.server.app import create_app
    from nanoinfer.server.batch import post
    from nanoinfer.server.settings import ServerSettings

    bodies = {
        "/v1/chat/completions": {"messages": CHAT, "max_tokens": 6},
        "/v1/messages": {"messages": CHAT, "max_tokens": 6},
        "/v1/responses": {"input": CHAT[0]["content"], "max_output_tokens": 6},
        "/v1/completions": {"prompt": CHAT[0]["content"], "max_tokens": 6},
    }

    async def replies():
        async with AsyncLLM(path, **ENGINE) as async_llm:
            app = create_app(async_llm, ServerSettings(served_model_name=("tiny",)))
            bias = {"logit_bias": {str(token_id): value for token_id, value in BIAS.items()}}
            return [await post(app, endpoint, body | bias) for endpoint, body in bodies.items()]

    (_, chat), (_, message), (_, response), (_, completion) = asyncio.run(replies())
    assert (chat["choices"][0]["finish_reason"], chat["usage"]["completion_tokens"]) == ("stop", 1)
    assert (message["stop_reason"], message["usage"]["output_tokens"]) == ("end_turn", 1)
    assert (response["status"], response["usage"]["output_tokens"]) == ("completed", 1)
    assert (completion["choices"][0]["finish_reason"], completion["usage"]["completion_tokens"]) == ("length", 6)
