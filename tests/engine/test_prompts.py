"""The forms of a prompt: each is typed as users write it, and all of them are the same request."""

from nanoinfer import LLM, SamplingParams
from nanoinfer.engine.prompts import TextPrompt, TokensPrompt


def test_every_form_of_a_prompt_gives_the_same_tokens():
    llm = LLM("tiny-gpt2", kv_cache_memory=2**22, enforce_eager=True)
    ids = llm.get_tokenizer().encode("Once upon")
    forms = ["Once upon", ids, TextPrompt(prompt="Once upon"), TokensPrompt(prompt_token_ids=ids)]
    forms.append(TokensPrompt(prompt_token_ids=ids, prompt="is only shown", cache_salt="a"))
    outputs = llm.generate(forms, SamplingParams(temperature=0, max_tokens=3), use_tqdm=False)
    assert {tuple(output.prompt_token_ids) for output in outputs} == {tuple(ids)}
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1
    assert [output.prompt for output in outputs] == ["Once upon", None, "Once upon", None, "is only shown"]
