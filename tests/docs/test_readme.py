"""What the README shows is what happens."""

import doctest
import re
from collections import Counter
from pathlib import Path

import pytest

from nanoinfer import LLM, Recorder, SamplingParams
from nanoinfer.features.tracing import TokenDrawn
from tools import address

README = Path(__file__).parents[2] / "README.md"


PAGES = [README, *(README.parent / "docs" / f"{name}.md" for name in ("usage", "reading", "tutorial"))]


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_sessions_are_real_output(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # one of them writes a file
    run_the_sessions(page)


def run_the_sessions(page):
    text = page.read_text(encoding="utf-8").replace("```", "")
    test = doctest.DocTestParser().get_doctest(text, {}, page.name, str(page), 0)
    report: list[str] = []
    result = doctest.DocTestRunner().run(test, out=report.append)
    assert result.attempted >= 4
    assert result.failed == 0, "".join(report)


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


def test_the_two_commands_stand_in_the_readme():
    assert "make demo" in README.read_text()
    assert "make test" in README.read_text()


INSTALLS_A_COPY = re.compile(r"pip install (?!-e )(?:\S+ )*?[\"']?(?:nanoinfer|\.)(?:\[|[\"'`\s]|$)")


def test_no_page_turns_an_editable_installation_into_a_copy():
    """Whose edits would no longer take effect. The container and Colab are to have a copy."""
    root = README.parent
    pages = [
        README,
        *root.glob("docs/*.md"),
        *root.glob("examples/*.*"),
        *root.glob("*/*.ipynb"),
        *root.glob("nanoinfer*/**/*.py"),
    ]
    texts = {page: page.read_text(encoding="utf-8") for page in pages if page.name != "installation.py"}
    assert [page.name for page, text in texts.items() if INSTALLS_A_COPY.search(text)] == []
    assert [
        bool(INSTALLS_A_COPY.search(f"`pip install {what}`")) for what in ('".[server]"', "-q .", "'nanoinfer[ray]' x")
    ] == [True] * 3
    assert not INSTALLS_A_COPY.search('pip install -e ".[server]" and pip install openai')


def test_the_pictures_exist_and_are_small():
    text = address.with_blocks(README.read_text(encoding="utf-8"), "https://github.com/owner/name")
    pictures = re.findall(r'(?:src|srcset)="([^"]+)"', text)
    assert len(pictures) == 8
    assert all((README.parent / picture).stat().st_size < 400_000 for picture in pictures)


def test_every_notebook_and_no_other_stands_in_the_readme():
    linked = re.findall(r"\]\(notebooks/(\S+\.ipynb)\)", README.read_text())
    assert sorted(set(linked)) == sorted(path.name for path in (README.parent / "notebooks").glob("*.ipynb"))


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
    for old, new in (("151,936", "151,937"), ("TORCH=cpu", "TORCH=gpu"), ("(docs/faq.md", "(docs/vllm.md"), ("1,023", "1,024")):
        assert facts_of(translated.replace(old, new, 1)) != facts, old
