"""The public interface: every kind of prompt, everything malformed refused before work, streams, chat, and nothing left
behind."""

import copy
import itertools
import json
import logging
import pickle
import re
import shutil
import signal
import tempfile
import threading
import types
import weakref
from dataclasses import replace
from pathlib import Path

import numpy
import pytest
import torch

from nanoinfer import LLM, BeamSearchParams, Delta, Recorder, SamplingParams
from nanoinfer.compat.vllm.neutral import NEUTRAL
from nanoinfer.config import SchedulerConfig
from nanoinfer.engine.prompts import TextPrompt, TokensPrompt
from nanoinfer.errors import (
    CheckpointNotFoundError,
    InvalidPromptError,
    InvalidTypeError,
    InvalidValueError,
    NanoinferError,
    UnsupportedError,
)
from nanoinfer.features.tracing import StepScheduled
from nanoinfer.loading.checkpoint import BUNDLED
from tests.helpers.threads import run_in_threads
from tests.helpers.tiny_models import assert_nothing_is_left

pytestmark = pytest.mark.slow

MEMORY = 2**24
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)  # always 12 tokens, however the model is trained
IDS = SamplingParams(temperature=0, max_tokens=12, detokenize=False)
LILY = [{"role": "user", "content": "Tell me a story about Lily"}]
TOM = [{"role": "user", "content": "Tell me a story about Tom"}]
LILYS_PROMPT = "<|im_start|>user\nTell me a story about Lily<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def loaded_ids(qwen3_path):
    """As conftest's, with 64 positions."""
    return LLM(qwen3_path, kv_cache_memory=MEMORY, block_size=4, max_model_len=64)


def generate(llm, prompts, params=GREEDY):
    return llm.generate(prompts, params, use_tqdm=False)


def answer(llm, prompt, params=GREEDY):
    [output] = generate(llm, prompt, params)
    return output.outputs[0]


def copy_of_tiny_qwen3(path, without=()):
    return shutil.copytree(BUNDLED / "tiny-qwen3", path / "copy", ignore=lambda *_: without)


# ---- prompts


def test_every_kind_of_prompt_gives_the_same_answer(llm):
    text = "Once upon a time"
    ids = llm.get_tokenizer()(text).input_ids
    prompts = [text, ids, tuple(ids), [*map(numpy.int64, ids)], TextPrompt(prompt=text), TokensPrompt(prompt_token_ids=ids)]
    prompts += [{"prompt": text, "prompt_token_ids": ids, "cache_salt": "a"}, {"prompt": text, "prompt_token_ids": None}]
    alone = [output for prompt in prompts for output in generate(llm, prompt)]
    together = generate(llm, prompts)
    assert len(alone) == len(together) == len(prompts)
    for output in alone + together:
        assert output.outputs == alone[0].outputs
        assert output.prompt_token_ids == ids
        assert {type(i) for i in output.prompt_token_ids} == {int}
    [completion] = alone[0].outputs
    assert (completion.index, completion.finish_reason, completion.stop_reason) == (0, "length", None)
    assert (completion.logprobs, completion.cumulative_logprob, completion.error) == (None, None, None)
    assert completion.text == llm.get_tokenizer().decode(completion.token_ids) != ""
    assert [output.prompt for output in together] == [text, None, None, None, text, None, text, text]


def test_outputs_stand_in_the_order_of_the_prompts_whoever_ends_first(ids_llm):
    prompts = [[i] for i in range(1, 21)]
    params = [SamplingParams(temperature=0, detokenize=False, max_tokens=40 - 2 * i) for i in range(20)]
    outputs = generate(ids_llm, prompts, params)
    assert [output.prompt_token_ids for output in outputs] == prompts
    assert [len(output.outputs[0].token_ids) for output in outputs] == [each.max_tokens for each in params]
    assert outputs[0].metrics.finished_time > outputs[-1].metrics.finished_time
    assert len({output.request_id for output in outputs}) == 20
    assert generate(ids_llm, []) == ids_llm.generate([]) == []


def test_generate_shows_tokens_per_second_unless_told_not_to(llm, capsys):
    llm.generate(["Once upon a time", "One day"], GREEDY)
    assert re.search(r"2/2 .*output [0-9.]+ tok/s", capsys.readouterr().err)
    llm.embed([[5], [6, 7]])
    assert re.search(r"2/2 .*input [0-9.]+ tok/s, output 0\.0 tok/s", capsys.readouterr().err)
    generate(llm, ["Once upon a time", "One day"])
    assert capsys.readouterr().err == ""


# ---- lengths


def warnings_of(caplog):
    texts = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    caplog.clear()
    return texts


