"""A batch that stays on the device gives the plans, blocks and answers of an engine without it, step by step.

The model and its attention are sums of whole numbers: a token's logits depend on all ids before it, their order, its position
and nothing else, and are the same in every batch. They read lengths, tables and slots on the device alone, as kernels do.
"""

import random
import sys
import types
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, fields
from functools import partial
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import nn

pytest.importorskip("triton")

from nanoinfer import SamplingParams
from nanoinfer.attention.cache_sizes import CacheSizes
from nanoinfer.build import ParameterFeatures
from nanoinfer.config import CacheConfig, EngineConfig, SchedulerConfig
from nanoinfer.engine.llm_engine import LLMEngine
from nanoinfer.execution.local_executor import LocalExecutor
from nanoinfer.execution.memory import size_cache
from nanoinfer.execution.runtime import Runtime
from nanoinfer.fast.cuda import steady
from nanoinfer.fast.cuda.graphs import CUDACapture, StepGraphs
from nanoinfer.fast.sampling.few_logits import sample_plainly
from nanoinfer.features.metrics.engine_metrics import EngineMetrics
from nanoinfer.sampling.batch import SamplingBatch
from nanoinfer.sampling.draw import argmax, uniform
from nanoinfer.sampling.sampler import SampledTokens
from tests.golden import records
from tests.golden.loads import NAMES
from tests.golden.plans import record_of
from tests.helpers import forked, triton_interpreter  # noqa: F401

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="end_to_end/test_gpu.py has an engine on the GPU")

VOCAB, PRIME, BLOCK_SIZE, MAX_MODEL_LEN, EOS = 40, 9973, 4, 28, 3


# ---- a model of whole numbers


class Model(nn.Module):
    Config = weight_rules = None
    config = SimpleNamespace(
        vocab_size=VOCAB, max_position_embeddings=MAX_MODEL_LEN, num_hidden_layers=1, num_key_value_heads=1, head_dim=1
    )

    def __init__(self):
        super().__init__()
        logits = torch.randn(PRIME, VOCAB, generator=torch.Generator().manual_seed(0))
        self.weight = nn.Parameter(2 * logits, requires_grad=False)

    def forward(self, ids, positions, attend):
        own = (ids + 1).double().view(-1, 1, 1)
        return ((attend(0, own, own, own).view(-1, 1) + (7 * positions + 13 * ids).view(-1, 1)) % PRIME).float()

    def compute_logits(self, hidden):
        return self.weight[hidden[:, 0].long()]


class Sums:
    """An attention backend: the sum of all keys up to a query, each times a factor of its position."""

    layout, default_block_size, supports_cuda_graph = "NHD", BLOCK_SIZE, True

    @staticmethod
    def unsupported_reason(device, dtype, head_dim, block_size):
        return None

    def begin_step(self, cache, metadata):
        def attend(layer, q, k, v, *, window=None, sinks=None):
            cache.write(layer, metadata.slot_mapping, k, v)
            ends, token = metadata.query_start_loc[1:], torch.arange(len(k), device=k.device)
            seq = torch.searchsorted(ends, token, right=True)
            position = metadata.seq_lens[seq] - (ends[seq] - token)
            keys, _ = cache.gather_blocks(layer, metadata.block_tables[seq].long())
            keys = keys.flatten(1)
            earlier = torch.arange(keys.shape[1], device=k.device)
            factors = (earlier * 31 + 17) % 101
            return torch.where(earlier <= position[:, None], keys * factors, 0).sum(1).view(-1, 1, 1) % PRIME

        return attend


def plain_draw(logits, columns, u):
    """The definition of sample_on_gpu."""
    if u is None:
        return argmax(logits)
    seeds, positions = (numbers.tolist() for numbers in u)
    read = {field.name: getattr(columns, field.name) for field in fields(columns)} | {"max_top_k": logits.shape[-1]}
    batch = SamplingBatch(u=uniform([seed % 2**64 for seed in seeds], positions), **read)
    return torch.where(batch.greedy, argmax(logits), sample_plainly(logits, batch))


def record(run):
    """As a CUDA graph, which computes once before it is captured: what is replayed reads and writes the same tensors."""
    run()
    out = run().clone()
    return lambda: out.copy_(run()), out


