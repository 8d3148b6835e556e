"""The tokenizer: missing files, long texts, and a BOS that is added once."""

import json
import shutil

import pytest

from nanoinfer import SamplingParams
from nanoinfer.config import EngineConfig
from nanoinfer.engine.inputs import InputProcessor
from nanoinfer.errors import InvalidPromptError
from nanoinfer.execution.executor import ExecutorInfo
from nanoinfer.features.chat.messages import render_chat
from nanoinfer.loading.checkpoint import BUNDLED
from nanoinfer.tokenization.tokenizer import LONG_TEXT, Tokenizer

BOS = 0  # <|endoftext|>
LILY = [{"role": "user", "content": "Tell me a story about Lily"}]


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.load(BUNDLED / "tiny-qwen3")


@pytest.fixture(scope="module")
def bos_path(tmp_path_factory):
    """tiny-qwen3 with a tokenizer that adds a BOS, and a chat template that writes it too, as Llama's and Gemma's do."""
    path = shutil.copytree(BUNDLED / "tiny-qwen3", tmp_path_factory.mktemp("bos") / "checkpoint")
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [BOS], "tokens": ["<|endoftext|>"]}},
    }
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    template = path / "chat_template.jinja"
    template.write_text("<|endoftext|>" + template.read_text())
    return path


def test_a_folder_without_tokenizer_files_has_no_tokenizer(gpt2_path):
    assert Tokenizer.load(gpt2_path) is None


def test_a_text_that_is_far_too_long_is_encoded_in_part(tokenizer):
    text = "Lily was here. " * 20_000
    ids, few = tokenizer.encode(text), tokenizer.encode(text, max_tokens=100)
    assert 2 * 100 < len(few) < len(ids) / 4
    assert few[:-1] == ids[: len(few) - 1]  # the last one is beside the cut


@pytest.mark.parametrize("max_tokens", [7_000, 50_000])
def test_any_other_text_is_encoded_as_a_whole(tokenizer, max_tokens):
    """Also one that is looked at in parts first, because it has more than 65,536 characters."""
    text = " breakfast" * 10_000
    ids = tokenizer.encode(text)
    assert len(ids) < 2 * 7_000
    assert tokenizer.encode(text, max_tokens=max_tokens) == ids


def test_a_long_text_has_the_ids_of_transformers_and_its_errors(tokenizer, bos_path):
    text = "Once upon a time there was a 🦊. " * (LONG_TEXT // 20)
    assert tokenizer.encode(text) == tokenizer.hf(text)["input_ids"]
    assert Tokenizer.load(bos_path).encode(text)[:2] == [BOS, tokenizer.encode("Once")[0]]
    with pytest.raises(InvalidPromptError, match="not valid Unicode"):
        tokenizer.encode(text + "\ud800")


def test_encode_adds_the_bos_once_and_only_where_the_tokenizer_has_one(tokenizer, bos_path):
    with_bos = Tokenizer.load(bos_path)
    plain = tokenizer.encode("Once upon a time")
    assert BOS not in plain
    assert with_bos.encode("Once upon a time") == [BOS, *plain]
    assert with_bos.encode("Once upon a time", add_special_tokens=False) == plain


def test_a_prompt_with_two_bos_is_told_once(bos_path, caplog):
    """The text of a chat template has a BOS, and the tokenizer adds another one."""
    info = ExecutorInfo(vocab_size=2000, max_position_embeddings=99, max_model_len=99, num_blocks=4, block_size=16)
    inputs, params = InputProcessor(info, Tokenizer.load(bos_path), EngineConfig()), SamplingParams()
    for prompt in ("Once upon a time", "", [BOS, BOS, 5], {"prompt_token_ids": [BOS, BOS]}):
        inputs.prepare(prompt, params)
    chat = inputs.prepare(render_chat(inputs, LILY), params).prompt_token_ids
    assert (chat[0], chat.count(BOS)) == (BOS, 1)
    assert not caplog.records
    for _ in range(2):
        prepared = inputs.prepare(render_chat(inputs, LILY)["prompt"], params)
        assert prepared.prompt_token_ids[:2] == [BOS, BOS]
    assert [record.message for record in caplog.records] == [
        "a prompt begins with <|endoftext|> twice, since the tokenizer adds it to a text that has it; call chat(), or give ids"
    ]


def test_a_users_call_with_truncation_does_not_shorten_later_prompts():
    tokenizer = Tokenizer.load(BUNDLED / "tiny-qwen3")
    whole = tokenizer.encode("Once upon a time, there was a fox")
    assert len(whole) > 5
    tokenizer.hf("Once upon a time", truncation=True, max_length=2, padding="max_length")
    assert tokenizer.encode("Once upon a time, there was a fox") == whole
