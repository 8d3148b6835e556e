"""Describe tools to the chat template, and write the Lark grammar of required or strict calls, in the format of parsing.py."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from inspect import isfunction
from typing import Any

from nanoinfer.errors import InvalidTypeError, InvalidValueError, UnsupportedError, first_line
from nanoinfer.features.chat.harmony import MARKS
from nanoinfer.features.chat.parsing import END_THINK, END_TOOL_CALL, THINK, TOOL_CALL, closes_thinking, opens_thinking
from nanoinfer.features.structured.json_schema import enforceable
from nanoinfer.features.structured.params import StructuredOutputsParams

Tool = Callable[..., object] | Mapping[str, object]
ToolChoice = str | Mapping[str, object]  # "auto", "none", "required" or {"type": "function", "function": {"name": ...}}

# Qwen3 was trained on json.dumps(call). {"type": "object"} allows any object.
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
MAX_ARGUMENTS = 2**18  # characters. Longer arguments of a message's calls stay text, because parsing would take long

_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


def tool_schemas(tools: Sequence[Tool]) -> list[dict[str, object]]:
    """Return the tools in OpenAI's format. A function is described by its signature and its docstring.

    >>> tool_schemas([{"type": "function", "function": {"name": "night"}}])
    [{'type': 'function', 'function': {'name': 'night'}}]
    """
    if not isinstance(tools, list | tuple):
        raise InvalidTypeError(f"tools must be a list of functions or JSON schemas, got {tools!r}")
    return [_tool_schema(tool, index) for index, tool in enumerate(tools)]


def _tool_schema(tool: Any, index: int) -> dict[str, object]:
    if isfunction(tool):
        from transformers.utils import get_json_schema

        try:
            return dict(get_json_schema(tool))
        except Exception as error:  # transformers raises many classes, two of which it does not export
            reason = first_line(error)
            raise InvalidValueError(f"tools[{index}] needs type hints and a Google style docstring ({reason})") from error
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or tool.get("type") != "function":
        raise InvalidTypeError(
            f'tools[{index}] must be a function, or {{"type": "function", "function": {{"name": ..., "parameters": ...}}}}, '
            f"got {tool!r}"
        )
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise InvalidValueError(f"tools[{index}] must have a name, got {function.get('name')!r}")
    if not isinstance(function.get("parameters"), dict | None):
        raise InvalidTypeError(f"tools[{index}]: parameters must be a JSON schema, got {function['parameters']!r}")
    return dict(tool)


def check_tool_choice(tool_choice: ToolChoice, tools: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the name of the tool that must be called. None for "auto", "none" and "required"."""
    if tool_choice in ("auto", "none") or (tool_choice == "required" and tools):
        return None
    names = [tool["function"]["name"] for tool in tools]
    if tool_choice == "required":
        raise InvalidValueError("tool_choice 'required' needs tools; give at least one")
    function = tool_choice.get("function") if isinstance(tool_choice, Mapping) else None
    if not isinstance(function, Mapping) or tool_choice.get("type") != "function":  # type: ignore[union-attr]
        raise InvalidTypeError(
            "tool_choice must be 'auto', 'none', 'required' or {'type': 'function', 'function': {'name': ...}}, "
            f"got {tool_choice!r}"
        )
    if function.get("name") not in names:
        raise InvalidValueError(f"tool_choice has {function.get('name')!r}, but the tools are {', '.join(names) or 'none'}")
    return str(function["name"])


def with_tool_arguments(message: Mapping[str, Any]) -> dict[str, object]:
    """Convert a message from OpenAI's format to the format that templates read.

    The arguments of calls become objects. Text that is no JSON object, or very long, stays as it is, so that a
    conversation goes on after a malformed call. A null is left out, but a call's content becomes "". "reasoning" becomes
    "reasoning_content" too, and before a call without content also "thinking", which gpt-oss's template reads.
    """
    message = {name: value for name, value in message.items() if value is not None}
    if message.get("role") == "assistant":
        message.setdefault("content", "")
    if isinstance(message.get("tool_calls"), list | tuple):
        message["tool_calls"] = [_with_object(call) for call in message["tool_calls"]]
    if "reasoning" in message:
        message.setdefault("reasoning_content", message["reasoning"])
        if message.get("tool_calls") and not message.get("content"):
            message.setdefault("thinking", message["reasoning"])
    return message


def _with_object(call: Any) -> object:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    if len(function["arguments"]) > MAX_ARGUMENTS:
        return call
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call


def requires_call(tool_choice: ToolChoice | None) -> bool:
    """Whether the answer must be a call, and so has no other content."""
    return tool_choice not in (None, "auto", "none")


