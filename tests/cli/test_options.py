"""What the commands share: groups of options, sizes, errors without a traceback, tables of 80 columns."""

import errno
import io
import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass, fields
from functools import partial
from inspect import signature

import pytest
import typer
from typer.testing import CliRunner

from nanoinfer import LLM, SamplingParams
from nanoinfer.cli.chat_session import PARAMETERS, ChatSession
from nanoinfer.cli.commands import cli_errors
from nanoinfer.cli.options import (
    EngineOptions,
    SamplingOptions,
    expand_options,
    option_names,
    parse_size,
    print_table,
    read_file,
    read_standard_input,
)
from nanoinfer.loading.checkpoint import read_json
from nanoinfer.server.batch import check_requests, read_requests
from nanoinfer_lab.bench.comparison import read_report
from nanoinfer_lab.bench.workloads import recorded
from nanoinfer_lab.simulate.hardware import HARDWARE, Hardware


@dataclass(frozen=True, kw_only=True)
class Point:
    x: int = 1
    y: int = 2


def run(*arguments):
    """What a command with a Point between two options of its own receives."""
    received = []

    @expand_options
    def command(*, name: str = "a", point: Point, z: int = 3) -> None:
        received.append((name, point, z))

    app = typer.Typer()
    app.command()(command)
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    return received or result.output


def test_a_command_gets_its_group_from_the_options_of_its_fields():
    assert run() == [("a", Point(), 3)]
    assert run("--y", "5", "--name", "b", "--z", "7") == [("b", Point(x=1, y=5), 7)]


def test_the_groups_have_the_names_of_what_they_are_passed_to():
    assert names(EngineOptions) - {"threads", "imports"} <= set(signature(LLM.__init__).parameters)  # the process's own
    assert set(option_names(SamplingParams)) < names(SamplingParams)


def test_a_command_that_generates_has_an_option_for_every_parameter_that_a_chat_can_set():
    received = []

    @expand_options
    def command(*, sampling: SamplingOptions, max_tokens: int = 5) -> None:
        received.append((sampling, max_tokens))

    app = typer.Typer()
    app.command()(command)
    arguments = "-t 0.5 --ignore-eos --no-skip-special-tokens --bad-words a --bad-words b --allowed-token-ids 3".split()
    for given in ([], arguments):
        assert CliRunner().invoke(app, given).exit_code == 0
    (none, _), (some, max_tokens) = received
    assert set(none.values()) == {None}
    assert {*none, "max_tokens", "logit_bias"} == set(PARAMETERS)  # logit_bias is no text, and max_tokens the command's own
    assert max_tokens == 5
    assert {name: value for name, value in some.items() if value is not None} == {
        "temperature": 0.5,
        "ignore_eos": True,
        "skip_special_tokens": False,
        "bad_words": ["a", "b"],
        "allowed_token_ids": [3],
    }


def names(kind):
    return {field.name for field in fields(kind)}


def test_help_version_and_completion_import_no_torch():
    code = """
import atexit, os, sys
from typer.testing import CliRunner
from nanoinfer.cli.main import app
for arguments in (["--help"], ["--version"], ["generate", "--help"], ["bench", "throughput", "--help-all"]):
    assert CliRunner().invoke(app, arguments).exit_code == 0
atexit.register(lambda: print(*{"torch", "transformers", "numpy", "nanoinfer.cli.doctor"} & {*sys.modules}))
os.environ |= {"_NANOINFER_COMPLETE": "complete_bash", "COMP_WORDS": "nanoinfer mo", "COMP_CWORD": "1"}
app(prog_name="nanoinfer")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout.split(), done.stderr) == (["models"], "")


def test_a_size_has_a_unit_or_is_in_bytes():
    sizes = {"4096": 4096, "1k": 1024, "512M": 512 * 2**20, "1G": 2**30, "1.5 GiB": 3 * 2**29, "2TB": 2**41, "0": 0}
    assert {text: parse_size(text) for text in sizes} == sizes
    for text in ("", "G", "1X", "-1G", "1e9", "1GG", "0x10", "1,5G", "9" * 400):
        with pytest.raises(typer.BadParameter, match="is not a size; give bytes"):
            parse_size(text)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), "error: the output cannot be written: No space left on device\n"),
        (PermissionError(errno.EACCES, os.strerror(errno.EACCES), "roofline.png"), "error: roofline.png: Permission denied\n"),
        (BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE)), ""),
    ],
)
def test_an_error_of_the_system_is_exit_code_1_without_a_traceback(error, message, capsys):
    with pytest.raises(typer.Exit) as raised, cli_errors():
        raise error
    assert raised.value.exit_code == 1
    assert capsys.readouterr().err == message


def start(*arguments, **streams):
    return subprocess.Popen([sys.executable, "-m", "nanoinfer", *arguments], stderr=subprocess.PIPE, text=True, **streams)


def test_a_closed_pipe_ends_a_command_silently_and_a_full_disk_without_a_traceback():
    reader, writer = os.pipe()
    os.close(reader)
    process = start("--version", stdout=writer)
    os.close(writer)
    assert (process.communicate()[1], process.returncode) == ("", 1)
    if os.path.exists("/dev/full"):  # Linux's simulation of a full disk
        with open("/dev/full", "w") as full:
            process = start("--version", stdout=full)
        message = "error: the output cannot be written: No space left on device\n"
        assert (process.communicate()[1], process.returncode) == (message, 1)


def test_a_table_of_80_columns_wraps_long_cells_and_cuts_none(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    print_table(("requests", "transformers tok/s", "reason"), [("123456789", "123456.7", "a_word_of_many_letters" * 6)])
    text = capsys.readouterr().out
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    assert "requests" in lines[0] or "requests" in lines[1]
    assert "…" not in text
    assert text.count("a_word") + text.count("letters") > 6


LINE = json.dumps({"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {}})
MARK = b"\xef\xbb\xbf"  # the byte order mark with which Windows begins a text


def test_standard_input_of_windows_is_the_text_without_mark_and_carriage_returns(monkeypatch):
    for given in (b"Once\r\nmore\r\n", MARK + b"Once\nmore", b"Once\rmore\n"):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(given), encoding="utf-8", newline="\n"))
        assert read_standard_input() == "Once\nmore"


def loaded_by_a_chat(path):
    conversation = ChatSession(None, SamplingParams())
    conversation.load(path)
    return conversation.messages


@pytest.mark.parametrize(
    ("read", "text"),
    [
        (read_file, "Once\nmore"),
        (loaded_by_a_chat, '[{"role": "user",\n"content": "Hello"}]\n'),
        (read_report, '{"machine": {}, "versions": {},\n"settings": {}, "results": []}'),
        (Hardware.read, json.dumps(asdict(HARDWARE["H100"]), indent=1)),
        (partial(recorded, sampling={}), '{"timestamp": 0, "input_length": 5, "output_length": 2}\n'),
        (read_json, '{"model_type":\n"qwen3"}'),
        (lambda path: check_requests(path)[1], LINE + "\n"),  # without the digest, which is that of the bytes
        (lambda path: list(read_requests(path)), LINE + "\n"),
    ],
)  # fmt: skip
def test_a_file_of_windows_is_read_like_any_other(tmp_path, read, text):
    plain, of_windows = tmp_path / "plain" / "file.json", tmp_path / "windows" / "file.json"
    for path, content in ((plain, text.encode()), (of_windows, MARK + text.replace("\n", "\r\n").encode())):
        path.parent.mkdir()
        path.write_bytes(content)
    assert read(of_windows) == read(plain)
