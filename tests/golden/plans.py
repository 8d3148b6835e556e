"""What the scheduler and the block manager decide for a Load, step by step, as lines of text.

In: a Load. Out: a Record: each launched plan with its sequences, tokens and block tables, what was hit, evicted, released,
preempted, kept in the store and read from it, and how every request ended. The engine is the real one, with the executor of
fake_executor.py.

The records must outlive a rewrite of scheduling/. So they observe only what is public and stays: the plan that an executor
receives, the tables of a Sequence, the events of a tracer, a store of blocks, and the methods that a user may override. The
functions in the part "interfaces" are the only ones that a rewrite may have to change.
"""

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

from nanoinfer.build import ParameterFeatures, make_block_manager
from nanoinfer.config import CacheConfig, EngineConfig, SchedulerConfig
from nanoinfer.engine.inputs import RequestFeature
from nanoinfer.engine.llm_engine import LLMEngine
from nanoinfer.engine.observer import Planner, together
from nanoinfer.errors import NanoinferError
from nanoinfer.execution.executor import ExecutorInfo, PromptReader, SequenceOutput, StepOutput
from nanoinfer.features.beam_search.search import BeamSearch
from nanoinfer.features.drafts.config import SpeculativeConfig
from nanoinfer.features.drafts.speculator import Speculator
from nanoinfer.features.logprobs.token_logprobs import RowReport, TokenLogprobs
from nanoinfer.features.metrics.engine_metrics import EngineMetrics
from nanoinfer.features.tracing import TracingObserver
from nanoinfer.sampling_params import BeamSearchParams, SamplingParams
from nanoinfer.scheduling.block_manager import BlockManager
from nanoinfer.scheduling.scheduler import Scheduler
from nanoinfer.scheduling.step_plan import prompt_rows_of
from tests.golden.loads import EOS, VOCAB_SIZE, Load, make_load, mixed, token_at
from tests.golden.memory import Memory
from tests.helpers.fake_executor import FakeExecutor

MAX_STEPS = 3000  # a load takes some hundred


class LaunchError(RuntimeError):
    """A launch that a load asks to fail."""


@dataclass
class Record:
    """lines: the text. counts: how often what happened. memory: what the cache holds, if it is checked."""

    lines: list[str] = field(default_factory=list)
    counts: Counter = field(default_factory=Counter)
    memory: Memory | None = None

    @property
    def digest(self) -> str:
        return hashlib.blake2b("\n".join(self.lines).encode(), digest_size=8).hexdigest()


# ---- interfaces


def tables_of(seq) -> list[list[int]]:
    """The block tables of a sequence: one for each KV group."""
    record = seq.extras.get("hybrid")
    return [seq.block_table, *(record.block_tables if record else [])]


def states_of(seq) -> tuple[int, dict[int, int]]:
    """The slot with the state that a step reads, or -1, and the slots that it writes, by the number of tokens before."""
    record = seq.extras["hybrid"]
    return record.state_slot, record.state_writes


# ---- what the engine is given


class Adapters(RequestFeature):
    """Reads the numbers of adapters, of which most run together."""

    def __init__(self, most: int) -> None:
        self.limits = {"adapter": most}

    def prepare(self, prepared, options):
        if (number := options.pop("lora_request", None)) is None:
            return prepared
        return replace(prepared, extras={"adapter": number}, cache_salt=f"adapter{number}/{prepared.cache_salt or ''}")


