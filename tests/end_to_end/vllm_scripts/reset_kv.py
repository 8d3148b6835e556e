"""The prefix cache is reset while a request runs."""

from vllm import EngineArgs, LLMEngine, SamplingParams


def main():
    engine = LLMEngine.from_engine_args(EngineArgs(model="tiny-qwen3", block_size=8))
    params = SamplingParams(temperature=0.0, logprobs=1, prompt_logprobs=1, max_tokens=16, ignore_eos=True)
    engine.add_request("0", "Once upon a time, there was a kind duck named Max.", params)
    step = 0
    while engine.has_unfinished_requests():
        if step == 10:
            print("Reset:", engine.reset_prefix_cache(reset_running_requests=True))
        for output in engine.step():
            if output.finished:
                print("Tokens:", len(output.outputs[0].token_ids))
        step += 1


if __name__ == "__main__":
    main()
