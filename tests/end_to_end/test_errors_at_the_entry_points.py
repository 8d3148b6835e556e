"""What is wrong is refused before any work, in one sentence that names it. What shows later ends its own sequence alone.

tests/test_config.py and tests/test_sampling_params.py have the messages for plain values of the declared arguments.
"""

import inspect
import math
import re
import time

import numpy
import pytest
import torch

from nanoinfer import LLM, BeamSearchParams, EngineArgs, NanoinferError, Recorder, SamplingParams
from nanoinfer.errors import InvalidValueError
from nanoinfer.sampling.sampler import STAGES
from tests.helpers import tiny_models

pytestmark = pytest.mark.slow

LAST = tiny_models.VOCAB_SIZE - 1
LAST_OF_LLM = 1958  # of tiny-qwen3
STOP = 5  # an id that ends an answer where a test says so
ONE_TOKEN = SamplingParams(temperature=0, max_tokens=1)
BEAMS = BeamSearchParams(beam_width=2, max_tokens=2)
HELLO = {"role": "user", "content": "Hello"}
HUGE, UNPRINTABLE = 10**30, 10**5000  # Python prints at most 4,300 digits
ARRAY, MATRIX = numpy.array([1, 2]), numpy.ones((3, 3))


class NoRepr:
    def __repr__(self):
        raise RuntimeError("no repr")


def ids_only(**given):
    return SamplingParams(**{"max_tokens": 8, "detokenize": False, "seed": 3} | given)


def generate(llm, prompts, params):
    return llm.generate(prompts, params, use_tqdm=False)


# ---- before any work


@pytest.fixture
def no_work(llm, monkeypatch):
    """Nothing may be queued, no block taken and no step made."""
    for owner, name in (
        (llm.engine.scheduler, "add"),
        (llm.engine.block_manager, "start"),
        (llm.engine, "step"),
        (llm.engine.executor, "launch"),
    ):
        monkeypatch.setattr(owner, name, lambda *_, **__: pytest.fail("work was done"))


def refused(call, name="", sentence="", error=NanoinferError):
    """Assert that a call is refused quickly in one sentence, with the name and what matches `sentence`. Returns the message."""
    start = time.process_time()  # of this process: another one may have the core
    with pytest.raises(error) as caught:
        call()
    assert time.process_time() - start < 2
    message = str(caught.value)
    assert name in message
    assert re.search(sentence, message)
    assert 10 < len(message) < 1000
    assert "\n" not in message
    return message


def make(llm, **given):
    LLM(**{"model": "tiny-qwen3", "kv_cache_memory": 2**22} | given)


def sample(llm, **given):
    llm.generate("Once", SamplingParams(**given), use_tqdm=False)


def search(llm, **given):
    llm.beam_search("Once", BeamSearchParams(**{"beam_width": 2, "max_tokens": 2} | given))


DECLARED = {EngineArgs: make, SamplingParams: sample, BeamSearchParams: search}
ODD = [NoRepr(), [NoRepr()], ARRAY, MATRIX, UNPRINTABLE, -UNPRINTABLE, math.nan]


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize("declared", DECLARED)
def test_odd_values_of_every_declared_argument_are_refused(llm, declared):
    for name in inspect.signature(declared).parameters:
        for value in ODD:
            refused(lambda name=name, value=value: DECLARED[declared](llm, **{name: value}), name)


STRING, NUMBERS = (
    "must be a string",
    ("max_num_seqs", "max_num_batched_tokens", "chunk_size", "max_model_len", "kv_cache_memory"),
)
TYPES = {  # words of the message -> arguments of LLM, values
    "must be an integer.*, got": (("block_size", *NUMBERS), [1.5, "4", True]),
    "must be >= 1, got": (("block_size", *NUMBERS), [0, -1]),
    f"{STRING}.*, got": (("model", "tokenizer", "revision", "dtype", "device", "attention_backend"), [5, ["auto"]]),
    "must be True or False.*, got": (("enable_prefix_caching", "enforce_eager", "batch_invariant", "enable_lora"), [1, "yes"]),
    "must be a number.*, got": (("gpu_memory_utilization",), ["0.9", None, True]),
    r"must be in \(0, 1\], got": (("gpu_memory_utilization",), [0, -0.5, 1.01, math.nan, math.inf]),
}


@pytest.mark.parametrize("sentence", TYPES)
def test_an_argument_of_a_wrong_type_or_out_of_range_is_refused_by_name(llm, sentence):
    names, values = TYPES[sentence]
    for name in names:
        for value in values:
            refused(lambda name=name, value=value: make(llm, **{name: value}), sentence=f"^{name} {sentence}")


