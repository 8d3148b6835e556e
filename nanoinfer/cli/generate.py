"""`nanoinfer generate`: continue a prompt, and stream the text or print several answers or JSON at the end."""

import json
import sys
from contextlib import closing, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from nanoinfer.cli import options
from nanoinfer.engine.prompts import PromptType
from nanoinfer.errors import InvalidPromptError, InvalidValueError, NanoinferError
from nanoinfer.features.structured.params import StructuredOutputsParams
from nanoinfer.outputs import CompletionOutput, RequestOutput
from nanoinfer.sampling_params import SamplingParams

if TYPE_CHECKING:
    from nanoinfer.llm import LLM


@options.expand_options
def generate(
    *,
    prompt: Annotated[
        str | None, typer.Argument(help="The text to continue. Default, and with -: standard input.", metavar="PROMPT")
    ] = None,
    file: Annotated[Path | None, typer.Option("--file", "-f", help="Read the prompt from a text file.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Send the prompt as a message, through the chat template.")] = False,
    engine: options.EngineOptions,
    sampling: options.SamplingOptions,
    max_tokens: Annotated[int, SamplingParams] = 256,
    n: Annotated[  # --n would be too close to -n, the number of tokens
        int,
        typer.Option("--num-answers", rich_help_panel="Sampling", help="Number of answers. The i-th is drawn with seed + i."),
    ] = 1,
    logprobs: Annotated[int | None, SamplingParams] = None,
    json_schema: Annotated[
        Path | None,
        typer.Option(
            help="Answer with JSON that follows the schema in this file.", metavar="FILE", exists=True, dir_okay=False
        ),
    ] = None,
    echo: Annotated[bool, typer.Option("--echo", help="Print the prompt, too.")] = False,
    stats: Annotated[bool, typer.Option("--stats", help="Print numbers of tokens and speed, to standard error.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, with the fields of RequestOutput.")] = False,
) -> None:
    """Continue a text and stream it to the terminal."""
    text = _read_prompt(prompt, file)
    llm = options.load_llm(engine, needs_chat_template=chat)
    form = None if json_schema is None else StructuredOutputsParams(json=options.read_file(json_schema))
    given = {"max_tokens": max_tokens, "n": n, "logprobs": logprobs, "structured_outputs": form}
    params = options.resolve_sampling_params(llm, sampling, **given)
    request: PromptType = text
    if chat:
        from nanoinfer.features.chat.messages import render_chats

        [request], [params] = render_chats(llm.engine.inputs, [{"role": "user", "content": text}], params)
    if echo and not as_json:
        print(text, end="", flush=True)
    if n == 1 and not as_json:
        _, output = print_stream(llm, request, params)
        if output is None:
            raise typer.Exit(130)  # a shell's exit code after Ctrl-C
    else:
        [output] = llm.generate(request, params, use_tqdm=False)
        if error := output.outputs[0].error:
            raise NanoinferError(error)
        if as_json:
            print(json.dumps(asdict(output)))
        else:
            for answer in output.outputs:
                print(f"[answer {answer.index + 1} of {len(output.outputs)}]\n{answer.text}\n")
    if logprobs is not None and not as_json:
        for answer in output.outputs:
            print_logprobs(answer)
    if stats:
        print(describe_speed(output), file=sys.stderr)


def _read_prompt(prompt: str | None, file: Path | None) -> str:
    if prompt is not None and file is not None:
        raise InvalidValueError(f"give a prompt or --file, not both; got {prompt!r} and {file}")
    if file is not None:
        text, reason = options.read_file(file), f"{file} is empty"
    elif prompt not in (None, "-"):
        text, reason = prompt, "the prompt is empty"
    elif prompt is None and sys.stdin is not None and sys.stdin.isatty():
        text, reason = "", "there is no prompt"
    else:
        text, reason = options.read_standard_input(), "standard input is empty"
    if not text:
        raise InvalidPromptError(f'{reason}; give a prompt, such as nanoinfer generate "Once upon a time"')
    return text


def print_stream(llm: "LLM", prompt: Any, params: SamplingParams) -> tuple[str, RequestOutput | None]:
    """Stream an answer to the terminal. Returns its text, and the output, which is None if Ctrl-C ended the answer."""
    text, output = "", None
    stream = llm.stream(prompt, params)
    with suppress(KeyboardInterrupt), closing(stream):  # closing it aborts the request
        for delta in stream:
            text += delta.text
            print(delta.text, end="", flush=True)
            output = delta.output
    if text or output is None:  # ends the line of the answer, or of the ^C that the terminal shows
        print(flush=True)
    if output is not None and (error := output.outputs[0].error):
        raise NanoinferError(error)
    return text, output


def describe_speed(output: RequestOutput) -> str:
    """Describe the numbers of tokens and the speed of a finished request in one line."""
    metrics = output.metrics
    phrases = [f"prompt {len(output.prompt_token_ids)} tokens ({metrics.num_cached_tokens} cached)"]
    if metrics.ttft is not None:
        phrases.append(f"first token after {metrics.ttft:.2f} s")
    phrases.append(f"output {metrics.num_output_tokens} tokens")
    if metrics.tpot:
        phrases.append(f"{1 / metrics.tpot:.1f} tokens/s")
    return ", ".join(phrases)


def print_logprobs(answer: CompletionOutput) -> None:
    """Print each token's log-probability, and the most likely tokens at its position."""
    rows = []
    for token_id, position in zip(answer.token_ids, answer.logprobs or [], strict=True):
        token = position[token_id]
        likeliest = sorted(position.values(), key=lambda entry: -entry.logprob)
        alternatives = "  ".join(f"{entry.decoded_token!r} {entry.logprob:.2f}" for entry in likeliest)
        rows.append((Text(repr(token.decoded_token)), f"{token.logprob:.2f}", str(token.rank), Text(alternatives)))
    options.print_table(("token", "logprob", "rank", "most likely"), rows)
