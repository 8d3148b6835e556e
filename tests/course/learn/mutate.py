"""Change the engine's version of every task at random, and count how many changes the checks find.

`python -m tests.course.learn.mutate [NUMBER] [SEED]` prints those that are not found.
"""

import ast
import random
import sys

from nanoinfer_course.learn.check import check, limited
from nanoinfer_course.learn.track import TRACK, find
from tests.lab.testing.mutants import Change

SECONDS = 5
# Changes after which the function returns the same.
SAME = {
    ("cache_blocks", "line 8: num_full > num_cached -> num_full >= num_cached"): "entering no block changes nothing",
    (
        "eight_bits",
        "line 3: (groups / scales.unsqueeze(2)).round() + 128 -> (groups / scales.unsqueeze(2)).round() - 128",
    ): "-128 and +128 are equal in 8 bits",
    ("ngram_draft", "line 10: self._num_indexed = len(token_ids) -> pass"): "it enters again what it has",
    ("repetition_penalty", "line 11: old > 0 -> old >= 0"): "0 / penalty is 0 * penalty",
    ("stop_string", "line 11: 1 -> 2"): "any number beyond the text will do",
    ("top_p", "line 3: True -> False"): "torch sorts rows this short in a stable way",
}


def changes() -> list[tuple[str, str, str]]:
    """Return the task, the description and the source of every change."""
    found = []
    for task in TRACK:
        counting = Change()
        counting.visit(ast.parse(task.function.source))
        for number, (_, line, what) in enumerate(counting.places):
            changed = ast.fix_missing_locations(Change(number).visit(ast.parse(task.function.source)))
            found.append((task.name, f"line {line}: {what}", ast.unparse(changed)))
    return found


def is_found(name: str, source: str) -> bool:
    """Whether the task's cases refuse this source."""
    function = find(name).function
    find(name).cases()  # imports torch, for which the limit is not meant
    names: dict[str, object] = {}
    try:
        with limited(SECONDS):
            exec(f"{function.imports}\n{source}", names)
            return check(find(name), names[function.name]) is not None
    except TimeoutError:
        return True


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