def test_a_prompt_that_is_too_long_is_an_error_result_and_the_others_finish(ids_llm, caplog):
    prompts = [[1, 2], [3] * 64, [4, 5], [6] * 1000]
    good, long, also_good, very_long = generate(ids_llm, prompts, [IDS, replace(IDS, temperature=1.0, n=2), IDS, IDS])
    for output, num_tokens, num_answers in ((long, 64, 2), (very_long, 1000, 1)):
        assert (len(output.outputs), output.finished, output.metrics.ttft) == (num_answers, True, None)
        for completion in output.outputs:
            assert (completion.finish_reason, completion.token_ids, completion.text) == ("error", [], "")
            assert f"maximum context length is 64 tokens. However, the prompt has {num_tokens} tokens" in completion.error
    reason = long.outputs[0].error
    assert warnings_of(caplog) == [f"2 of 4 requests failed: {reason} (see outputs[1].outputs[0].error)"]
    for output in (good, also_good):
        assert output.outputs[0] == answer(ids_llm, output.prompt_token_ids, IDS)
        assert len(output.outputs[0].token_ids) == 12
    [delta] = ids_llm.stream([3] * 64, IDS)
    assert (delta.text, delta.token_ids, delta.output.outputs[0].finish_reason) == ("", [], "error")


def test_a_call_whose_prompts_are_all_too_long_raises_with_their_outputs(ids_llm, caplog):
    with pytest.raises(InvalidPromptError, match=r"^This model's maximum context length is 64 tokens") as alone:
        generate(ids_llm, [3] * 64, IDS)
    with pytest.raises(InvalidPromptError, match=r"^each of 2 prompts is too long: This model's maximum") as both:
        generate(ids_llm, [[3] * 64, [4] * 70], IDS)
    assert [output.prompt_token_ids for output in both.value.outputs] == [[3] * 64, [4] * 70]
    assert str(alone.value) == alone.value.outputs[0].outputs[0].error
    assert (warnings_of(caplog), InvalidPromptError("any other").outputs) == ([], ())
    nothing_left = SamplingParams(n=2, allowed_token_ids=[7], bad_words=[[7]], max_tokens=4, detokenize=False)
    [output] = generate(ids_llm, [[1, 2]], nothing_left)  # it fails while it is answered, which is only said
    assert warnings_of(caplog) == [f"1 of 1 requests failed: {output.outputs[0].error} (see outputs[0].outputs[0].error)"]


@pytest.mark.parametrize("num_prompt_tokens", [3, 63])
def test_without_max_tokens_an_answer_runs_to_the_models_length(ids_llm, num_prompt_tokens):
    completion = answer(ids_llm, [1] * num_prompt_tokens, SamplingParams(max_tokens=None, detokenize=False))
    assert (len(completion.token_ids), completion.finish_reason) == (64 - num_prompt_tokens, "length")


def test_the_model_length_is_lowered_to_what_the_cache_holds(qwen3_path, caplog):
    block_bytes = 2 * 2 * 4 * 2 * 16 * 4  # k and v, layers, tokens, heads, head_dim, bytes
    with caplog.at_level(logging.INFO, "nanoinfer.execution.memory"):
        llm = LLM(qwen3_path, kv_cache_memory=5 * block_bytes, block_size=4, max_model_len=64, skip_tokenizer_init=True)
    assert llm.engine.max_model_len == 20
    told, warned = caplog.records
    assert "KV cache of 5 blocks of 4 tokens" in told.message
    assert warned.levelno == logging.WARNING
    assert "max_model_len is 20, not 64: the KV cache holds no more; raise kv_cache_memory" in warned.message
    assert len(answer(llm, [1] * 5, SamplingParams(max_tokens=None, detokenize=False)).token_ids) == 15
    with pytest.raises(InvalidPromptError, match="maximum context length is 20 tokens"):
        answer(llm, [1] * 20, IDS)


def test_what_a_loaded_model_cannot_do_is_said_once(qwen3_path, caplog):
    llm = LLM(qwen3_path, kv_cache_memory=MEMORY, max_model_len=64)
    [no_tokenizer] = warnings_of(caplog)
    assert f"{qwen3_path} has no tokenizer, such as tokenizer.json: prompts must be token ids" in no_tokenizer
    generate(llm, [[1] * 10] * 2, replace(IDS, max_tokens=54))
    assert warnings_of(caplog) == []
    for _ in range(2):
        assert {output.outputs[0].finish_reason for output in generate(llm, [[1] * 10] * 2, replace(IDS, max_tokens=55))}
    beyond = "max_tokens=55 is more than the 54 tokens that max_model_len=64 leaves after the prompt; the answer ends there"
    assert warnings_of(caplog) == [beyond]


GIVEN = "it is an argument of SamplingParams: SamplingParams"


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda llm: llm.generate("a", temperature=0), InvalidTypeError, GIVEN + "(temperature=0)"),
        (lambda llm: llm.chat(LILY, max_tokens=5), InvalidTypeError, GIVEN + "(max_tokens=5)"),
        (lambda llm: LLM(top_p=0.5), InvalidTypeError, GIVEN + "(top_p=0.5)"),
        (lambda llm: llm.stream("a", do_sample=False), UnsupportedError, "; use temperature=0.0 for greedy answers"),
        (lambda llm: llm.generate("a", max_new_tokens=9), UnsupportedError, "; use max_tokens"),
        (lambda llm: llm.generate("a", guided_json={}), UnsupportedError, "; use structured_outputs="),
        (lambda llm: generate(llm, "a")[0]["text"], InvalidTypeError, "got ['text']; use output.outputs[0]"),
        (pickle.dumps, InvalidTypeError, "an LLM cannot be pickled or copied, because its memory and threads belong to this"),
        (copy.deepcopy, InvalidTypeError, "; call LLM(...) in the process that uses it"),
    ],
)
def test_a_habit_of_another_library_is_answered_with_the_way_of_this_one(llm, call, error, message):
    with pytest.raises(error, match=re.escape(message)):
        call(llm)


