"""An LLM inference engine in one file: continuous batching, paged KV cache, prefix cache, preemption.

    python engine.py "Once upon a time"                          generate a text with a bundled model
    python engine.py --model Qwen3-0.6B --device cuda "Hello"    a folder with config.json, *.safetensors and tokenizer.json
    python engine.py --serve 8000                                OpenAI's /v1/completions, also as a stream
    torchrun --nproc-per-node 2 engine.py "Once upon a time"     the rows of the LM head divided among two processes

Read it from the top. LLM.step is the engine: each part after it is what one of its lines calls, in the order of these lines.

    prompt -> ids -> Sequence -> Scheduler -> ForwardBatch -> model(attend) -> LM head -> stages -> draw -> text

"A first reading ends here" says where the engine is complete. What follows makes it faster or reaches it from outside.

It differs from vLLM and nano-vllm in three places. A step is neither prefill nor decode: a prompt, a chunk of it, a new token
and what a preemption has cost are all tokens that are known and not yet in the cache. Prompts are cut at multiples of
chunk_size, never where the step is full, so other requests cannot change a sequence's numbers. A token is drawn by integers.

Generated from nanoinfer's source by `make one-file`. Change it there.
"""

from __future__ import annotations  # classes may be named before they are defined

import argparse
import json
import secrets
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from collections.abc import Sequence as ListLike
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import accumulate, chain, islice, pairwise, starmap
from math import prod
from pathlib import Path
from struct import Struct
from typing import Annotated, Any, Literal, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream
from torch import Tensor, nn

Bool = Float = Int = Annotated  # Float[Tensor, "batch vocab"] is a Tensor with its shape, for the reader
Ids = Int[Tensor, " num_tokens"]  # also the shape of positions
Hidden = Float[Tensor, "num_tokens hidden"]  # a row for each token
Angles = Float[Tensor, "num_tokens 1 num_rotated"]  # the cos or the sin of each token's position, for all heads
Heads = Float[Tensor, "num_tokens heads head_dim"]
Queries = Float[Tensor, "num_tokens num_heads head_dim"]
Keys = Float[Tensor, "num_tokens num_kv_heads head_dim"]  # also the shape of values
Prefix = list[tuple[bytes, int]]  # the keys of the blocks that hold the beginning of a prompt, each with its block
FinishReason = Literal["stop", "length", "repetition", "abort", "timeout", "error"]
Logits = Float[Tensor, "batch vocab"]
ConfigJson, shown, CheckpointError, Embedding = dict[str, Any], repr, ValueError, nn.Embedding
Attend = Callable[[int, Queries, Keys, Keys], Queries]  # (layer, q, k, v) -> the weighted values
MODEL = Path(__file__).parents[1] / "nanoinfer/loading/bundled/tiny-qwen3"


# ---- 1. The engine: LLM.step
class LLM:
    """A loaded model and its queue of requests: `LLM(folder).generate(["Hello"], SamplingParams(max_tokens=20))`."""

    def __init__(
        self,
        model: str | Path = MODEL,
        *,
        device: str = "auto",
        dtype: str = "auto",
        block_size: int | None = None,
        num_blocks: int | None = None,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 4096,
        chunk_size: int = 1024,
        enable_prefix_caching: bool = True,
        enforce_eager: bool = False,
        num_drafts: int = 0,
    ) -> None:
        """model: a checkpoint's folder. num_blocks: of the KV cache. None: as many as the memory holds."""
        self.model, self.tokenizer, self.eos_token_ids = load(Path(model), device, dtype)
        self.runner = ModelRunner(self.model, block_size, num_blocks, None if enforce_eager else max_num_seqs)
        cache = self.runner.cache
        manager = BlockManager(cache.num_blocks, cache.block_size, enable_prefix_caching)
        self.scheduler = Scheduler(SchedulerConfig(max_num_seqs, max_num_batched_tokens, chunk_size), manager)
        self.max_model_len = min(self.model.config.max_position_embeddings, cache.num_blocks * cache.block_size)
        self.planner = Drafts(manager, num_drafts) if num_drafts else None
        self.answers: dict[Sequence, Answer] = {}  # of the unfinished sequences
        self.num_requests, self.lock = 0, threading.Lock()

    def generate(
        self, prompts: str | ListLike[str | list[int]], sampling_params: SamplingParams | ListLike[SamplingParams] | None = None
    ) -> list[RequestOutput]:
        """Answer all prompts in one batch, and return the outputs in the order of the prompts."""
        prompts, params = [prompts] if isinstance(prompts, str) else prompts, sampling_params or SamplingParams()
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
        requests: list[Request] = []
        try:
            requests.extend(self.add_request(*pair) for pair in zip(prompts, each, strict=True))
            while self.answers:
                self.step()
        finally:  # also after a prompt that was refused
            for request in requests:
                self.abort(request)
        return [request.output() for request in requests]

    def stream(self, prompt: str | list[int], params: SamplingParams) -> Iterator[str]:
        """Yield the text of an answer in pieces. Leaving the loop early aborts the request."""
        yield from self.texts(self.add_request(prompt, params))

    def texts(self, request: Request) -> Iterator[str]:
        """Yield the text of a request's first answer. Of several threads, the one with the lock makes the step of all."""
        try:
            is_running = True
            while is_running:
                with self.lock:
                    if request.is_running:
                        self.step()
                    is_running = request.is_running  # after the yield, another thread may have ended it
                yield request.new_text()
        finally:
            with self.lock:
                self.abort(request)

    def add_request(self, prompt: str | list[int], params: SamplingParams, cache_salt: str | None = None) -> Request:
        """Queue a prompt: a sequence for each of the n answers, of which the first computes the prompt for all."""
        ids = self.tokenizer.encode(prompt).ids if isinstance(prompt, str) else list(prompt)
        if not 0 < len(ids) < self.max_model_len:
            raise ValueError(f"a prompt must have 1 .. {self.max_model_len - 1} tokens, got {len(ids)}")
        known = range(self.model.config.vocab_size)
        if wrong := [each for each in (*ids, *(params.stop_token_ids or ())) if type(each) is not int or each not in known]:
            raise ValueError(f"token ids must be integers in 0 .. {len(known) - 1}, got {wrong[0]!r}")
        seed = secrets.randbits(64) if params.seed is None else params.seed
        end = min(len(ids) + (params.max_tokens or self.max_model_len), self.max_model_len)
        shared = {"max_num_tokens": end, "eos_token_ids": self.eos_token_ids, "cache_salt": cache_salt}
        name, seeds = str(self.num_requests), [(seed + i) % 2**64 for i in range(params.n)]
        first, *forks = [Sequence(name, ids, params, each, **shared) for each in seeds]
        first.forks, self.num_requests = forks, self.num_requests + 1
        answers = {seq: Answer(seq, Detokenizer(self.tokenizer)) for seq in (first, *forks)}
        self.answers |= answers
        self.scheduler.add(first)
        return Request(prompt, list(answers.values()))

    @torch.inference_mode()
    def step(self) -> None:
        """Compute some tokens of some sequences, and append the sampled tokens to their answers."""
        plan = self.scheduler.schedule()  # which sequences run, and how many tokens of each
        plan = self.planner.complete(plan) if self.planner else plan  # guesses at the tokens that follow, in the same pass
        batch = ForwardBatch.build(plan, self.runner.cache.block_size, self.runner.device)  # their new tokens in a row
        hidden = self.runner.forward(batch)  # [num_tokens, hidden]. Attention reads and writes the paged cache
        logits = self.model.compute_logits(hidden[batch.logits_indices]).float()  # of the rows that need a next token
        sampling = SamplingBatch.build([seq for seq, _ in plan.rows], logits.shape[-1], logits.device)
        token_ids = sample(logits, sampling).tolist()  # the one time that the host waits for the device
        self.scheduler.commit(plan)  # count the plan's tokens as cached
        for seq, rows in accepted_rows(plan, token_ids):
            answer = self.answers[seq]
            for token_id in token_ids[rows.start : rows.stop]:
                if token_id < 0:  # the logits are not finite, or the stages have left no token
                    answer.finish(Stop("error"))
                    self.scheduler.block_manager.forget_cached(seq)
                else:
                    self.scheduler.append(seq, token_id)
                    answer.advance(token_id)
                if answer.stop:
                    del self.answers[seq]
                    self.scheduler.finish(seq)
                    break

    def abort(self, request: Request) -> None:
        """End what still runs of a request."""
        for answer in [each for each in request.answers if not each.stop]:
            answer.finish(Stop("abort"))
            del self.answers[answer.seq]
            self.scheduler.finish(answer.seq)


# ---- 2. Sequences, and the plan of a step
class SequenceStatus(Enum):
    PENDING = "pending"  # a further answer (n > 1) to a prompt that has not been computed yet
    WAITING = "waiting"  # new or preempted: it holds no block
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False, slots=True)  # eq=False: sequences are compared by identity
class Sequence:
    """A prompt and the tokens generated after it.

    There is no phase flag: a prompt, a chunk of it, a decode step and a recomputation after preemption are all `num_new_tokens`
    tokens that are known and not yet in the cache. A decode step has a single new token.
    """

    # set once, when the request enters the engine
    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    max_num_tokens: int  # of prompt and output, at which the answer ends with "length"
    eos_token_ids: frozenset[int] = frozenset()
    is_answered: bool = True  # False: the prompt is only read. The token that ends it is not counted, and no block is cached
    index: int = 0  # the index of this answer among the prompt's n answers
    cache_salt: str | None = None  # cached blocks are shared only between sequences with the same salt
    token_ids: list[int] = field(init=False)  # prompt + output: the scheduler (beam search writes those of its beams)
    num_tokens: int = field(init=False)  # those of token_ids, and one that is still being sampled: the scheduler
    num_computed_tokens: int = field(default=0, init=False)  # the number of tokens in the cache: the scheduler
    status: SequenceStatus = field(default=SequenceStatus.WAITING, init=False)  # the scheduler
    block_table: list[int] = field(default_factory=list, init=False)  # the block manager
    prefix_keys: list[bytes] = field(default_factory=list, init=False)  # the keys of its full, cached blocks: the block manager
    forks: list[Sequence] = field(default_factory=list, init=False)  # PENDING: set by the engine, taken by the scheduler
    as_decode: ScheduledSequence | None = field(default=None, init=False)  # its item in steps with one token: the scheduler

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt_token_ids)
        self.num_tokens = len(self.token_ids)

    @property
    def num_new_tokens(self) -> int:
        return self.num_tokens - self.num_computed_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[len(self.prompt_token_ids) :]

    @property
    def stop_ids(self) -> Iterable[int]:
        """EOS and stop ids, which min_tokens forbids."""
        return self.eos_token_ids.union(self.params.stop_token_ids or ())


