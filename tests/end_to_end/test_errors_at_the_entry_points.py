"""What needs the model to be seen as wrong is refused before any work; what shows later ends its own sequence alone."""

import math
from contextlib import contextmanager

import pytest
import torch

from nanoinfer import LLM, SamplingParams
from nanoinfer.errors import InvalidTypeError, InvalidValueError
from nanoinfer.sampling.sampler import STAGES
from nanoinfer.sampling_params import BeamSearchParams
from tests.helpers import tiny_models
from tests.helpers.tiny_models import assert_nothing_is_left

pytestmark = pytest.mark.slow

MEMORY = 2**24
LAST = tiny_models.VOCAB_SIZE - 1
STOP = 5  # an id that ends an answer where a test says so


def ids_only(**given):
    return SamplingParams(**{"max_tokens": 8, "detokenize": False, "seed": 3} | given)


def generate(llm, prompts, params):
    return llm.generate(prompts, params, use_tqdm=False)


# ---- before any work


@contextmanager
def no_work(llm, monkeypatch):
    """Inside nothing may be queued, no block taken and no step made."""
    calls = []

    def watch(owner, name):
        works = getattr(owner, name)
        patch.setattr(owner, name, lambda *args: calls.append(name) or works(*args))

    with monkeypatch.context() as patch:
        watch(llm.engine.scheduler, "add")
        watch(llm.engine.block_manager, "start")
        watch(llm.engine, "step")
        watch(llm.engine.executor, "launch")
        yield
    assert calls == []


def outside(name, token_id):
    return f"{name} has the token id {token_id}; this model's ids are 0 .. {LAST}"


@pytest.mark.parametrize(
    ("params", "sentence"),
    [
        ({"stop_token_ids": [LAST + 1]}, outside("stop_token_ids", LAST + 1)),
        ({"stop_token_ids": [1, 10**9]}, outside("stop_token_ids", 10**9)),
        ({"allowed_token_ids": [LAST + 1]}, outside("allowed_token_ids", LAST + 1)),
        ({"allowed_token_ids": [3, 4, 10**18]}, outside("allowed_token_ids", 10**18)),
        ({"logit_bias": {LAST + 1: 1}}, outside("logit_bias", LAST + 1)),
        ({"logit_bias": {3: 1, 2**62: -1}}, outside("logit_bias", 2**62)),
        ({"bad_words": [[LAST + 1]]}, outside("bad_words", LAST + 1)),
        ({"bad_words": [[1, 2], [3, 400, 5]]}, outside("bad_words", 400)),
        ({"bad_words": [[1], "word"]}, "bad_words has 'word', but there is no tokenizer; give lists of token ids"),
        ({"bad_words": ["word"]}, "bad_words has 'word', but there is no tokenizer; give lists of token ids"),
        ({"logprobs": LAST + 2}, f"logprobs must be at most the vocabulary's {LAST + 1}, got {LAST + 2}; use -1 for all"),
        ({"prompt_logprobs": 500}, f"prompt_logprobs must be at most the vocabulary's {LAST + 1}, got 500; use -1 for all"),
        (
            {"detokenize": True},
            "no tokenizer is loaded, so there can be no text; set detokenize=False",
        ),
        ({"detokenize": True, "stop": "a"}, "no tokenizer is loaded, so there can be no text"),
    ],
    ids=str,
)
def test_params_that_the_model_cannot_serve_are_refused_by_the_prompts_index(ids_llm, monkeypatch, params, sentence):
    with no_work(ids_llm, monkeypatch):
        bad = ids_only(**params)
        with pytest.raises(InvalidValueError) as in_a_list:
            generate(ids_llm, [[1], [2], [3]], [ids_only(), ids_only(), bad])
        with pytest.raises(InvalidValueError) as in_a_stream:
            ids_llm.stream([1, 2], bad)  # at the call, not at the first token
        with pytest.raises(InvalidValueError) as at_the_engine:
            ids_llm.engine.add_request([1, 2], bad)
    assert str(in_a_list.value).startswith("prompt 2: ")
    assert sentence in str(in_a_list.value)
    assert str(in_a_stream.value) == str(at_the_engine.value) == str(in_a_list.value).removeprefix("prompt 2: ")


