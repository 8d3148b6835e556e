"""Models whose layers keep a state: transformers' tokens, and the same bits, however a prompt is cut, cached or preempted."""

import json
import random
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from nanoinfer import LLM, BeamSearchParams, SamplingParams
from nanoinfer.errors import CheckpointError, InvalidValueError, UnsupportedError, WeightsError
from nanoinfer.features.hybrid.sizes import HybridSizes
from nanoinfer.loading.checkpoint import Checkpoint
from nanoinfer.loading.config_json import read_config
from nanoinfer.loading.loader import load_model
from tests.helpers import tiny_models

FAMILIES = ["qwen3_5", "qwen3_5_moe", "qwen3_next"]
NUM_TOKENS = 40
SETTINGS = {"dtype": "float32", "block_size": 8, "chunk_size": 32, "kv_cache_memory": 2**22}
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, detokenize=False)


def ids(rng, length):
    return [rng.randrange(tiny_models.VOCAB_SIZE) for _ in range(length)]


PROMPTS = [ids(random.Random(length), length) for length in (1, 9, 45, 100)]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory):
    """A checkpoint, the greedy tokens of transformers and their log-probabilities."""
    path = tiny_models.save(request.param, tmp_path_factory.mktemp(request.param))
    oracle, tokens, logprobs = transformers.AutoModelForCausalLM.from_pretrained(path).eval(), [], []
    for prompt in PROMPTS:
        with torch.inference_mode():
            mask = torch.ones(1, len(prompt), dtype=torch.int64)
            given = {"attention_mask": mask, "do_sample": False, "max_new_tokens": NUM_TOKENS}
            text = oracle.generate(torch.tensor([prompt]), **given)[0]
            logits = oracle(text[None]).logits[0, len(prompt) - 1 : -1]
        top_two = logits.topk(2).values
        assert (top_two[:, 0] - top_two[:, 1]).min() > 1e-4  # else a tie, and either token would be right
        tokens.append(text[len(prompt) :].tolist())
        logprobs.append(logits.log_softmax(-1).amax(-1).tolist())
    return path, tokens, logprobs


def generate(llm, prompts, params=GREEDY):
    return llm.generate(prompts, params, use_tqdm=False)


def tokens_of(outputs):
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.slow
@pytest.mark.parametrize("eager", [False, True])
def test_greedy_tokens_equal_transformers_alone_together_and_after_a_prefix_hit(family, eager):
    path, tokens, logprobs = family
    llm = LLM(path, enforce_eager=eager, **SETTINGS)
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, logprobs=0, detokenize=False)
    together = generate(llm, PROMPTS, params)
    assert tokens_of(together) == tokens
    for output, expected in zip(together, logprobs, strict=True):
        told = [entry.logprob for position in output.outputs[0].logprobs for entry in position.values()]
        assert told == pytest.approx(expected, abs=1e-4)
    again = generate(llm, PROMPTS)
    assert tokens_of(again) == tokens
    assert [output.metrics.num_cached_tokens for output in again] == [0, 8, 40, 96]  # up to the last whole block
    llm.reset_prefix_cache()
    alone = generate(llm, PROMPTS[2])
    assert (tokens_of(alone), alone[0].metrics.num_cached_tokens) == (tokens[2:3], 0)
    tiny_models.assert_nothing_is_left(llm)


def sizes(path):
    """The bytes of a block and of a state."""
    config = read_config(Checkpoint.open(str(path)))[1]
    sizes = HybridSizes.of(config)
    return sizes.bytes_per_block(SETTINGS["block_size"], torch.float32), sizes.bytes_per_state


@pytest.mark.slow
def test_greedy_tokens_equal_transformers_where_blocks_run_out(family):
    path, tokens, _ = family
    block, state = sizes(path)
    llm = LLM(path, **SETTINGS | {"kv_cache_memory": 8 * state + 20 * block, "max_num_seqs": 4})
    for _ in range(2):
        outputs = generate(llm, PROMPTS)
        assert sum(output.metrics.num_preemptions for output in outputs) > 0
        assert tokens_of(outputs) == tokens
    tiny_models.assert_nothing_is_left(llm)


