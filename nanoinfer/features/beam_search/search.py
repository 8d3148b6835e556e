"""Beam search: at every step, keep the beam_width most likely continuations of all beams.

In: prompts and BeamSearchParams. Out: a BeamSearchOutput for each, its best answers first. It uses the engine's parts without
the scheduler's queues. A beam is a Sequence, a continuation is a fork, and beams with a common origin share its blocks until
they write (copy on write). The beams of a prompt run together or not at all, so they are never preempted.

    step 1   [prompt] -> The, A              width 2: two beams that share the prompt's blocks
    step 2   [The] -> cat, dog; [A] -> cat   the two best continuations may both continue the same beam: [The cat], [The dog]

The results are those of transformers' generate(num_beams=..., do_sample=False), one prompt at a time: the same candidates,
scores and end. Scores are added in float32, as there.
"""

from collections import deque
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from nanoinfer.engine.inputs import PreparedRequest, as_list, with_prompt_index
from nanoinfer.engine.llm_engine import LLMEngine
from nanoinfer.errors import InvalidTypeError, NanoinferError, UnsupportedError, shown
from nanoinfer.execution.executor import SequenceOutput
from nanoinfer.features.beam_search.params import BeamSearchOutput, BeamSearchParams, BeamSearchSequence
from nanoinfer.features.logprobs.token_logprobs import ReportingSampler, RowReport, TokenLogprobs
from nanoinfer.outputs import FinishReason
from nanoinfer.sampling.sampler import Sampler
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.scheduling.sequence import Sequence
from nanoinfer.scheduling.step_plan import ScheduledSequence, StepPlan, rows_of
from nanoinfer.tokenization.detokenizer import REPLACEMENT

Floats = npt.NDArray[np.float32]


class BeamSearch:
    """Runs the searches of one call: as many prompts at a time as the cache has room for."""

    def __init__(self, engine: LLMEngine, prompts: object, params: BeamSearchParams) -> None:
        """Raises: UnsupportedError; InvalidPromptError, NanoinferError (too few free blocks), with the prompt's index."""
        if not isinstance(params, BeamSearchParams):
            raise InvalidTypeError(f"params must be BeamSearchParams, got {shown(params)}")
        params = params.clone()
        if engine.config.stages is not None or engine.config.logits_processors:
            of_user = "stages" if engine.config.stages is not None else "logits_processors"
            raise UnsupportedError(
                f"beam_search() with {of_user} of your own is not supported, since it ranks the model's own log-probabilities; "
                f"make an LLM without {of_user}, or use generate()"
            )
        engine.check_accepting()
        self._engine = engine
        self._capacity = engine.block_manager.num_free_blocks  # the blocks that other requests leave free
        self._sampler = ReportingSampler(Sampler())  # without the engine's logprobs_mode, which may ask for other numbers
        self._searches = []
        sampling_params = SamplingParams(temperature=0.0, detokenize=False)
        for index, prompt in enumerate(as_list(prompts)):
            with with_prompt_index(index):
                prepared = engine.inputs.prepare(prompt, sampling_params)
                search = _PromptSearch(engine, prepared, params, f"beam{index}")
                if search.error is None and search.most_blocks > self._capacity:
                    raise NanoinferError(
                        f"{search.width} beams of this prompt may need {search.most_blocks} blocks of the KV cache, and "
                        f"{self._capacity} are free; lower beam_width or max_tokens, raise kv_cache_memory, or wait for other "
                        "requests"
                    )
                self._searches.append(search)
        self._waiting = deque(search for search in self._searches if search.error is None)
        self._running: list[_PromptSearch] = []

    def run(self) -> list[BeamSearchOutput]:
        """Search, and return the outputs in the order of the prompts. The call waits while another thread runs a step."""
        try:
            while self._waiting or self._running:
                self._step()
        finally:
            with self._engine.guard.between_steps():
                for search in self._running:
                    search.free(self._engine)
        return [search.output(self._engine) for search in self._searches]

    def _step(self) -> None:
        """Compute a token for every beam, and start prompts as far as max_num_batched_tokens allows.

        This takes one forward pass, or several if there are more than max_num_seqs beams, which then run in groups.
        """
        with self._engine.guard.exclusive():
            self._admit()
            scheduled: list[ScheduledSequence] = []
            budget = self._engine.scheduler.config.max_num_batched_tokens
            for search in self._running:
                num_new = self._engine.scheduler.next_chunk(search.beams[0], search.beams[0].num_computed_tokens)
                if num_new > 1 and num_new > budget:
                    continue
                budget -= num_new if num_new > 1 else 0
                scheduled += [ScheduledSequence(beam, num_new) for beam in search.beams]
            scheduled.sort(key=lambda item: item.num_new_tokens > 1)  # single tokens first, as ForwardBatch expects
            outputs: dict[Sequence, SequenceOutput] = {}
            num_together = self._engine.scheduler.config.max_num_seqs
            for start in range(0, len(scheduled), num_together):
                outputs |= self._compute(scheduled[start : start + num_together])
            for search in list(self._running):
                if search.beams[0] in outputs:  # a pass computes all beams of a prompt or none
                    search.advance([outputs[beam] for beam in search.beams], self._engine)
                if search.is_done:
                    self._running.remove(search)
                    search.free(self._engine)

    def _compute(self, scheduled: list[ScheduledSequence]) -> dict[Sequence, SequenceOutput]:
        """Run one forward pass. Raises: NanoinferError if requests of another thread have taken the blocks."""
        copies = []
        for item in scheduled:
            if not self._engine.block_manager.can_allocate(item.sequence, item.num_new_tokens):
                raise NanoinferError(
                    "other requests have taken the blocks of the KV cache that this search needs; "
                    "let one thread at a time use an LLM, or raise kv_cache_memory"
                )
            copies += self._engine.block_manager.allocate(item.sequence, item.num_new_tokens)
        plan = StepPlan(tuple(scheduled), rows_of(scheduled), block_copies=tuple(copies), sampler=self._sampler)
        executor = self._engine.executor
        self._engine.observer.step_launched(plan, None)
        step = executor.collect(executor.launch(plan, None))
        self._engine.scheduler.commit(plan)
        return {output.sequence: output for output in step.sequences}

    def _admit(self) -> None:
        """Start waiting prompts, in order, while there is room for their beams at full length."""
        scheduler = self._engine.scheduler.config
        while self._waiting:
            search = self._waiting[0]
            num_blocks = sum(other.most_blocks for other in self._running) + search.most_blocks
            num_beams = sum(other.width for other in self._running) + search.width
            if self._running and (num_blocks > self._capacity or num_beams > scheduler.max_num_seqs):
                break
            self._running.append(self._waiting.popleft())
            search.start(self._engine)


