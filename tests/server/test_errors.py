"""Every refusal is short, in OpenAI's shape, and names what is wrong."""

import json
import socket
import threading

import pytest

from nanoinfer.server import limits, protocol
from nanoinfer.server.errors import validation_message, without_paths
from nanoinfer.server.messages import MessagesRequest
from nanoinfer.server.protocol import ChatCompletionRequest, CompletionRequest
from nanoinfer.server.responses import ResponsesRequest
from nanoinfer.system.worker_threads import LARGE
from tests.helpers.tool_cases import NAMED
from tests.server.conftest import MAX_BODY_BYTES

CHAT, COMPLETIONS, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"
UNKNOWN, NOT_HERE, TOO_LONG = "unknown_parameter", "unsupported", "context_length_exceeded"
HELLO = [{"role": "user", "content": "Hello"}]


def assert_refused(response, status, message, param=None, code=None):
    assert response.status_code == status, response.text
    body = response.json()
    assert body.keys() - {"type"} == {"error"}  # Anthropic's errors have a type outside, too
    assert body["error"].keys() - {"details"} == {"message", "type", "param", "code"}
    assert message in body["error"]["message"]
    assert len(body["error"]["message"]) < 2500
    assert "Traceback" not in response.text
    assert body["error"]["param"] == param
    assert body["error"]["code"] == code