class Store:
    """A store of blocks in memory that loses the block that was used longest ago.

    Its blocks have numbers, in the order in which they are kept. A record has these, and no keys, whose scheme may change.
    """

    fingerprint = bytes(32)

    def __init__(self, record: Record, max_blocks: int, max_tokens_per_step: int, kept: OrderedDict[tuple, tuple[int, list]]):
        """kept: what the engine before has left, by key and part: the number and the contents of each block."""
        self.record, self.max_blocks, self.kept, self.max_tokens_per_step = record, max_blocks, kept, max_tokens_per_step
        self.is_open, self.counts = True, Counter()

    def max_entries(self, group):
        return self.max_blocks

    def has(self, entry):
        return entry in self.kept

    def find(self, entry):
        return self.kept.get(entry)

    def fill(self, group, block, found):
        number, contents = found
        self.record.lines.append(f"  read #{number} into {block}")
        self.record.counts["read"] += 1
        if self.record.memory is not None:
            self.record.memory.blocks[block] = list(contents)

    def touch(self, keys):
        for key in keys:
            if key in self.kept:
                self.kept.move_to_end(key)

    def keep(self, key, block, *, wait=False):
        if key in self.kept:
            self.kept.move_to_end(key)
            return
        number = self.record.counts["kept"]
        self.record.counts["kept"] += 1
        self.kept[key] = number, [] if self.record.memory is None else list(self.record.memory.blocks[block])
        self.record.lines.append(f"  keep {block} as #{number}")
        if len(self.kept) > self.max_blocks:
            self.record.lines.append(f"  lose #{self.kept.popitem(last=False)[1][0]}")

    def discard(self, key):
        if key in self.kept:
            self.record.lines.append(f"  discard #{self.kept.pop(key)[0]}")

    def close(self):
        self.is_open = False


class Proposer:
    """Drafts of which three in four are right. A sequence without a seed of the load's is none of the scheduler's."""

    def propose(self, sequences, limits):
        return [self.draft(seq, limit) for seq, limit in zip(sequences, limits, strict=True)]

    def draft(self, seq, limit):
        position, seed = len(seq.token_ids), seq.seed
        num = mixed(seed, position, 1) % (limit + 1)
        return [
            token_at(seed, position + i) if mixed(seed, position, i, 2) % 4 else 1 + mixed(seed, i) % (VOCAB_SIZE - 1)
            for i in range(num)
        ]

    def forget(self, seq):
        pass


class LastEvicted(BlockManager):
    """Evicts the most recently used block."""

    def choose_evicted(self, candidates):
        super().choose_evicted(candidates)  # a store keeps what is evicted
        return list(candidates)[-1]


class EagerScheduler(Scheduler):
    """Keeps no block free, and starts the newest request first."""

    def order_waiting(self, waiting):
        return list(waiting)[::-1]

    def num_reserved_blocks(self, seq):
        return 0


class PatientScheduler(Scheduler):
    """Keeps a block more free for each running sequence, preempts the oldest, and lets at most one request of two start."""

    def may_start(self, seq):
        return not self.running or len(self.running) % 2 == seq.seed % 2

    def num_reserved_blocks(self, seq):
        return super().num_reserved_blocks(seq) + 1

    def choose_victim(self, running, seq):
        return running[0]


class RecordingExecutor(FakeExecutor):
    """Records each plan. A token depends on its sequence's seed and its position, so no decision of a scheduler changes it."""

    def __init__(self, load: Load, record: Record):
        super().__init__()
        self.info = ExecutorInfo(
            VOCAB_SIZE, load.max_model_len, load.max_model_len, load.num_blocks, load.block_size,
            windows=load.windows, num_state_slots=load.num_slots,
        )  # fmt: skip
        self.load, self.record = load, record
        self.num_launches = self.num_steps = 0
        self.fails_at: dict[str, int] = {}  # request id -> Arrival.fails_at

    def launch(self, plan, previous):
        number, self.num_launches = self.num_launches, self.num_launches + 1
        self.record.lines.append(text_of(plan, self.load, self.num_steps))
        self.num_steps += plan.sampler is None
        self.record.counts["steps"] += 1
        self.record.counts["drafts"] += sum(len(item.draft_token_ids) for item in plan.scheduled)
        self.record.counts["copies"] += len(plan.block_copies)
        if number in self.load.failing_steps:
            self.record.counts["failed"] += 1
            raise LaunchError
        if self.record.memory is not None:
            self.record.memory.compute(plan, tables_of, states_of)
        return SimpleNamespace(plan=plan, must_sync=bool(prompt_rows_of(plan.scheduled)))

    def collect(self, step):
        if step.plan.sampler is not None:
            rows = [SequenceOutput(seq, reports=[RowReport(likely_tokens(seq))]) for seq, _ in step.plan.rows]
            return StepOutput(rows)
        return super().collect(step)

    def sample(self, seq):
        if seq.num_output_tokens == self.fails_at.get(seq.request_id):
            return SequenceOutput(seq, error="broken")
        return SequenceOutput(seq, [token_at(seq.seed, len(seq.token_ids))])

    def verify(self, item):
        seq, position = item.sequence, len(item.sequence.token_ids)
        sampled = [token_at(seq.seed, position + i) for i in range(1 + len(item.draft_token_ids))]
        num_accepted = item.num_accepted(sampled)
        self.record.counts["accepted"] += num_accepted
        return SequenceOutput(seq, sampled[: 1 + num_accepted])