OUTSIDE = rf"the token id \d+; this model's ids are 0 \.\. {LAST_OF_LLM}"
VALUES = {  # {call: {argument: {words of the message: values}}}
    make: {
        "tokenizer": {"no/such": ["no/such/tokenizer"]},
        "dtype": {"must be one of auto, float32, bfloat16, .*, got 'fp8'": ["fp8"], "": [torch.int8, 16, "auto "]},
        "device": {"must be auto, cpu, cuda or cuda:N, got": ["tpu", "meta", "CPU", "cuda:x", "cuda:-1"]},
        "max_model_len": {"must be <= 512, the positions this model knows, got": [513]},
        "kv_cache_memory": {"less than one block of 64 tokens": [1], "is .* bytes, but .* are free": [2**60]},
        "attention_backend": {"must be auto or one of reference, cpu, .*got 'flash3'": ["flash3"]},
        "seed": {r"must be in 0 \.\. 2\*\*64 - 1, got": [-1, 2**64], "must be an integer": [1.0, "1", True]},
        "tracer": {r"must have a method emit\(event\)": [5, print, Recorder]},
        "stages": {
            "must be a list of functions": [5, "abc", [*STAGES, None], STAGES[0]],
            "lacks keep_allowed, so parameters would be ignored": [STAGES[1:]],
        },
        "logprobs_mode": {"must be 'raw', 'raw_logprobs', .* or 'processed_logits', got": ["cooked", None, ["raw"]]},
        "logprob_mode": {"no argument 'logprob_mode'; did you mean logprobs_mode": ["raw"]},
        "kv_cache_mem": {"did you mean kv_cache_memory?": [1]},
        "temprature_of_the_room": {"known are model, tokenizer, skip_tokenizer_init, revision": [1]},
        "pipeline_parallel_size": {"=.* is not supported; use tensor_parallel_size=N": [2]},
        "max_lora_rank": {"": [32]},
    },
    sample: {
        "stop_token_ids": {OUTSIDE: [[1959], [3, 10**18]], "": [5, "ab", {1}, [-1], ["1"], [1.5], [None]]},
        "allowed_token_ids": {OUTSIDE: [[3, 1959]], "": [[], 5, "ab"]},
        "logit_bias": {OUTSIDE: [{1959: 1}], "": [[1], {"5": 1.0}, {5: "1"}, {5: 101}, {5: math.nan}, {-1: 1}]},
        "bad_words": {OUTSIDE: [[[1959]], [[1, 2], [3, 10**18]]], "": ["word", [""], [5], [[]], [[-1]], ["\ud800"], [None]]},
        "logprob_token_ids": {OUTSIDE: [[99999]]},
        "logprobs": {"must be at most the vocabulary's 1959, got 1960; use -1 for all": [1960], "": [HUGE]},
        "prompt_logprobs": {"must be at most the vocabulary's 1959, got 1960; use -1 for all": [1960]},
        "stop": {"": ["", [""], [None], b"end", ["a", 5]]},
        "logits_processors": {"": [[5], print, [None], [lambda: None], [lambda a, b, c, d: d], [max], {print}]},
        "structured_outputs": {"": [{"regex": ".*"}]},
    },
}


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize(
    ("call", "name", "sentence", "values"),
    [
        pytest.param(call, name, words, values, id=f"{call.__name__} {name} {words}")
        for call, arguments in VALUES.items()
        for name, sentences in arguments.items()
        for words, values in sentences.items()
    ],
)
def test_values_that_the_model_or_the_machine_cannot_serve_are_refused_by_name(llm, call, name, sentence, values):
    for value in values:
        refused(lambda value=value: call(llm, **{name: value}), name, sentence)