# Each refusal: the path, the fields that replace those of BODIES (None: the whole body), the status, words of the message, the
# param and the code.
BODIES = {
    COMPLETIONS: {"prompt": "x"},
    CHAT: {"messages": HELLO},
    MESSAGES: {"messages": HELLO, "max_tokens": 8},
    RESPONSES: {"input": "x"},
}
BODY_TYPES = dict(zip(BODIES, (CompletionRequest, ChatCompletionRequest, MessagesRequest, ResponsesRequest), strict=True))
USE = {"type": "tool_use", "id": "a", "name": "b", "input": {}}
FUNCTION = {"type": "function", "name": "f", "parameters": {"type": "object"}}
REFUSALS = [
    (COMPLETIONS, {"prompt": None}, 400, "prompt: Input should be", "prompt", None),
    (COMPLETIONS, {"priority": 5}, 400, "priority=5 has no effect with this scheduler", "priority", None),
    (COMPLETIONS, {"vllm_xargs": {"a": 5}}, 400, "nothing reads extra_args={'a': 5}", None, None),
    (COMPLETIONS, {"timeout": 1e-9}, 504, "the request took longer than its timeout of 1e-09 s", None, None),
    (COMPLETIONS, {"timeout": 0}, 400, "timeout must be > 0 seconds, got 0", "timeout", None),
    (COMPLETIONS, {"best_off": 2}, 400, "best_off is an unknown field (did you mean best_of?)", "best_off", UNKNOWN),
    (COMPLETIONS, {"temperature": "0"}, 400, "temperature: Input should be a valid number, got '0'", "temperature", None),
    (COMPLETIONS, {"temperature": 1e999}, 400, "", None, None),
    (COMPLETIONS, {"max_tokens": 0}, 400, "max_tokens must be >= 1, or 0 with echo", "max_tokens", None),
    (COMPLETIONS, {"max_tokens": True}, 400, "max_tokens: Input should be a valid int", "max_tokens", None),
    (COMPLETIONS, {"n": 129}, 400, "n: Input should be less than or equal to 128, got 129", "n", None),
    (COMPLETIONS, {"n": 2, "temperature": 0}, 400, "n must be 1 at temperature 0", "n", None),
    (COMPLETIONS, {"logprobs": 21}, 400, "logprobs: Input should be less", "logprobs", None),
    (COMPLETIONS, {"seed": 2**64}, 400, "seed: Input should be less", "seed", None),
    (COMPLETIONS, {"stop": ["END"] * 17}, 400, "at most 16 items", "stop", None),
    (COMPLETIONS, {"stop": "x" * 129}, 400, "at most 128 characters", "stop", None),
    (COMPLETIONS, {"stop_token_ids": [5] * 1025}, 400, "at most 1024 items", "stop_token_ids", None),
    (COMPLETIONS, {"bad_words": ["x"] * 1025}, 400, "at most 1024 items", "bad_words", None),
    (COMPLETIONS, {"bad_words": ["x" * 129]}, 400, "at most 128 characters", "bad_words", None),
    (COMPLETIONS, {"bad_words": [""]}, 400, "bad_words must not hold an empty word", "bad_words", None),
    (COMPLETIONS, {"min_tokens": 9, "max_tokens": 8}, 400, "min_tokens must not pass max_tokens", "min_tokens", None),
    (COMPLETIONS, {"stream_interval": 2}, 400, "stream_interval: Input should be 1", "stream_interval", None),
    (COMPLETIONS, {"logit_bias": {str(i): "a" for i in range(2000)}}, 400, "2000 items; at most 1024", "logit_bias", None),
    (COMPLETIONS, {"logit_bias": {"a": 1}}, 400, "logit_bias must be a token id, got 'a'", "logit_bias", None),
    (COMPLETIONS, {"logit_bias": {"99999": 1}}, 400, "the token id 99999", "logit_bias", None),
    (COMPLETIONS, {"suffix": "y"}, 400, "suffix='y' is not supported", "suffix", NOT_HERE),
    (COMPLETIONS, {"best_of": 3}, 400, "best_of is not supported", "best_of", NOT_HERE),
    (COMPLETIONS, {"max_tokens": 1.5}, 400, "max_tokens: Input should be a valid int", "max_tokens", None),
    (COMPLETIONS, {"max_completion_tokens": 5}, 400, "(use max_tokens, or", "max_completion_tokens", NOT_HERE),
    (COMPLETIONS, {"truncate_prompt_tokens": 0}, 400, "must be -1, or >= 1, got 0", "truncate_prompt_tokens", None),
    (COMPLETIONS, {"prompt": "a " * 70_000, "truncate_prompt_tokens": 5}, 400, "more than 65536 tokens", None, None),
    (COMPLETIONS, {"stream_options": {}}, 400, "stream_options needs stream=true", "stream_options", None),
    (COMPLETIONS, {"prompt_logprobs": 0, "stream": True}, 400, "needs stream=false", "prompt_logprobs", None),
    (COMPLETIONS, {"structured_outputs": {"jsn": {}}}, 400, "did you mean json?", "structured_outputs", None),
    (COMPLETIONS, {"model": "m" * 5000}, 404, "is not served", "model", "model_not_found"),
    (COMPLETIONS, {"prompt": ""}, 400, "the prompt has no tokens", "prompt", None),
    (COMPLETIONS, {"prompt": []}, 400, "the prompt has no tokens", "prompt", None),
    (COMPLETIONS, {"prompt": [-1]}, 400, "prompt.0: Input should be greater", "prompt", None),
    (COMPLETIONS, {"prompt": [5, 6.5]}, 400, "prompt.1: Input should be a valid int", "prompt", None),
    (COMPLETIONS, {"prompt": ["x"] * 2049}, 400, "at most 2048 items", "prompt", None),
    (COMPLETIONS, {"prompt": [99999]}, 400, "the prompt has the token id 99999", "prompt", None),
    (COMPLETIONS, {"prompt": [5] * 600}, 400, "512 tokens. However, the prompt has 600", "prompt", TOO_LONG),
    (COMPLETIONS, {"prompt": "a " * 100_000}, 400, "However, the prompt has at least", "prompt", TOO_LONG),
    (COMPLETIONS, {"prompt": '[{"a\\": 1}],' * 200_000}, 400, "the prompt has at least", "prompt", TOO_LONG),
    (COMPLETIONS, {"prompt": {}}, 400, "prompt: Input should be a string, a list of token ids, or", "prompt", None),
    (COMPLETIONS, {"prompt": [[1]] * 70_000}, 400, "70003 lists, objects and keys; at most 65536", None, None),
    (COMPLETIONS, {"prompt": [1] * 1_100_000}, 400, "1099999 values; at most 1048576", None, None),
    (COMPLETIONS, {"logprob_token_ids": [5]}, 400, "logprob_token_ids needs logprobs", "logprob_token_ids", None),
    (COMPLETIONS, {"return_sampling_mask": True}, 400, "needs top_k from 1 to 1024", "return_sampling_mask", None),
    (COMPLETIONS, {"structured_outputs": {"regex": "("}}, 400, "structured_outputs", "structured_outputs", None),
    (CHAT, {"messages": []}, 400, "messages: List should have at least 1 item", "messages", None),
    (CHAT, {"messages": [{"content": "x"}]}, 400, "messages.0.role: Field required", "messages", None),
    (CHAT, {"messages": [{"role": "x", "content": "x"}]}, 400, "the role must be one of system, developer,", "messages", None),
    (CHAT, {"messages": [{"role": "user", "content": 5}]}, 400, "messages.0.content: Input should be a", "messages", None),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages[0]: a part", "messages", None),
    (CHAT, {"messages": [{"role": "user", "content": [{}] * 1025}]}, 400, "at most 1024 items", "messages", None),
    (CHAT, {"messages": HELLO * 9000}, 400, "at most 8192 items", "messages", None),
    (CHAT, {"continue_final_message": True, "add_generation_prompt": True}, 400,
     "continue_final_message needs add_generation_prompt=false", "continue_final_message", None),
    (CHAT, {"top_logprobs": 2}, 400, "top_logprobs needs logprobs=true", "top_logprobs", None),
    (CHAT, {"chat_template_kwargs": {"tokenize": 1}}, 400, "chat_template_kwargs must not", "chat_template_kwargs", None),
    (CHAT, {"chat_template_kwargs": {f"k{i}": 1 for i in range(2000)}}, 400, "2000 items", "chat_template_kwargs", None),
    (CHAT, {"add_special_tokens": True}, 400, "the chat template writes these", "add_special_tokens", None),
    (CHAT, {"tools": [{}] * 1025}, 400, "at most 1024 items", "tools", None),
    (CHAT, {"tool_choice": "required"}, 400, "tool_choice 'required' needs tools", "tool_choice", None),
    (CHAT, {"tools": [], "tool_choice": NAMED}, 400, "the tools are none", "tool_choice", None),
    (CHAT, {"tool_choice": "any"}, 400, "tool_choice must be 'auto'", "tool_choice", None),
    (CHAT, {"tool_choice": {"type": "allowed_tools"}}, 400, "tool_choice must be 'auto'", "tool_choice", None),
    (CHAT, {"tools": [{"type": "function", "function": {"name": "f"}}]}, 400, "no known format of calls", "tools", NOT_HERE),
    (CHAT, {"response_format": {"type": "xml"}}, 400, "type must be text, json_object or json_schema", "response_format", None),
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": 5}}}, 400, "with a schema",
     "response_format", None),
    (CHAT, {"response_format": {"type": "json_object"}, "structured_outputs": {"choice": ["a"]}}, 400, "not both",
     "response_format", None),
    (CHAT, {"structured_outputs": {}}, 400, "exactly one of", "structured_outputs", None),
    (CHAT, {"structured_outputs": {"pattern": "a"}}, 400, "has no argument 'pattern'", "structured_outputs", None),
    (CHAT, {"structured_outputs": {"choice": ["a"]}, "ignore_eos": True}, 400, "ignore_eos cannot be used", "ignore_eos", None),
    (CHAT, {"repetition_detection": {"max_pattern_size": 2}}, 400, "min_count must be >= 2", None, None),
    (CHAT, {"repetition_detection": {"max_pattern_size": 2000, "min_count": 2}}, 400,
     "max_pattern_size: Input should be less than or equal to 1024, got 2000", "repetition_detection", None),
    (CHAT, {"thinking_token_budget": 4}, 400, "", "thinking_token_budget", None),
    (MESSAGES, {"messages": [{"role": "user", "content": []}], "system": "Be"}, 400, "has no content", "messages", None),
    (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, 400,
     "messages.0.content.0: a block of type 'image' is not supported; give text, thinking, tool_use", "messages", None),
    (MESSAGES, {"messages": [{"role": "user", "content": [USE]}]}, 400, "cannot be in a message of the role user",
     "messages", None),
    (MESSAGES, {"messages": [{"role": "assistant", "content": [USE]}]}, 400, "add its tool_result", "messages", None),
    (MESSAGES, {"messages": [{"role": "user", "content": "a " * 600}]}, 400, "tokens > 512 maximum.", "messages", TOO_LONG),
    (MESSAGES, {"thread": {"type": "create"}}, 400, "send the whole conversation as messages", "thread",
     "thread_unsupported_request"),
    (MESSAGES, {"tools": [{"type": "web_search_20250305", "name": "a"}]}, 400, "a tool of type 'web", "tools", NOT_HERE),
    (MESSAGES, {"tools": [{"name": "a"}]}, 400, "tools.0.input_schema: Field required", "tools", None),
    (MESSAGES, {"tools": [{"name": "a", "input_schema": {}, "stict": True}]}, 400, "did you mean strict?", "stict", UNKNOWN),
    (MESSAGES, {"tool_choice": {"type": "tool", "name": "a"}}, 400, "but the tools are none", "tool_choice", None),
    (MESSAGES, {"tool_choice": {"type": "tool"}}, 400, "needs the name of one of tools", "tool_choice", None),
    (MESSAGES, {"tool_choice": {"type": "auto", "name": "a"}}, 400, "other types have no name, got 'a'", "tool_choice", None),
    (MESSAGES, {"thinking": {"type": "enabled", "budget": 5}}, 400, "did you mean budget_tokens?", "budget", UNKNOWN),
    (MESSAGES, {"tempreture": 1}, 400, "did you mean temperature?", "tempreture", UNKNOWN),
    (MESSAGES, {"mcp_servers": [{}]}, 400, "call them from the client", "mcp_servers", NOT_HERE),
    (MESSAGES, {"temperature": -1}, 400, "temperature must be finite", "temperature", None),
    (MESSAGES, {"stop_sequences": [""]}, 400, "at least 1 character", "stop_sequences", None),
    (RESPONSES, {"input": []}, 400, "input has no items", "input", None),
    (RESPONSES, {"input": [{"type": "item_reference", "id": "a"}]}, 400, "input.0: an item of type 'item_ref", "input", None),
    (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, 400, "a part of type", "input", None),
    (RESPONSES, {"input": [{"role": "tool", "content": "a"}]}, 400, "input.0.role: Input should be 'user'", "input", None),
    (RESPONSES, {"input": "a " * 100_000}, 400, "maximum context length is 512 tokens", "input", TOO_LONG),
    (RESPONSES, {"tools": [{"type": "web_search"}]}, 400, "a tool of type 'web_search' is not", "tools", NOT_HERE),
    (RESPONSES, {"tools": [FUNCTION]}, 400, "no known format of calls", "tools", NOT_HERE),
    (RESPONSES, {"tool_choice": "any"}, 400, "Input should be 'auto', 'none' or 'required'", "tool_choice", None),
    (RESPONSES, {"tool_choice": {"type": "function", "name": "a"}}, 400, "but the tools are none", "tool_choice", None),
    (RESPONSES, {"text": {"format": {"type": "json_schema"}}}, 400, "has a schema if its type is json_schema", "text", None),
    (RESPONSES, {"text": {"verbosity": "low"}}, 400, "text.verbosity: Input should be 'medium'", "text", None),
    (RESPONSES, {"max_output_token": 5}, 400, "did you mean max_output_tokens?", "max_output_token", UNKNOWN),
    (RESPONSES, {"reasoning": {"effrt": "low"}}, 400, "did you mean effort?", "effrt", UNKNOWN),
    (RESPONSES, {"background": True}, 400, "background=True is not supported", "background", NOT_HERE),
    (RESPONSES, {"store": True}, 400, "needs a server with --max-stored-responses", "store", NOT_HERE),
    (RESPONSES, {"include": ["message.output_text.logprobs"]}, 400, "include.0: Input should be", "include", None),
    ("/tokenize", {"prompt": "a " * 300_000}, 400, "more than 65536 tokens; send it in parts", None, None),
    ("/tokenize", {"prompt": "x", "add_special_token": True}, 400, "did you mean add_special_tokens?", "add_special_token",
     UNKNOWN),
    ("/tokenize", {"prompt": "x", "tools": [{}]}, 400, "tools need messages", "tools", None),
    ("/tokenize", {}, 400, "give either prompt or messages", None, None),
    ("/detokenize", {"tokens": [5] * (2**18 + 1)}, 400, "at most 262144 items", "tokens", None),
    ("/detokenize", {"tokens": [5, 10**9]}, 400, "token ids are 0 .. 1958, got 1000000000", "tokens", None),
    ("/v1/nothing", {}, 404, "there is no /v1/nothing; /openapi.json describes the paths", None, None),
    ("/health", {}, 405, "/health does not take POST; use GET", None, None),
]  # fmt: skip


