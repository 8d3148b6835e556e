"""The baseline llama.cpp gets batches that it computes at once. A double stands in the place of llama-cpp-python."""

import ctypes
import importlib
import sys
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest


class Llama(MagicMock):
    """Notes the sequence of every row of every batch."""

    def llama_decode(self, context, batch):
        self.batches.append([batch.seq_id[row][0] for row in range(batch.n_tokens)])
        return 0

    def llama_sampler_sample(self, sampler, context, row):
        return 0


@pytest.fixture
def engine(monkeypatch):
    llama = Llama(batches=[])
    monkeypatch.setitem(sys.modules, "llama_cpp", llama)
    monkeypatch.setitem(sys.modules, "gguf", MagicMock())
    monkeypatch.delitem(sys.modules, "benchmarks.baselines.llama_cpp_engine", raising=False)
    made = object.__new__(importlib.import_module("benchmarks.baselines.llama_cpp_engine").Engine)
    ids = (ctypes.c_int * 1 * 4096)()
    batch = SimpleNamespace(token={}, pos={}, n_seq_id={}, seq_id=ids, logits={}, n_tokens=0)
    made._batch, made._max_batch, made._max_num_seqs, made._context, made._memory = batch, 64, 4, None, None
    yield made, llama
    monkeypatch.delitem(sys.modules, "benchmarks.baselines.llama_cpp_engine", raising=False)


def test_the_sequences_of_a_batch_ascend_also_after_some_have_ended(engine):
    made, llama = engine
    lens = [5, 2, 7, 3, 4, 2]  # the fifth and sixth request take the places of others
    prompts = [[1, 2, 3]] * len(lens)
    assert made.run(prompts=prompts, output_lens=lens, sampling={"temperature": 0}) == lens
    decodes = [batch for batch in llama.batches if len(set(batch)) == len(batch)]
    assert len(decodes) >= 3
    assert [batch for batch in decodes if batch != sorted(batch)] == []
    assert llama.batches[0] == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3
    assert llama.batches[1] == [0, 1, 2, 3]
