"""One table of questions, asked at every door: AsyncLLM, four HTTP APIs, a batch and the command line give LLM's answers."""

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor

import pytest
import typing_extensions
from openai.types.chat.completion_create_params import CompletionCreateParamsNonStreaming as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsNonStreaming as CompletionParams
from openai.types.responses.response_create_params import ResponseCreateParamsNonStreaming as ResponsesParams
from typer.testing import CliRunner

import nanoinfer.llm
from nanoinfer import AsyncLLM, SamplingParams
from nanoinfer.cli.main import app as commands
from nanoinfer.server.fields import NEUTRAL_VALUES, WITHOUT_EFFECT
from tests.helpers.doors import CHATS, Chat, Completions, Messages, Responses, ask, check_stream, num_cached, post, without_ids
from tests.helpers.tool_cases import TOOLS, check_call
from tests.server.test_batch import request, results, run, write_requests

PROMPT = "Once upon a time"
FUNCTIONS = [tool["function"] for tool in TOOLS]
QUESTIONS = {
    "greedy": {"temperature": 0.0},
    "drawn": {"temperature": 0.8, "seed": 5},
    "several answers": {"temperature": 0.9, "seed": 5, "n": 3},
    "a stop string": {"temperature": 0.0, "stop": [" the", "."], "max_tokens": 40},
    "vLLM's parameters": {
        "temperature": 0.7, "seed": 7, "top_k": 5, "min_p": 0.01, "repetition_penalty": 1.1, "min_tokens": 3,
        "bad_words": [" there"],
    },
    "an instruction": {"temperature": 0.7, "seed": 3, "top_p": 0.9, "system": "Tell stories."},
    "the largest seed": {"temperature": 0.7, "seed": 2**63 - 1},
}  # fmt: skip
NEUTRAL = [  # each has as many neutral fields as an answer can have at once
    dict.fromkeys(NEUTRAL_VALUES),
    {name: {"any": ["value"]} for name in sorted(WITHOUT_EFFECT)},
    *({name: values[-i] for name, (values, _) in NEUTRAL_VALUES.items() if len(values) >= i} for i in (1, 2)),
    {"stream_options": None, "response_format": {"type": "text"}, "n": 1, "presence_penalty": 0, "logit_bias": {}, "stop": []},
    {"prediction": {"type": "content", "content": "Once"}, "prompt_cache_retention": "24h", "user": "me", "store": False},
]


def params_of(asked):
    return SamplingParams(**{"max_tokens": 8} | {name: value for name, value in asked.items() if name != "system"})


@pytest.fixture(scope="module")
def expected(llm):
    """LLM's output for each question, as a text that is continued, and as a message that is answered."""
    chats = [Chat.body(PROMPT, system=asked.get("system"))["messages"] for asked in QUESTIONS.values()]
    params = [params_of(asked) for asked in QUESTIONS.values()]
    texts = llm.generate([PROMPT] * len(params), params, use_tqdm=False)
    return dict(zip(QUESTIONS, zip(texts, llm.chat(chats, params, use_tqdm=False), strict=True), strict=True))


@pytest.mark.parametrize("door", [Completions, *CHATS])
def test_an_http_api_gives_the_answers_of_llm_whole_and_streamed(server, expected, door):
    for name, asked in QUESTIONS.items():
        if set(door.unknown).isdisjoint(asked):
            output = expected[name][door is not Completions]
            reply = ask(server, door, PROMPT, **{"max_tokens": 8} | asked)
            assert reply.texts == [answer.text for answer in output.outputs], name
            assert reply.reasons == [answer.finish_reason for answer in output.outputs], name
            assert reply.num_prompt_tokens == len(output.prompt_token_ids), name
            assert reply.num_tokens == sum(len(answer.token_ids) for answer in output.outputs), name
    assert {answer.finish_reason for output, _ in expected.values() for answer in output.outputs} == {"stop", "length"}