@pytest.mark.parametrize(
    ("path", "more", "status", "message", "param", "code"), REFUSALS, ids=[f"{row[0]} {str(row[1])[:40]}" for row in REFUSALS]
)
def test_a_bad_body_is_refused(server, path, more, status, message, param, code):
    content = json.dumps(BODIES.get(path, {}) | more)
    response = server.post(path, content=content, headers={"Content-Type": "application/json"})
    assert_refused(response, status, message, param, code)
    assert server.num_unfinished() == 0


@pytest.mark.parametrize("path", BODIES)
def test_a_value_of_another_type_is_refused_by_the_name_of_its_field(server, path):
    """With no word of the declaration in the message."""
    for name in BODY_TYPES[path].model_fields:
        response = server.post(path, BODIES[path] | {name: [[{}]]})
        assert (response.status_code, response.json()["error"]["param"]) == (400, name), response.text
        assert not any(inner in response.text for inner in ("constrained", "list[", "function-before", "<text>")), response.text


@pytest.mark.parametrize(
    "content",
    [b"{", b'{"prompt": NaN}', b'{"prompt": "x", "top_p": Infinity}', b'{"prompt": "\xff"}',
     b'{"prompt": "\\ud800"}', b'{"metadata": ' + b"[" * 10_000, b'{"prompt": ' + b"9" * 10_000 + b"}"],
)  # fmt: skip
def test_what_is_not_json_is_refused(server, content):
    assert_refused(server.post(COMPLETIONS, content=content, headers={"Content-Type": "application/json"}), 400, "")


