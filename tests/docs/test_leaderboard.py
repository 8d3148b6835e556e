"""leaderboard.jsonl has no line that cannot be right, and LEADERBOARD.md is its table."""

import copy
import json
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture
def leaderboard(monkeypatch):
    monkeypatch.syspath_prepend(DOCS)
    import leaderboard

    return leaderboard


def lines(leaderboard, kind):
    entries = map(json.loads, leaderboard.LINES.read_text(encoding="utf-8").splitlines())
    return [entry for entry in entries if entry["kind"] == kind]


def test_every_line_is_right_and_the_page_is_up_to_date(leaderboard, monkeypatch, tmp_path):
    before = leaderboard.PAGE.read_text(encoding="utf-8")
    monkeypatch.setattr(leaderboard, "PAGE", tmp_path / "page.md")
    leaderboard.main()
    assert leaderboard.PAGE.read_text(encoding="utf-8") == before, "run: python docs/leaderboard.py"


def test_a_ladder_that_cannot_be_right_is_refused(leaderboard):
    [ladder, *_] = lines(leaderboard, "ladder")
    assert leaderboard.faults_of_ladder(ladder) == []
    for change in (
        lambda rungs: rungs.pop(),
        lambda rungs: rungs[7].__setitem__(1, 400.0),
        lambda rungs: rungs[0].__setitem__(2, 0),
    ):
        changed = copy.deepcopy(ladder)
        change(changed["rungs"])
        assert len(leaderboard.faults_of_ladder(changed)) == 1


def test_a_game_has_the_goodput_of_its_choices(leaderboard):
    [game, *_] = lines(leaderboard, "game")
    assert leaderboard.faults_of_game(game) == []
    assert leaderboard.faults_of_game({**game, "goodput": 99.0}) == [f"the goodput is {game['goodput']}, not 99.0"]
    assert "no such trace or choice" in leaderboard.faults_of_game({**game, "trace": "Underload"})[0]
    assert f"| {game['trace']} | {game['who']} |" in leaderboard.page([game])