# ---- loads


def make_engine(rng, device, module=None, capture=record):
    """Make the engine of a load. module: nanoinfer.fast.cuda.steady, or with a fault. None: an engine without it."""
    max_num_seqs, num_blocks = rng.randint(1, 6), rng.choice([8, 12, 40])
    budget, is_async, caching = rng.choice([6, 16]), rng.random() < 0.8, rng.random() < 0.5
    scheduler = SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, chunk_size=budget)
    cache = CacheConfig(kv_cache_memory=2**20, block_size=BLOCK_SIZE, enable_prefix_caching=caching)
    config = EngineConfig(seed=1, async_scheduling=is_async, scheduler=scheduler, cache=cache, cudagraph_capture="first_use")
    graphs = {"make_step_graphs": partial(StepGraphs, max_num_rows=max_num_seqs, capture=capture)} if module else {}
    model = Model().to(device if module else "cpu")
    runtime = Runtime(model, Sums(), "sums", CacheSizes.of(Model.config), BLOCK_SIZE, torch.float64, **graphs)
    info = size_cache(runtime, config, num_blocks=num_blocks)
    executor = (module.SteadyExecutor if module else LocalExecutor)(runtime, info, config)
    return LLMEngine(
        executor, config, eos_token_ids=frozenset([EOS]), planner=module.Continued() if module else None,
        observer=EngineMetrics(), features=[ParameterFeatures(None, executor)],
    )  # fmt: skip


def random_request(rng, has_others):
    """has_others: whether a request may ask for what no steady batch computes."""
    prompt = [rng.randrange(3)] * rng.choice([0, 0, 8]) + [rng.randrange(VOCAB) for _ in range(rng.randint(1, 6))]
    further = [{}, {}, {}, {"stop_token_ids": [5, 6]}, {"n": 2, "temperature": 1.2}]
    further += [{"repetition_penalty": 1.5}, {"logprobs": 1}, {"min_tokens": 2}] * has_others
    given = {
        "temperature": rng.choice([0.0, 0.7, 1.5]), "top_k": rng.choice([0, 0, 5]), "top_p": rng.choice([1.0, 0.8]),
        "min_p": rng.choice([0.0, 0.0, 0.05]), "seed": rng.getrandbits(64), "max_tokens": rng.choice([2, 7, 13]),
        "ignore_eos": rng.random() < 0.8, "detokenize": False,
    }  # fmt: skip
    return prompt, SamplingParams(**given | rng.choice(further))


def state_of(engine):
    scheduler = engine.scheduler
    running = [(seq.sequence_id, seq.num_computed_tokens, seq.block_table, seq.token_ids) for seq in scheduler.running]
    return running, [seq.sequence_id for seq in scheduler.waiting], engine.block_manager.num_free_blocks


def answers_of(requests, device):
    """On another device log-probabilities are rounded otherwise, so their ids and ranks are compared."""
    answers = [[asdict(answer) for answer in request.output.outputs] for request in requests]
    for answer in chain.from_iterable(answers) if device != "cpu" else ():
        del answer["cumulative_logprob"]
        answer["logprobs"] = [{id_: one["rank"] for id_, one in row.items()} for row in answer["logprobs"] or ()]
    return answers


