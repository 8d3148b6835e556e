"""The log-probabilities of a prompt's tokens are the model's, each read once, with the texts that the tokens add."""

from types import SimpleNamespace

import pytest
import torch

from nanoinfer import SamplingParams
from nanoinfer.attention.dense import DenseAttention
from nanoinfer.build import make_executor, make_runtime
from nanoinfer.config import CacheConfig, EngineConfig
from nanoinfer.features.logprobs import prompt_logprobs
from nanoinfer.features.logprobs.prompt_logprobs import reader_of
from nanoinfer.features.logprobs.token_logprobs import TokenLogprobs
from nanoinfer.loading.checkpoint import Checkpoint
from nanoinfer.loading.loader import load_model
from nanoinfer.scheduling.sequence import Sequence
from nanoinfer.scheduling.step_plan import PromptRows, ScheduledSequence, StepPlan, rows_of
from tests.helpers.byte_tokenizer import byte_tokenizer

PROMPT = [3, 1, 4, 1, 5, 9]
ASKED = SamplingParams(prompt_logprobs=1)
FOX = [0xF0, 0x9F, 0x98, 0x80, 257]  # 😀the


@pytest.mark.parametrize("prompt_logits", [2**22, 1])
def test_they_are_the_models_however_many_rows_are_computed_at_a_time_and_each_is_read_once(
    qwen3_path, monkeypatch, prompt_logits
):
    monkeypatch.setattr(prompt_logprobs, "PROMPT_LOGITS", prompt_logits)
    model = load_model(Checkpoint.open(str(qwen3_path)))
    with torch.inference_mode():
        hidden = model(torch.tensor(PROMPT), torch.arange(len(PROMPT)), DenseAttention())
        expected = model.compute_logits(hidden).log_softmax(-1)
    cache = CacheConfig(kv_cache_memory=2**20, block_size=4)
    config = EngineConfig(attention_backend="reference", enforce_eager=True, cache=cache)
    executor, reader = make_executor(make_runtime(model, config), config), reader_of(ASKED, None, 300)
    seq = Sequence("r", list(PROMPT), SamplingParams(temperature=0), 0, 99, reader=reader)
    seq.block_table = [2, 0, 1]
    for num_computed, num_tokens, num_read in ((0, 4, 4), (0, 4, 4), (4, 2, 5)):  # it is preempted after its first chunk
        seq.num_computed_tokens, scheduled = num_computed, (ScheduledSequence(seq, num_tokens),)
        step = executor.launch(StepPlan(scheduled, rows_of(scheduled)), None)
        assert step.must_sync
        assert len(reader.positions) == 1 + num_read
    assert reader.positions[0] is None
    for i, position in enumerate(reader.positions[1:]):
        token_id, *_ = position
        assert token_id == PROMPT[i + 1]
        assert position[token_id].logprob == pytest.approx(expected[i, token_id].item(), abs=1e-4)


def test_the_text_of_a_piece_of_a_character_is_what_it_adds(monkeypatch):
    entries = [TokenLogprobs([i, ord("y")], [-1.0, -2.0], [1, 2]) for i in FOX[1:]]
    monkeypatch.setattr("nanoinfer.features.logprobs.token_logprobs.token_logprobs", lambda *_: entries)
    reader, seq = reader_of(ASKED, byte_tokenizer(), 300), Sequence("r", FOX, SamplingParams(), 0, 99)
    rows = SimpleNamespace(logits=entries)  # as many as there are entries
    executor = SimpleNamespace(info=SimpleNamespace(vocab_size=300), runner=SimpleNamespace(head_rows=lambda *_: rows))
    reader.read(executor, None, PromptRows(seq, 0, len(FOX) - 1, 0), None, None)
    texts = [[entry.decoded_token for entry in position.values()] for position in reader.positions[1:]]
    assert texts == [["", "y"], ["", "y"], ["😀", "y"], ["the", "y"]]
