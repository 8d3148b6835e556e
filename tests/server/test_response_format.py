"""Answers with a format over HTTP: OpenAI's response_format and vLLM's structured_outputs."""

import json
import re
import shutil
from dataclasses import replace

import pytest

from nanoinfer import SamplingParams, StructuredOutputsParams
from nanoinfer.cli.options import EngineOptions
from nanoinfer.cli.serve import ServerOptions, load_server_llm
from nanoinfer.errors import InvalidValueError
from nanoinfer.features.chat.tools import after_thinking
from nanoinfer.features.structured import grammar
from nanoinfer.loading.checkpoint import BUNDLED
from tests.helpers.doors import Chat, Messages, Responses, events_of, post
from tests.helpers.http_server import serving

pytestmark = pytest.mark.slow

pytest.importorskip("llguidance")

SCHEMA = {"type": "object", "properties": {"name": {"enum": ["Lily", "Tom"]}, "age": {"type": "integer", "maximum": 9}}}
SCHEMA |= {"required": ["name", "age"], "additionalProperties": False}
MESSAGES = [{"role": "user", "content": "Tell me a story about Lily"}]
OPEN = "<|im_start|>assistant\n<think>\n"
CHAT, COMPLETIONS, MESSAGES_PATH, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"


QUESTION = [{"role": "user", "content": "How warm?"}]
BODIES = {
    CHAT: {"messages": QUESTION},
    COMPLETIONS: {"prompt": "x"},
    MESSAGES_PATH: {"messages": QUESTION, "max_tokens": 200},
    RESPONSES: {"input": "x"},
}


def formats(schema):
    """The ways to ask for JSON: the path, the field, and where it holds the schema."""
    named = {"type": "json_schema", "name": "hero", "schema": schema}
    return [
        (CHAT, {"response_format": {"type": "json_schema", "json_schema": named}}, "response_format.json_schema.schema"),
        (CHAT, {"structured_outputs": {"json": schema}}, "structured_outputs.json"),
        (COMPLETIONS, {"structured_outputs": {"json": schema}}, "structured_outputs.json"),
        (RESPONSES, {"text": {"format": named}}, "text.format.schema"),
        (
            MESSAGES_PATH,
            {"output_config": {"format": {"type": "json_schema", "schema": schema}}},
            "output_config.format.schema",
        ),
    ]


def field_of(place):
    """The field that an error names, such as "text.format"."""
    return place.removesuffix(".schema").removesuffix(".json_schema").removesuffix(".json")


def test_response_format_gives_json_that_follows_the_schema(client):
    more = {"model": "tiny-qwen3", "messages": MESSAGES}
    answer_format = {"type": "json_schema", "json_schema": {"name": "hero", "schema": SCHEMA, "strict": True}}
    whole = client.chat.completions.create(response_format=answer_format, temperature=1.5, seed=1, max_tokens=60, **more)
    [choice] = whole.choices
    answer = json.loads(choice.message.content)
    assert (choice.finish_reason, set(answer), answer["name"] in ("Lily", "Tom")) == ("stop", {"name", "age"}, True)
    answer_format = {"type": "json_object"}
    whole = client.chat.completions.create(response_format=answer_format, temperature=0.3, seed=4, max_tokens=200, **more)
    [choice] = whole.choices
    assert choice.finish_reason == "length" or isinstance(json.loads(choice.message.content), dict)
    assert choice.message.content.startswith("{")


def test_the_tokens_are_those_of_generate(server, llm):
    answer_format = {"regex": " upon [a-z ]{9,}\\."}
    structured = StructuredOutputsParams(**answer_format)
    params = replace(llm.get_default_sampling_params(), structured_outputs=structured, seed=3, max_tokens=40)
    expected = llm.generate("Once", params, use_tqdm=False)[0].outputs[0].text
    body = {"prompt": "Once", "structured_outputs": answer_format, "seed": 3, "max_tokens": 40}
    assert post(server, COMPLETIONS, body)["choices"][0]["text"] == expected


def test_after_a_think_block_the_format_begins(llm):
    """The prompt has opened the block. The bundled model does not know how to close it."""
    tokenizer = llm.get_tokenizer()

    def prepare(answer_format):
        params = after_thinking(StructuredOutputsParams(**answer_format), OPEN)
        return llm.engine.inputs.prepare([5], SamplingParams(structured_outputs=params))

    for answer_format, answer in (
        ({"json": SCHEMA}, '{"name":"Tom","age":7}'),
        ({"choice": ["yes", "no"]}, "no"),
        ({"regex": "a/b+"}, "a/bb"),
        ({"regex": r"a\/b\\/"}, "a/b\\/"),
        ({"regex": "a\\\nb\n[/]"}, "a\nb\n/"),
    ):
        state = prepare(answer_format).constraints[0].copy()
        for token_id in tokenizer.encode("Hm, hm.\n</think>\n\n" + answer, add_special_tokens=False):
            state.advance(token_id)
            assert state.error is None
        assert state.is_complete or state._matcher.is_accepting()
    for answer_format, message in (  # an error is about the format
        ({"regex": "a("}, r"unclosed group$"),  # and nothing of the grammar around it
        ({"json": {"type": "nope"}}, r"Invalid type: nope$"),
        ({"json": {"const": "a" * 9000}}, r"^each string of json must have at most 8192 characters, got 9000$"),
    ):
        with pytest.raises(InvalidValueError, match=message):
            prepare(answer_format)
    params = StructuredOutputsParams(choice=["a"])
    assert after_thinking(params, "<think>\n\n</think>\n\n") is params  # a closed block changes nothing


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
    strict = {"name": "f", "parameters": {"type": "object"}, "strict": True}
    named = {"type": "json_schema", "name": "hero", "schema": SCHEMA}
    cases = [(path, body, field_of(place)) for path, body, place in formats({"properties": {"a": {"type": "nothing"}}})]
    cases += [
        (COMPLETIONS, {"structured_outputs": {"regex": "("}}, "structured_outputs"),
        (RESPONSES, {"text": {"format": named}, "tools": [{"type": "function"} | strict]}, "text.format"),
        (
            CHAT,
            {"response_format": {"type": "json_object"}, "tools": [{"type": "function", "function": strict}]},
            "response_format",
        ),
    ]
    for thinks in ({}, {"chat_template_kwargs": {"enable_thinking": False}}):
        for path, body, field in cases:
            refused = tool_server.post(path, BODIES[path] | body | (thinks if path != COMPLETIONS else {}))
            error = refused.json()["error"]
            assert (refused.status_code, error["param"]) == (400, field.partition(".")[0]), refused.text
            assert error["message"].startswith(field)


