"""A GPU that is simulated: every kernel of a step is compiled for it, and every launch is checked. Nothing runs.

    python -m tests.simulated_gpu                    # a Markdown table: registers and shared memory by architecture
    python -m tests.simulated_gpu --arch 90 --dtype float16 --model Qwen3-0.6B

Needs Triton, which brings NVIDIA's assembler, and no GPU. The models have the sizes of published checkpoints, one layer, and
weights on the meta device. Their steps pass through the same functions as on a GPU. Triton's driver is replaced: it names an
architecture, so kernels are compiled for it, with the types and constants of the launch.
"""

import argparse
import itertools
import os
import re
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.pop("TRITON_INTERPRET", None)  # the interpreter compiles nothing
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # Triton 3.9 warns where it is not set

import torch
import triton
from torch import Tensor, nn
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from nanoinfer.attention.kv_cache import KVCache
from nanoinfer.attention.triton import Rotation, TritonBackend, copy_blocks, rotate_and_store
from nanoinfer.config import BITS
from nanoinfer.execution.forward_batch import ForwardBatch
from nanoinfer.fast.cuda.accelerate import compile_model
from nanoinfer.fast.cuda.draw_kernel import choose
from nanoinfer.fast.cuda.lora import LowRankUpdates, RowIndices
from nanoinfer.features.adapters.layers import AdaptedLinear, AdapterMapping
from nanoinfer.features.int8_cache.cache import SplitInt8Cache
from nanoinfer.features.int8_cache.sizes import SCALE_BYTES
from nanoinfer.models.gemma3 import Gemma3ForCausalLM
from nanoinfer.models.gpt_oss import GptOssForCausalLM
from nanoinfer.models.layers import RotaryEmbedding
from nanoinfer.models.llama import LlamaForCausalLM
from nanoinfer.models.qwen import QwenForCausalLM
from nanoinfer.models.qwen_moe import QwenMoeForCausalLM
from nanoinfer.sampling.batch import ParameterColumns
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.scheduling.sequence import Sequence
from nanoinfer.scheduling.step_plan import ScheduledSequence, StepPlan

KB_OF_SHARED_MEMORY = {75: 64, 80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}  # of a program. CUDA's guide, table 30
MAX_SPILLED = 64  # bytes of a thread that may be kept in memory instead of registers
MAX_GRID = (2**31 - 1, 2**16 - 1, 2**16 - 1)

