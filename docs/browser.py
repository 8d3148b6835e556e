"""Functions that pages of the site call in the reader's browser: the tasks of `nanoinfer learn` that need no tensors, and the
scheduler game with an order of the reader's own.

In: numbers, and Python code as text. Out: JSON. Pyodide imports this file with the packages' Python files (python_worker.js),
and without torch and numpy. An error's last line is shown to the reader.
"""

import json
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import scheduler_game as game

from nanoinfer.scheduling.sequence import Sequence
from nanoinfer_course.learn.check import check, describe_error
from nanoinfer_course.learn.track import TRACK, find

# The first code in the field, which the reader changes.
ORDER = """\
def order_waiting(self, waiting):
    # waiting: sequences. Each has arrival_time, deadline, priority, num_tokens.
    # self.clock(): seconds since the first request
    return sorted(waiting, key=lambda seq: seq.num_tokens)
"""
OWN = "an order of your own"
FILE = "your code"


class MistakeError(Exception):
    """The reader's code cannot run. The text says why, and in which line."""


def function_in(code: str, name: str) -> Callable[..., Any]:
    """Run the reader's code and return the function with this name. Raises: MistakeError."""
    names: dict[str, Any] = {}
    try:
        exec(compile(code, FILE, "exec"), names)
    except Exception as error:
        raise MistakeError(describe_error(error, FILE)) from error
    if name not in names:
        raise MistakeError(f"the code has no function {name}")
    return names[name]


def play_own_order(code: str, trace: int, *chosen: int) -> str:
    """Play a trace with the reader's order_waiting in the place of the chosen order.

    Args:
        code: defines order_waiting(self, waiting).
        trace: the index of the trace.
        chosen: the index of each choice, in the order of the questions.

    Returns:
        The outcome, as scheduler_game.play returns it.
    """
    order = function_in(code, "order_waiting")

    class Own(game.Scheduler):
        def order_waiting(self, waiting: deque[Sequence]) -> Iterable[Sequence]:
            return order(self, waiting)

    _, *others = (values[index] for values, index in zip(game.QUESTIONS.values(), chosen, strict=True))
    game.ORDERS[OWN] = Own
    try:
        return json.dumps(game.play(game.make_traces()[trace], (OWN, *others)))
    except Exception as error:
        raise MistakeError(describe_error(error, FILE)) from error
    finally:
        del game.ORDERS[OWN]


def tasks() -> dict[str, Any]:
    """What the page shows of each task: the parts of the text of the learner's file, its code, and the hints."""
    names = ("name", "title", "minutes", "role", "about", "places", "lesson", "code", "hints")
    shown = [task for task in TRACK if task.cases_in in ("text", "scheduling")]
    return {"tasks": [{name: getattr(each, name) for name in names} | {"rules": [*each.rules.values()]} for each in shown]}


def check_task(name: str, code: str) -> str:
    """Compare the reader's function with the engine's. Returns "passed", or the smallest case in which they differ."""
    task = find(name)
    failure = check(task, function_in(code, task.function.name))
    return json.dumps("passed" if failure is None else str(failure))
