"""What the workflows run is fixed, and a job with a token that may write runs nothing from the repository or from an index."""

import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
WORKFLOWS = {path.name: path.read_text(encoding="utf-8") for path in sorted((ROOT / ".github/workflows").glob("*.yml"))}


@pytest.mark.parametrize("name", WORKFLOWS)
def test_every_action_is_pinned_by_a_commit_whose_version_stands_beside_it(name):
    lines = [line for line in WORKFLOWS[name].splitlines() if "uses:" in line]
    assert lines
    for line in lines:
        assert re.fullmatch(r"\s*(- )?uses: [\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", line), line


@pytest.mark.parametrize("name", WORKFLOWS)
def test_only_jobs_that_run_no_code_of_the_repository_may_write(name):
    workflow = yaml.safe_load(WORKFLOWS[name])
    assert workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        actions = [step["uses"].split("@")[0] for step in job["steps"] if "uses" in step]
        commands = [line.split()[0] for step in job["steps"] for line in step.get("run", "").splitlines()]
        if "write" in job.get("permissions", {}).values():
            assert "actions/checkout" not in actions
            assert set(commands) <= {"gh"}
        for step in job["steps"]:
            if step.get("uses", "").startswith("actions/checkout@"):
                assert step["with"]["persist-credentials"] is False
            assert "github.token" not in str(step) or "write" in job["permissions"].values()


def test_the_tools_of_a_release_have_hashes():
    steps = yaml.safe_load(WORKFLOWS["release.yml"])["jobs"]["build"]["steps"]
    installs = [step["run"] for step in steps if "pip install" in step.get("run", "") and "dist/" not in step["run"]]
    assert installs == ["pip install --require-hashes -r .github/release-tools.txt"]
    lines = (ROOT / ".github/release-tools.txt").read_text(encoding="utf-8").splitlines()
    tools = [line for line in lines if not line.startswith("#")]
    assert {line.split("==")[0] for line in tools} >= {"build", "twine", "hatchling", "hatch-fancy-pypi-readme"}
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+ --hash=sha256:[0-9a-f]{64}", line) for line in tools)
