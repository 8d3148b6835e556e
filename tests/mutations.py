"""What are the tests worth? Change a place of the package, and run the tests that execute it until one of them fails.

    python -m tests.mutations record                             which test executes which lines, in build/mutations: an hour
    python -m tests.mutations try nanoinfer/scheduling --number 40 --seed 1
    python -m tests.mutations try nanoinfer/scheduling --tests tests/scheduling       what these tests alone find

A change is one of those of tests.lab.testing.mutants, in the body of a function. The quickest tests go first. Each change is
tried in a fork of a process that has imported everything: the functions get the changed code, so nothing is imported again.
A test that fails is run without the change too, and does not count if it fails there. What no test finds within the limit
is printed, and stands in build/mutations/SEED.json. pytest-cov is needed: make coverage installs it.
"""

import argparse
import ast
import contextlib
import gc
import json
import os
import random
import resource
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from types import CodeType, FunctionType

import pytest
from _pytest.runner import runtestprotocol

from tests.lab.testing.mutants import Change
from tests.seconds import read

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "build/mutations"
SECONDS = 120  # of the CPU, which the tests of one change may take
IS_FUNCTION = 1  # the flag CO_OPTIMIZED


@dataclass
class Mutant:
    """A change, the tests that execute its place, the quickest first, and the one that found it."""

    file: str
    number: int
    line: int
    what: str
    tests: list[str] = field(default_factory=list, repr=False)
    found_by: str | None = None
    num_run: int = 0


def choose(paths: Sequence[str], number: int, seed: int) -> list[Mutant]:
    """Choose changes in the bodies of functions."""
    files = sorted(str(file) for path in paths for file in ([path] if path.endswith(".py") else Path(path).rglob("*.py")))
    every = []
    for file in files:
        change = Change()
        change.visit(ast.parse(Path(file).read_text(encoding="utf-8")))
        every += [Mutant(file, number, line, what) for number, (_, line, what) in enumerate(change.places)]
    random.Random(seed).shuffle(every)
    return [*islice((one for one in every if any(pairs_of_codes(one))), number)]


def is_in_kernel(tree: ast.AST, line: int) -> bool:
    """Whether a line is one of a Triton kernel: its source is compiled, so changed codes would change nothing."""
    functions = (one for one in ast.walk(tree) if isinstance(one, ast.FunctionDef))
    return any(
        one.lineno <= line <= (one.end_lineno or line) and any("triton.jit" in ast.unparse(by) for by in one.decorator_list)
        for one in functions
    )


def pairs_of_codes(mutant: Mutant) -> Iterator[tuple[CodeType, CodeType]]:
    """The codes of the functions that a change changes, before and after it, the outer ones first."""
    source = Path(mutant.file).read_text(encoding="utf-8")
    changed = ast.fix_missing_locations(Change(mutant.number).visit(ast.parse(source)))
    if is_in_kernel(changed, mutant.line):
        return
    pairs = [(compile(source, mutant.file, "exec"), compile(changed, mutant.file, "exec"))]
    while pairs:
        before, after = pairs.pop()
        if before != after and before.co_flags & IS_FUNCTION:
            yield before, after
        codes = [[one for one in code.co_consts if isinstance(one, CodeType)] for code in (before, after)]
        pairs += [(old, new) for old, new in zip(*codes, strict=False) if old != new and old.co_name == new.co_name]


def live_functions() -> dict[tuple[str, str], list[FunctionType]]:
    """All functions, by file and qualified name. conftest exempts them from garbage collection, which hides them."""
    functions = defaultdict(list)
    gc.unfreeze()
    for one in gc.get_objects():
        if type(one) is FunctionType:
            functions[one.__code__.co_filename, one.__code__.co_qualname].append(one)
    gc.freeze()
    return functions


def apply(mutant: Mutant, functions: dict[tuple[str, str], list[FunctionType]]) -> bool:
    """Give the changed code to every function that has the code. Returns whether there is one."""
    is_applied = False
    for before, after in pairs_of_codes(mutant):
        same = [
            one
            for one in functions[str(ROOT / mutant.file), before.co_qualname]
            if one.__code__.co_freevars == after.co_freevars and one.__code__.co_argcount == after.co_argcount
        ]
        distances = [abs(one.__code__.co_firstlineno - before.co_firstlineno) for one in same]
        for one, distance in zip(same, distances, strict=True):
            if distance == min(distances):
                one.__code__ = after
                is_applied = True
    return is_applied


