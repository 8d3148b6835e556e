"""one_file/engine.py answers as the package does, however it runs: the same tokens, texts and reasons to end."""

import dataclasses
import itertools

import pytest
import torch

from nanoinfer import SamplingParams
from nanoinfer.loading.folders import BUNDLED
from nanoinfer.sampling import draw
from tests.one_file.compare import FAMILIES, answers_of_file, answers_of_package, assert_nothing_is_left, requests, save
from tests.one_file.module import FILE, changed, load

pytestmark = pytest.mark.slow

ROOMY = {"block_size": 16, "num_blocks": 200, "chunk_size": 1024, "max_num_batched_tokens": 4096, "max_num_seqs": 256}
STORIES = [
    ("Once upon a time", {"temperature": 0.8, "seed": 1, "max_tokens": 40, "stop": [". He", "day"]}),
    ("Lily was", {"temperature": 0.0, "max_tokens": 60}),
    ("Lily was", {"temperature": 0.0, "max_tokens": 60, "stop": ["e l", "d h", "s b"]}),
    ("One day", {"seed": 2, "n": 3, "min_tokens": 10, "stop": "and he", "max_tokens": 40}),
    ("Tom", {"seed": 5}),
]
TEXTS = ["Once upon a time", "Lily was", "Once upon a time, there was a", "One day, Tom"] * 2


@pytest.fixture(scope="module")
def engine():
    return load()


LONG = "gpt2_untied", "qwen2_tied"  # another head than that of a family which runs by default


@pytest.mark.parametrize("family", [pytest.param(one, marks=[pytest.mark.long] * (one in LONG)) for one in FAMILIES])
def test_mixed_requests_have_the_answers_of_the_package(engine, family, tmp_path):
    """With few blocks and small chunks. Random parameters, several answers, stop strings: compare.py asks more of them."""
    folder, asked = save(family, tmp_path), requests(14, seed=3)
    got, counts = answers_of_file(engine, folder, asked)
    assert got == answers_of_package(folder, asked)
    assert counts["preemptions"] > 0
    assert counts["blocks found"] > 10


# what is wrong -> (text of the file, the text in its place). The first four are in lines that only the one file has.
CHANGES = {
    "a step lacks the copies of blocks": ("if batch.block_copies:", "if False:"),
    "min-p is compared before the temperature": (
        "apply_temperature, keep_min_p, keep_top_k", "keep_min_p, apply_temperature, keep_top_k",
    ),
    "min_tokens forbids one token too few": ("< seq.params.min_tokens", "< seq.params.min_tokens - 1"),
    "the EOS of config.json alone": (
        'eos = json.loads(generation.read_text(encoding="utf-8")).get("eos_token_id", eos)', "pass",
    ),
    "slots of another block": ("* block_size + start % block_size,)", "* block_size + (start + 1) % block_size,)"),
    "a stop string must be in one piece": ("num_before - len(stop) + 1", "num_before"),
}  # fmt: skip


def test_a_change_of_the_file_has_other_answers(tmp_path):
    folder, asked = save("qwen3_tied", tmp_path), requests(12, seed=5)
    expected = answers_of_package(folder, asked), answers_of_package(BUNDLED / "tiny-qwen3", STORIES)

    def is_refused(what):
        engine = load(changed(*CHANGES[what]))
        try:
            if answers_of_file(engine, folder, asked)[0] != expected[0]:
                return True
            return answers_of_file(engine, BUNDLED / "tiny-qwen3", STORIES)[0] != expected[1]
        except (AssertionError, IndexError, KeyError, RuntimeError, ValueError):
            return True

    assert [what for what in CHANGES if not is_refused(what)] == []


