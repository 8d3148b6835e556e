"""Answers with a format over HTTP: OpenAI's response_format and vLLM's structured_outputs."""

import asyncio
import json
import shutil
from dataclasses import replace

import pytest

from nanoinfer import AsyncLLM, SamplingParams, StructuredOutputsParams
from nanoinfer.cli.options import EngineOptions
from nanoinfer.cli.serve import ServerOptions, load_server_llm
from nanoinfer.errors import InvalidValueError
from nanoinfer.features.chat.tools import after_thinking
from nanoinfer.features.structured import grammar
from nanoinfer.loading.checkpoint import BUNDLED
from nanoinfer.server.app import create_app
from nanoinfer.server.batch import BatchRequest
from nanoinfer.server.batch import answer as answer_of_batch
from nanoinfer.server.settings import ServerSettings
from tests.helpers.http_server import serving

pytestmark = pytest.mark.slow

pytest.importorskip("llguidance")

SCHEMA = {"type": "object", "properties": {"name": {"enum": ["Lily", "Tom"]}, "age": {"type": "integer", "maximum": 9}}}
SCHEMA |= {"required": ["name", "age"], "additionalProperties": False}
MESSAGES = [{"role": "user", "content": "Tell me a story about Lily"}]
OPEN = "<|im_start|>assistant\n<think>\n"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def test_response_format_gives_json_that_follows_the_schema(client):
    answer_format = {"type": "json_schema", "json_schema": {"name": "hero", "schema": SCHEMA, "strict": True}}
    choice = client.chat.completions.create(
        model="tiny-qwen3", messages=MESSAGES, response_format=answer_format, temperature=1.5, seed=1, max_tokens=60
    ).choices[0]
    answer = json.loads(choice.message.content)
    assert (choice.finish_reason, set(answer)) == ("stop", {"name", "age"})
    assert answer["name"] in ("Lily", "Tom")


def test_any_json_object(client):
    answer = client.chat.completions.create(
        model="tiny-qwen3", messages=MESSAGES, response_format={"type": "json_object"}, seed=4, max_tokens=200, temperature=0.3
    ).choices[0]
    assert answer.finish_reason == "length" or isinstance(json.loads(answer.message.content), dict)
    assert answer.message.content.startswith("{")


def test_the_tokens_are_those_of_generate(server, llm):
    body = {"prompt": "Once", "structured_outputs": {"regex": " upon [a-z ]{9,}\\."}, "seed": 3, "max_tokens": 40}
    answer_format = StructuredOutputsParams(regex=" upon [a-z ]{9,}\\.")
    params = replace(llm.get_default_sampling_params(), structured_outputs=answer_format, seed=3, max_tokens=40)
    expected = llm.generate("Once", params, use_tqdm=False)[0].outputs[0].text
    assert server.post(COMPLETIONS, body).json()["choices"][0]["text"] == expected


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type must be text, json_object or json_schema"),
        ({"response_format": {"type": "json_schema"}}, "json_schema must be an object with a schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": 5}}}, "with a schema"),
        ({"response_format": {"type": "json_object"}, "structured_outputs": {"choice": ["a"]}}, "not both"),
        ({"structured_outputs": {}}, "exactly one of"),
        ({"structured_outputs": {"regex": "("}}, "regex cannot be used"),
        ({"structured_outputs": {"pattern": "a"}}, "has no argument 'pattern'"),
        ({"structured_outputs": {"choice": ["a"]}, "ignore_eos": True}, "ignore_eos cannot be used"),
    ],
)
def test_a_format_that_cannot_be_used_gets_400(server, more, message):
    response = server.post(CHAT, {"messages": MESSAGES} | more)
    assert response.status_code == 400
    assert message in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("answer_format", "answer"),
    [
        ({"json": SCHEMA}, '{"name":"Tom","age":7}'),
        ({"choice": ["yes", "no"]}, "no"),
        ({"regex": "a/b+"}, "a/bb"),
        ({"regex": r"a\/b\\/"}, "a/b\\/"),
        ({"regex": "a\\\nb\n[/]"}, "a\nb\n/"),
    ],
)
def test_behind_a_think_block_the_format_begins(answer_format, answer, llm):
    """The prompt has opened the block. The bundled model does not know how to close it, so a bias helps."""
    tokenizer = llm.get_tokenizer()
    params = after_thinking(StructuredOutputsParams(**answer_format), OPEN)
    state = llm.engine.inputs.prepare([5], SamplingParams(structured_outputs=params)).constraints[0].copy()
    for token_id in tokenizer.encode("Hm, hm.\n</think>\n\n" + answer, add_special_tokens=False):
        state.advance(token_id)
        assert state.error is None
    assert state.is_complete or state._matcher.is_accepting()


