"""What pages of the site call in the reader's browser: with the files and without the libraries that the browser has."""

import io
import json
import subprocess
import sys
import zipfile

import pytest

from tests.helpers.scripts import load

browser, interactive, game = map(load, ("browser", "interactive", "scheduler_game"))
FIRST_COME = "def order_waiting(self, waiting):\n    return waiting\n"


def test_an_order_of_the_readers_own_is_played_by_the_rules_of_the_game():
    for trace, others in ((0, (0, 0, 0)), (2, (1, 1, 2))):
        first_come = [0, *others]
        choice = tuple(values[index] for values, index in zip(game.QUESTIONS.values(), first_come, strict=True))
        expected = game.play(game.make_traces()[trace], choice)
        assert json.loads(browser.play_own_order(FIRST_COME, trace, 3, *others)) == json.loads(json.dumps(expected))
    assert next(iter(game.QUESTIONS.values())) == tuple(game.ORDERS)  # the page's choices are as before
    reversed_order = FIRST_COME.replace("waiting\n", "list(waiting)[::-1]\n")
    assert json.loads(browser.play_own_order(reversed_order, trace, 3, *others)) != json.loads(json.dumps(expected))


@pytest.mark.parametrize(
    ("code", "words"),
    [("def f(", "line 1: "), ("x = 1", "the code has no function order_waiting"), (FIRST_COME + "1 / 0", "line 3")],
)
def test_a_mistake_in_the_readers_code_is_named_with_its_line(code, words):
    with pytest.raises(browser.MistakeError, match=words):
        browser.play_own_order(code, 0, 0, 0, 0, 0)


ALONE = """
import json, sys
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/docs"]
import browser
assert browser.__file__.startswith(sys.argv[1])
names = {shown["name"] for shown in browser.tasks()["tasks"]}
for task in browser.TRACK:
    if task.name in names:
        assert browser.check_task(task.name, f"{task.function.imports}\\n{task.function.source}") == '"passed"', task.name
        print(task.name)
shown = browser.tasks()["tasks"][0]
assert "not written yet" in browser.check_task(shown["name"], shown["code"])
print(len(json.loads(browser.play_own_order(browser.ORDER, 0, 0, 0, 0, 0))["requests"]))
"""


@pytest.mark.slow
def test_the_archive_of_the_site_needs_nothing_else(tmp_path):
    with zipfile.ZipFile(io.BytesIO(interactive.python_archive())) as archive:
        archive.extractall(tmp_path)
    isolated = [sys.executable, "-I", "-S"]  # no site-packages, so neither torch nor numpy
    done = subprocess.run([*isolated, "-c", ALONE, str(tmp_path)], capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    *names, num_requests = done.stdout.split()
    assert len(names) >= 13
    assert int(num_requests) == len(game.make_traces()[0].requests)
