"""Results as plain data: times by hand, sums, and a short repr."""

import pytest

from nanoinfer.outputs import CompletionOutput, Delta, Logprob, RequestMetrics, RequestOutput, sum_of_logprobs


def test_times_to_and_per_token_by_hand():
    metrics = RequestMetrics(arrival_time=10.0, first_token_time=12.0, finished_time=18.0, num_output_tokens=4)
    assert (metrics.ttft, metrics.tpot) == (2.0, 2.0)  # three tokens in six seconds
    assert RequestMetrics(0.0, first_token_time=1.0, finished_time=1.0, num_output_tokens=1).tpot is None


@pytest.mark.parametrize(
    ("given", "times"),
    [({}, (None, None)), ({"first_token_time": 1.0}, (1.0, None)), ({"finished_time": 2.0}, (None, None))],
    ids=str,
)
def test_what_has_not_happened_has_no_time(given, times):
    metrics = RequestMetrics(arrival_time=0.0, num_output_tokens=5, **given)
    assert (metrics.ttft, metrics.tpot) == times


def test_the_sum_is_of_the_tokens_that_were_chosen():
    logprobs = [{5: Logprob(-1.0, 2, None), 6: Logprob(-0.5, 1, None)}, {7: Logprob(-0.25, 1, None)}]
    assert sum_of_logprobs([5, 7], logprobs) == -1.25
    assert sum_of_logprobs([5, 7], None) is None


def test_a_repr_leaves_out_what_is_not_there_and_shortens_lists():
    output = CompletionOutput(0, "a", list(range(1000)))
    assert repr(output) == "CompletionOutput(index=0, text='a', token_ids=[0, 1, 2, 3, 4, 5, ... 1000 in all])"
    assert "logprobs=[{5: Logprob(" in repr(Delta("a", [5], logprobs=[{5: Logprob(-1.0, 1, "a")}]))
    long = RequestOutput("r", "ab" * 60, [1], [CompletionOutput(0, "cd" * 60, [2])], True, RequestMetrics(0.0))
    assert f"prompt='{'ab' * 30}' ... 120 characters in all, prompt_token_ids=[1]" in repr(long)
    assert "cd" * 60 in repr(long)