class Trial:
    """A pytest plugin that runs the mutants instead of all tests."""

    def __init__(self, mutants: list[Mutant], jobs: int):
        self.mutants, self.jobs = mutants, jobs
        self.sound: set[str] = set()  # tests that pass without a change, in a process of their own
        self.broken: set[str] = set()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self.items = {item.nodeid: item for item in session.items}
        self.functions = live_functions()
        waiting, running = self.mutants[::-1], {}
        FOLDER.mkdir(parents=True, exist_ok=True)
        while waiting or running:
            while waiting and len(running) < self.jobs:
                mutant = waiting.pop()
                mutant.tests = [one for one in mutant.tests if one in self.items and one not in self.broken]
                running[self.fork(mutant, mutant.tests)] = mutant
            pid, _ = os.wait()
            mutant = running.pop(pid)
            mutant.found_by, mutant.num_run = self.result(pid)
            if mutant.found_by in self.items and not self.is_sound(mutant.found_by):
                waiting.append(mutant)
                continue
            say = mutant.found_by or ("NOT FOUND" if mutant.num_run >= 0 else "not tried")
            place = f"{mutant.file}:{mutant.line} {mutant.what}"
            print(f"{say} ({mutant.num_run} of {len(mutant.tests)} run): {place}", file=sys.__stderr__, flush=True)
        return True

    def is_sound(self, test: str) -> bool:
        """Whether a test passes without a change, in a process of its own."""
        if test not in self.sound | self.broken:
            pid = self.fork(None, [test])
            os.waitpid(pid, 0)
            (self.broken if self.result(pid)[0] else self.sound).add(test)
        return test in self.sound

    def result(self, pid: int) -> tuple[str | None, int]:
        """The test that failed in a child that has ended, and how many ran there: -1 if no function has the changed code."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # what its tests have started
        file = FOLDER / f"{pid}.json"
        if not file.exists():
            return "a crash", 0
        result = json.loads(file.read_text())
        file.unlink()
        return result[0], result[1]

    def fork(self, mutant: Mutant | None, tests: list[str]) -> int:
        if pid := os.fork():
            return pid
        try:
            os.setsid()
            nowhere = os.open(os.devnull, os.O_RDWR)
            for number in range(3):
                os.dup2(nowhere, number)
            is_ready = mutant is None or apply(mutant, self.functions)
            result = self.first_failure([self.items[one] for one in tests]) if is_ready else (None, -1)
            (FOLDER / f"{os.getpid()}.json").write_text(json.dumps(result))
        finally:
            os._exit(0)

    def first_failure(self, items: list[pytest.Item]) -> tuple[str | None, int]:
        def stop(*_: object) -> None:
            raise TimeoutError("the change makes this test endless")

        signal.signal(signal.SIGPROF, stop)
        signal.signal(signal.SIGALRM, stop)
        for number, (item, following) in enumerate(zip(items, [*items[1:], None], strict=False)):
            used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
            if number and sum(one.ru_utime + one.ru_stime for one in used) > SECONDS:
                return None, number
            signal.setitimer(signal.ITIMER_PROF, 60)
            signal.setitimer(signal.ITIMER_REAL, 240)
            try:
                failed = any(report.failed for report in runtestprotocol(item, log=False, nextitem=following))
            except BaseException:
                failed = True
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.setitimer(signal.ITIMER_REAL, 0)
            if failed:
                return item.nodeid, number + 1
        return None, len(items)


def record(tests: Sequence[str]) -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pytest", *"-n auto --dist worksteal --cov --cov-context=test --cov-report=".split()]
    environment = os.environ | {"COVERAGE_FILE": str(FOLDER / "coverage")}
    subprocess.run([*command, f"--junitxml={FOLDER / 'junit.xml'}", *tests], env=environment, cwd=ROOT, check=False)


def add_tests(mutants: Sequence[Mutant], coverage_file: Path, junit: Path) -> None:
    """Add the tests that execute the place, the quickest first, those of a file together."""
    from coverage import CoverageData

    data = CoverageData(str(coverage_file))
    data.read()
    seconds = {f"{file}::{name}": took for file, name, took in read(junit)}
    of_file = defaultdict(list)
    for test in seconds:
        of_file[test.partition("::")[0]].append(test)
    for file in {mutant.file for mutant in mutants}:
        recorded = next((one for one in data.measured_files() if one.endswith("/" + file)), None)
        contexts = data.contexts_by_lineno(recorded) if recorded else {}
        starts = {}
        for node in ast.walk(ast.parse(Path(file).read_text(encoding="utf-8"))):
            if isinstance(node, ast.stmt) and not hasattr(node, "body"):
                starts.update(dict.fromkeys(range(node.lineno, (node.end_lineno or node.lineno) + 1), node.lineno))
        for mutant in mutants:
            if mutant.file == file:
                lines = {mutant.line, starts.get(mutant.line, mutant.line)}
                named = {one for line in lines for one in contexts.get(line, ()) if one}
                tests = {one.rpartition("|")[0] for one in named}
                # A fixture of a file is set up for the first test that asks for it, and serves the others.
                shared = {one.partition("::")[0] for one in named if one.endswith("|setup")}
                others = {test for one in shared for test in of_file[one]} - tests
                mutant.tests = [*quick_first(tests, seconds), *quick_first(others, seconds)]


def quick_first(tests: set[str], seconds: dict[str, float]) -> list[str]:
    def key(test: str) -> tuple[int, str, float]:
        took = seconds.get(test, 9.0)
        return sum(took > step for step in (0.05, 0.2, 1, 5)), test.partition("::")[0], took

    return sorted(tests, key=key)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["record", "try"])
    parser.add_argument("paths", nargs="*", help="record: tests; try: files and folders of the package")
    parser.add_argument("--tests", nargs="*", default=[], help="only these tests")
    parser.add_argument("--number", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--coverage", type=Path, default=FOLDER / "coverage")
    parser.add_argument("--junit", type=Path, default=FOLDER / "junit.xml")
    given = parser.parse_args()
    if given.what == "record":
        record(given.paths)
        return 0
    if not given.junit.exists():
        parser.error(f"there is no {given.junit}; python -m tests.mutations record writes it")
    chosen = choose(given.paths, given.number, given.seed)
    add_tests(chosen, given.coverage, given.junit)
    trial = Trial(chosen, given.jobs)
    pytest.main(["-s", "-q", "-n", "0", "-p", "no:cacheprovider", *given.tests], plugins=[trial])
    tried = [one for one in chosen if one.num_run >= 0]
    num_found = sum(one.found_by is not None for one in tried)
    (FOLDER / f"{given.seed}.json").write_text(
        json.dumps([asdict(one) | {"tests": len(one.tests)} for one in chosen], indent=1)
    )
    print(f"seed {given.seed}: {num_found} of {len(tried)} changes are found ({num_found / max(len(tried), 1):.1%})")
    print("Tests that fail alone without a change:", *sorted(trial.broken))
    return 0


if __name__ == "__main__":
    sys.exit(main())
