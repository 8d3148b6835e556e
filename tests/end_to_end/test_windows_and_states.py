"""Layers with sliding windows, whose old blocks are freed while a sequence runs, and layers that keep a state.

The tokens are transformers' however prompts are cut, cached, preempted and drafted. test_invariance.py compares the bits.
"""

import functools
import json
import random
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from nanoinfer import LLM, BeamSearchParams, SamplingParams
from nanoinfer.attention.reference import ReferenceBackend
from nanoinfer.errors import CheckpointError, InvalidValueError, UnsupportedError, WeightsError
from nanoinfer.features.hybrid.sizes import HybridSizes
from nanoinfer.loading.checkpoint import Checkpoint
from nanoinfer.loading.config_json import read_config
from nanoinfer.loading.loader import load_model
from nanoinfer.models import registry
from nanoinfer.models.qwen import QwenForCausalLM
from nanoinfer.models.windows import WindowedAttention
from tests.helpers import tiny_models

WINDOW, NUM_NEW = 24, 30
MEMORY = 2**24
SIZES = {"dtype": "float32", "block_size": 4, "chunk_size": 16}  # chunks shorter than the window
PARAMS = SamplingParams(temperature=0, max_tokens=NUM_NEW, logprobs=0, detokenize=False)
PROMPTS = [tiny_models.random_ids(random.Random(length), length) for length in (1, 7, WINDOW - 1, WINDOW + 9, 4 * WINDOW + 3)]
NGRAM = {"method": "ngram", "prompt_lookup_min": 1, "adaptive": False}
WAYS = {
    "few blocks": {},
    "kernels": {},
    "eager": {"enforce_eager": True},
    "reference": {"attention_backend": "reference"},
    "drafts": {"speculative_config": NGRAM},
}
FAMILIES = {  # and the ways that the tests take by default. All take few blocks
    "mistral_window": [],
    "qwen3_window": ["drafts"],
    "gemma3_window": ["kernels", "eager", "reference"],
    "gpt_oss_window": ["kernels", "reference"],
    "qwen3_5": ["kernels", "eager", "drafts"],
    "qwen3_5_moe": [],
    "qwen3_next": ["kernels"],
}
ONE_OF_EACH = ["gemma3_window", "qwen3_5"]


def marked_long(names, chosen):
    return [pytest.param(name, marks=[pytest.mark.long] * (name not in chosen)) for name in names]


@pytest.fixture(scope="module")
def check(path_of):
    """Compare answers with transformers: each token is the most likely one, or as likely, and has its log-probability."""
    oracle_of = functools.cache(lambda family: transformers.AutoModelForCausalLM.from_pretrained(path_of(family)).eval())

    @functools.cache
    def logprobs_of(family, ids):
        with torch.inference_mode():
            return oracle_of(family)(torch.tensor([ids])).logits[0].log_softmax(-1)

    def check(family, outputs):
        for prompt, output in zip(PROMPTS[-len(outputs) :], outputs, strict=True):
            [answer] = output.outputs
            assert len(answer.token_ids) == NUM_NEW
            logprobs = logprobs_of(family, (*prompt, *answer.token_ids))[len(prompt) - 1 : -1]
            expected = logprobs[range(NUM_NEW), answer.token_ids]
            torch.testing.assert_close(expected, logprobs.amax(-1), atol=2e-4, rtol=0)
            told = [entry[token].logprob for entry, token in zip(answer.logprobs, answer.token_ids, strict=True)]
            torch.testing.assert_close(torch.tensor(told), expected, atol=2e-4, rtol=0)

    return check


def generate(llm, prompts, params=PARAMS):
    return llm.generate(prompts, params, use_tqdm=False)


def tokens_of(outputs):
    return [[answer.token_ids for answer in output.outputs] for output in outputs]


