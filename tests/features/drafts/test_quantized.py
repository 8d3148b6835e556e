"""Drafts of the model itself with rounded weights: the tokens stay those of plain decoding, and most drafts are right."""

from unittest.mock import Mock

import pytest

from nanoinfer import LLM, SamplingParams
from nanoinfer.errors import InvalidValueError, OutOfMemoryError, UnsupportedError
from nanoinfer.fast.cpu import native
from nanoinfer.features.adapters.request import LoRARequest
from nanoinfer.loading import devices
from nanoinfer.scheduling.step_plan import ScheduledSequence
from tests.helpers import tiny_models
from tests.helpers.lora_adapters import linear_shapes, write_adapter

pytestmark = pytest.mark.slow

WIDTHS = {"hidden_size": 64, "intermediate_size": 128}  # rounded weights need inputs in multiples of 32
FAMILIES = dict.fromkeys(("qwen3", "gemma3_window", "qwen3_5", "qwen3_moe"), WIDTHS) | {"gpt_oss_window": {"hidden_size": 64}}
BY_DEFAULT = {("qwen3", "float32"), ("gemma3_window", "bfloat16"), ("qwen3_5", "float32")}
SETTINGS = {"kv_cache_memory": 2**20, "block_size": 8, "seed": 0}
PREFIX = [i * i % 90 for i in range(40)]
PROMPTS = [[*PREFIX, 3, 1], [*PREFIX, 4], [7, 7, 7], [5], [*PREFIX[:30], 9]]


def drafting(bits=8, **more):
    return {"speculative_config": {"method": "quantized", "bits": bits, "adaptive": False, "num_speculative_tokens": 4} | more}


def params():
    """Greedy and seeded requests. A draft and its token are drawn with the same random number."""
    greedy = SamplingParams(temperature=0, max_tokens=20, logprobs=1, detokenize=False)
    seeded = SamplingParams(temperature=0.7, max_tokens=20, seed=3, n=2, detokenize=False)
    return [greedy, seeded, seeded, greedy, seeded]


def answers(llm, **more):
    outputs = llm.generate(PROMPTS, params(), use_tqdm=False, **more)
    tiny_models.assert_nothing_is_left(llm)
    return [one.token_ids for output in outputs for one in output.outputs]


def share_accepted(llm):
    metrics = llm.engine.planner.counts
    assert metrics.num_draft_tokens > 50
    return metrics.num_accepted_tokens / metrics.num_draft_tokens


@pytest.fixture(scope="module")
def path_of(tmp_path_factory):
    saved = {}

    def path(family):
        if family not in saved:
            saved[family] = tiny_models.save(family, tmp_path_factory.mktemp(family), **FAMILIES[family])
        return saved[family]

    return path


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        pytest.param(family, dtype, marks=[pytest.mark.long] * ((family, dtype) not in BY_DEFAULT))
        for family in FAMILIES
        for dtype in ("float32", "bfloat16")
    ],
)
def test_the_tokens_are_those_of_plain_decoding_and_most_drafts_are_right(family, dtype, path_of, monkeypatch):
    """A wrong rule of acceptance is found."""
    expected = answers(LLM(path_of(family), dtype=dtype, **SETTINGS))
    few_blocks = {"kv_cache_memory": 2**17} if dtype == "float32" else {}  # preemptions and hits change bits in bfloat16
    llm = LLM(path_of(family), dtype=dtype, **SETTINGS | few_blocks, **drafting())
    for _ in range(1 + bool(few_blocks)):  # the second time with prefix hits
        assert answers(llm) == expected
    assert share_accepted(llm) > 0.6
    llm = LLM(path_of(family), dtype=dtype, **SETTINGS, **drafting(bits=4))
    assert answers(llm) == expected
    monkeypatch.setattr(ScheduledSequence, "num_accepted", lambda item, token_ids: len(item.draft_token_ids))
    assert answers(llm) != expected


def test_the_copy_has_the_adapters_of_requests(path_of, tmp_path):
    path = path_of("qwen3")
    write_adapter(tmp_path / "a", linear_shapes(path), lora_alpha=64)
    requests = [LoRARequest("a", 1, str(tmp_path / "a")), None, None, None, None]
    expected = answers(LLM(path, enable_lora=True, **SETTINGS), lora_request=requests)
    assert expected[0] != answers(LLM(path, **SETTINGS))[0]
    llm = LLM(path, enable_lora=True, **SETTINGS, **drafting())
    assert answers(llm, lora_request=requests) == expected
    assert share_accepted(llm) > 0.6


def test_new_weights_are_rounded_anew(path_of, tmp_path):
    other = tiny_models.save("qwen3", tmp_path, seed=1, **WIDTHS)
    llm = LLM(path_of("qwen3"), **SETTINGS, **drafting())
    for path in (other, path_of("qwen3")):
        llm.update_weights_from_path(str(path))
        assert answers(llm) == answers(LLM(path, **SETTINGS))
        assert share_accepted(llm) > 0.6
        llm.sleep(level=2)
        llm.wake_up()


def test_a_copy_in_4_bits_drafts_for_a_model_in_8_bits(path_of):
    expected = answers(LLM(path_of("qwen3"), quantization="int8", **SETTINGS))
    llm = LLM(path_of("qwen3"), quantization="int8", **SETTINGS, **drafting(bits=4))
    assert answers(llm) == expected
    assert share_accepted(llm) > 0.1


@pytest.mark.parametrize(
    ("more", "error", "message"),
    [
        ({"enforce_eager": True}, UnsupportedError, "and neither enforce_eager nor tensor_parallel_size; leave them out"),
        ({"quantization": "int8"}, UnsupportedError, "drafts in 8 bits, which saves no time with quantization='int8'; leave"),
        (drafting(bits=5), InvalidValueError, "bits must be 4 or 8, got 5"),
        (drafting(model="x"), InvalidValueError, "model, with method 'quantized', is 'x'; leave it out"),
    ],
)
def test_what_the_copy_cannot_do_is_refused(more, error, message, path_of):
    with pytest.raises(error, match=message):
        LLM(path_of("qwen3"), **SETTINGS | drafting() | more)


def test_without_a_compiler_it_is_refused(path_of, monkeypatch):
    monkeypatch.setattr(native, "load", Mock(side_effect=UnsupportedError("no C++ compiler works")))
    with pytest.raises(UnsupportedError, match="'quantized' needs kernels, and neither"):
        LLM(path_of("qwen3"), **SETTINGS, **drafting())


def test_the_memory_of_the_copy_is_counted(path_of, monkeypatch):
    num_bytes = sum(tensor.nbytes for tensor in tiny_models.build("qwen3", **WIDTHS).state_dict().values())
    monkeypatch.setattr(devices, "available_cpu_memory", lambda: num_bytes + 1000)
    LLM(path_of("qwen3"), **SETTINGS)
    with pytest.raises(OutOfMemoryError, match=r"their copy in 4 bits, which drafts, .*; leave out speculative_config, or"):
        LLM(path_of("qwen3"), **SETTINGS, **drafting(bits=4))
