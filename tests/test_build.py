"""From a runtime to an engine: which runtime, adapters and drafts a config asks for."""

import copy
import gc

import pytest

from nanoinfer import SamplingParams
from nanoinfer.build import make_adapters, make_engine
from nanoinfer.config import CacheConfig, EngineConfig, SchedulerConfig
from nanoinfer.engine.observer import Planner
from nanoinfer.errors import UnsupportedError
from nanoinfer.features.drafts.build import draft_config
from nanoinfer.features.drafts.config import SpeculativeConfig
from nanoinfer.features.drafts.ngram import NGramProposer
from nanoinfer.loading.checkpoint import Checkpoint
from nanoinfer.loading.loader import load_model

CACHE = CacheConfig(kv_cache_memory=2**22, block_size=4)


@pytest.fixture(scope="module")
def loaded(gpt2_path):
    return load_model(Checkpoint.open(str(gpt2_path)))


@pytest.fixture
def model(loaded):
    return copy.deepcopy(loaded)


def test_an_engine_of_a_model_answers(model):
    engine = make_engine(model, EngineConfig(cache=CACHE, enforce_eager=True), eos_token_ids=frozenset([3]))
    request = engine.add_request([1, 2], SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, detokenize=False))
    while request.output is None:
        engine.step()
    assert len(request.output.outputs[0].token_ids) == 2
    assert engine.eos_token_ids == {3}


def test_a_request_can_be_prepared_while_the_engine_is_closed(model):
    engine = make_engine(model, EngineConfig(cache=CACHE, enforce_eager=True))
    engine.close()
    gc.collect()
    assert engine.inputs.prepare([1], SamplingParams(logprobs=1, detokenize=False)).params.logprobs == 1


def test_batch_invariance_needs_rows_that_are_independent_which_torchs_are_not(model):
    config = EngineConfig(cache=CACHE, enforce_eager=True, scheduler=SchedulerConfig(batch_invariant=True))
    with pytest.raises(UnsupportedError, match="enforce_eager=True uses torch's products, whose bits do"):
        make_engine(model, config)


def test_adapters_and_drafts_are_made_if_they_are_asked_for(model):
    plain = EngineConfig(cache=CACHE, enforce_eager=True)
    assert make_adapters(model, plain) == []
    assert type(make_engine(model, plain).planner) is Planner
    drafting = EngineConfig(cache=CACHE, enforce_eager=True, speculative=SpeculativeConfig(method="ngram"))
    assert isinstance(make_engine(model, drafting).planner.proposer, NGramProposer)
    assert make_adapters(model, EngineConfig(cache=CACHE, enable_lora=True))[0].layers


def test_a_drafter_has_no_adapters_and_so_keeps_its_kernels_on_a_gpu():
    config = EngineConfig(
        cache=CACHE, enable_lora=True, max_loras=2, speculative=SpeculativeConfig(method="draft_model", model="m")
    )
    assert draft_config(config) == EngineConfig(cache=CACHE)
