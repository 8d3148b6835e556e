"""An engine that makes only the steps that a test allows, so that no test depends on how fast the engine is."""

import time
from contextlib import contextmanager


class Steps:
    """Counts the steps of an engine, and those that it may make."""

    def __init__(self, num_allowed):
        self.num_allowed, self.num_made = num_allowed, 0

    def allow(self, num):
        self.num_allowed += num


@contextmanager
def limited_steps(engine, num):
    """Let an engine that a thread steps make `num` steps. Then its thread only carries out commands, until more are allowed.

    Yields: Steps. After the context the engine steps on without a limit.
    """
    steps, step = Steps(num), engine.step

    def limited():
        if steps.num_made >= steps.num_allowed:
            time.sleep(0.001)
            return []
        steps.num_made += 1
        return step()

    engine.step = limited
    try:
        yield steps
    finally:
        engine.step = step