def test_a_body_of_another_type_is_refused(server):
    for headers in ({}, {"Content-Type": "text/plain"}, {"Content-Type": "application/x-www-form-urlencoded"}):
        response = server.post(COMPLETIONS, content=b'{"prompt": "x"}', headers=headers)
        assert_refused(response, 415, "Content-Type: application/json")


@pytest.mark.slow
def test_a_key_is_needed_for_every_post_and_v1(guarded):
    body = {"prompt": "x", "max_tokens": 1}
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "first key"}, {"Authorization": "Bearer"}):
        refused = guarded.post(COMPLETIONS, body, headers=headers)
        assert_refused(refused, 401, "API key", code="invalid_api_key")
        assert refused.headers["x-should-retry"] == "false"
        assert_refused(guarded.get("/v1/nothing", headers=headers), 401, "API key", code="invalid_api_key")
    for key in ("first key", "second"):
        assert guarded.post(COMPLETIONS, body, headers={"Authorization": f"Bearer {key}"}).status_code == 200
        assert guarded.post("/tokenize", {"prompt": "x"}, headers={"Authorization": f"Bearer {key}"}).status_code == 200
    for path in ("/tokenize", "/detokenize", "/", "/nothing"):
        assert_refused(guarded.post(path, {"prompt": "x"}), 401, "API key", code="invalid_api_key")
    for path in ("/health", "/version", "/metrics"):
        assert guarded.get(path).status_code == 200


