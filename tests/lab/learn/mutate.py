"""Change the engine's version of every task at random, and count how many changes the checks find.

`python -m tests.lab.learn.mutate [NUMBER] [SEED]` prints those that are not found.
"""

import random
import signal
import sys

from nanoinfer.lab.learn.check import check
from nanoinfer.lab.learn.track import TRACK, find
from tests.helpers.mutation import mutants

IGNORED = frozenset({"tracer", "state_slots", "stored", "_has_windows"})  # the files say that a learner's version need not
SECONDS = 5
# Changes after which the function does the same, or what its docstring leaves open.
SAME: dict[tuple[str, str], str] = {}


def changes() -> list[tuple[str, str, str]]:
    """Return the task, the description and the source of every change."""
    return [(task.name, *change) for task in TRACK for change in mutants(task.function.source, IGNORED)]


def is_found(name: str, source: str) -> bool:
    """Whether the task's cases refuse this source."""

    def stop(number: int, frame: object) -> None:
        raise TimeoutError

    function = find(name).function
    names: dict[str, object] = {}
    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        exec(f"{function.imports}\n{source}", names)
        return check(find(name), names[function.name]) is not None
    except TimeoutError:
        return True
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def main(number: int = 200, seed: int = 0) -> float:
    """Print the changes that are not found. Returns the share of those that are, without those of SAME."""
    chosen = random.Random(seed).sample(everything := changes(), min(number, len(everything)))
    tried = [change for change in chosen if change[:2] not in SAME]
    missed = [change for change in tried if not is_found(change[0], change[2])]
    print(f"seed {seed}: {len(chosen)} of {len(everything)} changes, {len(chosen) - len(tried)} of which change nothing")
    for name, description, _ in missed:
        print(f"  missed: {name}, {description}")
    share = 1 - len(missed) / len(tried)
    print(f"  {len(tried) - len(missed)} of {len(tried)} are found ({share:.1%})")
    return share


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
