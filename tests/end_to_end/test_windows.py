"""Models with sliding windows, whose old blocks are freed while a sequence runs: the tokens are transformers' on every way."""

import random

import pytest
import torch
import transformers

from nanoinfer import LLM, BeamSearchParams, SamplingParams
from nanoinfer.errors import UnsupportedError
from nanoinfer.models import registry
from nanoinfer.models.qwen import QwenForCausalLM
from nanoinfer.models.windows import WindowedAttention
from tests.helpers import tiny_models

FAMILIES = [family for family in tiny_models.FAMILIES if family.endswith("_window")]
# gpt-oss has experts that no kernel computes. Its tokens are compared with transformers' by default.
LESS_BY_DEFAULT = pytest.mark.parametrize(
    "path",
    [pytest.param(family, marks=[pytest.mark.long] * (family == "gpt_oss_window")) for family in FAMILIES],
    indirect=True,
)
WINDOW, NUM_NEW = 24, 40
PARAMS = SamplingParams(temperature=0, max_tokens=NUM_NEW, logprobs=0, detokenize=False)
SIZES = {"block_size": 4, "chunk_size": 16}  # chunks shorter than the window


def ids(rng, length):
    return [rng.randrange(tiny_models.VOCAB_SIZE) for _ in range(length)]


PROMPTS = [ids(random.Random(length), length) for length in (4 * WINDOW, 1, 7, WINDOW - 1, WINDOW + 9, 4 * WINDOW + 3)]


@pytest.fixture(scope="module", params=FAMILIES)
def path(request, tmp_path_factory):
    return tiny_models.save(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def expected(path):
    """transformers' greedy tokens, and the log-probability of each."""
    oracle = transformers.AutoModelForCausalLM.from_pretrained(path).eval()
    answers = []
    for prompt in PROMPTS:
        with torch.inference_mode():
            tokens = oracle.generate(
                torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), do_sample=False, max_new_tokens=NUM_NEW
            )[0]
            logprobs = oracle(tokens[None]).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        top_two = logprobs.topk(2).values
        assert (top_two[:, 0] - top_two[:, 1]).min() > 1e-5  # else a tie, and either token would be right
        answers.append((tokens[len(prompt) :].tolist(), top_two[:, 0]))
    return answers


def check(outputs, expected):
    for output, (tokens, logprobs) in zip(outputs, expected, strict=True):
        answer = output.outputs[0]
        assert answer.token_ids == tokens
        told = [entry[token].logprob for entry, token in zip(answer.logprobs, tokens, strict=True)]
        torch.testing.assert_close(torch.tensor(told), logprobs, atol=1e-4, rtol=0)


def tight(path, **settings):
    """An engine with as few blocks as the longest sequence needs, and some more: others are preempted."""
    probe = LLM(path, kv_cache_memory=2**24, **settings)
    num_blocks = probe.engine.block_manager.num_blocks_for(4 * WINDOW + 3 + NUM_NEW) + 2
    return LLM(path, kv_cache_memory=num_blocks * probe.info.num_cache_bytes // probe.info.num_blocks, **settings)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["kernels", "eager", "reference"])
def test_tokens_equal_transformers_alone_batched_chunked_and_behind_a_prefix_hit(path, expected, way):
    more = {"kernels": {}, "eager": {"enforce_eager": True}, "reference": {"attention_backend": "reference"}}[way]
    llm = LLM(path, kv_cache_memory=2**24, **SIZES, **more)
    check(llm.generate(PROMPTS[:1], PARAMS, use_tqdm=False), expected[:1])
    check(llm.generate(PROMPTS, PARAMS, use_tqdm=False), expected)
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    check(outputs, expected)
    assert [output.metrics.num_cached_tokens for output in outputs] == [(len(prompt) - 1) // 4 * 4 for prompt in PROMPTS]
    tiny_models.assert_nothing_is_left(llm)


@pytest.mark.slow
def test_tokens_equal_transformers_when_sequences_are_preempted(path, expected):
    llm = tight(path, **SIZES)
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    check(outputs, expected)
    assert sum(output.metrics.num_preemptions for output in outputs) > 0
    tiny_models.assert_nothing_is_left(llm)


@pytest.mark.slow
def test_tokens_equal_transformers_with_ngram_drafts(path, expected):
    drafts = {"method": "ngram", "prompt_lookup_min": 1, "adaptive": False}
    llm = LLM(path, kv_cache_memory=2**24, speculative_config=drafts, **SIZES)
    check(llm.generate(PROMPTS, PARAMS, use_tqdm=False), expected)
    metrics = llm.engine.planner.counts
    assert metrics.num_draft_tokens > metrics.num_accepted_tokens  # some were rejected
    tiny_models.assert_nothing_is_left(llm)


@LESS_BY_DEFAULT
@pytest.mark.slow
def test_several_answers_and_beams_are_those_of_a_cache_with_room(path):
    params = SamplingParams(temperature=1.0, seed=1, n=3, max_tokens=NUM_NEW, detokenize=False)
    beams = BeamSearchParams(beam_width=3, max_tokens=12)
    room, few = LLM(path, kv_cache_memory=2**24, enable_prefix_caching=False, **SIZES), tight(path, **SIZES)
    answers = [
        [[answer.token_ids for answer in output.outputs] for output in llm.generate(PROMPTS, params, use_tqdm=False)]
        for llm in (room, few, few)
    ]
    assert answers[0] == answers[1] == answers[2]
    assert len({tuple(tokens) for tokens in answers[0][0]}) > 1
    prompt = PROMPTS[2]  # of 7 tokens: three beams pass the window of a longer one
    expected = transformers.AutoModelForCausalLM.from_pretrained(path).generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), num_beams=3, do_sample=False, max_new_tokens=12
    )
    assert room.beam_search(prompt, beams)[0].sequences[0].tokens == expected[0].tolist()
    for llm in (room, few):
        tiny_models.assert_nothing_is_left(llm)


