"""The two LLMs and the checkpoints that most files here use. Every test must leave them as it found them."""

import functools

import pytest

from tests.helpers.prepared import prepare

prepare()

from nanoinfer import LLM  # noqa: E402
from tests.helpers import tiny_models  # noqa: E402
from tests.helpers.tiny_models import assert_nothing_is_left  # noqa: E402

MEMORY = 2**24


@pytest.fixture(scope="session")
def path_of(tmp_path_factory):
    """family -> a tiny checkpoint of it, which is written once."""
    return functools.cache(lambda family: tiny_models.save(family, tmp_path_factory.mktemp(family)))


@pytest.fixture(scope="module")
def loaded():
    return LLM(kv_cache_memory=MEMORY)


@pytest.fixture(scope="module")
def loaded_ids(qwen3_path):
    return LLM(qwen3_path, kv_cache_memory=MEMORY, block_size=4)


@pytest.fixture
def llm(loaded):
    """tiny-qwen3."""
    yield loaded
    assert_nothing_is_left(loaded)


@pytest.fixture
def ids_llm(loaded_ids):
    """A random Qwen3 without a tokenizer and without EOS: 96 ids, 512 positions, blocks of 4."""
    yield loaded_ids
    assert_nothing_is_left(loaded_ids)
