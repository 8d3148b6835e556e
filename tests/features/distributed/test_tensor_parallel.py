"""LLM(tensor_parallel_size=N) with real processes: the answers of one rank, and clear errors when a rank ends."""

import gc
import logging
import multiprocessing
import pickle
import random
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import Pipe
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from nanoinfer import LLM, Recorder, SamplingParams
from nanoinfer.config import EngineConfig
from nanoinfer.errors import CheckpointNotFoundError, EngineDeadError, InvalidValueError, UnsupportedError
from nanoinfer.features.adapters.adapters import Adapters, remove_adapter
from nanoinfer.features.adapters.request import LoRARequest
from nanoinfer.features.distributed import runner
from nanoinfer.features.distributed.communicator import RankLostError
from nanoinfer.features.distributed.runner import FAILED, LOST, Workers
from nanoinfer.features.distributed.worker import run as run_worker
from nanoinfer.features.drafts.ngram import NGramProposer
from nanoinfer.features.tracing import StageApplied
from nanoinfer.sampling.sampler import STAGES
from tests.helpers import forked, tiny_models
from tests.helpers.lora_adapters import write_requests
from tests.helpers.tiny_models import assert_nothing_is_left

pytestmark = pytest.mark.slow

BLOCK_BYTES = 2 * 2 * 8 * 2 * 16 * 4  # of qwen3_path, on one rank: k and v, layers, tokens, heads, head_dim, bytes
SETTINGS = {"dtype": "float32", "block_size": 8, "chunk_size": 16, "seed": 0}
EXAMPLE = Path(__file__).parents[3] / "examples" / "tensor_parallel.py"
RNG = random.Random(0)
PROMPTS = [[RNG.randrange(tiny_models.VOCAB_SIZE) for _ in range(length)] for length in (5, 37, 1, 20)]

