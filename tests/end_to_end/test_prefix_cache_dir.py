"""Prefixes that outlive the process: the bits of a prefix hit, what must not be found, refusals."""

import gc
import logging
import shutil

import pytest
from safetensors.torch import load_file, save_file

from nanoinfer import LLM, SamplingParams
from nanoinfer.errors import InvalidValueError
from nanoinfer.features.adapters.request import LoRARequest
from tests.helpers import forked, tiny_models
from tests.helpers.lora_adapters import linear_shapes, write_adapter

pytestmark = pytest.mark.slow

SETTINGS = {"kv_cache_memory": 2**21, "block_size": 4, "dtype": "float32", "seed": 0}
PROMPT = [i * i % 60 for i in range(1, 42)]  # ten blocks of 4, and a token
OTHER = [i * i * i % 60 for i in range(1, 42)]
PARAMS = SamplingParams(temperature=0, max_tokens=8, logprobs=1, detokenize=False)


@pytest.fixture(scope="module", autouse=True)
def forked_ranks():
    with forked.ranks():
        yield


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """Two checkpoints with different weights."""
    folder = tmp_path_factory.mktemp("qwen3")
    return [tiny_models.save("qwen3", folder / str(seed), seed=seed) for seed in (1, 2)]


@pytest.fixture
def load(paths, tmp_path):
    def load(path=paths[0], **settings):
        return LLM(path, **SETTINGS | {"prefix_cache_dir": tmp_path / "kv"} | settings)

    return load


def answer(llm, prompt=PROMPT, **prompt_fields):
    """The answer with its log-probabilities, and how many tokens of the prompt were found."""
    [output] = llm.generate({"prompt_token_ids": prompt} | prompt_fields, PARAMS, use_tqdm=False)
    return output.outputs, output.num_cached_tokens


TWO_RANKS = [1, pytest.param(2, marks=pytest.mark.long)]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        pytest.param({"dtype": "bfloat16", "enforce_eager": True}, marks=pytest.mark.long),
        {"kv_cache_dtype": "int8", "attention_backend": "reference", "chunk_size": 16},
        {"batch_invariant": True, "speculative_config": {"method": "ngram"}},
        pytest.param({"dtype": "bfloat16", "tensor_parallel_size": 2}, marks=pytest.mark.long),
        pytest.param({"enforce_eager": True, "tensor_parallel_size": 2}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_a_restarted_engine_gives_the_bits_of_a_prefix_hit(load, settings):
    with load(**settings) as llm:
        cold, num_cold = answer(llm)
        warm, num_warm = answer(llm)
    with load(**settings) as llm:
        again, num_again = answer(llm)
        assert answer(llm)[1] == 40
        counts = llm.engine.block_manager.store.counts
    assert (num_cold, num_warm, num_again) == (0, 40, 40)
    assert again == warm
    assert counts["external_prefix_cache_hits"] == 40  # once: then they are in memory
    if "batch_invariant" in settings:
        assert again == cold


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_blocks_that_were_evicted_are_found_again_by_as_many_ranks(load, num_ranks):
    block_bytes = 2 * 2 * 4 * 2 * 16 * 4
    settings = {"kv_cache_memory": 14 * block_bytes // num_ranks, "tensor_parallel_size": num_ranks}
    with load(**settings) as llm:
        answer(llm)
        expected = answer(llm)
        assert answer(llm, OTHER)[1] == 0  # it takes the blocks
        assert answer(llm) == expected
        other = answer(llm, OTHER)
    with load(**settings) as llm:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in [PROMPT, OTHER] * 3], PARAMS, use_tqdm=False)
    assert [(one.outputs, one.num_cached_tokens) for one in outputs] == [expected, other] * 3
    if num_ranks == 2:  # the other way round is in the next test
        with load() as llm:
            assert answer(llm)[1] == 0


@pytest.fixture(scope="module")
def filled(paths, tmp_path_factory):
    """A folder with the prefixes of an engine."""
    folder = tmp_path_factory.mktemp("filled") / "kv"
    for num_found in (0, 40):
        with LLM(paths[0], **SETTINGS, prefix_cache_dir=folder) as llm:
            assert answer(llm)[1] == num_found
    return folder


@pytest.mark.parametrize(
    "other",
    [
        {"dtype": "bfloat16"}, {"kv_cache_dtype": "int8", "attention_backend": "reference"}, {"attention_backend": "reference"},
        {"block_size": 8}, {"chunk_size": 8}, {"batch_invariant": True}, {"enforce_eager": True}, {"tensor_parallel_size": 2},
    ],
    ids=str,
)  # fmt: skip
def test_nothing_is_found_by_an_engine_that_would_compute_other_bits(load, filled, other):
    with load(**other, prefix_cache_dir=filled) as llm:
        assert answer(llm)[1] == 0


def test_one_changed_number_in_the_weights_is_another_model(load, paths):
    with load() as llm:
        answer(llm)
    with load() as llm:
        expected = answer(llm)
        tensors = load_file(paths[0] / "model.safetensors")
        name = next(name for name in tensors if name.endswith("up_proj.weight"))
        tensors[name][0, 0] += 1
        llm.update_weights([(name, tensors[name])])
        assert [answer(llm)[1] for _ in range(2)] == [0, 40]
        changed = answer(llm)
    with load() as llm:  # nothing that the new weights have computed was kept
        assert answer(llm) == expected != changed
    assert expected[1] == 40