# ---- no tokenizer


def test_a_checkpoint_without_a_tokenizer_works_with_ids_and_refuses_text_with_a_hint(ids_llm):
    completion = answer(ids_llm, [1, 2, 3], IDS)
    assert (completion.text, len(completion.token_ids)) == ("", 12)
    [output] = ids_llm.generate([1, 2, 3], use_tqdm=False)  # no params either: no text is asked for
    assert len(output.outputs[0].token_ids) == 16
    for call, words in (
        (lambda: generate(ids_llm, "text", IDS), "; give token ids, or load the model with"),
        (lambda: generate(ids_llm, [1, 2, 3], GREEDY), ", .* set detokenize=False, or load the model with"),
        (lambda: ids_llm.chat(LILY, IDS), ", so there is no chat template"),
        (ids_llm.get_tokenizer, r"; pass LLM\(tokenizer=\.\.\.\)"),
    ):
        with pytest.raises(NanoinferError, match=f"no tokenizer is loaded{words}"):
            call()


def test_another_tokenizer_can_be_given(qwen3_path, gpt2_path):
    llm = LLM(qwen3_path, tokenizer="tiny-qwen3", kv_cache_memory=MEMORY)
    completion = answer(llm, [67, 68, 69])
    assert completion.text == llm.get_tokenizer().decode(completion.token_ids)
    assert completion.text
    with pytest.raises(InvalidPromptError, match=r"this model's ids are 0 \.\. 95$"):  # the tokenizer has more
        generate(llm, "Once upon a time")
    with pytest.raises(CheckpointNotFoundError, match=r"holds no tokenizer files, such as tokenizer.json"):
        LLM(qwen3_path, tokenizer=gpt2_path)


# ---- streams


