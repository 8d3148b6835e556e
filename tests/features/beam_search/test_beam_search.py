"""Beam search: transformers' own beams are the oracle; blocks are shared, copied when written, and all free at the end."""

import itertools
import math

import pytest
import torch
import transformers

from nanoinfer import LLM, BeamSearchParams, NanoinferError, SamplingParams
from nanoinfer.errors import InvalidPromptError, InvalidTypeError, InvalidValueError, UnsupportedError
from nanoinfer.features.own_code.logits_processors import LogitsProcessor
from nanoinfer.sampling.sampler import STAGES
from tests.helpers import tiny_models

pytestmark = pytest.mark.slow

PROMPTS = [[5, 17, 3], [88, 2, 61, 40, 7, 19, 33], [9]]
MAX_TOKENS = 8


@pytest.fixture(scope="module")
def path(request, tmp_path_factory):
    """Qwen3 with one layer, unless a test is parametrised with a family."""
    family = getattr(request, "param", "qwen3")
    layers = {"n_layer": 1} if family == "gpt2" else {"num_hidden_layers": 1}
    return tiny_models.save(family, tmp_path_factory.mktemp(family), **layers)


@pytest.fixture(scope="module")
def oracle(path):
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def make(path, eos_token_ids=(), **settings):
    llm = LLM(path, dtype="float32", kv_cache_memory=2**22, block_size=4, **settings)
    llm.engine.eos_token_ids = frozenset(eos_token_ids)
    return llm


def assert_all_blocks_are_free(llm):
    assert llm.engine.block_manager.num_free_blocks == llm.engine.block_manager.num_blocks


def beams_there(model, prompt, width, eos_token_ids=(), max_tokens=MAX_TOKENS, **params):
    """(generated ids, score) of each of transformers' beams, best first."""
    config = {"num_beams": width, "num_return_sequences": width, "max_new_tokens": max_tokens, "do_sample": False}
    config |= {"eos_token_id": list(eos_token_ids) or None, "pad_token_id": 0, "return_dict_in_generate": True}
    found = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        generation_config=transformers.GenerationConfig(output_scores=True, **config, **params),
    )
    beams = []
    for row, score in zip(found.sequences.tolist(), found.sequences_scores.tolist(), strict=True):
        ids = row[len(prompt) :]
        end = next((i + 1 for i, token_id in enumerate(ids) if token_id in eos_token_ids), len(ids))
        beams.append((ids[:end], score))
    return beams


def assert_same(output, expected):
    assert [beam.token_ids for beam in output.sequences] == [ids for ids, _ in expected]
    assert [beam.score for beam in output.sequences] == pytest.approx([score for _, score in expected], abs=1e-4)


def likely_ends(model, prompt):
    """Ids that the search will meet early: the second and the fourth token of its best beam."""
    best = beams_there(model, prompt, 4)[0][0]
    return sorted({best[1], best[3]})


# Each value with each other one for one family, since the search sees nothing of a model but its log-probabilities.
GRID = [
    pytest.param("qwen3", width, penalty, stopping, marks=[pytest.mark.long] * ((w + p + s) % 3 > 0))
    for (w, width), (p, penalty), (s, stopping) in itertools.product(
        enumerate([2, 4, 7]), enumerate([0.0, 0.8, 2.0]), enumerate([False, True, "never"])
    )
]
OTHERS = [("gpt2", 4, 0.8, "never"), ("qwen2", 3, 1.0, False)]


@pytest.mark.parametrize(("path", "width", "length_penalty", "early_stopping"), GRID + OTHERS, indirect=["path"])
def test_beams_and_scores_are_those_of_transformers(path, oracle, width, length_penalty, early_stopping):
    """All prompts in one call here, one at a time there; with two EOS ids in reach."""
    ends = likely_ends(oracle, PROMPTS[0])
    llm = make(path, ends)
    options = {"length_penalty": length_penalty, "early_stopping": early_stopping}
    outputs = llm.beam_search(PROMPTS, BeamSearchParams(beam_width=width, max_tokens=MAX_TOKENS, **options))
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert_same(output, beams_there(oracle, prompt, width, ends, **options))
        for beam in output.sequences:
            assert beam.score == pytest.approx(beam.cumulative_logprob / len(beam.token_ids) ** length_penalty, abs=1e-5)
    if length_penalty == 0.0:  # what favours long answers may leave none that ended
        assert any(beam.finish_reason == "stop" for beam in outputs[0].sequences)
    assert_all_blocks_are_free(llm)


