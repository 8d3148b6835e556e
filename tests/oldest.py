"""What runs with the oldest dependencies that pyproject.toml allows: `make smoke-lowest`, without conftest.py and its packages.

The texts are those of the newest dependencies. MODELS in the environment names more checkpoints, with spaces between. Those
of REAL must give the stored texts, and any others must answer.
"""

import json
import logging
import os
import pkgutil
import re
import shutil
import socket
import subprocess
import sys
import time
from importlib import import_module
from itertools import chain
from pathlib import Path
from urllib.error import URLError
from urllib.request import Request, urlopen

import pytest
import tokenizers

import nanoinfer
import nanoinfer_course
import nanoinfer_lab
from nanoinfer import LLM, SamplingParams, StructuredOutputsParams, parse_chat_answer
from nanoinfer.loading.checkpoint import BUNDLED
from nanoinfer.tokenization.tokenizer import Tokenizer

QUESTION = [{"role": "user", "content": "How warm is Oslo?"}]
PROMPTS = ["Once upon a time", "a café 日本 12"]
GREEDY = SamplingParams(temperature=0, max_tokens=12)
# model -> greedy answers to both prompts and to the question, in float32
ANSWERS = {
    "tiny-qwen3": (
        ", there was a kind fox named Leo. He loved to",
        ' that lay " under the hay hay, and nobody was near',
        "This is the story of Finn, a little, kind fox",
    ),
    "tiny-gpt2": (
        ", there was a kind duck named Hugo. He loved to",
        " was a upon a purple loved it lived in a a wooden",
        "Tell was a kind fox with a warm heart. She loved",
    ),
    "tiny-tools": (" " * 12, "2" * 12, "I have no tool for that."),
}
REAL = {
    "SmolLM2-135M-Instruct.Q4_1.gguf": (
        ", the city of Nova Haven was a thriving metropolis, with",
        ".50, 12.51, ",
        "Oslo is a city renowned for its warm and welcoming atmosphere",
    )
}
MODELS = os.environ.get("MODELS", "").split()
OPTIONAL = {"triton", "flash_attn", "ray", "hypothesis"}  # packages that smoke-lowest does not install


@pytest.mark.parametrize("model", [*ANSWERS, *MODELS])
def test_a_model_gives_the_stored_texts(model, caplog, capfd):
    with LLM(model, dtype="float32", kv_cache_memory=2**26) as llm:
        outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False) + llm.chat(QUESTION, GREEDY, use_tqdm=False)
    texts = tuple(output.outputs[0].text for output in outputs)
    assert texts == (ANSWERS | REAL).get(Path(model).name, texts)
    if model in ANSWERS:
        assert not [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
        assert "class" not in capfd.readouterr().err  # of a tokenizer, which transformers writes without logging's records


@pytest.mark.parametrize(
    "tokenizer_class", ["TokenizersBackend", "GPT2Tokenizer", "Qwen2Tokenizer", "LlamaTokenizerFast", None]
)
def test_a_folder_has_its_files_ids_and_special_tokens_under_every_class(tokenizer_class, tmp_path):
    shutil.copy(BUNDLED / "tiny-qwen3/tokenizer.json", tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    stated = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "extra_special_tokens": ["<|im_start|>", "<new>"]}
    stated |= {} if tokenizer_class is None else {"tokenizer_class": tokenizer_class}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(stated))
    tokenizer, backend = Tokenizer.load(tmp_path), tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    text = "<|im_start|>user\na café 日本<|im_end|><|endoftext|>"
    assert tokenizer.encode(text) == tokenizer.hf(text).input_ids == backend.encode(text).ids
    assert tokenizer.encode("<new>") == [backend.get_vocab_size()]  # the folder states it in addition
    assert (tokenizer.hf.eos_token, tokenizer.hf.pad_token) == ("<|im_end|>", "<|endoftext|>")


def test_a_required_call_and_a_regex_are_kept():
    def weather(city: str) -> str:
        """Tell the weather.

        Args:
            city: A town.
        """
        raise NotImplementedError

    with LLM("tiny-tools", dtype="float32", kv_cache_memory=2**26) as llm:
        params = SamplingParams(temperature=0, max_tokens=100)
        [output] = llm.chat(QUESTION, params, tools=[weather], tool_choice="required", use_tqdm=False)
        digits = SamplingParams(structured_outputs=StructuredOutputsParams(regex="[0-9]{4}"))
        [number] = llm.generate(["The year "], digits, use_tqdm=False)
    [call] = parse_chat_answer(output.outputs[0].text, output.prompt)["tool_calls"]
    assert call["function"]["name"] == "weather"
    assert json.loads(call["function"]["arguments"]).keys() == {"city"}
    assert re.fullmatch("[0-9]{4}", number.outputs[0].text)


def test_the_server_answers_and_streams():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    arguments = ["serve", "tiny-qwen3", "--dtype", "float32", "--port", url.rpartition(":")[2]]
    server = subprocess.Popen([sys.executable, "-m", "nanoinfer", *arguments])
    try:
        while True:
            assert server.poll() is None, "the server has ended"
            try:
                urlopen(f"{url}/health").close()
                break
            except URLError:
                time.sleep(0.1)

        def post(path, **body):
            data = json.dumps({"model": "tiny-qwen3", "temperature": 0, "max_tokens": 12, **body}).encode()
            return urlopen(Request(url + path, data, {"Content-Type": "application/json"})).read().decode()

        completion, _, answer = ANSWERS["tiny-qwen3"]
        assert json.loads(post("/v1/completions", prompt=PROMPTS[0]))["choices"][0]["text"] == completion
        events = post("/v1/chat/completions", messages=QUESTION, stream=True).split("\n\n")
        chunks = [json.loads(event.removeprefix("data: ")) for event in events if event.startswith("data: {")]
        assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks) == answer
        assert b"num_requests_running" in urlopen(f"{url}/metrics").read()
    finally:
        server.terminate()
        server.wait()


@pytest.mark.parametrize(("command", "words"), [("generate Hello --echo --temperature 0", "Hello"), ("doctor", "ok")])
def test_a_command_runs(command, words):
    arguments = [sys.executable, "-m", "nanoinfer", *command.split()]
    assert words in subprocess.run(arguments, capture_output=True, text=True, check=True).stdout


def test_every_module_is_imported_or_lacks_an_optional_package():
    packages = nanoinfer, nanoinfer_lab, nanoinfer_course
    for module in chain(*(pkgutil.walk_packages(each.__path__, f"{each.__name__}.") for each in packages)):
        if module.name != "nanoinfer.__main__":
            try:
                import_module(module.name)
            except ModuleNotFoundError as error:
                assert error.name in OPTIONAL, module.name  # noqa: PT017
