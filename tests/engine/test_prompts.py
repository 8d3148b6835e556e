"""The forms of a prompt: each is typed as users write it, and all of them are the same request."""

from typing import get_args, get_type_hints

import pytest

from nanoinfer import LLM, SamplingParams
from nanoinfer.engine.prompts import PromptType, TextPrompt, TokensPrompt


@pytest.fixture(scope="module")
def llm():
    return LLM("tiny-gpt2", kv_cache_memory=2**22, enforce_eager=True)


def test_every_form_of_a_prompt_gives_the_same_tokens(llm):
    ids = llm.get_tokenizer().encode("Once upon")
    forms = ["Once upon", ids, TextPrompt(prompt="Once upon"), TokensPrompt(prompt_token_ids=ids)]
    forms.append(TokensPrompt(prompt_token_ids=ids, prompt="is only shown", cache_salt="a"))
    outputs = llm.generate(forms, SamplingParams(temperature=0, max_tokens=3), use_tqdm=False)
    assert {tuple(output.prompt_token_ids) for output in outputs} == {tuple(ids)}
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1
    assert [output.prompt for output in outputs] == ["Once upon", None, "Once upon", None, "is only shown"]


def test_the_types_name_every_form_and_no_more_keys_are_needed_than_the_text_or_the_ids():
    assert set(get_args(PromptType)) == {str, list[int], TextPrompt, TokensPrompt}
    assert TextPrompt.__required_keys__ == {"prompt"}
    assert TokensPrompt.__required_keys__ == {"prompt_token_ids"}
    assert set(get_type_hints(TokensPrompt)) == {"prompt", "prompt_token_ids", "cache_salt"}
