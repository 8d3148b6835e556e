"""The rows before the LM head: when their logits are computed, and what is a route."""

import torch

from nanoinfer.sampling.routes import HeadRows


def rows_of(hidden):
    calls = []

    def head(hidden):
        calls.append(len(hidden))
        return hidden @ torch.arange(6.0, dtype=hidden.dtype).view(2, 3)

    return HeadRows(hidden, head), calls


def test_logits_are_computed_once_and_when_they_are_read():
    rows, calls = rows_of(torch.ones(4, 2))
    assert (rows.is_raw, calls) == (True, [])
    assert rows.logits.tolist() == [[3.0, 5.0, 7.0]] * 4
    assert rows.logits is rows.logits
    assert (rows.is_raw, calls) == (False, [4])


def test_logits_of_a_half_precision_model_are_fp32_and_may_be_written():
    rows, _ = rows_of(torch.ones(1, 2, dtype=torch.bfloat16).expand(4, 2))
    rows.logits[1] = 0
    assert rows.logits.dtype == torch.float32
    assert rows.logits.sum(-1).tolist() == [15.0, 0.0, 15.0, 15.0]


def test_rows_of_known_logits_are_raw_until_they_are_read():
    logits = torch.randn(2, 5)
    rows = HeadRows(logits, lambda logits: logits)
    assert rows.is_raw
    assert rows.logits.data_ptr() == logits.data_ptr()  # stages write into them
    assert not rows.is_raw
