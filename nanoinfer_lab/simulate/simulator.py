"""The engine's scheduler and block manager on a virtual clock, with requests that no model answers.

In: a model's sizes, a Hardware, the engine's settings, Requests. Out: a Result with the times of each request.

The loop is that of LLMEngine.step, with costs.py in the place of the executor: with async_scheduling a step is planned before
the tokens of the step before are known, and the host works while the device computes.

Between two events, the steps of decoding differ only in the lengths of the sequences. So they are advanced together: only
sequences that begin or fill a block are looked at. Events are arrivals, ends of answers, and blocks that may run out. The
figures are those of single steps.
"""

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as ListLike
from dataclasses import dataclass, field, fields, replace
from functools import partial
from types import FunctionType

from nanoinfer.attention.cache_sizes import DEFAULT_CPU_MEMORY
from nanoinfer.config import BITS, DTYPES, EngineArgs, EngineConfig
from nanoinfer.errors import InvalidValueError, UnsupportedError
from nanoinfer.features.hybrid.block_manager import with_groups
from nanoinfer.features.hybrid.sizes import num_states_in
from nanoinfer.features.int8_cache.sizes import stored_in
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.scheduling.block_manager import BlockManager
from nanoinfer.scheduling.observer import NOBODY, SchedulingObserver
from nanoinfer.scheduling.policies import PreemptingScheduler
from nanoinfer.scheduling.scheduler import Scheduler, scheduling_classes
from nanoinfer.scheduling.sequence import Sequence, SequenceStatus
from nanoinfer.scheduling.step_plan import StepPlan
from nanoinfer_lab.bench.timing import Figures, Percentiles, RequestTiming, figures
from nanoinfer_lab.bench.workloads import HASHED_TOKENS, Workload
from nanoinfer_lab.simulate.costs import FORMATS, ModelSizes, StepCosts, StepWork
from nanoinfer_lab.simulate.hardware import Hardware

ANSWER_TOKEN_ID = 0  # every token of an answer, so that a later prompt can contain the answer
UNIQUE = 2**30  # the token ids from here on are each of a single prompt
CPU_BLOCK_SIZE, GPU_BLOCK_SIZE = 64, 16  # of the attention backends that `auto` takes
BINS_PER_E = 1000  # bins of times, for each factor of e: a percentile of times is right to 0.05%

# The settings that change a simulation. The others must have their defaults.
SIMULATED = {
    *("dtype", "quantization", "tensor_parallel_size", "block_size", "max_num_seqs", "max_num_batched_tokens"),
    *("scheduling_policy", "scheduler_cls", "block_manager_cls", "enable_chunked_prefill", "chunk_size", "max_model_len"),
    *("kv_cache_memory", "kv_cache_dtype", "gpu_memory_utilization", "enable_prefix_caching", "async_scheduling"),
}
# The methods that a class may override while steps are advanced together: they are called when a sequence starts or blocks run
# out. A class that overrides others runs in single steps.
POLICY_METHODS = {"order_waiting", "may_start", "num_reserved_blocks", "choose_victim", "to_preempt"}
CACHE_METHODS = {"choose_evicted", "start", "evict"}
_PARAMS = SamplingParams()


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRequest:
    """A request."""

    arrival_s: float  # when it arrives, in seconds after the start
    # The token ids, in 0 .. 2**31 - 1. Equal beginnings share cached blocks. In a prompt that continues an earlier answer,
    # each token of the answer is ANSWER_TOKEN_ID
    prompt: list[int]
    output_len: int  # the number of tokens of the answer
    max_tokens: int | None = None  # the limit of the answer, which the scheduler knows. None: output_len
    priority: int = 0  # for schedulers that read priorities. Lower runs first
    deadline_s: float = math.inf  # when it should end, in seconds after the start, for schedulers that read deadlines
    # How many tokens of the prompt have keys and values that another machine has computed and sent
    num_received_tokens: int = 0


