"""A chat on a terminal: questions are answered, and lines that begin with / are commands.

In: messages. Out: answers on standard output, everything else on standard error. ChatSession keeps the
messages, passes those to the model that leave room for an answer in its context, and reads and writes files.
"""

import glob
import json
import sys
from ast import literal_eval
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanoinfer.arguments import Option, declarations
from nanoinfer.cli.generate import describe_speed, print_stream
from nanoinfer.cli.options import with_seed
from nanoinfer.errors import InvalidValueError, NanoinferError, suggest
from nanoinfer.outputs import RequestOutput
from nanoinfer.sampling_params import SamplingParams

if TYPE_CHECKING:
    from nanoinfer.llm import LLM

# The parameters that /set can change. The other fields of SamplingParams are for several answers, or for hidden outputs.
PARAMETERS = [name for name, one in declarations(SamplingParams).items() if one.marker(Option)]


class ChatSession:
    """A conversation, which is a system message and the turns after it, and the parameters of its next answer.

    Each prompt begins with the previous prompt and answer, so the prefix cache holds all but the new tokens, unless turns
    are left out, and with templates such as Qwen3's, which remove the thinking from earlier answers.

    Attributes:
        system: the system message.
        messages: all questions and answers, in the format of LLM.chat.
        num_dropped: the number of oldest messages that the model no longer reads.
        params: the parameters of the next answer. Every answer adds 1 to the seed, so /retry gives another answer, and the
            first seed repeats the whole session.
        output: the newest RequestOutput. None: before the first answer and after an answer that Ctrl-C stopped.
    """

    def __init__(
        self,
        llm: "LLM",
        params: SamplingParams,
        system: str | None = None,
        chat_template_kwargs: dict[str, object] | None = None,
        *,
        shows_stats: bool = False,
    ) -> None:
        self.llm, self.system, self._chat_template_kwargs = llm, system, chat_template_kwargs
        self.messages: list[dict[str, str]] = []
        self.num_dropped = 0
        self.params = self._first_params = with_seed(params)
        self.output: RequestOutput | None = None
        self._shows_stats = shows_stats

    def handle(self, message: str) -> None:
        """Run a command or answer a question. A text of several lines is a question.

        Raises: NanoinferError if the message is refused. The session is then unchanged. EOFError for /exit.
        """
        if not message.startswith("/") or "\n" in message:
            self.ask(message.strip())
            return
        name, _, argument = message.removeprefix("/").partition(" ")
        argument = argument.strip()
        if name not in COMMANDS:
            found = suggest(f"/{name}", [f"/{command}" for command in COMMANDS])
            hint = f"{found} (put a space before a question that begins with /)"
            raise InvalidValueError(f"there is no command /{name}; {hint}")
        expected, run = COMMANDS[name]
        if not expected.startswith("[") and bool(expected) != bool(argument):
            raise InvalidValueError(f"write /{name} {expected}".rstrip() + f", got {message!r}")
        run(self, argument)

    def ask(self, question: str) -> bool:
        """Stream the answer to a question, and keep the turn if the answer has any text. Returns whether it has.

        An answer that Ctrl-C stopped is kept, too.
        """
        prompt, num_dropped = self.render(question)
        num_left = max(self.llm.info.max_model_len - len(prompt["prompt_token_ids"]), self.params.min_tokens, 1)
        params = replace(self.params, max_tokens=min(self.params.max_tokens or num_left, num_left))
        text, self.output = print_stream(self.llm, prompt, params)
        self.params = replace(self.params, seed=((self.params.seed or 0) + 1) % 2**64)
        if text:
            if num_dropped and not self.num_dropped:
                note("(the context is full: from now on the oldest turns are left out; /clear begins anew)")
            self.add(question, text, num_dropped)
        if self.output is None:
            note("(stopped)" if text else "(stopped before the answer; the question is not kept)")
        elif not text:
            note("(the answer is empty; the question is not kept)")
        elif self.output.outputs[0].finish_reason == "length":
            is_at_most = self.output.metrics.num_output_tokens == self.params.max_tokens
            full = f"the context of {self.llm.info.max_model_len} tokens is full"
            note(f"(the answer is cut: {f'max_tokens is {self.params.max_tokens}' if is_at_most else full})")
        if self._shows_stats and self.output is not None:
            self.print_stats()
        return bool(text)

    def render(self, question: str) -> tuple[Any, int]:
        """Return the prompt for a question, and the number of oldest messages that it leaves out.

        If less than a quarter of the context remains for the answer, the oldest turns are left out until the prompt takes at
        most half. If single turns were left out, the beginning of every prompt would change, and nothing of it would be
        in the prefix cache. Only add() changes the conversation itself.
        """
        messages = [*self.messages, {"role": "user", "content": question}]
        prompt, start = self._render(messages[self.num_dropped :]), self.num_dropped
        max_model_len = self.llm.info.max_model_len
        if len(prompt["prompt_token_ids"]) > max_model_len * 3 // 4:
            questions = [index for index, message in enumerate(messages) if message["role"] == "user"]
            for start in (index for index in questions if index > self.num_dropped):
                prompt = self._render(messages[start:])
                if len(prompt["prompt_token_ids"]) <= max_model_len // 2:
                    break
        return prompt, start

    def add(self, question: str, answer: str, num_dropped: int) -> None:
        """Append a turn, with the num_dropped that render() returned for its prompt."""
        self.messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        self.num_dropped = num_dropped

    def clear(self, _: str = "") -> None:
        """Begin a new conversation."""
        self.messages, self.num_dropped = [], 0
        note("(a new conversation)")

    def save(self, path: str) -> None:
        """Write the conversation as JSON.

        The file has a list of all messages, as LLM.chat takes it. Raises: NanoinferError if it cannot be written.
        """
        text = json.dumps(self._with_system(self.messages), ensure_ascii=False, indent=1)
        try:
            _expanded(path).write_bytes(text.encode())
        except OSError as error:
            raise NanoinferError(f"cannot write {path} ({error.strerror}); give another path") from error
        note(f"(saved {len(self.messages)} messages in {path})")

    def load(self, path: str) -> None:
        """Continue a conversation that was saved.

        Raises: InvalidValueError if the file is not a conversation. The current conversation is then unchanged.
        """
        try:
            messages = json.loads(_expanded(path).read_text(encoding="utf-8-sig"))
        except OSError as error:
            raise InvalidValueError(f"cannot read {path} ({error.strerror}); give a file that /save wrote") from error
        except (ValueError, RecursionError) as error:
            raise InvalidValueError(f"{path} is not JSON ({error}); give a file that /save wrote") from error
        if not isinstance(messages, list) or not all(map(_is_message, messages)):
            example = '[{"role": "user", "content": "Hello"}, ...]'
            raise InvalidValueError(f"{path} must be a list such as {example}; give a file that /save wrote")
        is_system = [message["role"] == "system" for message in messages]
        if any(is_system[1:]):
            raise InvalidValueError(f"{path} has a system message at {is_system.index(True, 1)}; only the first can be one")
        self.system = messages[0]["content"] if any(is_system) else None
        self.messages, self.num_dropped = messages[any(is_system) :], 0
        note(f"(loaded {len(self.messages)} messages from {path})")

    def set_system(self, text: str) -> None:
        """Set the system message, or remove it."""
        self.system = text or None
        note("(the system message is set)" if text else "(there is no system message)")

    def _render(self, messages: list[dict[str, str]]) -> Any:
        return self.llm.render_chat(self._with_system(messages), chat_template_kwargs=self._chat_template_kwargs)

    def _with_system(self, messages: list[dict[str, str]]) -> list[dict[str, str]]:
        return messages if self.system is None else [{"role": "system", "content": self.system}, *messages]

    # ---- commands

    def print_help(self, _: str = "") -> None:
        """List the commands."""
        for name, (argument, run) in COMMANDS.items():
            note(f"  {f'/{name} {argument}':24}{str(run.__doc__).splitlines()[0]}")
        note('  """                     Begin a message of several lines, which ends with """.')
        note("  Ctrl-C                  Stop an answer, or clear the line.")

    def set_parameter(self, assignment: str) -> None:
        """Change or show a sampling parameter, or show all.

        The value is a Python literal, true, false, none or plain text. `default` restores the value at the chat's start.
        """
        if not assignment:
            for name in PARAMETERS:
                note(f"  {name:28}{getattr(self.params, name)}")
            note("  /set NAME VALUE changes one, /set NAME default takes it back.")
            return
        name, _, text = assignment.partition(" ")
        if name not in PARAMETERS:
            raise InvalidValueError(f"a chat has no parameter {name!r}; {suggest(name, PARAMETERS)}")
        if not text:
            note(f"({name} is {getattr(self.params, name)})")
            return
        value = getattr(self._first_params, name) if text.strip() == "default" else _read_value(text.strip())
        params = with_seed(replace(self.params, **{name: value}))
        self.llm.engine.inputs.prepare([0], params)  # refuses token ids that this model lacks
        self.params = params
        note(f"({name} is {getattr(self.params, name)})")

    def retry(self, _: str = "") -> None:
        """Answer the last question again.

        The old answer stays if there is no new answer.
        """
        messages = self.messages
        questions = [index for index, message in enumerate(messages) if message["role"] == "user"]
        if not questions:
            raise InvalidValueError("there is no question to answer again; type one")
        is_answered = False
        self.messages = messages[: questions[-1]]
        try:
            is_answered = self.ask(messages[questions[-1]]["content"])
        finally:
            if not is_answered:
                self.messages = messages

    def print_stats(self, _: str = "") -> None:
        """Show speed and context of the last answer."""
        if self.output is None:
            raise InvalidValueError("there are no statistics without a complete answer; ask something")
        note(f"({describe_speed(self.output)}, context of {self.llm.info.max_model_len} tokens)")

    def exit(self, _: str = "") -> None:
        """End the chat."""
        raise EOFError


