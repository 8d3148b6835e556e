"""Counts that are recorded in a file in tests/counts, because they are equal in every run where times are not.

A file has the circumstances, such as the compiler, with which counts may be compared, and the counts by their names.
"""

import json
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "counts"
MOST_MORE, MOST_LESS = 0.03, 0.10  # of the recorded count


def read(name: str) -> tuple[dict[str, str], dict[str, int]]:
    """The circumstances and the counts of a file."""
    record = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return record["circumstances"], record["counts"]


def write(name: str, circumstances: dict[str, str], counts: dict[str, int]) -> None:
    """Renew a file."""
    record = {"circumstances": circumstances, "counts": dict(sorted(counts.items()))}
    (FOLDER / f"{name}.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def complaints(recorded: dict[str, int], counted: dict[str, int], renewal: str) -> list[str]:
    """What is wrong with counts. None may be 3% above its record, and one that is more than 10% below asks for a new record.

    Args:
        renewal: the command that renews the file.
    """
    found = []
    for name in sorted(recorded.keys() | counted.keys()):
        before, now = recorded.get(name), counted.get(name)
        if before is None or now is None:
            found.append(f"{name} is {'not recorded' if before is None else 'recorded and not counted'}: {renewal}")
        elif now > before * (1 + MOST_MORE):
            found.append(f"{name} was {before:,} and is {now:,}. If there is a reason, which the commit says: {renewal}")
        elif now < before * (1 - MOST_LESS):
            found.append(f"{name} was {before:,} and is only {now:,}, which a new record keeps: {renewal}")
    return found
