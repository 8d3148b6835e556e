"""examples/coding_agent.py with a model that follows a script: it reads, edits and runs, and stays in its folder."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import fake_server

pytest.importorskip("openai")

AGENT = Path(__file__).parents[2] / "examples" / "coding_agent.py"
PROGRAM = "def add(a, b):\n    return a - b\n\n\nassert add(2, 3) == 5\nprint('it adds')\n"


def load():
    spec = importlib.util.spec_from_file_location("coding_agent", AGENT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "add.py").write_text(PROGRAM, encoding="utf-8")
    (tmp_path / "secret").write_text("secret", encoding="utf-8")
    return tmp_path / "work"


@pytest.fixture
def workspace(folder):
    return load().Workspace(folder, asks=False)


def turn(*calls, content=None):
    """A turn of the model: calls of tools by name and arguments, or a text."""
    message = {"role": "assistant", "content": content}
    if calls:
        message["tool_calls"] = [
            {"id": f"c{i}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
            for i, (name, arguments) in enumerate(calls)
        ]
    return fake_server.reply(200, {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]})


@pytest.mark.slow
def test_a_bug_is_found_mended_and_tried(folder):
    run = f'"{sys.executable}" add.py'
    script = [
        turn(("list_files", {}), ("read_file", {"path": "add.py"})),
        turn(("run_command", {"command": run})),
        turn(("edit_file", {"path": "add.py", "old": "a - b", "new": "a + b"}), ("run_command", {"command": run})),
        turn(content="It subtracted."),
    ]
    with fake_server.serving(*script, models=("scripted",)) as server:
        environment = os.environ | {"OPENAI_BASE_URL": server.url + "/v1"}
        done = subprocess.run(
            [sys.executable, AGENT, folder, "Mend add.", "--yes"], env=environment, capture_output=True, text=True, check=True
        )
    assert done.stdout.endswith("It subtracted.\n")
    assert (folder / "add.py").read_text(encoding="utf-8") == PROGRAM.replace("a - b", "a + b")
    last = server.bodies[-1]["messages"]
    results = [message["content"] for message in last if message["role"] == "tool"]
    assert results[:2] == [f"add.py ({len(PROGRAM)})", PROGRAM]
    assert "AssertionError" in results[2]
    assert results[3:] == ["edited add.py", "exit status 0\nit adds\n"]
    assert [message["role"] for message in last[:3]] == ["system", "user", "assistant"]
    assert all(tool["function"]["strict"] for tool in server.bodies[0]["tools"])


@pytest.fixture(scope="module")
def tools_url():
    """A server of the bundled model that has learned tools."""
    for name in ("fastapi", "uvicorn", "prometheus_client", "httpx2", "llguidance"):
        pytest.importorskip(name)
    from nanoinfer import AsyncLLM
    from tests.helpers import http_server

    with http_server.serving(lambda: AsyncLLM("tiny-tools", seed=0)) as server:
        yield server.url


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "step", "answer"),
    [
        ("Which files are there?", "list_files({}) -> notes.txt (13)", "The files are:\nnotes.txt (13)"),
        ("What is in notes.txt?", 'read_file({"path": "notes.txt"}) -> the red kite', "notes.txt says:\nthe red kite"),
        ("Run ls", 'run_command({"command": "ls"}) -> exit status 0', "Done: exit status 0\nnotes.txt"),
    ],
)
def test_the_bundled_model_does_what_the_guide_says(tools_url, tmp_path, capsys, task, step, answer):
    (tmp_path / "notes.txt").write_text("the red kite\n", encoding="utf-8")
    agent = load()
    client = agent.OpenAI(base_url=f"{tools_url}/v1", api_key="none")
    assert agent.work(client, agent.Workspace(tmp_path, asks=False), task, max_turns=3).strip() == answer
    assert capsys.readouterr().out == f"{step}\n"


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("read_file", {"path": "../secret"}, "../secret is outside the folder"),
        ("read_file", {"path": "/etc/hostname"}, "/etc/hostname is outside the folder"),
        ("edit_file", {"path": "../new", "old": "", "new": "x"}, "../new is outside the folder"),
        ("edit_file", {"path": "add.py", "old": "add", "new": "x"}, "the old text occurs 3 times in add.py"),
        ("edit_file", {"path": "add.py", "old": "gone", "new": "x"}, "occurs 0 times"),
        ("edit_file", {"path": "add.py", "old": "", "new": "x"}, "add.py exists"),
        ("read_file", {"path": "gone.py"}, "No such file"),
        ("read_file", {"file": "add.py"}, "unexpected keyword argument 'file'"),
        ("remove", {}, "there is no tool 'remove'; the tools are list_files, read_file, edit_file, run_command"),
    ],
)
def test_what_goes_wrong_is_said_and_changes_nothing(workspace, folder, name, arguments, message):
    result = workspace.call(name, json.dumps(arguments))
    assert result.startswith("Error: ")
    assert message in result
    assert (folder / "add.py").read_text(encoding="utf-8") == PROGRAM
    assert {path.name for path in folder.parent.iterdir()} == {"work", "secret"}


def test_links_out_of_the_folder_are_not_followed_and_long_results_are_cut(workspace, folder):
    (folder / "link").symlink_to(folder.parent / "secret")
    assert "outside the folder" in workspace.call("read_file", '{"path": "link"}')
    assert "link" not in workspace.list_files()
    assert workspace.call("read_file", '{"path": ').startswith("Error: ")
    assert workspace.call("edit_file", json.dumps({"path": "a/b.txt", "old": "", "new": "x" * 20_000})) == "created a/b.txt"
    result = workspace.call("read_file", '{"path": "a/b.txt"}')
    assert ("[12000 characters are left out]" in result, len(result) < 8100) == (True, True)


def test_a_command_needs_a_yes(folder, monkeypatch):
    workspace = load().Workspace(folder, asks=True)
    for answer, ran in (("n", False), ("", False), ("y", True)):
        monkeypatch.setattr("builtins.input", lambda question, answer=answer: answer)
        result = workspace.call("run_command", '{"command": "echo done"}')
        assert ("exit status 0\ndone" in result) is ran
        assert ("does not allow" in result) is not ran


def test_a_loop_and_a_full_context_end(folder, workspace):
    import openai

    module = load()
    too_long = fake_server.reply(400, {"error": {"message": "too long", "code": "context_length_exceeded"}})
    for reply, words in ((turn(("list_files", {})), "no answer after 3 turns"), (too_long, "smaller task")):
        with (
            fake_server.serving(reply) as server,
            openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client,
        ):
            assert words in module.work(client, workspace, "Loop.", max_turns=3)
