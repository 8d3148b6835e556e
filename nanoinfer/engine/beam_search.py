"""Beam search: of all ways to go on, keep the few that are likeliest so far, at every step.

In: prompts and BeamSearchParams. Out: a BeamSearchOutput each, the answers with the best scores first. It is built on what the
engine has, not inside the scheduler: a beam is a Sequence, going on from one is a fork, and beams that come from one share its
blocks until they write (copy on write). Beams of a prompt run together or not at all, so nothing of them is ever preempted.

    step 1   [prompt] -> The, A              width 2: two beams, sharing the prompt's blocks
    step 2   [The] -> cat, dog; [A] -> cat   the two best of all continuations may come from one beam: [The cat], [The dog]

The results are those of transformers' generate(num_beams=..., do_sample=False), one prompt at a time: the same candidates, the
same scores, the same moment to stop.
"""

from collections import deque
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from nanoinfer.engine.llm_engine import LLMEngine
from nanoinfer.engine.prompts import Prompt, parse_prompt, with_prompt_index
from nanoinfer.errors import InvalidValueError, NanoinferError
from nanoinfer.outputs import BeamSearchOutput, BeamSearchSequence, FinishReason
from nanoinfer.sampling.sampler import NOT_FINITE
from nanoinfer.sampling_params import BeamSearchParams, SamplingParams
from nanoinfer.scheduling.scheduler import ScheduledSequence, SchedulerPlan, rows_of
from nanoinfer.scheduling.sequence import Sequence


class BeamSearch:
    """Runs the searches of one call, as many prompts at a time as fit. One step() is one forward pass."""

    def __init__(self, engine: LLMEngine, prompts: list[Any], params: BeamSearchParams) -> None:
        """Raises: InvalidPromptError, InvalidValueError, NanoinferError (too few free blocks), naming the prompt's index."""
        self._engine = engine
        self._capacity = engine.block_manager.num_free_blocks  # for as long as this call runs, nobody else takes any
        self._groups = []
        for index, prompt in enumerate(prompts):
            with with_prompt_index(index):
                parsed = parse_prompt(prompt, engine.tokenizer)
                engine.admission.check(parsed.token_ids, SamplingParams(detokenize=False))
                group = _Group(engine, parsed, params, f"beam{index}")
                self._check_fits(group, params.beam_width)
                self._groups.append(group)
        self._waiting = deque(group for group in self._groups if group.error is None)
        self._running: list[_Group] = []

    @property
    def outputs(self) -> list[BeamSearchOutput]:
        """In the order of the prompts; call it when num_unfinished is 0."""
        return [group.output(self._engine) for group in self._groups]

    @property
    def num_unfinished(self) -> int:
        return len(self._waiting) + len(self._running)

    def step(self) -> None:
        """One forward pass: one token for every beam, and prompts as far as max_num_batched_tokens allows."""
        self._admit()
        scheduled: list[ScheduledSequence] = []
        budget = self._engine.scheduler.config.max_num_batched_tokens
        for group in self._running:
            num_new = self._engine.scheduler.next_chunk(group.beams[0])
            if num_new > 1 and num_new > budget:
                continue
            budget -= num_new if num_new > 1 else 0
            scheduled += [ScheduledSequence(beam, num_new) for beam in group.beams]
        scheduled.sort(key=lambda item: item.num_new_tokens > 1)  # single tokens first: ForwardBatch's order
        allocate = self._engine.block_manager.allocate
        copies = [pair for item in scheduled for pair in allocate(item.sequence, item.num_new_tokens)]
        plan = SchedulerPlan(tuple(scheduled), rows_of(scheduled), (), tuple(copies), ())
        logprobs = self._engine.compute(plan).log_softmax(dim=-1)  # [num_rows, vocab]
        self._engine.scheduler.commit(plan)
        row_of = {id(beam): row for row, (beam, _) in enumerate(plan.rows)}
        for group in list(self._running):
            if rows := [row_of[id(beam)] for beam in group.beams if id(beam) in row_of]:  # all of its beams, or none
                group.advance(logprobs[rows], self._engine)
            if group.is_done:
                self._running.remove(group)
                group.free(self._engine)

    def close(self) -> None:
        """Free the blocks of whatever still runs."""
        for group in self._running:
            group.free(self._engine)
        self._running.clear()
        self._engine.tell()

    def _admit(self) -> None:
        """Start waiting prompts, in order, while there is room for all that their beams can grow to."""
        scheduler = self._engine.scheduler.config
        while self._waiting:
            group = self._waiting[0]
            num_blocks = sum(other.most_blocks for other in self._running) + group.most_blocks
            num_beams = sum(other.width for other in self._running) + group.width
            if self._running and (num_blocks > self._capacity or num_beams > scheduler.max_num_seqs):
                break
            self._running.append(self._waiting.popleft())
            group.start(self._engine)

    def _check_fits(self, group: "_Group", beam_width: int) -> None:
        if beam_width > self._engine.scheduler.config.max_num_seqs:
            raise InvalidValueError(
                f"beam_width is {beam_width}, but max_num_seqs is {self._engine.scheduler.config.max_num_seqs}; "
                "lower beam_width, or raise max_num_seqs"
            )
        if group.error is None and group.most_blocks > self._capacity:
            raise NanoinferError(
                f"{beam_width} beams of this prompt may need {group.most_blocks} blocks of the KV cache, and "
                f"{self._capacity} are free; lower beam_width or max_tokens, raise kv_cache_memory, or wait for other requests"
            )


