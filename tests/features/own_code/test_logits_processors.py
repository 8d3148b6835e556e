"""vLLM's V1 logits processors: each one's rows are the rows of the step, however these change."""

import copy
import functools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from nanoinfer.v1.sample.logits_processor import AdapterLogitsProcessor, LogitsProcessor
from nanoinfer.v1.sample.logits_processor.builtin import process_dict_updates

from nanoinfer import LLM, SamplingParams
from nanoinfer.errors import InvalidTypeError, InvalidValueError, UnsupportedError
from nanoinfer.features.own_code.logits_processors import difference
from nanoinfer.scheduling.sequence import Sequence

SEQUENCES = [Sequence(str(i), [i], SamplingParams(), seed=0, max_num_tokens=9) for i in range(7)]
ROWS = st.lists(st.sampled_from(SEQUENCES), unique=True)


@given(st.lists(ROWS, max_size=6))
def test_the_updates_lead_from_each_steps_rows_to_the_next_ones(steps):
    entries, num_made = {}, {}
    old = []
    for new in steps:
        output_ids = {seq: [] for seq in new}
        update = difference(old, new, output_ids)
        assert (update is None) == (old == new)
        if update is not None:
            assert update.batch_size == len(new)
            assert not set(update.removed) & {row for row, *_ in update.added}
            for _, _, prompt_ids, _ in update.added:
                num_made[prompt_ids[0]] = num_made.get(prompt_ids[0], 0) + 1
        process_dict_updates(entries, update, lambda params, prompt_ids, output_ids: (prompt_ids[0], num_made[prompt_ids[0]]))
        ids = [seq.prompt_token_ids[0] for seq in new]
        assert entries == {row: (token_id, num_made[token_id]) for row, token_id in enumerate(ids)}
        added = {prompt_ids[0] for _, _, prompt_ids, _ in (update.added if update else ())}
        assert added == set(ids) - {seq.prompt_token_ids[0] for seq in old}  # the others keep their state
        old = new


class Target(AdapterLogitsProcessor):
    """The answer counts upwards from extra_args["target"], with a state of its own: the list of output ids."""

    lists = None  # a list, to which each request's output ids are added

    @classmethod
    def validate_params(cls, params):
        if params.extra_args and not isinstance(params.extra_args.get("target"), int):
            raise ValueError("target must be an integer")

    def is_argmax_invariant(self):
        return False

    def new_req_logits_processor(self, params):
        def count_upwards(prompt_ids, output_ids, logits):
            if self.lists is not None and not any(output_ids is one for one in self.lists):
                self.lists.append(output_ids)
            target = torch.tensor(params.extra_args["target"] + len(output_ids))
            return torch.full_like(logits, -torch.inf).index_fill(0, target, 0)

        return count_upwards if params.extra_args else None


class Doubling(LogitsProcessor):
    """Doubles all logits, which changes no argmax, and keeps what it is given."""

    seen = None  # a list

    def __init__(self, vllm_config, device, is_pin_memory):
        if self.seen is not None:
            self.seen.append((vllm_config, device, is_pin_memory))

    def is_argmax_invariant(self):
        return True

    def update_state(self, batch_update):
        pass

    def apply(self, logits):
        return logits * 2


def make(**settings):
    return LLM(device="cpu", **{"kv_cache_memory": 2**24} | settings)


SETTINGS = {
    "all at once": {},
    "two at a time": {"max_num_seqs": 2},
    "preempted": {"kv_cache_memory": 2**17, "block_size": 4, "max_model_len": 60},
}


