"""Steps of one_file/engine.py, checked by hand. A2|BC: a step computes two tokens of A, and B and C wait after it."""

import pytest

from tests.one_file.module import load

A, B, C = [5] * 10, [6] * 3, [7] * 5
# what happens, the prompts, max_tokens of each, LLM's settings, and the steps
CASES = [
    (
        "chunks end at multiples of 4, a chunk that does not fit waits, and tokens of decodes are not counted",
        [A, B, C], [4, 4, 1], {"chunk_size": 4, "max_num_batched_tokens": 5},
        ["A4|BC", "A4|BC", "A2 B3|C", "A1 B1 C4|", "A1 B1 C1|", "A1 B1|"],
    ),
    (
        "no prompt passes one that waits for tokens",
        [B, A, B], [1, 2, 1], {"chunk_size": 8, "max_num_batched_tokens": 8},
        ["A3|BC", "B8|C", "B2 C3|", "B1|"],
    ),
    (
        "a prompt that waits for tokens in its middle is not passed either, and its chunks end at multiples of 8",
        [[9] * 5, [5] * 20, [9] * 4 + [6] * 16, B], [1, 1, 1, 1], {"chunk_size": 8, "max_num_batched_tokens": 12},
        ["A5|BCD", "B8 C4|D", "B8|D", "B4 C8|D", "C4 D3|"],
    ),
    (
        "equal blocks after different ones have different keys",
        [[5] * 4 + [6] * 5, [6] * 5, [5] * 4 + [6] * 5], [1, 1, 1], {"max_num_seqs": 1},
        ["A9|BC", "B5|C", "C1|"],
    ),
    (
        "max_num_seqs limits the running ones",
        [B, B, B], [2, 3, 1], {"max_num_seqs": 2, "enable_prefix_caching": False},
        ["A3 B3|C", "A1 B1|C", "B1 C3|"],
    ),
    (
        "the youngest is preempted, waits first, and computes again what its first block does not hold",
        [A[:7], B + B + B[:1], C], [8, 4, 2], {"num_blocks": 5},
        ["A7 B7|C", "A1 B1|C", *["A1|BC"] * 6, "B5 C5|", "B1 C1|"],
    ),
    (
        "without a prefix cache all is computed again",
        [A[:7], B + B + B[:1]], [4, 4], {"num_blocks": 5, "enable_prefix_caching": False},
        ["A7 B7|", "A1 B1|", "A1|B", "A1|B", "B9|", "B1|"],
    ),
    (
        "the last token of a prompt is computed, whose other blocks the prefix cache holds",
        [A[:8], A[:8]], [2, 1], {"max_num_seqs": 1},
        ["A8|B", "A1|B", "B4|"],
    ),
]  # fmt: skip


def steps_of(engine, prompts, max_tokens, **settings):
    """Return the steps, for sequences that are named by letters in the order in which they came."""
    llm, names, steps = engine.LLM(**{"block_size": 4, "num_blocks": 64} | settings), {}, []
    add, schedule = llm.scheduler.add, llm.scheduler.schedule

    def adding(seq):
        for one in (seq, *seq.forks):
            names[one] = chr(ord("A") + len(names))
        add(seq)

    def scheduling():
        plan = schedule()
        computed = " ".join(f"{names[item.sequence]}{item.num_new_tokens}" for item in plan.scheduled)
        steps.append(f"{computed}|{''.join(names[seq] for seq in llm.scheduler.waiting)}")
        return plan

    llm.scheduler.add, llm.scheduler.schedule = adding, scheduling
    for prompt, most in zip(prompts, max_tokens, strict=True):
        llm.add_request(prompt, engine.SamplingParams(temperature=0, max_tokens=most, ignore_eos=True))
    while llm.answers:
        assert len(steps) < 50, "the steps do not end"
        llm.step()
    return steps


def check_cases(engine):
    for what, prompts, max_tokens, settings, expected in CASES:
        assert steps_of(engine, prompts, max_tokens, **settings) == expected, what


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
def test_the_steps_are_those_of_the_rules(case):
    _, prompts, max_tokens, settings, expected = case
    assert steps_of(load(), prompts, max_tokens, **settings) == expected


def test_blocks_are_shared_until_one_of_two_answers_writes():
    check_copies(load())


def check_copies(engine):
    llm, copies = engine.LLM(block_size=4, num_blocks=8), []
    schedule = llm.scheduler.schedule
    llm.scheduler.schedule = lambda: copies.append((plan := schedule()).block_copies) or plan
    request = llm.add_request(C, engine.SamplingParams(n=3, seed=1, max_tokens=3, ignore_eos=True))
    llm.step()
    tables = [list(answer.seq.block_table) for answer in request.answers]
    llm.step()
    after = [list(answer.seq.block_table) for answer in request.answers]
    assert tables == [tables[0]] * 3
    assert {table[0] for table in after} == {tables[0][0]}
    assert len({table[1] for table in after}) == 3
    assert len(copies[1]) == 2


def test_the_block_that_was_not_used_for_longest_is_taken_first():
    check_eviction(load())


def check_eviction(engine):
    """Five blocks of 4, and prompts of two full blocks: a third prompt takes blocks of the first."""
    llm, first_chunks = engine.LLM(block_size=4, num_blocks=5), []
    schedule = llm.scheduler.schedule

    def scheduling():
        plan = schedule()
        first_chunks.append(plan.scheduled[0].num_new_tokens)
        return plan

    llm.scheduler.schedule = scheduling
    for token_id in (10, 11, 10, 12, 10, 11):
        llm.add_request([token_id] * 8 + [1], engine.SamplingParams(max_tokens=1))
        llm.step()
    assert first_chunks == [9, 9, 1, 9, 1, 9]