def likely_tokens(seq) -> TokenLogprobs:
    """A beam's log-probabilities, in eighths, which are exact in every floating point."""
    bits = mixed(*seq.token_ids)
    ids = sorted(range(VOCAB_SIZE), key=lambda token_id: mixed(bits, token_id))
    values, value = [], 0.0
    for i in range(VOCAB_SIZE):
        value -= (1 + mixed(bits, i, 3) % 8) / 8
        values.append(value)
    return TokenLogprobs(ids, values, list(range(1, VOCAB_SIZE + 1)))


# ---- text


def text_of(plan, load: Load, number: int) -> str:
    """Return a plan as a line: name, tokens from which on, tables, slots and drafts of each sequence, then rows and copies."""
    parts = [f"step {number}" if plan.sampler is None else "beams"]
    for item in plan.scheduled:
        seq = item.sequence
        tables = " ".join(str(table).replace(" ", "") for table in tables_of(seq))
        parts.append(f"{seq.sequence_id} {item.num_new_tokens}@{seq.num_computed_tokens} {tables}")
        if load.num_slots:
            reads, writes = states_of(seq)
            parts.append(f"state {reads}>{writes}")
        if item.draft_token_ids:
            parts.append(f"drafts {item.draft_token_ids}")
    rows = " ".join(f"{seq.sequence_id}@{index}" for seq, index in plan.rows)
    read = " ".join(f"{row.sequence.sequence_id}@{row.start}:{row.stop}" for row in prompt_rows_of(plan.scheduled))
    copies = " ".join(f"{source}>{target}" for source, target in plan.block_copies)
    parts += [f"rows {rows}"] + [f"reads {read}"] * bool(read) + [f"copies {copies}"] * bool(copies)
    return " | ".join(parts)


class EventLines:
    """The tracer: what was hit, evicted, released and preempted since the last line, by kind, because kinds have no order."""

    KINDS = ("hit", "evicted", "released", "forked", "running", "preempted")

    def __init__(self, record: Record):
        self.record = record
        self.pending = {kind: [] for kind in self.KINDS}

    def emit(self, event):
        match type(event).__name__:
            case "BlocksShared":
                self.pending["hit"].append(f"{event.sequence_id}.{event.group}={list(event.blocks)}")
            case "BlockEvicted":
                self.pending["evicted"].append(str(event.block))
            case "BlocksReleased":
                self.pending["released"].append(f"{event.sequence_id}={list(event.blocks)}")
            case "BlocksForked":
                self.pending["forked"].append(f"{event.parent_id}>{event.sequence_id}")
            case "StepScheduled":
                running = " ".join(event.running)
                self.pending["running"].append(f"{running} | {event.num_waiting} wait | {event.num_free_blocks} free")
                self.pending["preempted"] += event.preempted

    def write(self):
        for kind, texts in self.pending.items():
            if texts:
                self.record.lines.append(f"  {kind} {' '.join(texts)}")
                self.record.counts[kind] += len(texts)
                texts.clear()


# ---- the run


def make_engine(load: Load, record: Record, events: EventLines, store: Store | None, planner: Planner | None) -> LLMEngine:
    base = LastEvicted if load.evicts == "last" else BlockManager
    own = {"eager": EagerScheduler, "patient": PatientScheduler}.get(load.policy)
    drafts = {"method": "ngram", "num_speculative_tokens": load.num_drafts, "adaptive": False}
    config = EngineConfig(
        seed=load.seed,
        async_scheduling=load.is_async,
        cache=CacheConfig(enable_prefix_caching=load.prefix_caching, block_manager_cls=base),
        scheduler=SchedulerConfig(
            max_num_seqs=load.max_num_seqs, max_num_batched_tokens=load.budget, chunk_size=load.chunk_size,
            enable_chunked_prefill=load.chunked, scheduling_policy="fcfs" if own else load.policy, scheduler_cls=own,
        ),
        speculative=SpeculativeConfig(**drafts) if load.num_drafts else None,
    )  # fmt: skip
    if config.speculative is not None:
        planner = Speculator(Proposer(), config.speculative)
    executor = RecordingExecutor(load, record)
    observer = together(EngineMetrics(), TracingObserver(events, load.block_size))
    features = [*([Adapters(load.max_loras)] if load.max_loras else []), ParameterFeatures(None, executor)]
    manager = make_block_manager(executor.info, config, observer, store)
    return LLMEngine(
        executor, config, eos_token_ids=frozenset([EOS]), planner=planner, block_manager=manager, observer=observer,
        features=features,
    )  # fmt: skip