@pytest.mark.parametrize(("stops", "reason"), [((), "length"), (("near miss",), "length"), (("near miss", "hit"), "stop")])
def test_a_stream_shows_the_text_of_generate_and_never_takes_back(llm, stops, reason):
    whole = answer(llm, "Once upon a time").text
    texts = {"near miss": whole[5:15] + "#", "hit": whole[12:17]}  # nearly a stop, and a stop across tokens
    params = replace(GREEDY, stop=[texts[stop] for stop in stops])
    expected = answer(llm, "Once upon a time", params)
    assert (expected.finish_reason, expected.text) == (reason, whole[: whole.index(texts["hit"])] if "hit" in stops else whole)
    deltas = list(llm.stream("Once upon a time", params))
    assert all(isinstance(delta, Delta) for delta in deltas)
    assert "".join(delta.text for delta in deltas) == expected.text
    assert [i for delta in deltas for i in delta.token_ids] == expected.token_ids
    assert [delta.output for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert deltas[-1].output.outputs == [expected]
    assert {delta.request_id for delta in deltas} == {deltas[-1].output.request_id}
    assert stops or (len(deltas), sum(bool(delta.text) for delta in deltas) > 6) == (12, True)  # before it is all there


def test_the_deltas_of_a_stream_with_several_answers_say_whose_they_are(llm):
    params = SamplingParams(n=3, seed=1, temperature=1.0, max_tokens=12)
    deltas = list(llm.stream("Once upon a time", params))
    expected = generate(llm, "Once upon a time", params)[0].outputs
    assert deltas[-1].output.outputs == expected
    for answer in expected:
        own = [delta for delta in deltas if delta.index == answer.index]
        assert "".join(delta.text for delta in own) == answer.text
        assert [i for delta in own for i in delta.token_ids] == answer.token_ids
        assert [delta.finish_reason for delta in own] == [None] * (len(own) - 1) + [answer.finish_reason]


def test_a_stream_takes_nothing_before_it_is_read_and_nothing_after_it_was_left(llm):
    stream = llm.stream("Once upon a time", GREEDY)
    assert_nothing_is_left(llm)
    for _ in stream:
        assert llm.engine.block_manager.num_free_blocks < llm.engine.block_manager.num_blocks
        break
    stream.close()
    assert_nothing_is_left(llm)
    for _ in llm.stream("Once upon a time", GREEDY):
        break  # not even closed: the generator is dropped with the loop
    assert_nothing_is_left(llm)


def test_streams_can_be_read_in_turns_with_other_calls_in_between(llm):
    prompts = ("Once upon a time", "One day")
    expected, turns = [answer(llm, prompt) for prompt in prompts], []
    for pair in zip(*(llm.stream(prompt, GREEDY) for prompt in prompts), strict=True):
        turns.append(pair)
        if len(turns) in (1, 5):
            assert answer(llm, "One day") == expected[1]
    for told, deltas in zip(expected, zip(*turns, strict=True), strict=True):
        assert "".join(delta.text for delta in deltas) == told.text
        assert deltas[-1].output.outputs == [told]


def test_abort_inside_the_loop_ends_the_stream(llm):
    expected = answer(llm, "Once upon a time").text
    text, deltas = "", []
    for delta in llm.stream("Once upon a time", GREEDY):
        deltas.append(delta)
        text += delta.text
        if len(deltas) == 5:
            llm.abort(delta.request_id)
            assert_nothing_is_left(llm)
            llm.abort(delta.request_id)  # a second time does nothing
    assert len(deltas) == 6
    [completion] = deltas[-1].output.outputs
    assert (completion.finish_reason, completion.text, len(completion.token_ids)) == ("abort", text, 5)
    assert expected.startswith(text)
    assert text
    llm.abort("never heard of")


# ---- when something breaks


class FailingTracer(Recorder):
    """Raises at some kinds of events: always, or only once."""

    def __init__(self, *kinds, is_once=False):
        super().__init__()
        self.kinds, self.is_once = {*kinds}, is_once

    def emit(self, event):
        super().emit(event)
        if (kind := type(event).__name__) in self.kinds:
            self.kinds -= {kind} if self.is_once else set()
            raise RuntimeError(f"the tracer failed at {kind}")


@pytest.mark.parametrize("kinds", [["StepScheduled"], ["StepTimed"], ["RequestFinished"], ["StepTimed", "RequestFinished"]])
def test_a_tracer_that_raises_in_a_step_leaves_nothing_behind(kinds):
    tracer, prompts = FailingTracer(is_once=len(kinds) == 1), ["Once upon a time", "One day", "a"]
    llm = LLM(kv_cache_memory=MEMORY, tracer=tracer)
    expected = [output.outputs for output in generate(llm, prompts)]
    tracer.kinds = {*kinds}
    with pytest.raises(RuntimeError, match="the tracer failed at"):
        generate(llm, prompts)
    assert_nothing_is_left(llm)
    tracer.kinds = set()
    assert [output.outputs for output in generate(llm, prompts)] == expected


@pytest.fixture
def python_handles_ctrl_c():
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler  # generate put it back
    signal.signal(signal.SIGINT, previous)


PLACES = {
    "the forward pass": lambda engine: (engine.executor.runner, "forward"),
    "a route": lambda engine: (engine.executor.sampler.routes[0], "try_sample"),
    "the sampler": lambda engine: (engine.executor, "sampler"),
    "submit": lambda engine: (engine, "submit"),
    "schedule": lambda engine: (engine.scheduler, "schedule"),
    "commit": lambda engine: (engine.scheduler, "commit"),
}


@pytest.mark.usefixtures("python_handles_ctrl_c")
@pytest.mark.parametrize(
    ("place", "at_call", "error"),
    [
        *itertools.product(["the forward pass", "a route", "the sampler"], [1, 4], [ZeroDivisionError]),
        *itertools.product(["the forward pass"], [1, 5], [KeyboardInterrupt]),
        *itertools.product(["submit", "schedule", "commit"], [1], [KeyboardInterrupt]),
    ],
)
def test_what_breaks_a_call_leaves_nothing_behind_and_harms_no_stream_that_is_under_way(
    llm, monkeypatch, place, at_call, error
):
    """Ctrl-C comes right after the bookkeeping of a step or of a new request, when half of what belongs together is done."""
    prompts = ["Once upon a time", "One day"]
    expected = [output.outputs for output in generate(llm, prompts)]
    owner, name = PLACES[place](llm.engine)
    works, num_calls = getattr(owner, name), 0

    def breaks(*arguments, **keywords):
        nonlocal num_calls
        num_calls += 1
        if num_calls == at_call and error is ZeroDivisionError:
            raise error
        result = works(*arguments, **keywords)
        if num_calls == at_call:
            signal.raise_signal(signal.SIGINT)
        return result

    stream = llm.stream(prompts[0], GREEDY)
    text = next(stream).text
    for call, num_left in ((lambda: generate(llm, prompts), 1), (lambda: list(llm.stream(prompts[1], GREEDY)), 0)):
        num_calls = 0
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, breaks)
            with pytest.raises(error):
                call()
        assert num_calls == at_call or place == "submit"  # not a step more
        assert llm.engine.num_unfinished == num_left  # the stream
        if num_left:
            assert text + "".join(delta.text for delta in stream) == expected[0][0].text
    assert [output.outputs for output in generate(llm, prompts)] == expected


# ---- chat


def test_chat_is_generate_on_the_templates_text_and_several_are_answered_in_order(llm):
    [output] = llm.chat(LILY, GREEDY, use_tqdm=False)
    assert output.prompt == LILYS_PROMPT
    assert output.outputs[0] == answer(llm, LILYS_PROMPT)
    tom, lily = llm.chat([TOM, LILY], GREEDY, use_tqdm=False)
    assert lily.outputs == output.outputs
    assert ("about Tom" in tom.prompt, "about Lily" in lily.prompt) == (True, True)