@LESS_BY_DEFAULT
@pytest.mark.slow
def test_batch_invariant_gives_the_same_bits_alone_together_behind_hits_and_preempted(path):
    settings = SIZES | {"batch_invariant": True}
    rng = random.Random(5)
    shared = ids(rng, 50)
    prompts = [shared[: rng.randrange(51)] + ids(rng, rng.randrange(1, 60)) for _ in range(8)]
    params = SamplingParams(temperature=1.0, seed=2, max_tokens=20, logprobs=2, detokenize=False)

    def answers(llm, prompts):
        return [(one.outputs[0].token_ids, one.outputs[0].logprobs) for one in llm.generate(prompts, params, use_tqdm=False)]

    plain = LLM(path, kv_cache_memory=2**24, enable_prefix_caching=False, **settings)
    alone = [answers(plain, [prompt])[0] for prompt in prompts]
    assert answers(plain, prompts) == alone
    for llm in (LLM(path, kv_cache_memory=2**24, **settings), tight(path, **settings)):
        assert answers(llm, prompts) == alone
        assert answers(llm, prompts[::-1]) == alone[::-1]
        tiny_models.assert_nothing_is_left(llm)


def test_a_text_of_4000_tokens_runs_in_the_blocks_of_a_window_and_a_chunk(tmp_path):
    path = tiny_models.save("mistral_window", tmp_path, max_position_embeddings=4096, sliding_window=512)
    settings = {"block_size": 64, "chunk_size": 256}
    num_blocks = (512 + 256) // 64 + 1
    probe = LLM(path, kv_cache_memory=2**24, **settings)
    llm = LLM(path, kv_cache_memory=num_blocks * probe.info.num_cache_bytes // probe.info.num_blocks, **settings)
    manager = llm.engine.block_manager
    request = llm.engine.add_request(ids(random.Random(0), 3960), PARAMS)
    [seq], most = request.sequences, 0
    while request.output is None:
        llm.engine.step()
        most = max(most, manager.num_blocks - manager.num_free_blocks)
        assert most * 64 <= 512 + 64 + 256
    assert (len(request.output.outputs[0].token_ids), manager.num_blocks) == (NUM_NEW, num_blocks)
    assert len(seq.token_ids) == 4000


@pytest.mark.slow
@pytest.mark.parametrize("windows", [(WINDOW, WINDOW), (None, WINDOW)], ids=str)
def test_a_model_file_that_slides_without_saying_so_in_its_config_is_computed_as_it_is_written(windows, tmp_path, monkeypatch):
    """Nothing is freed, and compiled layers have the windows of the file, of which one KV group may have several."""

    class Sliding(QwenForCausalLM):
        def __init__(self, config):
            super().__init__(config)
            for layer, window in zip(self.layers, windows, strict=True):
                layer.self_attn.__class__, layer.self_attn.window = WindowedAttention, window

    monkeypatch.setattr(registry, "_registered", {"Qwen3ForCausalLM": Sliding})
    path = tiny_models.save("qwen3", tmp_path)
    llm = LLM(path, kv_cache_memory=2**24, **SIZES)
    assert llm.info.windows == (None,)
    expected = LLM(path, kv_cache_memory=2**24, enforce_eager=True, **SIZES).generate(PROMPTS, PARAMS, use_tqdm=False)
    assert [one.outputs[0].token_ids for one in llm.generate(PROMPTS, PARAMS, use_tqdm=False)] == [
        one.outputs[0].token_ids for one in expected
    ]


@LESS_BY_DEFAULT
@pytest.mark.slow
def test_a_draft_model_with_windows_goes_back_after_a_rejected_draft(path, expected, request, tmp_path):
    """Windows free blocks up to the verified tokens only. Drafts of the model itself are right, those of another are not."""
    for model, is_right in ((path, True), (tiny_models.save(request.node.callspec.params["path"], tmp_path, seed=1), False)):
        draft = {"method": "draft_model", "model": str(model), "adaptive": False, "num_speculative_tokens": 5}
        llm = LLM(path, kv_cache_memory=2**24, speculative_config=draft, **SIZES)
        check(llm.generate(PROMPTS, PARAMS, use_tqdm=False), expected)
        metrics, manager = llm.engine.planner.counts, llm.engine.planner.proposer.block_manager
        assert metrics.num_draft_tokens > 20
        assert (metrics.num_accepted_tokens > 0.8 * metrics.num_draft_tokens) == is_right
        assert manager.num_free_blocks == manager.num_blocks


def test_a_backend_without_windows_is_refused_by_name(path, monkeypatch):
    from nanoinfer.attention.reference import ReferenceBackend

    monkeypatch.setattr(ReferenceBackend, "supports_windows", False)
    with pytest.raises(UnsupportedError, match="'reference' cannot be used: it does not support sliding windows"):
        LLM(path, kv_cache_memory=2**24, attention_backend="reference")
