"""`nanoinfer check-scheduler` with classes of the current folder: what it prints, its status, and the page of a broken run."""

import json
import sys

import pytest
from typer.testing import CliRunner

from nanoinfer.cli.main import app

MINE = """
from nanoinfer.scheduling.block_manager import BlockManager
from nanoinfer.scheduling.scheduler import Scheduler

class Shortest(Scheduler):
    def order_waiting(self, waiting):
        return sorted(waiting, key=lambda seq: len(seq.prompt_token_ids))

class KeepsBlocks(BlockManager):
    def free(self, seq):
        seq.block_table.clear()
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    (tmp_path / "policies_of_mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    sys.modules.pop("policies_of_mine", None)


def check(*options):
    return CliRunner().invoke(app, ["check-scheduler", *options, "--world", "num_requests=1"])


def test_a_scheduler_of_the_current_folder_is_explored(folder):
    result = check("policies_of_mine:Shortest", "nanoinfer.scheduling.block_manager:BlockManager", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["num_states"] > 50
    assert not (folder / "trace.html").exists()
    assert "transitions, no invariant violated" in check().stdout


def test_a_violated_invariant_ends_with_its_run_and_a_page(folder):
    result = check("policies_of_mine:KeepsBlocks", "--html", "broken.html")
    assert result.exit_code == 1
    assert result.stdout.startswith("a block has a reference for each block table that it is in\nA shortest run:\n1. a request")
    assert "<html" in (folder / "broken.html").read_text(encoding="utf-8")
