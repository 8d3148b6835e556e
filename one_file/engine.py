"""An LLM inference engine in one file: continuous batching, a paged KV cache, prefix caching, preemption, exact sampling.

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
from array import array
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as ListLike
from dataclasses import dataclass, field, replace
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import accumulate, chain, pairwise
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors import safe_open
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream
from torch import Tensor, nn

Bool = Float = Int = Annotated  # Float[Tensor, "batch vocab"] is a Tensor with its shape, for the reader
Ids = Int[Tensor, " num_tokens"]  # also the shape of positions
Hidden = Float[Tensor, "num_tokens hidden"]
Queries = Float[Tensor, "num_tokens num_heads head_dim"]
Keys = Float[Tensor, "num_tokens num_kv_heads head_dim"]  # also the shape of values
Logits = Float[Tensor, "batch vocab"]
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
        self.requests: dict[Sequence, Request] = {}  # of the unfinished sequences

    def generate(
        self, prompts: ListLike[str | list[int]], sampling_params: SamplingParams | ListLike[SamplingParams] | None = None
    ) -> list[RequestOutput]:
        """Answer all prompts in one batch, and return the outputs in the order of the prompts."""
        params = sampling_params or SamplingParams()
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
        requests = [self.add_request(*pair) for pair in zip(prompts, each, strict=True)]
        while self.requests:
            self.step()
        return [request.output() for request in requests]

    def stream(self, prompt: str | list[int], params: SamplingParams) -> Iterator[str]:
        """Yield the text of an answer in pieces. Leaving the loop early aborts the request."""
        request = self.add_request(prompt, params)
        try:
            while request.is_running:
                self.step()
                yield request.answers[0].new_text()
        finally:
            self.abort(request)

    def add_request(self, prompt: str | list[int], params: SamplingParams) -> Request:
        """Queue a prompt: a sequence for each of the n answers, of which the first computes the prompt for all."""
        ids = self.tokenizer.encode(prompt).ids if isinstance(prompt, str) else list(prompt)
        if not 0 < len(ids) < self.max_model_len:
            raise ValueError(f"a prompt must have 1 .. {self.max_model_len - 1} tokens, got {len(ids)}")
        seed = secrets.randbits(64) if params.seed is None else params.seed
        end = min(len(ids) + params.max_tokens, self.max_model_len)
        first, *forks = [Sequence(ids, params, (seed + i) % 2**64, end, self.eos_token_ids) for i in range(params.n)]
        first.forks = forks
        request = Request(prompt, [first, *forks], self.tokenizer)
        self.requests |= dict.fromkeys([first, *forks], request)
        self.scheduler.add(first)
        return request

    @torch.inference_mode()
    def step(self) -> None:
        """Compute some tokens of some sequences, and append the sampled tokens to their answers."""
        plan = self.scheduler.schedule()  # which sequences run, and how many tokens of each
        if self.planner is not None:
            plan = self.planner.complete(plan)  # guesses at the tokens that follow, computed in the same pass
        batch = ForwardBatch.build(plan, self.runner.cache.block_size, self.runner.device)  # their new tokens in a row
        hidden = self.runner.forward(batch)  # [num_tokens, hidden]. Attention reads and writes the paged cache
        logits = self.model.compute_logits(hidden[batch.logits_indices]).float()  # of the rows that need a next token
        token_ids = sample(logits, SamplingBatch.build([seq for seq, _ in plan.rows], logits)).tolist()
        self.scheduler.commit(plan)  # count the plan's tokens as cached
        for seq, sampled in accepted(plan, token_ids):
            for token_id in sampled:
                answer = self.requests[seq].answer_of[seq]
                if token_id < 0:  # the logits are not finite, or the stages have left no token
                    answer.end("error")
                else:
                    self.scheduler.append(seq, token_id)
                    answer.advance()
                if answer.finish_reason:
                    self.end(seq)
                    break

    def end(self, seq: Sequence) -> None:
        del self.requests[seq]
        self.scheduler.finish(seq)

    def abort(self, request: Request) -> None:
        """End what still runs of a request."""
        for seq, answer in request.answer_of.items():
            if not answer.finish_reason:
                answer.end("abort")
                self.end(seq)


# ---- 2. Sequences, and the plan of a step


@dataclass(eq=False, slots=True)  # eq=False: sequences are compared by identity
class Sequence:
    """A prompt and the tokens generated after it.

    There is no phase flag: a prompt, a chunk of it, a decode step and a recomputation after preemption are all `num_new_tokens`
    tokens that are known and not yet in the cache. A decode step has a single new token.
    """

    # set once, when the request enters the engine
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    max_num_tokens: int  # of prompt and output, at which the answer ends with "length"
    eos_token_ids: frozenset[int] = frozenset()
    # set by the scheduler
    token_ids: list[int] = field(init=False)  # prompt + output
    num_computed_tokens: int = field(default=0, init=False)  # those in the cache
    is_running: bool = field(default=False, init=False)
    forks: list[Sequence] = field(default_factory=list, init=False)  # further answers, until the prompt is computed
    # set by the block manager
    block_table: list[int] = field(default_factory=list, init=False)
    prefix_keys: list[bytes] = field(default_factory=list, init=False)  # the keys of its full, cached blocks

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_new_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - len(self.prompt_token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[len(self.prompt_token_ids) :]

    @property
    def stop_ids(self) -> frozenset[int]:
        """EOS and stop ids, which min_tokens forbids."""
        return self.eos_token_ids.union(self.params.stop_token_ids)


@dataclass(slots=True)
class ScheduledSequence:
    """A sequence of the step, and the number of its next tokens, not yet in the cache, that the step computes."""

    sequence: Sequence
    num_new_tokens: int
    draft_token_ids: tuple[int, ...] = ()  # a guess at the tokens that follow: see Drafts


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The plan of one step.

    scheduled: sequences with one new token, then chunks of prompts.
    rows: the (sequence, packed index) pairs that reach the LM head. A chunk that does not end its prompt has none.
    block_copies: the (from, to) blocks that are copied before the forward pass.
    """

    scheduled: tuple[ScheduledSequence, ...]
    rows: tuple[tuple[Sequence, int], ...]
    block_copies: tuple[tuple[int, int], ...] = ()


