"""`nanoinfer chat`: a conversation with a model that has a chat template."""

from typing import Annotated

import typer

from nanoinfer.cli.generate import print_stream
from nanoinfer.cli.options import (
    EngineOptions,
    MaxModelLen,
    MaxTokens,
    SamplingOptions,
    Stop,
    cli_errors,
    expand_options,
    load_llm,
    print_error,
    resolve_sampling_params,
)
from nanoinfer.errors import NanoinferError


@expand_options
def chat(
    *,
    engine: EngineOptions,
    max_model_len: MaxModelLen = None,
    system: Annotated[str | None, typer.Option(help="A system message to begin with.")] = None,
    sampling: SamplingOptions,
    max_tokens: MaxTokens = 1024,
    stop: Stop = None,
) -> None:
    """Talk to a model that has a chat template. Ctrl-C stops an answer. /reset starts anew. /exit or Ctrl-D leaves."""
    with cli_errors():
        llm = load_llm(engine, max_model_len=max_model_len)
        params = resolve_sampling_params(llm, sampling, max_tokens=max_tokens, stop=stop)
        beginning = [{"role": "system", "content": system}] if system else []
        messages = list(beginning)
        while (line := _read_line()) is not None and line != "/exit":
            if line == "/reset":
                messages = list(beginning)
                print("(forgotten)")
            elif line:
                question = {"role": "user", "content": line}
                try:
                    answer, _ = print_stream(llm, llm.render_chat([*messages, question]), params)
                except NanoinferError as error:  # a prompt that is too long, for example: the conversation stays as it was
                    print_error(error)
                    continue
                if answer:
                    messages += [question, {"role": "assistant", "content": answer}]


def _read_line() -> str | None:
    """One line from the user, or None at the end of the input. Ctrl-C at the prompt only clears the line."""
    while True:
        try:
            return input("\n> ").strip()
        except EOFError:
            return None
        except KeyboardInterrupt:
            print()
