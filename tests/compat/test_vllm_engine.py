"""LLMEngine, whose steps the caller makes: the outputs are those of LLM.generate."""

from dataclasses import replace

import pytest

from nanoinfer import LLM, EngineArgs, LLMEngine, NanoinferError, SamplingParams
from nanoinfer.errors import InvalidPromptError, InvalidValueError, UnsupportedError

PROMPTS = ["Once upon a time", "Lily was", "There was a kind duck"]


@pytest.fixture
def engine():
    engine = LLMEngine.from_engine_args(EngineArgs("tiny-qwen3", seed=0, kv_cache_memory=2**24))
    yield engine
    assert engine.engine.num_unfinished == 0
    assert engine.engine.block_manager.num_free_blocks == engine.engine.block_manager.num_blocks
    engine.close()


def params(**more):
    return SamplingParams(**{"max_tokens": 6, "seed": 1, "ignore_eos": True} | more)


def run(engine):
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    return outputs


def test_requests_that_join_between_steps_get_the_outputs_of_generate(engine):
    expected = engine.generate(PROMPTS, params(n=2), use_tqdm=False)
    outputs, prompts = [], list(PROMPTS)
    while prompts or engine.has_unfinished_requests():
        if prompts:
            engine.add_request(f"request {len(prompts)}", prompts.pop(), params(n=2))
        outputs += engine.step()
    finished = {output.prompt: output for output in outputs if output.finished}
    assert len(outputs) > len(finished) == 3
    for one in expected:
        assert [answer.text for answer in finished[one.prompt].outputs] == [answer.text for answer in one.outputs]


@pytest.mark.parametrize(
    ("kind", "sizes"), [("cumulative", [1, 2, 3, 4, 5, 6]), ("delta", [1, 1, 1, 1, 1, 1]), ("final_only", [6])]
)
def test_an_output_holds_what_the_output_kind_says(engine, kind, sizes):
    engine.add_request("mine", PROMPTS[0], params(output_kind=kind))
    outputs = run(engine)
    assert [len(output.outputs[0].token_ids) for output in outputs] == sizes
    assert [output.finished for output in outputs] == [False] * (len(sizes) - 1) + [True]
    assert {output.request_id for output in outputs} == {"mine"}


def test_an_aborted_request_and_a_prompt_that_is_too_long_end_in_the_next_step(engine):
    engine.add_request("long", [5] * 2000, params())
    engine.add_request("mine", PROMPTS[0], params(max_tokens=400))
    assert engine.get_num_unfinished_requests() == 2
    [error, first] = engine.step()
    assert (error.request_id, error.outputs[0].finish_reason, first.finished) == ("long", "error", False)
    engine.abort_request("mine")
    [aborted] = engine.step()
    assert (aborted.request_id, aborted.outputs[0].finish_reason) == ("mine", "abort")
    assert not engine.has_unfinished_requests()
    assert engine.step() == []


def test_wrong_requests_are_refused_and_leave_nothing(engine):
    with pytest.raises(InvalidPromptError):
        engine.add_request("0", [], params())
    with pytest.raises(InvalidValueError, match="request_id must be a string that no unfinished request has, got 0"):
        engine.add_request(0, PROMPTS[0], params())
    with pytest.raises(InvalidValueError, match="needs a model loaded with enable_lora=True"):
        engine.add_request("0", PROMPTS[0], params(), lora_request=object())
    with pytest.raises(NanoinferError, match="nanoinfer has no workers to call"):
        engine.collective_rpc("reload")
    assert not engine.has_unfinished_requests()


def test_arguments_come_from_a_command_line():
    import argparse

    parser = EngineArgs.add_cli_args(argparse.ArgumentParser())
    parser.add_argument("--mine", default=1)
    given = parser.parse_args(
        "--model tiny-gpt2 --max-num-seqs 4 --no-enable-prefix-caching --gpu-memory-utilization 0.5 --trust-remote-code "
        '--pipeline-parallel-size 1 --speculative-config {"method":"ngram"} --lora a b --lora c --kv-cache-memory 1.5G '
        "--prefix-cache-size 4096".split()
    )
    args = EngineArgs.from_cli_args(given)
    assert args == EngineArgs(
        "tiny-gpt2",
        max_num_seqs=4,
        enable_prefix_caching=False,
        gpu_memory_utilization=0.5,
        speculative_config={"method": "ngram"},
        lora=["a", "b", "c"],
        kv_cache_memory=3 * 2**29,
        prefix_cache_size=4096,
    )
    with pytest.raises(SystemExit):
        parser.parse_args(["--kv-cache-memory", "1X"])
    args = replace(args, lora=None, kv_cache_memory=2**24)
    assert LLM.from_engine_args(args).engine.scheduler.config.max_num_seqs == 4
    with pytest.raises(UnsupportedError, match="pipeline_parallel_size=2 is not supported"):
        EngineArgs.from_cli_args(parser.parse_args(["--pipeline-parallel-size", "2"]))
