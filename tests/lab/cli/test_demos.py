"""`nanoinfer explain --demo`: every prepared run truly contains what its moments say."""

import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from typer.testing import CliRunner

from nanoinfer import LLM, Recorder
from nanoinfer.cli.main import app
from nanoinfer.features.tracing import (
    BlocksFreed,
    BlocksShared,
    RequestAdded,
    StepScheduled,
    StepTimed,
    TokenAppended,
    TokensDrafted,
)
from nanoinfer_lab.cli.demos import DEMOS, num_new_tokens
from tests.helpers.replay_page import events_of

pytestmark = pytest.mark.slow


def run(name):
    """The recording of a demo, its moments and its steps."""
    demo, recorder = DEMOS[name], Recorder(stages=True)
    memory = {"dtype": "float32", "kv_cache_memory": demo.kv_cache_memory}
    llm = LLM(tracer=recorder, **memory, **demo.engine)
    llm.generate(demo.prompts, demo.params, use_tqdm=False)
    return recorder, demo.find(recorder), {step.step: step for step in recorder.of(StepScheduled)}


def test_preemption():
    recorder, (full, again), steps = run("preemption")
    assert full.sequence_id in steps[full.step].preempted
    assert all(full.sequence_id not in steps[step].running for step in range(full.step, again.step))
    num_tokens = num_new_tokens(steps[again.step], again.sequence_id)
    assert num_tokens > len(recorder.of(RequestAdded)[int(full.sequence_id)].prompt_token_ids)
    assert f"{num_tokens} tokens of sequence" in again.description


def test_sharing():
    recorder, (hit, alone), steps = run("sharing")
    [shared] = recorder.of(BlocksShared)
    assert len(shared.blocks) > 1
    assert set(steps[hit.step].running) == {"0", "1"}
    prompt = recorder.of(RequestAdded)[1].prompt_token_ids
    assert num_new_tokens(steps[hit.step], "1") == len(prompt) - 8 * len(shared.blocks)
    assert steps[alone.step].running == (alone.sequence_id,) == ("1",)
    first_freed = recorder.of(BlocksFreed)[0]
    assert first_freed.sequence_id == "0"
    assert set(shared.blocks) < set(first_freed.blocks)


def test_stop_string():
    recorder, (held, released, last), _ = run("stop-string")
    tokens = recorder.of(TokenAppended)
    assert tokens[held.step].held
    assert tokens[released.step].text.startswith(tokens[held.step].held)
    assert (tokens[-1].finish_reason, tokens[last.step]) == ("stop", tokens[-1])
    shown = "".join(token.text for token in tokens)
    assert len(shown) + len("there was") == len("".join(token.token for token in tokens))  # the stop string is cut


def test_chunked():
    recorder, (first, last), steps = run("chunked")
    chunks = [num_new_tokens(steps[step], "1") for step in range(first.step, last.step + 1)]
    assert sum(chunks) == len(recorder.of(RequestAdded)[1].prompt_token_ids)
    assert len(chunks) > 3
    assert max(chunks) <= 16
    assert all(num_new_tokens(steps[step], "0") == 1 for step in range(first.step, last.step + 1))


def test_drafts():
    recorder, (best, worst, last), _ = run("drafts")
    drafts = {event.step: event.draft_token_ids[0] for event in recorder.of(TokensDrafted)}
    tokens = recorder.of(TokenAppended)
    assert len(recorder.of(StepTimed)) < len(tokens) / 2
    assert f"one step gives {1 + len(drafts[best.step])} tokens" in best.description
    assert not worst.description.startswith("0 of")
    assert f"{len(tokens)} tokens in {last.step + 1} steps" in last.description


@pytest.mark.parametrize("name", ["sharing", "stop-string"])
def test_the_command_writes_the_page_and_links_to_its_moments(name, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    page = tmp_path / "a page.html"
    result = CliRunner().invoke(app, ["explain", "--demo", name, "--html", str(page)])
    assert (result.exit_code, result.stderr) == (0, "")
    links = re.findall(r"- Step (\d+): \S.*\n  (\S+)#step=(\d+)&token=(\d+)$", result.stdout, re.MULTILINE)
    assert len(links) >= 2
    events = events_of(page)
    steps = {str(event["step"]): event for event in events if event["event"] == "StepScheduled"}
    for step, link, linked, sequence_id in links:
        assert Path(unquote(urlsplit(link).path)) == page
        assert step == linked
        assert sequence_id in steps[step]["sequence_ids"] + steps[step]["preempted"]
    assert any(event["event"] == "RequestFinished" for event in events)
