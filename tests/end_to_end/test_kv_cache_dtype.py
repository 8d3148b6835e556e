"""A KV cache in 8 bits: nearly the same loss in half the memory, the same bits in any batch, refusals by name."""

import random

import pytest

from nanoinfer import LLM, SamplingParams
from nanoinfer.attention.base import BACKENDS, register_backend
from nanoinfer.attention.cpu import CPUBackend
from nanoinfer.errors import UnsupportedError
from nanoinfer_lab.stories import GRAMMAR

pytestmark = pytest.mark.slow

SMALL = {"kv_cache_memory": 2**22}
SCORED = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
TEXTS = [GRAMMAR.write(random.Random(seed), "story") for seed in range(4)]


def loss(llm):
    """The mean negative log-probability of the tokens of some stories."""
    positions = [
        next(iter(entries.values())).logprob
        for output in llm.generate(TEXTS, SCORED, use_tqdm=False)
        for entries in output.prompt_logprobs[1:]
    ]
    return -sum(positions) / len(positions)


@pytest.mark.parametrize(
    ("model", "dtype"), [("tiny-gpt2", "bfloat16"), pytest.param("tiny-qwen3", "float32", marks=pytest.mark.long)]
)
def test_the_loss_stays_within_half_a_percent_in_half_the_memory(model, dtype):
    plain, small = (LLM(model, dtype=dtype, kv_cache_dtype=name, **SMALL) for name in ("auto", "int8"))
    assert loss(small) == pytest.approx(expected := loss(plain), rel=0.005)
    assert loss(small) != expected  # it was rounded
    taken, before = (llm.info.num_cache_bytes / llm.info.num_blocks for llm in (small, plain))
    head_dim = small.engine.executor.runner.model.config.head_dim
    assert taken / before == (head_dim + 4) / (head_dim * (4 if dtype == "float32" else 2))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_answers_have_the_same_bits_alone_together_and_in_chunks(dtype):
    settings = {"kv_cache_dtype": "int8", "batch_invariant": True, "chunk_size": 16, "enable_prefix_caching": False}
    llm = LLM("tiny-qwen3", dtype=dtype, **SMALL, **settings)
    params = SamplingParams(temperature=0, max_tokens=12, logprobs=2, prompt_logprobs=0, detokenize=False)

    def of(output):
        return output.prompt_logprobs, output.outputs[0].token_ids, output.outputs[0].logprobs

    together = llm.generate(TEXTS, params, use_tqdm=False)
    for text, output in zip(TEXTS, together, strict=True):
        assert of(llm.generate(text, params, use_tqdm=False)[0]) == of(output)


def test_the_kernels_write_the_story_of_the_plain_definition():
    params = SamplingParams(temperature=0, max_tokens=40)
    texts = {
        LLM("tiny-qwen3", kv_cache_dtype="int8", **SMALL, **given)
        .generate(TEXTS[0][:60], params, use_tqdm=False)[0]
        .outputs[0]
        .text
        for given in ({}, {"enforce_eager": True}, {"attention_backend": "reference"})
    }
    assert len(texts) == 1


def test_a_backend_that_does_not_read_such_a_cache_is_refused(monkeypatch):
    class Other(CPUBackend):
        supports_int8_cache = False

    monkeypatch.setitem(BACKENDS, "other", None)
    register_backend("other", Other)
    with pytest.raises(UnsupportedError, match="kv_cache_dtype='int8' needs the attention backend cpu, triton or ref"):
        LLM("tiny-qwen3", attention_backend="other", kv_cache_dtype="int8")