PARAMS = [
    {"temperature": 0},
    {"top_k": 5},
    {"top_p": 0.8},
    {"min_p": 0.05, "temperature": 1.3},
    {"top_k": 20, "top_p": 0.9, "temperature": 0.7},
    {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    {"logit_bias": {3: 5.0, 4: -5.0}, "min_tokens": 5},
    {"allowed_token_ids": [1, 5, 9, 50, 90]},
    {"no_repeat_ngram_size": 2, "temperature": 0},
    {"logprobs": 3, "prompt_logprobs": 2},
    {"n": 3, "temperature": 1.0},
    {"stop_token_ids": list(range(20))},
]


def load_pair(path, num_blocks, size=2, **settings):
    """The same model on `size` ranks and on one, with as many blocks."""
    whole = LLM(path, kv_cache_memory=num_blocks * BLOCK_BYTES, **SETTINGS | settings)
    split = LLM(path, kv_cache_memory=num_blocks * BLOCK_BYTES // size, tensor_parallel_size=size, **SETTINGS | settings)
    assert split.info.num_blocks == whole.info.num_blocks == num_blocks
    return split, whole


@pytest.fixture(scope="module")
def pair(qwen3_path):
    with forked.ranks():
        return load_pair(qwen3_path, 40)


@pytest.fixture
def forked_ranks():
    """For a test of what ranks compute, and not of how they start and end."""
    with forked.ranks():
        yield


def asked(**given):
    return SamplingParams(**{"max_tokens": 12, "detokenize": False, "seed": 3} | given)


def answers(llm, prompts, params):
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert all(output.outputs[0].finish_reason != "error" for output in outputs)
    return [[answer.token_ids for answer in output.outputs] for output in outputs]


def test_two_ranks_give_the_tokens_of_one_for_every_parameter(pair):
    split, whole = pair
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(len(PARAMS))]
    params = [asked(**given) for given in PARAMS]
    assert answers(split, prompts, params) == answers(whole, prompts, params)
    assert_nothing_is_left(split)


def test_logprobs_of_two_ranks_are_those_of_one(pair):
    [ours], [theirs] = (llm.generate([PROMPTS[1]], asked(logprobs=5, prompt_logprobs=5), use_tqdm=False) for llm in pair)
    rows = [*ours.prompt_logprobs[1:], *ours.outputs[0].logprobs]
    expected = [*theirs.prompt_logprobs[1:], *theirs.outputs[0].logprobs]
    assert len(rows) == 36 + 12
    for row, other in zip(rows, expected, strict=True):
        assert list(row) == list(other)
        assert [one.logprob for one in row.values()] == pytest.approx([one.logprob for one in other.values()], abs=2e-5)


def assert_same_tokens_with_preemptions(split, whole, prompts, params):
    outputs = split.generate(prompts, params, use_tqdm=False)
    assert [[answer.token_ids for answer in output.outputs] for output in outputs] == answers(whole, prompts, params)
    assert sum(output.metrics.num_preemptions for output in outputs) > 0
    assert_nothing_is_left(split)


def test_a_preempted_sequence_is_computed_again_on_every_rank(pair):
    assert_same_tokens_with_preemptions(*pair, [PROMPTS[1]] * 3 + [PROMPTS[3]] * 3, asked(max_tokens=40))


def test_a_row_alone_has_the_bits_of_a_row_in_a_batch(pair):
    split, _ = pair
    if not split.batch_independent:
        pytest.skip("this machine has no form in which rows are independent")

    def bits(prompts, place):
        split.reset_prefix_cache()
        output = split.generate(prompts, asked(logprobs=-1, prompt_logprobs=-1), use_tqdm=False)[place]
        rows = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
        return [{i: one.logprob for i, one in row.items()} for row in rows]

    assert bits([PROMPTS[1], PROMPTS[3], PROMPTS[0], *([[i, i] for i in range(20)])], 1) == bits([PROMPTS[3]], 0)


def test_ordinary_steps_draw_from_split_logits_and_others_from_full_rows(pair):
    split, _ = pair
    executor = split.engine.executor
    sampler = getattr(executor.sampler, "sampler", executor.sampler)  # without the reports that earlier requests asked for
    route, model = sampler.routes[0], executor.runner.model
    for params, has_full_rows in ((asked(temperature=0, max_tokens=3), False), (asked(logprobs=1, max_tokens=3), True)):
        split.reset_prefix_cache()
        with (
            patch.object(route, "try_sample", wraps=route.try_sample) as split_logits,
            patch.object(model, "compute_logits", wraps=model.compute_logits) as full_rows,
        ):
            answers(split, PROMPTS, params)
        assert split_logits.call_count >= 3
        assert full_rows.call_count == (split_logits.call_count if has_full_rows else 0)


def test_an_error_in_a_users_function_leaves_the_ranks_together(pair):
    def broken(output_ids, logits):
        raise RuntimeError("mine")

    split, whole = pair
    with pytest.raises(RuntimeError, match="mine"):
        split.generate([PROMPTS[0]], asked(logits_processors=[broken]), use_tqdm=False)
    assert answers(split, PROMPTS[:1], asked()) == answers(whole, PROMPTS[:1], asked())


def test_speculation_stages_and_traces_work_on_rank_0_alone(tmp_path, forked_ranks):
    """On GPT-2, whose vocabulary is odd, with a class that other ranks cannot import."""

    class Mine(NGramProposer):
        pass

    path, greedy = tiny_models.save("gpt2", tmp_path, vocab_size=97), asked(temperature=0, max_tokens=20)
    settings = {**SETTINGS, "kv_cache_memory": 2**22, "enforce_eager": True}
    expected = answers(LLM(path, **settings), PROMPTS, greedy)
    drafts = {"method": Mine, "adaptive": False, "prompt_lookup_min": 1}
    speculating = LLM(path, tensor_parallel_size=2, speculative_config=drafts, **settings)
    assert answers(speculating, PROMPTS, greedy) == expected
    recorder, stages = Recorder(stages=True), [*STAGES, lambda logits, batch: logits]
    staged = LLM(path, tensor_parallel_size=2, tracer=recorder, stages=stages, **settings)  # beside the first one
    assert answers(staged, PROMPTS, greedy) == expected
    assert any(isinstance(event, StageApplied) for event in recorder.events)


@pytest.mark.long
def test_four_ranks_with_a_shared_kv_head_give_the_tokens_of_one(tmp_path, forked_ranks):
    path = tiny_models.save("qwen3_one_kv_head", tmp_path, vocab_size=97)
    params = [asked(**given) for given in PARAMS[:4]]
    expected = answers(LLM(path, kv_cache_memory=2**22, **SETTINGS), PROMPTS, params)
    before = set(multiprocessing.active_children())
    split = LLM(path, kv_cache_memory=2**22, tensor_parallel_size=4, **SETTINGS)
    assert len(set(multiprocessing.active_children()) - before) == 3
    assert answers(split, PROMPTS, params) == expected


@pytest.mark.parametrize("family", [pytest.param("gpt_oss_window", marks=pytest.mark.long), "gemma3_window"])
def test_ranks_of_models_with_windows_give_the_tokens_of_one(family, tmp_path, forked_ranks):
    """Also where sequences are preempted, and where prefixes are shared by several KV groups."""
    path = tiny_models.save(family, tmp_path)
    whole = LLM(path, kv_cache_memory=2**20, **SETTINGS)
    split = LLM(path, kv_cache_memory=2**17, tensor_parallel_size=2, **SETTINGS)
    prompts = [PROMPTS[1]] * 3 + [[*PROMPTS[1][:32], 7, 8, 9]] + [PROMPTS[3]] * 3
    params = [asked(max_tokens=30, **given) for given in [*PARAMS[:4], *PARAMS[-3:-1], {"n": 2}]]
    assert_same_tokens_with_preemptions(split, whole, prompts, params)


def as_gpus():
    """Let a rank do what it does on a GPU: rank 0 draws alone, and the ids that it draws reach the others by a collective."""
    runner.reads_at_once = lambda device: False


@pytest.mark.parametrize("are_gpus", [True, False])
def test_a_step_that_is_launched_before_the_one_before_it_is_read_has_its_ids_on_every_rank(are_gpus, qwen3_path, monkeypatch):
    monkeypatch.setattr(runner, "reads_at_once", lambda device: not are_gpus)
    with forked.ranks(as_gpus if are_gpus else None):
        split, whole = load_pair(qwen3_path, 40, async_scheduling=True)
    assert len(split.engine.executor.sampler.routes) == 2 - are_gpus
    prompts, params = [PROMPTS[i % len(PROMPTS)] for i in range(6)], [asked(**given) for given in (*PARAMS[:4], *PARAMS[-3:-1])]
    assert answers(split, prompts, params) == answers(whole, prompts, params)
    assert_nothing_is_left(split)


# ---- adapters of requests


@pytest.fixture(scope="module")
def adapters(qwen3_path, tmp_path_factory):
    """LoRARequests for the model of qwen3_path."""
    return write_requests(qwen3_path, tmp_path_factory.mktemp("adapters"), (4, 4, 4))


def with_adapters(llm, requests, params=None):
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(len(requests))]
    outputs = llm.generate(prompts, params or asked(temperature=0), use_tqdm=False, lora_request=requests)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def adapted(qwen3_path):
    with forked.ranks():
        return load_pair(qwen3_path, 80, enable_lora=True, max_loras=2)