class _Group:
    """The beams of one prompt, and those of its answers that have ended."""

    def __init__(self, engine: LLMEngine, prompt: Prompt, params: BeamSearchParams, name: str) -> None:
        self.prompt = prompt
        self.params = params
        self.width = params.beam_width
        self.error: str | None = None
        self.is_done = False
        self.eos_token_ids = frozenset() if params.ignore_eos else engine.eos_token_ids
        num_prompt, block_size = len(prompt.token_ids), engine.block_manager.block_size
        self.max_tokens = min(params.max_tokens, engine.max_model_len - num_prompt)  # most that can be generated
        if self.max_tokens < 1:
            self.error = engine.admission.too_long(num_prompt)
            self.is_done = True
        num_shared = num_prompt // block_size
        num_own = engine.block_manager.num_blocks_for(num_prompt + self.max_tokens) - num_shared
        self.most_blocks = num_shared + self.width * num_own
        self.beams: list[Sequence] = []
        self._name, self._num_beams = name, 0  # the tracer's names: beam0, beam0.1, beam0.2 and so on, as they come
        self.scores = torch.zeros(1)  # [num_beams], sums of log-probabilities in falling order
        self.finished: list[tuple[list[int], float]] = []  # (generated ids, sum of log-probabilities)
        self.finished_scores = torch.zeros(0)  # [len(finished)], falling

    def start(self, engine: LLMEngine) -> None:
        """One beam: the prompt."""
        beam = self._beam(list(self.prompt.token_ids), len(self.prompt.token_ids) + self.max_tokens)
        prefix = engine.scheduler.match_prefix(beam)
        engine.block_manager.start(beam, prefix)
        beam.num_computed_tokens = len(prefix) * engine.block_manager.block_size
        self.beams = [beam]

    def advance(self, logprobs: Float[Tensor, "num_beams vocab"], engine: LLMEngine) -> None:
        """Take one step's log-probabilities: choose the next beams, and put aside what has ended."""
        if not logprobs.amax(dim=-1).isfinite().all():
            self.error = NOT_FINITE
            self.is_done, self.finished, self.finished_scores = True, [], torch.zeros(0)
            return
        vocab_size = logprobs.shape[-1]
        num_generated = self.beams[0].num_output_tokens + 1
        totals = (logprobs.cpu() + self.scores.unsqueeze(-1)).flatten()  # [num_beams * vocab]
        # More than width, since some of them end: one ending for each EOS id and beam leaves at least width that go on.
        num_candidates = max(2, 1 + len(self.eos_token_ids)) * self.width
        best, indices = totals.topk(min(num_candidates, len(totals)))  # in falling order
        origins, token_ids = (indices // vocab_size).tolist(), (indices % vocab_size).tolist()
        ends = [token_id in self.eos_token_ids or num_generated == self.max_tokens for token_id in token_ids]

        ended = [i for i in range(min(self.width, len(ends))) if ends[i]]  # an ending counts only among the best `width`
        self._put_aside([self._generated(origins[i], token_ids[i]) for i in ended], best[ended], num_generated)
        going_on = [i for i, it_ends in enumerate(ends) if not it_ends][: self.width]
        self.is_done = not going_on or self._may_stop(best[going_on], num_generated)
        if not self.is_done:
            self._fork([(origins[i], token_ids[i]) for i in going_on], engine)
            self.scores = best[going_on]

    def free(self, engine: LLMEngine) -> None:
        for beam in self.beams:
            engine.block_manager.free(beam)
        self.beams = []

    def output(self, engine: LLMEngine) -> BeamSearchOutput:
        sequences = []
        for (token_ids, total), score in zip(self.finished, self.finished_scores.tolist(), strict=True):
            text = "" if engine.tokenizer is None else engine.tokenizer.decode(token_ids)
            finish_reason: FinishReason = "stop" if token_ids[-1] in self.eos_token_ids else "length"
            sequences.append(BeamSearchSequence(text, token_ids, score, total, finish_reason))
        return BeamSearchOutput(self.prompt.text, self.prompt.token_ids, sequences, self.error)

    def _beam(self, prompt_token_ids: list[int], max_num_tokens: int) -> Sequence:
        self._num_beams += 1
        return Sequence(self._name, prompt_token_ids, SamplingParams(), 0, max_num_tokens, index=self._num_beams - 1)

    def _generated(self, origin: int, token_id: int) -> list[int]:
        return [*self.beams[origin].output_token_ids, token_id]

    def _put_aside(self, ended: list[list[int]], totals: Float[Tensor, " ended"], num_generated: int) -> None:
        """Keep the best `width` of all that have ended. A score is a sum of log-probabilities over length ** length_penalty."""
        scores = torch.cat((self.finished_scores, totals / num_generated**self.params.length_penalty))
        together = self.finished + list(zip(ended, totals.tolist(), strict=True))
        self.finished_scores, order = scores.topk(min(self.width, len(together)))
        self.finished = [together[i] for i in order.tolist()]

    def _may_stop(self, scores: Float[Tensor, " num_beams"], num_generated: int) -> bool:
        """Is there nothing left to hope for? Never before `width` answers have ended."""
        if len(self.finished) < self.width:
            return False
        if self.params.early_stopping is True:
            return True
        # The best that the likeliest beam can come to. Its sum can only fall; a longer answer divides it by more.
        length_penalty = self.params.length_penalty
        never = self.params.early_stopping == "never" and length_penalty > 0
        best_possible = scores[0] / (self.max_tokens if never else num_generated) ** length_penalty
        return bool(best_possible <= self.finished_scores[-1])

    def _fork(self, continuations: list[tuple[int, int]], engine: LLMEngine) -> None:
        """The next beams: (which of the present ones, and the token it goes on with)."""
        children = []
        for origin, token_id in continuations:
            parent = self.beams[origin]
            child = self._beam(parent.prompt_token_ids, parent.max_num_tokens)
            engine.block_manager.fork(parent, child)
            child.token_ids = [*parent.token_ids, token_id]
            child.num_computed_tokens = parent.num_computed_tokens
            children.append(child)
        self.free(engine)
        self.beams = children
