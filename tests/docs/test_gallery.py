"""The gallery of the documentation site: every run that its page names is written, and its sentences are true."""

import re
import sys
from pathlib import Path

import pytest

from nanoinfer.features.tracing import StepScheduled, TokenAppended

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def gallery():
    sys.path.insert(0, str(DOCS))
    try:
        import gallery
    finally:
        sys.path.remove(str(DOCS))
    return gallery


@pytest.mark.long
def test_every_page_that_is_linked_is_written(gallery, tmp_path):
    text = gallery.write(tmp_path)
    linked = set(re.findall(r"\]\((\w+\.html)", text))
    assert linked == {path.name for path in tmp_path.iterdir()}
    assert len(linked) == 6


@pytest.mark.slow
def test_the_compared_runs_have_equal_tokens_and_differ_in_steps(gallery):
    for name, comparison in gallery.COMPARISONS.items():
        first, second = gallery.record_pair(comparison)
        tokens = [
            {(event.sequence_id, event.position): event.token_id for event in run.of(TokenAppended)} for run in (first, second)
        ]
        assert tokens[0] == tokens[1], name
        counts = [[sum(step.num_new_tokens) for step in run.of(StepScheduled)] for run in (first, second)]
        if name == "batch":
            assert len(counts[0]) * 4 == len(counts[1])
        else:
            assert max(counts[0]) < 20 < 60 < max(counts[1])
