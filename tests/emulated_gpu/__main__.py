"""Emulate kernels without a GPU.

python -m tests.emulated_gpu --kernel decode      # what a warp does, by the lines of the kernel's source
python -m tests.emulated_gpu --case "store bfloat16" "decode float16 64 window" --arch 80 90      # a line of JSON for each
python -m tests.emulated_gpu --fault "decode: no wait for the keys"      # an injected fault, and what found it
"""

import argparse
import itertools
import json

import torch

from tests.emulated_gpu.emulation import emulated_gpu  # isort: skip  # switches the interpreter off before triton is imported
from tests.emulated_gpu import faults
from tests.emulated_gpu.cases import CASES, DTYPES
from tests.emulated_gpu.table import Table

KERNELS = {  # a kernel -> its case, by the dtype
    "store": "store {}", "rms_norm": "rms_norm {}", "gate": "gate {}", "copy": "copy {}",
    "prefill": "attention {} 64 plain", "decode": "attention {} 64 plain", "merge": "attention {} 64 plain",
    "linear": "linear {} plain", "decode_linear": "decode_linear {} gated with norm", "angles": "angles {}",
    "integer_linear": "integer_linear {} int8 gated with norm", "widen": "widen {} int4",
    "decode_attention": "decode_attention {} 64 plain", "bound": "draw ties",
    "route": "route {}", **dict.fromkeys(("few_gated", "few_down", "list", "grouped", "sum_pairs"), "experts {} silu"),
    "largest": "choose ties {}", "sum": "choose ties {}", "choose": "choose ties {}",
    "shrink": "lora {}", "expand": "lora {}",
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernel", choices=KERNELS)
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--arch", type=int, choices=[75, 80, 90], nargs="+", default=[80], help="of --case")
    parser.add_argument("--case", metavar="CASE", help="a name in cases.py", choices=CASES, nargs="+", default=[])
    parser.add_argument("--fault", metavar="FAULT", help="a name in faults.py", choices=faults.FAULTS, nargs="+", default=[])
    args = parser.parse_args()
    torch.set_num_threads(1)  # tensors are tiny
    for arch, name in itertools.product(args.arch, args.case):
        with emulated_gpu(arch=arch) as launches:
            result = {"case": name, "arch": arch, "share_of_tolerance": CASES[name](), "num_launches": len(launches)}
        print(json.dumps(result), flush=True)
    for name in args.fault:
        print(json.dumps({"fault": name, "found": faults.found(name)}), flush=True)
    if args.kernel:
        table = Table(f"_{args.kernel}_kernel")
        case = KERNELS[args.kernel].format(args.dtype)
        if case not in CASES:
            parser.error(f"the kernel {args.kernel} is not launched for {args.dtype}")
        with emulated_gpu(observe=table.observe, arch=args.arch[0]):
            CASES[case]()
        print(table)


if __name__ == "__main__":
    main()
