"""The digests of log-probabilities: the same numbers have the same ones, and a change of a last bit is in the table."""

import json
import re

import pytest
import torch

from tests.golden import digests
from tests.helpers import tiny_models


def test_every_family_is_there_in_every_dtype_eager_and_compiled_and_each_case_once():
    names = [name for name, _, _ in digests.cases()]
    assert len(set(names)) == len(names)
    for family in tiny_models.FAMILIES:
        assert sum(name.startswith(f"{family} ") and name.endswith((" eager", " compiled")) for name in names) >= 6
    for feature in "int8", "int4", "gguf_2", "adapters", "drafts", "async", "batch_invariant", "cache", "files":
        assert any(feature in name for name in names), feature


def test_numbers_that_differ_are_a_line_in_the_table(tmp_path, capsys):
    paths = [tmp_path / "base.json", tmp_path / "here.json"]
    numbers = {"qwen3 float32 eager": [[5, -0.5], [7, -1.25]], "gpt2 float32 eager": [[1, -0.25]]}
    for path in paths:
        path.write_text(json.dumps(numbers))
    assert digests.compare(*paths)
    assert capsys.readouterr().out == "2 cases: the log-probabilities of 0 differ\n"
    numbers["qwen3 float32 eager"][1][1] += 2**-20
    paths[1].write_text(json.dumps(numbers))
    assert not digests.compare(*paths)
    out = capsys.readouterr().out
    assert re.search(r"qwen3 float32 eager +[0-9a-f]{16} [0-9a-f]{16} 9.54e-07\n2 cases: .* of 1 differ", out), out


def test_a_case_has_the_same_digest_again_and_another_one_if_an_activation_changes_by_a_millionth(qwen3_path, monkeypatch):
    arguments = {"dtype": "float32", "enforce_eager": True}
    numbers = digests.compute(qwen3_path, arguments)
    assert sum(map(len, numbers)) > 300
    assert digests.digest(digests.compute(qwen3_path, arguments)) == digests.digest(numbers)
    silu = torch.nn.functional.silu
    monkeypatch.setattr("torch.nn.functional.silu", lambda x: silu(x) * (1 + 1e-6))
    assert digests.digest(digests.compute(qwen3_path, arguments)) != digests.digest(numbers)


@pytest.mark.long
def test_the_numbers_of_a_second_run_are_those_of_the_first(tmp_path):
    outputs = tmp_path / "first.json", tmp_path / "second.json"
    for output in outputs:
        digests.save(tmp_path / "checkpoints", output, "gemma3_window")
    assert len(json.loads(outputs[0].read_text())) >= 10
    assert digests.compare(*outputs)