@pytest.mark.parametrize(
    ("answer_format", "message"),
    [
        ({"regex": "a("}, r"unclosed group$"),  # and nothing of the grammar around it
        ({"json": {"type": "nope"}}, r"Invalid type: nope$"),
        ({"json": {"const": "a" * 9000}}, r"^each string of json must have at most 8192 characters, got 9000$"),
    ],
)
def test_behind_a_think_block_an_error_is_about_the_format(answer_format, message, llm):
    with pytest.raises(InvalidValueError, match=message):
        llm.engine.inputs.prepare(
            [5], SamplingParams(structured_outputs=after_thinking(StructuredOutputsParams(**answer_format), OPEN))
        )


def test_a_closed_think_block_changes_nothing():
    params = StructuredOutputsParams(choice=["a"])
    assert after_thinking(params, "<think>\n\n</think>\n\n") is params


def test_a_server_starts_with_a_tokenizer_that_llguidance_cannot_read_and_refuses_formats(tmp_path):
    folder = shutil.copytree(BUNDLED / "tiny-qwen3", tmp_path / "model")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer | {"decoder": None}))
    async_llm, _ = load_server_llm(EngineOptions(model=str(folder)), ServerOptions(seed=0))
    with serving(lambda: async_llm) as server:
        assert server.post(COMPLETIONS, {"prompt": "Once", "max_tokens": 2}).status_code == 200
        response = server.post(CHAT, {"messages": MESSAGES, "response_format": {"type": "json_object"}})
        assert response.status_code == 400
        assert "not supported with this tokenizer, which llguidance cannot read" in response.json()["error"]["message"]


def test_an_error_about_a_format_names_the_field_of_the_client(tool_server):
    bad, strict = {"type": "object", "properties": {"a": {"type": "nothing"}}}, {"name": "f", "parameters": {"type": "object"}}
    question = [{"role": "user", "content": "How warm?"}]
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    named = {"type": "json_schema", "name": "hero", "schema": bad}
    config = {"format": {"type": "json_schema", "schema": bad}}
    cases = [
        (CHAT, {"messages": question, "response_format": {"type": "json_schema", "json_schema": {"schema": bad}}},
         "response_format"),
        (CHAT, {"messages": question, "structured_outputs": {"json": bad}}, "structured_outputs"),
        (COMPLETIONS, {"prompt": "x", "structured_outputs": {"regex": "("}}, "structured_outputs"),
        ("/v1/responses", {"input": "x", "text": {"format": named}}, "text.format"),
        ("/v1/messages", {"messages": question, "max_tokens": 5, "output_config": config},
         "output_config.format"),
        ("/v1/responses", {"input": "x", "text": {"format": named | {"schema": SCHEMA}},
                           "tools": [{"type": "function", "strict": True} | strict]}, "text.format"),
        (CHAT, {"messages": question, "response_format": {"type": "json_object"},
                "tools": [{"type": "function", "function": strict | {"strict": True}}]}, "response_format"),
    ]  # fmt: skip
    for thinks in ({}, off):
        for path, body, field in cases:
            more = {} if path == COMPLETIONS else thinks
            refused = tool_server.post(path, body | more)
            assert refused.status_code == 400, refused.text
            error = refused.json()["error"]
            assert error["message"].startswith(field)
            assert error["param"] == field.partition(".")[0]


