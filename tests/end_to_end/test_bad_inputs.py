"""Every bad input is refused in one sentence that names it, quickly, and the next request works."""

import math
import time

import numpy
import pytest
import torch

from nanoinfer import LLM, BeamSearchParams, NanoinferError, SamplingParams

pytestmark = pytest.mark.slow

ONE_TOKEN = SamplingParams(temperature=0, max_tokens=1)
BEAMS = BeamSearchParams(beam_width=2, max_tokens=2)
HELLO = {"role": "user", "content": "Hello"}
HUGE, UNPRINTABLE = 10**30, 10**5000  # Python prints at most 4,300 digits
ARRAY, MATRIX = numpy.array([1, 2]), numpy.ones((3, 3))


class NoRepr:
    def __repr__(self):
        raise RuntimeError("no repr")


def each(name, kind, values, call):
    """A row for each value: the words that the message must have, and what to call with the LLM."""
    for i, value in enumerate(values):
        yield pytest.param(name, lambda llm, value=value: call(llm, value), id=f"{kind} {name} {i}")


def each_argument(kind, arguments, call):
    for name, values in arguments.items():
        yield from each(name, kind, values, lambda llm, value, name=name: call(llm, **{name: value}))


def make_llm(_, **argument):
    LLM("tiny-qwen3", **{"kv_cache_memory": 2**22} | argument)


BAD_LLM = {
    "model": [5, b"tiny-qwen3", ["tiny-qwen3"], "", "no-such-model", "no/such/folder", "/dev/null", "tiny-qwen4", "a\0b"],
    "tokenizer": [5, "no/such/tokenizer", NoRepr()],
    "revision": [5, ["main"]],
    "dtype": ["fp8", None, 16, ["auto"], torch.int8, "auto "],
    "quantization": ["int2", "awq", 8, True, ["int8"], ARRAY],
    "device": ["tpu", None, 0, "cuda:x", "cuda:-1", "CPU"],
    "kv_cache_dtype": ["fp8", "INT8", None, 8, UNPRINTABLE, ARRAY],
    "block_size": [0, -16, 1.5, "16", HUGE, UNPRINTABLE, ARRAY],
    "max_num_seqs": [0, -1, 2.0, "8", True, -UNPRINTABLE, ARRAY],
    "max_num_batched_tokens": [0, "many", [1], math.nan],
    "chunk_size": [0, None, 0.5, MATRIX],
    "max_model_len": [0, -1, 513, HUGE, UNPRINTABLE, "512", math.inf],
    "kv_cache_memory": [0, 1, -1, "1G", 1e9, HUGE, UNPRINTABLE],
    "gpu_memory_utilization": [0, 1.5, -0.1, "0.9", math.nan, None, HUGE, UNPRINTABLE, ARRAY],
    "enable_prefix_caching": [1, "yes", ARRAY],
    "batch_invariant": [1, None],
    "attention_backend": ["flash4", None, 3, ["cpu"]],
    "enforce_eager": [0, "no", None],
    "async_scheduling": [1, "auto"],
    "seed": [-1, 2**64, 1.5, "0", True, UNPRINTABLE, ARRAY],
    "stages": [5, "abc", [None], [], NoRepr()],
    "logprobs_mode": ["logits", None, 1, ["raw"], ARRAY],
    "tracer": [5, print, NoRepr()],
    "tensor_parallel_size": [2, 0, "1", ARRAY, UNPRINTABLE],
    "enable_lora": [1, None, "yes"],
    "max_loras": [0, 2, "1", UNPRINTABLE],
    "max_lora_rank": [0, 32, None],
    "speculative_config": ["ngram", {}, {"method": "eagle"}, {"method": "ngram", "k": 1}, ARRAY],
    "hf_overrides": [{"num_hidden_layers": 1}],
    "runner": ["draft"],
    "generation_config": ["vllm"],
    "no_such_argument": [1],
    "modle": ["tiny-qwen3"],
}


def sample(llm, **given):
    llm.generate("Once", SamplingParams(**given), use_tqdm=False)


