"""The prepared runs of `nanoinfer explain --demo`. Each shows a mechanism of the engine on the bundled model.

In: a Recorder after the run. Out: the moments to look at, which are found in its events.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from nanoinfer.features.tracing import (
    BlocksShared,
    Recorder,
    RequestAdded,
    StepScheduled,
    StepTimed,
    TokenAppended,
    TokensDrafted,
)
from nanoinfer.sampling_params import SamplingParams


class Moment(NamedTuple):
    """A step to look at, the sequence to select there, and a description of what happens."""

    step: int
    sequence_id: str
    description: str


@dataclass(frozen=True, kw_only=True)
class Demo:
    """A run, with arguments of LLM, and the function that finds the moments to look at in its recording."""

    prompts: list[str]
    kv_cache_memory: int = 2**24
    engine: dict[str, Any]
    params: SamplingParams | list[SamplingParams]
    find: Callable[[Recorder], list[Moment]]


def find_preemption(recorder: Recorder) -> list[Moment]:
    steps = recorder.of(StepScheduled)
    full = next(step for step in steps if step.preempted)
    name = full.preempted[0]
    again = next(step for step in steps if step.step > full.step and name in step.sequence_ids)
    num = num_new_tokens(again, name)
    freed = f"No block is free. Sequence {name} is preempted (P): its blocks are freed, and it waits."
    recomputed = f"Blocks are free again. {num} tokens of sequence {name}, prompt and output, are recomputed in one step."
    return [Moment(full.step, name, freed), Moment(again.step, name, recomputed)]


def find_sharing(recorder: Recorder) -> list[Moment]:
    steps, hit = recorder.of(StepScheduled), recorder.of(BlocksShared)[0]
    name, blocks = hit.sequence_id, f"{len(hit.blocks)} blocks"
    first = next(step for step in steps if name in step.sequence_ids)
    alone = next(step for step in steps if step.running == (name,))
    num = num_new_tokens(first, name)
    shared = f"Sequence {name} has a prefix cache hit on {blocks} of sequence 0 (×2). Only {num} prompt tokens are computed."
    kept = f"Sequence 0 has ended. The {blocks} stay in use, because sequence {name} holds them, too."
    return [Moment(first.step, name, shared), Moment(alone.step, name, kept)]


def find_stop_string(recorder: Recorder) -> list[Moment]:
    tokens = recorder.of(TokenAppended)  # one token per step, since nothing else runs
    held = next(step for step, token in enumerate(tokens) if token.held)
    released = next(step for step, token in enumerate(tokens) if step > held and token.text)
    last = len(tokens) - 1
    return [
        Moment(held, "0", f"{tokens[held].held!r} is held back, because it may be the beginning of a stop string."),
        Moment(released, "0", f"It was not, so {tokens[released].text!r} is released."),
        Moment(last, "0", f"The stop string {tokens[last].stop_reason!r} is complete. The answer ends without it."),
    ]


def find_chunks(recorder: Recorder) -> list[Moment]:
    prompt = recorder.of(RequestAdded)[1]
    name, num_tokens = prompt.request_id, len(prompt.prompt_token_ids)
    prefills = [step for step in recorder.of(StepScheduled) if num_new_tokens(step, name) > 1]
    first, last = prefills[0], prefills[-1]
    chunk = f"{num_new_tokens(first, name)} of the {num_tokens} prompt tokens of sequence {name} are computed."
    decode = "Sequence 0 decodes in the same step: it does not wait for the whole prompt."
    end = f"The last of {len(prefills)} chunks. The first token of sequence {name} is drawn."
    return [Moment(first.step, name, f"{chunk} {decode}"), Moment(last.step, name, end)]


def find_drafts(recorder: Recorder) -> list[Moment]:
    drafts = {event.step: event.draft_token_ids[0] for event in recorder.of(TokensDrafted)}
    num_tokens, since = {}, 0
    for event in recorder.events:
        since += isinstance(event, TokenAppended)
        if isinstance(event, StepTimed):
            num_tokens[event.step], since = since, 0
    num_rejected = {step: 1 + len(draft) - num_tokens[step] for step, draft in drafts.items()}
    best = max(drafts, key=lambda step: num_tokens[step])
    worst = max(drafts, key=lambda step: num_rejected[step])
    right = f"All {len(drafts[best])} drafts are accepted: one step gives {num_tokens[best]} tokens."
    wrong = f"{num_rejected[worst]} of {len(drafts[worst])} drafts are rejected: their rows were computed for nothing."
    whole = f"The end: {sum(num_tokens.values())} tokens in {len(num_tokens)} steps."
    return [Moment(best, "0", right), Moment(worst, "0", wrong), Moment(max(num_tokens), "0", whole)]


def num_new_tokens(step: StepScheduled, sequence_id: str) -> int:
    return dict(zip(step.sequence_ids, step.num_new_tokens, strict=True)).get(sequence_id, 0)


STORY = "Once upon a time, there was a kind duck named Max. Every morning, he ate three pancakes for breakfast."

DEMOS = {
    "preemption": Demo(
        prompts=[STORY, "Lily was", "Far away, in a"],
        kv_cache_memory=9 * 8 * 2304,  # 9 blocks of the bundled model in float32
        engine={"block_size": 8, "max_model_len": 72},
        params=SamplingParams(temperature=0, max_tokens=30, ignore_eos=True),
        find=find_preemption,
    ),
    "sharing": Demo(
        prompts=[f"{STORY} One", f"{STORY} On a sunny day, he"],
        engine={"block_size": 8, "max_num_batched_tokens": 32},  # too few tokens for both prompts in one step
        params=[SamplingParams(temperature=0, max_tokens=num, ignore_eos=True) for num in (8, 16)],
        find=find_sharing,
    ),
    "stop-string": Demo(
        prompts=["Once upon"],
        engine={"block_size": 8},
        params=SamplingParams(temperature=0, stop=["a time, once", "there was"]),
        find=find_stop_string,
    ),
    "chunked": Demo(
        prompts=["Lily was", f"{STORY} {STORY} {STORY}"],
        engine={"block_size": 8, "chunk_size": 16, "max_num_batched_tokens": 16},
        params=SamplingParams(temperature=0, max_tokens=12, ignore_eos=True),
        find=find_chunks,
    ),
    "drafts": Demo(
        prompts=[f"{STORY} One Wednesday, he"],
        engine={
            "block_size": 8,
            "speculative_config": {
                "method": "draft_model",
                "model": "tiny-gpt2",
                "num_speculative_tokens": 5,
                "adaptive": False,
            },
        },
        params=SamplingParams(temperature=0.7, seed=3, max_tokens=60, ignore_eos=True),
        find=find_drafts,
    ),
}