def test_large_bodies_and_headers_are_refused(guarded):
    headers = {"Authorization": "Bearer second", "Content-Type": "application/json"}
    large = b'{"prompt": "' + b"x" * MAX_BODY_BYTES + b'"}'
    assert_refused(guarded.post(COMPLETIONS, content=large, headers=headers), 413, f"more than {MAX_BODY_BYTES} bytes")
    pieces = (large[i : i + 1000] for i in range(0, len(large), 1000))  # chunked: without a Content-Length
    assert_refused(guarded.post(COMPLETIONS, content=pieces, headers=headers), 413, f"more than {MAX_BODY_BYTES} bytes")
    assert_refused(guarded.get("/health", headers={"X-Large": "x" * 40_000}), 431, "headers")


def test_a_header_without_an_end_closes_the_connection(server):
    with socket.create_connection(("127.0.0.1", server.port), timeout=600) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nX-Large: ")
        connection.settimeout(0.001)
        for _ in range(100_000):  # so many that a server without a limit reads for minutes
            try:
                connection.sendall(b"x" * 1000)
                assert connection.recv(1) == b"", "no answer is expected"
                return
            except TimeoutError:
                pass
            except ConnectionError:
                return
    raise AssertionError("the server has read a hundred million bytes")


def test_pages_of_the_given_origins_may_call(guarded):
    for origin, allowed in (("https://page.example", "https://page.example"), ("https://other.example", None)):
        headers = {"Origin": origin, "Access-Control-Request-Method": "POST"}
        answer = guarded.request("OPTIONS", COMPLETIONS, headers=headers)
        assert answer.headers.get("Access-Control-Allow-Origin") == allowed