@pytest.mark.slow
def test_an_async_llm_gives_the_answers_of_llm(expected):
    async def answers():
        async with AsyncLLM("tiny-qwen3", seed=0, kv_cache_memory=2**24) as async_llm:

            async def last(asked):
                return [output async for output in async_llm.generate(PROMPT, params_of(asked))][-1].outputs

            return await asyncio.gather(*map(last, QUESTIONS.values()))

    assert dict(zip(QUESTIONS, asyncio.run(answers()), strict=True)) == {
        name: text.outputs for name, (text, _) in expected.items()
    }


@pytest.mark.slow
def test_a_batch_gives_the_answers_of_llm(expected, tmp_path):
    requests = []
    for name, asked in QUESTIONS.items():
        requests.append(request(f"chat {name}", **Chat.body(PROMPT, **{"max_tokens": 8} | asked)))
        if "system" not in asked:
            requests.append(request(f"text {name}", **Completions.body(PROMPT, **{"max_tokens": 8} | asked)))
    path, output = write_requests(tmp_path / "in.jsonl", requests), tmp_path / "out.jsonl"
    run(path, output)
    for custom_id, result in results(output).items():
        kind, _, name = custom_id.partition(" ")
        found = (Chat if kind == "chat" else Completions).read(result["response"]["body"])
        assert found.texts == [answer.text for answer in expected[name][kind == "chat"].outputs], custom_id


@pytest.mark.slow
def test_the_command_line_gives_the_answers_of_llm(llm, expected, monkeypatch):
    monkeypatch.setattr(nanoinfer.llm, "LLM", lambda **given: llm)
    for name, (text, chat) in expected.items():
        asked, options = {"max_tokens": 8} | QUESTIONS[name], []
        for parameter, value in asked.items():
            option = {"n": "--num-answers"}.get(parameter, "--" + parameter.replace("_", "-"))
            options += [part for one in (value if isinstance(value, list) else [value]) for part in (option, str(one))]
        if "system" not in asked:
            result = CliRunner().invoke(commands, ["generate", PROMPT, "--json", *options])
            found = [answer["token_ids"] for answer in json.loads(result.stdout)["outputs"]]
            assert found == [answer.token_ids for answer in text.outputs], name
        if "n" not in asked:
            result = CliRunner().invoke(commands, ["chat", PROMPT, *options])
            assert result.stdout == chat.outputs[0].text + "\n", name


@pytest.mark.slow
@pytest.mark.parametrize("door", CHATS)
def test_many_streams_at_once_have_the_texts_of_their_seeds(server, llm, door):
    with ThreadPoolExecutor(16) as threads:
        replies = list(threads.map(lambda seed: ask(server, door, PROMPT, seed=seed, max_tokens=9, temperature=0.8), range(16)))
    params = [SamplingParams(seed=seed, max_tokens=9, temperature=0.8) for seed in range(16)]
    outputs = llm.chat([Chat.body(PROMPT)["messages"]] * 16, params, use_tqdm=False)
    assert [reply.texts for reply in replies] == [[output.outputs[0].text] for output in outputs]


def test_openais_client_accepts_the_shapes_that_it_checks(client, lenient_client):
    messages, more = Chat.body(PROMPT)["messages"], {"model": "tiny-qwen3", "seed": 1}
    assert client.completions.create(prompt=PROMPT, max_tokens=3, **more).object == "text_completion"
    [*chunks] = lenient_client.completions.create(model="alias", prompt=PROMPT, max_tokens=3, stream=True)
    assert {chunk.model for chunk in chunks} == {"alias"}
    chat = client.chat.completions.create(messages=messages, max_completion_tokens=3, **more).choices[0].message
    assert chat.role == "assistant"
    usage = {"include_usage": True}
    [*chunks, last] = client.chat.completions.create(messages=messages, max_tokens=3, stream=True, stream_options=usage, **more)
    assert ({chunk.object for chunk in chunks}, {chunk.usage for chunk in chunks}) == ({"chat.completion.chunk"}, {None})
    assert (last.choices, last.usage.completion_tokens, chunks[0].choices[0].delta.role) == ([], 3, "assistant")
    assert client.responses.create(input=PROMPT, max_output_tokens=3, model="alias").status == "incomplete"
    assert len([*client.responses.create(input=PROMPT, max_output_tokens=3, model="alias", stream=True)]) > 4


