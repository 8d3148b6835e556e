"""Play kernels without a GPU.

python -m tests.played_gpu --kernel decode      # what a warp does, by the lines of the kernel's source
python -m tests.played_gpu --case "store bfloat16" "attention float16 64 window"      # each result is a line of JSON
"""

import argparse
import json

from tests.played_gpu import cases, plays  # before triton is imported
from tests.played_gpu.table import Table

KERNELS = {
    "store": "store", "rms_norm": "rms_norm", "silu_mul": "silu_mul", "rotate": "rotate",
    "prefill": "attention", "decode": "attention", "merge": "attention",
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernel", choices=KERNELS)
    parser.add_argument("--dtype", choices=cases.DTYPES, default="bfloat16")
    parser.add_argument("--case", choices=cases.CASES, nargs="+", default=[])
    args = parser.parse_args()
    for name in args.case:
        share_of_tolerance, num_launches = cases.run(name)
        print(json.dumps({"case": name, "share_of_tolerance": share_of_tolerance, "num_launches": num_launches}), flush=True)
    if args.kernel:
        table = Table(f"_{args.kernel}_kernel")
        case = f"{KERNELS[args.kernel]} {args.dtype}" + (" 64 plain" if KERNELS[args.kernel] == "attention" else "")
        with plays.played_gpu(observe=table.observe):
            cases.CASES[case]()
        print(table)


if __name__ == "__main__":
    main()