A_PROMPT = "a prompt must be a string"
NO_TOKENS = "the prompt has no tokens; give at least one"
A_DICT = r"a prompt's dict holds prompt \(a string\) or prompt_token_ids"
PROMPTS = {  # words of the message -> prompts
    A_PROMPT: [
        None, 7, 1.5, b"text", [1, 2.0], [True, False], [[1]], [1, "a"], [None], ["a"], MATRIX, torch.ones(3), iter("ab"), {1},
        NoRepr(), [NoRepr()], ONE_TOKEN, {"prompt_token_ids": "text"}, {"prompt_token_ids": [0.5]}, [1] * 100_000 + [None],
    ],
    OUTSIDE: [[3, LAST_OF_LLM + 1], {"prompt_token_ids": [HUGE]}],
    "the token id -1": [[3, -1]],
    "": [[UNPRINTABLE]],
    NO_TOKENS: [[], ""],
    "the text is not valid Unicode": ["b\ud800"],
    "set PYTHONUTF8=1 where the locale has another": ["caf\udcc3\udca9"],
    A_DICT: [{}, {"text": "a"}, {"prompt": "a", "image": "b"}, {"prompt": 5, "prompt_token_ids": [3]}, {"prompt": None}],
    "cache_salt must be a non-empty string, got": [{"prompt": "a", "cache_salt": salt} for salt in ("", 5)],
}  # fmt: skip


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize("sentence", PROMPTS)
def test_a_malformed_prompt_is_refused_by_its_index_and_by_a_stream_at_the_call(llm, sentence):
    for prompt in PROMPTS[sentence]:
        for call, words in (
            (lambda prompt=prompt: generate(llm, ["good", [1, 2], prompt, "good"], ONE_TOKEN), "^prompt 2: .*"),
            (lambda prompt=prompt: llm.beam_search(["good", prompt], BEAMS), "^prompt 1: .*"),
            (lambda prompt=prompt: llm.stream(prompt, ONE_TOKEN), "^(?!prompt [0-9]).*"),  # it is alone
        ):
            refused(call, sentence=words + sentence)


LIST, TEMPLATE = "messages must be a list of dicts like", "the chat template refused the messages: .*"
MESSAGES = {
    f"^prompt 0: {LIST}": [[], "Hello", ["Hello"], [None], [[]]],
    f"^prompt 1: {LIST}": [[[HELLO], []], [[HELLO], HELLO]],
    LIST: [None, 5, HELLO, ARRAY, NoRepr(), [HELLO, "Hello"]],
    f"^prompt 1: {TEMPLATE}content": [[[HELLO], [{"role": "user"}]]],
    f"^prompt 0: {TEMPLATE}role": [[{"content": "Hello"}]],
    "": [
        *([{"role": "user", "content": content}] for content in (5, [5], "\ud800", {"type": "text", "text": "a"}, b"a")),
        *([{"role": "user", "content": [part]}] for part in ({}, {"type": "text"}, {"type": "text", "text": 5})),
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a"}}]}],
        [{"role": "user", "content": UNPRINTABLE}],
    ],
}


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize("sentence", MESSAGES)
def test_bad_messages_are_refused_by_their_index(llm, sentence):
    for messages in MESSAGES[sentence]:
        refused(lambda messages=messages: llm.chat(messages, ONE_TOKEN, use_tqdm=False), sentence=sentence)