def test_a_long_list_of_errors_is_cut():
    errors = [{"loc": ("body", "x" * 500, "<form>", i), "msg": "bad", "type": "t"} for i in range(30)]
    message, param = validation_message(errors)
    assert len(message) < 2200
    assert message.endswith("and 20 more")
    assert param == "x" * 500


def test_the_methods_of_a_path_are_named(server):
    for path, methods in (("/v1/responses/resp_1", "DELETE, GET"), ("/v1/models", "GET"), (COMPLETIONS, "POST")):
        refused = server.request("PUT", path)
        assert_refused(refused, 405, f"does not take PUT; use {methods}")
        assert refused.headers["allow"] == methods


def test_paths_are_left_out_of_messages():
    assert without_paths("OSError: /home/me/model.bin, see C:\\models\\a.txt") == "OSError: <path>, see <path>"
    assert without_paths("No such file: '/home/me/my models/a+b@2.bin'") == "No such file: '<path>'"
    assert without_paths("in /home/me/a+b@2/c=d.bin, 5") == "in <path>, 5"
    assert without_paths("top_p is 1/2 and a/b") == "top_p is 1/2 and a/b"
    assert len(without_paths("x" * 10_000)) == 2000


def test_plain_endpoints(server):
    for path in ("/health", "/ping"):
        assert server.get(path).status_code == 200
        assert server.request("HEAD", path).status_code == 200
    assert server.request("HEAD", "/nowhere").status_code == 404
    assert server.get("/load").json() == {"server_load": 0}
    assert server.get("/version").json().keys() == {"version"}
    tokens = server.post("/tokenize", {"prompt": "Once upon", "return_token_strs": True}).json()
    assert tokens["count"] == len(tokens["tokens"])
    assert "".join(tokens["token_strs"]) == "OnceĠupon"  # the raw tokens, as in vLLM
    assert server.post("/detokenize", {"tokens": tokens["tokens"]}).json() == {"prompt": "Once upon"}
    chat = server.post("/tokenize", {"messages": HELLO}).json()
    used = server.post(CHAT, {"messages": HELLO, "max_tokens": 1}).json()["usage"]["prompt_tokens"]
    assert chat["count"] == used
    assert server.get("/v1/models/").json() == server.get("/v1/models").json()
    assert [card["root"] for card in server.get("/v1/models").json()["data"]] == ["tiny-qwen3", "alias"]
    assert server.post(COMPLETIONS + "/", {"prompt": "x", "max_tokens": 1}).status_code == 200, "not a redirect"
    assert server.get("/openapi.json").json()["paths"].keys() >= {CHAT, COMPLETIONS, "/tokenize"}


