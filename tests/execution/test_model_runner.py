"""Decode steps replayed from a recording give the tokens of steps run as they come. CUDA records; here a stand-in does."""

import pytest
import torch

from tests.helpers import tiny_models

pytest.importorskip("triton")

from nanoinfer import LLM, SamplingParams
from nanoinfer.execution.executor import ExecutorInfo
from nanoinfer.execution.model_runner import ModelRunner
from nanoinfer.fast.cuda.graphs import StepGraphs, StepSize
from nanoinfer.fast.sampling.cuda_graphs import SamplerGraphs
from nanoinfer.sampling.routes import RoutedSampler
from tests.helpers import triton_interpreter  # noqa: F401

pytestmark = pytest.mark.slow

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MEMORY = 40 * 16 * 256  # 40 blocks of 16 tokens of the tiny qwen3
PARAMS = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False) for n in (2, 4, 3, 3, 1)]
FEW = PARAMS[:2]  # where few rows are enough: Triton's interpreter is slow
PROMPTS = [[7] * 16 + [5, 6], [7] * 16 + [9], list(range(3, 40)), [1], [4, 4]]


def record(run):
    """As a CUDA graph: what is replayed reads and writes the same tensors as when it was recorded."""
    out = run().clone()
    (record.draws if out.ndim == 1 else record.sizes).append(len(out))  # token ids or hidden rows
    return lambda: out.copy_(run()), out


def llm_with(path, capture, **options):
    """max_model_len: of so many tokens a recording splits the keys in two. Each further block costs the interpreter time."""
    llm = LLM(
        str(path), attention_backend="triton", block_size=16, kv_cache_memory=MEMORY, max_num_seqs=5, max_model_len=128,
        device=DEVICE, **options,
    )  # fmt: skip
    engine = llm.engine
    runtime = engine.executor.runner.begin_step.__self__
    cache = runtime.make_cache(engine.executor.info.num_blocks + 1, engine.executor.info.num_state_slots)
    graphs = StepGraphs(engine.executor.info, 5, capture, num_groups=len(engine.executor.info.windows))
    engine.executor.runner = ModelRunner(engine.executor.runner.model, cache, engine.executor.runner.begin_step, graphs)
    return llm


@pytest.fixture
def path(tmp_path):
    record.sizes, record.draws = [], []
    return tiny_models.save("qwen3", tmp_path, num_hidden_layers=1, **tiny_models.FEW_HEADS)


def tokens_of(llm, params=PARAMS):
    outputs = llm.generate(PROMPTS[: len(params)], params, use_tqdm=False)
    tiny_models.assert_nothing_is_left(llm)
    return [output.outputs[0].token_ids for output in outputs]


def test_replayed_steps_give_the_tokens_of_steps_run_as_they_come(path):
    """Batches of 5 sequences and fewer, padded to 1, 2, 4 or 5 rows. Two rounds: recordings serve again."""
    llm = llm_with(path, record)
    expected = tokens_of(LLM(str(path), attention_backend="reference", block_size=16, kv_cache_memory=MEMORY))
    assert tokens_of(llm) == expected
    assert len(record.sizes) >= 2
    assert tokens_of(llm, FEW) == expected[: len(FEW)]
    assert sorted(record.sizes) == sorted(set(record.sizes))  # each once
    assert set(record.sizes) <= {1, 2, 4, 5}
    graphs, cache = llm.engine.executor.runner.graphs, llm.engine.executor.runner.cache
    assert graphs._inputs[StepSize(0, 4)].attention.block_tables[3].unique().tolist() == [cache.num_blocks - 1]  # padding's own
    assert cache.layer(0)[0][-1].any()


def test_replayed_steps_of_a_model_with_windows_have_the_block_tables_of_every_kv_group(tmp_path):
    record.sizes, record.draws = [], []
    path = tiny_models.save("qwen3_window", tmp_path, sliding_window=40, **tiny_models.FEW_HEADS)  # three groups
    prompts, params = [list(range(3, 63)), [7] * 26], SamplingParams(temperature=0, max_tokens=2, detokenize=False)
    reference = LLM(str(path), attention_backend="reference", block_size=16, kv_cache_memory=MEMORY)
    answers = [llm.generate(prompts, params, use_tqdm=False) for llm in (reference, llm_with(path, record))]
    expected, replayed = ([output.outputs[0].token_ids for output in outputs] for outputs in answers)
    assert replayed == expected
    assert record.sizes


def test_the_comparison_notices_a_recording_that_reads_old_tensors(path):
    """The negative control: were the places not filled again, the tokens would differ."""

    def stale(run):
        out = run().clone()
        return lambda: None, out

    expected = tokens_of(LLM(str(path), attention_backend="reference", block_size=16, kv_cache_memory=MEMORY), FEW)
    assert tokens_of(llm_with(path, stale), FEW) != expected


@pytest.mark.long  # a steady step draws in its graph: fast/cuda/test_steady.py
def test_draws_are_replayed_behind_replayed_steps(path):
    """A step is read when the next has been launched, as on a GPU. (fast/sampling/test_cuda_graphs.py has draws alone.)"""
    asking = ({"temperature": 0}, {"top_k": 9, "seed": 1}, {"top_p": 0.9, "seed": 2})
    params = [SamplingParams(max_tokens=3, ignore_eos=True, detokenize=False, **given) for given in asking]
    llm = llm_with(path, record, async_scheduling=True)
    llm.engine.executor.sampler = RoutedSampler([SamplerGraphs(5, record)])
    expected = tokens_of(LLM(str(path), attention_backend="reference", block_size=16, kv_cache_memory=MEMORY), params)
    assert tokens_of(llm, params) == expected
    assert record.draws


@pytest.mark.parametrize(
    ("max_num_seqs", "sizes"), [(1, [1]), (5, [1, 2, 4, 5]), (16, [1, 2, 4, 8, 16]), (40, [1, 2, 4, 8, 16, 32, 40])]
)
def test_there_is_a_recording_for_every_number_of_rows(max_num_seqs, sizes):
    info = ExecutorInfo(100, max_position_embeddings=64, max_model_len=64, num_blocks=9, block_size=16)
    graphs = StepGraphs(info, max_num_seqs, record)
    assert graphs.sizes == sizes


def test_what_cannot_be_recorded_runs_as_it_comes_and_is_told_once(path, caplog):
    def fail(run):
        raise RuntimeError("CUDA out of memory\nand so on")

    expected = tokens_of(LLM(str(path), attention_backend="reference", block_size=16, kv_cache_memory=MEMORY), FEW)
    assert tokens_of(llm_with(path, fail), FEW) == expected
    failed = "a step of 2 decodes and 0 prompt tokens could not be captured as a CUDA graph (CUDA out of memory)"
    assert caplog.text.count(failed) == 1
