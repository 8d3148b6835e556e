"""Speeds beside other engines and perplexities stand in pages as benchmarks/results.jsonl has them, and nowhere else."""

import json
import re

import pytest

from benchmarks import results

FIGURE = re.compile(
    r"\d[\d.,]*\s+(?:output )?(?:tokens per second|tokens?/s|tok/s)|\d[\d.,]*\s+times\s+(?:the speed|as fast|faster)"
    r"|(?:perplexit\w+|loss)\b[^.|]*?\d+(?:\.\d+)?\s?%?|比值为 ?\d|\d[\d.,]* 倍"
)
TEXTS = ("README.md", "README.zh.md", "docs/faq.md", "docs/supported.md")


def line(**changed):
    fields = {"machine": "M", "date": "2026-01-01", "commit": None, "release": results.RELEASE, "model": "GPT-2", "runs": 5}
    fields |= {"dtype": "float32", "workload": "A", "baseline": "vLLM 0.32", "unit": "tokens/s"}
    return results.Speed(**(fields | {"nanoinfer": (20, 19, 21), "other": (10, 9, 11)} | changed))


@pytest.mark.parametrize("name", results.PAGES)
def test_every_figure_between_marks_is_that_of_the_result_file(name):
    text = (results.ROOT / name).read_text(encoding="utf-8")
    assert len(results.BLOCK.findall(text)) == len(re.findall(r"python -m benchmarks\.results: ", text)) > 0  # each has its end
    assert results.with_tables(text) == text, "run: python -m benchmarks.results"


@pytest.mark.parametrize("name", results.PAGES)
def test_a_figure_that_was_changed_by_hand_is_found(name):
    text = (results.ROOT / name).read_text(encoding="utf-8")
    block = results.BLOCK.search(text)
    digits = [match.start() for match in re.finditer(r"\d", block[0]) if match.start() >= len(block[1])]
    for at in digits:
        digit = str((int(block[0][at]) + 1) % 10)
        changed = text[: block.start() + at] + digit + text[block.start() + at + 1 :]
        assert results.with_tables(changed) == text != changed


@pytest.mark.parametrize("name", TEXTS)
def test_no_speed_ratio_or_perplexity_stands_outside_the_marks(name):
    text = (results.ROOT / name).read_text(encoding="utf-8")
    assert FIGURE.findall(results.BLOCK.sub("", text)) == []


@pytest.mark.parametrize(
    "sentence",
    [
        "It gives 1,234 tokens per second.",
        "It had 1.6 times the speed of nano-vllm.",
        "int4 raises the loss by about 1%.",
        "The perplexity of int4 is 24.6.",
        "速度是 nano-vllm 的 1.6 倍",
    ],
)
def test_a_figure_in_a_sentence_is_found(sentence):
    assert FIGURE.search(sentence)


def test_every_line_has_the_fields_of_its_kind_and_is_written_once():
    lines = results.LINES.read_text(encoding="utf-8").splitlines()
    assert len(lines) == len(set(lines)) == len(results.read())
    for text in lines:
        assert isinstance(json.loads(text)["versions"], dict)
    for one in results.read():
        if isinstance(one, results.Speed):
            for median, low, high in (one.nanoinfer, one.other):
                assert (low is None) == (high is None)
                assert low is None or low <= median <= high


def test_losing_rows_are_shown():
    ratios = [float(row.split("|")[6].strip(" *")) for row in results.current().splitlines()[2:]]
    assert min(ratios) < 0.9 < 1 < max(ratios)


def test_a_ratio_is_bold_only_if_five_runs_of_each_engine_do_not_overlap():
    assert line().show_ratio() == "**2.00**"
    assert line(unit="ms").show_ratio() == "**0.50**"
    assert line(runs=4).show_ratio() == "2.00"
    assert line(other=(10, 9, 19)).show_ratio() == "2.00"
    assert line(nanoinfer=(20, None, None)).show_ratio() == "2.00"
    [b64] = [one for one in results.read() if one.key[:1] + one.key[3:4] == ("H100", "B64")]
    assert b64.show_ratio() == "1.04"


@pytest.mark.parametrize(
    ("baseline", "engine"),
    [
        ("OpenVINO GenAI 2026.4.1.0-3408-ab01d1771e4", "OpenVINO GenAI"),
        ("llama.cpp of llama-cpp-python 0.3.36", "llama.cpp"),
        ("vLLM 0.32.0+cpu", "vLLM"),
    ],
)
def test_a_row_is_the_same_one_with_another_version_of_the_engine(baseline, engine):
    assert line(baseline=baseline).key[-1] == engine


def test_a_row_that_was_measured_again_moves_to_the_history(monkeypatch):
    old, new = line(), line(date="2026-01-02", baseline="vLLM 0.33")
    monkeypatch.setattr(results, "read", lambda: [old, new])
    assert "0.33" in results.current()
    assert "0.32" not in results.current()
    history = results.history()
    assert "vLLM 0.32 | 2026-01-01" in history
    assert "vLLM 0.33" not in history
    titles = re.findall("^## (.+)", history, re.MULTILINE)
    assert len(titles) > 10
    assert results.history("the SAMPLER").startswith("## The sampler\n\nZen 5, 2026-11-21, on a busy machine")
