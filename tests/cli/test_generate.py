"""`nanoinfer generate`: where the prompt comes from, and what is printed. The model is loaded once for all tests."""

import json
import re
from dataclasses import asdict

import pytest
import torch
from typer.testing import CliRunner

import nanoinfer.cli.options
import nanoinfer.llm
import nanoinfer.loading.checkpoint
from nanoinfer import LLM, SamplingParams
from nanoinfer.cli.main import app
from nanoinfer.errors import NanoinferError

pytestmark = pytest.mark.slow

PROMPT = "Once upon a time"
SAMPLED = ("-t", "0.7", "--seed", "1", "-n", "6")


@pytest.fixture(scope="module")
def llm():
    return LLM(kv_cache_memory=2**24)


@pytest.fixture(autouse=True)
def loaded(llm, monkeypatch):
    """The arguments of LLM in each command. All commands use the same model."""
    arguments = []
    monkeypatch.setattr(nanoinfer.llm, "LLM", lambda **given: arguments.append(given) or llm)
    monkeypatch.setenv("COLUMNS", "80")
    return arguments


def run(*arguments, stdin=None):
    return CliRunner().invoke(app, ["generate", *arguments], input=stdin)


def answers(llm, prompt=PROMPT, **params):
    [output] = llm.generate(prompt, SamplingParams(**{"temperature": 0.7, "seed": 1, "max_tokens": 6} | params), use_tqdm=False)
    return output


def test_the_prompt_is_an_argument_or_standard_input_or_a_file(llm, tmp_path):
    file = tmp_path / "a prompt.txt"
    file.write_text(PROMPT + "\n")
    expected = answers(llm).outputs[0].text + "\n"
    for arguments, stdin in (((PROMPT,), None), (("-",), PROMPT), ((), PROMPT + "\n"), (("--file", str(file)), None)):
        result = run(*arguments, *SAMPLED, stdin=stdin)
        assert (result.stdout, result.stderr, result.exit_code) == (expected, "", 0), arguments


def test_the_json_of_a_chat_follows_the_thought_that_the_template_has_begun(llm, tmp_path, monkeypatch):
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "object"}')
    for template, is_json in (("{{ messages[0].content }}", True), ("{{ messages[0].content }}<think>", False)):
        monkeypatch.setattr(llm.engine.tokenizer.hf, "chat_template", template)
        result = run(PROMPT, "--chat", "--json-schema", str(schema), "-t", "0", "-n", "4", "--json")
        assert json.loads(result.stdout)["outputs"][0]["text"].startswith("{") == is_json


def test_two_prompts_no_text_and_a_missing_file_are_refused(tmp_path):
    file = tmp_path / "prompt.bin"
    file.write_bytes(b"abc \xff")
    for arguments, words in (
        ((PROMPT, "--file", str(file)), "give a prompt or --file, not both"),
        (("--file", str(file)), "is not valid UTF-8 text"),
        ((), 'standard input is empty; give a prompt, such as nanoinfer generate "Once upon a time"'),
        (("",), "the prompt is empty; give a prompt, such as"),
        (("--file", str(tmp_path / "none")), f"{tmp_path / 'none'}: No such file or directory"),
    ):
        result = run(*arguments)
        assert (result.exit_code, words in result.stderr, result.stdout) == (1, True, ""), result.output


def test_the_prompt_may_go_through_the_chat_template(llm):
    [output] = llm.chat([{"role": "user", "content": PROMPT}], SamplingParams(temperature=0, max_tokens=6), use_tqdm=False)
    assert run(PROMPT, "--chat", "-t", "0", "-n", "6").stdout == output.outputs[0].text + "\n"
    assert output.outputs[0].text != answers(llm, temperature=0).outputs[0].text


def test_several_answers_are_printed_with_their_numbers(llm):
    assert run(PROMPT, "--n", "2").exit_code == 2  # too close to -n, the number of tokens
    first, second = (answer.text for answer in answers(llm, n=2).outputs)
    assert run(PROMPT, "--num-answers", "2", *SAMPLED).stdout == f"[answer 1 of 2]\n{first}\n\n[answer 2 of 2]\n{second}\n\n"


def test_json_is_the_output_of_llm(llm):
    printed = json.loads(run(PROMPT, "--json", "--num-answers", "2", "--logprobs", "1", *SAMPLED).stdout)
    expected = json.loads(json.dumps(asdict(answers(llm, n=2, logprobs=1))))
    for one in (printed, expected):
        del one["request_id"], one["metrics"]
    assert printed == expected


def test_log_probabilities_are_a_table(llm):
    answer = answers(llm, logprobs=2).outputs[0]
    text, _, table = run(PROMPT, "--logprobs", "2", *SAMPLED).stdout.partition("\n")
    assert text == answer.text
    rows = table.splitlines()[2:]
    assert len(rows) == len(answer.token_ids) == 6
    for row, token_id, position in zip(rows, answer.token_ids, answer.logprobs, strict=True):
        likeliest = min(position.values(), key=lambda one: one.rank)
        words = (repr(position[token_id].decoded_token), f"{position[token_id].logprob:.2f}", repr(likeliest.decoded_token))
        assert [word for word in words if word not in row] == []


def test_the_numbers_of_tokens_and_the_speed_go_to_standard_error(llm):
    result = run(PROMPT, "--stats", *SAMPLED)
    assert result.stdout == answers(llm).outputs[0].text + "\n"
    assert re.fullmatch(
        r"prompt 4 tokens \(\d+ cached\), first token after \d+\.\d\d s, output 6 tokens, \d+\.\d tokens/s\n", result.stderr
    )


def test_a_prompt_that_is_too_long_is_an_error_in_json_too():
    for options in ((), ("--json",)):
        result = run("a " * 600, *options)
        assert (result.exit_code, result.stdout) == (1, "")
        assert "maximum context length is 512 tokens" in result.stderr


def test_a_model_that_has_a_smaller_context_than_its_own_says_so(llm, monkeypatch):
    small = LLM(kv_cache_memory=300_000)
    monkeypatch.setattr(nanoinfer.llm, "LLM", lambda **given: small)
    note = f"max_model_len is {small.engine.max_model_len}, not the model's 512: the KV cache holds no more"
    assert note in run(PROMPT, *SAMPLED).stderr
    assert run(PROMPT, "--max-model-len", "64", *SAMPLED).stderr == ""  # LLM itself would log it


@pytest.mark.parametrize("command", [["generate", PROMPT], ["chat"], ["explain", PROMPT]])
def test_the_options_of_the_engine_reach_it_in_every_command(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # explain begins with the file that it will write
    seen, threads = [], []

    def refuse(**given):
        seen.append(given)
        raise NanoinferError("enough")

    monkeypatch.setattr(nanoinfer.llm, "LLM", refuse)
    monkeypatch.setattr(nanoinfer.loading.checkpoint, "locate", lambda *_: None)  # downloads the model
    monkeypatch.setattr(nanoinfer.cli.options, "check_chat_template", lambda _: None)
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    options = "-m some/model --quantization int8 --threads 3 --enforce-eager --kv-cache-memory 1G --dtype bfloat16 --device cpu"
    CliRunner().invoke(app, [*command, *options.split()])
    [given] = seen
    expected = {"model": "some/model", "quantization": "int8", "enforce_eager": True, "kv_cache_memory": 2**30}
    assert expected | {"dtype": "bfloat16", "device": "cpu"} == {name: given[name] for name in [*expected, "dtype", "device"]}
    assert threads == [3]
    assert "threads" not in given