NUMBERS = ["0.5", None, True, [1.0], math.nan, math.inf, UNPRINTABLE, NoRepr(), ARRAY]
COUNTS = ["3", 1.5, True, [1], math.nan, NoRepr(), ARRAY, -UNPRINTABLE]
NOT_FLAGS = [value for value in COUNTS if value is not True]  # True is 1, as in vLLM
IDS = [5, "ab", {1}, [-1], ["1"], [1.5], [None], [1959], [HUGE], [UNPRINTABLE], MATRIX]
BAD_SAMPLING = {
    "temperature": [-0.1, *NUMBERS],
    "top_p": [0, 1.1, *NUMBERS],
    "min_p": [-0.1, 1.1, *NUMBERS],
    "repetition_penalty": [0, -1, *NUMBERS],
    "presence_penalty": [-2.1, 3, *NUMBERS],
    "frequency_penalty": [-2.1, 3, *NUMBERS],
    "top_k": [-2, None, HUGE, UNPRINTABLE, *COUNTS],
    "seed": [-2, 2**64, *COUNTS],
    "max_tokens": [0, -1, *COUNTS],
    "min_tokens": [-1, 17, None, HUGE, UNPRINTABLE, *COUNTS],
    "n": [0, None, 10**9, HUGE, UNPRINTABLE, *COUNTS],
    "no_repeat_ngram_size": [-1, None, *COUNTS],
    "logprobs": [-2, 1960, HUGE, UNPRINTABLE, *NOT_FLAGS],
    "prompt_logprobs": [-2, 1960, HUGE, UNPRINTABLE, *NOT_FLAGS],
    "stop": [5, "", [""], [None], b"end", ["a", 5], NoRepr(), MATRIX],
    "stop_token_ids": IDS,
    "allowed_token_ids": [[], *IDS],
    "bad_words": [5, "word", [""], [5], [[]], [[-1]], [[1959]], [[HUGE]], ["\ud800"], [None], MATRIX],
    "logit_bias": [[1], {"5": 1.0}, {5: "1"}, {5: 101}, {5: math.nan}, {-1: 1}, {1959: 1}, {UNPRINTABLE: 1}],
    "logits_processors": [5, [5], print, [None], [lambda: None], [lambda a, b, c, d: d], [max], {print}],
    "detokenize": [1, None, "yes"],
    "ignore_eos": [0, "no"],
    "skip_special_tokens": [None, ARRAY],
    "include_stop_str_in_output": [1, MATRIX],
    "structured_outputs": [{"regex": ".*"}, NoRepr()],
    "temprature": [0.5],
    "best_of": [2],
}


def search(llm, **given):
    llm.beam_search("Once", BeamSearchParams(**{"beam_width": 2, "max_tokens": 2} | given))


BAD_BEAMS = {
    "beam_width": [0, -1, None, HUGE, UNPRINTABLE, *COUNTS],
    "max_tokens": [0, None, *COUNTS],
    "length_penalty": [11, -11, *NUMBERS],
    "early_stopping": ["always", None, 1, ARRAY, NoRepr()],
    "ignore_eos": [1, None],
    "temperature": [0.5],
    "beam_widht": [2],
}


