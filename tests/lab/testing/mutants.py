"""Does the explorer find a wrong scheduler? Change a place of scheduler.py or block_manager.py, and explore the worlds.

    python -m tests.lab.testing.mutants                      every change: half an hour on two cores
    python -m tests.lab.testing.mutants --number 40          some, which the seed chooses
    python -m tests.lab.testing.mutants --only _start        those of a function

A change turns a comparison, + or -, and or or, not, or a number, or it removes a statement. Code that no world reaches is
left out: what is told to observers and users, and the blocks of beams, whose tests are elsewhere.
UNSEEN lists the changes that change no schedule.
Exit code 1: one of them is found, or fewer than 95% of the others are.
"""

import argparse
import ast
import os
import random
import resource
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from types import ModuleType

PACKAGE = Path(__file__).parents[3] / "nanoinfer"
FILES = "scheduling/scheduler.py", "scheduling/policies.py", "scheduling/block_manager.py"
SECONDS = 60  # of the CPU, after which a loop is taken to be endless. All worlds take 10
FEATURES = {"observer"}
FUNCTIONS = {"explain", "named_tables", "close", "num_blocks_for_forks", "scheduling_classes"}
PAIRS = (
    (ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.In, ast.NotIn), (ast.Is, ast.IsNot), (ast.Add, ast.Sub),
    (ast.And, ast.Or),
)  # fmt: skip
OTHER = {one: other for pair in PAIRS for one, other in (pair, pair[::-1])}

ALL_FREE = "self.block_manager.num_free_blocks == self.block_manager.num_blocks"
UNSEEN = {
    ("_start_waiting", f"not self.running and {ALL_FREE} -> not self.running or {ALL_FREE}"): "all are free when nothing runs",
    ("Scheduler", "False -> True"): "says which requests the engine refuses",
    ("PriorityScheduler", "True -> False"): "the same",
    ("PriorityScheduler", "reads_priority = True -> pass"): "the same",
    ("cache_finished_blocks", "num_full > num_cached -> num_full >= num_cached"): "without new full blocks nothing is added",
    ("BlockManager", "False -> True"): "cache_finished_blocks does nothing if no block was filled",
}


class Change(ast.NodeTransformer):
    """Visits the places that can change, and changes the one with the given number."""

    def __init__(self, number: int = -1):
        self.number, self.places, self.function = number, [], ""

    def visit(self, node: ast.AST) -> ast.AST:
        match node:
            case ast.FunctionDef(name=name) if name in FUNCTIONS:
                return node
            case ast.If(test=test) | ast.Expr(value=test) if any(
                getattr(part, "attr", "") in FEATURES for part in ast.walk(test)
            ):
                return node
            case ast.Assign(targets=[ast.Name(name)]) if name.isupper():  # a constant of the module
                return node
            case ast.Assert() | ast.Raise() | ast.arguments() | ast.AnnAssign() | ast.Call(func=ast.Name("dataclass")):
                return node
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                self.function = name
            case ast.Compare(ops=[operator]) if type(operator) in OTHER:
                return self.place(node, ast.Compare(node.left, [OTHER[type(operator)]()], node.comparators))
            case ast.BinOp(op=ast.Add() | ast.Sub()):
                return self.place(node, ast.BinOp(node.left, OTHER[type(node.op)](), node.right))
            case ast.BoolOp():
                return self.place(node, ast.BoolOp(OTHER[type(node.op)](), node.values))
            case ast.UnaryOp(op=ast.Not()):
                return self.place(node, node.operand)
            case ast.Constant(value=bool(value)):
                return self.place(node, ast.Constant(not value))
            case ast.Constant(value=int(value)):
                return self.place(node, ast.Constant(value + 1))
            case ast.Assign() | ast.AugAssign() | ast.Expr(value=ast.Call()):
                return self.place(node, ast.Pass())
        return self.generic_visit(node)

    def place(self, node: ast.AST, changed: ast.AST) -> ast.AST:
        self.places.append((self.function, node.lineno, f"{ast.unparse(node)} -> {ast.unparse(changed)}"))
        if len(self.places) - 1 == self.number:
            return ast.copy_location(changed, node)
        return self.generic_visit(node)


def changed(file: str, number: int) -> tuple[ast.AST, list[tuple[str, int, str]]]:
    """A file with a change, and all places: function, line, and what changes."""
    change = Change(number)
    tree = ast.fix_missing_locations(change.visit(ast.parse((PACKAGE / file).read_text(encoding="utf-8"))))
    return tree, change.places


def explore(file: str, number: int) -> None:
    """Explore all worlds with a changed file, in a process that has not imported it."""
    name = f"nanoinfer.{file.removesuffix('.py').replace('/', '.')}"
    module = sys.modules[name] = ModuleType(name)
    exec(compile(changed(file, number)[0], file, "exec"), module.__dict__)
    import_module("tests.lab.testing.worlds").check_all()


def is_found(file: str, number: int) -> bool:
    command = [sys.executable, "-m", "tests.lab.testing.mutants", "--run", file, str(number)]
    return subprocess.run(command, capture_output=True).returncode != 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int)
    parser.add_argument("--seed", type=int, default=random.randrange(1000))
    parser.add_argument("--only", help="the name of a function")
    parser.add_argument("--run", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.run:
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
        explore(given.run[0], int(given.run[1]))
        return 0
    every = [(file, number, *place) for file in FILES for number, place in enumerate(changed(file, -1)[1])]
    chosen = [one for one in every if given.only in (None, one[2])]
    random.Random(given.seed).shuffle(chosen)
    chosen = chosen[: given.number]
    if is_found(FILES[0], -1):
        sys.exit("the worlds find something wrong without any change; run pytest tests/lab/testing/test_schedules.py")
    print(f"{len(chosen)} of {len(every)} changes, seed {given.seed}")
    counts: Counter[str] = Counter()

    def check(one: tuple[str, int, str, int, str]) -> None:
        file, number, function, line, what = one
        kind = ("missed", "found")[is_found(file, number)] + ", and listed in UNSEEN" * ((function, what) in UNSEEN)
        counts[kind] += 1
        if kind != "found":
            print(f"{kind}: {file}:{line} {function}: {what}", flush=True)

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        [*threads.map(check, chosen)]
    print(*(f"{number} {kind}" for kind, number in counts.items()), sep="\n")
    num_visible = counts["found"] + counts["missed"]
    return int(counts["found"] < 0.95 * num_visible or counts["found, and listed in UNSEEN"] > 0)


if __name__ == "__main__":
    sys.exit(main())
