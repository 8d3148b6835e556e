"""A coding agent: the model lists, reads and edits the files of a folder and runs commands in it, until it has an answer.

First: nanoinfer serve Qwen/Qwen3-4B (or any server whose model has learned tools), and pip install openai. Then:

    python examples/coding_agent.py FOLDER "Why does test_add fail? Mend it."

Paths outside the folder are refused. A command can do whatever you can, so each is shown and needs your "y", unless --yes is
given. Each request has the whole conversation, of which the server's prefix cache computes only the new part.
"""

import argparse
import json
import os
import subprocess
from pathlib import Path

from openai import BadRequestError, OpenAI

MAX_CHARACTERS = 8000  # of a result, so that a large file does not fill the context
MAX_SECONDS = 60  # of a command
INSTRUCTIONS = (
    "You are a coding agent in a folder. Look before you change anything: list the files, and read those that matter. Make "
    "small edits, run the tests or the program after each, and end with a short answer in text."
)


class Workspace:
    """A folder, and what the model may do in it. Each tool takes strings and returns a text."""

    def __init__(self, folder: Path, *, asks: bool) -> None:
        """asks: whether a command needs a "y" from the terminal."""
        self._folder = folder.resolve(strict=True)
        self._asks = asks
        self.tools = {tool.__name__: tool for tool in (self.list_files, self.read_file, self.edit_file, self.run_command)}

    def _path(self, path: str) -> Path:
        found = (self._folder / path).resolve()  # after links are followed
        if not found.is_relative_to(self._folder):
            raise ValueError(f"{path} is outside the folder")
        return found

    def list_files(self) -> str:
        """List the files of the folder, with their sizes in bytes."""
        files = [path for path in sorted(self._folder.rglob("*")) if path.is_file() and not path.is_symlink()]
        named = [(path.relative_to(self._folder), path.stat().st_size) for path in files]
        return "\n".join(f"{path} ({size})" for path, size in named if not any(part.startswith(".") for part in path.parts))

    def read_file(self, path: str) -> str:
        """Read a text file."""
        return self._path(path).read_text(encoding="utf-8")

    def edit_file(self, path: str, old: str, new: str) -> str:
        """Replace a text that occurs exactly once in a file. With an empty old text, create a new file."""
        file = self._path(path)
        if not old:
            if file.exists():
                raise ValueError(f"{path} exists; give the old text to replace")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(new, encoding="utf-8")
            return f"created {path}"
        text = file.read_text(encoding="utf-8")
        if text.count(old) != 1:
            raise ValueError(f"the old text occurs {text.count(old)} times in {path}; it must occur once, so give more of it")
        file.write_text(text.replace(old, new), encoding="utf-8")
        return f"edited {path}"

    def run_command(self, command: str) -> str:
        """Run a shell command in the folder, and return its exit status and output."""
        if self._asks and input(f"run {command!r}? [y/N] ").strip().lower() != "y":
            raise ValueError("the user does not allow this command")
        done = subprocess.run(
            command, shell=True, cwd=self._folder, timeout=MAX_SECONDS, text=True, errors="replace",
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        return f"exit status {done.returncode}\n{done.stdout}"

    def call(self, name: str, arguments: str) -> str:
        """Call a tool with arguments as JSON, and return its result or what went wrong, from which the model can go on."""
        try:
            result = self.tools[name](**json.loads(arguments))
        except KeyError:
            result = f"Error: there is no tool {name!r}; the tools are {', '.join(self.tools)}"
        except (ValueError, TypeError, OSError, subprocess.TimeoutExpired) as error:
            result = f"Error: {error}"
        if len(result) <= MAX_CHARACTERS:
            return result or "(nothing)"
        half = MAX_CHARACTERS // 2
        return f"{result[:half]}\n[{len(result) - 2 * half} characters are left out]\n{result[-half:]}"

    def schemas(self) -> list[dict]:
        """Describe the tools for the model: every argument is a string, and the calls must obey that."""
        described = []
        for name, tool in self.tools.items():
            names = [argument for argument in tool.__annotations__ if argument != "return"]
            parameters = {"type": "object", "properties": {argument: {"type": "string"} for argument in names}}
            parameters |= {"required": names, "additionalProperties": False}
            function = {"name": name, "description": tool.__doc__, "parameters": parameters, "strict": True}
            described.append({"type": "function", "function": function})
        return described


def work(client: OpenAI, workspace: Workspace, task: str, *, max_turns: int) -> str:
    """Let the model call tools until it answers in text, and return that text."""
    model = client.models.list().data[0].id
    messages: list[dict] = [{"role": "system", "content": INSTRUCTIONS}, {"role": "user", "content": task}]
    for _ in range(max_turns):
        try:
            reply = client.chat.completions.create(model=model, messages=messages, tools=workspace.schemas())
        except BadRequestError as error:
            if error.code != "context_length_exceeded":
                raise
            return "The conversation has become too long for the model; give a smaller task, or serve with a larger context."
        message = reply.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return message.content or "(the model said nothing)"
        for call in message.tool_calls:
            result = workspace.call(call.function.name, call.function.arguments)
            print(f"{call.function.name}({call.function.arguments[:100]}) -> {result.splitlines()[0][:100]}")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return f"There is no answer after {max_turns} turns; --max-turns allows more."


def main() -> None:
    parser = argparse.ArgumentParser(description="Let a model work in a folder.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("task")
    parser.add_argument("--yes", action="store_true", help="run every command without asking")
    parser.add_argument("--max-turns", type=int, default=30)
    options = parser.parse_args()
    client = OpenAI(
        base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"),
        api_key=os.environ.get("OPENAI_API_KEY", "none"),
    )
    print(work(client, Workspace(options.folder, asks=not options.yes), options.task, max_turns=options.max_turns))


if __name__ == "__main__":
    main()