def tool_call_grammar(
    tools: Sequence[Mapping[str, Any]],
    tool_choice: ToolChoice,
    *,
    prompt: str,
    thinks: bool = True,
    parallel_tool_calls: bool = True,
    harmony_ids: Mapping[str, int] | None = None,
) -> str | None:
    """Return the grammar of the whole answer, for StructuredOutputsParams(grammar=...). None: the answer is free.

    With tool_choice "required" or a named tool, the answer consists of calls that satisfy the tools' schemas. With "auto" and
    a tool with strict=true, each call must satisfy a schema. A think block may precede them, unless the prompt has closed it.
    Arguments that a schema does not name are left out, unless it has additionalProperties.

    thinks: whether the answer may have a think block. harmony_ids: the ids of gpt-oss's marks (harmony.py), for a grammar of a
    single call. None: Qwen3's format.
    """
    name = check_tool_choice(tool_choice, tools)
    functions = {index: tool["function"] for index, tool in enumerate(tools) if name in (None, tool["function"]["name"])}
    is_auto = tool_choice == "auto"
    if tool_choice == "none" or (is_auto and not any(function.get("strict") for function in functions.values())):
        return None
    schemas = []
    for index, function in functions.items():
        is_free = is_auto and not function.get("strict")
        parameters = {"type": "object"} if is_free else function.get("parameters") or _NO_ARGUMENTS
        if "properties" in parameters and not parameters.keys() & {"$ref", "allOf", "anyOf", "oneOf"}:
            parameters = {"additionalProperties": False, **parameters}  # the schema may override it
        parameters = enforceable(f"tools[{index}].parameters", parameters, **_SPACING)
        schemas.append((function["name"], f"%json {json.dumps(parameters)}"))
    if harmony_ids is not None:
        return _harmony_grammar(schemas, harmony_ids, is_auto=is_auto)
    calls = []
    for called, schema in schemas:
        head = f'{{"name": {json.dumps(called, ensure_ascii=False)}, "arguments": '
        calls.append(f'{_quoted(head)} {schema} "}}"')
    thinking = _think_block(prompt, thinks=thinks)
    if is_auto:  # text up to a call, and again after it
        answer = "(trigger call)* TEXT"
    elif name is None and parallel_tool_calls:
        answer = 'OPEN call ("\\n" OPEN call)*'
    else:
        answer = "OPEN call"
    # If only one text may follow, llguidance encodes it without the tokens of the tags. So a newline may precede each tag:
    # something else may follow, and the model chooses the token.
    lines = [
        f"start: {thinking} {answer}",
        _THINKING,
        f"trigger[lazy]: TEXT {_quoted(TOOL_CALL)}",
        f'call: "\\n" ({" | ".join(calls)}) CLOSE',
        rf"OPEN: /\n?{TOOL_CALL}/",
        rf"CLOSE: /\n{{0,2}}{END_TOOL_CALL}/".replace("</", r"<\/"),
        _TEXT,
    ]
    return "\n".join(lines)


def _harmony_grammar(schemas: Sequence[tuple[str, str]], ids: Mapping[str, int], *, is_auto: bool) -> str:
    """Return the grammar of an answer to a prompt that ends with <|start|>assistant. A mark is a token that no text contains.

    schemas: the name of each tool, with the rule of its arguments.
    """
    start, channel, constrain, message, end = (f"<[{ids[mark]}]>" for mark in MARKS)
    calls = [f'{_quoted(f"{name} ")} {constrain} "json" {message} {schema}' for name, schema in schemas]
    before = '("analysis" | "commentary")' if is_auto else '"analysis"'  # a message in commentary announces calls
    lines = [
        f"start: before* {channel} {'(call | final)' if is_auto else 'call'}",
        f'before: {channel} {before} {message} TEXT {end} {start} "assistant"',
        f'call: "commentary to=functions." ({" | ".join(calls)})',
        *([f'final: "final" {message} TEXT'] if is_auto else []),
        _TEXT,
    ]
    return "\n".join(lines)


def after_thinking(params: StructuredOutputsParams, prompt: str) -> StructuredOutputsParams:
    """Return the same format for an answer that may begin with a think block, unless the prompt has closed it."""
    if closes_thinking(prompt):
        return params
    if params.grammar is not None:
        raise UnsupportedError(
            "structured_outputs.grammar cannot be used while the model thinks; "
            "set enable_thinking to false in chat_template_kwargs"
        )
    if params.regex is not None:
        answer = "/" + re.sub(r"\\.|/", lambda match: _ESCAPES.get(match[0], match[0]), params.regex, flags=re.S) + "/"
    elif params.choice is not None:
        answer = "(" + " | ".join(map(_quoted, params.choice)) + ")"
    else:
        schema = {"type": "object"} if params.json_object else json.loads(str(params.json))
        answer = f"%json {json.dumps(enforceable('json', schema, whitespace_flexible=not params.disable_any_whitespace))}"
    return StructuredOutputsParams(grammar="\n".join([f"start: {_think_block(prompt)} {answer}", _THINKING, _TEXT]))


_THINKING = f"thinking[lazy]: TEXT {json.dumps(END_THINK)}"
_TEXT = r"TEXT: /(.|\n)*/"
_ESCAPES = {"/": r"\/", "\\\n": r"\n"}  # characters that a regular expression between slashes writes differently


def _think_block(prompt: str, *, thinks: bool = True) -> str:
    """Return the first part of the grammar: the rest of the prompt's think block, nothing, or an optional block."""
    if closes_thinking(prompt) or not thinks:
        return ""
    return 'thinking "\\n\\n"' if opens_thinking(prompt) else f'({_quoted(THINK)} thinking "\\n\\n")?'


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