@pytest.mark.parametrize(
    "params",
    [
        {"stop_token_ids": [0, LAST], "allowed_token_ids": [0, LAST], "logit_bias": {0: 1, LAST: 1}, "bad_words": [[0, LAST]]},
        {"logprobs": LAST + 1, "prompt_logprobs": LAST + 1},
    ],
)
def test_the_last_id_and_the_whole_vocabulary_are_accepted(ids_llm, params):
    [output] = generate(ids_llm, [1, 2], ids_only(**params))
    assert output.outputs[0].finish_reason in ("length", "stop")


@pytest.mark.parametrize("words", [["\ud800"], ["fine", "half a pair: \udfff"]])
def test_a_bad_word_that_is_no_unicode_is_refused_by_name_and_index_before_any_work(llm, monkeypatch, words):
    with no_work(llm, monkeypatch), pytest.raises(InvalidValueError, match=r"^prompt 1: .*bad_words"):
        generate(llm, ["a", "b"], [SamplingParams(), SamplingParams(bad_words=words)])


def test_params_of_beams_and_of_sampling_are_not_taken_for_each_other(ids_llm, monkeypatch):
    with no_work(ids_llm, monkeypatch):
        with pytest.raises(InvalidTypeError, match="prompt 0: sampling_params must be SamplingParams, got BeamSearchParams"):
            generate(ids_llm, [[1]], [BeamSearchParams(beam_width=2)])
        with pytest.raises(InvalidTypeError, match=r"params must be BeamSearchParams, got SamplingParams"):
            ids_llm.beam_search([[1]], ids_only())
        with pytest.raises(InvalidValueError, match=f"prompt 1: {outside('the prompt', LAST + 1)}"):
            ids_llm.beam_search([[1], [2, LAST + 1]], BeamSearchParams(beam_width=2))


@pytest.mark.parametrize(
    ("argument", "error", "sentence"),
    [
        ({"stages": 5}, InvalidTypeError, r"stages must be a list of functions \(logits, SamplingBatch\) -> logits, got 5"),
        ({"stages": [*STAGES, None]}, InvalidTypeError, "stages must be a list of functions"),
        ({"stages": STAGES[0]}, InvalidTypeError, "stages must be a list of functions"),
        (
            {"stages": [*STAGES, abs]},
            InvalidTypeError,
            r"stage abs must .* two arguments, \(logits, batch\) -> logits",
        ),
        ({"stages": STAGES[1:]}, InvalidValueError, "stages lacks keep_allowed, so parameters would be ignored"),
        ({"stages": "abc"}, InvalidValueError, "stages must be a list of functions or its name, such as .*, got 'abc'"),
        ({"logprobs_mode": "cooked"}, InvalidValueError, "logprobs_mode must be 'raw', 'raw_logprobs', "),
        ({"logprobs_mode": None}, InvalidValueError, "logprobs_mode must be 'raw', .* or 'processed_logits', got None"),
        ({"logprob_mode": "raw"}, InvalidTypeError, "no argument 'logprob_mode'; did you mean logprobs_mode?"),
    ],
)
def test_an_argument_of_the_sampler_is_refused_by_name(qwen3_path, argument, error, sentence):
    with pytest.raises(error, match=sentence):
        LLM(qwen3_path, kv_cache_memory=MEMORY, **argument)


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


def test_a_prompt_that_is_too_long_gets_its_error_for_every_answer(qwen3_path):
    llm = LLM(qwen3_path, kv_cache_memory=MEMORY, max_model_len=8)
    long, short = generate(llm, [[1] * 8, [1] * 3], ids_only(n=2, max_tokens=4))
    assert [(answer.finish_reason, answer.token_ids) for answer in long.outputs] == [("error", [])] * 2
    assert "maximum context length is 8 tokens. However, the prompt has 8 tokens" in long.outputs[1].error
    assert [len(answer.token_ids) for answer in short.outputs] == [4, 4]
    assert_nothing_is_left(llm)