@pytest.mark.parametrize(("door", "types"), [(Completions, CompletionParams), (Chat, ChatParams), (Responses, ResponsesParams)])
def test_neutral_fields_and_null_for_every_name_of_openai_change_no_answer(server, door, types):
    body = door.body(PROMPT, max_tokens=3, seed=1)
    plain = without_ids(post(server, door.path, body))
    names = typing_extensions.get_type_hints(types)
    for fields in (dict.fromkeys(names), *(NEUTRAL if door is not Responses else ())):
        assert without_ids(post(server, door.path, fields | body)) == plain


def test_other_values_of_neutral_fields_are_refused_with_a_hint(server):
    """A refusal lists ten fields."""
    names = [*NEUTRAL_VALUES]
    for start in range(0, len(names), 10):
        some = dict.fromkeys(names[start : start + 10], "another")
        error = server.post(Completions.path, Completions.body(PROMPT) | some).json()["error"]
        assert (error["param"], error["code"]) == (names[start], "unsupported")
        hints = [f"{name}='another' is not supported ({NEUTRAL_VALUES[name][1] or 'leave it out'})" for name in some]
        assert error["message"] == "; ".join(hints)


@pytest.mark.slow
@pytest.mark.parametrize("door", CHATS)
@pytest.mark.parametrize("choice", ["required", "weather"])
@pytest.mark.parametrize("thinks", [True, False])
def test_a_required_call_obeys_its_schema_whole_and_streamed(tool_server, soon, door, choice, thinks):
    asked = {"functions": FUNCTIONS, "choice": choice, "thinks": thinks, "temperature": 1.5, "seed": 1, "logit_bias": soon}
    reply = ask(tool_server, door, "How warm is Oslo?", max_tokens=150, **asked)
    # As at OpenAI, where a named tool was not the model's own decision.
    assert reply.reasons == ["stop" if (door, choice) == (Chat, "weather") else "tool_calls"]
    assert reply.calls
    for name, arguments in reply.calls:
        check_call(name, arguments)
        assert choice in ("required", name)
    assert reply.texts == [""]
    assert thinks or not reply.reasoning


@pytest.mark.slow
@pytest.mark.parametrize("door", CHATS)
def test_a_cut_call_has_the_reason_length(tool_server, soon, door):
    asked = {"functions": FUNCTIONS, "choice": "weather", "thinks": False, "temperature": 1.5, "seed": 1, "logit_bias": soon}
    whole = ask(tool_server, door, "How warm is Oslo?", max_tokens=150, **asked)
    cut = ask(tool_server, door, "How warm is Oslo?", max_tokens=whole.num_tokens - 6, **asked)
    assert (cut.reasons, cut.calls[-1][0]) == (["length"], "weather")
    if door is Messages:  # its input is an object, of what has come
        assert json.loads(whole.calls[0][1]).items() >= json.loads(cut.calls[0][1]).items()
    else:
        assert whole.calls[0][1].startswith(cut.calls[0][1])


@pytest.mark.slow
@pytest.mark.parametrize("door", CHATS)
def test_reasoning_is_told_apart_from_the_text(tool_server, door):
    think = tool_server.async_llm.llm.get_tokenizer().convert_tokens_to_ids("<think>")
    reply = ask(tool_server, door, "How warm is Oslo?", max_tokens=5, logit_bias={str(think): 100})
    assert (reply.reasoning, reply.texts, reply.reasons) == ("<think>" * 4, [""], ["length"])