def test_two_ranks_give_the_tokens_of_one_with_several_adapters_in_a_batch(adapted, adapters):
    split, whole = adapted
    requests = [adapters[0], None, adapters[1], adapters[1], None, adapters[2], adapters[0], adapters[2]]  # two are active
    assert len({str(with_adapters(whole, [one])) for one in (None, *adapters)}) == 4
    assert with_adapters(split, requests) == with_adapters(whole, requests)
    sampled = asked(temperature=1, top_p=0.9)
    assert with_adapters(split, requests[::-1], sampled) == with_adapters(whole, requests[::-1], sampled)
    assert_nothing_is_left(split)


def test_every_rank_gets_another_adapter_for_a_removed_id_and_keeps_adapters_with_new_weights(adapted, adapters, tmp_path):
    other = LoRARequest("other", 1, adapters[1].lora_path)
    first, second = ([with_adapters(llm, [one]) for llm in adapted] for one in adapters[:2])
    assert [remove_adapter(llm.engine.inputs, 1) for llm in adapted] == [True, True]
    assert [with_adapters(llm, [other]) for llm in adapted] == second != first
    assert [remove_adapter(llm.engine.inputs, 1) for llm in adapted] == [True, True]
    assert [with_adapters(llm, [adapters[0]]) for llm in adapted] == first
    path = tiny_models.save("qwen3", tmp_path, seed=7)
    for llm in adapted:
        llm.update_weights_from_path(str(path))
    renewed = [with_adapters(llm, [adapters[0]]) for llm in adapted]
    assert renewed[0] == renewed[1] != first[0]


