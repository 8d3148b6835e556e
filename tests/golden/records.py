"""The file plans.txt: a digest of the plans of each of the 2,000 loads, and counts of what happens in them.

In: the Records of plans.py. Out: the file's lines, and the names of the loads whose plans are not those of the file.
"""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from tests.golden.loads import KINDS, NAMES
from tests.golden.plans import record_of

FILE = Path(__file__).parent / "plans.txt"
HEADER = """\
# A digest of every step's plan in 2,000 random loads. docs/contributing.md says how to renew them.
# The base is the commit whose log-probabilities `make golden` compares with.
"""
COUNTED = {  # what a summary names -> the count of it in a Record
    "steps": "running", "preempted": "preempted", "hits": "hit", "evicted": "evicted", "forked": "forked", "copied": "copies",
    "aborted": "aborts", "failed": "failed", "released": "released", "kept": "kept", "read": "read", "drafted": "drafts",
    "accepted": "accepted", "beam searches": "beam searches",
}  # fmt: skip


def written() -> dict[str, str]:
    """Return {load: digest} of the file."""
    digests, kind = {}, ""
    for line in FILE.read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            kind = line[1 : line.index("]")]
        elif line and not line.startswith("#") and not line.startswith("base "):
            number, digest = line.split()
            digests[f"{kind}/{number}"] = digest
    return digests


def base() -> str:
    """Return the commit that the file names."""
    return next(line.split()[1] for line in FILE.read_text(encoding="utf-8").splitlines() if line.startswith("base "))


def write(commit: str) -> None:
    """Run all loads, and write the file. commit: the base."""
    lines = [f"{HEADER}base {commit}"]
    for kind, num_loads in KINDS.items():
        records = {number: record_of(f"{kind}/{number}") for number in range(num_loads)}
        counts = sum((record.counts for record in records.values()), Counter())
        counted = ", ".join(f"{counts[name]} {what}" for what, name in COUNTED.items() if counts[name])
        lines += ["", f"[{kind}] {num_loads} loads: {counted}"]
        lines += [f"{number} {record.digest}" for number, record in records.items()]
    FILE.write_text("\n".join(lines) + "\n", encoding="utf-8")


def different(names: Iterable[str] = NAMES, *, check: bool = False) -> list[str]:
    """Run loads, and return the names of those whose plans are not the file's. check: as record_of has it."""
    expected = written()
    return [name for name in names if record_of(name, check=check).digest != expected.get(name)]