def requests_of(workload: Workload) -> Iterator[SimulatedRequest]:
    """Yield the requests of a workload. Prompts share the blocks whose hash ids are equal, and nothing else."""
    token_ids: defaultdict[int, int] = defaultdict(itertools.count(1).__next__)  # hash id -> the token of its block
    num_requests = len(workload.input_lens)
    arrivals = workload.arrivals or [0.0] * num_requests
    hash_ids = workload.hash_ids or [()] * num_requests
    for number, shared in enumerate(hash_ids):
        prompt = [token_ids[hash_id] for hash_id in shared for _ in range(HASHED_TOKENS)][: workload.input_lens[number]]
        prompt += [UNIQUE + number] * (workload.input_lens[number] - len(prompt))
        yield SimulatedRequest(arrival_s=arrivals[number], prompt=prompt, output_len=workload.output_lens[number])


class TimeCounts:
    """Counts times in bins, of which each is 0.1% wide, so that its memory does not grow with the number of times."""

    def __init__(self) -> None:
        self.counts: Counter[int] = Counter()

    def add(self, seconds: float, num: int = 1) -> None:
        self.counts[round(math.log(max(seconds, 1e-9)) * BINS_PER_E)] += num

    def percentile(self, percent: float) -> float | None:
        """Return the smallest time, in seconds, that so many percent of the times do not exceed. None: there are no times."""
        rank, total = percent / 100 * sum(self.counts.values()), 0
        for bin_number in sorted(self.counts):
            total += self.counts[bin_number]
            if total >= rank:
                return math.exp(bin_number / BINS_PER_E)
        return None


@dataclass(slots=True)
class Result:
    """What a simulation has found."""

    # The times of each request, in the order of arrival. token_times has the first and the last token
    timings: list[RequestTiming] = field(default_factory=list)
    # The times between the tokens of a request, over all requests
    inter_token_s: TimeCounts = field(default_factory=TimeCounts)
    # prefix_cache_queries and prefix_cache_hits in tokens, and num_preemptions
    counts: Counter[str] = field(default_factory=Counter)
    num_steps: int = 0
    end_s: float = 0.0  # when the last token came
    device_s: float = 0.0  # how long the device computed
    num_blocks: int = 0  # the blocks of the KV cache

    def figures(self, goodput: Mapping[str, float] = {}) -> Figures:
        """Return the figures of `nanoinfer bench`. goodput: as in timing.figures."""
        found = figures(self.timings, goodput)
        if found.itl_ms is None:
            return found
        num_times = sum(timing.num_output_tokens - 1 for timing in self.timings)
        total_s = sum(timing.token_times[-1] - timing.token_times[0] for timing in self.timings)
        ranked = (self.inter_token_s.percentile(percent) or 0.0 for percent in (50, 95, 99))
        values = (round(seconds * 1e3, 3) for seconds in (total_s / num_times, *ranked))
        return replace(found, itl_ms=Percentiles(*values))

    def add(self, other: "Result") -> None:
        """Add what another engine has found, except for its requests."""
        self.inter_token_s.counts.update(other.inter_token_s.counts)
        self.counts.update(other.counts)
        self.num_steps += other.num_steps
        self.device_s += other.device_s
        self.end_s = max(self.end_s, other.end_s)


OnStep = Callable[[StepPlan, float, float], object]  # gets a plan, when it was made, and when its tokens are known


def simulate(
    sizes: ModelSizes,
    hardware: Hardware,
    settings: EngineArgs,
    requests: Iterable[SimulatedRequest],
    *,
    on_step: OnStep | None = None,
) -> Result:
    """Simulate an engine that answers requests.

    Args:
        sizes: ModelSizes.of(config.json).
        hardware: one of HARDWARE, or a measured one.
        settings: the arguments of LLM. Those outside SIMULATED must have their defaults.
        requests: in the order of their arrivals. They are taken one by one, so they may be made on the way.
        on_step: called for each step. The sequences' request_id is the number of the request, counted from 0. It makes every
            step a single step, which takes longer.

    Raises:
        InvalidValueError: the settings, the memory or a request do not fit.
        UnsupportedError: a setting is not simulated.
    """
    return Simulation(sizes, hardware, settings, on_step=on_step).run(requests)