def test_what_cannot_be_enforced_has_its_place_in_the_body_of_the_client(tool_server):
    """A regular expression or a name that looks like a path is shown as it was written."""
    looks = {"type": "string", "pattern": "(?!a)"}
    bad = {"type": "object", "properties": {"/etc/a/b": {"$ref": "#/$defs/Address"}}}
    bad["$defs"] = {"Address": {"properties": {"/usr/x/y": {"items": looks}}}}
    place = ".$defs.Address.properties./usr/x/y.items"
    question, more = [{"role": "user", "content": "How warm?"}], {"max_tokens": 5}
    strict = {"name": "f", "parameters": bad, "strict": True}
    tools = [{"type": "function", "function": {"name": "g"}}, {"type": "function", "function": strict}]
    flat = {"tools": [{"type": "function", "name": "g"}, {"type": "function"} | strict]}
    schemas = [{"name": "g", "input_schema": {"type": "object"}}, {"name": "f", "input_schema": bad}]
    named = {"type": "json_schema", "name": "hero", "schema": bad}
    cases = [
        (CHAT, {"messages": question, "response_format": {"type": "json_schema", "json_schema": {"schema": bad}}},
         "response_format.json_schema.schema"),
        (CHAT, {"messages": question, "structured_outputs": {"json": bad}}, "structured_outputs.json"),
        (COMPLETIONS, {"prompt": "x", "structured_outputs": {"json": bad}}, "structured_outputs.json"),
        ("/v1/responses", {"input": "x", "text": {"format": named}}, "text.format.schema"),
        ("/v1/messages", {"messages": question, "output_config": {"format": {"type": "json_schema", "schema": bad}}} | more,
         "output_config.format.schema"),
        (CHAT, {"messages": question, "tools": tools}, "tools[1].parameters"),
        (CHAT, {"messages": question, "tools": tools, "tool_choice": "required"}, "tools[1].parameters"),
        (CHAT, {"messages": question, "tools": tools, "response_format": {"type": "json_object"},
                "tool_choice": {"type": "function", "function": {"name": "f"}}}, "tools[1].parameters"),
        ("/v1/responses", {"input": "x"} | flat, "tools[1].parameters"),
        ("/v1/messages", {"messages": question, "tools": schemas, "tool_choice": {"type": "any"}} | more,
         "tools[1].input_schema"),
    ]  # fmt: skip
    for path, body, field in cases:
        refused = tool_server.post(path, body)
        assert refused.status_code == 400, refused.text
        error = refused.json()["error"]
        assert error["message"].startswith(f"{field}{place} cannot be used: these keywords cannot be enforced")
        assert error["param"] == field.partition(".")[0].partition("[")[0]
    regex = {"prompt": "x", "structured_outputs": {"regex": "(/usr/[a-z]+/bin"}}
    assert r"(\/usr\/[a-z]+\/bin" in tool_server.post(COMPLETIONS, regex).json()["error"]["message"]


def test_a_format_beside_a_forced_function_is_left_out(tool_server, soon):
    tool = {"type": "function", "name": "hero", "parameters": SCHEMA}
    text = {"format": {"type": "json_schema", "name": "hero", "schema": SCHEMA, "strict": True}}
    body = {"input": "Who?", "tools": [tool], "tool_choice": {"type": "function", "name": "hero"}, "text": text}
    response = tool_server.post("/v1/responses", body | {"max_output_tokens": 200, "logit_bias": soon})
    assert response.status_code == 200, response.text
    assert response.json()["output"][-1]["type"] == "function_call"
    assert response.json()["text"] == text


