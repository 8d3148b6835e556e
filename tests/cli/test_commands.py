"""What every command has: help in sections, errors in the words of the command line, values that a shell completes."""

import re

import pytest
import typer
from typer.testing import CliRunner

from nanoinfer.cli import commands
from nanoinfer.cli.main import app


def run(*arguments):
    return CliRunner().invoke(app, arguments)


def every_command(command, *words):
    """The words of each command and group, and the command."""
    yield words, command
    for name in command.list_commands(None) if hasattr(command, "list_commands") else ():
        yield from every_command(command.get_command(None, name), *words, name)


def test_help_has_at_most_40_lines_and_an_example_and_help_all_has_every_option():
    root = typer.main.get_command(app)
    commands_seen = list(every_command(root))
    assert len(commands_seen) > 28
    for words, command in commands_seen:
        text, whole = (
            CliRunner().invoke(app, [*words, flag], env={"COLUMNS": "80"}).stdout for flag in ("--help", "--help-all")
        )
        assert sum(-(-max(len(line), 1) // 80) for line in text.splitlines()) <= 40, words
        assert f"Examples:\n  nanoinfer {words[0] if words else 'generate'}" in text, words
        names = [name for param in command.params for name in param.opts if name.startswith("-")]
        assert [name for name in names if not re.search(rf"(?<![\w-]){name}(?![\w-])", whole)] == [], words
    assert run("generate", "-h").stdout == run("generate", "--help").stdout
    assert re.search(r"--max-tokens N .*\[default:\s+256\]", run("generate", "-h").stdout, re.DOTALL)
    assert run("bench").output.startswith("Usage: ")  # a group without a command


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("gen", "x"), "error: there is no command 'gen'; did you mean generate?\n"),
        (("bench", "throughputs"), "error: there is no command 'throughputs'; did you mean throughput?\n"),
        (("--nonsense",), "No such option: --nonsense; "),
        (("generate", "x", "--max-tokens", "ten"), "'ten'"),
        (("generate", "x", "--kv-cache-memory", "much"), "'much' is not a size"),
        (("batch",), "Missing argument 'INPUT'; "),
        (("generate", "Once", "upon", "a", "time"), 'error: put the prompt in quotes: "Once upon a time"'),
        (("chat", "What", "now?", "-n", "3"), 'error: put the question in quotes: "What now?"'),
    ],
)
def test_what_cannot_be_read_is_one_sentence_and_exit_code_2(arguments, sentence):
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert sentence in result.stderr
    assert result.stderr.count("\n") == 1


def test_ollamas_commands_say_what_to_type():
    for command, words in (
        ("run", "`nanoinfer chat -m MODEL` talks to a model"),
        ("pull", "`hf download OWNER/NAME` downloads a model"),
        ("list", "`nanoinfer models` lists"),
        ("show", "`nanoinfer inspect MODEL` describes"),
        ("ps", "a model is loaded only while a command runs"),
    ):
        result = run(command, "llama3.2")
        assert result.exit_code == 2
        assert result.stderr.startswith(f"error: there is no command {command!r}; {words}")
        assert "ollama" not in run("bench", command).stderr + run("bench", "--help").stdout


OPTIONS = ("--max-tokens", "--dtype", "--quantization", "--stop", "--seed")
NAMES = {option.strip("-").replace("-", "_"): option for option in OPTIONS}


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ("max_tokens must be >= 1, or None for the model's length, got 0", "--max-tokens must be >= 1, got 0"),
        ("seed must be in 0 .. 9, or None or -1 to draw one, got -2", "--seed must be in 0 .. 9, or -1 to draw one, got -2"),
        ("quantization must be None, 'int8' or 'int4', got 3", "--quantization must be 'int8' or 'int4', got 3"),
        (
            "quantization='int8' computes in bfloat16, got dtype='float32'; leave dtype out",
            "--quantization=int8 computes in bfloat16, got --dtype=float32; leave --dtype out",
        ),
        ("there is no folder 'max_tokens/stop'; stop the dtype", "there is no folder 'max_tokens/stop'; stop the dtype"),
    ],
)
def test_an_error_of_python_names_options(message, words):
    assert commands.in_words_of(message, NAMES) == words


def test_a_shell_completes_values():
    """In this process. test_options.py has the shell."""
    for words, completed in (
        ("nanoinfer generate --dtype b", ["bfloat16"]),
        ("nanoinfer explain --demo s", ["sharing", "stop-string"]),
    ):
        given = {"_NANOINFER_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
        assert CliRunner().invoke(app, [], prog_name="nanoinfer", env=given).stdout.split() == completed


def test_models_are_completed_from_the_package_and_the_hubs_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    (tmp_path / "models--owner--tiny").mkdir()
    (tmp_path / "datasets--owner--data").mkdir()
    assert commands.complete_models("ti") == ["tiny-gpt2", "tiny-qwen3", "tiny-tools"]
    assert commands.complete_models("") == ["tiny-gpt2", "tiny-qwen3", "tiny-tools", "owner/tiny"]
    assert commands.complete_models("/tmp") == []  # paths are the shell's


def test_without_a_home_folder_models_of_the_package_are_completed(no_home):
    assert commands.complete_models("tiny-q") == ["tiny-qwen3"]
