"""What the README shows is what happens."""

import doctest
import re
from pathlib import Path

import pytest

import nanoinfer
from nanoinfer import LLM, Recorder, SamplingParams
from nanoinfer.tracing import TokenDrawn

README = Path(__file__).parents[2] / "README.md"


@pytest.mark.slow
def test_the_sessions_are_real_output(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # one of them writes a file
    run_the_sessions()


def run_the_sessions():
    text = README.read_text().replace("```", "")
    test = doctest.DocTestParser().get_doctest(text, {}, "README.md", str(README), 0)
    report: list[str] = []
    result = doctest.DocTestRunner().run(test, out=report.append)
    assert result.attempted > 10
    assert result.failed == 0, "".join(report)


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


def test_the_map_is_the_packages_own():
    docstring = nanoinfer.__doc__ or ""
    the_map = docstring[docstring.index("    llm.py") : docstring.index("\nAxes, in the shapes")]
    assert the_map.replace("\n    ", "\n").strip() in README.read_text()


def test_the_two_commands_stand_in_the_readme():
    assert "make demo" in README.read_text()
    assert "make test" in README.read_text()


def test_every_notebook_and_no_other_stands_in_the_readme():
    linked = re.findall(r"\]\(notebooks/(\S+\.ipynb)\)", README.read_text())
    assert linked == sorted(path.name for path in (README.parent / "notebooks").glob("*.ipynb"))
