"""one_file/engine.py answers as the package does, however it runs: the same tokens, texts and reasons to end."""

import dataclasses
import itertools

import pytest
import torch

from nanoinfer import SamplingParams
from nanoinfer.loading.folders import BUNDLED
from nanoinfer.sampling import draw
from tests.one_file.compare import FAMILIES, answers_of_file, answers_of_package, assert_nothing_is_left, requests, save
from tests.one_file.module import FILE, load

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


@pytest.mark.parametrize("family", FAMILIES)
def test_mixed_requests_have_the_answers_of_the_package(engine, family, tmp_path):
    """With few blocks and small chunks. Random parameters, several answers, stop strings: compare.py asks more of them."""
    folder, asked = save(family, tmp_path), requests(20, seed=3)
    got, counts = answers_of_file(engine, folder, asked)
    assert got == answers_of_package(folder, asked)
    assert counts["preemptions"] > 2
    assert counts["blocks found"] > 20


def test_tokens_are_drawn_as_in_the_package(engine):
    check_draws(engine)


def check_draws(engine):
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
    """A bundled model, requests and their answers in large blocks."""
    params = [{"temperature": 0.7 * (i % 2), "seed": i, "max_tokens": 30} for i in range(len(TEXTS))]
    asked = list(zip(TEXTS, params, strict=True))
    return asked, answers_of_file(engine, BUNDLED / "tiny-qwen3", asked, **ROOMY)[0]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"num_drafts": 3},
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


def test_one_prompt_may_stand_without_a_list(engine):
    llm = engine.LLM()
    assert [output.prompt for output in llm.generate("Once upon a time", engine.SamplingParams(max_tokens=1))] == [TEXTS[0]]


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
    assert_nothing_is_left(llm)


def test_a_stream_yields_what_others_have_computed_while_it_waited(engine):
    llm, params = engine.LLM(num_blocks=32), engine.SamplingParams(seed=3, max_tokens=20)
    [expected, _] = llm.generate(TEXTS[:2], params)
    stream = llm.stream(TEXTS[0], params)
    begin = next(stream)
    llm.generate([TEXTS[1]], params)
    assert begin + "".join(stream) == expected.outputs[0].text


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


@pytest.mark.parametrize(
    "params",
    [{"top_p": 0}, {"top_p": 2}, {"temperature": -1}, {"n": 0}, {"max_tokens": 0}, {"stop": [""]}, {"min_p": 2}, {"seed": 1.5}],
    ids=str,
)
def test_a_value_out_of_its_range_is_refused(engine, params):
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