def test_what_cannot_be_enforced_has_its_place_in_the_body_of_the_client(tool_server):
    """A regular expression or a name that looks like a path is shown as it was written."""
    looks = {"type": "string", "pattern": "(?!a)"}
    bad = {"type": "object", "properties": {"/etc/a/b": {"$ref": "#/$defs/Address"}}}
    bad["$defs"] = {"Address": {"properties": {"/usr/x/y": {"items": looks}}}}
    functions, named = [{"name": "g"}, {"name": "f", "parameters": bad}], {"response_format": {"type": "json_object"}}
    cases = formats(bad)
    for door, place in ((Chat, "tools[1].parameters"), (Responses, "tools[1].parameters"), (Messages, "tools[1].input_schema")):
        for choice, more in (("required", {}), ("f", named if door is Chat else {})):
            cases.append((door.path, door.body("How warm?", functions=functions, choice=choice, max_tokens=5, **more), place))
        strict = [functions[0], functions[1] | {"strict": True}]
        cases.append((door.path, door.body("How warm?", functions=strict, max_tokens=5), place))
    for path, body, place in cases:
        refused = tool_server.post(path, BODIES[path] | body)
        error = refused.json()["error"]
        assert (refused.status_code, error["param"]) == (400, re.split(r"[.\[]", place)[0]), refused.text
        whole = f"{place}.$defs.Address.properties./usr/x/y.items cannot be used: these keywords cannot be enforced"
        assert error["message"].startswith(whole)
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


def limited(number):
    """Requests whose answers reach the limit of lexer states after 70 letters. number: makes other grammars."""
    regex = f"A{{70}}[ab]*a[ab]{{{number}}}c"
    schema = {"type": "object", "properties": {"k": {"type": "string", "pattern": f"^{regex}$"}}, "required": ["k"]}
    cases = {path: (BODIES[path] | body, field_of(place)) for path, body, place in formats(schema)}
    return cases | {
        COMPLETIONS: (BODIES[COMPLETIONS] | {"max_tokens": 200, "structured_outputs": {"regex": regex}}, "structured_outputs")
    }


TOO_MANY_STATES = "its regular expressions have too many states; repeat fewer times in them"


@pytest.mark.parametrize("path", BODIES)
def test_a_grammar_that_reaches_a_limit_while_answering_is_the_clients_error(server, path, monkeypatch):
    monkeypatch.setitem(grammar._LIMITS, "max_lexer_states", 150)
    number = 400 + 2 * [*BODIES].index(path)  # letters, so that no answer ends before
    (body, field), (streamed, _) = limited(number)[path], limited(number + 1)[path]
    streamed |= {"stream": True}
    response = server.post(path, body)
    error = response.json()["error"]
    assert (response.status_code, error["message"]) == (400, f"{field}: {TOO_MANY_STATES}")
    assert (error["type"], error["param"]) == ("invalid_request_error", field.partition(".")[0])
    response = server.post(path, streamed)
    assert response.status_code == 200
    [found] = [event for event in events_of(response.text) if TOO_MANY_STATES in str(event)]
    kind = found["response"]["error"]["code"] if path == RESPONSES else found["error"]["type"]
    assert kind == ("invalid_prompt" if path == RESPONSES else "invalid_request_error")
    monkeypatch.setattr(server.async_llm.engine.inputs, "compile", None)  # from now on refused before any work
    for again in (body, streamed):
        response = server.post(path, again)
        assert (response.status_code, "it has just reached a limit" in response.json()["error"]["message"]) == (400, True)


def test_a_lack_of_lexer_states_is_429_and_a_row_without_tokens_stays_500(server, monkeypatch):
    monkeypatch.setattr(grammar, "FIRST_STATES", 150)
    monkeypatch.setattr(grammar._LexerStates, "_num_left", 0)
    for _ in range(2):  # not refused later
        response = server.post(COMPLETIONS, limited(460)[COMPLETIONS][0])
        assert response.status_code == 429
        assert "600 lexer states are more than other running grammars leave" in response.json()["error"]["message"]
    response = server.post(
        COMPLETIONS, {"prompt": "x", "structured_outputs": {"regex": "abc"}, "bad_words": ["a", "ab", "abc"]}
    )
    assert response.status_code == 500
    assert "mask_bad_words" in response.json()["error"]["message"]
