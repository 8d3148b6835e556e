"""What loading takes at its peak, for every format in which a checkpoint may have its weights.

Measured in a process of its own: the growth of resident memory at its highest, VmHWM, which counts the pages of the file that
are mapped. Freed memory is returned to the system at once there, so that memory in use is compared with the bars: by itself
glibc keeps up to twice as much in one run as in the next.
"""

import json
import os
import subprocess
import sys

import pytest
import torch
import transformers
from safetensors.torch import save_file

from nanoinfer.cli.inspect import examine
from nanoinfer.loading import devices
from tests.helpers import gguf_files, tiny_models

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")

# Four layers of 16 million weights each, 71 million in all.
SIZES = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 4, "vocab_size": 4096, "head_dim": 64}
SIZES |= {"num_attention_heads": 16, "num_key_value_heads": 8, "dtype": "bfloat16"}
NUM_PARAMETERS = 4 * (3 * 1024 * 1024 + 3 * 1024 * 4096) + 2 * 4096 * 1024  # of matrices
GROUP = 128  # inputs that share a scale
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True, "desc_act": False, "checkpoint_format": "gptq"}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}

_MEASURE = """
import json, sys
import nanoinfer.attention.cpu, nanoinfer.fast.cpu.accelerate, nanoinfer.features.formats, nanoinfer.models.qwen
from nanoinfer import LLM

def resident_bytes(name):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(name)) * 1024

nanoinfer.attention.cpu.keep_freed_memory = lambda: None
before = resident_bytes("VmRSS:")
llm = LLM(sys.argv[1], kv_cache_memory=2**20, max_model_len=64, **json.loads(sys.argv[2]))
print(resident_bytes("VmHWM:") - before)
"""


@pytest.fixture(scope="module")
def write(tmp_path_factory):
    """A function: a format -> a checkpoint of random weights, written once."""
    written = {}

    def write_once(kind):
        if kind not in written:
            path = tmp_path_factory.mktemp(kind)
            config = transformers.Qwen3Config(**tiny_models._SHARED | SIZES, tie_word_embeddings=False)
            with torch.device("meta"):
                model = transformers.Qwen3ForCausalLM(config)
            shapes = {name: tuple(weight.shape) for name, weight in model.state_dict().items()}
            written[kind] = (_write_gguf if kind in gguf_files.TYPES else _write_safetensors)(path, kind, config, shapes)
        return written[kind]

    return write_once


def _write_gguf(path, kind, config, shapes):
    tensors = {}
    for name, shape in shapes.items():
        is_matrix = len(shape) > 1
        blocks = gguf_files.TYPES[kind][0], shape, gguf_files.block_bytes(kind, shape).tobytes() if is_matrix else b""
        tensors[gguf_files.gguf_name(name, "qwen3")] = blocks if is_matrix else gguf_files.floats(torch.ones(shape))
    return gguf_files.write(path / "model.gguf", gguf_files.metadata_of(config), tensors)


def _write_safetensors(path, kind, config, shapes):
    generator, tensors = torch.Generator().manual_seed(0), {}
    for name, shape in shapes.items():
        if kind != "plain" and len(shape) == 2 and ".layers." in name:
            layer = name.removesuffix("weight")
            tensors |= {layer + part: one for part, one in _packed(kind, *shape, generator).items()}
        else:
            tensors[name] = torch.randn(shape, generator=generator).mul(0.1).bfloat16()
    save_file(tensors, path / "model.safetensors")
    settings = {"gptq": {"quantization_config": GPTQ}, "awq": {"quantization_config": AWQ}}.get(kind, {})
    (path / "config.json").write_text(json.dumps(config.to_dict() | {"architectures": ["Qwen3ForCausalLM"]} | settings))
    return path


def _packed(kind, num_outputs, num_inputs, generator):
    def words(*shape):
        return torch.randint(-(2**31), 2**31, shape, dtype=torch.int32, generator=generator)

    scales = torch.rand(num_inputs // GROUP, num_outputs, generator=generator).div(100).half()
    zeros = words(num_inputs // GROUP, num_outputs // 8)
    if kind == "awq":
        return {"qweight": words(num_inputs, num_outputs // 8), "qzeros": zeros, "scales": scales}
    return {"qweight": words(num_inputs // 8, num_outputs), "qzeros": zeros, "scales": scales}


def peak_of(path, **arguments):
    """The peak above the process that imported the package. 1 is what the parameters take in bfloat16."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": str(2**16)}
    command = [sys.executable, "-c", _MEASURE, str(path), json.dumps(arguments)]
    child = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert child.returncode == 0, child.stderr
    *_, taken = child.stdout.split()
    return int(taken) / (NUM_PARAMETERS * 2)


# (format, quantization, bar). Each matrix is laid out for its kernel while it is read, and the file's pages are given back.
CASES = [
    ("plain", None, 1.5),
    ("Q4_0", None, 1.5), ("Q4_0", "int4", 0.8), ("Q4_K", None, 1.5), ("Q4_K", "int4", 0.9), ("Q8_0", None, 1.5),
    ("Q8_0", "int8", 1.0), ("gptq", None, 1.5), ("gptq", "int4", 0.8), ("awq", None, 1.5), ("awq", "int4", 0.8),
    ("plain", "int8", 1.0), ("plain", "int4", 0.9),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "quantization", "bar"), [CASES[0], *(pytest.param(*case, marks=pytest.mark.long) for case in CASES[1:])]
)
def test_the_peak_of_loading_is_little_more_than_what_kernels_read(write, kind, quantization, bar):
    peak = peak_of(write(kind), **({"quantization": quantization} if quantization else {"dtype": "bfloat16"}))
    assert bar / 2 < peak <= bar  # so twice as much would be noticed


def test_inspect_states_the_peak_of_the_first_case(write, monkeypatch):
    monkeypatch.setattr(devices, "cpu_has_fast_bf16", lambda: True)
    assert examine(str(write("plain"))).num_peak_bytes == pytest.approx(2 * NUM_PARAMETERS, rel=0.01)


@pytest.mark.long
def test_parameters_of_twice_the_size_are_above_the_bar(write):
    """The negative control."""
    assert peak_of(write("Q4_0"), dtype="float32") > 2.2
