"""What a user of nanoinfer writes, with types, and mistakes at the end. Nothing runs it: `make lint` checks it with mypy, which
also finds an ignored error that is none.
"""

from typing import assert_type

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from nanoinfer import (
    LLM,
    AsyncLLM,
    BeamSearchParams,
    PromptType,
    Recorder,
    RequestOutput,
    SamplingParams,
    TextPrompt,
    TokensPrompt,
)
from nanoinfer.features.tracing import StepScheduled
from nanoinfer.outputs import BeamSearchSequence
from nanoinfer.sampling.batch import SamplingBatch
from nanoinfer.sampling.sampler import STAGES
from nanoinfer.sampling_params import StructuredOutputsParams
from nanoinfer_lab.testing.schedules import World


def double(logits: Tensor, batch: SamplingBatch) -> Tensor:
    return logits * 2


def only_even(prompt_ids: list[int], output_ids: list[int], logits: Tensor) -> Tensor:
    return logits.index_fill(0, logits.new_tensor(range(1, len(logits), 2)), float("-inf"))


recorder = Recorder(stages=True)
llm = LLM("tiny-qwen3", dtype="float32", max_num_seqs=8, tracer=recorder, stages=[*STAGES, double])
tokenizer: PreTrainedTokenizerBase = llm.get_tokenizer()
params = SamplingParams(
    temperature=0.7, max_tokens=8, seed=1, logprobs=2, stop=["."], output_kind="delta", logits_processors=[only_even]
)

texts: list[str] = [output.outputs[0].text for output in llm.generate(["Once", "Lily was"], [params, SamplingParams(n=2)])]
prompts: list[PromptType] = ["Once", [1, 2], TextPrompt(prompt="Lily was"), TokensPrompt(prompt_token_ids=[3])]
outputs: list[RequestOutput] = llm.generate(prompts, params, use_tqdm=False)
form: StructuredOutputsParams | None = params.structured_outputs
for entries in outputs[0].outputs[0].logprobs or []:
    tokens: dict[str | None, float] = {entry.decoded_token: entry.logprob for entry in entries.values()}

messages = [{"role": "user", "content": "Tell me a story"}]
answer: str = llm.chat(messages, params)[0].outputs[0].text
prompt: TokensPrompt = llm.render_chat(messages, chat_template_kwargs={"enable_thinking": False})
for delta in llm.stream(prompt, llm.get_default_sampling_params()):
    piece: str = delta.text

[found] = llm.beam_search("Once", BeamSearchParams(beam_width=3, early_stopping="never"))
beams: list[BeamSearchSequence] = found.sequences
scores: list[tuple[str, float]] = [(beam.text, beam.score) for beam in found.sequences]
steps: list[StepScheduled] = recorder.of(StepScheduled)
blocks: int = World(num_requests=2).num_blocks

with LLM("tiny-qwen3") as closing:
    sizes: tuple[int, str] = (closing.info.max_model_len, closing.info.device)


async def serve() -> list[str]:
    async_llm = AsyncLLM("tiny-qwen3", max_num_seqs=8, max_num_queued_requests=4)
    texts = [output.outputs[0].text async for output in async_llm.generate("Once", params, "my id")]
    await async_llm.abort("my id")
    await async_llm.shutdown()
    return texts


# Mistakes.
SamplingParams(temprature=0.5)  # type: ignore[call-arg]
SamplingParams(top_k="3")  # type: ignore[arg-type]
LLM(max_num_seq=3)  # type: ignore[call-arg]
llm.generate([b"bytes"])  # type: ignore[arg-type]
AsyncLLM(max_num_seqs=2.5)  # type: ignore[arg-type]
assert_type(llm.generate("a")[0].outputs[0].text, str)
assert_type(llm.generate("a")[0].outputs[0].text, bytes)  # type: ignore[assert-type]