@dataclass(eq=False, slots=True)
class _Running:
    """An unfinished request."""

    request: SimulatedRequest
    timing: RequestTiming
    num_tokens_at_end: int  # the tokens of the prompt and of the whole answer
    last_s: float = 0.0  # when it got its newest token
    num_cached_tokens: int | None = None  # what the prefix cache had of its prompt. None: it has not started
    num_preemptions: int = 0  # how often it was preempted


class Simulation(SchedulingObserver):
    """An engine without a model. now: the virtual clock, in seconds after the start."""

    def __init__(self, sizes: ModelSizes, hardware: Hardware, settings: EngineArgs, *, on_step: OnStep | None = None) -> None:
        """See simulate. Raises: its errors."""
        _check_simulated(settings)
        config = settings.to_config()
        dtype = sizes.dtype if DTYPES[config.dtype] == "auto" else DTYPES[config.dtype]
        self.costs = StepCosts(
            sizes=sizes,
            hardware=hardware,
            dtype=FORMATS["bfloat16" if config.quantization else dtype],
            weight_bits=BITS.get(config.quantization or ""),
            cache_dtype=FORMATS["int8"] if config.cache.kv_cache_dtype == "int8" else None,
            num_ranks=config.tensor_parallel_size,
        )
        self.now = 0.0
        self.result = Result()
        self._overheads, self._on_step = hardware.overheads, on_step
        scheduler_cls, block_manager_cls = scheduling_classes(config)
        block_size = config.cache.block_size or (GPU_BLOCK_SIZE if hardware.is_gpu else CPU_BLOCK_SIZE)
        num_blocks, num_state_slots = _cache_of(self.costs, config, block_size)
        windows = sizes.cache.windows
        manager_args = num_blocks, block_size, config.cache.enable_prefix_caching
        if windows == (None,) and not num_state_slots:
            self.block_manager = block_manager_cls(*manager_args)
        else:  # build.py, which makes the same choice, imports the engine, and pages of the site have no tokenizers
            layout = windows, config.scheduler.chunk_grid, num_state_slots
            self.block_manager = with_groups(block_manager_cls)(*manager_args, NOBODY, *layout)
        self.scheduler = scheduler_cls(config.scheduler, self.block_manager, self)
        self.scheduler.clock = lambda: self.now
        self.result.num_blocks = num_blocks
        self._max_model_len = min(config.max_model_len or sizes.max_position_embeddings, sizes.max_position_embeddings)
        self._is_async = hardware.is_gpu if config.async_scheduling is None else config.async_scheduling
        self._in_flight: tuple[StepPlan, float] | None = None  # the step that was launched, and when its tokens are known
        self._device_free_s = 0.0
        self._running: dict[Sequence, _Running] = {}
        self._arriving: Iterator[SimulatedRequest] = iter(())
        self._next: tuple[float, SimulatedRequest] | None = None  # the next request, and when the scheduler gets it
        self._num_requests = 0
        self._can_advance = (
            on_step is None
            and not num_state_slots
            and _overrides_only(
                scheduler_cls,
                PreemptingScheduler if isinstance(self.scheduler, PreemptingScheduler) else Scheduler,
                POLICY_METHODS,
            )
            and _overrides_only(block_manager_cls, BlockManager, CACHE_METHODS)
        )

    def run(self, requests: Iterable[SimulatedRequest]) -> Result:
        """Answer all requests. Raises: InvalidValueError: a request is too long, or arrives before the one before it."""
        self._arriving = iter(requests)
        self._peek(0.0)
        while self._next is not None or self._running:
            if not self._running and self._next is not None:
                self.now = max(self.now, self._next[0])
            self._receive()
            if not (self._can_advance and self._advance()):
                self._step()
        assert self.block_manager.num_free_blocks == self.block_manager.num_blocks, "all blocks are free at the end"
        return self.result

    # ---- the events

    def sequence_started(self, seq: Sequence, num_cached_tokens: int) -> None:
        if (running := self._running[seq]).num_cached_tokens is None:
            running.num_cached_tokens = num_cached_tokens

    def sequence_preempted(self, seq: Sequence) -> None:
        self._running[seq].num_preemptions += 1

    # ---- arrivals

    def _peek(self, free_s: float) -> None:
        """Take the next request. free_s: when the server has handled the request before it."""
        request = next(self._arriving, None)
        before = None if self._next is None else self._next[1]
        if request is None:
            self._next = None
            return
        if before is not None and request.arrival_s < before.arrival_s:
            raise InvalidValueError(
                f"requests must be in the order of their arrivals, got {request.arrival_s:g} s after {before.arrival_s:g} s"
            )
        self._next = max(request.arrival_s, free_s) + self._overheads.per_request_s, request

    def _receive(self) -> None:
        while self._next is not None and self._next[0] <= self.now:
            ready_s, request = self._next
            self._add(request)
            self._peek(ready_s)

    def _add(self, request: SimulatedRequest) -> None:
        num_prompt, limit = len(request.prompt), request.max_tokens or request.output_len
        if not (num_prompt >= 1 and 1 <= request.output_len <= limit):
            raise InvalidValueError(
                f"a request needs a prompt and 1 <= output_len <= max_tokens, got {num_prompt} tokens, {request.output_len} "
                f"and {limit}"
            )
        max_num_tokens = min(num_prompt + limit, self._max_model_len)
        num_needed = self.block_manager.num_blocks_for(max_num_tokens)
        if num_prompt + request.output_len > self._max_model_len or num_needed > self.block_manager.num_blocks:
            room = self.block_manager.num_blocks * self.block_manager.block_size
            raise InvalidValueError(
                f"a request of {num_prompt} + {request.output_len} tokens is too long: max_model_len is {self._max_model_len}, "
                f"and the KV cache has room for {room} tokens; pick a shorter one, or raise kv_cache_memory"
            )
        seq = Sequence(
            str(self._num_requests),
            request.prompt,
            _PARAMS,
            seed=0,
            max_num_tokens=max_num_tokens,
            priority=request.priority,
            arrival_time=request.arrival_s,
            deadline=request.deadline_s,
        )
        self._num_requests += 1
        timing = RequestTiming(request.arrival_s, num_prompt_tokens=num_prompt)
        self.result.timings.append(timing)
        self._running[seq] = _Running(request, timing, num_prompt + request.output_len)
        self.scheduler.add(seq)

    # ---- steps

    def _step(self) -> None:
        """Plan and compute a step, as LLMEngine.step does."""
        start_s = self.now
        plan = self.scheduler.schedule()
        previous, launched = self._in_flight, None
        if plan.scheduled:
            launched = plan, self._launch(self._work_of(plan), len(plan.scheduled))
            self.scheduler.commit(plan)
        if self._on_step is not None:
            self._on_step(plan, start_s, self.now if launched is None else launched[1] + self._overheads.per_answer_s)
        if previous is not None:
            self._collect(*previous)
        self._in_flight = launched
        if launched is not None and not self._is_async:
            self._in_flight = None
            self._collect(*launched)

    def _launch(self, work: StepWork, num_seqs: int) -> float:
        """Let the host prepare a step and the device compute it. Returns when its tokens are known."""
        self.now += self.costs.host_s(num_seqs)
        device_s = self.costs.device_s(work)
        self._device_free_s = max(self.now, self._device_free_s) + device_s
        self.result.device_s += device_s
        self.result.num_steps += 1
        return self._device_free_s

    def _work_of(self, plan: StepPlan) -> StepWork:
        work, contexts = StepWork(num_rows=len(plan.rows)), []
        for item in plan.scheduled:
            seq, num_new = item.sequence, item.num_new_tokens
            end = seq.num_computed_tokens + num_new
            if num_new == 1:
                contexts.append(end)
                continue
            running = self._running[seq]
            if received := running.request.num_received_tokens if running.num_preemptions == 0 else 0:
                num_new = max(min(end - received, num_new), 0)
            if num_new:
                self.costs.sizes.add(work, num_new, end)
        self.costs.sizes.add_decodes(work, contexts)
        return work

    def _collect(self, plan: StepPlan, ready_s: float) -> None:
        """Give the sequences the tokens of a step, and finish those that have their answers."""
        self.now = max(self.now, ready_s)
        sequences = [seq for seq, _ in plan.rows if seq.status is not SequenceStatus.FINISHED]  # with the step before
        for seq in sequences:
            self.scheduler.append(seq, ANSWER_TOKEN_ID)
        self._record(sequences)
        for seq in sequences:
            if len(seq.token_ids) == self._running[seq].num_tokens_at_end:
                self._finish(seq)

    def _record(self, sequences: Iterable[Sequence]) -> None:
        token_s, before = self.now + self._overheads.per_answer_s, Counter[float]()
        for running in map(self._running.__getitem__, sequences):
            if token_times := running.timing.token_times:
                before[running.last_s] += 1  # most have one time, that of the last step
                token_times[1:] = [token_s]
            else:
                token_times.append(token_s)
            running.last_s = token_s
        for last_s, num in before.items():
            self.result.inter_token_s.add(token_s - last_s, num)

    def _finish(self, seq: Sequence) -> None:
        self.scheduler.finish(seq)
        running = self._running.pop(seq)
        timing = running.timing
        timing.num_output_tokens, timing.finish_reason = seq.num_output_tokens, "length"
        self.result.end_s = timing.token_times[-1]
        self.result.counts["prefix_cache_queries"] += len(seq.prompt_token_ids)
        self.result.counts["prefix_cache_hits"] += running.num_cached_tokens or 0
        self.result.counts["num_preemptions"] += running.num_preemptions

    # ---- many steps

    def _advance(self) -> bool:
        """Advance steps of decoding together until the step before the next event. Return False if there is none."""
        running, scheduler = self.scheduler.running, self.scheduler
        num_pending = int(self._is_async)
        if not running or any(seq.num_tokens != len(seq.token_ids) + num_pending or seq.num_new_tokens != 1 for seq in running):
            return False  # not all decode
        if scheduler.waiting and (len(running) < scheduler.config.max_num_seqs or isinstance(scheduler, PreemptingScheduler)):
            return False  # one of them may start
        if self._is_async and (self._in_flight is None or [seq for seq, _ in self._in_flight[0].rows] != running):
            return False
        limit = min(self._running[seq].num_tokens_at_end - len(seq.token_ids) for seq in running) - 1
        steps = _DecodeSteps(self.block_manager, self.costs.sizes, running, num_pending)
        ready_s = None if self._in_flight is None else self._in_flight[1]
        while steps.num_steps < limit and not (self._next is not None and self._next[0] <= self.now):
            if not steps.allocate():
                break
            before, launched = self.now, self._launch(steps.work, len(running))
            steps.commit()
            self.now, ready_s = (launched, None) if ready_s is None else (max(self.now, ready_s), launched)
            if steps.num_steps == 1:
                self._record(running)
            else:
                answer_s = self._overheads.per_answer_s
                self.result.inter_token_s.add((self.now + answer_s) - (before + answer_s), len(running))
        steps.finish()
        for seq in running if steps.num_steps > 1 else ():
            one = self._running[seq]
            one.last_s = self.now + self._overheads.per_answer_s
            one.timing.token_times[1:] = [one.last_s]
        if self._in_flight is not None and ready_s is not None:
            self._in_flight = self._in_flight[0], ready_s
        return steps.num_steps > 0


