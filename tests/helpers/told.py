"""An observer that keeps what a scheduler tells of sequences."""

from nanoinfer.scheduling.observer import SchedulingObserver


class Told(SchedulingObserver):
    """num_cached: sequence -> the cached tokens of its first start. preempted: those preempted, one for each time."""

    def __init__(self):
        self.num_cached = {}
        self.preempted = []

    def sequence_started(self, seq, num_cached_tokens):
        self.num_cached.setdefault(seq, num_cached_tokens)

    def sequence_preempted(self, seq):
        self.preempted.append(seq)
