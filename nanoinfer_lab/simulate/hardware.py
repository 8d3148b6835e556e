"""Machines that a simulation can run on: by name from data sheets, or measured with `nanoinfer bench roofline --json`.

The limits of a data sheet are upper bounds, which kernels do not reach. So such a simulation is what a machine can
give at best.
"""

import json
import statistics
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from nanoinfer.errors import InvalidValueError


@dataclass(frozen=True, slots=True)
class Overheads:
    """Seconds that are measured besides the model's: Python, sampling, HTTP."""

    per_step_s: float = 0.0  # of a step
    per_sequence_s: float = 0.0  # of each sequence in a step
    per_request_s: float = 0.0  # from the arrival of a request until the scheduler has it. Requests take it one after another
    per_answer_s: float = 0.0  # from the end of a step until a client has its tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """A machine, or a device of several equal ones."""

    name: str
    bandwidth: float  # bytes per second read from memory
    # dtype -> operations per second of matrix products, without sparsity. A multiplication and an addition are two
    rates: dict[str, float]
    memory_bytes: int  # the size of the memory
    overlap: float = 1.0  # the share of the shorter of reading and computing a part that runs beside the longer, in 0 .. 1
    # Whether the cache may take what weights leave of the memory. On a CPU it takes at most 4 GiB, as in the engine
    is_gpu: bool = True
    link_bandwidth: float = 0.0  # bytes per second from a device to another in one direction. 0: there is no other device
    link_latency_s: float = 0.0  # seconds that a message, or a collective operation of few bytes, takes
    overheads: Overheads = field(default_factory=Overheads)  # what is measured besides
    source: str = ""  # where the figures are from

    @classmethod
    def read(cls, path: Path) -> "Hardware":
        """Read what `nanoinfer bench roofline --json` measured, or what `nanoinfer bench calibrate` wrote.

        Raises: InvalidValueError: the file cannot be read, or has another form.
        """
        try:
            report = json.loads(path.read_text(encoding="utf-8-sig"))
            if "gemm_GFLOP_per_s" in report:
                return _of_roofline(report, source=str(path))
            return cls(**report | {"overheads": Overheads(**report["overheads"])})
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise InvalidValueError(
                f"hardware must be {', '.join(HARDWARE)}, or a file that `nanoinfer bench roofline --json` or `nanoinfer "
                f"bench calibrate` wrote, got {path} ({error})"
            ) from error

    @classmethod
    def named(cls, name: str) -> "Hardware":
        """Return one of HARDWARE, or read the file of this name. Raises: as read."""
        return HARDWARE[name] if name in HARDWARE else cls.read(Path(name))


def _of_roofline(report: dict[str, Any], source: str) -> Hardware:
    """Take the overheads of steps from the decode steps of the report: what they took besides the least time."""
    decodes = [phase for phase in report["phases"] if phase["num_decoding"]]
    num_seqs = [phase["num_decoding"] for phase in decodes]
    beyond_s = [(phase["measured_ms"] - phase["least_ms"]) / 1e3 for phase in decodes]
    per_sequence_s = max(statistics.linear_regression(num_seqs, beyond_s).slope, 0.0)
    per_step_s = statistics.mean(beyond_s) - per_sequence_s * statistics.mean(num_seqs)
    return Hardware(
        name="this machine",
        bandwidth=report["bandwidth_GB_per_s"] * 1e9,
        rates={dtype: rate * 1e9 for dtype, rate in report["gemm_GFLOP_per_s"].items()},
        memory_bytes=report["memory_bytes"],
        is_gpu=report["device"] != "cpu",
        overheads=Overheads(per_step_s=max(per_step_s, 0.0), per_sequence_s=per_sequence_s),
        source=source,
    )


# The host's work for a step, for which an H100 waits: 683 tokens per second in A, 19,433 in B64. See BENCHMARKS.md, "One NVIDIA
# H100".
_OF_A_GPU = Overheads(per_step_s=1.44e-3, per_sequence_s=29e-6)
# A CPU's work for a step of one row besides the forward pass: benchmarks/history.jsonl, "A step without its forward pass".
_OF_A_CPU = Overheads(per_step_s=0.3e-3)
# NCCL takes 6 us for two H100 (NVIDIA/nccl issue 1259), and more ranks take longer.
_NVLINK_S = 10e-6

_H100 = Hardware(
    name="H100",
    bandwidth=3.35e12,
    rates={"bfloat16": 989e12, "float16": 989e12, "float32": 67e12},
    memory_bytes=80 * 10**9,
    link_bandwidth=450e9,  # half of the 900 GB/s of both directions
    link_latency_s=_NVLINK_S,
    overheads=_OF_A_GPU,
    source="https://www.nvidia.com/en-us/data-center/h100/, the SXM version",
)

HARDWARE = {
    hardware.name: hardware
    for hardware in (
        _H100,
        replace(  # the same processor with another memory
            _H100,
            name="H200",
            bandwidth=4.8e12,
            memory_bytes=141 * 10**9,
            source="https://www.nvidia.com/en-us/data-center/h200/, the SXM version",
        ),
        Hardware(
            name="MI300X",
            bandwidth=5.3e12,
            rates={"bfloat16": 1307e12, "float16": 1307e12, "float32": 163e12},
            memory_bytes=192 * 10**9,
            link_bandwidth=448e9,  # seven links of 64 GB/s in one direction
            link_latency_s=_NVLINK_S,  # assumed
            overheads=_OF_A_GPU,  # assumed: never measured
            source="https://www.amd.com/en/products/accelerators/instinct/mi300/mi300x.html",
        ),
        Hardware(
            name="M4",
            bandwidth=120e9,
            rates={"float32": 2.9e12, "bfloat16": 2.9e12, "float16": 2.9e12},  # of its GPU, measured in float32
            memory_bytes=16 * 2**30,
            is_gpu=False,
            overheads=_OF_A_CPU,
            source="https://www.apple.com/newsroom/2024/05/apple-introduces-m4-chip/, rates: https://arxiv.org/abs/2502.05317",
        ),
        Hardware(
            name="laptop",
            bandwidth=89.6e9,  # two channels of DDR5-5600
            rates={"float32": 845e9, "bfloat16": 1690e9},  # 8 cores of 3.3 GHz, 32 or 64 operations per cycle
            memory_bytes=16 * 2**30,
            is_gpu=False,
            overheads=_OF_A_CPU,
            source="AMD Ryzen 7 7840U, https://www.amd.com/en/products/processors/laptop/ryzen/7000-series/amd-ryzen-7-7840u.html",
        ),
    )
}