def rows_of(scheduled: Iterable[ScheduledSequence]) -> tuple[tuple[Sequence, int], ...]:
    """Return the sequences whose last known token this step computes, and their forks, with that token's packed index."""
    rows, end = [], 0
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
    """Owns the two queues, and which tokens of a sequence are known and cached.

    1. First come, first served. A running sequence is older than every waiting one.
    2. A sequence with one new token always runs. max_num_batched_tokens limits the tokens of all others.
    3. A prompt is cut at absolute multiples of the chunk grid. A chunk runs as a whole or waits, and no younger one passes it.
    4. When blocks run out, the sequence that started last is preempted: its blocks are freed, it waits at the head of the
       queue, and it later recomputes its tokens, except for those that the prefix cache still holds.
    """

    def __init__(self, config: SchedulerConfig, block_manager: BlockManager) -> None:
        self.config, self.block_manager = config, block_manager
        self.waiting: deque[Sequence] = deque()  # preempted sequences, then new ones
        self.running: list[Sequence] = []  # in the order in which they started

    def add(self, seq: Sequence) -> None:
        self.waiting.append(seq)

    def schedule(self) -> StepPlan:
        """Decide one step, and give every scheduled sequence its blocks."""
        selection = _Selection(self.config.max_num_batched_tokens)
        num_running = len(self.running)
        self._continue_running(selection)
        if len(self.running) == num_running:  # nothing was preempted
            self._start_waiting(selection)
        scheduled = sorted(selection.scheduled, key=lambda item: item.num_new_tokens > 1)  # stable: each group by arrival
        return StepPlan(tuple(scheduled), rows_of(scheduled), tuple(chain.from_iterable(selection.copies.values())))

    def _continue_running(self, selection: _Selection) -> None:
        """Schedule the running sequences, oldest first, and preempt where blocks run out."""
        for seq in list(self.running):
            num_new = self.next_chunk(seq, seq.num_computed_tokens)
            if not seq.is_running:
                pass  # it was preempted for an earlier sequence of this loop
            elif num_new > 1 and selection.budget < num_new:
                selection.budget = 0  # it waits, and no younger prompt passes it
            elif self._make_room(seq, num_new, selection):
                self._select(selection, seq, num_new)

    def _start_waiting(self, selection: _Selection) -> None:
        """Start waiting sequences in their order, until one does not fit. A block stays free for each that runs."""
        while self.waiting:
            num_running = sum(1 + len(seq.forks) for seq in self.running)
            has_place = num_running + 1 + len(self.waiting[0].forks) <= self.config.max_num_seqs or not self.running
            if not has_place or not self._start(selection, self.waiting[0], num_running):
                break
            self.waiting.popleft()

    def _start(self, selection: _Selection, seq: Sequence, num_reserved: int) -> bool:
        """Start a sequence, which the caller removes from `waiting`. Return False if there is no room for it."""
        prefix = self.block_manager.match_prefix(seq.token_ids)
        num_cached = len(prefix) * self.block_manager.block_size
        num_new = self.next_chunk(seq, num_cached)
        if num_new > 1 and selection.budget < num_new:
            return False
        if not self.block_manager.can_start(seq.num_tokens, prefix, num_kept_free=num_reserved):
            return False
        self.running.append(seq)
        seq.is_running = True
        self.block_manager.start(seq, prefix)
        seq.num_computed_tokens = num_cached
        self._select(selection, seq, num_new)
        return True

    def next_chunk(self, seq: Sequence, start: int) -> int:
        """Return the number of tokens up to the next multiple of the chunk grid or the sequence's end."""
        grid = self.config.chunk_grid
        return min(seq.num_tokens - start, grid - start % grid)

    def _select(self, selection: _Selection, seq: Sequence, num_new_tokens: int) -> None:
        """Schedule the sequence's next tokens, for which there are free blocks."""
        selection.copies[seq] = self.block_manager.allocate(seq, num_new_tokens)
        selection.scheduled.append(ScheduledSequence(seq, num_new_tokens))
        selection.budget -= num_new_tokens if num_new_tokens > 1 else 0

    def _make_room(self, seq: Sequence, num_new_tokens: int, selection: _Selection) -> bool:
        """Preempt sequences until the next tokens of `seq` have blocks. Return False if `seq` itself was preempted."""
        while not self.block_manager.can_allocate(seq, num_new_tokens):
            victim = self.running.pop()  # it may be `seq`
            self._preempt(victim)
            selection.drop(victim)
            if victim is seq:
                return False
        return True

    def _preempt(self, seq: Sequence) -> None:
        """Requeue a sequence, which the caller removes from `running`."""
        self.block_manager.free(seq)
        seq.num_computed_tokens, seq.is_running = 0, False
        self.waiting.appendleft(seq)

    def commit(self, plan: StepPlan) -> None:
        """Count the tokens of a computed plan as cached, cache full blocks, and start the further answers to a prompt."""
        for item in plan.scheduled:
            seq = item.sequence
            seq.num_computed_tokens += item.num_new_tokens
            self.block_manager.cache_finished_blocks(seq, seq.num_computed_tokens)
            if seq.forks and seq.num_new_tokens == 0:
                self._fork(seq)

    def _fork(self, parent: Sequence) -> None:
        """Start the further answers of a computed prompt, directly after the first, because they have the same age."""
        forks, parent.forks = parent.forks, []
        index = self.running.index(parent) + 1
        self.running[index:index] = forks
        for fork in forks:
            self.block_manager.fork(parent, fork)
            fork.num_computed_tokens, fork.is_running = parent.num_computed_tokens, True

    def append(self, seq: Sequence, token_id: int) -> None:
        """Append a sampled token. The tokens that the same step has appended before were right drafts, so they are computed."""
        seq.num_computed_tokens += seq.num_new_tokens
        seq.token_ids.append(token_id)

    def finish(self, seq: Sequence) -> None:
        """Remove a sequence and free its blocks."""
        if seq.is_running or seq in self.waiting:  # else a further answer whose prompt is not computed
            (self.running if seq.is_running else self.waiting).remove(seq)
        self.block_manager.free(seq)


@dataclass(slots=True)
class _Selection:
    """What a step will contain, while schedule() decides it."""

    budget: int  # the tokens that are left for sequences with more than one new token
    scheduled: list[ScheduledSequence] = field(default_factory=list)
    copies: dict[Sequence, list[tuple[int, int]]] = field(default_factory=dict)

    def drop(self, victim: Sequence) -> None:
        """Take back a preempted sequence, which this step may already have scheduled."""
        if self.copies.pop(victim, None) is not None:
            self.scheduled = [item for item in self.scheduled if item.sequence is not victim]


# ---- 4. Blocks: who holds which, and what they contain


