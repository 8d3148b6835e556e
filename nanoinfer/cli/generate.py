"""`nanoinfer generate`: continue a prompt and stream the text."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nanoinfer.cli.options import (
    EngineOptions,
    MaxModelLen,
    MaxTokens,
    SamplingOptions,
    Stop,
    cli_errors,
    expand_options,
    load_llm,
    read_standard_input,
    resolve_sampling_params,
)
from nanoinfer.errors import NanoinferError
from nanoinfer.sampling_params import SamplingParams, StructuredOutputsParams

if TYPE_CHECKING:
    from nanoinfer.llm import LLM


@expand_options
def generate(
    *,
    prompt: Annotated[str, typer.Argument(help="The text to continue; - reads standard input.")],
    engine: EngineOptions,
    max_model_len: MaxModelLen = None,
    sampling: SamplingOptions,
    max_tokens: MaxTokens = 256,
    min_tokens: Annotated[int, typer.Option(help="Tokens before the text may end.")] = 0,
    stop: Stop = None,
    stop_token_ids: Annotated[list[int] | None, typer.Option(help="End at this token id; may be given several times.")] = None,
    ignore_eos: Annotated[bool, typer.Option(help="Do not end at the end-of-text token.")] = False,
    json_schema: Annotated[
        Path | None,
        typer.Option(
            help="Answer with JSON that follows the schema in this file.", metavar="FILE", exists=True, dir_okay=False
        ),
    ] = None,
    echo: Annotated[bool, typer.Option("--echo", help="Print the prompt, too.")] = False,
) -> None:
    """Continue a text and stream it to the terminal."""
    with cli_errors():
        llm = load_llm(engine, max_model_len=max_model_len)
        params = resolve_sampling_params(
            llm,
            sampling,
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            stop=stop,
            stop_token_ids=stop_token_ids,
            ignore_eos=ignore_eos,
            structured_outputs=None if json_schema is None else StructuredOutputsParams(json=json_schema.read_text("utf-8")),
        )
        text = read_standard_input() if prompt == "-" else prompt
        if echo:
            print(text, end="", flush=True)
        _, interrupted = print_stream(llm, text, params)
        if interrupted:
            raise typer.Exit(130)  # the code that a shell gives


def print_stream(llm: "LLM", prompt: Any, params: SamplingParams) -> tuple[str, bool]:
    """Stream an answer to the terminal.

    Args:
        prompt: any prompt that LLM.stream takes.

    Returns:
        The printed text, and whether Ctrl-C ended it.
    """
    printed, interrupted = "", False
    stream: Any = llm.stream(prompt, params)  # a generator: closing it aborts the request
    try:
        for delta in stream:
            printed += delta.text
            print(delta.text, end="", flush=True)
            if delta.output and (error := delta.output.outputs[0].error):
                raise NanoinferError(error)
    except KeyboardInterrupt:
        interrupted = True
        stream.close()
    print()
    return printed, interrupted