TIGHT = {
    "one at a time": {"max_num_seqs": 1},
    "in turns": {"max_num_seqs": 3},
    "chunks": {"max_num_seqs": 5, "chunk_size": 3, "max_num_batched_tokens": 4, "enable_prefix_caching": False},
}


@pytest.mark.parametrize("settings", TIGHT.values(), ids=TIGHT)
def test_chunks_and_fewer_sequences_at_a_time_than_beams_change_nothing(path, oracle, settings):
    llm = make(path, **settings)
    launch, most = llm.engine.executor.launch, []
    llm.engine.executor.launch = lambda plan, previous: most.append(len(plan.scheduled)) or launch(plan, previous)
    outputs = llm.beam_search(PROMPTS * 2, BeamSearchParams(beam_width=7, max_tokens=6))
    for prompt, output in zip(PROMPTS, outputs, strict=False):
        assert_same(output, beams_there(oracle, prompt, 7, max_tokens=6))
    for first, second in zip(outputs[:3], outputs[3:], strict=True):
        assert [beam.token_ids for beam in first.sequences] == [beam.token_ids for beam in second.sequences]
    assert max(most) == settings["max_num_seqs"]
    assert_all_blocks_are_free(llm)


def test_width_one_is_greedy(path):
    llm = make(path)
    beams = llm.beam_search(PROMPTS, BeamSearchParams(beam_width=1, max_tokens=MAX_TOKENS))
    greedy = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=MAX_TOKENS, detokenize=False), use_tqdm=False)
    assert [output.sequences[0].token_ids for output in beams] == [output.outputs[0].token_ids for output in greedy]


def test_wide_beams_find_what_trying_everything_finds(path, oracle):
    """Two tokens from 96 first ones: a beam as wide as the vocabulary misses nothing."""
    vocab_size = tiny_models.VOCAB_SIZE
    llm = make(path, max_num_seqs=vocab_size)
    [output] = llm.beam_search([PROMPTS[0]], BeamSearchParams(beam_width=vocab_size, max_tokens=2))
    with torch.inference_mode():
        first = oracle(torch.tensor([PROMPTS[0]])).logits[0, -1].log_softmax(-1)
        pairs = torch.tensor([[*PROMPTS[0], token_id] for token_id in range(vocab_size)])
        second = oracle(pairs).logits[:, -1].log_softmax(-1)
    totals = {(a, b): float(first[a] + second[a, b]) for a, b in itertools.product(range(vocab_size), repeat=2)}
    best = sorted(totals, key=totals.get, reverse=True)[:20]
    assert [tuple(beam.token_ids) for beam in output.sequences[:20]] == best
    assert [beam.cumulative_logprob for beam in output.sequences[:20]] == pytest.approx([totals[p] for p in best], abs=1e-4)


def test_beams_share_the_blocks_of_their_prompt(path):
    llm, prompt, width, most = make(path), list(range(1, 41)), 6, []  # 10 full blocks of 4
    launch, manager = llm.engine.executor.launch, llm.engine.block_manager
    llm.engine.executor.launch = lambda plan, previous: (
        most.append(manager.num_blocks - manager.num_free_blocks) or launch(plan, previous)
    )
    llm.beam_search([prompt], BeamSearchParams(beam_width=width, max_tokens=5))
    assert 10 < max(most) <= 10 + width * 2  # five tokens more are at most two blocks each; unshared it would be 6 * 12


def test_it_leaves_a_stream_that_is_running_alone(path):
    llm = make(path)
    params = SamplingParams(temperature=0, max_tokens=10, detokenize=False)
    expected = llm.generate([PROMPTS[0]], params, use_tqdm=False)[0].outputs[0].token_ids
    stream = llm.stream(PROMPTS[0], params)
    got = next(stream).token_ids
    llm.beam_search(PROMPTS, BeamSearchParams(beam_width=3, max_tokens=5))
    assert got + [token_id for delta in stream for token_id in delta.token_ids] == expected


def test_without_eos_every_beam_has_max_tokens(path, oracle):
    ends = likely_ends(oracle, PROMPTS[0])
    [output] = make(path, ends).beam_search([PROMPTS[0]], BeamSearchParams(beam_width=4, max_tokens=9, ignore_eos=True))
    assert [len(beam.token_ids) for beam in output.sequences] == [9] * 4
    assert {beam.finish_reason for beam in output.sequences} == {"length"}
    assert_same(output, beams_there(oracle, PROMPTS[0], 4, max_tokens=9))