@pytest.mark.slow
def test_greedy_tokens_equal_transformers_where_slots_run_out(family):
    path, tokens, _ = family
    _, state = sizes(path)
    llm = LLM(path, **SETTINGS | {"kv_cache_memory": 5 * state})
    assert len(llm.engine.block_manager.state_slots.pool.contents) == 2
    params = SamplingParams(temperature=0, max_tokens=9, detokenize=False)
    prompts = [PROMPTS[0], PROMPTS[1][:5], PROMPTS[0]]
    expected = tokens_of(generate(LLM(path, **SETTINGS), prompts, params))
    assert expected[0] == tokens[0][:9]
    assert tokens_of(generate(llm, prompts, params)) == expected
    several = SamplingParams(temperature=1.0, seed=4, max_tokens=9, n=3, detokenize=False)
    [expected], [output] = generate(LLM(path, **SETTINGS), PROMPTS[0], several), generate(llm, PROMPTS[0], several)
    assert [one.token_ids for one in output.outputs] == [one.token_ids for one in expected.outputs]
    tiny_models.assert_nothing_is_left(llm)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tiny_models.save("qwen3_5", tmp_path_factory.mktemp("qwen3_5"))


REPEATED = [PROMPTS[2][:10] * 4, PROMPTS[3][:7] * 5]


@pytest.mark.slow
@pytest.mark.parametrize("eager", [False, True])
def test_drafts_change_no_token(path, eager):
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=NUM_TOKENS, detokenize=False)
    drafts = {"speculative_config": {"method": "ngram", "adaptive": False, "prompt_lookup_min": 1}}
    llm = LLM(path, enforce_eager=eager, **SETTINGS, **drafts)
    expected = tokens_of(generate(LLM(path, enforce_eager=eager, **SETTINGS), REPEATED, params))
    for _ in range(2):
        assert tokens_of(generate(llm, REPEATED, params)) == expected
    metrics = llm.engine.planner.counts
    assert 0 < metrics.num_accepted_tokens < metrics.num_draft_tokens  # some were right, and some states were dropped
    tiny_models.assert_nothing_is_left(llm)


def test_further_answers_and_beams_have_states_of_their_own(path):
    """Beams against a search without a prefix cache whose chunks are cut elsewhere, answers against requests alone."""
    llm = LLM(path, **SETTINGS)
    params = SamplingParams(temperature=1.0, n=3, seed=5, max_tokens=12, detokenize=False)
    [several] = generate(llm, PROMPTS[2], params)
    assert len({tuple(one.token_ids) for one in several.outputs}) == 3
    [again] = generate(llm, PROMPTS[2], params)
    assert [one.token_ids for one in again.outputs] == [one.token_ids for one in several.outputs]
    oracle = transformers.AutoModelForCausalLM.from_pretrained(path).eval()
    beams = llm.beam_search([{"prompt_token_ids": PROMPTS[2]}], BeamSearchParams(beam_width=3, max_tokens=10))[0]
    with torch.inference_mode():
        expected = oracle.generate(
            torch.tensor([PROMPTS[2]]), attention_mask=torch.ones(1, 45), do_sample=False, num_beams=3, max_new_tokens=10,
            num_return_sequences=3,
        )  # fmt: skip
    assert [beam.tokens for beam in beams.sequences] == expected.tolist()
    tiny_models.assert_nothing_is_left(llm)


def test_an_aborted_request_leaves_no_slot(path):
    llm = LLM(path, **SETTINGS)
    requests = [llm.engine.add_request({"prompt_token_ids": prompt}, GREEDY) for prompt in PROMPTS]
    for _ in range(3):
        llm.engine.step()
    llm.engine.abort(*(request.request_id for request in requests))
    tiny_models.assert_nothing_is_left(llm)


def log_probabilities(llm, prompts):
    params = SamplingParams(temperature=1.0, seed=7, max_tokens=20, logprobs=2, detokenize=False)
    return [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in generate(llm, prompts, params)]