def test_an_integer_may_be_written_as_a_float(server):
    bodies = {
        COMPLETIONS: {"prompt": [5.0, 6.0], "max_tokens": 1.0, "n": 1.0, "seed": -1.0, "stop_token_ids": [7.0], "top_k": 2.0,
                      "repetition_detection": {"max_pattern_size": 2.0, "min_count": 3.0}, "temperature": 1.0},
        CHAT: {"messages": HELLO, "max_completion_tokens": 1.0, "logprobs": True, "top_logprobs": 1.0},
        "/v1/messages": {"messages": HELLO, "max_tokens": 1.0, "thinking": {"type": "enabled", "budget_tokens": 1.0}},
        "/v1/responses": {"input": "x", "max_output_tokens": 1.0},
        "/detokenize": {"tokens": [5.0]},
    }  # fmt: skip
    for path, body in bodies.items():
        content = json.dumps(body)
        response = server.post(path, content=content, headers={"Content-Type": "application/json"})
        assert response.status_code == 200, response.text


def test_each_response_has_the_id_of_its_request(server, guarded):
    for response in (
        server.get("/health", headers={"X-Request-Id": "mine-1"}),
        server.get("/nowhere", headers={"X-Request-Id": "mine-1"}),
        guarded.post(COMPLETIONS, {"prompt": "x"}, headers={"X-Request-Id": "mine-1"}),  # refused without a key
        server.post(COMPLETIONS, {"prompt": "x", "max_tokens": 1, "stream": True}, headers={"X-Request-Id": "mine-1"}),
    ):
        assert response.headers["x-request-id"] == "mine-1"
    new = [server.get("/health", headers=headers).headers["x-request-id"] for headers in ({}, {}, {"X-Request-Id": "x" * 999})]
    assert [len(one) for one in new] == [32] * 3
    assert len({*new}) == 3


def test_a_prefix_of_a_proxy_may_be_removed_or_not(guarded):
    assert guarded.get("/openapi.json").json()["servers"] == [{"url": "/llm"}]
    for path in ("/v1/models", "/llm/v1/models"):
        assert guarded.get(path, headers={"Authorization": "Bearer second"}).status_code == 200
        assert guarded.get(path).status_code == 401, "the prefix is no way around the key"
    assert guarded.get("/llmv1/models").status_code == 404


@pytest.mark.slow
def test_a_small_request_does_not_wait_for_a_large_one(server, monkeypatch):
    may_go_on = threading.Event()
    monkeypatch.setattr(limits, "json_size", lambda body: (int(not may_go_on.wait()), 0))  # of large bodies only
    statuses = []
    body = {"prompt": "a " * LARGE, "max_tokens": 1}
    large = [threading.Thread(target=lambda: statuses.append(server.post(COMPLETIONS, body).status_code)) for _ in range(8)]
    for thread in large:
        thread.start()
    assert server.post(COMPLETIONS, {"prompt": "x", "max_tokens": 1}).status_code == 200
    assert server.post("/tokenize", {"prompt": "x"}).status_code == 200
    assert statuses == []
    may_go_on.set()
    for thread in large:
        thread.join()
    assert statuses == [400] * 8


def test_a_large_body_is_checked_in_the_thread_of_large_requests(server, monkeypatch):
    names, with_ints = [], protocol.with_ints
    monkeypatch.setattr(protocol, "with_ints", lambda body: names.append(threading.current_thread().name) or with_ints(body))
    blocks = [{"role": "user", "content": [{"type": "text", "text": "x"}] * 200}] * 4
    body = {"messages": blocks, "max_tokens": 1}
    assert len(json.dumps(body)) > LARGE
    assert server.post("/v1/messages", body).status_code == 400, "more than the context"
    assert names
    assert all("large" in name for name in names)


def test_a_prompt_is_never_logged(server, caplog, capfd):
    secret = "a very secret prompt"
    with caplog.at_level("DEBUG"):
        server.post(COMPLETIONS, {"prompt": secret, "max_tokens": 2})
        server.post(COMPLETIONS, {"prompt": secret, "top_p": secret})
        server.post(COMPLETIONS, {"prompt": [secret, 5]})
    assert secret not in caplog.text + "".join(capfd.readouterr())


def test_ollamas_paths_are_404_with_those_to_use(server):
    for path in ("/api/chat", "/api/generate", "/api/tags"):
        for response in (server.post(path, {"model": "tiny-qwen3"}), server.get(path)):
            assert_refused(response, 404, f"there is no {path}, because this server does not have ollama's API; use OpenAI's")
            assert "/v1/chat/completions" in response.json()["error"]["message"]