def test_chat_takes_another_template_its_arguments_and_no_generation_prompt(llm):
    params = SamplingParams(max_tokens=1)
    [output] = llm.chat(LILY, params, False, add_generation_prompt=False)
    assert output.prompt == LILYS_PROMPT.removesuffix("<|im_start|>assistant\n")
    template = "{{ messages[0]['content'] }}, please{{ '!' if loudly else '.' }}"
    [output] = llm.chat(LILY, params, False, chat_template=template)
    assert output.prompt == "Tell me a story about Lily, please."
    [output] = llm.chat(LILY, params, False, chat_template=template, chat_template_kwargs={"loudly": True})
    assert output.prompt == "Tell me a story about Lily, please!"


def test_chat_without_a_template_is_refused_with_a_hint(tmp_path):
    llm = LLM(copy_of_tiny_qwen3(tmp_path, without=["chat_template.jinja"]), kv_cache_memory=MEMORY)
    for tools in (None, [{"type": "function", "function": {"name": "night"}}]):
        with pytest.raises(InvalidPromptError, match=r"no chat template; use plain text instead of messages"):
            llm.chat(LILY, GREEDY, tools=tools)
    [output] = llm.chat(LILY, GREEDY, False, chat_template="{{ messages[0]['content'] }}")
    assert output.prompt == "Tell me a story about Lily"


def content(llm, *parts):
    return llm.render_chat([{"role": "user", "content": part} for part in parts])["prompt"]


def test_content_may_be_text_parts_or_none(llm):
    parts = [{"type": "text", "text": "Tell me"}, {"type": "text", "text": "a story"}]
    assert content(llm, parts) == content(llm, tuple(parts)) == content(llm, "Tell me\na story")
    assert content(llm, parts[:1], None, []) == content(llm, "Tell me", "", "")
    conversation = [types.MappingProxyType({"role": "user", "content": "Tell me"})]  # any Sequence of Mappings
    assert llm.render_chat(tuple(conversation))["prompt"] == content(llm, "Tell me")
    [first, second] = llm.chat((conversation, conversation), GREEDY, use_tqdm=False)
    assert first.prompt == second.prompt == content(llm, "Tell me")


def test_vllms_arguments_of_generate_and_chat_are_accepted_where_they_change_nothing(llm):
    expected = answer(llm, "Once")
    given = {name: accepted[0][0] for name, accepted in NEUTRAL["generate()"].items() if name != "prompt_token_ids"}
    assert llm.generate("Once", GREEDY, False, **given)[0].outputs == [expected]
    prompt = {"prompt": "Once"} | dict.fromkeys(NEUTRAL["a prompt"])
    assert answer(llm, prompt) == expected
    given = {name: accepted[0][0] for name, accepted in NEUTRAL["chat()"].items() if name != "prompt_token_ids"}
    assert llm.chat(LILY, GREEDY, False, **given)[0].outputs == llm.chat(LILY, GREEDY, False)[0].outputs


def test_an_assignment_does_not_change_a_request_that_runs(llm):
    params = GREEDY.clone()
    stream = llm.stream("Once upon a time", params)
    next(stream)
    params.max_tokens, params.temperature, params.stop = 1, 2.0, "a"
    assert 1 + len(list(stream)) == 12
    assert answer(llm, "Once upon a time", params).token_ids[1:] == []


# ---- metrics and defaults


def test_speculation_is_counted(qwen3_path):
    llm = LLM(qwen3_path, kv_cache_memory=MEMORY, speculative_config={"method": "ngram", "adaptive": False})
    generate(llm, [[5, 6, 7] * 9], SamplingParams(max_tokens=20, temperature=0, detokenize=False))
    metrics = {metric.name.removeprefix("vllm:spec_decode_num_"): metric for metric in llm.get_metrics()}
    per_position = metrics["accepted_tokens_per_pos"].values
    assert len(per_position) == 8
    assert metrics["accepted_tokens"].value == sum(per_position) <= metrics["draft_tokens"].value
    assert 0 < metrics["drafts"].value <= metrics["draft_tokens"].value


def test_a_reset_prefix_cache_is_empty_and_harms_no_running_request(qwen3_path):
    llm, prompt = LLM(qwen3_path, kv_cache_memory=MEMORY, block_size=4), [5] * 10
    expected = answer(llm, prompt, IDS)
    assert generate(llm, prompt, IDS)[0].num_cached_tokens == 8
    stream = llm.stream(prompt, IDS)
    first = next(stream).token_ids
    assert llm.reset_prefix_cache() is True
    assert generate(llm, prompt, IDS)[0].num_cached_tokens == 0
    assert first + [i for delta in stream for i in delta.token_ids] == expected.token_ids
    [output] = generate(llm, prompt, IDS)
    assert (output.num_cached_tokens, output.outputs) == (8, [expected])
    assert_nothing_is_left(llm)


def test_requests_share_prefixes_only_with_those_of_the_same_salt(qwen3_path):
    llm = LLM(qwen3_path, kv_cache_memory=MEMORY, block_size=4)
    prompts = [{"prompt_token_ids": list(range(1, 11))} | salt for salt in ({}, {"cache_salt": "a"}, {"cache_salt": "b"})]
    outputs = [generate(llm, prompt, IDS)[0] for prompt in prompts * 2]
    assert [output.num_cached_tokens for output in outputs] == [0, 0, 0, 8, 8, 8]
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1
    search = BeamSearchParams(beam_width=2, max_tokens=2)
    [salted], [plain] = (llm.beam_search([prompt], search) for prompt in (prompts[0] | {"cache_salt": "c"}, prompts[0]))
    assert salted.sequences == plain.sequences