def run_load(seed, module, device="cpu", capture=record):
    """Take a load through an engine without the steady batch and one with it. Returns how many steps it computed.

    Raises: AssertionError at the first step after which their states differ, or for other answers or counts.
    """
    engines = [make_engine(random.Random(seed), device, each, capture) for each in (None, module)]
    rng, num_steady, begun = random.Random(seed), Counter(), []
    has_others = rng.random() < 0.4
    todo = [(*random_request(rng, has_others), rng.random() < 0.2) for _ in range(rng.randint(1, 7))]
    same = todo[0][1] if rng.random() < 0.3 else None  # the parameters of all
    for step in range(400):
        if not todo and not engines[0].num_unfinished:
            break
        for _ in range(min(rng.choice([0, 0, 1, 2, 7]), len(todo))):
            prompt, params, streams = todo.pop()
            begun.append([
                engine.submit(engine.inputs.prepare(prompt, same or params), streaming=streams) for engine in engines
            ])  # fmt: skip
        aborted = rng.choice(begun)[0].request_id if begun and rng.random() < 0.03 else None
        fails = rng.random() < 0.02  # then all start again, with other blocks
        for engine in engines:
            if aborted is not None:
                engine.abort(aborted)
            launch = mock.Mock(side_effect=RuntimeError) if fails else engine.executor.launch
            with mock.patch.object(engine.executor, "launch", launch), suppress(RuntimeError):
                engine.step()
        assert state_of(engines[0]) == state_of(engines[1]), (seed, step)
        num_steady[type(engines[1]._in_flight).__name__] += 1
    plain, ours = ([pair[i] for pair in begun] for i in range(2))
    assert answers_of(plain, device) == answers_of(ours, device), seed
    assert [list(request.deltas) == [] for request in plain] == [list(request.deltas) == [] for request in ours]
    counts = [[metric for metric in engine.get_metrics() if type(metric).__name__ == "Counter"] for engine in engines]
    assert counts[0] == counts[1], seed
    return num_steady["SteadyStep"]


class CopiedTokens(SampledTokens):
    """Token ids that are copied at once, as to pinned memory."""

    def __init__(self, token_ids, *more):
        super().__init__(token_ids.clone(), *more)


SOURCE = Path(steady.__file__).read_text(encoding="utf-8")


def module_with(old="", new=""):
    """nanoinfer.fast.cuda.steady for a CPU, where the draw is its definition, with one text replaced."""
    module = types.ModuleType("nanoinfer.fast.cuda.steady_on_a_cpu")
    sys.modules[module.__name__] = module  # dataclasses look there
    exec(compile(SOURCE.replace(old, new) if old else SOURCE, steady.__file__, "exec"), vars(module))
    module.sample_on_gpu, module.SampledTokens = plain_draw, CopiedTokens
    return module


# what is wrong -> a text of steady.py, and what replaces it
FAULTS = {
    "a new block is not written": ("self._write_blocks(*on_device[:2])", "pass"),
    "a new block has the place of the one before": ("row * width + len(known))", "row * width + len(known) - 1)"),
    "the first slot of a new block is not written": ("self.numbers[SLOTS].index_copy_(0, *on_device[2:])", "pass"),
    "only one block of a step is written": (
        "                rows.append(row)\n", "                rows.append(row)\n                break\n",
    ),
    "lengths are not advanced": (".add_(numbers[STEPS])", ".add_(numbers[STEPS] * torch.tensor([[1], [0], [1]]))"),
    "positions are not advanced": (".add_(numbers[STEPS])", ".add_(numbers[STEPS] * torch.tensor([[0], [1], [1]]))"),
    "slots are not advanced": ("SLOTS + 1)  # those", "SLOTS)  # those"),
    "padding rows advance": (".add_(numbers[STEPS])", ".add_(1)"),
    "the drawn tokens are not the next inputs": ("out=numbers[IDS])", "out=numbers[IDS].clone())"),
    "a draw is that of the token before": ("(numbers[SEEDS], numbers[LENGTHS])", "(numbers[SEEDS], numbers[POSITIONS])"),
    "large seeds are cut off": ("seq.seed - 2**64 * (seq.seed >= 2**63)", "seq.seed % 2**63"),
    "a capture advances the rows": ("        self._write_rows([], len(self.tables), None)\n", ""),
    "padding has no slot of its own": ("info.num_blocks * info.block_size, 0, 0]", "0, 0, 0]"),
    "tables stay where they were when rows move": ("if sources != list(range(len(sources))):", "if False:"),
    "a table of another start is not written": ("if table[: len(has)] == has else 0", "if len(table) >= len(has) else 0"),
    "tokens in flight are not filled in": ("if previous is not None and in_flight:", "if False:"),
    "tokens in flight are those of other rows": ("before = [row_before[sequences[row]] for", "before = [row for"),
    "other parameters are not written": ("if len(params) <= len(self._params) and all(map(is_, params, self._params)):",
                                         "if len(params) <= len(self._params):"),
    "a penalty is ignored": ("return bool(is_stateful_row(seq, num_output) or ", "return bool("),
    "log-probabilities are ignored": ("seq.params.reports or ", ""),
    "a finished row is kept": ("running != self._sequences or ", ""),
    "a row whose last token is in flight goes on": ("if seq.num_tokens >= seq.max_num_tokens:", "if False:"),
    "a block is taken early": ("== len(seq.block_table) * block_size", "+ 1 == len(seq.block_table) * block_size"),
    "more blocks are taken than are free": ("if len(begun) > manager.num_free_blocks:", "if False:"),
    "nobody starts while others go on": ("or (scheduler.waiting and scheduler.has_place()):", "or False:"),
    "a plan of a prompt goes on": ("goes_on = is_known and has_one_token_each(plan)", "goes_on = is_known"),
    "an id that ends an answer is not seen": ("if token_id in ending_ids or len(token_ids)", "if len(token_ids)"),
    "the length of an answer is not seen": (" or len(token_ids) + 1 >= seq.max_num_tokens:", ":"),
    "a finished answer gets a token": ("self._unread.pop(seq, None)", "pass"),
    "a streamed token is not told": ("requests[seq.request_id].answers[seq.index].ending_ids", "seq.eos_token_ids"),
}  # fmt: skip