def tight(path, **settings):
    return tiny_models.cramped(path, len(PROMPTS[-1]) + NUM_NEW, **SIZES | {"max_num_seqs": 4} | settings)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "way"),
    [
        pytest.param(family, way, marks=[pytest.mark.long] * (i > 0 and way not in chosen))
        for family, chosen in FAMILIES.items()
        for i, way in enumerate(WAYS)
    ],
)
def test_tokens_equal_transformers_alone_batched_chunked_preempted_drafted_and_after_a_prefix_hit(path_of, check, family, way):
    path, is_tight = path_of(family), way == "few blocks"
    llm = tight(path) if is_tight else LLM(path, kv_cache_memory=MEMORY, **SIZES, **WAYS[way])
    if way == "kernels":
        check(family, generate(llm, PROMPTS[-1:]))
        llm.reset_prefix_cache()
    for is_cached in (False, True):
        outputs = generate(llm, PROMPTS)
        check(family, outputs)
        num_cached = [(len(prompt) - 1) // 4 * 4 * is_cached for prompt in PROMPTS]  # up to the last whole block
        assert is_tight or [output.metrics.num_cached_tokens for output in outputs] == num_cached
    assert (sum(output.metrics.num_preemptions for output in outputs) > 0) == is_tight
    if way == "drafts":
        assert llm.engine.planner.counts.num_draft_tokens > llm.engine.planner.counts.num_accepted_tokens > 0
    tiny_models.assert_nothing_is_left(llm)


@pytest.mark.slow
@pytest.mark.parametrize("family", marked_long(FAMILIES, ONE_OF_EACH))
def test_several_answers_and_beams_are_those_of_a_cache_with_room(path_of, family):
    path = path_of(family)
    params = SamplingParams(temperature=1.0, seed=1, n=3, max_tokens=NUM_NEW, detokenize=False)
    room, few = LLM(path, kv_cache_memory=MEMORY, enable_prefix_caching=False, **SIZES), tight(path)
    expected, *others = [tokens_of(generate(llm, PROMPTS, params)) for llm in (room, few, few)]
    assert others == [expected] * 2
    assert len({tuple(tokens) for tokens in expected[0]}) > 1
    prompt, oracle = PROMPTS[1], transformers.AutoModelForCausalLM.from_pretrained(path)  # three beams pass the window
    given = {"num_beams": 3, "num_return_sequences": 3, "do_sample": False, "max_new_tokens": 20}
    beams = oracle.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), **given)
    found = room.beam_search(prompt, BeamSearchParams(beam_width=3, max_tokens=20))[0].sequences
    assert [beam.tokens for beam in found] == beams.tolist()
    for llm in (room, few):
        tiny_models.assert_nothing_is_left(llm)


# ---- windows