PARAMS, NO_LIST = "sampling_params must be SamplingParams", "prompts must be a string, token ids, a dict or a list of these"
CALLS = {  # words of the message -> calls
    "'no-such-model' is no folder here, and the hub did not give it": [lambda llm: make(llm, model="no-such-model")],
    "is neither a folder nor a possible hub": [
        lambda llm, name=name: make(llm, model=name) for name in ("no/such/one", "a\0b")
    ],
    "did you mean 'tiny-qwen3'": [lambda llm: make(llm, model="tiny-qwen4")],
    r"stage abs must .* two arguments, \(logits, batch\) -> logits": [lambda llm: make(llm, stages=[*STAGES, abs])],
    f"{PARAMS}, or a list of them": [
        lambda llm, p=p: llm.generate([], p) for p in (5, "a", {"temperature": 0}, NoRepr(), ARRAY)
    ],
    f"^prompt 1: {PARAMS}": [
        *(lambda llm, p=p: generate(llm, ["a", "b"], [ONE_TOKEN, p]) for p in (5, {"temperature": 0}, BEAMS)),
        lambda llm: llm.chat([[HELLO], [HELLO]], [ONE_TOKEN, None]),
    ],
    f"^{PARAMS}": [lambda llm, p=p: llm.stream("a", p) for p in (5, BEAMS, [ONE_TOKEN])],
    "params must be BeamSearchParams, got": [lambda llm, p=p: llm.beam_search("a", p) for p in (5, None, ONE_TOKEN, ARRAY)],
    **{
        f"one, or one per prompt: got {num} for 2 prompts": [lambda llm, num=num: llm.generate(["a", "b"], [ONE_TOKEN] * num)]
        for num in (0, 1, 3)
    },
    NO_LIST: [lambda llm, prompts=prompts: generate(llm, prompts, ONE_TOKEN) for prompts in (None, 5, {1, 2}, iter("ab"))],
    "use_tqdm": [
        *(lambda llm, value=value: llm.generate("a", ONE_TOKEN, use_tqdm=value) for value in (1, None, "no")),
        lambda llm: llm.stream("a", ONE_TOKEN, use_tqdm=False),
        lambda llm: llm.beam_search("a", BEAMS, use_tqdm=True),
    ],
    "priority": [lambda llm: llm.generate("a", ONE_TOKEN, priority=[1])],
    "lora_request": [
        lambda llm: llm.generate("a", ONE_TOKEN, lora_request="a"),
        lambda llm: llm.chat([HELLO], ONE_TOKEN, lora_request=NoRepr()),
    ],
    "write lora_request=None": [lambda llm: llm.generate("a", ONE_TOKEN, False, None)],
    "write chat_template=None": [lambda llm: llm.chat([HELLO], ONE_TOKEN, False, None)],
    "'prompts'": [lambda llm: llm.generate(sampling_params=ONE_TOKEN)],
    "'messages'": [lambda llm: llm.chat(sampling_params=ONE_TOKEN)],
    "'params'": [lambda llm: llm.beam_search("a")],
    "'beam_width'": [lambda llm: BeamSearchParams(max_tokens=2)],
    "chat_template": [
        *(lambda llm, value=value: llm.chat([HELLO], ONE_TOKEN, chat_template=value) for value in (5, b"a")),
        lambda llm: llm.chat([HELLO], ONE_TOKEN, chat_template_kwargs={"tokenize": True}),
    ],
    "": [
        lambda llm, text=text: llm.chat([HELLO], ONE_TOKEN, False, chat_template=text)
        for text in ("{{", "{% for %}", "{{ raise_exception('no') }}", "{{ undefined.attribute }}")
    ],
    "chat_template_kwargs must be a dict": [lambda llm: llm.chat([HELLO], ONE_TOKEN, chat_template_kwargs=["a"])],
    "add_generation_prompt": [lambda llm: llm.chat([HELLO], ONE_TOKEN, add_generation_prompt="yes")],
    "continue_final_message": [lambda llm: llm.chat([HELLO], ONE_TOKEN, continue_final_message=True)],
    "tools": [lambda llm, value=value: llm.chat([HELLO], ONE_TOKEN, tools=value) for value in ([{"type": "function"}], 5)],
    "max_token": [lambda llm, name=name: setattr(ONE_TOKEN, name, 0) for name in ("max_tokens", "max_token")],
}


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize("sentence", CALLS)
def test_a_wrong_call_is_refused(llm, sentence):
    for call in CALLS[sentence]:
        refused(lambda call=call: call(llm), sentence=sentence)


def outside(name, token_id):
    return f"{name} has the token id {token_id}; this model's ids are 0 .. {LAST}"


@pytest.mark.parametrize(
    ("params", "sentence"),
    [
        ({"stop_token_ids": [1, 10**9]}, outside("stop_token_ids", 10**9)),
        ({"bad_words": [[1], "word"]}, "bad_words has 'word', but there is no tokenizer; give lists of token ids"),
        ({"detokenize": True}, "no tokenizer is loaded, so there can be no text; set detokenize=False"),
    ],
    ids=str,
)
def test_the_entry_points_have_the_same_words(ids_llm, params, sentence):
    bad = ids_only(**params)
    with pytest.raises(InvalidValueError) as in_a_list:
        generate(ids_llm, [[1], [2], [3]], [ids_only(), ids_only(), bad])
    with pytest.raises(InvalidValueError) as in_a_stream:
        ids_llm.stream([1, 2], bad)
    with pytest.raises(InvalidValueError) as at_the_engine:
        ids_llm.engine.add_request([1, 2], bad)
    assert str(in_a_list.value).startswith("prompt 2: ")
    assert sentence in str(in_a_list.value)
    assert str(in_a_stream.value) == str(at_the_engine.value) == str(in_a_list.value).removeprefix("prompt 2: ")


def test_the_last_id_and_the_whole_vocabulary_are_accepted(ids_llm):
    ends = {
        "stop_token_ids": [0, LAST],
        "allowed_token_ids": [0, LAST],
        "logit_bias": {0: 1, LAST: 1},
        "bad_words": [[0, LAST]],
    }
    for params in (ends, {"logprobs": LAST + 1, "prompt_logprobs": LAST + 1}):
        [output] = generate(ids_llm, [1, 2], ids_only(**params))
        assert output.outputs[0].finish_reason in ("length", "stop")


# ---- what only shows later


def drop_all_after(num_tokens):
    def processor(prompt_ids, output_ids, logits):
        return torch.full_like(logits, -math.inf) if len(output_ids) >= num_tokens else logits

    return processor


def not_a_number(prompt_ids, output_ids, logits):
    return logits * math.nan


