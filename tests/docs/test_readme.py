"""What README shows is what happens: its commands run in a clone, in their order. So do the sessions of other pages."""

import doctest
import os
import re
import shutil
import subprocess
import sys
import urllib.request
from collections import Counter
from pathlib import Path

import pytest

from nanoinfer import LLM, Recorder, SamplingParams
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
def test_the_commands_of_readme_run_in_a_clone_in_their_order(clone):
    environment = os.environ | {"PYTHONPATH": str(clone), "HF_HUB_OFFLINE": "1", "COLUMNS": "80"}

    def start(command, **streams):
        script = f"source .venv/bin/activate && exec {command}"
        return subprocess.Popen(["bash", "-c", script], cwd=clone, env=environment, text=True, **streams)

    def run(command):
        process = start(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        out, err = process.communicate()
        assert process.returncode == 0, (command, out, err)
        return " ".join(out.split())

    text = README.read_text(encoding="utf-8")
    ran = []
    for kind, block in FENCED.findall(text):
        if kind == "python" and ">>>" in block:
            (clone / "session.txt").write_text(block, encoding="utf-8")
            assert run("python -m doctest session.txt") == ""
            ran.append("doctest")
        for line in block.splitlines() if kind in ("", "sh") else []:
            command = line.split("#")[0].strip().removeprefix('pip install -e ".[server]" && ')
            if SETUP.fullmatch(command):
                continue
            ran.append(command)
            if command.startswith("make demo"):
                shown = run(command.replace("make", "make -o .venv/installed"))  # whatever the age of the clone's files
                [expected] = [block for kind, block in FENCED.findall(text) if kind == "text"]
                assert [words for words in re.split(r"\s*\.\.\.\s*", expected) if words not in shown] == []
            elif command == "nanoinfer chat":
                assert "/exit" in in_a_terminal(start, command, "/help", "/exit")
            elif command == "nanoinfer serve":
                process = start(f"{command} --port 0", stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
                try:
                    url = next(found[0] for line in process.stdout if (found := re.search(r"http://127\.0\.0\.1:\d+", line)))
                    assert b"tiny-qwen3" in urllib.request.urlopen(f"{url}/v1/models").read()
                    assert b"<html" in urllib.request.urlopen(url).read()
                finally:
                    process.terminate()
                    process.communicate()
            else:
                assert "What to look at" in run(command)  # explain
                assert (clone / "trace.html").exists()
    for command in re.findall(r"`(python [^`]+)`", text):
        assert run(command)[20:]
        ran.append(command)
    assert len(ran) == 6, ran


def in_a_terminal(start, command, *lines):
    """Return what a command shows on a pseudo-terminal on which somebody types these lines."""
    import pty

    ours, theirs = pty.openpty()
    process = start(command, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    os.write(ours, "".join(f"{line}\n" for line in lines).encode())
    shown = b""
    try:
        while more := os.read(ours, 4096):
            shown += more
    except OSError:  # on Linux, once the command has ended
        pass
    os.close(ours)
    assert process.wait() == 0, shown
    return shown.decode()


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


INSTALLS_A_COPY = re.compile(r"pip install (?!-e )(?:\S+ )*?[\"']?(?:nanoinfer|\.)(?:\[|[\"'`\s]|$)")


def test_no_page_turns_an_editable_installation_into_a_copy():
    """Whose edits would no longer take effect. The container and Colab are to have a copy."""
    patterns = ("README.md", "docs/*.md", "examples/*.*", "*/*.ipynb", "nanoinfer*/**/*.py")
    pages = [page for pattern in patterns for page in ROOT.glob(pattern)]
    texts = {page: page.read_text(encoding="utf-8") for page in pages if page.name != "installation.py"}
    assert [page.name for page, text in texts.items() if INSTALLS_A_COPY.search(text)] == []
    assert [
        bool(INSTALLS_A_COPY.search(f"`pip install {what}`")) for what in ('".[server]"', "-q .", "'nanoinfer[ray]' x")
    ] == [True] * 3
    assert not INSTALLS_A_COPY.search('pip install -e ".[server]" and pip install openai')


def test_the_pictures_exist_and_are_small():
    text = address.with_blocks(README.read_text(encoding="utf-8"), "https://github.com/owner/name")
    pictures = re.findall(r'(?:src|srcset)="([^"]+)"', text)
    assert len(pictures) == 4
    assert all((ROOT / picture).stat().st_size < 400_000 for picture in pictures)


def test_readme_is_one_screen_and_leads_to_every_page_of_docs():
    text = README.read_text(encoding="utf-8")
    assert len(text.split()) <= 900
    pages = {path.stem for path in ROOT.glob("docs/*.md")} - {"index", "names", "structure"}
    assert pages == set(re.findall(r"\]\(docs/(\w+)\.md\)", text))


def facts_of(text):
    """What a translation keeps: commands, code, links with their order in tables, and figures."""
    fenced = re.findall(r"^```.*?^```", text, re.MULTILINE | re.DOTALL)
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    rows = [re.findall(r"\d[\d.,]*|\]\([^)]+\)", line) for line in prose.splitlines() if line.startswith("|")]
    return {
        "commands": [re.sub(r"(?m) +# .*$", "", block) for block in fenced],
        "code": Counter(" ".join(code.split()) for code in re.findall(r"`([^`]+)`", prose)),
        "links": Counter(re.findall(r'\]\(([^)]+)\)|(?:src|srcset|href)="([^"]+)"', prose)),
        "rows": rows,
        "figures": Counter(re.findall(r"\d(?:[\d.,]*\d)?", re.sub(r"`[^`]+`|\]\([^)]+\)|<[^>]+>", "", prose))),
    }


def test_the_chinese_readme_has_the_commands_links_and_figures_of_the_english_one():
    english = README.read_text(encoding="utf-8")
    chinese = README.with_name("README.zh.md").read_text(encoding="utf-8")
    translated = chinese.replace("[English](README.md)", "[中文](README.zh.md)")
    facts = facts_of(english)
    assert facts_of(translated) == facts
    for old, new in (("190 MB", "191 MB"), ("TORCH=cpu", "TORCH=gpu"), ("(docs/faq.md", "(docs/vllm.md"), ("H200", "H20")):
        assert facts_of(translated.replace(old, new, 1)) != facts, old