class _PromptSearch:
    """The beams of one prompt, and its finished answers."""

    def __init__(self, engine: LLMEngine, prepared: PreparedRequest, params: BeamSearchParams, name: str) -> None:
        self._prepared = prepared
        self.params = params
        self.width = params.beam_width
        self.error = None if prepared.error is None else prepared.error.message
        self.is_done = self.error is not None
        self.eos_token_ids = frozenset() if params.ignore_eos else engine.eos_token_ids | prepared.eos_token_ids
        # More candidates than width, since some end: if every beam ends with every EOS id, at least width others continue.
        self.num_candidates = max(2, 1 + len(self.eos_token_ids)) * self.width
        num_logprobs = min(self.num_candidates, engine.executor.info.vocab_size)
        self._beam_params = replace(prepared.params, logprobs=num_logprobs)
        num_prompt = len(prepared.prompt_token_ids)
        self.max_tokens = min(params.max_tokens, engine.max_model_len - num_prompt)  # the most tokens that can be generated
        self.most_blocks = engine.block_manager.num_blocks_for_forks(self.width, num_prompt, num_prompt + self.max_tokens)
        self.beams: list[Sequence] = []
        self._name, self._num_beams = name, 0  # the trace names the beams beam0, beam0.1, beam0.2 and so on
        self.scores: Floats = np.zeros(1, np.float32)  # [num_beams], sums of log-probabilities in falling order
        self.finished: list[tuple[float, list[int], float]] = []  # (falling score, generated ids, sum of log-probabilities)

    def start(self, engine: LLMEngine) -> None:
        """Begin with a single beam, which is the prompt."""
        prompt_token_ids = self._prepared.prompt_token_ids
        beam = self._beam(list(prompt_token_ids), len(prompt_token_ids) + self.max_tokens)
        prefix = engine.block_manager.match_prefix(beam.token_ids, beam.cache_salt)
        engine.block_manager.start(beam, prefix)
        beam.num_computed_tokens = len(prefix) * engine.block_manager.block_size
        self.beams = [beam]

    def advance(self, outputs: list[SequenceOutput], engine: LLMEngine) -> None:
        """Choose the next beams from each beam's most likely ids, and put finished answers aside."""
        if errors := [output.error for output in outputs if output.error]:
            self.error = errors[0]
            for beam in self.beams:
                engine.block_manager.forget_cached(beam)
            self.is_done, self.finished = True, []
            return
        num_generated = self.beams[0].num_output_tokens + 1
        top = [_logprobs_of(output) for output in outputs]  # for each beam, at least the best num_candidates
        token_ids = np.concatenate([logprobs.ids for logprobs in top])
        origins = np.repeat(np.arange(len(top)), [len(logprobs.ids) for logprobs in top])
        totals = np.concatenate([np.array(logprobs.values, np.float32) for logprobs in top]) + self.scores[origins]
        order = np.argsort(-totals, kind="stable")[: self.num_candidates]  # in falling order
        totals, candidates = totals[order], list(zip(origins[order].tolist(), token_ids[order].tolist(), strict=True))
        ends = [token_id in self.eos_token_ids or num_generated == self.max_tokens for _, token_id in candidates]

        ended = [i for i in range(min(self.width, len(ends))) if ends[i]]  # an ending counts only among the best `width`
        generated = [[*self.beams[candidates[i][0]].output_token_ids, candidates[i][1]] for i in ended]
        scores = totals[ended] / np.float32(num_generated**self.params.length_penalty)
        together = [*self.finished, *zip(scores.tolist(), generated, totals[ended].tolist(), strict=True)]
        self.finished = sorted(together, key=lambda answer: -answer[0])[: self.width]  # stable: the earlier of equal scores
        continuing = [i for i, it_ends in enumerate(ends) if not it_ends][: self.width]
        self.is_done = not continuing or self._may_stop(totals[continuing], num_generated)
        if not self.is_done:
            self._fork([candidates[i] for i in continuing], engine)
            self.scores = totals[continuing]

    def free(self, engine: LLMEngine) -> None:
        for beam in self.beams:
            engine.block_manager.free(beam)
        self.beams = []

    def output(self, engine: LLMEngine) -> BeamSearchOutput:
        sequences = []
        for score, token_ids, total in self.finished:
            text = "" if engine.tokenizer is None else engine.tokenizer.decode(token_ids).rstrip(REPLACEMENT)
            finish_reason: FinishReason = "stop" if token_ids[-1] in self.eos_token_ids else "length"
            tokens = self._prepared.prompt_token_ids + token_ids
            sequences.append(BeamSearchSequence(text, token_ids, tokens, score, total, finish_reason))
        return BeamSearchOutput(self._prepared.prompt, self._prepared.prompt_token_ids, sequences, self.error)

    def _beam(self, prompt_token_ids: list[int], max_num_tokens: int) -> Sequence:
        self._num_beams += 1
        salt, index = self._prepared.cache_salt, self._num_beams - 1
        return Sequence(self._name, prompt_token_ids, self._beam_params, 0, max_num_tokens, index=index, cache_salt=salt)

    def _may_stop(self, scores: Floats, num_generated: int) -> bool:
        """Whether no running beam can still become one of the best `width` answers."""
        if len(self.finished) < self.width:
            return False
        if self.params.early_stopping is True:
            return True
        # The best score that the most likely beam can reach. Its sum can only fall, and a longer answer divides it by more.
        length_penalty = self.params.length_penalty
        never = self.params.early_stopping == "never" and length_penalty > 0
        best_possible = scores[0] / np.float32((self.max_tokens if never else num_generated) ** length_penalty)
        return bool(best_possible <= self.finished[-1][0])

    def _fork(self, continuations: list[tuple[int, int]], engine: LLMEngine) -> None:
        """Make the next beams. continuations: pairs of a beam's index and its next token."""
        children = []
        for origin, token_id in continuations:
            parent = self.beams[origin]
            child = self._beam(parent.prompt_token_ids, parent.max_num_tokens)
            engine.block_manager.fork(parent, child)
            child.token_ids = [*parent.token_ids, token_id]
            child.num_tokens = len(child.token_ids)
            child.num_computed_tokens = parent.num_computed_tokens
            children.append(child)
        self.free(engine)
        self.beams = children


def _logprobs_of(output: SequenceOutput) -> TokenLogprobs:
    [report] = output.reports
    logprobs = report.logprobs if isinstance(report, RowReport) else None
    assert logprobs is not None, "the beam asks for them"
    return logprobs