class _DecodeSteps:
    """Steps in which the same sequences decode. A sequence is brought up to date where it begins or fills a block."""

    def __init__(self, manager: BlockManager, sizes: ModelSizes, running: ListLike[Sequence], num_pending: int) -> None:
        """num_pending: the tokens of each sequence that are sampled and not known."""
        self.num_steps = 0
        self.work = StepWork(num_rows=len(running))  # of the next step
        self._manager, self._sizes, self._running = manager, sizes, list(running)
        self._starts = [seq.num_computed_tokens for seq in running]
        self._by_phase: dict[int, list[int]] = defaultdict(list)  # start % block_size -> indices into running
        sizes.add_decodes(self.work, [start + 1 for start in self._starts])
        for index, start in enumerate(self._starts):
            self._by_phase[start % manager.block_size].append(index)
        # A block is full, or leaves a window, when the number of known tokens has one of these rests.
        rests = {0} | {(window - 1) % manager.block_size for window in sizes.cache.windows if window is not None}
        self._rests = [rest - 1 + num_pending for rest in rests]
        self._num_pending = num_pending

    def allocate(self) -> bool:
        """Give the sequences their blocks for a step. Return False if blocks may run out."""
        beginning = self._by_phase.get(-self.num_steps % self._manager.block_size, ())
        if len(beginning) * len(self._sizes.cache.windows) > self._manager.num_free_blocks:
            return False
        for index in beginning:
            self._manager.allocate(self._up_to_date(index), 1)
        return True

    def commit(self) -> None:
        """Count the tokens of a step, and cache the blocks that are full."""
        phases = ((rest - self.num_steps) % self._manager.block_size for rest in self._rests)
        for index in sorted(itertools.chain.from_iterable(self._by_phase.get(phase, ()) for phase in phases)):
            num_known = self._starts[index] + self.num_steps + 1 - self._num_pending
            self._manager.cache_finished_blocks(self._up_to_date(index), num_known)
        self.num_steps += 1
        self._sizes.grow(self.work, self._starts, self.num_steps)

    def finish(self) -> None:
        """Bring all sequences up to date."""
        for index in range(len(self._running)):
            self._up_to_date(index)

    def _up_to_date(self, index: int) -> Sequence:
        seq = self._running[index]
        num_new = self._starts[index] + self.num_steps - seq.num_computed_tokens
        seq.token_ids += [ANSWER_TOKEN_ID] * num_new
        seq.num_tokens += num_new
        seq.num_computed_tokens += num_new
        return seq


