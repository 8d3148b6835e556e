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
# Changes after which the function returns the same.
SAME = {
    ("allocate", "line 16: num_before = len(table) [Assign 1]"): "only the tracer reads it",
    ("cache_blocks", "line 6: 0 [Constant 1]"): "fewer than 0 blocks are none",
    ("cache_blocks", "line 8: num_full > num_cached [Compare 0]"): "entering no block changes nothing",
    ("eight_bits", "line 3: (groups / scales.unsqueeze(2)).round() + 128 [BinOp 0]"): "-128 and +128 are equal in 8 bits",
    ("held_text", "line 7: len(self.text) - held [BinOp 0]"): "the loop only takes longer, and max() keeps the longest",
    ("make_room", "line 10: return False [Return 0]"): "None is as false",
    ("match_prefix", "line 8: 0 [Constant 1]"): "no prompt is empty",
    ("ngram_draft", "line 10: self._num_indexed = len(token_ids) [Assign 1]"): "it enters again what it has",
    ("ngram_draft", "line 15: -limit // len(followers) [BinOp 0]"): "more repetitions are cut off",
    ("repetition_penalty", "line 11: old > 0 [Compare 0]"): "0 / penalty is 0 * penalty",
    ("stop_string", "line 10: return None [Return 0]"): "the same statement",
    ("stop_string", "line 11: 1 [Constant 0]"): "any number beyond the text is",
    ("top_p", "line 3: True [Constant 0]"): "torch sorts rows this short in a stable way",
}


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