@pytest.mark.slow
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_each_request_has_its_own_state_in_any_batch(settings):
    prompts = ["Once upon a time", "Lily was", "Tom", "The dog", "Once", "Ben was"]
    plain = SamplingParams(temperature=0.7, seed=3, max_tokens=9)
    params = [plain] * 6
    for i in (1, 2, 4, 5):
        extra_args = {"target": 100 * i + 50}
        params[i] = SamplingParams(max_tokens=8 + 2 * i, extra_args=extra_args, ignore_eos=True, n=1 + i % 2)
    outputs = make(**settings, logits_processors=[Target]).generate(prompts, params, use_tqdm=False)
    alone = [output.outputs[0].token_ids for output in make().generate(prompts[::3], plain, use_tqdm=False)]
    for i, output in enumerate(outputs):
        for answer in output.outputs:
            assert answer.token_ids == (list(range(100 * i + 50, 100 * i + 58 + 2 * i)) if i % 3 else alone[i // 3])
    assert not settings.get("block_size") or sum(output.metrics.num_preemptions for output in outputs) > 0


def test_greedy_requests_that_share_their_params_have_lists_of_output_ids_of_their_own(monkeypatch):
    monkeypatch.setattr(Target, "lists", [])
    llm = make(max_num_seqs=1, logits_processors=[Target])
    params = SamplingParams(temperature=0, max_tokens=4, extra_args={"target": 50}, ignore_eos=True)
    outputs = llm.generate(["Once", "Lily was", "Tom"], params, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == [[50, 51, 52, 53]] * 3
    assert Target.lists == [[50, 51, 52]] * 3


def test_an_argmax_invariant_one_runs_after_the_temperature_and_min_p_and_the_others_before_them(monkeypatch):
    monkeypatch.setattr(Doubling, "seen", [])
    llm = make(max_num_seqs=7, logits_processors=[Doubling, Target])
    names = [getattr(stage, "__name__", "") for stage in llm.engine.executor.sampler.stages]
    assert names[-7:] == ["apply_logits_processors", "Target", "apply_temperature", "keep_min_p", "Doubling", *names[-2:]]
    [(config, device, is_pinned)] = Doubling.seen
    assert config.model_config.get_vocab_size() == llm.info.vocab_size
    assert (config.model_config.max_model_len, config.scheduler_config.max_num_seqs) == (llm.info.max_model_len, 7)
    assert (device.type, is_pinned) == ("cpu", False)
    doubled, halved = (SamplingParams(temperature=temperature, seed=1, max_tokens=12) for temperature in (1.4, 0.7))
    [one], [other] = llm.generate("Lily", doubled, use_tqdm=False), make().generate("Lily", halved, use_tqdm=False)
    assert one.outputs[0].text == other.outputs[0].text


def test_what_a_processor_refuses_and_extra_args_that_nobody_reads_are_refused_before_anything_runs():
    llm = make(logits_processors=[f"{__name__}:Target"])
    with pytest.raises(InvalidValueError, match="prompt 1: Target refuses the parameters: target must be an integer"):
        llm.generate(["a", "b"], [SamplingParams(), SamplingParams(extra_args={"target": "x"})], use_tqdm=False)
    assert llm.engine.num_unfinished == 0
    with pytest.raises(InvalidValueError, match=r"nothing reads extra_args=\{'target': 5\}; leave it out"):
        make().generate("a", SamplingParams(extra_args={"target": 5}), use_tqdm=False)


REFUSED = [
    (Target, InvalidTypeError, r"list of classes with apply, is_argmax_invariant, .* SamplingParams\(logits_processors="),
    ([lambda ids, logits: logits], InvalidTypeError, "each of logits_processors must be a class or its name"),
    ([dict], InvalidTypeError, "must be a list of classes with apply, is_argmax_invariant, update_state"),
    ([None], InvalidTypeError, "must be a list of classes"),
    (["nowhere:Target"], InvalidValueError, "No module named 'nowhere'"),
]


def test_what_is_no_class_of_that_interface_and_drafts_are_refused():
    for wrong, error, words in REFUSED:
        with pytest.raises(error, match=words):
            LLM("no such model", logits_processors=wrong)
    with pytest.raises(UnsupportedError, match="speculative_config with logits_processors"):
        LLM("no such model", logits_processors=[Target], speculative_config={"method": "ngram"})


# ---- the functions of SamplingParams


class Processor:
    def __call__(self, output_ids, logits):
        return torch.tensor([2, *output_ids])

    def with_prompt(self, prompt_ids, output_ids, logits):
        return torch.tensor([3, *prompt_ids, *output_ids])

    @staticmethod
    def any_number(*arguments):
        return torch.tensor([len(arguments)])


SIGNATURES = [
    (Processor(), [2, 6]),
    (Processor().with_prompt, [3, 5, 6]),
    (Processor.any_number, [3]),
    (lambda output_ids, logits, scale=2: torch.tensor([2, scale]), [2, 2]),
    (lambda prompt_ids, output_ids, logits, scale=2: torch.tensor([3, scale]), [3, 2]),
    (functools.partial(lambda added, output_ids, logits: torch.tensor([2, added]), 7), [2, 7]),
]


def test_a_processor_gets_the_arguments_that_its_signature_requires():
    for processor, expected in SIGNATURES:
        params = SamplingParams(logits_processors=[processor])
        for one in (params, params.clone(), copy.copy(params)):
            assert one.logits_processors[0]([5], [6], torch.zeros(9)).tolist() == expected


def test_a_processor_with_a_different_number_of_arguments_is_refused():
    for processor in (
        lambda: None,
        lambda logits: logits,
        lambda a, b, c, d: d,
        lambda output_ids, logits, *, scale: logits,
        max,  # written in C, without a signature
        int,
    ):
        with pytest.raises(InvalidTypeError, match=r"logits_processors must be a function \(prompt_ids, output_ids, logits\) "):
            SamplingParams(logits_processors=[Processor(), processor])