# name -> (class, config.json). The decoder layers of all three are kernels' users. GPT-2 uses those of attention alone.
MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "Qwen3-0.6B": (QwenForCausalLM, {"model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072,
                                     "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}),
    "Qwen2.5-0.5B": (QwenForCausalLM, {"model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864,
                                       "num_attention_heads": 14, "num_key_value_heads": 2}),
    "Llama-3.2-1B": (LlamaForCausalLM, {"model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192,
                                        "num_attention_heads": 32, "num_key_value_heads": 8}),
    "Mistral-7B-v0.1": (LlamaForCausalLM, {"model_type": "mistral", "hidden_size": 4096, "intermediate_size": 14336,
                                           "num_attention_heads": 32, "num_key_value_heads": 8, "sliding_window": 512}),
    "head_dim 80": (LlamaForCausalLM, {"model_type": "llama", "hidden_size": 640, "intermediate_size": 2048,
                                       "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 80}),
    "Gemma-3-1B": (Gemma3ForCausalLM, {"model_type": "gemma3_text", "hidden_size": 1152, "intermediate_size": 6912,
                                       "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256,
                                       "sliding_window": 512}),
    "gpt-oss-20b": (GptOssForCausalLM, {"model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880,
                                        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
                                        "num_local_experts": 32, "num_experts_per_tok": 4,
                                        "rope_parameters": {"rope_type": "default"}}),
    "Qwen3-30B-A3B": (QwenMoeForCausalLM, {"model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144,
                                           "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
                                           "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
                                           "norm_topk_prob": True}),
}  # fmt: skip
COMMON = {"vocab_size": 1000, "num_hidden_layers": 1, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6}

# A kernel -> how many elements it touches from the start of a tensor, by the names of its parameters: a formula of its grid and
# its other arguments.
ROWS = dict.fromkeys(("greedy", "temperature", "min_p", "top_k", "top_p", "u"), "grid[0]")
LINEAR = {
    "x": "(num_rows - 1) * x_stride + NUM_IN", "weight": "(1 + GATED) * NUM_OUT * NUM_IN", "out": "num_rows * NUM_OUT",
}  # fmt: skip
INTEGERS = {  # BITS is 0 for a weight of the dtype
    "weight": "(1 + GATED) * NUM_OUT * NUM_IN * (BITS or 8) // 8",
    **dict.fromkeys(("scales", "zeros"), "(1 + GATED) * NUM_OUT * NUM_IN // GROUP"),
}
REACH: dict[str, dict[str, str]] = {
    "_rms_norm_kernel": {**dict.fromkeys(("x", "residual", "out"), "grid[0] * SIZE"), "weight": "SIZE"},
    "_gate_kernel": {"gate_up": "grid[0] * 2 * SIZE", "out": "grid[0] * SIZE"},
    "_store_kernel": {
        "q": "(grid[0] - 1) * q_stride + HEADS * HEAD_DIM", "k": "(grid[0] - 1) * k_stride + KV_HEADS * HEAD_DIM",
        "v": "(grid[0] - 1) * v_stride + KV_HEADS * HEAD_DIM", **dict.fromkeys(("cos", "sin"), "grid[0] * ROTATED"),
        **dict.fromkeys(("weight", "k_weight"), "HEAD_DIM"), "slots": "grid[0]",
    },
    "_copy_kernel": {"pages": "grid[1] * layer_size", **dict.fromkeys(("sources", "targets"), "num_copies")},
    "_prefill_kernel": {"query_start_loc": "first_seq + grid[0] + 1", "seq_lens": "first_seq + grid[0]"},
    "_decode_kernel": {
        "q": "(grid[0] - 1) * q_stride + NUM_HEADS * HEAD_DIM", "partial_o": "grid[0] * NUM_HEADS * NUM_SPLITS * HEAD_DIM",
        **dict.fromkeys(("partial_m", "partial_l"), "grid[0] * NUM_HEADS * NUM_SPLITS"), "first_decodes": "grid[0]",
    },
    "_merge_kernel": {
        **dict.fromkeys(("partial_m", "partial_l"), "grid[0] * NUM_SPLITS"),
        "partial_o": "grid[0] * NUM_SPLITS * HEAD_DIM", "out": "grid[0] * HEAD_DIM",
    },
    "_linear_kernel": LINEAR | INTEGERS | {
        "partial": "grid[1] * ROWS * grid[0] * COLUMNS", "num_arrived": "grid[0]",
    },
    "_integer_linear_kernel": LINEAR | INTEGERS | {"norm": "NUM_IN", "residual": "num_rows * NUM_OUT"},
    "_widen_kernel": {name: formula.replace("(1 + GATED) * ", "") for name, formula in INTEGERS.items()} | {
        "out": "NUM_OUT * NUM_IN",
    },
    "_invariant_linear_kernel": LINEAR | {"residual": "num_rows * NUM_OUT"},
    "_decode_linear_kernel": LINEAR | {"norm": "NUM_IN", "residual": "num_rows * NUM_OUT"},
    "_decode_attention_kernel": {
        "q": "(grid[0] - 1) * q_stride + NUM_HEADS * HEAD_DIM", "k": "(grid[0] - 1) * k_stride + NUM_KV_HEADS * HEAD_DIM",
        "v": "(grid[0] - 1) * v_stride + NUM_KV_HEADS * HEAD_DIM", "out": "grid[0] * NUM_HEADS * HEAD_DIM",
        "partial_o": "grid[0] * NUM_HEADS * NUM_SPLITS * HEAD_DIM", "num_arrived": "MAX_ROWS * NUM_KV_HEADS",
        **dict.fromkeys(("partial_m", "partial_l"), "grid[0] * NUM_HEADS * NUM_SPLITS"),
        **dict.fromkeys(("cos", "sin"), "grid[0] * ROTATED"), **dict.fromkeys(("weight", "k_weight"), "HEAD_DIM"),
        **dict.fromkeys(("slots", "seq_lens", "first_decodes"), "grid[0]"), "sinks": "NUM_HEADS",
    },
    "_few_gated_kernel": {
        "x": "grid[1] // TOP_K * NUM_IN", "chosen": "grid[1]", "out": "grid[1] * NUM_OUT",
    },
    "_few_down_kernel": {
        "x": "grid[1] * TOP_K * NUM_IN", **dict.fromkeys(("chosen", "routing"), "grid[1] * TOP_K"),
        **dict.fromkeys(("residual", "out"), "grid[1] * NUM_OUT"),
    },
    "_list_kernel": {"chosen": "num_rows * TOP_K", "counts": "grid[0]", "pairs": "grid[0] * num_rows"},
    "_grouped_kernel": {
        "x": "num_rows * (1 if GATED else TOP_K) * NUM_IN", "weight": "NUM_EXPERTS * (1 + GATED) * NUM_OUT * NUM_IN",
        "bias": "NUM_EXPERTS * (1 + GATED) * NUM_OUT", "out": "num_rows * TOP_K * NUM_OUT", "counts": "NUM_EXPERTS",
        "pairs": "NUM_EXPERTS * num_rows",
    },
    "_sum_pairs_kernel": {
        "x": "grid[0] * TOP_K * SIZE", "routing": "grid[0] * TOP_K", **dict.fromkeys(("residual", "out"), "grid[0] * SIZE"),
    },
    "_route_kernel": {
        "scores": "(grid[0] - 1) * stride + NUM_EXPERTS", **dict.fromkeys(("routing", "chosen"), "grid[0] * TOP_K"),
    },
    "_shrink_kernel": {
        "x": "(num_rows - 1) * x_stride + NUM_IN", "indices": "num_rows", "products": "grid[2] * num_rows * NUM_RANKS",
    },
    "_expand_kernel": {
        "products": "NUM_PARTS * num_rows * NUM_RANKS", "indices": "num_rows", "starts": "grid[2] + 1",
    },
    "_angles_kernel": {
        "positions": "grid[0]", "inv_freq": "HALF", **dict.fromkeys(("cos", "sin"), "grid[0] * 2 * HALF"),
    },
    "_largest_kernel": {
        "logits": "grid[0] * VOCAB", **dict.fromkeys(("maxima", "first_ids"), "grid[0] * NUM_PARTS"),
        "section_maxima": "grid[0] * NUM_PARTS * (PART // SECTION)",
    },
    "_bound_kernel": {
        "maxima": "grid[0] * NUM_PARTS", "section_maxima": "grid[0] * NUM_SECTIONS", "bounds": "grid[0]",
        "num_listed": "grid[0]", **ROWS,
    },
    "_sum_kernel": {
        "logits": "grid[0] * VOCAB", **dict.fromkeys(("maxima", "sums"), "grid[0] * NUM_PARTS"), "listed": "grid[0] * LIST",
        "bounds": "grid[0]", "num_listed": "grid[0]", **ROWS,
    },
    "_choose_kernel": {
        "logits": "grid[0] * VOCAB", **dict.fromkeys(("maxima", "first_ids", "sums"), "grid[0] * NUM_PARTS"),
        **dict.fromkeys(("bounds", "num_listed", "seeds", "positions", "token_ids"), "grid[0]"), "listed": "grid[0] * LIST",
        **ROWS,
    },
}  # fmt: skip
WITH_EXPERTS = "gpt-oss-20b", "Qwen3-30B-A3B"
# The first two read nothing early, because an earlier kernel has chosen the experts.
OF_EXPERTS = {
    "_few_gated_kernel", "_few_down_kernel", "_route_kernel", "_list_kernel", "_grouped_kernel", "_sum_pairs_kernel"
}  # fmt: skip
OF_INTEGERS = {"_integer_linear_kernel", "_widen_kernel"}
DTYPES = (  # of parameters by name. All others have the model's dtype
    dict.fromkeys(("slots", "sources", "targets", "chosen", "query_start_loc", "seq_lens", "sums", "token_ids"), torch.int64)
    | {"indices": torch.int64, "products": torch.float32, "factors": torch.float32, "starts": torch.int32}
    | dict.fromkeys(("first_decodes", "bounds", "top_k", "seeds", "positions"), torch.int64)
    | dict.fromkeys(("partial_m", "partial_l", "partial_o", "sinks", "maxima", "section_maxima"), torch.float32)
    | dict.fromkeys(("temperature", "min_p", "k_scales", "v_scales"), torch.float32)
    | dict.fromkeys(("top_p", "u"), torch.float64)
    | {"greedy": torch.bool, "scales": torch.float32, "zeros": torch.uint8}
    | dict.fromkeys(("counts", "pairs", "first_ids", "listed", "num_listed", "block_tables", "num_arrived"), torch.int32)
    | dict.fromkeys(("inv_freq", "partial", "routing"), torch.float32)
)


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel with its arguments by name, for a grid of programs."""

    kernel: str
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    compiled: Any

    def check(self, dtype: torch.dtype) -> None:
        """Raise AssertionError if the grid or an argument is not what the kernel assumes."""
        assert all(1 <= size <= limit for size, limit in zip(self.grid, MAX_GRID, strict=False)), (self.kernel, self.grid)
        tensors = {name: value for name, value in self.arguments.items() if isinstance(value, Tensor)}
        dtypes = DTYPES | (dict.fromkeys(("k_pages", "v_pages"), torch.int8) if "k_scales" in tensors else {})
        for name, tensor in tensors.items():
            expected = torch.uint8 if name == "weight" and self.arguments.get("BITS") else dtypes.get(name, dtype)
            assert tensor.dtype is expected, (self.kernel, name, tensor.dtype)
            assert tensor.stride(-1) == 1, (self.kernel, name, tensor.stride())
        for name, formula in REACH[self.kernel].items():
            if name not in tensors:  # it is optional
                continue
            reach = eval(formula, {"grid": self.grid, **self.arguments})
            assert reach == extent(tensors[name]), (
                f"{self.kernel} reads {reach} elements of {name}, which has {extent(tensors[name])}"
            )
        if self.kernel == "_copy_kernel":  # another thread may write what one reads
            reads, _, writes = self.compiled.asm["ptx"].partition("bar.sync")
            assert writes.count("st.global"), "a block is written before all are read"
            assert "st.global" not in reads, "a block is written before all are read"
        if self.arguments.get("PDL"):
            before, _, after = self.compiled.asm["ptx"].partition("griddepcontrol.wait")
            assert self.kernel in OF_EXPERTS or "ld.global" in before, "nothing is loaded while the kernel before still runs"
            assert "st.global" in after, "the kernel does not wait"
            assert not re.search(r"st\.global|atom\.|\bbra\b|\bret;", before), "the kernel writes or ends before it waits"


def extent(tensor: Tensor) -> int:
    """Elements from the first to the last of a tensor in memory."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


class Driver:
    """What Triton asks of a driver when it compiles."""

    def __init__(self, arch: int) -> None:
        self.target = GPUTarget("cuda", arch, 32)

    def get_current_device(self) -> int:
        return self.target.arch  # kernels are kept by device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self.target


@contextmanager
def simulated_gpu(arch: int) -> Iterator[list[Launch]]:
    """Compile what is launched, for an architecture such as 90, and list the launches."""
    launches = []
    compile_only = JITFunction.run

    def run(kernel: JITFunction, *args: Any, grid: tuple[int, ...], warmup: bool, **kwargs: Any) -> None:
        compiled = compile_only(kernel, *args, grid=grid, warmup=True, **kwargs)
        launches.append(Launch(kernel.__name__, grid, kernel.signature.bind(*args).arguments, compiled))

    with mock.patch.object(JITFunction, "run", run), mock.patch.object(triton.runtime.driver, "_active", Driver(arch)):
        yield launches


def plans() -> dict[str, tuple[list[tuple[int, int]], int]]:
    """Steps: the tokens in the cache and the new tokens of each sequence, single tokens first, and the drafts of each."""
    decodes = [(100 + 37 * i, 1) for i in range(16)]
    return {
        "prefill": ([(0, 1), (0, 1100)], 0),
        "chunks and decodes": ([*decodes, (64, 128), (0, 17)], 0),
        "decode": (decodes, 0),
        "one row": ([(3000, 1)], 0),
        "drafts": (decodes, 8),
        "drafts of one sequence": ([(3000, 1)], 3),
    }


def run_steps(name: str, dtype: torch.dtype, quantizations: Iterable[str] = BITS, *, block_size: int = 16) -> None:
    """Run the steps of a model of MODELS, also with rounded weights."""
    model_class, config = MODELS[name]
    with torch.device("meta"):
        model = model_class(model_class.Config.from_hf(COMMON | config)).to("meta", dtype)
    for module in model.modules():
        if isinstance(module, RotaryEmbedding):
            module.float()  # as the loader leaves it
    models = [compile_model(model, is_invariant=is_invariant).model for is_invariant in (False, True)]
    if name not in WITH_EXPERTS and dtype is not torch.float32:
        models += [compile_model(model, quantization).model for quantization in quantizations]
    sizes: dict[str, Any] = {
        "num_layers": 1, "num_blocks": 4096, "block_size": block_size, "num_kv_heads": model.config.num_key_value_heads,
        "device": "meta",
    }  # fmt: skip
    cache = KVCache(**sizes, head_dim=model.config.head_dim, dtype=dtype)
    int8_cache = SplitInt8Cache(**sizes, head_dim=model.config.head_dim + SCALE_BYTES, dtype=torch.int8)
    for lengths, num_drafts in plans().values():
        batch = ForwardBatch.build(_plan(lengths, num_drafts, block_size), block_size, torch.device("cpu"))
        attend, in_int8 = (TritonBackend().begin_step(each, batch.attention) for each in (cache, int8_cache))
        with torch.inference_mode():
            others = lambda *heads, **options: attend(*heads, **options)  # noqa: B023, E731  which is no backend's
            for model, each in (*itertools.product(models, (attend, others)), (models[0], in_int8)):
                model(batch.input_ids.to("meta"), batch.positions.to("meta"), each)
    blocks = torch.empty(2, dtype=torch.int64, device="meta")
    q, angles = torch.empty(3, 2, 256, dtype=dtype, device="meta"), torch.empty(3, 1, 64, dtype=dtype, device="meta")
    weight = torch.empty(256, dtype=dtype, device="meta")
    rotate_and_store(q, Rotation(angles, angles, weight, factor=0.9, zero_centred=True))  # as Qwen3.5's heads, and a factor
    copy_blocks(torch.empty(2, *cache.pages[0].shape, dtype=dtype, device="meta"), blocks, blocks)
    run_adapters(model.config.hidden_size, dtype)
    rows = {name: torch.empty(3, dtype=DTYPES[name], device="meta") for name in (*ROWS, "seeds", "positions")}
    u, seed, position = (rows.pop(name) for name in ("u", "seeds", "positions"))
    few = {name: rows[name] for name in ("temperature", "top_k", "top_p")}
    for vocab_size, columns, uniform in ((COMMON["vocab_size"], rows, u), (151_936, few, (seed, position))):
        logits = torch.empty(3, vocab_size, dtype=dtype, device="meta")
        choose(logits, ParameterColumns(**columns), uniform)


def run_adapters(num_in: int, dtype: torch.dtype) -> None:
    """Add adapters of rank 64 to three layers, for 40 rows."""
    mapping, linears = AdapterMapping(4, 64), [nn.Linear(num_in, size, device="meta") for size in (num_in, 320, 320)]
    for linear in linears:
        AdaptedLinear(linear, mapping)
    updates = LowRankUpdates(linears, torch.empty(1, dtype=dtype, device="meta"))
    mapping.kernels = RowIndices(40, torch.device("meta"))
    updates(*(torch.empty(40, size, dtype=dtype, device="meta") for size in (num_in, num_in + 640)))


def _plan(lengths: list[tuple[int, int]], num_drafts: int, block_size: int) -> StepPlan:
    scheduled = []
    for i, (num_cached, num_new) in enumerate(lengths):
        total = num_cached + num_new
        seq = Sequence(str(i), [1] * total, SamplingParams(), seed=0, max_num_tokens=total + 1)
        seq.num_computed_tokens = num_cached
        seq.block_table = list(range(-(-(total + num_drafts) // block_size)))
        scheduled.append(ScheduledSequence(seq, num_new, (1,) * num_drafts))
    return StepPlan(tuple(scheduled))


def resources(compiled: Any) -> dict[str, int]:
    """Registers of a thread, bytes that are spilled, and shared memory of a program, as the assembler reports them."""
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder, "kernel.cubin")
        cubin.write_bytes(compiled.asm["cubin"])
        tool = triton.knobs.nvidia.cuobjdump.path
        report = subprocess.run([tool, "--dump-resource-usage", cubin], capture_output=True, text=True, check=True).stdout
    [(registers, stack)] = re.findall(r"REG:(\d+) STACK:(\d+)", report)
    return {
        "registers": int(registers),
        "spilled": int(stack),
        "shared": compiled.metadata.shared,
        "warps": compiled.metadata.num_warps,
    }


def compile_all(
    arch: int, dtypes: list[torch.dtype], models: list[str], quantizations: Iterable[str]
) -> dict[tuple[str, str, str], dict[str, int]]:
    """Compile the launches of models and check them. Return a kernel's largest resources by (kernel, dtype, model).

    A kernel that reads or writes a cache of 8 bits counts as another one.

    Raises:
        AssertionError: a kernel that needs more than the architecture has, is launched with wrong arguments, or not at all.
    """
    found: dict[tuple[str, str, str], dict[str, int]] = {}
    for dtype in dtypes:
        for name in models:
            with simulated_gpu(arch) as launches:
                run_steps(name, dtype, quantizations)
            for launch in launches:
                launch.check(dtype)
            missing = set(REACH) - {launch.kernel for launch in launches}
            missing -= {"_gate_kernel"} if name in WITH_EXPERTS else OF_EXPERTS
            missing -= OF_INTEGERS if name in WITH_EXPERTS or dtype is torch.float32 else set()
            if dtype is torch.float32 or arch < 80:  # without tensor cores
                missing -= {"_linear_kernel", "_decode_attention_kernel"}
            assert not missing, f"{name} launches no {missing}"
            for launch in {launch.compiled.hash: launch for launch in launches}.values():
                kernel = launch.kernel + " of int8" * (launch.arguments.get("k_scales") is not None)
                key = kernel, str(dtype).removeprefix("torch."), name
                used = resources(launch.compiled)
                found[key] = {part: max(count, found.get(key, used)[part]) for part, count in used.items()}
                assert used["shared"] <= 1024 * KB_OF_SHARED_MEMORY[arch], (key, used)
                assert used["spilled"] <= MAX_SPILLED, (key, used)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", type=int, choices=KB_OF_SHARED_MEMORY, action="append")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], action="append")
    parser.add_argument("--model", choices=MODELS, action="append")
    parser.add_argument("--quantization", choices=BITS, action="append")
    args = parser.parse_args()
    archs = args.arch or list(KB_OF_SHARED_MEMORY)
    dtypes = [getattr(torch, name) for name in args.dtype or ("bfloat16", "float32")]
    found = {arch: compile_all(arch, dtypes, args.model or list(MODELS), args.quantization or BITS) for arch in archs}
    print(f"Triton {triton.__version__}. Registers of a thread / KB of shared memory, + bytes spilled to memory.\n")
    print("| kernel | dtype | model |", " | ".join(f"sm_{arch}" for arch in archs), "|")
    print("|---|---|---|" + "---|" * len(archs))
    for key in dict.fromkeys(key for arch in archs for key in found[arch]):
        cells = []
        for arch in archs:
            used = found[arch].get(key)
            spilled = f" + {used['spilled']}" if used and used["spilled"] else ""
            cells.append(f"{used['registers']} / {used['shared'] / 1024:.0f}{spilled}" if used else "")
        print("|", " | ".join([f"`{key[0].strip('_')}`", *key[1:], *cells]), "|")


if __name__ == "__main__":
    main()