def test_a_text_of_4000_tokens_runs_in_the_blocks_of_a_window_and_a_chunk(tmp_path):
    path = tiny_models.save("mistral_window", tmp_path, max_position_embeddings=4096, sliding_window=512)
    settings = {"block_size": 64, "chunk_size": 256}
    num_blocks = (512 + 256) // 64 + 1
    probe = LLM(path, kv_cache_memory=MEMORY, **settings)
    llm = LLM(path, kv_cache_memory=num_blocks * probe.info.num_cache_bytes // probe.info.num_blocks, **settings)
    manager = llm.engine.block_manager
    request = llm.engine.add_request(tiny_models.random_ids(random.Random(0), 4000 - NUM_NEW), PARAMS)
    [seq], most = request.sequences, 0
    while request.output is None:
        llm.engine.step()
        most = max(most, manager.num_blocks - manager.num_free_blocks)
        assert most * 64 <= 512 + 64 + 256
    assert (len(request.output.outputs[0].token_ids), manager.num_blocks) == (NUM_NEW, num_blocks)
    assert len(seq.token_ids) == 4000


@pytest.mark.slow
def test_a_model_file_that_slides_without_saying_so_in_its_config_is_computed_as_it_is_written(tmp_path, monkeypatch):
    """Nothing is freed, and compiled layers have the windows of the file, of which one KV group may have several."""

    class Sliding(QwenForCausalLM):
        def __init__(self, config):
            super().__init__(config)
            for layer, window in zip(self.layers, (None, WINDOW), strict=True):
                layer.self_attn.__class__, layer.self_attn.window = WindowedAttention, window

    path = tiny_models.save("qwen3", tmp_path)
    full = tokens_of(generate(LLM(path, kv_cache_memory=MEMORY, **SIZES), PROMPTS))
    monkeypatch.setattr(registry, "_registered", {"Qwen3ForCausalLM": Sliding})
    compiled, eager = (LLM(path, kv_cache_memory=MEMORY, enforce_eager=eager, **SIZES) for eager in (False, True))
    assert compiled.info.windows == (None,)
    assert tokens_of(generate(compiled, PROMPTS)) == tokens_of(generate(eager, PROMPTS)) != full


@pytest.mark.slow
@pytest.mark.parametrize("family", marked_long([family for family in FAMILIES if family.endswith("window")], ["gemma3_window"]))
def test_a_draft_model_with_windows_goes_back_after_a_rejected_draft(path_of, check, family, tmp_path):
    """Windows free blocks up to the verified tokens only. Drafts of the model itself are right, those of another are not."""
    for model, is_right in ((path_of(family), True), (tiny_models.save(family, tmp_path, seed=1), False)):
        draft = {"method": "draft_model", "model": str(model), "adaptive": False, "num_speculative_tokens": 5}
        llm = LLM(path_of(family), kv_cache_memory=MEMORY, speculative_config=draft, **SIZES)
        check(family, generate(llm, PROMPTS))
        metrics, manager = llm.engine.planner.counts, llm.engine.planner.proposer.block_manager
        assert metrics.num_draft_tokens > 20
        assert (metrics.num_accepted_tokens > 0.8 * metrics.num_draft_tokens) == is_right
        assert manager.num_free_blocks == manager.num_blocks


def test_a_backend_without_windows_is_refused_by_name(path_of, monkeypatch):
    monkeypatch.setattr(ReferenceBackend, "supports_windows", False)
    with pytest.raises(UnsupportedError, match="'reference' cannot be used: it does not support sliding windows"):
        LLM(path_of("mistral_window"), kv_cache_memory=MEMORY, attention_backend="reference")


# ---- states


@pytest.fixture
def path(path_of):
    return path_of("qwen3_5")


@pytest.mark.slow
def test_answers_are_the_same_where_slots_run_out(path):
    state = HybridSizes.of(read_config(Checkpoint.open(str(path)))[1]).bytes_per_state
    room, few = (LLM(path, kv_cache_memory=memory, **SIZES) for memory in (MEMORY, 5 * state))
    assert len(few.engine.block_manager.state_slots.pool.contents) == 2
    prompts = [PROMPTS[0], PROMPTS[1][:5], PROMPTS[0]]
    several = SamplingParams(temperature=1.0, seed=4, max_tokens=9, n=3, detokenize=False)
    for params in (SamplingParams(temperature=0, max_tokens=9, detokenize=False), several):
        assert tokens_of(generate(few, prompts, params)) == tokens_of(generate(room, prompts, params))
    tiny_models.assert_nothing_is_left(few)


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
    ("settings", "error", "words"),
    [
        ({"kv_cache_memory": 5000}, InvalidValueError, "must hold the state of a sequence"),
        ({"speculative_config": {"method": "draft_model", "model": "itself"}}, UnsupportedError, "keeps states"),
    ],
    ids=["memory", "draft model"],
)
def test_what_states_do_not_allow_is_refused(path, settings, error, words):
    if draft := settings.get("speculative_config"):
        settings = {"speculative_config": draft | {"model": str(path)}}
    with pytest.raises(error, match=words):
        LLM(path, **{"kv_cache_memory": MEMORY} | settings, **SIZES)


LINEAR, FULL = "linear_attention", "full_attention"


@pytest.mark.parametrize(
    ("more", "error", "words"),
    [
        ({"layer_types": [LINEAR] * 3}, CheckpointError, "full_attention at least once"),
        ({"layer_types": [FULL]}, CheckpointError, "for each of 3 layers"),
        ({"layer_types": [LINEAR, "sliding_attention", FULL]}, CheckpointError, "linear_attention, full_attention for"),
        ({"linear_num_value_heads": 3}, CheckpointError, "multiple of linear_num_key_heads"),
        ({"linear_key_head_dim": 0}, CheckpointError, "linear_key_head_dim"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.2}}, CheckpointError, "even part of 16"),
        ({"attention_bias": True}, UnsupportedError, "attention_bias"),
        ({"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": {}}, UnsupportedError, "text model alone"),
    ],
    ids=str,
)
def test_a_config_that_is_wrong_or_not_supported_is_refused(path, tmp_path, more, error, words):
    with pytest.raises(error, match=words):
        read_config(changed(path, tmp_path / "copy", **more))
