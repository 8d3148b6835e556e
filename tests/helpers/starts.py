"""The order in which an engine starts sequences, from its steps' plans and not from a clock."""

from contextlib import contextmanager


@contextmanager
def recorded_starts(engine):
    """Yields: a list, which gets each Sequence when it starts, and again when it starts after a preemption."""
    scheduler, starts, schedule = engine.scheduler, [], engine.scheduler.schedule

    def recorded():
        before = set(scheduler.running)
        plan = schedule()
        starts.extend(seq for seq in scheduler.running if seq not in before)
        return plan

    scheduler.schedule = recorded
    try:
        yield starts
    finally:
        scheduler.schedule = schedule
