"""The CUDA path of one_file/engine.py without a GPU, on the simulated device."""

from contextlib import ExitStack, contextmanager
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")

from tests.helpers import flash_attn_double, forked
from tests.one_file import flash_stub
from tests.one_file.compare import facts, save
from tests.one_file.module import changed, load

pytestmark = [pytest.mark.slow, pytest.mark.skipif(torch.cuda.is_available(), reason="torch has a real device of this name")]

SIZES = {"max_num_seqs": 8, "max_num_batched_tokens": 16, "chunk_size": 8}
HEADS = {"gpt2": {"n_embd": 48, "n_head": 3}}  # flash-attn's heads have multiples of 8 numbers
PROMPTS = [[9, 8], [5, 6, 7] * 9, [5, 6, 7] * 5 + [1]]
PARAMS = ({"temperature": 0.9, "top_p": 0.9, "n": 3}, {"temperature": 0.0}, {"repetition_penalty": 1.3, "min_p": 0.01})


def generate(engine, llm, max_tokens=10):
    """Return the outputs and a list with an entry for each step that has sampled."""
    each = [engine.SamplingParams(max_tokens=max_tokens, seed=3, ignore_eos=True, **params) for params in PARAMS]
    schedule, plans = llm.scheduler.schedule, []
    llm.scheduler.schedule = lambda: plans.append(schedule()) or plans[-1]
    outputs = llm.generate(PROMPTS, each)
    return outputs, [plan for plan in plans if plan.rows]


@pytest.mark.parametrize("family", ["qwen3", pytest.param("gpt2", marks=pytest.mark.long)])
def test_flash_attention_and_graphs_give_the_tokens_of_a_cpu(family, tmp_path):
    done = forked.run_function(run_on_simulated_device, family, tmp_path)
    assert done.returncode == 0, done.stderr


def run_on_simulated_device(family, folder, source=None):
    """Compare the answers in fp32, where a tie is rare, and run the steps in bf16 by the rules of flash-attn's arguments."""
    engine = load(source)
    save(family, folder, **HEADS.get(family, {}))
    on_cpu = engine.LLM(folder, device="cpu", block_size=4, **SIZES)
    expected = facts(generate(engine, on_cpu)[0])
    with simulated(engine) as device, mock.patch.object(engine, "FLASH_DTYPES", (torch.float32, torch.bfloat16)):
        for dtype in ("float32", "bfloat16"):
            with lenient() if dtype == "float32" else ExitStack():
                llm = engine.LLM(folder, device="sim", dtype=dtype, num_blocks=16, **SIZES)
                device.reset_counts()
                outputs, steps = generate(engine, llm)
            assert len(device.waits) == len(steps)
            assert dtype == "bfloat16" or facts(outputs) == expected
            assert sum(replay.__self__.num_replays for _, replay, _ in llm.runner.graphs._graphs.values()) > 3
            assert llm.runner.begin_step is engine.FlashAttend
    with simulated(engine) as device:  # the library has no fp32, which is the dtype of the bundled models
        llm = engine.LLM(folder, device="sim", dtype="float32", num_blocks=16, **SIZES)
        device.reset_counts()
        outputs, steps = generate(engine, llm)
        assert llm.runner.graphs is None
        assert (len(device.waits), facts(outputs)) == (len(steps), expected)


CHANGES = {  # what is wrong -> (text of the file, the text in its place)
    "padding in a block of the cache": ("(0, 0, 1, num_blocks * block_size, num_blocks)", "(0, 0, 1, 0, 0)"),
    "a graph keeps the block tables of its capture": (
        "(static if new.ndim == 1 else static[:, : new.shape[1]]).copy_(new)", "(static if new.ndim == 1 else new).copy_(new)",
    ),
    "the keys of chunks begin where the queries do": (
        "F.pad(seq_lens[n:].cumsum(0), (1, 0)).int()", 'self._chunks["cu_seqlens_q"]',
    ),
    "tables of int64": ("metadata.block_tables.int()", "metadata.block_tables"),
    "a copy of memory that is not pinned": ("tensor.pin_memory().to(device", "tensor.to(device"),
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("what", CHANGES)
def test_other_steps_on_a_gpu_are_refused(what, tmp_path):
    done = forked.run_function(run_on_simulated_device, "qwen3", tmp_path, changed(*CHANGES[what]))
    assert done.returncode != 0
    assert "AssertionError" in done.stderr or "DeviceError" in done.stderr or "ValueError" in done.stderr


def install_flash_attn(engine):
    engine.flash_attn_varlen_func = flash_stub.flash_attn_varlen_func
    engine.flash_attn_with_kvcache = flash_stub.flash_attn_with_kvcache


def lenient():
    """flash-attn's double, which then takes fp32."""
    rule, of_dtypes = flash_attn_double.rule, (1233, 545)
    return mock.patch.object(flash_attn_double, "rule", lambda kept, line, text: line in of_dtypes or rule(kept, line, text))


@contextmanager
def simulated(engine):
    """Let device="sim" be the GPU of the file. A replay of a graph also runs the captured function, and compares."""
    from tests.helpers import simulated_device

    if not hasattr(simulated_device.install, "kept"):
        simulated_device.install()
    simulated_device.SimulatedTensor.is_cuda = True
    install_flash_attn(engine)
    capture = engine.CUDACapture.__call__

    def compared(self, run):
        replay, out = capture(self, run)
        replay.__self__.run = run
        return replay, out

    with mock.patch.object(engine.CUDACapture, "__call__", compared):
        yield simulated_device.device