@pytest.mark.slow
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_alone_together_after_a_hit_and_with_drafts_the_bits_are_the_same(path, dtype):
    settings = SETTINGS | {"dtype": dtype, "batch_invariant": True}
    llm = LLM(path, **settings)
    assert llm.batch_independent
    alone = [log_probabilities(llm, [prompt])[0] for prompt in PROMPTS]
    assert log_probabilities(llm, PROMPTS) == alone  # after a hit, and together
    assert log_probabilities(LLM(path, **settings | {"chunk_size": 24}), PROMPTS) == alone
    drafts = {"method": "ngram", "adaptive": False, "prompt_lookup_min": 1}
    assert log_probabilities(LLM(path, speculative_config=drafts, **settings), PROMPTS) == alone
    block, state = sizes(path)
    tight = LLM(path, **settings | {"kv_cache_memory": 8 * state + 20 * block, "max_num_seqs": 4})
    assert log_probabilities(tight, PROMPTS) == alone


@pytest.mark.slow
def test_without_batch_invariant_the_batch_still_changes_no_bit(path):
    llm = LLM(path, enable_prefix_caching=False, **SETTINGS)
    alone = [log_probabilities(llm, [prompt])[0] for prompt in PROMPTS]
    assert log_probabilities(llm, PROMPTS) == alone


@pytest.mark.slow
def test_with_plain_layers_the_bits_do_depend_on_a_hit(path):
    """The negative control: what the tests above compare can differ."""
    llm = LLM(path, enforce_eager=True, **SETTINGS)
    first = [log_probabilities(llm, [prompt])[0] for prompt in PROMPTS]
    assert [log_probabilities(llm, [prompt])[0] for prompt in PROMPTS] != first


def test_a_draft_model_with_states_is_refused(path):
    with pytest.raises(UnsupportedError, match="keeps states"):
        LLM(path, speculative_config={"method": "draft_model", "model": str(path)}, **SETTINGS)


def test_half_of_the_memory_must_hold_a_state(path):
    with pytest.raises(InvalidValueError, match="must hold the state of a sequence"):
        LLM(path, **SETTINGS | {"kv_cache_memory": 5000})


def changed(path, folder, **more):
    """A copy of a checkpoint with another config.json."""
    shutil.copytree(path, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | more))
    return Checkpoint.open(str(folder))


def test_the_weights_of_a_model_that_drafts_are_not_read(path, tmp_path):
    checkpoint = changed(path, tmp_path / "copy")
    tensors = load_file(checkpoint.path / "model.safetensors") | {"mtp.fc.weight": torch.ones(2, 2)}
    save_file(tensors, checkpoint.path / "model.safetensors", metadata={"format": "pt"})
    load_model(Checkpoint.open(str(checkpoint.path)))
    save_file(tensors | {"mtq.fc.weight": torch.ones(2, 2)}, checkpoint.path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(WeightsError, match="unexpected: mtq"):
        load_model(Checkpoint.open(str(checkpoint.path)))


@pytest.mark.parametrize(
    ("more", "error", "words"),
    [
        ({"layer_types": ["linear_attention"] * 3}, CheckpointError, "full_attention at least once"),
        ({"layer_types": ["full_attention"]}, CheckpointError, "for each of 3 layers"),
        (
            {"layer_types": ["linear_attention", "sliding_attention", "full_attention"]},
            CheckpointError,
            "linear_attention, full_attention for",
        ),
        ({"linear_num_value_heads": 3}, CheckpointError, "multiple of linear_num_key_heads"),
        ({"linear_key_head_dim": 0}, CheckpointError, "linear_key_head_dim"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.2}}, CheckpointError, "even part of 16"),
        ({"attention_bias": True}, UnsupportedError, "attention_bias"),
        ({"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": {}}, UnsupportedError, "text model alone"),
    ],
)
def test_a_config_that_is_wrong_or_not_supported_is_refused(path, tmp_path, more, error, words):
    with pytest.raises(error, match=words):
        read_config(changed(path, tmp_path / "copy", **more))