@pytest.fixture
def load_with(tmp_path, caplog):
    """Load tiny-qwen3 with another generation_config.json."""

    def load_with(given, **arguments):
        path = copy_of_tiny_qwen3(Path(tempfile.mkdtemp(dir=tmp_path)))
        (path / "generation_config.json").write_text(json.dumps(given))
        with caplog.at_level(logging.INFO, "nanoinfer.llm"):
            return LLM(path, kv_cache_memory=MEMORY, enforce_eager=True, **arguments)

    return load_with


def told(caplog):
    return [record.message for record in caplog.records if record.name == "nanoinfer.llm"]


def test_default_params_are_the_checkpoints_and_told_once(load_with, caplog):
    given = {"temperature": 0.5, "top_k": 7, "top_p": 0.8, "min_p": 0.1, "max_new_tokens": 9, "repetition_penalty": 1.05}
    llm = load_with(given | {"do_sample": True, "eos_token_id": 0})
    fields = {name: value for name, value in given.items() if name != "max_new_tokens"} | {"max_tokens": 9}
    with caplog.at_level(logging.INFO, "nanoinfer.llm"):
        assert llm.get_default_sampling_params() == SamplingParams(**fields)
        outputs = [llm.generate("Once upon a time", use_tqdm=False)[0] for _ in range(3)]
    assert max(len(output.outputs[0].token_ids) for output in outputs) == 9
    [message] = told(caplog)
    for name, value in fields.items():
        assert f"{name}={value}" in message.partition("generation_config.json: ")[2]


def test_default_params_without_a_generation_config_are_ours_and_nothing_is_told(tmp_path, caplog):
    llm = LLM(copy_of_tiny_qwen3(tmp_path, without=["generation_config.json"]), kv_cache_memory=MEMORY)
    with caplog.at_level(logging.INFO, "nanoinfer.llm"):
        assert (llm.get_default_sampling_params(), told(caplog)) == (SamplingParams(), [])


def test_a_generation_config_with_do_sample_false_is_greedy_and_its_other_fields_apply_or_are_named(load_with, caplog):
    given = {"do_sample": False, "temperature": 0.9, "min_new_tokens": 30, "stop_strings": "Lily", "no_repeat_ngram_size": 2}
    given |= {"bad_words_ids": [[283], [5, 6]], "suppress_tokens": [7], "num_beams": 4, "typical_p": 1.0}
    llm = load_with(given)
    [message] = told(caplog)
    assert "generation_config.json has suppress_tokens=[7], num_beams=4, which nanoinfer does not apply" in message
    fields = {"min_tokens": 30, "stop": "Lily", "no_repeat_ngram_size": 2, "bad_words": [[283], [5, 6]]}
    expected = SamplingParams(temperature=0.0, max_tokens=30, **fields)
    assert llm.get_default_sampling_params() == expected
    [default], [same], [other] = (llm.generate("Once", one, use_tqdm=False) for one in (None, expected, SamplingParams(seed=1)))
    assert default.outputs[0].token_ids == same.outputs[0].token_ids
    assert 283 not in default.outputs[0].token_ids
    assert len(other.outputs[0].token_ids) == 16  # given parameters are used as they are


def test_stop_strings_of_a_generation_config_need_a_tokenizer_and_what_is_wrong_is_refused(load_with):
    llm = load_with({"stop_strings": ["Lily"]}, skip_tokenizer_init=True)
    assert llm.get_default_sampling_params() == SamplingParams(detokenize=False)
    with pytest.raises(InvalidValueError, match=r"generation_config.json: temperature must be finite and >= 0"):
        load_with({"temperature": -1}).generate("Once upon a time")


# ---- the end of an LLM


def test_a_closed_llm_has_freed_the_model_and_refuses_every_use(qwen3_path):
    with LLM(qwen3_path, kv_cache_memory=MEMORY) as llm:
        expected = answer(llm, [1, 2], IDS)
        executor = llm.engine.executor
        parts = [weakref.ref(part) for part in (executor, executor.runner.model, executor.runner.cache)]
        del executor
        assert all(part() is not None for part in parts)
    assert all(part() is None for part in parts)
    llm.close()  # changes nothing
    uses = [llm.get_metrics, llm.get_tokenizer, llm.get_default_sampling_params, llm.reset_prefix_cache]
    uses += [lambda name=name: getattr(llm, name) for name in ("info", "batch_independent", "engine")]
    uses += [lambda: generate(llm, [1, 2], IDS), lambda: llm.generate([1, 2]), lambda: llm.stream([1, 2], IDS)]
    uses += [lambda: llm.chat(LILY), lambda: llm.beam_search([1, 2], BeamSearchParams(beam_width=2)), lambda: llm.abort("0")]
    for use in uses:
        with pytest.raises(NanoinferError, match=r"^this LLM was closed, by close\(\) or .*; make a new LLM$"):
            use()
    assert "closed" in repr(llm)
    assert answer(LLM(qwen3_path, kv_cache_memory=MEMORY), [1, 2], IDS) == expected


