"""check_proposer, which checks a source of drafts.

In: a class. Out: AssertionErrors that say which invariant it violates.
"""

import gc
import random
import weakref
from typing import TYPE_CHECKING

from nanoinfer.features.drafts.checked import CheckedProposer
from nanoinfer.features.drafts.config import SpeculativeConfig
from nanoinfer.features.drafts.speculator import Proposer, SpeculationMetrics, Speculator
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.scheduling.sequence import Sequence

if TYPE_CHECKING:
    from nanoinfer.llm import LLM

NUM_CALLS = 200  # of propose(), with sequences that come, grow and end
NUM_TOKENS = 8  # the ids of these sequences are below, so that everything repeats itself
STORY = "Once upon a time, there was a kind fox named Leo. He loved to climb trees."


class _WatchedSequence(Sequence):
    """A sequence that weak references can follow, which shows whether somebody still holds it."""


def check_proposer(method: str | type[Proposer], **config: object) -> SpeculationMetrics:
    """Check what the engine expects of a Proposer, on sequences that grow at random and on a bundled model.

        def test_my_proposer():
            check_proposer(MyProposer)

    Args:
        method: the class or its name, "my_module:MyProposer".
        config: further keys of LLM's speculative_config.

    Returns: how many drafts the engine accepted, of prompts that repeat themselves and of others.

    Raises:
        AssertionError: the class violates an invariant, which the message states.
        InvalidTypeError, InvalidValueError: the class cannot be made, or its drafts have a form that the engine refuses.
        Exception: an error of the class itself.
    """
    from nanoinfer.llm import LLM  # imports torch, which schedules.py does without

    given = {"method": method, "adaptive": False, **config}
    drafting = LLM("tiny-qwen3", device="cpu", kv_cache_memory=2**24, speculative_config=given)
    checked = SpeculativeConfig.of(given)
    assert checked is not None
    assert isinstance(checked.method, type), f"method must be a class or its name, got {checked.method!r}"
    vocab_size = drafting.engine.executor.info.vocab_size
    proposers = [CheckedProposer(checked.method(checked), vocab_size) for _ in range(2)]
    left = _play(proposers[0], proposers[1], checked.num_speculative_tokens)
    gc.collect()
    assert not any(seq() for seq in left), f"{checked.method.__name__} must keep no Sequence after forget(seq)"
    return _generate(LLM("tiny-qwen3", device="cpu", kv_cache_memory=2**24), drafting)


def _play(proposer: CheckedProposer, second: CheckedProposer, max_limit: int) -> "list[weakref.ref[Sequence]]":
    """Call two proposers of a class as an engine calls one. Returns the sequences, all of which have ended."""
    name, rng = type(proposer.proposer).__name__, random.Random(0)
    alive: list[Sequence] = []
    left: list[weakref.ref[Sequence]] = []
    for _ in range(NUM_CALLS):
        if len(alive) < 4:
            prompt = rng.choices(range(NUM_TOKENS), k=rng.randint(1, 12))
            alive.append(_WatchedSequence(str(len(left)), prompt, SamplingParams(), seed=0, max_num_tokens=1000))
            left.append(weakref.ref(alive[-1]))
        drafting = rng.sample(alive, rng.randint(1, len(alive)))
        limits = [rng.randint(1, max_limit) for _ in drafting]
        token_ids = [list(seq.token_ids) for seq in alive]
        drafts = proposer.propose(drafting, limits)
        assert token_ids == [seq.token_ids for seq in alive], f"{name}.propose must not change the tokens of a sequence"
        assert drafts == second.propose(drafting, limits), f"{name}.propose must propose the same drafts in the same run again"
        for seq, draft in zip(drafting, drafts, strict=True):
            seq.token_ids += [*draft[: rng.randint(0, len(draft))], rng.randrange(NUM_TOKENS)]
        if rng.random() < 0.1:
            _forget(proposer, second, alive.pop(rng.randrange(len(alive))))
    for seq in alive:
        _forget(proposer, second, seq)
    return left


def _forget(proposer: CheckedProposer, second: CheckedProposer, seq: Sequence) -> None:
    """Forget a sequence twice, as the engine may do. Some sequences were never proposed for."""
    for one in (proposer.proposer, second.proposer) * 2:
        try:
            one.forget(seq)
        except Exception as error:
            name = type(one).__name__
            raise AssertionError(f"{name}.forget must accept sequences that it does not know: it raised {error!r}") from error


def _generate(plain: "LLM", drafting: "LLM") -> SpeculationMetrics:
    """Compare an engine's tokens with those of plain decoding."""
    prompts = [STORY, f"{STORY} {STORY}", "Lily was", "Lily was"]
    params = [SamplingParams(temperature=temperature, seed=1, max_tokens=40) for temperature in (0, 0, 0.7, 1.5)]
    expected, answers = (
        [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)] for llm in (plain, drafting)
    )
    assert answers == expected, "the tokens must be those of plain decoding; propose() must not change a sequence"
    speculator = drafting.engine.planner
    assert isinstance(speculator, Speculator)
    return speculator.counts