def test_it_answers_in_text_with_the_bundled_model():
    llm = LLM(kv_cache_memory=8 * 2**20)
    [output] = llm.beam_search(["Once upon a time, there was a"], BeamSearchParams(beam_width=3, max_tokens=12))
    assert output.prompt == "Once upon a time, there was a"
    assert all(beam.text == llm.get_tokenizer().decode(beam.token_ids) for beam in output.sequences)
    assert len({beam.text for beam in output.sequences}) == 3


def test_a_prompt_that_leaves_no_room_has_an_error_beside_the_others_answers(path):
    llm = make(path, max_model_len=16)
    fits, too_long = llm.beam_search([[1, 2, 3], list(range(1, 17))], BeamSearchParams(beam_width=2, max_tokens=50))
    assert len(fits.sequences[0].token_ids) == 13  # up to the model's length
    assert too_long.sequences == []
    assert "maximum context length is 16 tokens. However, the prompt has 16 tokens" in too_long.error


def test_beams_that_cannot_fit_together_are_refused_before_any_work(path):
    small = LLM(path, dtype="float32", kv_cache_memory=40_000, block_size=4)
    blocks = small.engine.block_manager.num_blocks
    with pytest.raises(NanoinferError, match=rf"prompt 1: .* {blocks} are free; lower beam_width or max_tokens"):
        small.beam_search([[1], list(range(1, 20))], BeamSearchParams(beam_width=blocks - 1, max_tokens=3))
    assert small.engine.block_manager.num_free_blocks == blocks


def test_a_failure_in_the_middle_frees_every_block(path, monkeypatch):
    llm = make(path)
    forward, calls = llm.engine.executor.runner.forward, itertools.count(1)
    monkeypatch.setattr(llm.engine.executor.runner, "forward", lambda batch: 1 / 0 if next(calls) == 4 else forward(batch))
    with pytest.raises(ZeroDivisionError):
        llm.beam_search(PROMPTS, BeamSearchParams(beam_width=3))
    assert_all_blocks_are_free(llm)


def test_logits_that_are_not_finite_are_an_error_and_not_an_answer(path, monkeypatch):
    llm = make(path)
    model = llm.engine.executor.runner.model
    compute_logits, calls = model.compute_logits, itertools.count(1)
    spoil = {1: 1.0, 2: 1.0, 3: math.nan}
    monkeypatch.setattr(model, "compute_logits", lambda hidden: compute_logits(hidden) * spoil[next(calls)])
    prompt = PROMPTS[1] + PROMPTS[0]
    [output] = llm.beam_search([prompt], BeamSearchParams(beam_width=3))
    assert output.sequences == []
    assert "not finite" in output.error
    assert len(llm.engine.block_manager.match_prefix(prompt)) == 0
    assert_all_blocks_are_free(llm)


def test_wrong_arguments_are_refused_by_name(path):
    llm = make(path)
    with pytest.raises(InvalidTypeError, match="params must be BeamSearchParams, got SamplingParams"):
        llm.beam_search(PROMPTS, SamplingParams())
    with pytest.raises(InvalidPromptError, match="prompt 1: "):
        llm.beam_search([[1], [10**6]], BeamSearchParams(beam_width=2))
    with pytest.raises(InvalidValueError, match=r"length_penalty must be in \[-10, 10\]"):
        BeamSearchParams(beam_width=2, length_penalty=math.inf)
    with pytest.raises(InvalidValueError, match="early_stopping must be True, False or 'never', got 'always'"):
        BeamSearchParams(beam_width=2, early_stopping="always")


class Unchanging(LogitsProcessor):
    def __init__(self, vllm_config, device, is_pin_memory):
        pass

    apply = is_argmax_invariant = update_state = lambda self, *given: given[0] if given else True


def test_code_of_ones_own_that_a_search_would_not_call_is_refused(path):
    for name, given in (("stages", [*STAGES]), ("logits_processors", [Unchanging])):
        llm = make(path, **{name: given})
        with pytest.raises(UnsupportedError, match=rf"beam_search\(\) with {name} of your own is not supported.* use generate"):
            llm.beam_search(PROMPTS, BeamSearchParams(beam_width=2))