def test_streams_that_are_open_when_an_llm_is_closed_end_as_aborted(qwen3_path):
    llm = LLM(qwen3_path, kv_cache_memory=MEMORY)
    read, left = llm.stream([1, 2], IDS), llm.stream([3], IDS)
    next(read), next(left)
    engine, executor = llm.engine, weakref.ref(llm.engine.executor)
    llm.close()
    assert executor() is None  # in spite of the streams
    *_, last = read
    assert last.output.outputs[0].finish_reason == "abort"
    left.close()
    with pytest.raises(NanoinferError, match="make a new LLM"):
        engine.add_request([1], IDS)


def test_an_llm_is_not_closed_inside_its_own_step(qwen3_path):
    llm = LLM(qwen3_path, kv_cache_memory=MEMORY)

    def closing(output_ids, logits):
        llm.close()

    with pytest.raises(NanoinferError, match=r"close\(\) was called during a step; close an LLM when"):
        generate(llm, [1, 2], SamplingParams(detokenize=False, logits_processors=[closing]))
    assert len(answer(llm, [1, 2], IDS).token_ids) == 12


def test_an_llm_is_closed_although_its_tracer_fails(qwen3_path):
    llm = LLM(qwen3_path, kv_cache_memory=MEMORY, tracer=FailingTracer("RequestFinished"))
    llm.engine.add_request([1, 2], IDS)
    executor = weakref.ref(llm.engine.executor)
    with pytest.raises(RuntimeError, match="the tracer failed"):
        llm.close()
    llm.close()
    assert executor() is None


# ---- parameters are checked once


@pytest.mark.parametrize(("value", "message"), [(1000.0, "must be in .-100, 100."), ("x", "must be a number")])
def test_a_dict_that_was_changed_in_place_is_checked_with_the_request(llm, value, message):
    params = SamplingParams(temperature=0, max_tokens=3, logit_bias={5: 1.0})
    params.logit_bias[7] = 100.0
    assert answer(llm, "Once", params).token_ids == [7, 7, 7]
    params.logit_bias[7] = value
    with pytest.raises(NanoinferError, match=rf"^prompt 0: logit_bias\[7\] {message}"):
        generate(llm, "Once", params)


# ---- LLM's arguments


def test_vllms_arguments_are_accepted_where_they_change_nothing(qwen3_path):
    given = {name: accepted[0][-1] for name, accepted in NEUTRAL["LLM()"].items() if name != "kv_cache_memory_bytes"}
    given |= dict.fromkeys(("max_num_seqs", "max_num_batched_tokens", "enable_prefix_caching", "quantization", "seed"))
    llm = LLM(qwen3_path, **given | {"trust_remote_code": True}, logprobs_mode="raw_logprobs", kv_cache_memory=MEMORY)
    assert llm.engine.scheduler.config == SchedulerConfig()
    assert llm.engine.block_manager.enable_prefix_caching


@pytest.mark.parametrize(
    ("given", "dtype"),
    [("auto", torch.float32), ("float", torch.float32), ("half", torch.float16), (torch.bfloat16, torch.bfloat16)],
    ids=str,
)
def test_dtypes_are_known_by_vllms_and_torchs_names(qwen3_path, given, dtype):
    llm = LLM(qwen3_path, dtype=given, kv_cache_memory=MEMORY, enforce_eager=True)
    assert {parameter.dtype for parameter in llm.engine.executor.runner.model.parameters()} == {dtype}
    assert llm.engine.executor.runner.cache.layer(0)[0].dtype == dtype
    assert len(answer(llm, [1, 2, 3], IDS).token_ids) == 12


# ---- seeds. At temperature 100 every id is about as likely: two answers agree by chance once in 96**16.

HOT = SamplingParams(temperature=100, max_tokens=16, detokenize=False)


def test_requests_without_a_seed_differ(ids_llm):
    together = [output.outputs[0].token_ids for output in generate(ids_llm, [[1]] * 4, HOT)]
    after = [answer(ids_llm, [1], HOT).token_ids for _ in range(4)]
    assert len({tuple(ids) for ids in together + after}) == 8


def test_without_a_seed_one_is_drawn_and_logged_so_that_the_run_can_be_repeated(qwen3_path, caplog):
    with caplog.at_level(logging.INFO, "nanoinfer.engine.llm_engine"):
        llms = [LLM(qwen3_path, kv_cache_memory=MEMORY) for _ in range(2)]
    drawn = [record.message for record in caplog.records if record.levelno == logging.INFO]
    seeds = [int(re.search(r"LLM\(seed=(\d+)\)", message)[1]) for message in drawn]
    llms += [LLM(qwen3_path, seed=seed, kv_cache_memory=MEMORY) for seed in seeds]
    first, second, *repeated = [answer(llm, [1, 2], HOT).token_ids for llm in llms]
    assert first != second
    assert [first, second] == repeated
    assert len([record for record in caplog.records if record.levelno == logging.INFO]) == 2  # a seed that was given is not
    assert f"seed={seeds[0]})" in repr(llms[0])