@pytest.mark.parametrize("num_loads", [3, pytest.param(25, marks=pytest.mark.slow), pytest.param(2000, marks=pytest.mark.long)])
def test_random_loads_have_the_states_and_answers_of_an_engine_without_a_steady_batch(num_loads):
    module = module_with()
    assert sum(run_load(seed, module) for seed in range(num_loads)) > 3 * num_loads


def test_rows_join_the_steady_batch_once_their_answers_have_min_tokens():
    rng = SimpleNamespace(randint=lambda first, last: last, choice=lambda given: given[-1], random=lambda: 0.0)
    engine, kinds = make_engine(rng, "cpu", module_with()), []
    for num in (3, 5):
        params = SamplingParams(max_tokens=9, min_tokens=num, ignore_eos=True, detokenize=False, temperature=0.5)
        engine.submit(engine.inputs.prepare([1, 2], params))
    while engine.num_unfinished:
        engine.step()
        kinds.append(type(engine._in_flight).__name__)
    assert kinds[:9] == ["LaunchedStep"] * 5 + ["SteadyStep"] * 4


def run_on_the_simulated_device(num_loads):
    """With graphs, and with the kernels of the draw, which must launch the same on the same memory at each replay."""
    from tests.helpers import simulated_device

    simulated_device.install()
    torch.set_num_threads(1)
    with simulated_device.engine_may_use_it():
        for seed in range(num_loads):
            run_load(seed, steady, "sim", CUDACapture(torch.device("sim")))
        assert [wait for wait in simulated_device.device.waits if "/steady.py" in wait] == []


@pytest.mark.parametrize("num_loads", [pytest.param(1, marks=pytest.mark.slow), pytest.param(2000, marks=pytest.mark.long)])
def test_random_loads_have_the_same_states_and_answers_on_the_simulated_device(num_loads):
    done = forked.run_function(run_on_the_simulated_device, num_loads)
    assert done.returncode == 0, done.stderr


def is_found(module):
    """Whether a load ends in other states, or in an error, to which a wrong table may lead."""
    for seed in range(200):
        try:
            run_load(seed, module)
        except Exception:
            return True
    return False


@pytest.mark.long
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_by_one_of_these_loads(fault):
    old, new = FAULTS[fault]
    assert SOURCE.count(old) == 1
    module = module_with(old, new)
    assert is_found(module)


@pytest.mark.parametrize("step", [pytest.param(40, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.long)])
def test_plans_that_go_on_are_those_of_the_golden_loads(step):
    class Counting(steady.Continued):
        def plan(self, scheduler):
            last, plan = self._last, super().plan(scheduler)
            num_plans[last is not None and plan.rows is last.rows] += 1
            return plan

    num_plans, expected = Counter(), records.written()
    for name in NAMES[::step]:
        assert record_of(name, planner=Counting).digest == expected[name], name
    assert num_plans[True] > num_plans[False] / 10
