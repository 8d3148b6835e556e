"""SmolLM2-135M-Instruct, as a GGUF file and as folders of a Llama and a Qwen2, computes what transformers computes."""

from pathlib import Path

import pytest
import torch
import transformers

from nanoinfer import LLM, AsyncLLM, SamplingParams
from nanoinfer.loading.checkpoint import Checkpoint
from nanoinfer_lab import verify
from tests.helpers import http_server, tool_cases
from tests.real.texts import TEXTS

ROOT = Path(__file__).parents[2]
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY = {"temperature": 0, "max_tokens": 24}
SETTINGS = {"dtype": "float32", "seed": 0, "kv_cache_memory": 2**27, "max_model_len": 1024}
FILES = ("docs/contributing.md", "README.zh.md", "nanoinfer/scheduling/scheduler.py")
NUM_TOKENS = 512  # of each file


@pytest.fixture(scope="module")
def reference(llama_path):
    return transformers.AutoModelForCausalLM.from_pretrained(llama_path, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def llm(llama_path):
    with LLM(llama_path, **SETTINGS) as llm:
        yield llm


def test_every_weight_of_the_file_is_the_gguf_packages(unpacked, gguf_path):
    from tests.real import folders

    expected = {name.removeprefix("model."): weight for name, weight in folders.weights_of(unpacked).items()}
    weights = Checkpoint.open(str(gguf_path)).open_weights()
    assert weights.keys() == expected.keys()
    for name, weight in expected.items():
        assert torch.equal(weights.read(name), weight), name


def test_the_files_tokenizer_gives_the_ids_of_the_unpacked_one(unpacked, gguf_path):
    from tests.real import folders

    expected, tokenizer = folders.tokenizer_of(unpacked), Checkpoint.open(str(gguf_path)).load_tokenizer()
    for text in TEXTS:
        assert tokenizer.encode(text) == expected.encode(text).ids, text


FORMS = {  # what the table calls it -> the fixture of its path, and the variants. None: all
    "GGUF, Q4_1": ("gguf_path", None),
    "folder, Llama": ("llama_path", "float32,bfloat16"),
    "folder, Qwen2 with zero biases": ("qwen2_path", "float32"),
}


@pytest.mark.parametrize("form", FORMS)
def test_verify_finds_the_tokens_of_transformers(form, llama_path, request, results):
    fixture, variants = FORMS[form]
    against = str(llama_path) if fixture == "gguf_path" else None
    report = verify.examine(str(request.getfixturevalue(fixture)), against=against, variants=variants, device="cpu")
    float32, *others = report.variants
    assert report.has_same_ids is (None if against is None else True)
    assert not report.has_failed
    assert float32.differing == []
    assert float32.differences.largest < verify.FLOAT32_BOUND  # no bound is known to verify for a file of integers
    for found in others:
        assert found.perplexity < 1.5 * found.expected_perplexity, found.name
    equal = f"{float32.num_tokens - len(float32.differing)} of {float32.num_tokens}"
    perplexities = {"transformers": float32.expected_perplexity} | {found.name: found.perplexity for found in report.variants}
    results.append({"form": form, "equal": equal, "perplexity": {name: round(one, 3) for name, one in perplexities.items()}})


def test_a_chat_has_the_answer_of_transformers(llm, llama_path, reference):
    tokenizer = transformers.AutoTokenizer.from_pretrained(llama_path)
    ids = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_dict=False)
    [output] = llm.chat(QUESTION, SamplingParams(**GREEDY), use_tqdm=False)
    assert output.prompt_token_ids == ids
    [expected] = reference.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=24)
    assert ids + output.outputs[0].token_ids == expected.tolist()
    assert output.outputs[0].text == "The capital of France is Paris."


def test_real_texts_have_the_log_probabilities_of_transformers(llm, reference):
    for file in FILES:
        ids = llm.get_tokenizer()((ROOT / file).read_text(encoding="utf-8")).input_ids[:NUM_TOKENS]
        with torch.inference_mode():
            rows = reference(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        expected = rows.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        [found] = llm.compute_logprobs([{"prompt_token_ids": ids}])
        torch.testing.assert_close(torch.tensor(found), expected, rtol=0, atol=1e-3)


def test_embeddings_are_the_last_hidden_states_of_transformers(llm, reference):
    texts = ["A cat sleeps on the sofa.", "Un chat dort.", "def add(a, b): return a + b\n" * 20]
    for text, output in zip(texts, llm.embed(texts, use_tqdm=False), strict=True):
        with torch.inference_mode():
            row = reference.model(torch.tensor([llm.get_tokenizer()(text).input_ids])).last_hidden_state[0, -1]
        torch.testing.assert_close(torch.tensor(output.outputs.embedding), row / row.norm(), rtol=0, atol=1e-5)


def test_drafts_by_its_own_four_bits_change_no_token_and_most_are_right(llm, llama_path):
    prompts, params = list(verify.PROMPTS[:8]), SamplingParams(**GREEDY, ignore_eos=True)
    expected = [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
    drafts = {"method": "quantized", "bits": 4, "num_speculative_tokens": 3, "adaptive": False}
    with LLM(llama_path, speculative_config=drafts, **SETTINGS) as drafting:
        found = [output.outputs[0].token_ids for output in drafting.generate(prompts, params, use_tqdm=False)]
        metrics = drafting.engine.planner.counts
    assert found == expected
    assert metrics.num_accepted_tokens > 0.3 * metrics.num_draft_tokens > 0


@pytest.fixture(scope="module")
def client(gguf_path, llama_path, tmp_path_factory):
    """A client of a server. The model's own template has no place for tools."""
    folder = tmp_path_factory.mktemp("with tools")
    tokenizer = transformers.AutoTokenizer.from_pretrained(llama_path)
    tokenizer.chat_template = tool_cases.TEMPLATE
    tokenizer.save_pretrained(folder)
    with (
        http_server.serving(lambda: AsyncLLM(str(gguf_path), tokenizer=str(folder), **SETTINGS)) as server,
        http_server.new_client(server, strict=False) as client,
    ):
        yield client


def test_a_required_call_follows_its_schema(client):
    options = {"tools": tool_cases.TOOLS, "tool_choice": "required", "parallel_tool_calls": False, "temperature": 0}
    [answer] = client.chat.completions.create(model="alias", messages=tool_cases.QUESTION, max_tokens=100, **options).choices
    assert answer.finish_reason == "tool_calls"
    [call] = answer.message.tool_calls
    tool_cases.check_call(call.function.name, call.function.arguments)


def test_streams_that_run_together_have_the_texts_of_whole_answers(client):
    options = {"model": "alias", "temperature": 0, "max_tokens": 40}
    streams = [client.completions.create(prompt=prompt, stream=True, **options) for prompt in verify.PROMPTS[:9]]
    texts = ["".join(chunk.choices[0].text for chunk in stream) for stream in streams]
    for prompt, text in zip(verify.PROMPTS, texts, strict=False):
        assert client.completions.create(prompt=prompt, **options).choices[0].text == text
