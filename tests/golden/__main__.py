"""Golden records: compare what the scheduler plans and what models compute with what they did before.

    python -m tests.golden plans                 the plans of 2,000 loads, with the digests in plans.txt. On any machine
    python -m tests.golden plans --write         renew the digests
    python -m tests.golden show windows/17       every step of a load
    python -m tests.golden compare               plans and log-probabilities of the working tree, with those of the base commit
    python -m tests.golden compare --base HEAD~3 --only plans

`compare` checks the base out into a temporary folder and runs the working tree's tests/golden with the package of each.
Exit code 1: anything differs.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import unified_diff
from pathlib import Path

import nanoinfer

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # after the package, which PYTHONPATH may name: that of another commit

from tests.golden import records  # noqa: E402
from tests.golden.plans import record_of  # noqa: E402

NUM_SHOWN = 30  # lines of a difference


def check_plans(names: list[str], *, check: bool) -> bool:
    different = records.different(names, check=check)
    for kind, number in Counter(name.partition("/")[0] for name in different).items():
        print(f"{kind}: {number} loads have other plans than those of plans.txt")
    if different:
        print(f"python -m tests.golden compare --only plans shows the first step that differs, such as of {different[0]}")
    else:
        print(f"{len(names)} loads: the plans are those of plans.txt")
    return not different


@contextmanager
def checkout(commit: str) -> Iterator[Path]:
    """A worktree of a commit in a temporary folder, which is removed. Raises: SystemExit if git does not have it."""
    with tempfile.TemporaryDirectory(prefix="nanoinfer-golden-") as folder:
        path = Path(folder) / "base"
        done = git("worktree", "add", "--detach", str(path), commit)
        if done.returncode:
            sys.exit(f"the base {commit} cannot be checked out: {done.stderr.strip()}; name another one with --base")
        try:
            yield path
        finally:
            git("worktree", "remove", "--force", str(path))


def git(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True)


def run_in(tree: Path, *arguments: str) -> str:
    """Run a command of this file with the package of a tree. Returns what it prints. Raises: SystemExit if it fails."""
    environment = os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, __file__, *arguments]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, cwd=tree)
    if done.returncode:
        sys.exit(f"{' '.join(arguments)} failed with the package of {tree}")
    return done.stdout


def compare_plans(base: Path) -> bool:
    before, after = (dict(line.split() for line in run_in(tree, "plans", "--list").splitlines()) for tree in (base, ROOT))
    different = [name for name in before if before[name] != after[name]]
    print(f"{len(before)} loads: the plans of {len(different)} differ")
    if different:
        print(" ".join(different[:100]))
        shortest = min(different, key=lambda name: len(record_of(name).lines))
        texts = [run_in(tree, "show", shortest).splitlines() for tree in (base, ROOT)]
        lines = list(unified_diff(*texts, f"base {shortest}", f"here {shortest}", n=3, lineterm=""))
        print("\n".join(lines[:NUM_SHOWN]))
    return not different


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    plans = commands.add_parser("plans", help="compare the plans with plans.txt")
    plans.add_argument("--write", action="store_true", help="renew plans.txt")
    plans.add_argument("--base", help="with --write: the commit that the file names. Default: as before")
    plans.add_argument("--list", action="store_true", help="print the digests instead")
    plans.add_argument("--every", type=int, default=1, help="run only each such load")
    plans.add_argument("--check", action="store_true", help="also whether each step reads the right blocks and states")
    commands.add_parser("show", help="print every step of loads").add_argument("loads", nargs="+")
    compare = commands.add_parser("compare", help="compare with a checkout of the base")
    compare.add_argument("--base", help="a commit. Default: the one in plans.txt")
    compare.add_argument("--only", choices=["plans", "log-probabilities"])
    numbers = commands.add_parser("log-probabilities", help="write those of the package that Python imports into a file")
    numbers.add_argument("checkpoints", type=Path, help="a folder, in which the models that are missing are made")
    numbers.add_argument("output", type=Path)
    for one in compare, numbers:
        one.add_argument("--cases", default="", help="only those whose name contains this, such as 'gemma3' or 'int4'")
    commands.add_parser("package", help="print where the package is that Python imports")
    given = parser.parse_args()
    names = records.NAMES[:: given.every] if given.command == "plans" else []
    if given.command == "plans" and given.write:
        records.write(given.base or records.base())
    elif given.command == "plans" and given.list:
        print("\n".join(f"{name} {record_of(name, check=given.check).digest}" for name in names))
    elif given.command == "plans":
        return 0 if check_plans(names, check=given.check) else 1
    elif given.command == "show":
        print("\n".join(line for name in given.loads for line in record_of(name).lines))
    elif given.command == "package":
        print(nanoinfer.__file__)
    elif given.command == "log-probabilities":
        from tests.golden.digests import save

        save(given.checkpoints, given.output, given.cases)
    else:
        return compare_trees(given.base or records.base(), given.only, given.cases)
    return 0


def compare_trees(commit: str, only: str | None, cases: str) -> int:
    with checkout(commit) as base, tempfile.TemporaryDirectory() as folder:
        for tree in (base, ROOT):
            assert Path(run_in(tree, "package").strip()).is_relative_to(tree), "PYTHONPATH comes first"
        are_same = [compare_plans(base)] if only != "log-probabilities" else []
        if only != "plans":
            from tests.golden.digests import compare

            outputs = [Path(folder) / name for name in ("base.json", "here.json")]
            for tree, output in zip((base, ROOT), outputs, strict=True):
                run_in(tree, "log-probabilities", str(Path(folder) / "checkpoints"), str(output), "--cases", cases)
            are_same.append(compare(*outputs))
    return 0 if all(are_same) else 1


if __name__ == "__main__":
    sys.exit(main())
