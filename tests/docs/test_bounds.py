"""The oldest versions that pyproject.toml allows are what make smoke-lowest (to run) and make test-lowest (to test) install."""

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]


def bounds(*lists):
    """The lower bound of each package, the last if there are several."""
    found = {}
    for requirement in map(Requirement, (line for one in lists for line in one)):
        for specifier in requirement.specifier:
            assert specifier.operator == ">="
            found[requirement.name] = specifier.version
    return found


def pins(name):
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


def is_exact(bound, pin):
    return re.fullmatch(rf"{re.escape(bound)}(\.0)*", pin) is not None


def test_the_versions_of_smoke_lowest_are_the_lower_bounds_to_run():
    pinned = pins("constraints-smoke.txt")
    for name, bound in bounds(PROJECT["dependencies"], EXTRAS["server"], EXTRAS["structured"]).items():
        assert is_exact(bound, pinned[name]), name


def test_the_versions_of_test_lowest_are_the_lower_bounds_to_test():
    pinned, to_test = pins("constraints-lowest.txt"), bounds(PROJECT["dependencies"], EXTRAS["test"])
    assert to_test.keys() >= bounds(PROJECT["dependencies"]).keys()
    for name in bounds(PROJECT["dependencies"]):
        assert is_exact(to_test[name], pinned[name]), name