def test_an_adapter_is_sent_to_the_ranks_when_it_comes_into_memory_and_not_with_each_step(qwen3_path, adapters, forked_ranks):
    split, _ = load_pair(qwen3_path, 40, enable_lora=True)
    workers, sizes = split.engine.executor.runner.inner.workers, []
    send = workers.send
    workers.send = lambda message: (sizes.append(len(pickle.dumps(message))), send(message))
    adapter_bytes = sum(tensor.nbytes for tensor in load_file(f"{adapters[0].lora_path}/adapter_model.safetensors").values())
    for request, num_sent in ((adapters[0], 1), (adapters[0], 0), (adapters[1], 1), (adapters[0], 1), (None, 0)):
        sizes.clear()
        with_adapters(split, [request] * 3)
        assert len(sizes) > 12
        assert sum(size > adapter_bytes for size in sizes) == num_sent
        assert sum(sizes) < num_sent * 1.2 * adapter_bytes + len(sizes) * 5_000


def test_an_adapter_that_rank_0_cannot_place_is_placed_by_all_ranks_in_a_later_step(adapted, adapters, monkeypatch):
    """Nothing is believed to be in memory after the step that failed, which the other ranks did not get."""
    split, whole = adapted
    requests = [adapters[0], adapters[1]]
    expected = with_adapters(whole, requests)
    with_adapters(split, [adapters[2], adapters[0]])
    [known] = [feature for feature in split.engine.inputs.features if isinstance(feature, Adapters)]
    layer = list(known.layers.values())[5]
    monkeypatch.setattr(layer, "put", lambda index, update: (_ for _ in ()).throw(MemoryError("full")))
    with pytest.raises(MemoryError, match="full"):
        with_adapters(split, requests)
    monkeypatch.undo()
    assert with_adapters(split, requests) == expected
    assert with_adapters(split, [adapters[2], adapters[1]]) == with_adapters(whole, [adapters[2], adapters[1]])


# ---- ends


def load_with_worker(path, **settings):
    """An LLM of two ranks, and the process of rank 1."""
    before = set(multiprocessing.active_children())
    with forked.ranks():
        llm = LLM(path, tensor_parallel_size=2, **SETTINGS | {"kv_cache_memory": 2**22} | settings)
    [worker] = set(multiprocessing.active_children()) - before
    return llm, worker


def test_the_workers_of_a_closed_and_of_a_collected_llm_have_ended(qwen3_path):
    split, worker = load_with_worker(qwen3_path)
    with split:
        stream = split.stream(PROMPTS[0], asked())
        next(stream)
    assert not worker.is_alive()
    assert [delta.finish_reason for delta in stream][-1] == "abort"
    split.close()
    split, worker = load_with_worker(qwen3_path)
    del split
    gc.collect()
    assert not worker.is_alive()


def test_a_killed_rank_is_named_at_once_and_in_every_later_call(qwen3_path):
    llm, worker = load_with_worker(qwen3_path)
    threading.Timer(0.3, worker.kill).start()

    def generate_on():
        while True:
            llm.generate(PROMPTS, asked(max_tokens=200), use_tqdm=False)

    for call in (generate_on, lambda: llm.generate(PROMPTS, asked(), use_tqdm=False)):
        with pytest.raises(EngineDeadError, match=r"rank 1 of 2 was ended by SIGKILL; make a new LLM"):
            call()
    assert_nothing_is_left(llm)
    assert not worker.is_alive()


def test_an_llm_that_has_lost_a_rank_is_closed_and_its_store_is_whole(qwen3_path, tmp_path):
    llm, worker = load_with_worker(qwen3_path, prefix_cache_dir=tmp_path / "kv")
    with llm:
        expected = answers(llm, PROMPTS, asked())
        worker.kill()
        with pytest.raises(EngineDeadError, match="rank 1 of 2 was ended by SIGKILL"):
            llm.generate(PROMPTS, asked(), use_tqdm=False)
    for num_found in (0, 32 + 16):
        with load_with_worker(qwen3_path, prefix_cache_dir=tmp_path / "kv")[0] as llm:
            assert answers(llm, PROMPTS, asked()) == expected
            assert llm.engine.block_manager.store.counts["external_prefix_cache_hits"] == num_found