@dataclass(slots=True)  # not frozen, so that making an instance takes a third of the time
class ScheduledSequence:
    """A sequence of the step, and the number of its next tokens, not yet in the cache, that the step computes."""

    sequence: Sequence
    num_new_tokens: int
    # a guess at the tokens that follow. Each is computed as another single-token row after the sequence's newest token. Only a
    # decode step has drafts
    draft_token_ids: tuple[int, ...] = ()

    def num_accepted(self, sampled_token_ids: list[int]) -> int:
        """Return the number of drafts before the first that differs from the token sampled at its position."""
        num = 0
        while num < len(self.draft_token_ids) and self.draft_token_ids[num] == sampled_token_ids[num]:
            num += 1
        return num


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The plan of one step."""

    # single-token sequences, then prompt chunks, each group oldest first. Packed tokens have the same order
    scheduled: tuple[ScheduledSequence, ...]
    # the (sequence, packed index) pairs whose hidden rows reach the LM head and the sampler. A chunk that does not end its
    # prompt has no row. Forks have the index of the sequence they come from. A sequence with drafts has a row for its newest
    # token and a row for each draft
    rows: tuple[tuple[Sequence, int], ...] = ()
    block_copies: tuple[tuple[int, int], ...] = ()  # the (from, to) blocks that are copied before the forward pass


def rows_of(scheduled: Iterable[ScheduledSequence]) -> tuple[tuple[Sequence, int], ...]:
    """Return the sequences whose last known token this step computes, and their forks, with that token's packed index."""
    rows = []
    end = 0
    for item in scheduled:
        end += item.num_new_tokens
        if item.num_new_tokens == item.sequence.num_new_tokens:
            rows += [(seq, end - 1) for seq in (item.sequence, *item.sequence.forks)]
        for _ in item.draft_token_ids:
            rows.append((item.sequence, end))
            end += 1
    return tuple(rows)