# ---- settings


def _check_simulated(settings: EngineArgs) -> None:
    for one in fields(settings):
        if one.name not in SIMULATED and getattr(settings, one.name) != one.default:
            raise UnsupportedError(
                f"{one.name} is not simulated; leave it out. These settings are: {', '.join(sorted(SIMULATED))}"
            )


def _overrides_only(given: type, base: type, allowed: set[str]) -> bool:
    methods = {name for name in dir(base) if isinstance(getattr(base, name), FunctionType)} - allowed
    return all(getattr(given, name) is getattr(base, name) for name in methods)


def _cache_of(costs: StepCosts, config: EngineConfig, block_size: int) -> tuple[int, int]:
    """Return how many blocks and state slots the KV cache has.

    The rule is that of execution/memory.py, but only weights and the cache take memory: a step, adapters and other programs
    take none, so on a GPU the cache is larger. kv_cache_memory is taken as it is.
    """
    sizes, hardware, ranks = costs.sizes, costs.hardware, costs.num_ranks
    weights = sizes.num_weight_bytes(costs.dtype, costs.weight_bits) // ranks
    if (memory := config.cache.kv_cache_memory) is None and hardware.is_gpu:
        memory = int(hardware.memory_bytes * config.cache.gpu_memory_utilization) - weights
    elif memory is None:
        memory = min(DEFAULT_CPU_MEMORY, (hardware.memory_bytes - weights) // 2)
    max_num_seqs, longest = config.scheduler.max_num_seqs, config.max_model_len or sizes.max_position_embeddings
    blocks_for = partial(sizes.cache.num_blocks_for, block_size=block_size, chunk_size=config.scheduler.chunk_grid)
    dtype = costs.cache_dtype or costs.dtype
    block_bytes = stored_in(sizes.cache, dtype).bytes_per_block(block_size, dtype) // ranks
    if memory < blocks_for(1) * block_bytes:
        raise InvalidValueError(
            f"{hardware.name} has {hardware.memory_bytes / 1e9:.0f} GB, for the weights, {weights / 1e9:.1f} GB, "
            f"and a KV cache, got {max(memory, 0) / 1e9:.1f} GB for it; raise tensor_parallel_size, or pick other hardware"
        )
    state_bytes = sizes.cache.bytes_per_state // ranks
    num_state_slots = num_states_in(memory, state_bytes, max_num_seqs)
    return min((memory - num_state_slots * state_bytes) // block_bytes, max_num_seqs * blocks_for(longest)), num_state_slots
