"""Requests that are added between the steps of an engine."""

import argparse

from vllm import EngineArgs, LLMEngine, RequestOutput, SamplingParams
from vllm.utils import FlexibleArgumentParser


def create_test_prompts() -> list[tuple[str, SamplingParams]]:
    return [
        ("Once upon a time", SamplingParams(temperature=0.0, logprobs=1, prompt_logprobs=1)),
        ("Lily was", SamplingParams(temperature=0.8, top_k=5, presence_penalty=0.2)),
        ("One day, Tom", SamplingParams(n=2, temperature=0.8, top_p=0.95, frequency_penalty=0.1)),
    ]


def process_requests(engine: LLMEngine, test_prompts: list[tuple[str, SamplingParams]]):
    request_id = 0
    while test_prompts or engine.has_unfinished_requests():
        if test_prompts:
            prompt, sampling_params = test_prompts.pop(0)
            engine.add_request(str(request_id), prompt, sampling_params)
            request_id += 1
        request_outputs: list[RequestOutput] = engine.step()
        for request_output in request_outputs:
            if request_output.finished:
                print(f"Request {request_output.request_id}: {[one.text for one in request_output.outputs]}")


def main(args: argparse.Namespace):
    engine_args = EngineArgs.from_cli_args(args)
    process_requests(LLMEngine.from_engine_args(engine_args), create_test_prompts())


if __name__ == "__main__":
    parser = FlexibleArgumentParser(description="LLMEngine, step by step")
    parser = EngineArgs.add_cli_args(parser)
    main(parser.parse_args(["--model", "tiny-qwen3", "--seed", "0"]))