def submit(engine: LLMEngine, arrival):
    params = SamplingParams(
        n=arrival.n, seed=arrival.seed, max_tokens=arrival.max_tokens, timeout=arrival.timeout, ignore_eos=arrival.ignore_eos,
        prompt_logprobs=0 if arrival.reads_prompt else None, detokenize=False,
    )  # fmt: skip
    prompt = {"prompt_token_ids": arrival.prompt}
    if arrival.cache_salt:
        prompt["cache_salt"] = arrival.cache_salt
    prepared = engine.inputs.prepare(prompt, params, priority=arrival.priority, lora_request=arrival.adapter)
    if arrival.is_read:
        prepared = replace(prepared, reader=PromptReader(), is_answered=False)  # the executor would call it
    request = engine.submit(prepared)
    if arrival.fails_at is not None:
        engine.executor.fails_at[request.request_id] = arrival.fails_at
    return request


def search_beams(engine: LLMEngine, arrival, record: Record) -> None:
    params = BeamSearchParams(beam_width=arrival.beam_width, max_tokens=arrival.max_tokens)
    try:
        BeamSearch(engine, [arrival.prompt], params).run()
    except NanoinferError:  # too few blocks are free
        record.lines.append("  no room for beams")
        record.counts["beams without room"] += 1
    else:
        record.counts["beam searches"] += 1


def run_engine(load: Load, record: Record, events: EventLines, engine: LLMEngine) -> None:
    """Take a load's requests through one engine, until all have ended."""
    todo, requests = list(load.arrivals), []
    aborts: dict[int, list[str]] = {}
    for step in range(MAX_STEPS):
        if not todo and not engine.num_unfinished:
            break
        while todo and todo[0].step <= step:
            arrival = todo.pop(0)
            if arrival.beam_width:
                search_beams(engine, arrival, record)
                continue
            requests.append(submit(engine, arrival))
            if arrival.abort_step is not None:
                aborts.setdefault(arrival.abort_step, []).append(requests[-1].request_id)
        if step in aborts:
            record.lines.append(f"  abort {' '.join(aborts[step])}")
            record.counts["aborts"] += 1
            engine.abort(*aborts[step])
        if step in load.reset_steps:
            record.lines.append("  reset")
            engine.reset_prefix_cache()
        if engine.num_unfinished:
            try:
                engine.step()
            except LaunchError:
                record.lines.append("  the launch failed")
        events.write()
    else:
        record.lines.append("this load does not end")
    for request in requests:
        output = request.output
        ends = " ".join(f"{answer.finish_reason}:{len(answer.token_ids)}" for answer in output.outputs) if output else "none"
        num_cached, num_preemptions = request.metrics.num_cached_tokens, request.metrics.num_preemptions
        record.lines.append(f"{request.request_id}: {ends}, {num_cached} tokens cached, preempted {num_preemptions} times")


def record_of(load: Load | str, *, check: bool = False, planner: Callable[[], Planner] = Planner) -> Record:
    """Run a load, or the load of a name, and record it. A load with a store is run twice, as before and after a restart.

    check: whether each step must read what it should. Raises: AssertionError if one does not.
    planner: makes what plans the steps of a load without drafts.
    """
    load = make_load(load) if isinstance(load, str) else load
    record, kept = Record(), OrderedDict()
    for _ in range(2 if load.store_blocks else 1):
        record.memory = Memory(load) if check else None
        store, events = Store(record, load.store_blocks, load.budget, kept) if load.store_blocks else None, EventLines(record)
        engine = make_engine(load, record, events, store, planner())
        run_engine(load, record, events, engine)
        engine.close()
    return record
