"""What README shows is what happens: its commands run in a clone, in their order. So do the sessions of other pages."""

import doctest
import os
import re
import shlex
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from typer.testing import CliRunner

from nanoinfer import LLM, Recorder, SamplingParams
from nanoinfer.cli.main import app
from nanoinfer.features.tracing import TokenDrawn
from tools import address

README = Path(__file__).parents[2] / "README.md"
ROOT = README.parent
PAGES = [ROOT / "docs" / f"{name}.md" for name in ("usage", "reading", "tutorial")]
SETUP = re.compile(r"cd nanoinfer|git clone .+|make test .+|uvx .+|source \.venv/bin/activate")  # done, not done or this test
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_sessions_are_real_output(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # one of them writes a file
    run_the_session(page)


def run_the_session(page):
    text = page.read_text(encoding="utf-8").replace("```", "")
    test = doctest.DocTestParser().get_doctest(text, {}, page.name, str(page), 0)
    report: list[str] = []
    result = doctest.DocTestRunner().run(test, out=report.append)
    assert result.attempted >= 4
    assert result.failed == 0, "".join(report)


@pytest.fixture
def clone(tmp_path):
    """A clone with its uncommitted changes, and with the environment that runs this test as its .venv."""
    if not (ROOT / ".git").exists() or os.name == "nt" or not shutil.which("make"):
        pytest.skip("needs a clone, make and a POSIX shell")
    listed = subprocess.run(["git", "ls-files", "-coz", "--exclude-standard"], cwd=ROOT, capture_output=True, check=True)
    for name in listed.stdout.decode().split("\0"):
        if name and (ROOT / name).is_file() and not name.startswith("tests/"):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / ".venv").symlink_to(sys.prefix)
    return tmp_path


@pytest.mark.slow
def test_the_commands_of_readme_run_in_a_clone_in_their_order(clone, monkeypatch):
    """`make` and the server run as processes of their own, and the others in this one."""
    monkeypatch.chdir(clone)
    monkeypatch.setenv("PYTHONPATH", str(clone))
    text = README.read_text(encoding="utf-8")
    ran = []
    for kind, block in FENCED.findall(text):
        if kind == "python" and ">>>" in block:
            (clone / "session.txt").write_text(block, encoding="utf-8")
            run_the_session(clone / "session.txt")
            ran.append("doctest")
        for line in block.splitlines() if kind in ("", "sh") else []:
            command = line.split("#")[0].strip().removeprefix('pip install -e ".[server]" && ')
            if SETUP.fullmatch(command):
                continue
            ran.append(command)
            if command.startswith("make demo"):
                make = shlex.split(command.replace("make", "make -o .venv/installed"))  # whatever the age of the clone's files
                done = subprocess.run(make, capture_output=True, text=True, check=True)
                [expected] = [block for kind, block in FENCED.findall(text) if kind == "text"]
                shown = " ".join(done.stdout.split())
                assert [words for words in re.split(r"\s*\.\.\.\s*", expected) if words not in shown] == []
            elif command == "nanoinfer serve":
                serve = [sys.executable, "-m", *command.split(), "--port", "0"]
                with subprocess.Popen(serve, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
                    try:
                        url = next(
                            found[0] for line in process.stdout if (found := re.search(r"http://127\.0\.0\.1:\d+", line))
                        )
                        assert b"tiny-qwen3" in urllib.request.urlopen(f"{url}/v1/models").read()
                        assert b"<html" in urllib.request.urlopen(url).read()
                    finally:
                        process.terminate()  # else the end of `with` would wait for ever
            else:
                result = CliRunner().invoke(app, command.split()[1:], input="Hello\n")
                assert (result.exit_code, len(result.output) > 50) == (0, True), result.output
                assert ("What to look at" in result.output) == ("explain" in command)
    assert (clone / "trace.html").exists()
    [command] = re.findall(r"`python (\S+) [^`]+`", text)
    assert (clone / command).exists()  # tests/one_file/test_alone.py runs it
    assert len(ran) == 5, ran


@pytest.mark.slow
def test_the_draws_of_the_sessions_are_far_from_where_rounding_could_change_a_token():
    """Another processor may add in another order, which moves a probability by some 1e-6. So pinned text holds there, too."""
    recorder = Recorder(stages=True)
    llm = LLM(tracer=recorder)
    llm.generate(["Once upon a time", "Lily was"], SamplingParams(temperature=0.7, max_tokens=24, seed=3), use_tqdm=False)
    params = SamplingParams(n=3, seed=1, temperature=0.7, max_tokens=5)
    llm.generate("Once upon a time, there was", params, use_tqdm=False)
    draws = recorder.of(TokenDrawn)
    assert len(draws) > 60
    assert min(min(draw.u - draw.low, draw.high - draw.u) for draw in draws) > 5e-5


def test_readme_leads_to_every_page_of_docs_and_its_pictures_are_small():
    text = address.with_blocks(README.read_text(encoding="utf-8"), "https://github.com/owner/name")
    pages = {path.stem for path in ROOT.glob("docs/*.md")} - {"index", "names", "structure"}
    assert pages == set(re.findall(r"\]\(docs/(\w+)\.md\)", text))
    pictures = re.findall(r'(?:src|srcset)="([^"]+)"', text)
    assert [picture for picture in pictures if (ROOT / picture).stat().st_size >= 400_000] == []
    assert len(pictures) == 4