def test_a_second_ctrl_c_waits_until_everything_is_freed(qwen3_path, monkeypatch):
    llm = LLM(qwen3_path, kv_cache_memory=MEMORY)
    finish = llm.engine.scheduler.finish

    def interrupted_finish(seq, **more):
        signal.raise_signal(signal.SIGINT)
        finish(seq, **more)

    monkeypatch.setattr(llm.engine.scheduler, "finish", interrupted_finish)
    monkeypatch.setattr(llm.engine.executor.runner, "forward", lambda batch: signal.raise_signal(signal.SIGINT) or 1 / 0)
    with pytest.raises((KeyboardInterrupt, ZeroDivisionError)):
        llm.generate([[1, 2], [3, 4], [5, 6]], IDS, use_tqdm=False)
    assert llm.engine.num_unfinished == 0
    assert llm.engine.block_manager.num_free_blocks == llm.engine.block_manager.num_blocks


class InStep:
    """A tracer that waits after every step for the other LLM's, so that the next steps begin together."""

    wants_stages = False

    def __init__(self):
        self.barrier, self.num_steps = None, 0

    def emit(self, event):
        if isinstance(event, StepScheduled) and self.barrier is not None:
            self.barrier.wait(timeout=600)
            self.num_steps += 1


@pytest.mark.parametrize(("enforce_eager", "num_threads"), [(False, 2), (True, 1)])
def test_two_llms_that_compute_at_once_in_two_threads_give_the_same_bits_as_one_after_the_other(
    qwen3_path, gpt2_path, enforce_eager, num_threads
):
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        tracers, prompts = (InStep(), InStep()), [[7] * 30, [*range(90)], [5, 8], [1] * 61]
        settings = {"kv_cache_memory": MEMORY, "dtype": "float32", "chunk_size": 32, "enforce_eager": enforce_eager}
        llms = [LLM(path, tracer=one, **settings) for path, one in zip((qwen3_path, gpt2_path), tracers, strict=True)]
        params = [SamplingParams(temperature=t, seed=3, max_tokens=12, logprobs=5, detokenize=False) for t in (0, 1, 0, 0.7)]

        def bits(llm):
            llm.reset_prefix_cache()
            return [(one.outputs[0].token_ids, one.outputs[0].logprobs) for one in generate(llm, prompts, params)]

        expected, barrier, together = [bits(llm) for llm in llms], threading.Barrier(2), [[], []]
        for tracer in tracers:
            tracer.barrier = barrier
        run_in_threads(lambda i: together[i].extend(bits(llms[i]) for _ in range(3)), num=2)
    finally:
        torch.set_num_threads(before)
    assert together == [[one] * 3 for one in expected]
    assert [tracer.num_steps >= 36 for tracer in tracers] == [True, True]
    assert expected[0] != expected[1]  # the numbers of one LLM in the other would be noticed


@pytest.mark.parametrize("num_calls", [30, pytest.param(3000, marks=pytest.mark.long)])  # of each thread
def test_four_threads_at_every_entry_point_are_served_or_refused_and_leave_nothing_behind(num_calls):
    llm = LLM(kv_cache_memory=2**21, block_size=4, max_model_len=128)
    expected = answer(llm, "Once upon a time")
    params, beams = SamplingParams(max_tokens=9), BeamSearchParams(beam_width=3, max_tokens=6)
    entry_points = [
        lambda: llm.generate(["Once upon"] * 3, SamplingParams(max_tokens=9, n=2), use_tqdm=False),
        lambda: list(llm.stream("Once", params)),
        lambda: next(llm.stream("Once", params)),  # leaves the loop
        lambda: llm.beam_search("Once upon", beams),
    ]
    num_served, unexpected = [0] * len(entry_points), []

    def work(first):
        for i in range(first, first + num_calls):
            if unexpected:
                return
            try:
                entry_points[i % len(entry_points)]()
                num_served[i % len(entry_points)] += 1
            except NanoinferError:
                pass
            except BaseException as error:  # whatever it is, the test must see it
                unexpected.append(error)

    run_in_threads(work)
    assert unexpected == []
    assert sum(num_served) > 0
    assert_nothing_is_left(llm)
    assert answer(llm, "Once upon a time") == expected


def test_without_chunked_prefill_a_prompt_is_computed_in_one_step():
    def num_new_tokens(**arguments):
        recorder = Recorder()
        llm = LLM(tracer=recorder, max_model_len=64, kv_cache_memory=2**22, chunk_size=8, seed=0, **arguments)
        llm.generate([5] * 20, SamplingParams(max_tokens=1), use_tqdm=False)
        return [event.num_new_tokens for event in recorder.of(StepScheduled)]

    assert num_new_tokens(enable_chunked_prefill=None) == [(8,), (8,), (4,)]
    assert num_new_tokens(enable_chunked_prefill=False) == [(20,)]
    with pytest.raises(InvalidValueError, match="needs max_num_batched_tokens >= max_model_len, got 63 and 64; change one"):
        num_new_tokens(enable_chunked_prefill=False, max_num_batched_tokens=63)