CALLS = [("1", "weather", {"city": "Rome", "days": 2}), ("2", "night", {})]
CONVERSATION = [
    {"role": "system", "content": "Be\n\nbrief."},
    {"role": "user", "content": "How warm\nis Rome?"},
    {"role": "assistant", "reasoning": "Rome?", "content": "I look.", "tool_calls": [
        {"id": number, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
        for number, name, arguments in CALLS
    ]},
    {"role": "tool", "tool_call_id": "1", "content": "31"},
    {"role": "tool", "tool_call_id": "2", "content": "Error: gone"},
    {"role": "user", "content": "And?"},
]  # fmt: skip
BLOCKS = [
    {"role": "user", "content": [{"type": "text", "text": "How warm"}, {"type": "text", "text": "is Rome?"}]},
    {"role": "assistant", "content": [
        {"type": "thinking", "thinking": "Rome?", "signature": "none"},
        {"type": "text", "text": "I look.", "cache_control": {"type": "ephemeral"}},
        *({"type": "tool_use", "id": number, "name": name, "input": arguments} for number, name, arguments in CALLS),
    ]},
    {"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "31"}]},
        {"type": "tool_result", "tool_use_id": "2", "content": "gone", "is_error": True},
        {"type": "text", "text": "And?"},
    ]},
]  # fmt: skip
ITEMS = [
    {"role": "developer", "content": "brief."},
    {"role": "user", "content": [{"type": "input_text", "text": "How warm"}, {"type": "input_text", "text": "is Rome?"}]},
    {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Rome?"}]},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look.", "annotations": []}]},
    *({"type": "function_call", "call_id": i, "name": name, "arguments": json.dumps(given)} for i, name, given in CALLS),
    {"type": "function_call_output", "call_id": "1", "output": "31"},
    {"type": "function_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "Error: gone"}]},
    {"role": "user", "content": "And?"},
]


@pytest.mark.slow
def test_a_conversation_with_calls_is_rendered_and_counted_alike_at_every_api(tool_server):
    functions = [FUNCTIONS[0], {"name": "night", "parameters": {"type": "object"}}]
    tools = [{"type": "function", "function": function} for function in functions]
    rendered = tool_server.async_llm.llm.render_chat(CONVERSATION, tools=tools)
    assert '"arguments": {"city": "Rome", "days": 2}}' in rendered["prompt"]
    num_tokens = len(rendered["prompt_token_ids"])
    assert post(tool_server, "/tokenize", {"messages": CONVERSATION, "tools": tools})["count"] == num_tokens
    blocks = {"messages": BLOCKS, "system": [{"type": "text", "text": "Be\n"}, {"type": "text", "text": "brief."}]}
    items = {"input": ITEMS, "instructions": "Be"}
    for door, conversation in ((Chat, {"messages": CONVERSATION}), (Messages, blocks), (Responses, items)):
        body = door.body("", max_tokens=1, seed=1, functions=functions, cache_salt=door.path) | conversation
        whole = post(tool_server, door.path, body)
        assert check_stream(tool_server, door, body, whole).num_prompt_tokens == num_tokens, door
        assert num_cached(whole["usage"]) == 0
        assert num_cached(post(tool_server, door.path, body)["usage"]) > num_tokens // 2
        if door is Messages:
            counted = {name: body[name] for name in ("messages", "system", "tools")}
            assert post(tool_server, door.path + "/count_tokens", counted) == {"input_tokens": num_tokens}


def test_prefixes_are_shared_only_with_requests_of_the_same_salt(server):
    text = "A prompt that no other test has sent to this server. " * 8
    for door in (Completions, *CHATS):
        salts = (f"a{door.path}", f"b{door.path}", f"a{door.path}")
        replies = [post(server, door.path, door.body(text, max_tokens=1, cache_salt=salt)) for salt in salts]
        cached = [num_cached(reply["usage"]) for reply in replies]
        assert (cached[:2], cached[2] > 0) == ([0, 0], True), door.path
    assert server.post(Chat.path, Chat.body(text, cache_salt="")).json()["error"]["param"] == "cache_salt"