# ---- 3. The scheduler: who runs, and how many tokens of each
class Scheduler:
    """Owns the two queues, and every sequence's status, ids and counts of tokens.

    1. First come, first served. A running sequence is older than every waiting one.
    2. A sequence with one new token always runs. max_num_batched_tokens limits the tokens of all others.
    3. A prompt is cut at absolute multiples of the chunk grid, never at the remaining budget, so that other requests cannot
       move its cuts. A chunk runs as a whole or waits, and while it waits, no younger prompt passes it.
    4. When blocks run out, the running sequence that started last is preempted. Its blocks are freed, it waits at the head of
       the queue, and it later recomputes its tokens, except for those that the prefix cache still holds.
    """

    def __init__(self, config: SchedulerConfig, block_manager: BlockManager) -> None:
        self.config, self.block_manager = config, block_manager
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    def add(self, seq: Sequence) -> None:
        """Queue a new sequence. The caller has checked that it fits when it runs alone."""
        assert self.block_manager.num_blocks_for(seq.max_num_tokens) <= self.block_manager.num_blocks
        self.waiting.append(seq)
        for fork in seq.forks:
            fork.status = SequenceStatus.PENDING

    def schedule(self) -> StepPlan:
        """Decide one step, and give every scheduled sequence its blocks."""
        selection = Selection(self.config.max_num_batched_tokens)
        self._continue_running(selection)
        if self.waiting and not selection.preempted:
            self._start_waiting(selection)
        self._make_forks_wait(selection.scheduled)
        single = [item for item in selection.scheduled if item.num_new_tokens == 1]  # each group by arrival
        scheduled = [*single, *(item for item in selection.scheduled if item.num_new_tokens > 1)]
        plan = StepPlan(tuple(scheduled), rows_of(scheduled), tuple(chain.from_iterable(selection.copies.values())))
        return plan

    def _continue_running(self, selection: Selection) -> None:
        """Schedule the running sequences, oldest first, and preempt where blocks run out."""
        for seq in self._left_to_schedule(selection):
            num_new = self.next_chunk(seq, seq.num_computed_tokens)
            if seq.status is not SequenceStatus.RUNNING:
                pass  # it was preempted for an earlier sequence of this loop
            elif num_new > 1 and selection.budget < num_new:
                selection.budget = 0  # it waits, and no younger prompt passes it
            elif self._make_room(seq, num_new, selection):
                self._select(selection, seq, num_new)

    def _left_to_schedule(self, selection: Selection) -> list[Sequence]:
        """Return the running sequences that are still to be scheduled: all of them."""
        return list(self.running)

    def _start_waiting(self, selection: Selection) -> None:
        """Start waiting sequences in their order, until one does not fit."""
        selection.num_kept_free = sum(self.num_reserved_blocks(seq) + len(seq.forks) for seq in self.running)
        while self.waiting and self.has_place() and self._start(selection, self.waiting[0]):
            self.waiting.popleft()

    def _prefix_of(self, seq: Sequence) -> Prefix:
        return self.block_manager.match_prefix(seq.token_ids, seq.cache_salt)

    def has_place(self) -> bool:
        """Return whether another sequence may run."""
        return len(self.running) < self.config.max_num_seqs

    def _start(self, selection: Selection, seq: Sequence) -> bool:
        """Start a sequence, which the caller removes from `waiting`. Return False if there is no room for it."""
        prefix = self._prefix_of(seq)
        num_cached = len(prefix) * self.block_manager.block_size
        num_new = self.next_chunk(seq, num_cached)
        if num_new > 1 and selection.budget < num_new:
            return False
        if not self.block_manager.can_start(seq.num_tokens, prefix, num_kept_free=selection.num_kept_free):
            return False
        self.running.append(seq)
        seq.status = SequenceStatus.RUNNING
        self.block_manager.start(seq, prefix)
        seq.num_computed_tokens = num_cached
        self._select(selection, seq, num_new)
        selection.num_kept_free += self.num_reserved_blocks(seq) + len(seq.forks)
        return True

    def next_chunk(self, seq: Sequence, start: int) -> int:
        """Return the number of tokens from `start` up to the next multiple of the chunk grid or the sequence's end."""
        grid = self.config.chunk_grid
        return min(seq.num_tokens - start, grid - start % grid)

    def _select(self, selection: Selection, seq: Sequence, num_new_tokens: int) -> None:
        """Schedule the sequence's next tokens, for which there are free blocks."""
        selection.copies[seq] = self.block_manager.allocate(seq, num_new_tokens)
        selection.scheduled.append(ScheduledSequence(seq, num_new_tokens))
        selection.budget -= num_new_tokens if num_new_tokens > 1 else 0

    def _make_room(self, seq: Sequence, num_new_tokens: int, selection: Selection) -> bool:
        """Preempt sequences until the next tokens of `seq` have blocks. Return False if `seq` itself was preempted."""
        while not self.block_manager.can_allocate(seq, num_new_tokens):
            victim = self.choose_victim(self.running, seq)
            assert victim.status is SequenceStatus.RUNNING, "choose_victim returns a running sequence"
            self._preempt(victim)
            selection.drop(victim)
            if victim is seq:
                return False
        return True

    def choose_victim(self, running: list[Sequence], seq: Sequence) -> Sequence:
        """Choose the running sequence to preempt so that `seq` gets its next block. It may be `seq`, which runs too."""
        return running[-1]

    def _preempt(self, seq: Sequence) -> None:
        """Requeue a running sequence."""
        self.running.remove(seq)
        self.block_manager.free(seq)
        seq.num_computed_tokens, seq.status = 0, SequenceStatus.WAITING
        self.waiting.appendleft(seq)

    def commit(self, plan: StepPlan) -> None:
        """Count the tokens of a launched plan as cached and those that it samples as tokens, and cache full blocks."""
        manager, block_size = self.block_manager, self.block_manager.block_size
        for item in plan.scheduled:
            seq = item.sequence
            num_computed = seq.num_computed_tokens = seq.num_computed_tokens + item.num_new_tokens
            fills_block = manager.enable_prefix_caching and num_computed // block_size > len(seq.prefix_keys)
            if (fills_block and len(seq.token_ids) // block_size > len(seq.prefix_keys)) or manager.acts_each_step:
                manager.cache_finished_blocks(seq, min(num_computed, len(seq.token_ids)))  # a sampled token has no id yet
            if seq.forks and seq.num_new_tokens == 0:
                self._fork(seq)
        for seq in dict.fromkeys([seq for seq, _ in plan.rows]):  # each sequence once, whatever the number of its drafts
            seq.num_tokens += 1

    def _fork(self, parent: Sequence) -> None:
        """Start the further answers of a computed prompt, directly after the first, because they have the same age."""
        forks, parent.forks = parent.forks, []
        index = self.running.index(parent) + 1
        self.running[index:index] = forks
        for fork in forks:
            self.block_manager.fork(parent, fork)
            fork.num_computed_tokens = parent.num_computed_tokens
            fork.status = SequenceStatus.RUNNING

    def append(self, seq: Sequence, token_id: int) -> None:
        """Append a sampled token, which commit has counted. A step that accepts drafts has several for a sequence."""
        seq.token_ids.append(token_id)
        if len(seq.token_ids) > seq.num_tokens:
            seq.num_tokens += 1
            seq.num_computed_tokens += 1  # the token before was an accepted draft, which the step has computed

    def finish(self, seq: Sequence) -> None:
        """Remove a sequence, whatever its status, and free its blocks. A second call does nothing."""
        if seq.status is SequenceStatus.RUNNING:
            self.running.remove(seq)
        elif seq.status is SequenceStatus.WAITING:
            self.waiting.remove(seq)
        self.block_manager.free(seq)
        seq.num_computed_tokens, seq.status = 0, SequenceStatus.FINISHED
        seq.as_decode = None  # it refers to the sequence, whose memory would wait for the garbage collector

    def num_reserved_blocks(self, seq: Sequence) -> int:
        """Return how many free blocks to keep for a running sequence when others start, beyond those for its forks."""
        limits = seq.num_tokens + self.block_manager.block_size, seq.max_num_tokens - 1
        return max(min(map(self.block_manager.num_blocks_for, limits)) - self.block_manager.num_held_blocks(seq), 0)

    def _make_forks_wait(self, scheduled: list[ScheduledSequence]) -> None:
        """Queue those forks of prompts that end in this step for which max_num_seqs leaves no room."""
        num_startable = self.config.max_num_seqs - len(self.running)
        too_many: list[Sequence] = []
        for item in scheduled:
            seq = item.sequence
            if seq.forks and item.num_new_tokens == seq.num_new_tokens:
                seq.forks, waiting = seq.forks[:num_startable], seq.forks[num_startable:]
                num_startable -= len(seq.forks)
                too_many += waiting
        self.waiting.extendleft(reversed(too_many))
        for fork in too_many:
            fork.status = SequenceStatus.WAITING


@dataclass(slots=True)
class Selection:
    """What a step will contain, while schedule() decides it."""

    budget: int  # the tokens that are left for sequences with more than one new token
    num_kept_free: int = 0  # the blocks that stay free for the running sequences when others start
    scheduled: list[ScheduledSequence] = field(default_factory=list)
    copies: dict[Sequence, list[tuple[int, int]]] = field(default_factory=dict)
    preempted: list[Sequence] = field(default_factory=list)

    def drop(self, victim: Sequence) -> None:
        """Note that a sequence was preempted, which this step may already have scheduled."""
        self.preempted.append(victim)
        if self.copies.pop(victim, None) is not None:
            self.scheduled = [item for item in self.scheduled if item.sequence is not victim]


# ---- 4. Blocks: who holds which, and what they contain
class BlockManager:
    """Owns block ids 0 .. num_blocks - 1, every Sequence.block_table and every Sequence.prefix_keys.

    A sequence's tokens are stored in blocks of `block_size` slots, and its block table lists these blocks in order, so token i
    has slot `block_table[i // block_size] * block_size + i % block_size`.

        tokens   [ the cat sat on | the mat and     ]         block_size 4
        table    [       7        |        2        ]         7 is full and has a key, 2 is being filled
    """

    acts_each_step = False

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True) -> None:
        self.num_blocks, self.block_size, self.enable_prefix_caching = num_blocks, block_size, enable_prefix_caching
        self.blocks = Pool(num_blocks)
        self.index = PrefixIndex(self.blocks, block_size)

    @property
    def num_free_blocks(self) -> int:
        """The number of blocks in no block table. Some of them stay in the prefix cache until they are taken."""
        return self.blocks.num_free

    def num_blocks_for(self, num_tokens: int) -> int:
        """Return the most blocks that a sequence holds at a time, while it grows to num_tokens."""
        return -(-num_tokens // self.block_size)

    def num_held_blocks(self, seq: Sequence) -> int:
        return len(seq.block_table)

    def choose_evicted(self, candidates: Collection[int]) -> int:
        """Choose the cached block that is taken next when no free block is empty. Its content leaves the prefix cache."""
        return next(iter(candidates))

    def match_prefix(self, token_ids: list[int], cache_salt: str | None = None) -> Prefix:
        """Return the longest chain of full cached blocks that hold the start of token_ids, each block with its key."""
        keys = self.index.chain(token_ids, cache_salt) if self.enable_prefix_caching else []
        return [(key, self.index.ids[key]) for key in keys]

    def can_start(self, num_tokens: int, prefix: Prefix, *, num_kept_free: int = 0) -> bool:
        """Return whether all tokens of a waiting sequence with this prefix fit, and num_kept_free blocks more."""
        num_revived = sum(block in self.blocks.reusable for _, block in prefix)
        num_needed = self.num_blocks_for(num_tokens) - len(prefix) + num_revived
        return num_needed + num_kept_free <= self.num_free_blocks

    def can_allocate(self, seq: Sequence, num_new_tokens: int) -> bool:
        """Return whether the sequence's next tokens fit. A block that they share with another sequence is copied."""
        first, end = seq.num_computed_tokens // self.block_size, seq.num_computed_tokens + num_new_tokens
        num_copied = [self.blocks.ref_counts[block] > 1 for block in seq.block_table[first:]].count(True)
        return max(-(-end // self.block_size) - len(seq.block_table), 0) + num_copied <= self.num_free_blocks

    def start(self, seq: Sequence, prefix: Prefix) -> None:
        """Give a waiting sequence the cached blocks of its prefix, as match_prefix has just returned them."""
        seq.prefix_keys, seq.block_table = [key for key, _ in prefix], [block for _, block in prefix]
        self.blocks.hold(seq.block_table)

    def allocate(self, seq: Sequence, num_new_tokens: int) -> list[tuple[int, int]]:
        """Allocate blocks for the sequence's next tokens, which can_allocate has confirmed."""
        copies, table, end = [], seq.block_table, seq.num_computed_tokens + num_new_tokens
        for index in range(seq.num_computed_tokens // self.block_size, len(table)):
            if self.blocks.ref_counts[table[index]] > 1:  # true for at most one block, after a fork
                shared, table[index] = table[index], self._take()
                self.blocks.drop([shared])
                copies.append((shared, table[index]))
        while len(table) * self.block_size < end:
            table.append(self._take())  # one by one, because a policy may raise
        return copies

    def cache_finished_blocks(self, seq: Sequence, num_tokens: int) -> None:
        """Add the blocks that the sequence's first num_tokens fill, which must be computed, to the prefix cache."""
        num_full = num_tokens // self.block_size if self.enable_prefix_caching and seq.is_answered else 0
        num_cached = len(seq.prefix_keys)
        if num_full > num_cached:
            full = [*self.index.further(seq.prefix_keys, seq.token_ids, num_full * self.block_size, seq.cache_salt)]
            seq.prefix_keys += [key for _, key in full]
            # If another sequence filled a block with the same tokens first, its block stays in the cache.
            self.index.enter(full, seq.block_table[num_cached:num_full])

    def forget_cached(self, seq: Sequence) -> None:
        """Remove the blocks with the sequence's keys from the prefix cache, but not from sequences that share them."""
        for key in seq.prefix_keys:
            if key in self.index.ids:
                self.evict(self.index.ids[key])

    def evict(self, block: int) -> None:
        """Remove a cached block from the prefix cache, but not from the sequences that hold it."""
        self.index.remove(block)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Share all of the parent's blocks with a child, whose tokens and num_computed_tokens the caller sets."""
        child.block_table, child.prefix_keys = list(parent.block_table), list(parent.prefix_keys)
        self.blocks.hold(child.block_table)

    def free(self, seq: Sequence) -> None:
        """Free the sequence's blocks, the last first, so that the start of a prompt, which others may share, is kept."""
        self.blocks.drop(reversed(seq.block_table))
        seq.block_table.clear()
        seq.prefix_keys.clear()

    def _take(self) -> int:
        """Take a free block. If none is empty, the content of a cached block leaves the prefix cache."""
        if not self.blocks.empty:
            evicted = self.choose_evicted(self.blocks.reusable.keys())
            assert evicted in self.blocks.reusable, "choose_evicted returns one of the candidates"
            self.evict(evicted)
        return self.blocks.take()


class Pool:
    """The ids 0 .. size - 1, each of which is held, reusable or empty.

    held       used by a sequence: its reference count says in how many places
    reusable   free, and its content is in the prefix index, where a prompt may find it
    empty      free, without content that could be found
    """

    def __init__(self, size: int) -> None:
        self.ref_counts = [0] * size
        self.empty = deque(range(size))
        self.reusable: OrderedDict[int, None] = OrderedDict()
        self.contents = [b""] * size

    @property
    def num_free(self) -> int:
        return len(self.empty) + len(self.reusable)

    def take(self) -> int:
        """Take an empty id. At least one must be empty."""
        taken = self.empty.popleft()
        self.ref_counts[taken] = 1
        return taken

    def hold(self, ids: Iterable[int]) -> None:
        """Add a reference to each id."""
        reusable, ref_counts = self.reusable, self.ref_counts
        for held in ids:
            reusable.pop(held, None)
            ref_counts[held] += 1

    def drop(self, ids: Iterable[int]) -> None:
        """Remove a reference from each id. An id without references is free: empty, or reusable and the most recently used."""
        for dropped in ids:
            self.ref_counts[dropped] -= 1
            if self.ref_counts[dropped] == 0:
                if self.contents[dropped]:
                    self.reusable[dropped] = None
                else:
                    self.empty.appendleft(dropped)

    def forget(self, forgotten: int) -> None:
        """Remove an id's content. If the id is free, it becomes empty."""
        self.contents[forgotten] = b""
        if forgotten in self.reusable:
            del self.reusable[forgotten]
            self.empty.append(forgotten)


class PrefixIndex:
    """The index of all contents in memory. A full block has a content and a key, which describe what it holds.

        content of block i = key of block i - 1, tokens of block i
        key of block i     = SHA-256 digest of its content              before the first block: digest of the salt

    So a key stands for all tokens up to a block's end. Prefixes with different tokens have different keys as long as nobody
    finds two inputs with the same SHA-256 digest. The keys are kept, so that a lookup computes no digest.
    """

    def __init__(self, pool: Pool, block_size: int) -> None:
        self.pool, self.block_size = pool, block_size
        self.keys: dict[bytes, bytes] = {}
        self.ids: dict[bytes, int] = {}
        self._pack = Struct(f"{block_size}i").pack

    def root(self, cache_salt: str | None) -> bytes:
        """Return the key before the first block."""
        return sha256((cache_salt or "").encode(errors="surrogatepass")).digest()

    def in_blocks(self, token_ids: list[int]) -> Iterator[bytes]:
        """Yield the tokens of each full block, as bytes."""
        return starmap(self._pack, zip(*[iter(token_ids)] * self.block_size, strict=False))

    def further(self, keys: list[bytes], token_ids: list[int], end: int, salt: str | None) -> Iterator[tuple[bytes, bytes]]:
        """Yield content and key of the full blocks of token_ids[:end] that follow those with the first keys."""
        key, find = keys[-1] if keys else self.root(salt), self.keys.get
        for tokens in self.in_blocks(token_ids[len(keys) * self.block_size : end]):
            content = key + tokens
            key = find(content) or sha256(content).digest()
            yield content, key

    def chain(self, token_ids: list[int], cache_salt: str | None) -> list[bytes]:
        """Return the keys of the first blocks of token_ids, up to the first block that is not in memory."""
        keys: list[bytes] = []
        key, find = self.root(cache_salt), self.keys.get
        for tokens in islice(self.in_blocks(token_ids), max(len(token_ids) - 1, 0) // self.block_size):
            if (found := find(key + tokens)) is None:
                break
            keys.append(key := found)
        return keys

    def enter(self, blocks: list[tuple[bytes, bytes]], new: list[int]) -> list[int]:
        """Add a block for each content and key, except for keys that have a block already. Return the added blocks."""
        entered = []
        for (content, key), block in zip(blocks, new, strict=True):
            if self.ids.setdefault(key, block) == block:
                self.keys[content], self.pool.contents[block] = key, content
                entered.append(block)
        return entered

    def remove(self, block: int) -> None:
        """Remove a block from the index. If it is free, it becomes empty."""
        del self.ids[self.keys.pop(self.pool.contents[block])]
        self.pool.forget(block)


# ---- 5. The new tokens of a step, packed
@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """The new tokens of all sequences in one row, without padding. logits_indices: those whose hidden rows need logits."""

    input_ids: Int[Tensor, " num_tokens"]
    positions: Int[Tensor, " num_tokens"]
    logits_indices: Int[Tensor, " num_rows"]
    attention: AttentionMetadata
    block_copies: tuple[tuple[int, int], ...] = ()

    @classmethod
    def build(cls, plan: StepPlan, block_size: int, device: torch.device) -> ForwardBatch:
        packed = pack(plan, block_size)
        longest = max(len(seq.block_table) for seq in packed.sequences)
        tables = [seq.block_table + [0] * (longest - len(seq.block_table)) for seq in packed.sequences]
        starts, rows = [0, *accumulate(packed.query_lens)], [index for _, index in plan.rows]
        lists = packed.input_ids, packed.positions, rows, packed.seq_lens, tables, packed.slots
        ids, positions, indices, lens, tables, slots = (on_device(each, device) for each in lists)
        return cls(ids, positions, indices, metadata_of(starts, packed.seq_lens, lens, tables, slots), plan.block_copies)


def metadata_of(starts: list[int], seq_lens: list[int], lens: Tensor, tables: Tensor, slots: Tensor) -> AttentionMetadata:
    """Complete the tensors of a step with what the host knows of it. starts: where each query begins, and their end."""
    query_lens = [stop - start for start, stop in pairwise(starts)]
    sizes = {"max_query_len": max(query_lens), "max_seq_len": max(seq_lens), "num_decodes": query_lens.count(1)}
    tensors = {"seq_lens": lens, "block_tables": tables, "slot_mapping": slots}
    where = {"query_start_loc": on_device(starts, lens.device), "query_start_loc_cpu": starts}
    return AttentionMetadata(**tensors, **sizes, **where, seq_lens_cpu=seq_lens)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionMetadata:
    """The sequence of each packed token of a step, and the cache blocks of each sequence.

    Example with blocks of 4 slots, where the first sequence decodes its 6th token and the second prefills 3 tokens:

        query_start_loc [0, 1, 4]      packed token 0 is the first sequence's, 1 to 3 are the second's
        seq_lens        [6, 3]         tokens in the cache after this step is written
        block_tables    [[2, 5],       row i: the blocks of sequence i in order, padded with 0
                         [7, 0]]
        slot_mapping    [21, 28, 29, 30]    the slot of each new token: 5 * 4 + 1, 7 * 4 + 0, ...

    The first num_decodes sequences have one new token each, and the prompt chunks follow. A draft counts as a sequence of its
    own, with the blocks of the sequence before it. The *_cpu lists hold the values of
    the tensors as Python ints, for backends that loop over sequences.
    """

    query_start_loc: Int[Tensor, " num_seqs_plus_1"]
    seq_lens: Int[Tensor, " num_seqs"]
    block_tables: Int[Tensor, "num_seqs max_blocks"]  # a block that no query of the step reads may be -1
    slot_mapping: Int[Tensor, " num_tokens"]
    max_query_len: int
    max_seq_len: int
    num_decodes: int
    query_start_loc_cpu: list[int]
    seq_lens_cpu: list[int]


class Packed(NamedTuple):
    """The input of a step as lists of integers. A query is a chunk, a sequence's newest token or a draft."""

    input_ids: list[int]
    positions: list[int]
    slots: list[int]
    query_lens: list[int]
    seq_lens: list[int]  # for each query
    sequences: list[Sequence]  # for each query


def pack(plan: StepPlan, block_size: int) -> Packed:
    """Put the new tokens of all sequences in a row, each with its position and its slot in the cache."""
    packed = Packed([], [], [], [], [], [])
    input_ids, positions, slots, query_lens, seq_lens, sequences = packed
    for item in plan.scheduled:
        seq = item.sequence
        start = seq.num_computed_tokens
        end = start + item.num_new_tokens
        input_ids += seq.token_ids[start:end] or [0]  # 0: its newest token is still being sampled
        if item.num_new_tokens == 1 and not item.draft_token_ids:  # as below, for most rows of most steps
            positions += (start,)
            slots += (seq.block_table[start // block_size] * block_size + start % block_size,)
            query_lens += (1,)
            seq_lens += (end,)
            sequences += (seq,)
            continue
        num_drafts = len(item.draft_token_ids)
        input_ids += item.draft_token_ids
        positions += range(start, end + num_drafts)
        slots += [seq.block_table[i // block_size] * block_size + i % block_size for i in range(start, end + num_drafts)]
        query_lens += [item.num_new_tokens] + [1] * num_drafts
        seq_lens += range(end, end + num_drafts + 1)
        sequences += [seq] * (num_drafts + 1)
    return packed


class ModelRunner:
    """Runs the model over the paged cache."""

    def __init__(self, model: Any, block_size: int | None, num_blocks: int | None, max_graph_rows: int | None) -> None:
        """max_graph_rows: the most rows of a decode step that runs as a CUDA graph. None: none does."""
        self.model, weight = model, next(model.parameters())
        can_flash = flash_attn_varlen_func is not None and weight.dtype in FLASH_DTYPES
        self.device, has_flash = weight.device, weight.is_cuda and can_flash
        self.begin_step = FlashAttend if has_flash else partial(partial, paged_attention)
        sizes = {"num_layers": model.config.num_hidden_layers, "num_kv_heads": model.config.num_key_value_heads}
        sizes |= {"head_dim": model.config.head_dim, "block_size": block_size or (256 if has_flash else 16)}
        num_blocks = num_blocks or free_memory(self.device) // (2 * weight.itemsize * prod(sizes.values()))
        self.cache = KVCache(**sizes, num_blocks=num_blocks, dtype=weight.dtype, device=self.device)
        self.graphs = DecodeGraphs(self, max_graph_rows) if has_flash and max_graph_rows else None

    def forward(self, batch: ForwardBatch) -> Float[Tensor, "num_tokens hidden"]:
        """Compute the hidden rows of a step."""
        if batch.block_copies:
            sources, targets = on_device(batch.block_copies, self.device).T
            self.cache.pages[:, :, targets] = self.cache.pages[:, :, sources]
        hidden = None if self.graphs is None else self.graphs.try_replay(batch, self.run)
        return self.run(batch) if hidden is None else hidden

    def run(self, batch: ForwardBatch) -> Float[Tensor, "num_tokens hidden"]:
        return self.model(batch.input_ids, batch.positions, self.begin_step(self.cache, batch.attention))


# ---- 6. Attention over pages
class KVCache:
    """The keys and values of all layers, in blocks. A slot holds one token: slot = block * block_size + offset."""

    def __init__(self, *, num_layers: int, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, **kind: Any):
        """kind: the dtype and the device."""
        self.num_blocks, self.block_size = num_blocks, block_size
        shape = num_layers, 2, num_blocks + 1, block_size, num_kv_heads, head_dim  # the last block is for CUDA graphs' padding
        self.pages = torch.zeros(shape, **kind)

    def by_slot(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return the keys and the values of a layer."""
        return self.pages[layer]

    def write(self, layer: int, slot_mapping: Int[Tensor, " num_tokens"], k: Keys, v: Keys) -> None:
        """Store each token's k and v, as finite_values returns them, in its slot."""
        blocks, offsets = slot_mapping // self.block_size, slot_mapping % self.block_size
        for pages, values in zip(self.by_slot(layer), finite_values(k, v), strict=True):
            pages[blocks, offsets] = values.to(pages.dtype)

    def gather(self, layer: int, block_table: Int[Tensor, " blocks"], seq_len: int) -> tuple[Keys, Keys]:
        """Copy one sequence's k and v, its tokens in order, out of its blocks."""
        k, v = (pages[block_table].flatten(0, 1)[:seq_len] for pages in self.by_slot(layer))
        return k, v


def paged_attention(cache: KVCache, metadata: AttentionMetadata, layer: int, q: Queries, k: Keys, v: Keys) -> Queries:
    """Store k and v, then attend over each sequence of the step in turn."""
    cache.write(layer, metadata.slot_mapping, k, v)
    out = torch.empty_like(q)
    starts = metadata.query_start_loc_cpu
    for i, seq_len in enumerate(metadata.seq_lens_cpu):
        queries = slice(starts[i], starts[i + 1])
        keys, values = cache.gather(layer, metadata.block_tables[i], seq_len)
        out[queries] = causal_attention(q[queries], keys, values)
    return out


def causal_attention(
    q: Float[Tensor, "num_tokens num_heads head_dim"],
    k: Float[Tensor, "seq_len num_kv_heads head_dim"],
    v: Float[Tensor, "seq_len num_kv_heads head_dim"],
) -> Float[Tensor, "num_tokens num_heads head_dim"]:
    """Attend with the last num_tokens of a sequence's seq_len tokens, computed in fp32 and returned in q's dtype."""
    num_tokens, num_heads, head_dim = q.shape
    seq_len, num_kv_heads, _ = k.shape
    k = k.repeat_interleave(num_heads // num_kv_heads, dim=1)  # [seq_len, num_heads, head_dim]
    v = v.repeat_interleave(num_heads // num_kv_heads, dim=1)
    scores = torch.einsum("ihd,jhd->hij", q.float(), k.float()) * head_dim**-0.5  # [num_heads, num_tokens, seq_len]
    visible = torch.ones(num_tokens, seq_len, dtype=torch.bool, device=q.device).tril(seq_len - num_tokens)
    weights = scores.masked_fill(~visible, float("-inf")).softmax(dim=-1)
    return torch.einsum("hij,jhd->ihd", weights, v.float()).to(q.dtype)


def finite_values(k: Keys, v: Keys) -> tuple[Keys, Keys]:
    """Return k and v as they are stored: where a v is not finite (fp16 overflow, corrupted weights), v is 0 and k is NaN."""
    if v.device.type == "cpu" and v.sum().isfinite():  # on a GPU, the host would have to wait
        return k, v
    is_finite = v.isfinite().all(-1, keepdim=True)  # [num_tokens, num_kv_heads, 1]
    return k.where(is_finite, float("nan")), v.where(is_finite, 0.0)


# ---- 7. From logits to a token
def sample(logits: Logits, batch: SamplingBatch) -> Int[Tensor, " batch"]:
    """Apply every stage in order, then take the argmax of greedy rows and draw the others. -1: the row has no token."""
    is_finite = logits.amax(dim=-1).isfinite()  # before a mask could hide it
    for stage in STAGES:
        logits = stage(logits, batch)
    greedy, drawn = argmax(logits), draw(logits, batch.u)
    return torch.where(is_finite, torch.where(batch.greedy | (greedy < 0), greedy, drawn), -1)


def apply_temperature(logits: Logits, batch: SamplingBatch) -> Logits:
    """Divide by the temperature: below 1 the distribution becomes sharper, above 1 flatter."""
    return logits if batch.temperature is None else divided(logits, batch.temperature)


def divided(logits: Logits, temperature: Float[Tensor, " batch"]) -> Logits:
    """Divide the logits of each row by its temperature: see apply_temperature."""
    shift = torch.where(temperature == 1.0, 0.0, logits.amax(dim=-1))  # [batch]
    return (logits - shift.unsqueeze(-1)) / temperature.unsqueeze(-1)


BITS = 32
ONE = 2.0**BITS  # the weight of the most probable token


def argmax(logits: Float[Tensor, "batch vocab"]) -> Int[Tensor, " batch"]:
    """Find the id of each row's largest logit: the lowest of equal logits, and -1 if the largest is not finite."""
    largest, token_ids = logits.max(dim=-1)
    return torch.where(largest.isfinite(), token_ids, -1)


def draw(logits: Float[Tensor, "batch vocab"], u: Float[Tensor, " batch"]) -> Int[Tensor, " batch"]:
    """Draw an id per row. u: float64 in [0, 1)."""
    return draw_from_weights(integer_weights(logits), u)


def draw_from_weights(weights: Int[Tensor, "batch vocab"], u: Float[Tensor, " batch"]) -> Int[Tensor, " batch"]:
    """Find the first id whose cumulative weight exceeds the threshold."""
    cumulative = weights.cumsum(dim=-1)
    return torch.searchsorted(cumulative, thresholds(cumulative[:, -1], u).unsqueeze(-1), right=True).squeeze(-1)


def thresholds(total: Int[Tensor, " batch"], u: Float[Tensor, " batch"]) -> Int[Tensor, " batch"]:
    """Compute min(floor(u * W), W - 1). The minimum keeps the threshold below W even if u * W is rounded up to W."""
    return torch.minimum((u * total).floor().to(torch.int64), total - 1)


def integer_weights(logits: Logits) -> Int[Tensor, "batch vocab"]:
    """Compute floor(p / p_max * 2^32): 2^32 for the most probable token, 0 for dropped tokens."""
    below = logits - logits.amax(dim=-1, keepdim=True).clamp(min=torch.finfo(torch.float32).min)  # -inf - -inf would be NaN
    return (below.double().exp() * ONE).float().nan_to_num(0.0).long()


# ---- 8. From tokens to text, and when to stop
class Answer:
    """A sequence as text. stop: why it ended. None: it runs."""

    keeps_ending_text = False  # whether the text of an id that ends the answer is kept

    def __init__(self, seq: Sequence, detokenizer: Detokenizer) -> None:
        self.seq, self.detokenizer = seq, detokenizer
        self.stop: Stop | None = None
        self.text = StopStrings(seq.params.stop or ())
        self._special_stops = detokenizer.skipped_among(seq.params.stop or ())

    def advance(self, token_id: int) -> None:
        """Process the newest id of the sequence: rules for ids, whole characters, stop strings."""
        seq = self.seq
        examine = len(seq.token_ids) - len(seq.prompt_token_ids) > seq.params.min_tokens  # earlier no stop string completes
        stop = self.check_id(token_id, examine)
        ends_by_id = stop is not None and stop.finish_reason == "stop"
        text = self.detokenizer.push(token_id) if self.keeps_ending_text or not ends_by_id else ""
        if stop is not None:
            text += self.detokenizer.finish()
        matched = self.text.push(text, examine=examine)
        self.stop = Stop("stop", matched) if matched else stop

    def finish(self, stop: Stop) -> None:
        """End the answer without a further id, with the text that was held."""
        self.text.push(self.detokenizer.finish(), examine=False)
        self.stop = stop

    def check_id(self, token_id: int, examine: bool) -> Stop | None:
        """Check whether an id ends the answer: EOS first, then stop ids, stop strings that are special tokens, the length."""
        seq, params = self.seq, self.seq.params
        if token_id in seq.eos_token_ids and not params.ignore_eos:
            return Stop("stop")
        if token_id in (params.stop_token_ids or ()):
            return Stop("stop", token_id)
        if examine and token_id in self._special_stops:  # a text without special tokens does not contain them
            return Stop("stop", self._special_stops[token_id])
        return Stop("length") if len(seq.token_ids) >= seq.max_num_tokens else None


@dataclass(frozen=True, slots=True)
class Stop:
    """The reason why a sequence ended, in the terms of CompletionOutput."""

    finish_reason: FinishReason
    stop_reason: int | str | None = None
    error: str | None = None


class StopStrings:
    """The output text as it grows, cut where a stop string completes.

    Text that may become part of a stop string is held, so released text is never taken back.
    """

    def __init__(self, stops: ListLike[str]) -> None:
        self.text = ""
        self._stops = stops
        self._firsts = {stop[0] for stop in stops}
        self._num_shown = 0

    def push(self, piece: str, *, examine: bool = True) -> str | None:
        """Append a piece of text. Returns the stop string that it completes, after cutting the text there."""
        num_before = len(self.text)
        self.text += piece
        if not examine or not piece:
            return None
        first_end, matched = len(self.text) + 1, None
        for stop in self._stops:
            start = self.text.find(stop, max(num_before - len(stop) + 1, self._num_shown))
            if start >= 0 and start + len(stop) < first_end:
                first_end, matched = start + len(stop), stop
        if matched is not None:
            self.text = self.text[: first_end - len(matched)]
        return matched

    def release(self, *, everything: bool = False) -> str:
        """Return the text that is certain and was not released before. At the end of the sequence, return all the rest."""
        num_certain = len(self.text) if everything else len(self.text) - self._num_held()
        shown = self.text[self._num_shown : num_certain]
        self._num_shown = max(self._num_shown, num_certain)
        return shown

    def _num_held(self) -> int:
        """The length of the longest suffix of the text that is a proper prefix of a stop string."""
        for start in range(self._num_shown if self._stops else len(self.text), len(self.text)):  # what was shown is certain
            rest = self.text[start:]
            if rest[0] in self._firsts and any(len(stop) > len(rest) and stop.startswith(rest) for stop in self._stops):
                return len(rest)
        return 0


class Detokenizer:
    """The text of a sequence, in whole characters: an emoji is often several tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._backend, self._skip_special_tokens = tokenizer, True
        self._stream = DecodeStream(skip_special_tokens=True)
        self._held: list[int] = []  # ids whose text is not released yet

    def push(self, token_id: int) -> str:
        """Add an id and return the text that it releases, or "" while a character is incomplete."""
        self._held.append(token_id)
        if text := self._stream.step(self._backend, token_id):
            self._held.clear()
        return text or ""

    def finish(self) -> str:
        """Return the text of the held ids when no id follows. An incomplete character is left out."""
        text = self._decode_complete(self._held)
        self._held.clear()
        return text

    def skipped_among(self, texts: Iterable[str]) -> dict[int, str]:
        """Return {id: text} for those texts that are special tokens, which the text leaves out."""
        if not self._skip_special_tokens or not texts:
            return {}
        special = {token.content: i for i, token in self._backend.get_added_tokens_decoder().items() if token.special}
        return {special[text]: text for text in texts if text in special}

    def _decode_complete(self, token_ids: list[int]) -> str:
        return self._backend.decode(token_ids, skip_special_tokens=self._skip_special_tokens).rstrip(REPLACEMENT)


REPLACEMENT = "\ufffd"  # U+FFFD, to which bytes decode that are no character


# ---- 9. Qwen2, Qwen2.5 and Qwen3
class QwenForCausalLM(nn.Module):
    def __init__(self, config: QwenConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(QwenDecoderLayer(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = RotaryEmbedding(config.head_dim, config.rope)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(self, input_ids: Ids, positions: Ids, attend: Attend) -> Hidden:
        x = self.embed_tokens(input_ids)  # [num_tokens, hidden]
        cos, sin = self.rotary_emb(positions, x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin, attend)
        return self.norm(x)

    def compute_logits(self, hidden: Float[Tensor, "*rows hidden"]) -> Float[Tensor, "*rows vocab"]:
        return self.lm_head(hidden)


class QwenDecoderLayer(nn.Module):
    def __init__(self, config: QwenConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = config.make_attention(layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = SwiGLU(config.hidden_size, config.intermediate_size)

    def forward(self, x: Hidden, cos: Angles, sin: Angles, attend: Attend) -> Hidden:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


class QwenAttention(nn.Module):
    def __init__(self, config: QwenConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = config.head_dim
        q_size = config.num_attention_heads * config.head_dim
        kv_size = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, q_size, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_size, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_size, bias=config.qkv_bias)
        self.o_proj = nn.Linear(q_size, config.hidden_size, bias=config.o_bias)
        self.qk_norm = config.qk_norm
        if self.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
            self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def forward(self, x: Hidden, cos: Angles, sin: Angles, attend: Attend) -> Hidden:
        heads = (-1, self.head_dim)
        q = self.q_proj(x).unflatten(-1, heads)  # [num_tokens, num_heads, head_dim]
        k = self.k_proj(x).unflatten(-1, heads)  # [num_tokens, num_kv_heads, head_dim]
        v = self.v_proj(x).unflatten(-1, heads)  # [num_tokens, num_kv_heads, head_dim]
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = apply_rotary(q, cos, sin), apply_rotary(k, cos, sin)
        return self.o_proj(self.attention(attend, q, k, v).flatten(1))

    def attention(self, attend: Attend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(self.layer, q, k, v)


class SwiGLU(nn.Module):
    """Computes down(silu(gate(x)) * up(x)). Source: Shazeer 2020, https://arxiv.org/abs/2002.05202"""

    def __init__(self, hidden_size: int, intermediate_size: int, *, bias: bool = False) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias)

    def forward(self, x: Hidden) -> Hidden:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class RMSNorm(nn.Module):
    """Computes x / sqrt(mean(x^2) + eps) * weight over the last axis. The mean is computed in fp32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: Float[Tensor, "*rows size"]) -> Float[Tensor, "*rows size"]:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class RotaryEmbedding(nn.Module):
    """Rotates each pair (x_i, x_{i + head_dim/2}) of q and k by position * inv_freq_i, so that q . k depends on distance."""

    def __init__(self, head_dim: int, theta: float) -> None:
        super().__init__()
        exponents = torch.arange(0, head_dim, 2, device="cpu").float() / head_dim
        self.register_buffer("inv_freq", 1.0 / (theta ** exponents.double()).float(), persistent=False)

    def forward(self, positions: Ids, dtype: torch.dtype) -> tuple[Angles, Angles]:
        """Return cos and sin for every token, once per step. All layers and heads share them."""
        angles = (positions.float().unsqueeze(-1) * self.inv_freq).double()  # in fp32: bf16 is wrong by whole turns
        angles = torch.cat((angles, angles), dim=-1).unsqueeze(1)  # [num_tokens, 1, head_dim]
        return angles.cos().to(dtype), angles.sin().to(dtype)


def apply_rotary(x: Heads, cos: Angles, sin: Angles) -> Heads:
    """Rotate every head of every token by its position's angles."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


@dataclass(frozen=True, kw_only=True)
class QwenConfig:
    rope: float  # theta, the base of the angles
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False

    def make_attention(self, layer: int) -> QwenAttention:
        return QwenAttention(self, layer)

    @classmethod
    def from_hf(cls, config: ConfigJson) -> QwenConfig:
        """Read config.json. Raises: ValueError for a variant that is not supported."""
        config, is_qwen3 = config | (config.get("rope_parameters") or {}), config["model_type"] == "qwen3"
        refuse_others(config, hidden_act=("silu",), rope_type=("default",), rope_scaling=(None,), use_sliding_window=(False,))
        names = "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads".split()
        has_bias = is_qwen3 and config.get("attention_bias", False)
        return cls(
            **{name: config[name] for name in [*names, "max_position_embeddings", "rms_norm_eps"]},
            head_dim=config.get("head_dim") or (128 if is_qwen3 else config["hidden_size"] // config["num_attention_heads"]),
            tie_word_embeddings=config.get("tie_word_embeddings", False),
            rope=config.get("rope_theta", 10_000.0),
            qkv_bias=not is_qwen3 or has_bias,
            o_bias=has_bias,
            qk_norm=is_qwen3,
        )


# ---- 10. GPT-2
class GPT2LMHeadModel(nn.Module):
    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.config = config
        self.wte = Embedding(config.vocab_size, config.hidden_size)
        self.wpe = Embedding(config.max_position_embeddings, config.hidden_size)
        self.h = nn.ModuleList(GPT2Block(config, layer) for layer in range(config.num_hidden_layers))
        self.ln_f = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.wte.weight

    def forward(self, input_ids: Ids, positions: Ids, attend: Attend) -> Hidden:
        x = self.wte(input_ids) + self.wpe(positions)  # [num_tokens, hidden]
        for block in self.h:
            x = block(x, attend)
        return self.ln_f(x)

    def compute_logits(self, hidden: Float[Tensor, "*rows hidden"]) -> Float[Tensor, "*rows vocab"]:
        return self.lm_head(hidden)


class GPT2Block(nn.Module):
    def __init__(self, config: GPT2Config, layer: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        self.attn = GPT2Attention(config, layer)
        self.ln_2 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        self.mlp = GPT2MLP(config)

    def forward(self, x: Hidden, attend: Attend) -> Hidden:
        x = x + self.attn(self.ln_1(x), attend)
        return x + self.mlp(self.ln_2(x))


class GPT2Attention(nn.Module):
    def __init__(self, config: GPT2Config, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.num_heads = config.num_attention_heads
        self.head_dim = config.head_dim
        width = config.num_attention_heads * config.head_dim
        self.c_attn = nn.Linear(config.hidden_size, 3 * width)
        self.c_proj = nn.Linear(width, config.hidden_size)

    def forward(self, x: Hidden, attend: Attend) -> Hidden:
        qkv = self.c_attn(x).unflatten(-1, (3, self.num_heads, self.head_dim))
        q, k, v = qkv.unbind(1)  # each [num_tokens, num_heads, head_dim]
        return self.c_proj(attend(self.layer, q, k, v).flatten(1))


class GPT2MLP(nn.Module):
    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.c_fc = nn.Linear(config.hidden_size, config.intermediate_size)
        self.c_proj = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Hidden) -> Hidden:
        return self.c_proj(gelu_tanh(self.c_fc(x)))


@dataclass(frozen=True, kw_only=True)
class GPT2Config:
    """The fields of config.json that this file reads, under the names of the newer families."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    max_position_embeddings: int
    layer_norm_epsilon: float
    tie_word_embeddings: bool

    @classmethod
    def from_hf(cls, config: ConfigJson) -> GPT2Config:
        """Read config.json."""
        supported = {
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
            "add_cross_attention": (False,),
        }
        refuse_others(config, activation_function=("gelu_new", "gelu_pytorch_tanh"), **supported)  # two names of one function
        # As in transformers, the file may have the names of the newer families, which take precedence.
        older = {"hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}
        older |= {"max_position_embeddings": "n_positions", "vocab_size": "vocab_size"}
        fields = {name: config[name if name in config else old] for name, old in older.items()}
        width, num_heads = fields["hidden_size"], fields["num_attention_heads"]
        if width % num_heads:
            raise CheckpointError(f"n_embd must be a multiple of n_head, got {shown(width)} and {shown(num_heads)}")
        fields |= {"intermediate_size": config.get("n_inner") or 4 * width, "head_dim": width // num_heads}
        fields |= {"layer_norm_epsilon": config.get("layer_norm_epsilon", 1e-5)}
        return cls(**fields, tie_word_embeddings=config.get("tie_word_embeddings", True))

    @property
    def num_key_value_heads(self) -> int:
        return self.num_attention_heads


def gelu_tanh(x: Float[Tensor, "*rows size"]) -> Float[Tensor, "*rows size"]:
    """Compute x * Phi(x) with tanh in place of the error function. GPT-2 calls it gelu_new."""
    return F.gelu(x, approximate="tanh")


def refuse_others(config: ConfigJson, **supported: tuple[Any, ...]) -> None:
    """Refuse values that would change the logits. The first of the supported values applies to files without the field."""
    for name, values in supported.items():
        if config.get(name, values[0]) not in values:
            raise ValueError(f"{name} must be {values[0]}, got {config[name]}")


# ---- 11. Loading a folder
def load(folder: Path, device: str, dtype: str) -> tuple[Any, Tokenizer, frozenset[int]]:
    """Return the model with its weights, its tokenizer and its EOS ids. Tensors without a parameter are left out."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if config["model_type"] not in MODELS:
        raise ValueError(f"model_type must be one of {', '.join(MODELS)}, got {config['model_type']}")
    device = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    own = config.get("dtype") or config.get("torch_dtype") or "float32"
    chosen = getattr(torch, ("float32" if device == "cpu" else own) if dtype == "auto" else dtype)
    model_class, config_class = MODELS[config["model_type"]]
    with torch.device("meta"):  # shapes without memory
        model = model_class(config_class.from_hf(config))
    weights = {}
    for path in sorted(folder.glob("*.safetensors")):
        for name, tensor in load_file(path).items():
            if name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
                tensor = tensor.T  # GPT-2 stores [in, out]
            target = name.removeprefix("transformer.").removeprefix("model.")
            weights[target] = tensor.to(device, chosen).contiguous()
    model.load_state_dict(weights, strict=False, assign=True)  # leaves out GPT-2's causal masks
    if model.config.tie_word_embeddings:
        model.lm_head.weight = next(model.children()).weight  # the embedding's
    if missing := [name for name, weight in model.named_parameters() if weight.is_meta]:
        raise ValueError(f"{folder} lacks {', '.join(missing[:10])}")
    if dist.is_initialized():
        model.lm_head = VocabularyHead(model.lm_head.weight, dist.get_rank(), dist.get_world_size())
    generation, eos = folder / "generation_config.json", config.get("eos_token_id")
    if generation.exists():
        eos = json.loads(generation.read_text(encoding="utf-8")).get("eos_token_id", eos)
    eos_token_ids = frozenset(each for each in (eos if isinstance(eos, list) else [eos]) if each in range(config["vocab_size"]))
    return model.to(device).eval().requires_grad_(False), Tokenizer.from_file(str(folder / "tokenizer.json")), eos_token_ids


MODELS = {"gpt2": (GPT2LMHeadModel, GPT2Config), "qwen2": (QwenForCausalLM, QwenConfig)}  # model_type -> the classes
MODELS["qwen3"] = MODELS["qwen2"]


# ---- ======== A first reading ends here.
# ---- 12. What a request may ask, and what it gets
@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to choose each next token of one prompt, and when to stop. A temperature of 0 is greedy."""

    temperature: float = 1.0  # Divides the logits
    top_k: int = 0  # Keep the k largest logits
    top_p: float = 1.0  # Keep the smallest set whose probabilities reach top_p
    min_p: float = 0.0  # Drop tokens less probable than min_p times the most probable one
    seed: int | None = None  # The same seed and the same logits give the same tokens, in any batch
    max_tokens: int | None = 16  # Maximum length of the output in tokens
    min_tokens: int = 0  # EOS and stop_token_ids cannot be drawn before the output has this many tokens
    stop: str | ListLike[str] | None = None  # A string or several, of which the first to complete ends the text
    stop_token_ids: ListLike[int] | None = None  # Ids that end the output as EOS does
    ignore_eos: bool = False  # EOS does not stop
    n: int = 1  # Number of answers to the prompt
    repetition_penalty: float = 1.0  # Logits of ids in prompt or output are divided by it if positive, else multiplied
    presence_penalty: float = 0.0  # Subtracted once for every id that is in the output
    frequency_penalty: float = 0.0  # Subtracted once for each time an id is in the output

    @property
    def has_penalty(self) -> bool:
        """Whether a penalty on repeated ids is on."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    def __post_init__(self) -> None:
        ranges = {"n": (1, 16384), "max_tokens": (1, 2**31), "min_tokens": (0, 2**31), "top_k": (0, 2**31), "min_p": (0, 1)}
        ranges |= {"temperature": (0, 1e6), "top_p": (1e-9, 1), "repetition_penalty": (1e-6, 1e6)}
        ranges |= {"presence_penalty": (-2, 2), "frequency_penalty": (-2, 2)}
        for name, (low, high) in ranges.items():
            value = getattr(self, name)
            if not (low <= value <= high if value is not None else name == "max_tokens"):
                raise ValueError(f"{name} must be in {low} .. {high}, got {value!r}")
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if "" in stops:
            raise ValueError("stop must have no empty string")
        if not isinstance(self.seed, int | None):
            raise ValueError(f"seed must be an integer, got {self.seed!r}")
        object.__setattr__(self, "stop", tuple(stops))


@dataclass(frozen=True)
class SchedulerConfig:
    """How much runs in one step."""

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 4096
    chunk_size: int = 1024

    @property
    def chunk_grid(self) -> int:
        return min(self.chunk_size, self.max_num_batched_tokens)


class Request:
    """The answers to one prompt, as they grow."""

    def __init__(self, prompt: str | list[int], answers: list[Answer]) -> None:
        self.prompt, self.answers = prompt, answers

    @property
    def is_running(self) -> bool:
        return not all(answer.stop for answer in self.answers)

    def new_text(self) -> str:
        """Return the text of the first answer that is certain and was not returned before."""
        return self.answers[0].text.release(everything=self.answers[0].stop is not None)

    def output(self) -> RequestOutput:
        outputs = [
            CompletionOutput(i, each.text.text, each.seq.output_token_ids, each.stop.finish_reason, each.stop.stop_reason)
            for i, each in enumerate(self.answers)
        ]
        first, prompt = self.answers[0].seq, self.prompt if isinstance(self.prompt, str) else None
        return RequestOutput(first.request_id, prompt, first.prompt_token_ids, outputs)


@dataclass(slots=True)
class CompletionOutput:
    """An answer to a prompt."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class RequestOutput:
    """A prompt with its n answers. prompt: None if the prompt was given as token ids."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]


# ---- 13. Penalties and filters
def mask_min_tokens(logits: Logits, batch: SamplingBatch) -> Logits:
    """Forbid EOS and stop ids in rows with fewer than min_tokens output tokens."""
    return _forbid(logits, batch.min_tokens)


def _forbid(logits: Logits, entries: TokenEntries | None) -> Logits:
    if entries is not None:
        logits[entries.rows, entries.ids] = float("-inf")
    return logits


def apply_repetition_penalty(logits: Logits, batch: SamplingBatch) -> Logits:
    """Make ids of prompt and output less likely, once each: divide positive logits by the penalty, multiply all others."""
    counts, penalties = batch.token_counts, batch.repetition_penalty
    if counts is None or penalties is None:
        return logits
    old, penalty = counts.read(logits), penalties[counts.rows]  # [entries]
    penalized = torch.where(old > 0, old / penalty, old * penalty)
    counts.write(logits, penalized.clamp_(max=torch.finfo(logits.dtype).max))  # a tiny penalty must not make infinity
    return logits


def apply_frequency_penalty(logits: Logits, batch: SamplingBatch) -> Logits:
    """Subtract the penalty from an id's logit once for each occurrence in the output."""
    counts, penalties = batch.token_counts, batch.frequency_penalty
    if counts is not None and counts.values is not None and penalties is not None:
        counts.write(logits, counts.read(logits) - penalties[counts.rows] * counts.values)
    return logits


def apply_presence_penalty(logits: Logits, batch: SamplingBatch) -> Logits:
    """Subtract the penalty from an id's logit once if the id is in the output."""
    counts, penalties = batch.token_counts, batch.presence_penalty
    if counts is not None and counts.values is not None and penalties is not None:
        counts.write(logits, counts.read(logits) - penalties[counts.rows] * (counts.values > 0))
    return logits


def keep_min_p(logits: Logits, batch: SamplingBatch) -> Logits:
    """Drop tokens with p < min_p * p_max, so that a flat distribution keeps more tokens than a sharp one."""
    if (min_p := batch.min_p) is None:
        return logits
    ratio = integer_weights(logits).float() / ONE  # p / p_max, without the sum of a softmax
    return logits.masked_fill(ratio < min_p.unsqueeze(-1), float("-inf"))


def keep_top_k(logits: Logits, batch: SamplingBatch) -> Logits:
    """Keep the k largest logits, and all that equal the k-th."""
    if batch.top_k is None:
        return logits
    smallest = smallest_of_top_k(logits, batch, logits.shape[-1])
    return logits.masked_fill(logits < smallest.unsqueeze(-1), float("-inf"))


def smallest_of_top_k(logits: Float[Tensor, "batch columns"], batch: SamplingBatch, vocab_size: int) -> Float[Tensor, " batch"]:
    """Return the k-th largest logit of each row, -inf for a row without top_k. The columns contain the k largest."""
    assert batch.top_k is not None
    is_on = batch.top_k < vocab_size
    k = torch.where(is_on, batch.top_k, 1)  # rows without top_k must not make topk sort the whole vocabulary
    largest = logits.topk(max(batch.max_top_k, 1), dim=-1).values  # [batch, largest k], in falling order
    return torch.where(is_on, largest.gather(-1, k.unsqueeze(-1) - 1).squeeze(-1), float("-inf"))


def keep_top_p(logits: Logits, batch: SamplingBatch) -> Logits:
    """Keep the smallest set of tokens whose probabilities sum to at least top_p."""
    if batch.top_p is None:
        return logits
    return drop_beyond(logits, batch.top_p)


def drop_beyond(logits: Logits, top_p: Float[Tensor, " batch"], total: Int[Tensor, " batch"] | None = None) -> Logits:
    """Drop a token if the weights of the tokens before it sum to at least top_p * total. total: None: the sum of all."""
    falling, ids = logits.sort(dim=-1, descending=True, stable=True)
    weights = integer_weights(falling)
    cumulative = weights.cumsum(dim=-1)
    before = cumulative - weights  # the sum of the tokens that enter earlier
    enough = top_p * (cumulative[:, -1] if total is None else total)  # float64
    dropped = (before >= enough.unsqueeze(-1)) & (top_p < 1.0).unsqueeze(-1)
    return logits.masked_fill(dropped.scatter(-1, ids, dropped), float("-inf"))


STAGES = (
    mask_min_tokens, apply_repetition_penalty, apply_frequency_penalty, apply_presence_penalty,
    apply_temperature, keep_min_p, keep_top_k, keep_top_p,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class TokenEntries:
    """Single logits of a batch: entry i is logits[rows[i], ids[i]], with a value if the stage needs one."""

    rows: Int[Tensor, " entries"]
    ids: Int[Tensor, " entries"]
    values: Float[Tensor, " entries"] | Int[Tensor, " entries"] | None = None  # None: the stage needs no values

    def read(self, logits: Float[Tensor, "batch vocab"]) -> Float[Tensor, " entries"]:
        return logits.view(-1).take(self.rows * logits.shape[-1] + self.ids)  # takes half the time of logits[rows, ids]

    def write(self, logits: Float[Tensor, "batch vocab"], values: Float[Tensor, " entries"]) -> None:
        logits.view(-1).index_copy_(0, self.rows * logits.shape[-1] + self.ids, values)


@dataclass(frozen=True, kw_only=True)
class SamplingBatch:
    """The parameters of each row of a step as tensors: the only input of the stages besides the logits. None: not used."""

    greedy: Bool[Tensor, " batch"] | None = None  # None: no row is greedy
    temperature: Float[Tensor, " batch"] | None = None
    min_p: Float[Tensor, " batch"] | None = None
    top_k: Int[Tensor, " batch"] | None = None  # off: the vocabulary's size
    max_top_k: int = 0  # the largest top_k that is on, known on the host
    top_p: Float[Tensor, " batch"] | None = None  # float64, to be compared with integer sums
    repetition_penalty: Float[Tensor, " batch"] | None = None
    frequency_penalty: Float[Tensor, " batch"] | None = None
    presence_penalty: Float[Tensor, " batch"] | None = None
    min_tokens: TokenEntries | None = None  # EOS and stop ids of rows that are too short to end
    token_counts: TokenEntries | None = None  # distinct ids of rows with a penalty; values: their counts in the output
    u: Float[Tensor, " batch"]  # float64: a random number in [0, 1) for each row

    @classmethod
    def build(cls, sequences: list[Sequence], vocab_size: int, device: torch.device) -> SamplingBatch:
        """Gather the parameters of the sequences. A sequence with drafts is repeated for each draft."""
        params = [seq.params for seq in sequences]
        positions = [len(seq.token_ids) + sequences[:row].count(seq) for row, seq in enumerate(sequences)]
        tiny, huge = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max

        def column(values: list[Any], off: float, dtype: torch.dtype = torch.float32) -> Tensor | None:
            values = [off if p.temperature == 0 else value for p, value in zip(params, values, strict=True)]
            return None if set(values) <= {off} else on_device(values, device, dtype)

        top_k = [min(p.top_k or vocab_size, vocab_size) for p in params]
        counted, forbidden = [], []
        for row, (seq, position) in enumerate(zip(sequences, positions, strict=True)):
            if seq.params.has_penalty:
                counts = Counter(seq.output_token_ids)
                counted += [(row, token_id, counts[token_id]) for token_id in dict.fromkeys(seq.token_ids)]
            if position - len(seq.prompt_token_ids) < seq.params.min_tokens:
                forbidden += [(row, token_id, 0) for token_id in seq.stop_ids]
        u = [_uniform(seq.seed, position) for seq, position in zip(sequences, positions, strict=True)]
        return cls(
            greedy=on_device([p.temperature == 0 for p in params], device, torch.bool),
            temperature=column([max(p.temperature, tiny) for p in params], 1.0),
            min_p=column([p.min_p for p in params], 0.0),
            top_k=column(top_k, vocab_size, torch.int64),
            max_top_k=max([k for k in top_k if k < vocab_size], default=0),
            top_p=column([p.top_p for p in params], 1.0, torch.float64),
            repetition_penalty=on_device([min(max(p.repetition_penalty, tiny), huge) for p in params], device, torch.float32),
            frequency_penalty=on_device([p.frequency_penalty for p in params], device, torch.float32),
            presence_penalty=on_device([p.presence_penalty for p in params], device, torch.float32),
            token_counts=TokenEntries(*on_device(counted, device).T) if counted else None,
            min_tokens=TokenEntries(*on_device(forbidden, device).T) if forbidden else None,
            u=on_device(u, device, torch.float64),
        )


# ---- 14. The random number of a token
MASK = 0xFFFFFFFF  # the largest 32-bit word
Word = Any  # 32 bits in an int, or an array of such words in uint64, which has room for the product of two


def _uniform(seed: Word, position: Word) -> Word:
    """Compute the numbers of one row, in integers, or of many rows, in arrays."""
    high, low, _, _ = philox((position & MASK, position >> 32, 0, 0), (seed & MASK, seed >> 32))
    return ((high >> 5 << 26) + (low >> 6)) * 2.0**-53


def philox(counter: ListLike[Word], key: ListLike[Word]) -> tuple[Word, Word, Word, Word]:
    """Compute Philox 4x32-10: ten rounds of multiply and mix turn a counter of four words and a key of two into four words."""
    (a, b, c, d), (left, right) = counter, key
    for _ in range(10):
        product, other = a * 0xD2511F53, c * 0xCD9E8D57
        a, b, c, d = (other >> 32) ^ b ^ left, other & MASK, (product >> 32) ^ d ^ right, product & MASK
        left, right = (left + 0x9E3779B9) & MASK, (right + 0xBB67AE85) & MASK  # the golden ratio and sqrt(3) - 1, as fractions
    return a, b, c, d


# ---- 15. On a GPU
try:
    from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache
except ImportError:  # paged_attention runs on a GPU too
    flash_attn_varlen_func = None
FLASH_DTYPES = (torch.float16, torch.bfloat16)


def on_device(numbers: Any, device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """Return a tensor of numbers. A copy from pinned memory to a GPU is queued, so that the host does not wait for it."""
    tensor = torch.tensor(numbers, dtype=dtype)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def free_memory(device: torch.device) -> int:
    """Return the bytes for the cache: on a GPU 0.9 of its memory without the weights and 2 GB for a step, else 256 MB."""
    if device.type == "cpu":
        return 2**28
    free, total = torch.cuda.mem_get_info(device)
    return int(free - 0.1 * total) - 2**31


class FlashAttend:
    """The Attend of one step: a library call for the decoding sequences, and another for the prompt chunks after them."""

    def __init__(self, cache: KVCache, metadata: AttentionMetadata) -> None:
        self._cache, self._metadata = cache, metadata
        n, seq_lens, tables = metadata.num_decodes, metadata.seq_lens.int(), metadata.block_tables.int()
        self._decodes = {"cache_seqlens": seq_lens[:n], "block_table": tables[:n], "causal": True}
        self._chunks: dict[str, Any] = {"block_table": tables[n:], "causal": True}
        self._chunks |= {"max_seqlen_q": metadata.max_query_len, "max_seqlen_k": metadata.max_seq_len}
        self._chunks["cu_seqlens_q"] = (metadata.query_start_loc[n:] - n).int()  # [num_chunks + 1]
        self._chunks["cu_seqlens_k"] = F.pad(seq_lens[n:].cumsum(0), (1, 0)).int()  # [num_chunks + 1]

    def __call__(self, layer: int, q: Queries, k: Keys, v: Keys, **options: Any) -> Queries:
        """Store k and v, then attend. options: further arguments of the library's functions."""
        self._cache.write(layer, self._metadata.slot_mapping, k, v)
        return self._attend(layer, q, **options)

    def _attend(self, layer: int, q: Queries, **options: Any) -> Queries:
        k_pages, v_pages = self._cache.by_slot(layer)
        outputs, n = [], self._metadata.num_decodes
        if n:
            queries = q[:n].unsqueeze(1)  # [num_seqs, 1 query, num_heads, head_dim]
            outputs.append(flash_attn_with_kvcache(queries, k_pages, v_pages, **self._decodes, **options).squeeze(1))
        if n < len(self._metadata.seq_lens):
            outputs.append(flash_attn_varlen_func(q[n:], k_pages, v_pages, **self._chunks, **options))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


class DecodeGraphs:
    """CUDA graphs of the forward pass of a decode step, by number of rows.

    What changes from step to step is copied into static inputs. The padding rows use the block after the cache's last.
    """

    def __init__(self, runner: ModelRunner, max_num_rows: int) -> None:
        self.sizes, self._capture = capture_sizes(max_num_rows), CUDACapture(runner.device)
        num_blocks, block_size = runner.cache.num_blocks, runner.cache.block_size
        self._padding = (0, 0, 1, num_blocks * block_size, num_blocks)  # of each of _changing
        self._max_len = runner.model.config.max_position_embeddings
        self._max_blocks = -(-self._max_len // block_size)
        self._graphs: dict[int, tuple[ForwardBatch, Callable[[], None], Tensor]] = {}

    def try_replay(self, batch: ForwardBatch, run: Callable[[ForwardBatch], Tensor]) -> Tensor | None:
        """Return the hidden rows of run(batch), from the graph of the smallest sufficient size. None: there is none."""
        num_rows = len(batch.input_ids)
        if batch.attention.num_decodes < num_rows or num_rows > self.sizes[-1]:
            return None
        size = next(size for size in self.sizes if size >= num_rows)
        if size not in self._graphs:
            inputs = self._make_inputs(size, batch.input_ids.device)
            self._fill(inputs, batch)
            self._graphs[size] = (inputs, *self._capture(lambda: run(inputs)))
        inputs, replay, out = self._graphs[size]
        self._fill(inputs, batch)
        replay()
        return out[:num_rows]

    def _make_inputs(self, size: int, device: torch.device) -> ForwardBatch:
        ids, positions, lens, slots = (torch.zeros(size, dtype=torch.int64, device=device) for _ in range(4))
        tables = torch.zeros(size, self._max_blocks, dtype=torch.int64, device=device)
        attention = metadata_of(list(range(size + 1)), [self._max_len] * size, lens, tables, slots)
        return ForwardBatch(ids, positions, ids, attention)

    def _fill(self, inputs: ForwardBatch, batch: ForwardBatch) -> None:
        """Copy a batch into the first rows, and make padding of the others: one token each, in the padding block."""
        for static, new, value in zip(_changing(inputs), _changing(batch), self._padding, strict=True):
            _put(static, new, value)


def _changing(batch: ForwardBatch) -> list[Tensor]:
    """Return the tensors that change from step to step."""
    attention = batch.attention
    return [batch.input_ids, batch.positions, attention.seq_lens, attention.slot_mapping, attention.block_tables]


def _put(static: Tensor, new: Tensor, value: int) -> None:
    """Copy `new` into the first rows, which have as many columns or more, and `value` into the others."""
    if (num_rows := new.shape[0]) < static.shape[0]:
        static[num_rows:] = value
        static = static[:num_rows]
    if num_rows:
        (static if new.ndim == 1 else static[..., : new.shape[-1]]).copy_(new)


def capture_sizes(max_num_rows: int) -> list[int]:
    """Return the numbers of rows for which graphs are captured."""
    return [*(size for size in (1, 2, 4, 8) if size < max_num_rows), *range(16, max_num_rows, 16), max_num_rows]


class CUDACapture:
    """Captures CUDA graphs, which share a memory pool, since only one runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._gpu: Any = torch.get_device_module(device)
        self._pool: Any = None  # a handle of torch
        self._stream = self._gpu.Stream()  # shared, since every stream has its own workspace

    def __call__(self, run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        gpu, current = self._gpu, self._gpu.current_stream()
        self._stream.wait_stream(current)
        try:
            with gpu.stream(self._stream):
                run()  # compiles kernels and selects algorithms, which cannot be captured
        finally:  # a run that fails has launched a part, which writes to the static inputs
            current.wait_stream(self._stream)
        graph = gpu.CUDAGraph()
        # stream: torch's graph() leaves its own stream current if the capture fails.
        # thread_local: other threads, such as a server's, may use the GPU meanwhile.
        with gpu.stream(current), gpu.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            out = run()
        self._pool = graph.pool()
        return graph.replay, out


# ---- 16. Several processes
class VocabularyHead(nn.Module):
    """The rows of the head that this process has. The sum of all processes' logits has every column, so all draw alike."""

    def __init__(self, weight: Float[Tensor, "vocab hidden"], rank: int, size: int) -> None:
        super().__init__()
        self.vocab_size, self.rows = len(weight), _even(len(weight), rank, size)
        self.weight = nn.Parameter(weight[self.rows].clone(), False)

    def forward(self, hidden: Float[Tensor, "rows hidden"]) -> Logits:
        logits = hidden.new_zeros(len(hidden), self.vocab_size)
        logits[:, self.rows] = F.linear(hidden, self.weight)
        dist.all_reduce(logits)
        return logits


def _even(total: int, rank: int, size: int) -> slice:
    return slice(rank * total // size, (rank + 1) * total // size)


# ---- 17. Drafts
class Drafts:
    """Adds guesses after the newest token of each decoding sequence, as far as blocks are free."""

    def __init__(self, block_manager: BlockManager, num_drafts: int) -> None:
        self._block_manager, self._num_drafts = block_manager, num_drafts
        self._indices: dict[Sequence, NGramIndex] = {}  # of the sequences that run

    def complete(self, plan: StepPlan) -> StepPlan:
        self._indices = {each.sequence: self._indices.get(each.sequence) or NGramIndex(range(1, 4)) for each in plan.scheduled}
        for item in plan.scheduled:
            seq = item.sequence
            limit = min(self._num_drafts, seq.max_num_tokens - seq.num_tokens - 1)
            if limit > 0 and seq.num_new_tokens == 1 and not seq.forks and not seq.params.has_penalty:
                drafts = self._indices[seq].continuation(seq.token_ids, limit)
                while drafts and not self._block_manager.can_allocate(seq, 1 + len(drafts)):
                    drafts.pop()
                self._block_manager.allocate(seq, 1 + len(drafts))
                item.draft_token_ids = tuple(drafts)
        return replace(plan, rows=rows_of(plan.scheduled))


def accepted_rows(plan: StepPlan, token_ids: list[int]) -> Iterator[tuple[Sequence, range]]:
    """Yield each sequence with its rows whose tokens count: that of its newest token, and those of accepted drafts."""
    items, end = {item.sequence: item for item in plan.scheduled if item.draft_token_ids}, 0
    for first, (seq, _) in enumerate(plan.rows):
        if first >= end:  # else the row belongs to a draft of the sequence before
            item = items.get(seq, ScheduledSequence(seq, 1))
            end = first + 1 + len(item.draft_token_ids)
            yield seq, range(first, first + 1 + item.num_accepted(token_ids[first:end]))


class NGramIndex:
    """The last position where each n-gram of one sequence was followed by a token. Every token is indexed once."""

    def __init__(self, sizes: range) -> None:
        self._sizes = sizes
        self._followers: dict[tuple[int, ...], int] = {}  # n-gram -> the index of the token after it
        self._num_indexed = 0

    def continuation(self, token_ids: list[int], limit: int) -> list[int]:
        """Return at most `limit` tokens that followed the longest indexed n-gram that token_ids ends with."""
        for index in range(self._num_indexed, len(token_ids)):
            for size in self._sizes:
                if size <= index:
                    self._followers[tuple(token_ids[index - size : index])] = index
        self._num_indexed = len(token_ids)
        for size in reversed(self._sizes):
            start = self._followers.get(tuple(token_ids[-size:]))
            if start is not None:
                followers = token_ids[start : start + limit]
                return (followers * -(-limit // len(followers)))[:limit]
        return []


# ---- 18. A server, and the command line
class Completions(BaseHTTPRequestHandler):
    """OpenAI's /v1/completions. Reads prompt, stream, stop, model (which is ignored) and the fields of SamplingParams."""

    llm: LLM

    def do_POST(self) -> None:
        try:
            fields = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            prompt, is_stream, _ = fields.pop("prompt"), fields.pop("stream", False), fields.pop("model", None)
            if self.path != "/v1/completions" or fields.pop("n", 1) != 1:
                raise ValueError("the path must be /v1/completions, and n must be 1")
            params = SamplingParams(**fields)
            with self.llm.lock:
                request = self.llm.add_request(prompt, params)
        except (KeyError, TypeError, ValueError) as error:
            self._send(400, "application/json", [json.dumps({"error": {"message": f"{type(error).__name__}: {error}"}})])
            return

        def completion(text: str) -> str:
            stop = request.answers[0].stop
            choice = {"index": 0, "text": text, "finish_reason": stop and stop.finish_reason}
            return json.dumps({"object": "text_completion", "choices": [choice]})

        texts = self.llm.texts(request)
        if is_stream:
            events = (f"data: {event}\n\n" for event in chain(map(completion, texts), ["[DONE]"]))
            self._send(200, "text/event-stream", events)
        else:
            self._send(200, "application/json", [completion("".join(texts))])

    def _send(self, status: int, content_type: str, pieces: Iterable[str]) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.end_headers()
        for piece in pieces:
            self.wfile.write(piece.encode())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prompt", nargs="?", default="Once upon a time")
    parser.add_argument("--model", default=MODEL, help="a checkpoint's folder")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--drafts", type=int, default=0, help="the most tokens to guess in a step")
    parser.add_argument("--max-tokens", type=int, default=100)
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--serve", type=int, metavar="PORT")
    args = parser.parse_args()
    if dist.is_torchelastic_launched():  # torchrun has started several processes
        dist.init_process_group("gloo")
    llm = LLM(args.model, device=args.device, num_drafts=args.drafts)
    if args.serve:
        print(f"http://127.0.0.1:{args.serve}/v1/completions")
        Completions.llm = llm
        ThreadingHTTPServer(("127.0.0.1", args.serve), Completions).serve_forever()
    params = SamplingParams(temperature=args.temperature, seed=args.seed, max_tokens=args.max_tokens)
    [output] = llm.generate([args.prompt], params)
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(args.prompt + output.outputs[0].text)


if __name__ == "__main__":
    main()