def test_workers_end_when_rank_0_is_killed(qwen3_path):
    script = """
        import sys, time
        from nanoinfer import LLM
        llm = LLM(sys.argv[1], kv_cache_memory=2**22, tensor_parallel_size=2, enforce_eager=True)
        [process] = llm.engine.executor.runner.workers._processes
        print(process.pid, flush=True)
        time.sleep(600)
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(qwen3_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        worker = int(process.stdout.readline())
        process.kill()
        process.wait()
        deadline = time.monotonic() + 120
        while Path(f"/proc/{worker}").exists() and "Z" not in Path(f"/proc/{worker}/stat").read_text().split()[2]:
            assert time.monotonic() < deadline
            time.sleep(0.02)


@pytest.mark.parametrize(
    ("reports", "message"),
    [
        ([(LOST, "lost"), (FAILED, "MemoryError: mine")], "rank 2 of 3 failed: MemoryError: mine; make a new LLM"),
        ([(LOST, "lost"), None], "rank 2 of 3 has ended; make a new LLM"),
        ([None, (LOST, "lost")], "rank 1 of 3 has ended; make a new LLM"),
        ([(LOST, "lost"), (LOST, "lost")], "the connection has failed; make a new LLM"),
    ],
)
def test_the_rank_that_ended_first_is_named_and_not_those_that_lost_it(reports, message):
    pipes = [Pipe() for _ in reports]
    workers = Workers([ours for ours, _ in pipes], [])
    for (_, theirs), report in zip(pipes, reports, strict=True):
        if report is not None:
            theirs.send(report)
        theirs.close()
    with pytest.raises(EngineDeadError, match=message), workers.watched():
        raise RankLostError("the connection has failed")
    with pytest.raises(EngineDeadError, match=message), workers.together("forward"):
        pass


def test_an_error_of_rank_0_stays_as_it_is_and_ends_the_workers():
    ours, theirs = Pipe()
    workers = Workers([ours], [])
    with pytest.raises(CheckpointNotFoundError, match="mine"), workers.watched():
        raise CheckpointNotFoundError("mine")  # also an OSError, as is an error of a connection
    with pytest.raises(EOFError):
        theirs.recv()
    with pytest.raises(EngineDeadError, match="rank 0 of 2 failed: mine; make a new LLM"), workers.together("forward"):
        pass


def test_two_threads_command_the_workers_one_after_the_other():
    """At a process's end a store reads blocks while a thread may run steps. Its thread is not waited for."""
    ours, theirs = Pipe()
    workers = Workers([ours], [])

    def command():
        with workers.together("second"):
            pass

    thread = threading.Thread(target=command)
    with workers.together("first"):
        thread.start()
        thread.join(0.1)
        assert theirs.recv() == ("first",)
        assert not theirs.poll()
    thread.join()
    assert theirs.recv() == ("second",)


def test_torchruns_number_of_processes_must_be_the_llms(monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "3", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InvalidValueError, match=r"tensor_parallel_size is 2, but torchrun has started 3 processes"):
        LLM("tiny-gpt2", tensor_parallel_size=2)


def check_one_printed(runs):
    assert [run.returncode for run in runs] == [0] * len(runs), [run.stderr for run in runs]
    assert "".join(run.stdout for run in runs).count("the text of one process: True") == 1


def test_under_torchrun_rank_0_runs_the_script_and_the_others_serve_it(tmp_path):
    """The processes, their environment and the store are as torchrun makes them."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    shared["TORCHELASTIC_USE_AGENT_STORE"] = "True"

    def run(rank):
        return forked.run_script(EXAMPLE, cwd=tmp_path, environment=shared | {"RANK": rank, "LOCAL_RANK": rank})

    with ThreadPoolExecutor(2) as threads:
        check_one_printed(list(threads.map(run, "01")))


@pytest.mark.long
def test_torchrun_itself_starts_the_ranks():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(EXAMPLE)]
    check_one_printed([subprocess.run(command, capture_output=True, text=True, timeout=300)])


def test_one_gpu_by_its_number_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(UnsupportedError, match="device='cuda:1' names one GPU, and tensor_parallel_size=2 uses several"):
        LLM("tiny-gpt2", tensor_parallel_size=2, device="cuda:1")


def test_a_store_that_does_not_open_is_reported_with_its_sentence():
    ours, theirs = Pipe()

    def open_store():
        raise ConnectionError("the port is closed")

    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    level = logging.getLogger("nanoinfer").level
    workers = Workers([ours], [])
    workers.send((EngineConfig(), threads, precision))
    run_worker(theirs, 1, "cpu", open_store, is_one_machine=True)
    logging.getLogger("nanoinfer").setLevel(level)  # a worker is otherwise a process of its own
    theirs.close()
    with pytest.raises(EngineDeadError, match="rank 1 of 2 failed: ConnectionError: the port is closed; make a new LLM"):
        workers.wait_until_ready()
