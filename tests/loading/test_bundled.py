"""The bundled models: their files, the same greedy text in transformers, and the quality that their cards report."""

import itertools
import json
import random

import pytest
import torch
import transformers

from nanoinfer import LLM, SamplingParams, parse_chat_answer
from nanoinfer.loading.checkpoint import BUNDLED
from nanoinfer_lab import stories
from tools.calls.documents import write_conversation
from tools.stories import measure

pytestmark = pytest.mark.slow

STORY_MODELS = ["tiny-gpt2", "tiny-qwen3"]
NAMES = [*STORY_MODELS, "tiny-tools"]
CHAT = [{"role": "user", "content": "Tell me a story about Nora"}]
GREEDY = SamplingParams(temperature=0, max_tokens=200)
of_tools = pytest.mark.parametrize("name", ["tiny-tools"], indirect=True)
of_stories = pytest.mark.parametrize("name", STORY_MODELS, indirect=True)


@pytest.fixture(scope="module", params=NAMES)
def name(request):
    return request.param


@pytest.fixture(scope="module")
def llm(name):
    return LLM(name, kv_cache_memory=2**27, max_num_seqs=200)


@pytest.fixture(scope="module")
def baseline(name):
    """The same folder in transformers itself."""
    model = transformers.AutoModelForCausalLM.from_pretrained(BUNDLED / name).eval()
    return model, transformers.AutoTokenizer.from_pretrained(BUNDLED / name)


def sampled_stories(llm, temperature, half=60):
    """Stories as measure.py samples them, but by nanoinfer: half in a chat, half from the word "Once"."""
    heroes = [measure.HERO_NAMES[i % len(measure.HERO_NAMES)] for i in range(half)]
    chats = [llm.render_chat([{"role": "user", "content": f"Tell me a story about {hero}"}]) for hero in heroes]
    params = [SamplingParams(temperature=temperature, max_tokens=200, seed=seed) for seed in range(2 * half)]
    texts = [output.outputs[0].text for output in llm.generate(chats + ["Once"] * half, params, use_tqdm=False)]
    return list(zip(texts[:half], heroes, strict=True)) + [("Once" + text, None) for text in texts[half:]]


def test_the_files_are_small_and_whole(name):
    files = {path.name: path.stat().st_size for path in (BUNDLED / name).iterdir()}
    assert set(files) == {
        "README.md", "chat_template.jinja", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
        "tokenizer_config.json",
    }  # fmt: skip
    assert sum(files.values()) <= (2e6 if name == "tiny-tools" else 6e6)


def test_the_package_is_small():
    assert sum(path.stat().st_size for path in BUNDLED.parent.rglob("*") if path.suffix != ".pyc" and path.is_file()) < 15e6


def test_the_defaults_of_sampling_and_both_ends(llm, name):
    config = json.loads((BUNDLED / name / "generation_config.json").read_text())
    assert (config["temperature"], config["max_new_tokens"], config["do_sample"]) == (
        0.1 if name == "tiny-tools" else 0.7,
        200,
        True,
    )
    tokenizer = llm.get_tokenizer()
    assert config["eos_token_id"] == tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"])


def test_greedy_text_is_the_same_in_transformers(llm, baseline):
    model, tokenizer = baseline
    prompts = ["Once upon a time", "\U0001f98a", llm.render_chat(CHAT)]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=100), use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        input_ids = torch.tensor([output.prompt_token_ids])
        assert isinstance(prompt, dict) or tokenizer.encode(prompt) == output.prompt_token_ids
        options = {"attention_mask": torch.ones_like(input_ids), "do_sample": False, "max_new_tokens": 100}
        expected = model.generate(input_ids, **options)[0, input_ids.shape[1] :]
        assert list(output.outputs[0].token_ids) == expected.tolist(), prompt
        assert output.outputs[0].text == tokenizer.decode(expected, skip_special_tokens=True)


@of_stories
def test_a_chat_is_answered_with_a_story_about_the_one_asked_for_and_ends_its_turn(llm):
    questions = ("Tell me a story about {}", "Please tell me a story about {}.", "Can you tell me a story about {}?")
    asked = [(question.format(hero), hero) for question in questions for hero in ("Nora", "Hugo")]
    outputs = llm.chat([[{"role": "user", "content": question}] for question, _ in asked], GREEDY, use_tqdm=False)
    for (_, hero), output in zip(asked, outputs, strict=True):
        completion = output.outputs[0]
        assert stories.read(completion.text, hero).is_complete, completion.text
        assert completion.finish_reason == "stop"
        assert completion.token_ids[-1] == llm.get_tokenizer().convert_tokens_to_ids("<|im_end|>")


@pytest.mark.long
@of_stories
def test_the_loss_is_within_6_percent_of_the_entropy(baseline, monkeypatch):
    monkeypatch.setattr(measure, "NUM_DOCUMENTS", 150)  # the card's loss is over 1,000
    entropy, loss = measure.entropy_and_loss(*baseline)
    assert 0.99 * entropy < loss < 1.06 * entropy


