"""`nanoinfer serve --record`: what a client sends comes back as a workload."""

import json

import pytest

from nanoinfer import AsyncLLM
from nanoinfer.errors import InvalidValueError
from nanoinfer.server.recording import RequestLog
from nanoinfer_lab.bench import workloads
from tests.helpers import http_server


def test_every_answer_is_recorded_and_no_text(tmp_path):
    path = tmp_path / "requests.jsonl"
    with http_server.serving(lambda: AsyncLLM("tiny-gpt2", seed=0, block_size=16), record=str(path)) as running:
        ask = lambda **body: running.post("/v1/completions", {"ignore_eos": True} | body).raise_for_status()  # noqa: E731
        shared = list(range(200)) * 2  # tokens
        ask(prompt=shared, max_tokens=3)
        ask(prompt="Once upon a secret", max_tokens=5, n=2)
        ask(prompt=[*shared, 7], max_tokens=2, stream=True)
        ask(prompt=shared, max_tokens=1)
        running.post("/v1/embeddings", {"input": "not generated"})
        running.wait_until_idle()
    lines = path.read_text().splitlines()
    assert "secret" not in str(lines)
    workload = workloads.recorded(path, sampling={})
    assert workload.output_lens == (3, 5, 5, 2, 1)
    assert (workload.input_lens[0], workload.input_lens[3:]) == (400, (401, 400))
    ids = [json.loads(line)["hash_ids"] for line in lines]
    assert ids[0] == ids[4] != ids[3]
    assert list(map(len, ids)) == [1] * 5


def test_a_block_has_the_id_of_all_tokens_up_to_its_end(tmp_path):
    recording = RequestLog(str(tmp_path / "requests.jsonl"))
    one, other = recording._hash_ids([1] * 1024, None), recording._hash_ids([1] * 512 + [2] * 512, None)
    assert one[0] == other[0]
    assert len({*one, *other}) == 3
    assert recording._hash_ids([1] * 512, "another tenant") != one[:1]


def test_a_file_that_cannot_be_written_is_refused(tmp_path):
    with pytest.raises(InvalidValueError, match="record must be a file that can be written, got"):
        RequestLog(str(tmp_path / "missing" / "requests.jsonl"))