# Name -> the argument, and the method, whose docstring begins with the help. "FILE" is required, "[TEXT]" is optional.
COMMANDS: dict[str, tuple[str, Callable[[ChatSession, str], None]]] = {
    "help": ("", ChatSession.print_help),
    "clear": ("", ChatSession.clear),
    "retry": ("", ChatSession.retry),
    "set": ("[NAME [VALUE]]", ChatSession.set_parameter),
    "system": ("[TEXT]", ChatSession.set_system),
    "stats": ("", ChatSession.print_stats),
    "save": ("FILE", ChatSession.save),
    "load": ("FILE", ChatSession.load),
    "exit": ("", ChatSession.exit),
}


def complete(line: str) -> list[str]:
    """Return possible completions of a line's last word: commands, parameters or files."""
    if not line.startswith("/"):
        return []
    name, *arguments = line.removeprefix("/").split(" ")
    if not arguments:
        return [f"/{command} " for command in COMMANDS if command.startswith(name)]
    if name == "set" and len(arguments) == 1:
        return [f"{parameter} " for parameter in PARAMETERS if parameter.startswith(arguments[0])]
    return sorted(glob.glob(f"{glob.escape(arguments[-1])}*")) if COMMANDS.get(name, ("",))[0] == "FILE" else []


WORDS = {"true": True, "false": False, "none": None}


def _read_value(text: str) -> Any:
    """Read the value of a parameter. A text that looks like a literal is written in quotes."""
    if text.lower() in WORDS:
        return WORDS[text.lower()]
    try:
        return literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text


def _expanded(path: str) -> Path:
    """Return a path with the home folder in the place of ~."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:  # there is no such user, or this one has no home folder
        raise InvalidValueError(f"{path} is in no home folder that is known; give another path") from error


def _is_message(message: object) -> bool:
    return (
        isinstance(message, dict)
        and message.get("role") in ("system", "user", "assistant")
        and isinstance(message.get("content"), str)
    )


def note(text: str) -> None:
    print(text, file=sys.stderr)
