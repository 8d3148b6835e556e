"""one_file/engine.py: what the source and the template say now."""

from pathlib import Path

from nanoinfer_course.learn.export import reference_file
from nanoinfer_course.learn.tangle import missing_names, repeated_names

FILE = Path(__file__).parents[3] / "one_file" / "engine.py"


def test_the_file_is_not_older_than_the_source():
    assert FILE.read_text(encoding="utf-8") == reference_file(), "run: make one-file"


def test_the_file_defines_each_name_that_it_reads_once():
    text = FILE.read_text(encoding="utf-8")
    assert (missing_names(text), repeated_names(text)) == (set(), set())