# Of prompts A, B and C. A2|BC: a step computes two tokens of A, and B and C wait after it.
A, B, C = [5] * 10, [6] * 3, [7] * 5
SCHEDULES = {  # what happens -> the prompts, max_tokens of each, LLM's settings, and the steps
    "chunks end at multiples of 4, a chunk that does not fit waits, and tokens of decodes are not counted": (
        [A, B, C], [4, 4, 1], {"chunk_size": 4, "max_num_batched_tokens": 5},
        ["A4|BC", "A4|BC", "A2 B3|C", "A1 B1 C4|", "A1 B1 C1|", "A1 B1|"],
    ),
    "a prompt that waits for tokens in its middle is not passed, and its chunks end at multiples of 8": (
        [[9] * 5, [5] * 20, [9] * 4 + [6] * 16, B], [1, 1, 1, 1], {"chunk_size": 8, "max_num_batched_tokens": 12},
        ["A5|BCD", "B8 C4|D", "B8|D", "B4 C8|D", "C4 D3|"],
    ),
    "max_num_seqs limits the running ones": (
        [B, B, B], [2, 3, 1], {"max_num_seqs": 2, "enable_prefix_caching": False}, ["A3 B3|C", "A1 B1|C", "B1 C3|"],
    ),
    "the youngest is preempted, waits first, and computes again what its first block does not hold": (
        [A[:7], B + B + B[:1], C], [8, 4, 2], {"num_blocks": 5},
        ["A7 B7|C", "A1 B1|C", *["A1|BC"] * 6, "B5 C5|", "B1 C1|"],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("prompts", "max_tokens", "settings", "expected"), SCHEDULES.values(), ids=SCHEDULES)
def test_the_steps_are_those_of_the_rules(engine, prompts, max_tokens, settings, expected):
    llm, names, steps = engine.LLM(**{"block_size": 4, "num_blocks": 64} | settings), {}, []
    schedule = llm.scheduler.schedule

    def scheduling():
        plan = schedule()
        computed = " ".join(f"{names[item.sequence]}{item.num_new_tokens}" for item in plan.scheduled)
        steps.append(f"{computed}|{''.join(names[seq] for seq in llm.scheduler.waiting)}")
        return plan

    llm.scheduler.schedule = scheduling
    for letter, prompt, most in zip("ABCD", prompts, max_tokens, strict=False):
        params = engine.SamplingParams(temperature=0, max_tokens=most, ignore_eos=True)
        names[llm.add_request(prompt, params).answers[0].seq] = letter
    while llm.answers:
        assert len(steps) < 50, "the steps do not end"
        llm.step()
    assert steps == expected


def test_tokens_are_drawn_as_in_the_package(engine):
    """Also of rows with equal, few, huge and no logits, and of the smallest and largest random numbers."""
    none, generator = -torch.inf, torch.Generator().manual_seed(0)
    rows = [[none, 0.0, 0.0, none], [3.0, 3.0, 3.0, 3.0], [-3e38, 3e38, none, 0.0], [none] * 4, [0.0, -20.0, -23.0, 1.0]]
    logits = torch.cat([torch.tensor(rows), torch.randn(40, 4, generator=generator) * 5])
    for u in (0.0, 0.3, 0.7, 1 - 2**-53):
        numbers = torch.full((len(logits),), u, dtype=torch.float64)
        has_token = logits.amax(dim=-1).isfinite()
        assert torch.equal(engine.draw(logits, numbers)[has_token], draw.draw(logits, numbers)[has_token]), u
    assert torch.equal(engine.argmax(logits), draw.argmax(logits))
    for seed, position in ((0, 0), (1, 2), (2**64 - 1, 5), (2**32, 2**33)):
        assert engine._uniform(seed, position) == draw.uniform([seed], [position]).item()


@pytest.fixture(scope="module")
def bundled(engine):
    """Requests to a bundled model, and their answers in large blocks."""
    params = [{"temperature": 0.7 * (i % 2), "seed": i, "max_tokens": 20} for i in range(len(TEXTS))]
    asked = list(zip(TEXTS, params, strict=True))
    return asked, answers_of_file(engine, BUNDLED / "tiny-qwen3", asked, **ROOMY)[0]


@pytest.mark.parametrize(
    "settings",
    [
        {"num_drafts": 3, "num_blocks": 20, "chunk_size": 4, "max_num_batched_tokens": 8},
        {"enable_prefix_caching": False},
        {"block_size": 7, "max_num_seqs": 1},
    ],
    ids=str,
)
def test_no_setting_changes_an_answer(engine, bundled, settings):
    asked, expected = bundled
    assert answers_of_file(engine, BUNDLED / "tiny-qwen3", asked, **settings)[0] == expected


@pytest.mark.parametrize("name", ["tiny-gpt2", "tiny-qwen3"])
def test_texts_of_the_bundled_models_are_the_packages(engine, name):
    assert answers_of_file(engine, BUNDLED / name, STORIES)[0] == answers_of_package(BUNDLED / name, STORIES)


def test_the_defaults_are_the_packages(engine):
    names = [field.name for field in dataclasses.fields(engine.SamplingParams)]
    ours, theirs = (
        {name: getattr(params, name) or None for name in names} for params in (engine.SamplingParams(), SamplingParams())
    )
    assert ours == theirs
    assert len(names) >= 14
    text = FILE.read_text(encoding="utf-8")
    assert [name for name in names if f".{name}" not in text] == [], "what the file takes and does not read"


def test_a_stream_yields_the_text_in_pieces_and_an_early_end_frees_the_blocks(engine):
    llm, params = engine.LLM(num_blocks=32), engine.SamplingParams(seed=3, max_tokens=40, stop=["zzz"])
    [output] = llm.generate([TEXTS[0]], params)
    pieces = list(llm.stream(TEXTS[0], params))
    assert "".join(pieces) == output.outputs[0].text
    assert len(pieces) > 10
    assert len(list(itertools.islice(llm.stream(TEXTS[0], params), 3))) == 3
    stream = llm.stream(TEXTS[0], params)
    begin = next(stream)
    llm.generate(TEXTS[1], params)  # one prompt without a list, in whose steps the stream's are computed too
    assert begin + "".join(stream) == output.outputs[0].text
    assert_nothing_is_left(llm)


def test_an_aborted_request_ends_and_the_others_go_on(engine):
    llm = engine.LLM(num_blocks=32, max_num_seqs=2)
    params = engine.SamplingParams(temperature=0, max_tokens=12)
    [expected] = llm.generate([TEXTS[1]], params)
    kept, running, waiting = (llm.add_request(text, params) for text in (TEXTS[1], TEXTS[0], TEXTS[3]))
    llm.step()
    llm.abort(running)
    llm.abort(waiting)
    while llm.answers:
        llm.step()
    assert [request.output().outputs[0].finish_reason for request in (kept, running, waiting)] == ["length", "abort", "abort"]
    assert kept.output().outputs[0].token_ids == expected.outputs[0].token_ids
    assert_nothing_is_left(llm)


def test_a_value_out_of_its_range_is_refused(engine):
    for params in (
        {"top_p": 0}, {"top_p": 2}, {"temperature": -1}, {"n": 0}, {"max_tokens": 0}, {"stop": [""]}, {"min_p": 2},
        {"seed": 1.5},
    ):  # fmt: skip
        with pytest.raises(ValueError, match=next(iter(params))):
            engine.SamplingParams(**params)


def test_a_prompt_that_cannot_run_is_refused(engine):
    llm = engine.LLM(num_blocks=2, block_size=4)
    for prompt in ([], [5] * 8, [-1], [10**6], ["a text"]):
        with pytest.raises(ValueError, match="token"):
            llm.generate([[5], prompt], engine.SamplingParams())
    assert_nothing_is_left(llm)  # of the prompts before
    with pytest.raises(ValueError, match="token ids must be"):
        llm.add_request([5], engine.SamplingParams(stop_token_ids=[10**6]))
    for params in ({}, {"max_tokens": None}):
        [output] = llm.generate([[5] * 7], engine.SamplingParams(ignore_eos=True, **params))
        assert len(output.outputs[0].token_ids) == 1
