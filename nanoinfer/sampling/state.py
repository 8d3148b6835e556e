"""Per-sequence state of the stages: token counts. Each new token is added once, and nothing is recounted.

In: a sequence's ids, as they grow. Out: the distinct ids with their counts, and the lists of ids among the parameters as
arrays. It is plain Python. A preempted sequence keeps its state, since it keeps its tokens.
"""

from array import array

from nanoinfer.scheduling.sequence import Sequence


class SamplingState:
    """The state of one sequence. A field that its parameters do not use is None and costs nothing."""

    def __init__(self, seq: Sequence) -> None:
        params = seq.params
        self.token_counts = TokenCounts() if params.has_penalty else None
        self.allowed_ids = None if params.allowed_token_ids is None else array("q", sorted(set(params.allowed_token_ids)))
        self.bias_ids = array("q", params.logit_bias) if params.logit_bias else None
        self.bias_values = array("f", params.logit_bias.values()) if params.logit_bias else None
        self._num_known = 0

    @classmethod
    def of(cls, seq: Sequence) -> "SamplingState":
        """Return the sequence's state, updated to its newest token."""
        if not isinstance(sampling_state := seq.sampling_state, cls):
            seq.sampling_state = sampling_state = cls(seq)
        if (counts := sampling_state.token_counts) is not None:
            for i in range(sampling_state._num_known, len(seq.token_ids)):
                counts.add(seq.token_ids[i], is_output=i >= len(seq.prompt_token_ids))
            sampling_state._num_known = len(seq.token_ids)
        return sampling_state


class TokenCounts:
    """The distinct ids of prompt + output, in order of appearance, and how often each is in the output.

    >>> counts = TokenCounts()
    >>> for token_id, is_output in [(7, False), (5, False), (7, True), (7, True)]:
    ...     counts.add(token_id, is_output=is_output)
    >>> list(counts.ids), list(counts.output_counts)
    ([7, 5], [2, 0])
    """

    def __init__(self) -> None:
        self.ids = array("q")
        self.output_counts = array("q")
        self._index: dict[int, int] = {}  # id -> its index in ids

    def add(self, token_id: int, *, is_output: bool) -> None:
        index = self._index.setdefault(token_id, len(self.ids))
        if index == len(self.ids):
            self.ids.append(token_id)
            self.output_counts.append(0)
        self.output_counts[index] += is_output
