"""When reasoning must end: hand-checked answers, and what may be sampled ahead of known tokens."""

import random

import pytest
import torch

from nanoinfer import SamplingParams
from nanoinfer.features.reasoning.thinking import ReasoningState
from nanoinfer.sampling.batch import SamplingBatch
from nanoinfer.sampling.stages import end_thinking
from nanoinfer.scheduling.sequence import Sequence
from tests.helpers.growing import grow

END = 3


def reasoning_of(*tokens, budget=2, **begun):
    reasoning = ReasoningState(bytes, END, budget, **begun)
    for token in tokens:
        reasoning.advance(token)
    return reasoning


ANSWERS = [  # tokens, what the prompt has begun, and whether the reasoning must end after them
    ([], {}, False),
    ([b"<think>"], {}, False),
    ([b"<think>", b"a"], {}, False),
    ([b"<think>", b"a", b"b"], {}, True),
    ([b"<think>", b"a", b"</think>"], {}, False),
    ([b"<think>", b"</think>", b"a", b"b"], {}, False),
    ([b"\n", b"<think>", b"a", b"b"], {}, True),  # some models begin with a line break
    ([b"<th", b"ink>", b"a", b"b"], {}, True),  # the tag in several tokens
    ([b"<think>", b"</thi", b"nk>"], {}, False),
    ([b"<think>", b"</thi", b"s>"], {}, True),
    ([b"a", b"<think>", b"b", b"c"], {}, False),  # not at the beginning: it is content
    ([b"<this>", b"<think>", b"b", b"c"], {}, False),
    ([b"a"], {"begin": 0}, False),  # the prompt has begun it
    ([b"a", b"b"], {"begin": 0}, True),
    ([b"</think>", b"a", b"b"], {"begin": 0}, False),
    ([b"<think>", b"a", b"b"], {"is_over": True}, False),  # the prompt has ended it
]


def test_reasoning_must_end_after_two_tokens():
    for tokens, begun, must_end in ANSWERS:
        assert reasoning_of(*tokens, **begun).must_end(len(tokens)) == must_end, (tokens, begun)


@pytest.mark.parametrize("seed", range(10))
def test_free_tokens_are_those_before_the_earliest_end(seed):
    rng = random.Random(seed)
    begun, budget = rng.choice([{}, {"begin": 0}]), rng.randrange(5)
    tokens = [rng.choice([b"<think>", b"\n", b"a", b"</think>"]) for _ in range(9)]
    for num_known in range(9):
        reasoning = reasoning_of(*tokens[:num_known], budget=budget, **begun)
        num_free = reasoning.num_free(num_known)
        must_end = [reasoning_of(*tokens[:i], budget=budget, **begun).must_end(i) for i in range(num_known + 1, 10)]
        assert not any(must_end[:num_free])
        if not reasoning.is_over and reasoning.begin is not None and num_free < len(must_end):
            assert must_end[num_free] or b"</think>" in tokens[num_known : num_known + num_free + 1]


def test_the_stage_leaves_the_end_alone_unless_it_is_forbidden():
    def sequence(budget, output=(b"a",), **params):
        reasoning = reasoning_of(*output, budget=budget, begin=0)
        seq = Sequence("r", [0], SamplingParams(**params), 0, 99, constraints=(reasoning,))
        grow(seq, *[5] * len(output))
        return seq

    sequences = [sequence(1), sequence(2), sequence(1, allowed_token_ids=[2])]
    batch = SamplingBatch.build(sequences, 5, torch.device("cpu"))
    logits = torch.arange(5.0).repeat(3, 1)
    logits[2, END] = -torch.inf  # by keep_allowed
    ended, *others = end_thinking(logits.clone(), batch)
    assert ended.tolist() == [-torch.inf, -torch.inf, -torch.inf, 3, -torch.inf]
    assert torch.stack(others).equal(logits[1:])
    assert batch.masks_logits
    assert SamplingBatch.build([sequence(2)], 5, torch.device("cpu")).end_thinking is None