OTHERS = [ids_only(seed=4), ids_only(seed=5, top_k=7), ids_only(temperature=0.0)]


@pytest.fixture(scope="module")
def others_alone(loaded_ids):
    return [generate(loaded_ids, [1, 2, i], other)[0].outputs for i, other in enumerate(OTHERS)]


@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize(
    ("params", "stage", "num_tokens"),
    [
        ({"allowed_token_ids": [STOP], "stop_token_ids": [STOP], "min_tokens": 1}, "mask_min_tokens", 0),
        ({"allowed_token_ids": [STOP, 6], "bad_words": [[STOP], [6]]}, "mask_bad_words", 0),
        ({"allowed_token_ids": [7], "bad_words": [[7, 7, 7]]}, "mask_bad_words", 2),
        ({"allowed_token_ids": [7, 8], "no_repeat_ngram_size": 1}, "mask_repeated_ngrams", 2),
        ({"allowed_token_ids": [7], "no_repeat_ngram_size": 3}, "mask_repeated_ngrams", 3),
        ({"logits_processors": [drop_all_after(0)]}, "apply_logits_processors", 0),
        ({"logits_processors": [drop_all_after(3)]}, "apply_logits_processors", 3),
        ({"logits_processors": [not_a_number]}, "apply_logits_processors", 0),
    ],
    ids=lambda value: ", ".join(value) if isinstance(value, dict) else None,
)
def test_a_sequence_with_no_token_left_ends_alone_and_names_the_stage(ids_llm, others_alone, params, stage, num_tokens, greedy):
    bad = ids_only(**params, **({"temperature": 0.0} if greedy else {}))
    prompts = [[1, 2, 0], [3, 4], [1, 2, 1], [1, 2, 2]]
    first, failed, *rest = generate(ids_llm, prompts, [OTHERS[0], bad, *OTHERS[1:]])
    assert [output.outputs for output in (first, *rest)] == others_alone
    [completion] = failed.outputs
    assert (completion.finish_reason, len(completion.token_ids)) == ("error", num_tokens)
    assert f"no token is left to draw after {stage};" in completion.error
    *deltas, last = ids_llm.stream([3, 4], bad)
    assert [delta.token_ids for delta in deltas] == [[token_id] for token_id in completion.token_ids]
    assert (last.token_ids, last.output.outputs) == ([], [completion])


def test_every_one_of_several_answers_without_a_token_gets_the_error(ids_llm):
    [output] = generate(ids_llm, [1, 2], ids_only(n=3, allowed_token_ids=[7], bad_words=[[7, 7]]))
    assert [(answer.index, answer.token_ids, answer.finish_reason) for answer in output.outputs] == [
        (i, [7], "error") for i in range(3)
    ]


def test_one_of_several_answers_can_fail_while_the_others_finish(ids_llm):
    expected = [answer.token_ids for answer in generate(ids_llm, [1, 2], ids_only(n=3))[0].outputs]
    assert len({token_ids[0] for token_ids in expected}) == 3

    def only_the_second_fails(prompt_ids, output_ids, logits):
        return drop_all_after(0)(prompt_ids, output_ids, logits) if output_ids[:1] == expected[1][:1] else logits

    [output] = generate(ids_llm, [1, 2], ids_only(n=3, logits_processors=[only_the_second_fails]))
    assert [answer.finish_reason for answer in output.outputs] == ["length", "error", "length"]
    assert [answer.token_ids for answer in output.outputs] == [expected[0], expected[1][:1], expected[2]]


def test_the_logprobs_of_a_sequence_that_failed_are_those_of_its_tokens(ids_llm):
    [output] = generate(ids_llm, [1, 2], ids_only(logprobs=2, logits_processors=[drop_all_after(3)]))
    [completion] = output.outputs
    assert [next(iter(told)) for told in completion.logprobs] == completion.token_ids
    assert len(completion.logprobs) == 3
    assert completion.cumulative_logprob == sum(next(iter(told.values())).logprob for told in completion.logprobs)


def test_a_processor_is_called_once_a_token_even_when_a_neighbour_fails(ids_llm):
    """A processor may keep a state of its own, as one that follows a grammar does."""
    num_calls = []

    def counting(prompt_ids, output_ids, logits):
        num_calls.append(len(output_ids))
        return logits

    params = [ids_only(logits_processors=[counting]), ids_only(logits_processors=[drop_all_after(3)])]
    outputs = generate(ids_llm, [[1, 2], [3, 4]], params)
    assert [output.outputs[0].finish_reason for output in outputs] == ["length", "error"]
    assert num_calls == list(range(8))