@pytest.mark.long
@of_stories
def test_at_temperature_0_7_most_texts_are_stories_and_at_1_5_visibly_fewer(llm):
    samples = sampled_stories(llm, 0.7)
    usual, wild = measure.shares(samples), measure.shares(sampled_stories(llm, 1.5, half=25))
    assert usual.are_stories >= 0.95
    assert usual.hero_is_right >= 0.98
    assert len({text for text, _ in samples}) > 0.9 * len(samples)  # few are repeated
    assert wild.are_stories < usual.are_stories - 0.1


@of_stories
def test_a_block_table_that_points_to_another_story_brings_back_the_hero_of_that_one(llm):
    """Two stories run side by side. Once their prompts are in the cache, each is given the other's first block.

    The first sentence is in that block, and only it names the hero. Pronouns follow.
    """
    heroes = ["Lily", "Nora"]
    prompts = [f"Once upon a time, there was a brave fox named {hero}." for hero in heroes]
    tokenizer, engine = llm.get_tokenizer(), llm.engine
    assert all(len(tokenizer.encode(prompt)) <= engine.block_manager.block_size for prompt in prompts)

    def write(exchange):
        requests = [engine.add_request(prompt, GREEDY) for prompt in prompts]
        engine.step()
        if exchange:
            first, second = (request.sequences[0].block_table for request in requests)
            first[0], second[0] = second[0], first[0]
        while engine.num_unfinished:
            engine.step()
        return [prompt + request.output.outputs[0].text for prompt, request in zip(prompts, requests, strict=True)]

    assert [stories.NAME.findall(story)[-1] for story in write(exchange=False)] == ["Lily", "Nora"]
    exchanged = write(exchange=True)
    assert [stories.NAME.findall(story)[-1] for story in exchanged] == ["Nora", "Lily"]
    for story, hero in zip(exchanged, heroes, strict=True):
        reading = stories.read(story)
        assert not reading.is_complete
        assert hero in reading.expected[0]  # the grammar knows which name is expected, and where
    assert engine.block_manager.num_free_blocks == engine.block_manager.num_blocks


def drawn(kind, num):
    """Held-out conversations of one question that needs a call, without reasoning."""
    rng = random.Random(f"{kind} of this test")
    conversations = (write_conversation(rng, kind=kind) for _ in itertools.count())
    roles = ["user", "assistant", "tool", "assistant"]
    fitting = (one for one in conversations if [message["role"] for message in one.messages] == roles)
    return list(itertools.islice((one for one in fitting if not one.messages[1]["reasoning_content"]), num))


def replies(llm, conversations, end, budget=None, **variables):
    """What the model says after the messages of each conversation up to end, as messages."""
    prompts = []
    for conversation in conversations:
        tools = [{"type": "function", "function": function} for function in conversation.functions]
        prompts.append(llm.render_chat(conversation.messages[:end], tools=tools, chat_template_kwargs=variables))
    params = SamplingParams(temperature=0, max_tokens=200, thinking_token_budget=budget)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [parse_chat_answer(output.outputs[0].text, output.prompt) for output in outputs]


def num_right_calls(messages, conversations):
    right = 0
    for message, conversation in zip(messages, conversations, strict=True):
        [expected], calls = conversation.messages[1]["tool_calls"], message.get("tool_calls", [])
        found = [(call["function"]["name"], call["function"]["arguments"]) for call in calls]
        right += found == [(expected["function"]["name"], json.dumps(expected["function"]["arguments"]))]
    return right


@pytest.mark.long
@of_tools
@pytest.mark.parametrize(("kind", "least"), [("calculator", 22), ("dictionary", 22), ("files", 18), ("an action", 15)])
def test_most_of_30_questions_lead_to_the_right_call_and_its_result_to_the_answer(llm, kind, least):
    conversations = drawn(kind, 30)
    assert num_right_calls(replies(llm, conversations, 1), conversations) >= least
    answers = zip(replies(llm, conversations, 3), conversations, strict=True)
    assert sum(answer["content"] == conversation.messages[3]["content"] for answer, conversation in answers) >= least


@of_tools
def test_reasoning_names_the_tool_and_a_budget_ends_it_before_the_call(llm):
    conversations = drawn("calculator", 20)
    thinking = replies(llm, conversations, 1, enable_thinking=True)
    names = [conversation.messages[1]["tool_calls"][0]["function"]["name"] for conversation in conversations]
    assert sum(f"I need {name} for " in message["reasoning"] for message, name in zip(thinking, names, strict=True)) >= 17
    cut = replies(llm, conversations, 1, budget=4, enable_thinking=True)
    assert all(len(short["reasoning"]) < len(long["reasoning"]) for short, long in zip(cut, thinking, strict=True))
    for messages in (thinking, cut):
        assert num_right_calls(messages, conversations) >= 10