@pytest.mark.parametrize(
    "settings", [{}, {"quantization": "int8", "dtype": "bfloat16", "enforce_eager": True}, {"tensor_parallel_size": 2}], ids=str
)
def test_weights_behind_the_last_keys_count_too(load, tmp_path, settings):
    """No key or value of a probe shows them. Of two ranks, only the second one has these."""
    path = tiny_models.save("qwen3", tmp_path / "model", hidden_size=64, intermediate_size=96)
    with load(path, **settings) as llm:
        answer(llm)
    other = shutil.copytree(path, tmp_path / "other")
    tensors = load_file(other / "model.safetensors")
    tensors[max(name for name in tensors if name.endswith("down_proj.weight"))][:, -1] *= 2
    save_file(tensors, other / "model.safetensors")
    for folder, num_found in ((other, 0), (path, 40)):
        with load(folder, **settings) as llm:
            assert answer(llm)[1] == num_found


def test_an_adapter_finds_its_own_prefixes_over_a_restart(load, paths, tmp_path):
    shapes, requests = linear_shapes(paths[0]), []
    for seed in (1, 2):
        write_adapter(tmp_path / str(seed), shapes, seed=seed)
        requests.append(LoRARequest(str(seed), seed, str(tmp_path / str(seed))))

    def num_found(request):
        with load(enable_lora=True) as llm:
            [output] = llm.generate({"prompt_token_ids": PROMPT}, PARAMS, use_tqdm=False, lora_request=request)
        return output.num_cached_tokens

    first, second = requests
    assert [num_found(request) for request in (first, second, None, first)] == [0, 0, 0, 40]


@pytest.mark.parametrize("num_ranks", TWO_RANKS)
def test_an_llm_that_is_dropped_keeps_its_prefixes(load, num_ranks):
    llm = load(tensor_parallel_size=num_ranks)
    expected = [answer(llm) for _ in range(2)][1]
    del llm
    gc.collect()
    with load(tensor_parallel_size=num_ranks) as llm:
        assert answer(llm) == expected


@pytest.mark.parametrize("num_ranks", TWO_RANKS)
def test_corrupted_files_are_computed_again(load, tmp_path, caplog, num_ranks):
    """By all ranks, also if only the part of one of them is corrupted."""
    settings = {"tensor_parallel_size": num_ranks}
    with load(**settings) as llm:
        expected, _ = answer(llm)
        third = llm.engine.block_manager.match_prefix(PROMPT)[2][0]
    path = tmp_path / "kv" / f"{third.hex()}00.kv"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with load(**settings) as llm:
        found, num_found = answer(llm)
        assert (found[0].token_ids, num_found) == (expected[0].token_ids, 8)
    assert sum("is corrupted" in record.message for record in caplog.records if record.levelno == logging.WARNING) == 1
    for other in (tmp_path / "kv").glob("*.kv"):
        other.write_bytes(b"")
    for num_found in (0, 40):
        with load(**settings) as llm:
            assert answer(llm)[1] == num_found


def test_a_reset_and_sleep_leave_the_folder(load):
    with load() as llm:
        answer(llm)
        llm.reset_prefix_cache()
        assert answer(llm)[1] == 0
        answer(llm, OTHER)
    with load() as llm:
        assert [answer(llm, OTHER)[1], answer(llm)[1]] == [0, 0]


@pytest.mark.parametrize("settings", [{"prefix_cache_dir": 5}, {"enable_prefix_caching": False}], ids=str)
def test_a_folder_that_cannot_be_one_and_one_without_prefix_caching_are_refused(load, settings):
    with pytest.raises(InvalidValueError, match="prefix_cache_dir must be a folder, with enable_prefix_caching, got"):
        load(**settings)


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        pytest.param("mistral_window", {}, marks=pytest.mark.long),
        ("gemma3_window", {"kv_cache_memory": 2**17}),
        ("qwen3_5", {"kv_cache_memory": 2**17}),
        pytest.param("qwen3_5", {}, marks=pytest.mark.long),
        pytest.param("gemma3_window", {"kv_cache_memory": 2**16, "tensor_parallel_size": 2}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_windows_and_states_give_the_bits_of_a_prefix_hit_after_a_restart(load, path_of, family, settings):
    with load(path_of(family), **settings) as llm:
        _, num_cold = answer(llm)
        warm, num_warm = answer(llm)
        answer(llm, OTHER)
    with load(path_of(family), **settings) as llm:
        again, num_again = answer(llm)
        assert answer(llm)[1] == num_warm
        counts = llm.engine.block_manager.store.counts
        tiny_models.assert_nothing_is_left(llm)
    assert num_cold == 0 < num_warm == num_again >= counts["external_prefix_cache_hits"] > 0  # windows need the last ones only
    assert again == warm


@pytest.mark.parametrize(("family", "memory"), [("gemma3_window", 2**16), ("qwen3_5", 2**17)])
def test_windows_and_states_that_were_evicted_are_found_again(load, path_of, family, memory):
    with LLM(path_of(family), **SETTINGS) as llm:
        answer(llm)
        expected = answer(llm)
    with load(path_of(family), kv_cache_memory=memory, max_num_seqs=1) as llm:
        for prompt in (PROMPT, OTHER, OTHER[::-1]):
            assert answer(llm, prompt)[1] == 0
        assert answer(llm) == expected
        assert llm.engine.block_manager.store.counts["external_prefix_cache_hits"] > 0