class BlockManager:
    """Owns the block ids 0 .. num_blocks - 1, and the block table of each sequence.

        tokens   [ the cat sat on | the mat and     ]         block_size 4
        table    [       7        |        2        ]         7 is full and has a key, 2 is being filled

    Token i has the slot block_table[i // block_size] * block_size + i % block_size. A block in several tables is shared:
    found in the prefix cache, or forked. Before a sequence writes into a shared block, it gets its own copy.
    """

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True) -> None:
        self.num_blocks, self.block_size, self.enable_prefix_caching = num_blocks, block_size, enable_prefix_caching
        self.blocks = Pool(num_blocks)
        self.index = PrefixIndex(block_size)

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def match_prefix(self, token_ids: list[int]) -> list[tuple[bytes, int]]:
        """Return the keys and blocks that hold the start of token_ids, of which the last token must be computed."""
        return self.index.match(token_ids[:-1]) if self.enable_prefix_caching else []

    def can_start(self, num_tokens: int, prefix: list[tuple[bytes, int]], *, num_kept_free: int = 0) -> bool:
        """Return whether all tokens of a waiting sequence with this prefix fit, and num_kept_free blocks more."""
        num_revived = sum(block in self.blocks.free for _, block in prefix)
        num_needed = self.num_blocks_for(num_tokens) - len(prefix) + num_revived
        return num_needed + num_kept_free <= len(self.blocks.free)

    def start(self, seq: Sequence, prefix: list[tuple[bytes, int]]) -> None:
        """Give a waiting sequence the cached blocks of its prefix."""
        seq.prefix_keys, seq.block_table = [key for key, _ in prefix], [block for _, block in prefix]
        self.blocks.hold(seq.block_table)

    def can_allocate(self, seq: Sequence, num_new_tokens: int) -> bool:
        first, end = seq.num_computed_tokens // self.block_size, seq.num_computed_tokens + num_new_tokens
        num_copied = sum(self.blocks.ref_counts[block] > 1 for block in seq.block_table[first:])
        return max(self.num_blocks_for(end) - len(seq.block_table), 0) + num_copied <= len(self.blocks.free)

    def allocate(self, seq: Sequence, num_new_tokens: int) -> list[tuple[int, int]]:
        """Allocate blocks for the sequence's next tokens. Return the (from, to) blocks to copy before these are written."""
        copies, table, end = [], seq.block_table, seq.num_computed_tokens + num_new_tokens
        for index in range(seq.num_computed_tokens // self.block_size, len(table)):
            if self.blocks.ref_counts[table[index]] > 1:  # true for at most one block, after a fork
                shared, table[index] = table[index], self._take()
                self.blocks.drop([shared])
                copies.append((shared, table[index]))
        while len(table) * self.block_size < end:
            table.append(self._take())
        return copies

    def _take(self) -> int:
        """Take the first free block. Its content leaves the prefix cache."""
        block = next(iter(self.blocks.free))
        self.blocks.hold([block])
        if key := self.blocks.keys[block]:
            del self.index.ids[key]
            self.blocks.keys[block] = b""
        return block

    def cache_finished_blocks(self, seq: Sequence, num_tokens: int) -> None:
        """Add the blocks that the sequence's first num_tokens fill, which must be computed, to the prefix cache."""
        num_cached, num_full = len(seq.prefix_keys), num_tokens // self.block_size if self.enable_prefix_caching else 0
        if num_full > num_cached:
            tokens = seq.token_ids[num_cached * self.block_size : num_full * self.block_size]
            seq.prefix_keys += self.index.keys_of(tokens, seq.prefix_keys[-1] if seq.prefix_keys else b"")
            for key, block in zip(seq.prefix_keys[num_cached:], seq.block_table[num_cached:], strict=False):
                if self.index.ids.setdefault(key, block) == block:  # else another sequence was first
                    self.blocks.keys[block] = key

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Share all of the parent's blocks with a child."""
        child.block_table, child.prefix_keys = list(parent.block_table), list(parent.prefix_keys)
        self.blocks.hold(child.block_table)

    def free(self, seq: Sequence) -> None:
        """Free the sequence's blocks, the last first, so that the start of a prompt, which others may share, is kept."""
        self.blocks.drop(reversed(seq.block_table))
        seq.block_table.clear()
        seq.prefix_keys.clear()


class Pool:
    """The ids of blocks. The free ones stand in the order in which they are taken: empty ones, then the least recently used."""

    def __init__(self, size: int) -> None:
        self.ref_counts = [0] * size
        self.keys = [b""] * size  # of the blocks in the prefix cache
        self.free = OrderedDict.fromkeys(range(size))

    def hold(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self.free.pop(block, None)
            self.ref_counts[block] += 1

    def drop(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self.ref_counts[block] -= 1
            if self.ref_counts[block] == 0:
                self.free[block] = None
                self.free.move_to_end(block, last=bool(self.keys[block]))


class PrefixIndex:
    """The prefix cache. The key of a full block is the SHA-256 digest of the key before it and of its tokens."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.ids: dict[bytes, int] = {}  # key -> block

    def keys_of(self, token_ids: list[int], key: bytes) -> Iterator[bytes]:
        """Yield the keys of the full blocks of token_ids, which follow a block with this key."""
        for start in range(0, len(token_ids) - self.block_size + 1, self.block_size):
            key = sha256(key + array("i", token_ids[start : start + self.block_size]).tobytes()).digest()
            yield key

    def match(self, token_ids: list[int]) -> list[tuple[bytes, int]]:
        """Return the first blocks of token_ids that are cached, each with its key."""
        found = []
        for key in self.keys_of(token_ids, b""):
            if key not in self.ids:
                break
            found.append((key, self.ids[key]))
        return found


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
        indices = [index for _, index in plan.rows]
        lists = packed.input_ids, packed.positions, indices, packed.seq_lens, packed.slots, chain.from_iterable(tables)
        ids, positions, rows, lens, slots, flat = (on_device(list(each), device) for each in lists)
        starts, num_decodes = [0, *accumulate(packed.query_lens)], sum(length == 1 for length in packed.query_lens)
        attention = AttentionMetadata(starts, packed.seq_lens, lens, flat.view(len(tables), -1), slots, num_decodes)
        return cls(ids, positions, rows, attention, plan.block_copies)


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """The sequence of each packed token of a step, and the cache blocks of each sequence.

    Example with blocks of 4 slots, where the first sequence decodes its 6th token and the second prefills 3 tokens:

        query_start_loc [0, 1, 4]         packed token 0 is the first sequence's, 1 to 3 are the second's
        seq_lens        [6, 3]            tokens in the cache after this step is written
        block_tables    [[2, 5], [7, 0]]  row i: the blocks of sequence i in order, padded with 0
        slot_mapping    [21, 28, 29, 30]  the slot of each new token: 5 * 4 + 1, 7 * 4 + 0, ...
    """

    query_start_loc: list[int]
    seq_lens: list[int]
    seq_lens_on_device: Int[Tensor, " num_seqs"]
    block_tables: Int[Tensor, "num_seqs max_blocks"]
    slot_mapping: Int[Tensor, " num_tokens"]
    num_decodes: int  # the first sequences, which have one new token each


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
        seq, drafts = item.sequence, item.draft_token_ids
        start, end = seq.num_computed_tokens, seq.num_computed_tokens + item.num_new_tokens
        input_ids += (*seq.token_ids[start:end], *drafts)
        positions += range(start, end + len(drafts))
        slots += [seq.block_table[i // block_size] * block_size + i % block_size for i in range(start, end + len(drafts))]
        query_lens += [item.num_new_tokens] + [1] * len(drafts)
        seq_lens += range(end, end + len(drafts) + 1)
        sequences += [seq] * (len(drafts) + 1)
    return packed


class ModelRunner:
    """Runs the model over the paged cache."""

    def __init__(self, model: Any, block_size: int | None, num_blocks: int | None, max_graph_rows: int | None) -> None:
        """max_graph_rows: the most rows of a decode step that runs as a CUDA graph. None: none does."""
        self.model, weight = model, next(model.parameters())
        self.device, has_flash = weight.device, weight.is_cuda and flash_attn is not None
        self.attention = FlashAttend if has_flash else PagedAttend
        block_size = block_size or self.attention.default_block_size
        bytes_per_token = 2 * weight.itemsize * model.config.num_hidden_layers * model.config.num_key_value_heads
        bytes_per_block = bytes_per_token * model.config.head_dim * block_size
        num_blocks = num_blocks or free_memory(self.device) // bytes_per_block
        self.graphs = None
        if has_flash and max_graph_rows:
            self.graphs = DecodeGraphs(model.config, num_blocks, block_size, max_graph_rows)
        self.cache = KVCache(model.config, num_blocks, block_size, weight.dtype, weight.device)

    def forward(self, batch: ForwardBatch) -> Float[Tensor, "num_tokens hidden"]:
        """Compute the hidden rows of a step."""
        for source, target in batch.block_copies:
            self.cache.pages[:, :, target] = self.cache.pages[:, :, source]
        if self.graphs is not None and self.graphs.supports(batch):
            return self.graphs.replay(batch, self._run)
        return self._run(batch)

    def _run(self, batch: ForwardBatch) -> Float[Tensor, "num_tokens hidden"]:
        return self.model(batch.input_ids, batch.positions, self.attention(self.cache, batch.attention))


# ---- 6. Attention over pages


class KVCache:
    """The keys and values of all layers, in blocks. A slot holds one token: slot = block * block_size + offset."""

    def __init__(self, config: Any, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        shape = (config.num_hidden_layers, 2, num_blocks + 1, block_size, config.num_key_value_heads, config.head_dim)
        self.pages = torch.zeros(shape, dtype=dtype, device=device)  # the last block is for the padding of CUDA graphs

    def write(self, layer: int, slot_mapping: Int[Tensor, " num_tokens"], k: Keys, v: Keys) -> None:
        """Store each token's k and v in its slot."""
        blocks, offsets = slot_mapping // self.block_size, slot_mapping % self.block_size
        for pages, values in zip(self.pages[layer], (k, v), strict=True):
            pages[blocks, offsets] = values

    def gather(self, layer: int, block_table: Int[Tensor, " blocks"], seq_len: int) -> tuple[Keys, Keys]:
        """Copy the k and v of one sequence, its tokens in order, out of its blocks."""
        k, v = (pages[block_table].flatten(0, 1)[:seq_len] for pages in self.pages[layer])
        return k, v


class PagedAttend:
    """The definition of paged attention: write k and v, gather each sequence, attend densely. Any device."""

    default_block_size = 16

    def __init__(self, cache: KVCache, metadata: AttentionMetadata) -> None:
        self.cache, self.metadata = cache, metadata

    def __call__(self, layer: int, q: Queries, k: Keys, v: Keys) -> Queries:
        """Store k and v, then attend over each sequence of the step in turn."""
        self.cache.write(layer, self.metadata.slot_mapping, k, v)
        out, starts = torch.empty_like(q), self.metadata.query_start_loc
        for i, seq_len in enumerate(self.metadata.seq_lens):
            queries = slice(starts[i], starts[i + 1])
            keys, values = self.cache.gather(layer, self.metadata.block_tables[i], seq_len)
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


# ---- 7. From logits to a token


def sample(logits: Logits, batch: SamplingBatch) -> Int[Tensor, " batch"]:
    """Apply every stage in order, then take the argmax of greedy rows and draw the others. -1: the row has no token."""
    is_finite = logits.amax(dim=-1).isfinite()  # before a mask could hide it
    for stage in STAGES:
        logits = stage(logits, batch)
    greedy, drawn = argmax(logits), draw(logits, batch.u)
    return torch.where(is_finite, torch.where(batch.greedy | (greedy < 0), greedy, drawn), -1)


def apply_temperature(logits: Logits, batch: SamplingBatch) -> Logits:
    """Divide by the temperature. The maximum is subtracted first, so that a tiny temperature makes no infinity."""
    if batch.temperature is None:
        return logits
    temperature = torch.where(batch.greedy, 1.0, batch.temperature.clamp(min=1e-30))
    shift = torch.where(temperature == 1.0, 0.0, logits.amax(dim=-1))  # [batch]
    return (logits - shift.unsqueeze(-1)) / temperature.unsqueeze(-1)


def argmax(logits: Logits) -> Int[Tensor, " batch"]:
    """Find the id of each row's largest logit: the lowest of equal logits, and -1 if the largest is not finite."""
    largest, token_ids = logits.max(dim=-1)
    return torch.where(largest.isfinite(), token_ids, -1)


def draw(logits: Logits, u: Float[Tensor, " batch"]) -> Int[Tensor, " batch"]:
    """Find the first id whose cumulative weight exceeds the threshold floor(u * W). Sums of integers are exact.

    weights             | 7 |      19      | 2 |   0   | 4 |      W = 32
    cumulative weights      7              26  28      28  32
                                  ^ threshold = floor(u * 32) = 15: the second token
    """
    cumulative = integer_weights(logits).cumsum(dim=-1)
    total = cumulative[:, -1]
    thresholds = torch.minimum((u * total).floor().to(torch.int64), total - 1)
    return torch.searchsorted(cumulative, thresholds.unsqueeze(-1), right=True).squeeze(-1)


def integer_weights(logits: Logits) -> Int[Tensor, "batch vocab"]:
    """Compute floor(p / p_max * 2^32): 2^32 for the most probable token, 0 for dropped tokens."""
    below = logits - logits.amax(dim=-1, keepdim=True).clamp(min=torch.finfo(torch.float32).min)  # -inf - -inf would be NaN
    return (below.double().exp() * ONE).float().nan_to_num(0.0).long()


ONE = 2.0**32  # the weight of the most probable token


# ---- 8. From tokens to text, and when to stop


class Answer:
    """A sequence as text. finish_reason: None while it runs, then "stop", "length", "error" or "abort"."""

    def __init__(self, seq: Sequence, tokenizer: Tokenizer) -> None:
        self.seq = seq
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.text, self._detokenizer = StopStrings(seq.params.stop), Detokenizer(tokenizer)
        ids = {token.content: token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        self._special_stops = {ids[stop]: stop for stop in seq.params.stop if stop in ids}  # which the text leaves out

    def advance(self) -> None:
        """Process the newest token: EOS and stop ids, the length, whole characters, stop strings."""
        seq, params, newest = self.seq, self.seq.params, self.seq.token_ids[-1]
        examine = seq.num_output_tokens > params.min_tokens
        if newest in seq.eos_token_ids and not params.ignore_eos:
            self.finish_reason = "stop"
        elif newest in params.stop_token_ids:
            self.finish_reason, self.stop_reason = "stop", newest
        elif examine and newest in self._special_stops:
            self.finish_reason, self.stop_reason = "stop", self._special_stops[newest]
        elif len(seq.token_ids) >= seq.max_num_tokens:
            self.finish_reason = "length"
        piece = "" if self.finish_reason == "stop" else self._detokenizer.push(newest)
        if self.finish_reason:
            piece += self._detokenizer.finish()
        if matched := self.text.push(piece, examine=examine):
            self.finish_reason, self.stop_reason = "stop", matched

    def end(self, reason: str) -> None:
        """End before the model ends it: "abort" or "error"."""
        self.text.push(self._detokenizer.finish(), examine=False)
        self.finish_reason = reason

    def new_text(self) -> str:
        """Return the text that is certain and was not returned before."""
        return self.text.release(everything=self.finish_reason is not None)


class Detokenizer:
    """Turns ids into text in whole characters: an emoji is often several tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self._stream = tokenizer, DecodeStream(skip_special_tokens=True)
        self._held: list[int] = []  # ids whose character is incomplete

    def push(self, token_id: int) -> str:
        """Add an id and return the text that it releases, or "" while a character is incomplete."""
        self._held.append(token_id)
        if text := self._stream.step(self._tokenizer, token_id):
            self._held.clear()
        return text or ""

    def finish(self) -> str:
        """Return the text of the held ids when no id follows. An incomplete character is left out."""
        text, self._held = self._tokenizer.decode(self._held), []
        return text.rstrip("\ufffd")


class StopStrings:
    """The output text as it grows, cut where a stop string completes. What may become part of one is held back."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self.text, self._stops, self._num_shown = "", stops, 0

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
        sizes = (size for stop in self._stops for size in range(1, len(stop)) if self.text.endswith(stop[:size]))
        return max(sizes, default=0)


# ---- 9. Qwen2, Qwen2.5 and Qwen3


class QwenForCausalLM(nn.Module):
    prefix, transpose = "model.", ("no name",)

    def __init__(self, config: QwenConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(QwenDecoderLayer(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = RotaryEmbedding(config.head_dim, config.rope_theta)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(self, input_ids: Ids, positions: Ids, attend: Attend) -> Hidden:
        x = self.embed_tokens(input_ids)  # [num_tokens, hidden]
        cos, sin = self.rotary_emb(positions, x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin, attend)
        return self.norm(x)

    def compute_logits(self, hidden: Float[Tensor, "rows hidden"]) -> Logits:
        return self.lm_head(hidden)


class QwenDecoderLayer(nn.Module):
    def __init__(self, config: QwenConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = QwenAttention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = SwiGLU(config.hidden_size, config.intermediate_size)

    def forward(self, x: Hidden, cos: Tensor, sin: Tensor, attend: Attend) -> Hidden:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


class QwenAttention(nn.Module):
    def __init__(self, config: QwenConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.head_dim, self.qk_norm = layer, config.head_dim, config.qk_norm
        q_size = config.num_attention_heads * config.head_dim
        kv_size = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, q_size, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_size, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_size, bias=config.qkv_bias)
        self.o_proj = nn.Linear(q_size, config.hidden_size, bias=False)
        if self.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
            self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def forward(self, x: Hidden, cos: Tensor, sin: Tensor, attend: Attend) -> Hidden:
        heads = (-1, self.head_dim)
        q = self.q_proj(x).unflatten(-1, heads)  # [num_tokens, num_heads, head_dim]
        k = self.k_proj(x).unflatten(-1, heads)  # [num_tokens, num_kv_heads, head_dim]
        v = self.v_proj(x).unflatten(-1, heads)  # [num_tokens, num_kv_heads, head_dim]
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = apply_rotary(q, cos, sin), apply_rotary(k, cos, sin)
        return self.o_proj(attend(self.layer, q, k, v).flatten(1))


class SwiGLU(nn.Module):
    """Computes down(silu(gate(x)) * up(x)). Source: Shazeer 2020, https://arxiv.org/abs/2002.05202"""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

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

    def forward(self, positions: Ids, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cos and sin for every token, once per step. All layers and heads share them."""
        angles = (positions.float().unsqueeze(-1) * self.inv_freq).double()  # in fp32: bf16 is wrong by whole turns
        angles = torch.cat((angles, angles), dim=-1).unsqueeze(1)  # [num_tokens, 1, head_dim]
        return angles.cos().to(dtype), angles.sin().to(dtype)


def apply_rotary(x: Queries, cos: Tensor, sin: Tensor) -> Queries:
    """Rotate every head of every token by its position's angles."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


@dataclass(frozen=True, kw_only=True)
class QwenConfig:
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
    rope_theta: float
    qkv_bias: bool
    qk_norm: bool

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> QwenConfig:
        """Read config.json."""
        rope, is_qwen3 = config.get("rope_parameters") or config.get("rope_scaling") or {}, config["model_type"] == "qwen3"
        kind, slides = rope.get("rope_type", rope.get("type", "default")), config.get("use_sliding_window", False)
        if (kind, config["hidden_act"], slides) != ("default", "silu", False):
            got = f"{kind}, {config['hidden_act']}, {slides}"
            raise ValueError(f"rope_type, hidden_act and use_sliding_window must be default, silu and false, got {got}")
        names = "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads".split()
        return cls(
            **{name: config[name] for name in [*names, "max_position_embeddings", "rms_norm_eps"]},
            head_dim=config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
            tie_word_embeddings=config.get("tie_word_embeddings", False),
            rope_theta=rope.get("rope_theta", config.get("rope_theta", 10_000.0)),
            qkv_bias=not is_qwen3,
            qk_norm=is_qwen3,
        )


# ---- 10. GPT-2


class GPT2LMHeadModel(nn.Module):
    # Conv1D stores [in, out]
    prefix, transpose = "transformer.", ("c_attn.weight", "c_proj.weight", "c_fc.weight")

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.hidden_size)
        self.wpe = nn.Embedding(config.max_position_embeddings, config.hidden_size)
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

    def compute_logits(self, hidden: Float[Tensor, "rows hidden"]) -> Logits:
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
        self.c_attn = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.c_proj = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x: Hidden, attend: Attend) -> Hidden:
        qkv = self.c_attn(x).unflatten(-1, (3, self.num_heads, self.head_dim))
        q, k, v = qkv.unbind(1)  # each [num_tokens, num_heads, head_dim]
        return self.c_proj(attend(self.layer, q, k, v).flatten(1))


class GPT2MLP(nn.Module):
    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.c_fc = nn.Linear(config.hidden_size, 4 * config.hidden_size)
        self.c_proj = nn.Linear(4 * config.hidden_size, config.hidden_size)

    def forward(self, x: Hidden) -> Hidden:
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))


@dataclass(frozen=True, kw_only=True)
class GPT2Config:
    """The fields of config.json under the names of the newer families."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    layer_norm_epsilon: float
    tie_word_embeddings: bool

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> GPT2Config:
        """Read config.json."""
        if config["activation_function"] not in ("gelu_new", "gelu_pytorch_tanh"):  # two names of the same function
            raise ValueError(f"activation_function must be gelu_new, got {config['activation_function']}")
        return cls(
            vocab_size=config["vocab_size"],
            hidden_size=config["n_embd"],
            num_hidden_layers=config["n_layer"],
            num_attention_heads=config["n_head"],
            num_key_value_heads=config["n_head"],
            head_dim=config["n_embd"] // config["n_head"],
            max_position_embeddings=config["n_positions"],
            layer_norm_epsilon=config["layer_norm_epsilon"],
            tie_word_embeddings=config.get("tie_word_embeddings", True),
        )


# ---- 11. Loading a folder


def load(folder: Path, device: str, dtype: str) -> tuple[Any, Tokenizer, frozenset[int]]:
    """Return the model with its weights, its tokenizer and its EOS ids. Every tensor must fit a parameter, and is used once."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if config["model_type"] not in MODELS:
        raise ValueError(f"model_type must be one of {', '.join(MODELS)}, got {config['model_type']}")
    device = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    own = config.get("dtype") or config.get("torch_dtype") or "float32"
    chosen = getattr(torch, ("float32" if device == "cpu" else own) if dtype == "auto" else dtype)
    model_class, config_class = MODELS[config["model_type"]]
    with torch.device("meta"):  # shapes without memory
        model = model_class(config_class.from_hf(config))
    parameters = dict(model.named_parameters(remove_duplicate=False))  # a tied head is there twice
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                tensor = file.get_tensor(name)
                tensor = tensor.T if name.endswith(model_class.transpose) else tensor  # GPT-2 stores [in, out]
                target = name.removeprefix(model_class.prefix)
                if target not in parameters:
                    continue  # a causal mask, or a head that equals the embedding
                module, _, leaf = target.rpartition(".")
                setattr(model.get_submodule(module), leaf, nn.Parameter(tensor.to(device, chosen).contiguous(), False))
                parameters[target] = None
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
    return model.to(device).eval(), Tokenizer.from_file(str(folder / "tokenizer.json")), eos_token_ids


MODELS = {"gpt2": (GPT2LMHeadModel, GPT2Config), "qwen2": (QwenForCausalLM, QwenConfig)}  # model_type -> the classes
MODELS["qwen3"] = MODELS["qwen2"]


# ---- ======== A first reading ends here.


# ---- 12. What a request may ask, and what it gets


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to choose each next token of one prompt, and when to stop. A temperature of 0 is greedy."""

    n: int = 1  # the i-th answer is drawn with seed + i
    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: str | ListLike[str] | None = None
    stop_token_ids: ListLike[int] = ()
    ignore_eos: bool = False

    @property
    def has_penalty(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)

    def __post_init__(self) -> None:
        ranges = {"n": (1, 16384), "max_tokens": (1, 2**31), "min_tokens": (0, 2**31), "top_k": (0, 2**31), "min_p": (0, 1)}
        ranges |= {"temperature": (0, 1e6), "top_p": (1e-9, 1), "repetition_penalty": (1e-6, 1e6)}
        ranges |= {"presence_penalty": (-2, 2), "frequency_penalty": (-2, 2)}
        for name, (low, high) in ranges.items():
            if not low <= getattr(self, name) <= high:
                raise ValueError(f"{name} must be in {low} .. {high}, got {getattr(self, name)!r}")
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if "" in stops:
            raise ValueError("stop must have no empty string")
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

    def __init__(self, prompt: str | list[int], sequences: list[Sequence], tokenizer: Tokenizer) -> None:
        self.prompt = prompt
        self.answer_of = {seq: Answer(seq, tokenizer) for seq in sequences}
        self.answers = list(self.answer_of.values())

    @property
    def is_running(self) -> bool:
        return not all(answer.finish_reason for answer in self.answers)

    def output(self) -> RequestOutput:
        outputs = [
            CompletionOutput(i, answer.text.text, answer.seq.output_token_ids, answer.finish_reason, answer.stop_reason)
            for i, answer in enumerate(self.answers)
        ]
        prompt = self.prompt if isinstance(self.prompt, str) else None
        return RequestOutput(prompt, self.answers[0].seq.prompt_token_ids, outputs)


@dataclass(slots=True)
class CompletionOutput:
    """An answer to a prompt. stop_reason: the stop string or stop id that ended it."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: int | str | None


@dataclass(slots=True)
class RequestOutput:
    """A prompt with its n answers. prompt: None if the prompt was given as token ids."""

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]


# ---- 13. Penalties and filters


def mask_min_tokens(logits: Logits, batch: SamplingBatch) -> Logits:
    """Forbid EOS and stop ids in rows with fewer than min_tokens output tokens."""
    if (entries := batch.min_tokens) is not None:
        logits[entries.rows, entries.ids] = float("-inf")
    return logits


def apply_repetition_penalty(logits: Logits, batch: SamplingBatch) -> Logits:
    """Make ids of prompt and output less likely, once each: divide positive logits by the penalty, multiply all others."""
    if (penalties := batch.repetition_penalty) is not None and (counts := batch.token_counts) is not None:
        old, penalty = logits[counts.rows, counts.ids], penalties[counts.rows]  # [entries]
        penalized = torch.where(old > 0, old / penalty, old * penalty)
        logits[counts.rows, counts.ids] = penalized.clamp(max=torch.finfo(logits.dtype).max)
    return logits


def apply_frequency_penalty(logits: Logits, batch: SamplingBatch) -> Logits:
    """Subtract the penalty from an id's logit once for each occurrence in the output."""
    if (penalties := batch.frequency_penalty) is not None and (counts := batch.token_counts) is not None:
        logits[counts.rows, counts.ids] -= penalties[counts.rows] * counts.values
    return logits


def apply_presence_penalty(logits: Logits, batch: SamplingBatch) -> Logits:
    """Subtract the penalty from an id's logit once if the id is in the output."""
    if (penalties := batch.presence_penalty) is not None and (counts := batch.token_counts) is not None:
        logits[counts.rows, counts.ids] -= penalties[counts.rows] * (counts.values > 0)
    return logits


def keep_min_p(logits: Logits, batch: SamplingBatch) -> Logits:
    """Drop tokens with p < min_p * p_max, so that a flat distribution keeps more tokens than a sharp one."""
    if batch.min_p is None:
        return logits
    ratio = integer_weights(logits).float() / ONE  # p / p_max, without the sum of a softmax
    return logits.masked_fill(ratio < batch.min_p.unsqueeze(-1), float("-inf"))


def keep_top_k(logits: Logits, batch: SamplingBatch) -> Logits:
    """Keep the k largest logits, and all that equal the k-th."""
    if batch.top_k is None:
        return logits
    falling = logits.sort(dim=-1, descending=True).values
    k = torch.where(batch.top_k > 0, batch.top_k, logits.shape[-1]).clamp(max=logits.shape[-1]).long()
    return logits.masked_fill(logits < falling.gather(-1, k.unsqueeze(-1) - 1), float("-inf"))


def keep_top_p(logits: Logits, batch: SamplingBatch) -> Logits:
    """Keep the smallest set of tokens whose probabilities sum to at least top_p, by falling probability, ties by rising id."""
    if batch.top_p is None:
        return logits
    falling, ids = logits.sort(dim=-1, descending=True, stable=True)
    weights = integer_weights(falling)
    cumulative = weights.cumsum(dim=-1)
    before = cumulative - weights  # the sum of the tokens that enter earlier
    enough = batch.top_p * cumulative[:, -1]  # float64
    dropped = (before >= enough.unsqueeze(-1)) & (batch.top_p < 1.0).unsqueeze(-1)
    return logits.masked_fill(dropped.scatter(-1, ids, dropped), float("-inf"))


STAGES = (
    mask_min_tokens, apply_repetition_penalty, apply_frequency_penalty, apply_presence_penalty,
    apply_temperature, keep_min_p, keep_top_k, keep_top_p,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class SamplingBatch:
    """The parameters of each row of a step as tensors: the only input of the stages besides the logits. None: not used."""

    greedy: Bool[Tensor, " batch"]
    temperature: Float[Tensor, " batch"] | None
    min_p: Float[Tensor, " batch"] | None
    top_k: Float[Tensor, " batch"] | None
    top_p: Float[Tensor, " batch"] | None
    repetition_penalty: Float[Tensor, " batch"] | None
    frequency_penalty: Float[Tensor, " batch"] | None
    presence_penalty: Float[Tensor, " batch"] | None
    token_counts: TokenEntries | None  # distinct ids of rows with a penalty; values: their counts in the output
    min_tokens: TokenEntries | None  # EOS and stop ids of rows that are too short to end
    u: Float[Tensor, " batch"]  # a random number in [0, 1) for each row

    @classmethod
    def build(cls, sequences: list[Sequence], logits: Logits) -> SamplingBatch:
        """Gather the parameters. A sequence with drafts is repeated for each draft."""
        params, device = [seq.params for seq in sequences], logits.device
        positions = [seq.num_tokens + sequences[:row].count(seq) for row, seq in enumerate(sequences)]
        columns: dict[str, Tensor | None] = {}
        for name, off in OFF.items():
            values = [getattr(p, name) for p in params]
            dtype = torch.float64 if name == "top_p" else torch.float32  # float64, to be compared with integer sums
            columns[name] = None if set(values) <= {off} else on_device(values, device, dtype)
        counted, forbidden = [], []
        for row, (seq, position) in enumerate(zip(sequences, positions, strict=True)):
            if seq.params.has_penalty:
                counts = Counter(seq.output_token_ids)
                counted += [(row, token_id, counts[token_id]) for token_id in dict.fromkeys(seq.token_ids)]
            if position - len(seq.prompt_token_ids) < seq.params.min_tokens:
                forbidden += [(row, token_id, 0) for token_id in seq.stop_ids]
        return cls(
            greedy=on_device([p.temperature == 0 for p in params], device, torch.bool),
            **columns,
            token_counts=TokenEntries(*on_device(counted, device).T) if counted else None,
            min_tokens=TokenEntries(*on_device(forbidden, device).T) if forbidden else None,
            u=on_device([uniform(seq.seed, at) for seq, at in zip(sequences, positions, strict=True)], device, torch.float64),
        )


class TokenEntries(NamedTuple):
    """Single logits of a batch: entry i is logits[rows[i], ids[i]], with a value if the stage needs one."""

    rows: Int[Tensor, " entries"]
    ids: Int[Tensor, " entries"]
    values: Int[Tensor, " entries"]


# The values of parameters that change nothing
OFF = {"temperature": 1.0, "min_p": 0.0, "top_k": 0, "top_p": 1.0}
OFF |= {"repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0}


# ---- 14. The random number of a token


def uniform(seed: int, position: int) -> float:
    """Compute a number in [0, 1) by Philox 4x32-10, which turns a counter of four words and a key of two into four words."""
    word = 2**32 - 1
    a, b, c, d, left, right = position & word, position >> 32, 0, 0, seed & word, seed >> 32
    for _ in range(10):
        product, other = a * 0xD2511F53, c * 0xCD9E8D57
        a, b, c, d = (other >> 32) ^ b ^ left, other & word, (product >> 32) ^ d ^ right, product & word
        left, right = (left + 0x9E3779B9) & word, (right + 0xBB67AE85) & word  # the golden ratio and sqrt(3) - 1, as fractions
    return ((a >> 5 << 26) + (b >> 6)) * 2.0**-53


# ---- 15. On a GPU


try:
    import flash_attn
except ImportError:  # PagedAttend runs on a GPU too
    flash_attn = None


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

    default_block_size = 256  # or a multiple

    def __init__(self, cache: KVCache, metadata: AttentionMetadata) -> None:
        self._cache, self._metadata, n = cache, metadata, metadata.num_decodes
        self._seq_lens, self._block_tables = metadata.seq_lens_on_device.int(), metadata.block_tables.int()
        if n < len(metadata.seq_lens):
            starts = [start - n for start in metadata.query_start_loc[n:]]
            self._query_starts = on_device(starts, cache.pages.device, torch.int32)
            self._key_starts = F.pad(self._seq_lens[n:].cumsum(0), (1, 0)).int()  # [num_chunks + 1]
            self._max_query_len = max(stop - start for start, stop in pairwise(starts))

    def __call__(self, layer: int, q: Queries, k: Keys, v: Keys) -> Queries:
        self._cache.write(layer, self._metadata.slot_mapping, k, v)
        (k_pages, v_pages), n, outputs = self._cache.pages[layer], self._metadata.num_decodes, []
        if n:
            options = {"cache_seqlens": self._seq_lens[:n], "block_table": self._block_tables[:n], "causal": True}
            queries = q[:n].unsqueeze(1)  # [num_seqs, 1 query, num_heads, head_dim]
            outputs.append(flash_attn.flash_attn_with_kvcache(queries, k_pages, v_pages, **options).squeeze(1))
        if n < len(self._metadata.seq_lens):
            longest = self._max_query_len, max(self._metadata.seq_lens[n:])
            sizes = self._query_starts, self._key_starts, *longest
            options = {"block_table": self._block_tables[n:], "causal": True}
            outputs.append(flash_attn.flash_attn_varlen_func(q[n:], k_pages, v_pages, *sizes, **options))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


class DecodeGraphs:
    """CUDA graphs of the forward pass of a decode step, by number of rows: 1, 2, 4, 8, 16, 32, 48 and so on.

    What changes from step to step is copied into static inputs. The padding rows use the block after the cache's last.
    """

    def __init__(self, config: Any, num_blocks: int, block_size: int, max_num_rows: int) -> None:
        self.sizes = [*(size for size in (1, 2, 4, 8) if size < max_num_rows), *range(16, max_num_rows, 16), max_num_rows]
        self._max_len, self._max_blocks = config.max_position_embeddings, -(-config.max_position_embeddings // block_size)
        self._padding = (0, 0, 1, num_blocks * block_size, num_blocks)  # of each of _inputs
        self._graphs: dict[int, tuple[ForwardBatch, torch.cuda.CUDAGraph, Tensor]] = {}
        self._pool = None  # the graphs share their memory, since only one runs at a time

    def supports(self, batch: ForwardBatch) -> bool:
        """Whether every sequence of the step has one new token, and their number is at most the largest captured size."""
        return batch.attention.num_decodes == len(batch.input_ids) <= self.sizes[-1]

    def replay(self, batch: ForwardBatch, run: Callable[[ForwardBatch], Tensor]) -> Float[Tensor, "num_tokens hidden"]:
        """Return the hidden rows of run(batch), from the graph of the smallest sufficient size. It is captured on first use."""
        num_rows = len(batch.input_ids)
        size = next(size for size in self.sizes if size >= num_rows)
        if size not in self._graphs:
            self._graphs[size] = self._capture(size, batch, run)
        static_inputs, graph, out = self._graphs[size]
        self._fill(static_inputs, batch)
        graph.replay()
        return out[:num_rows]

    def _capture(
        self, size: int, batch: ForwardBatch, run: Callable[[ForwardBatch], Tensor]
    ) -> tuple[ForwardBatch, torch.cuda.CUDAGraph, Tensor]:
        device = batch.input_ids.device
        ids, positions, lens, slots = (torch.zeros(size, dtype=torch.int64, device=device) for _ in range(4))
        tables = torch.zeros(size, self._max_blocks, dtype=torch.int64, device=device)
        starts = list(range(size + 1))
        attention = AttentionMetadata(starts, [self._max_len] * size, lens, tables, slots, size)
        static_inputs = ForwardBatch(ids, positions, ids, attention)
        self._fill(static_inputs, batch)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run(static_inputs)  # selects algorithms, which cannot be captured
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=stream):
            out = run(static_inputs)
        self._pool = graph.pool()
        return static_inputs, graph, out

    def _fill(self, static_inputs: ForwardBatch, batch: ForwardBatch) -> None:
        """Copy a batch into the first rows, and make padding of the others: one token each, in the padding block."""
        for static_input, new, value in zip(_inputs(static_inputs), _inputs(batch), self._padding, strict=True):
            static_input[len(new) :] = value
            static_input[tuple(map(slice, new.shape))] = new


def _inputs(batch: ForwardBatch) -> tuple[Tensor, ...]:
    """Return the tensors that change from step to step."""
    attention = batch.attention
    return batch.input_ids, batch.positions, attention.seq_lens_on_device, attention.slot_mapping, attention.block_tables


# ---- 16. Several processes


class VocabularyHead(nn.Module):
    """The rows of the head that this process has. The sum of all processes' logits has every column, so all draw alike."""

    def __init__(self, weight: Float[Tensor, "vocab hidden"], rank: int, size: int) -> None:
        super().__init__()
        self.vocab_size, self.rows = len(weight), slice(rank * len(weight) // size, (rank + 1) * len(weight) // size)
        self.weight = nn.Parameter(weight[self.rows].clone(), False)

    def forward(self, hidden: Float[Tensor, "rows hidden"]) -> Logits:
        logits = hidden.new_zeros(len(hidden), self.vocab_size)
        logits[:, self.rows] = F.linear(hidden, self.weight)
        dist.all_reduce(logits)
        return logits


# ---- 17. Drafts


def accepted(plan: StepPlan, token_ids: list[int]) -> Iterator[tuple[Sequence, list[int]]]:
    """Yield each sequence with its sampled tokens: those after right drafts, and the one after them."""
    sampled: dict[Sequence, list[int]] = {}
    for (seq, _), token_id in zip(plan.rows, token_ids, strict=True):
        sampled.setdefault(seq, []).append(token_id)
    drafts = {item.sequence: item.draft_token_ids for item in plan.scheduled}
    for seq, ids in sampled.items():
        num = 0
        while num < len(drafts.get(seq, ())) and drafts[seq][num] == ids[num]:
            num += 1
        yield seq, ids[: num + 1]


class Drafts:
    """Adds guesses after the newest token of each decoding sequence, as far as blocks are free."""

    def __init__(self, block_manager: BlockManager, num_drafts: int) -> None:
        self._block_manager, self._num_drafts = block_manager, num_drafts

    def complete(self, plan: StepPlan) -> StepPlan:
        for item in plan.scheduled:
            seq = item.sequence
            limit = min(self._num_drafts, seq.max_num_tokens - seq.num_tokens - 1)
            if limit > 0 and seq.num_new_tokens == 1 and not seq.forks and not seq.params.has_penalty:
                drafts = continuation(seq.token_ids, limit)
                while drafts and not self._block_manager.can_allocate(seq, 1 + len(drafts)):
                    drafts.pop()
                self._block_manager.allocate(seq, 1 + len(drafts))
                item.draft_token_ids = tuple(drafts)
        return replace(plan, rows=rows_of(plan.scheduled))


def continuation(token_ids: list[int], limit: int) -> list[int]:
    """Return at most `limit` tokens that followed the last occurrence of the longest run that token_ids ends with."""
    for size in (3, 2, 1):
        for start in range(len(token_ids) - size - 1, -1, -1):
            if token_ids[start : start + size] == token_ids[-size:]:
                return token_ids[start + size : start + size + limit]
    return []


# ---- 18. A server, and the command line


class Completions(BaseHTTPRequestHandler):
    """OpenAI's /v1/completions. Reads prompt, stream, stop, model (which is ignored) and the fields of SamplingParams."""

    llm: LLM
    lock = threading.Lock()  # whichever connection has it makes the next step, for all of them

    def do_POST(self) -> None:
        try:
            fields = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            prompt, is_stream, _ = fields.pop("prompt"), fields.pop("stream", False), fields.pop("model", None)
            if self.path != "/v1/completions" or fields.pop("n", 1) != 1:
                raise ValueError("the path must be /v1/completions, and n must be 1")
            params = SamplingParams(**fields)
            with self.lock:
                request = self.llm.add_request(prompt, params)
        except (KeyError, TypeError, ValueError) as error:
            self._send(400, "application/json", [json.dumps({"error": {"message": f"{type(error).__name__}: {error}"}})])
            return

        def completion(text: str) -> str:
            choice = {"index": 0, "text": text, "finish_reason": request.answers[0].finish_reason}
            return json.dumps({"object": "text_completion", "choices": [choice]})

        texts = self._texts(request)
        if is_stream:
            events = (f"data: {event}\n\n" for event in chain(map(completion, texts), ["[DONE]"]))
            self._send(200, "text/event-stream", events)
        else:
            self._send(200, "application/json", [completion("".join(texts))])

    def _texts(self, request: Request) -> Iterator[str]:
        """Yield the text of an answer in pieces. A client that leaves ends its answer."""
        try:
            while request.is_running:
                with self.lock:
                    if request.is_running:
                        self.llm.step()
                yield request.answers[0].new_text()
        finally:
            with self.lock:
                self.llm.abort(request)

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