BAD_PROMPTS = [
    None, 5, 1.5, b"text", {"a": 1}, {}, {"prompt": None}, {"prompt": 5}, {"prompt_token_ids": "a"},
    {"prompt_token_ids": [0.5]},
    {"prompt": "a", "multi_modal_data": {"image": 1}}, {"prompt_embeds": MATRIX}, "", [[]], "\ud800", [-1], [1959], [HUGE],
    [UNPRINTABLE], [True], [1, "a"], [None], ["a", None], [["a"]], {1, 2}, ARRAY, MATRIX, torch.ones(3), iter("ab"), NoRepr(),
    [NoRepr()], SamplingParams(), [[1, 2.0]], [{"prompt": "a"}, {"promt": "a"}],
]  # fmt: skip
BAD_MESSAGES = [
    None, 5, "Hello", [], [[]], ["Hello"], [None], [HELLO, "Hello"], [[HELLO], HELLO], [{}], [{"role": "user"}],
    [{"content": "a"}], [{"role": "user", "content": 5}],
    [{"role": "user", "content": [5]}], [{"role": "user", "content": [{}]}, HELLO],
    [{"role": "user", "content": [{"type": "text"}]}], [{"role": "user", "content": [{"type": "text", "text": 5}]}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a"}}]}], [{"role": "user", "content": "\ud800"}],
    [{"role": "user", "content": {"type": "text", "text": "a"}}], ARRAY, HELLO, [{"role": "user", "content": b"a"}],
    [{"role": "user", "content": UNPRINTABLE}], NoRepr(),
]  # fmt: skip


BAD_PARAMS = [5, "a", {}, NoRepr(), ARRAY]
BAD_GENERATE = {"use_tqdm": [1, None, "no"], "lora_request": ["a"], "priority": [[1]], "prompt_token_ids": [[1]]}
BAD_CHAT = {
    "chat_template": [5, b"a"],
    "add_generation_prompt": [1, None, "yes"],
    "chat_template_kwargs": [5, [1], {"tokenize": True}, {"chat_template": "a"}],
    "tools": [[{"type": "function"}], 5],
    "continue_final_message": [True, None],
    "chat_template_content_format": ["openai", 5],
    "lora_request": [NoRepr()],
    "template": ["a"],
}
BAD_TEMPLATES = ["{{", "{% for %}", "{{ raise_exception('no') }}", "{{ undefined.attribute }}"]


def assign(_, **given):
    for name, value in given.items():
        setattr(ONE_TOKEN, name, value)


CALLS = [
    *each_argument("LLM", BAD_LLM, make_llm),
    *each_argument("sampling", BAD_SAMPLING, sample),
    *each("at temperature 0", "sampling", [{"n": 2, "temperature": 0}], lambda llm, given: sample(llm, **given)),
    *each("detokenize", "sampling", [{"stop": "a", "detokenize": False}], lambda llm, given: sample(llm, **given)),
    *each("max_tokens=4", "sampling", [{"min_tokens": 5, "max_tokens": 4}], lambda llm, given: sample(llm, **given)),
    *each_argument("assigned", {"max_tokens": [0, "5"], "max_token": [5], "n": [2], "stop": [""]}, assign),
    *each_argument("beams", BAD_BEAMS, search),
    *each("", "generate: prompt", BAD_PROMPTS, lambda llm, value: llm.generate(value, ONE_TOKEN, use_tqdm=False)),
    *each("", "stream: prompt", BAD_PROMPTS, lambda llm, value: llm.stream(value, ONE_TOKEN)),
    *each("", "beam_search: prompt", BAD_PROMPTS, lambda llm, value: llm.beam_search(value, BEAMS)),
    *each("", "chat: messages", BAD_MESSAGES, lambda llm, value: llm.chat(value, ONE_TOKEN, use_tqdm=False)),
    *each("", "chat: template", BAD_TEMPLATES, lambda llm, value: llm.chat([HELLO], ONE_TOKEN, False, chat_template=value)),
    *each(
        "sampling_params", "generate", [*BAD_PARAMS, BEAMS, [], [None], [ONE_TOKEN] * 2], lambda llm, p: llm.generate("a", p)
    ),
    *each("sampling_params", "stream", [*BAD_PARAMS, BEAMS, [ONE_TOKEN]], lambda llm, p: llm.stream("a", p)),
    *each("params", "beam_search", [*BAD_PARAMS, None, ONE_TOKEN], lambda llm, p: llm.beam_search("a", p)),
    *each_argument("generate", BAD_GENERATE, lambda llm, **given: llm.generate("a", ONE_TOKEN, **given)),
    *each_argument("chat", BAD_CHAT, lambda llm, **given: llm.chat([HELLO], ONE_TOKEN, **given)),
    *each_argument("stream", {"use_tqdm": [False]}, lambda llm, **given: llm.stream("a", ONE_TOKEN, **given)),
    *each_argument("beam_search", {"use_tqdm": [True]}, lambda llm, **given: llm.beam_search("a", BEAMS, **given)),
    *each("'prompts'", "missing", [ONE_TOKEN], lambda llm, p: llm.generate(sampling_params=p)),
    *each("'messages'", "missing", [ONE_TOKEN], lambda llm, p: llm.chat(sampling_params=p)),
    *each("'params'", "missing", ["a"], lambda llm, prompt: llm.beam_search(prompt)),
    *each("'beam_width'", "missing", [2], lambda llm, num: BeamSearchParams(max_tokens=num)),
    *each("write lora_request=None", "surplus", [None], lambda llm, value: llm.generate("a", ONE_TOKEN, False, value)),
    *each("write chat_template=None", "surplus", [None], lambda llm, value: llm.chat([HELLO], ONE_TOKEN, False, value)),
]


def test_there_are_many():
    assert len(CALLS) > 400


@pytest.mark.parametrize(("name", "call"), CALLS)
def test_a_bad_input_is_refused_in_one_sentence_and_the_next_request_works(llm, name, call):
    start = time.process_time()  # of this process: another one may have the core
    with pytest.raises(NanoinferError) as caught:
        call(llm)
    assert time.process_time() - start < 2
    message = str(caught.value)
    assert name in message
    assert 10 < len(message) < 1000
    assert "\n" not in message
    [output] = llm.generate("Once", ONE_TOKEN, use_tqdm=False)
    assert output.outputs[0].finish_reason == "length"  # and the fixture checks that every block is free
