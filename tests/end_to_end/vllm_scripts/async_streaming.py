"""Text as it is generated, from AsyncLLM."""

import asyncio

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM


async def stream_response(engine: AsyncLLM, prompt: str, request_id: str) -> None:
    sampling_params = SamplingParams(max_tokens=30, temperature=0.8, top_p=0.95, seed=42, output_kind=RequestOutputKind.DELTA)
    num_outputs = 0
    print(f"\nPrompt: {prompt!r}\nResponse: ", end="")
    async for output in engine.generate(request_id=request_id, prompt=prompt, sampling_params=sampling_params):
        for completion in output.outputs:
            print(completion.text, end="", flush=True)
        num_outputs += 1
        if output.finished:
            print(f"\nComplete: {request_id}, in several outputs: {num_outputs > 1}")
            break


async def main():
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model="tiny-qwen3", enforce_eager=True))
    try:
        for i, prompt in enumerate(["Once upon a time", "Lily was", "One day, Tom"], 1):
            await stream_response(engine, prompt, f"stream-example-{i}")
    finally:
        engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
