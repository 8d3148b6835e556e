"""Solutions of notebook d9."""

import re
import sys
from pathlib import Path

import numpy as np
import torch
from definitions import definitions

sys.path.insert(0, str(Path(__file__).parents[2]))  # where the folder tests is
notebook = definitions("d9_inside_a_gpu_kernel")

# Exercise 1: the largest number of a warp

body = "ld.global.b32 %r5, [%rd1];\n"
for bit in (1, 2, 4, 8, 16):
    body += f"shfl.sync.bfly.b32 %r6, %r5, {bit}, 31, -1;\nmax.s32 %r5, %r5, %r6;\n"
body += "st.global.b32 [%rd2], %r5;"
numbers = torch.randint(-1000, 1000, (32, 4), dtype=torch.int32, generator=torch.Generator().manual_seed(0))
largest = notebook.emulate(body, numbers)[:, 0]
assert (largest == numbers[:, 0].max()).all()
print(f"the largest is {largest[0]}, after {len(body.splitlines()) - 2} instructions")

# Exercise 2: a column of a matrix

for width in (32, 33, 34, 36):
    needed, taken = notebook.wavefronts(4 * width * np.arange(32), 4)
    print(f"rows of {width} numbers: {taken} turns")
    assert taken == np.gcd(width, 32)
# A row of 33 numbers begins one bank after the row before, so a column meets every bank once. Any odd width does. An even
# width comes back to the same bank before the column ends.

# Exercise 3: a barrier of a warp

source = torch.arange(256, dtype=torch.int32).view(64, 4)
for distance in (1, 16, 32):
    body = notebook.EXCHANGE.replace("bar.sync 0;", "bar.warp.sync -1;").replace("512", str(16 * distance))
    found = notebook.found_by(notebook.emulate, body, source, 64).partition(":")[0]
    print(f"threads that differ by {distance}: {found}")
    assert (found == "nothing") == (distance < 32)
# It is enough inside a warp. A thread whose number differs by 32 is in the other warp, which nobody has waited for.

# Exercise 4: other bits

launch = notebook.emulate_decode()
ptx = launch.compiled.asm["ptx"]
right = notebook.error_of(launch)
results = []
for match in re.finditer(r"(and\.b32\s+%r\d+, %r\d+), 112;", ptx):
    changed = ptx[: match.start()] + f"{match[1]}, 96;" + ptx[match.end() :]
    results.append(notebook.found_by(notebook.emulation.emulate, launch, changed).partition(", in `")[0])
    print(f"the emulator finds: {results[-1]}")
    if results[-1] == "nothing":
        print(f"difference from fp64: {notebook.error_of(launch):.2f} instead of {right:.4f}")
        assert notebook.error_of(launch) > 100 * right
assert "nothing" in results
# The swizzle is where the emulator finds nothing. Keys and values lie in other places than they are read from, but all of these
# are places of shared memory that were written. Only the result shows it. The other place decides which threads store m.