def limited(path, number):
    """A request whose answer reaches the limit of lexer states after 70 letters. number: makes another grammar."""
    regex = f"A{{70}}[ab]*a[ab]{{{number}}}c"
    schema = {"type": "object", "properties": {"k": {"type": "string", "pattern": f"^{regex}$"}}, "required": ["k"]}
    unnamed = {"type": "json_schema", "schema": schema}
    named = unnamed | {"name": "x"}
    return {
        COMPLETIONS: {"prompt": "x", "max_tokens": 200, "structured_outputs": {"regex": regex}},
        CHAT: {"messages": MESSAGES, "response_format": {"type": "json_schema", "json_schema": named}},
        "/v1/messages": {
            "messages": MESSAGES,
            "max_tokens": 200,
            "output_config": {"format": {"type": "json_schema", "schema": schema}},
        },
        "/v1/responses": {"input": "x", "text": {"format": named}},
    }[path]


LIMITED = [
    (COMPLETIONS, "structured_outputs"),
    (CHAT, "response_format"),
    ("/v1/messages", "output_config.format"),
    ("/v1/responses", "text.format"),
]
TOO_MANY_STATES = "its regular expressions have too many states; repeat fewer times in them"


@pytest.mark.parametrize(("path", "field"), LIMITED)
def test_a_grammar_that_reaches_a_limit_while_answering_is_the_clients_error(server, path, field, monkeypatch):
    monkeypatch.setitem(grammar._LIMITS, "max_lexer_states", 150)
    number = 400 + 2 * LIMITED.index((path, field))  # letters, so that no answer ends before
    body, streamed = limited(path, number), limited(path, number + 1) | {"stream": True}
    response = server.post(path, body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["message"], error["type"]) == (f"{field}: {TOO_MANY_STATES}", "invalid_request_error")
    assert error["param"] == field.partition(".")[0]
    response = server.post(path, streamed)
    assert response.status_code == 200
    [event] = [line for line in response.text.splitlines() if line.startswith("data") and TOO_MANY_STATES in line]
    found = json.loads(event.removeprefix("data: "))
    kind = found["response"]["error"]["code"] if path == "/v1/responses" else found["error"]["type"]
    assert kind == ("invalid_prompt" if path == "/v1/responses" else "invalid_request_error")
    monkeypatch.setattr(server.async_llm.engine.inputs, "compile", None)  # from now on refused before any work
    for again in (body, streamed):
        response = server.post(path, again)
        assert response.status_code == 400
        assert "it has just reached a limit" in response.json()["error"]["message"]


def test_a_batch_has_the_clients_error_too(monkeypatch):
    async def run():
        async_llm = AsyncLLM("tiny-qwen3", kv_cache_memory=2**24)
        try:
            app = create_app(async_llm, ServerSettings(served_model_name=("tiny-qwen3",)))
            request = BatchRequest(custom_id="one", method="POST", url=CHAT, body=limited(CHAT, 450))
            return await answer_of_batch(app, request, 0)
        finally:
            await async_llm.shutdown()

    monkeypatch.setitem(grammar._LIMITS, "max_lexer_states", 150)
    result = asyncio.run(run())
    assert result["response"]["status_code"] == 400
    assert TOO_MANY_STATES in result["error"]["message"]


def test_a_lack_of_lexer_states_is_429_and_a_row_without_tokens_stays_500(server, monkeypatch):
    monkeypatch.setattr(grammar, "FIRST_STATES", 150)
    monkeypatch.setattr(grammar._LexerStates, "_num_left", 0)
    for _ in range(2):  # not refused later
        response = server.post(COMPLETIONS, limited(COMPLETIONS, 460))
        assert response.status_code == 429
        assert "600 lexer states are more than other running grammars leave" in response.json()["error"]["message"]
    response = server.post(
        COMPLETIONS, {"prompt": "x", "structured_outputs": {"regex": "abc"}, "bad_words": ["a", "ab", "abc"]}
    )
    assert response.status_code == 500
    assert "mask_bad_words" in response.json()["error"]["message"]
