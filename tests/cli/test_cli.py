"""`nanoinfer`, run in this process: it prints what LLM returns, and an error is one sentence."""

import json
import shutil
import signal
from dataclasses import replace

import pytest
from typer.testing import CliRunner

import nanoinfer
from nanoinfer import LLM, SamplingParams
from nanoinfer.cli.main import app
from nanoinfer.execution.local_executor import LocalExecutor
from nanoinfer.features.tracing import observer
from nanoinfer.loading.checkpoint import BUNDLED
from tests.helpers.replay_page import events_of

pytestmark = pytest.mark.slow

PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def llm():
    return LLM(kv_cache_memory=2**24)


def run(*arguments, stdin=None):
    return CliRunner().invoke(app, arguments, input=stdin)


def shown(*arguments, stdin=None):
    result = run(*arguments, stdin=stdin)
    assert (result.exit_code, result.stderr) == (0, ""), result.stderr
    return result.stdout


def test_version_is_the_packages():
    assert shown("--version") == f"nanoinfer {nanoinfer.__version__}\n"


@pytest.mark.parametrize("command", [["generate", PROMPT], ["chat"]])
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--model", "/nope"], "there is no folder '/nope'"),
        (["--lora", "/nope=0.5"], "there is no folder '/nope'; give an adapter's folder, as peft saves it"),
        (["--quantization", "int2"], "--quantization must be 'int8' or 'int4', got 'int2'"),
        (["--kv-cache-memory", "8"], "--kv-cache-memory"),
        (["--model", "not a name"], "neither a folder nor a possible hub name"),
        (["--temperature", "-1"], "error: --temperature must be finite and >= 0, got -1.0"),
        (["--max-tokens", "0"], "error: --max-tokens must be >= 1, got 0\n"),
        (["--max-model-len", "100000"], "error: --max-model-len must be <="),
    ],
)
def test_a_mistake_is_one_sentence_on_stderr_and_exit_code_1(command, options, sentence):
    result = run(*command, *options)
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (1, "", 1)
    assert result.stderr.startswith("error: ")
    assert sentence in result.stderr
    assert "Traceback" not in result.output


def test_standard_input_that_is_not_text_and_an_unknown_option_are_one_sentence():
    result = run("generate", "-", stdin=b"abc \xff")
    assert (result.exit_code, result.stderr.count("\n"), "standard input is not valid text" in result.stderr) == (1, 1, True)
    assert run("generate", PROMPT, "--no-such-option").exit_code == 2


def test_ctrl_c_ends_generate_as_a_shell_expects_and_keeps_the_text_so_far(monkeypatch, python_handles_ctrl_c):
    launch, count = LocalExecutor.launch, iter(range(1000))

    def interrupted(self, *arguments):
        if next(count) == 5:
            signal.raise_signal(signal.SIGINT)
        return launch(self, *arguments)

    monkeypatch.setattr(LocalExecutor, "launch", interrupted)
    result = run("generate", PROMPT, "--seed", "1")
    assert (result.exit_code, result.stdout.strip() != "") == (130, True)
    monkeypatch.setattr(LLM, "__init__", lambda *args, **kwargs: signal.raise_signal(signal.SIGINT))  # while it loads
    result = run("generate", PROMPT)
    assert (result.exit_code, result.output) == (130, "")


def test_a_terminal_without_the_characters_shows_question_marks():
    result = CliRunner(charset="ascii").invoke(app, ["generate", "一", "--echo", "--max-tokens", "1"])
    assert (result.exit_code, result.stdout[:1], result.stderr) == (0, "?", "")


def test_explain_shows_every_token_and_writes_a_page_of_the_events(llm, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    page = tmp_path / "page.html"
    options = ["--top-k", "5", "--seed", "3", "--max-tokens", "6", "--stop", " kind"]
    out = shown("explain", PROMPT, "Lily was", *options, "--html", str(page))
    params = SamplingParams(top_k=5, seed=3, max_tokens=6, stop=[" kind"])
    first, second = llm.generate([PROMPT, "Lily was"], replace(llm.get_default_sampling_params(), **differing(params)))
    for token_id in [*first.outputs[0].token_ids, *second.outputs[0].token_ids]:
        assert repr(llm.get_tokenizer().decode([token_id])) in out
    assert "1959 > top_k 5" in out
    assert "(end: stop, ' kind')" in out
    assert str(page) in out
    appended = [event for event in events_of(page) if event["event"] == "TokenAppended"]
    assert [event["token_id"] for event in appended if event["sequence_id"] == "1"] == second.outputs[0].token_ids
    assert any(event["event"] == "TokenDrawn" for event in events_of(page))


def test_explain_in_json_has_the_tokens_alone_on_standard_output(llm, tmp_path):
    result = run("explain", PROMPT, "--seed", "3", "-n", "4", "--top-k", "5", "--json", "--html", str(tmp_path / "page.html"))
    rows = json.loads(result.stdout)
    params = replace(llm.get_default_sampling_params(), top_k=5, seed=3, max_tokens=4)
    [output] = llm.generate(PROMPT, params, use_tqdm=False)
    assert [row["token_id"] for row in rows] == output.outputs[0].token_ids
    for row in rows:
        assert row["interval"][0] <= row["u"] < row["interval"][1]
        assert list(row["left"].values())[-1] <= 5
    assert "replays it in a browser" in result.stderr


def test_a_drawn_seed_is_logged_as_the_option_that_repeats_it_and_a_given_one_is_not(caplog):
    drawn = [run("-v", "generate", PROMPT, "-n", "5")]
    [message] = [message for message in caplog.messages if "was drawn" in message]
    seed = message.split("--seed ")[1].split()[0]
    caplog.clear()
    drawn.append(run("-v", "generate", PROMPT, "-n", "5", "--seed", seed))
    assert [message for message in caplog.messages if "was drawn" in message] == []
    assert drawn[0].stdout == drawn[1].stdout


def test_a_folder_without_a_tokenizer_names_it_and_a_hint(tmp_path):
    for name in ("config.json", "model.safetensors"):
        shutil.copy(BUNDLED / "tiny-gpt2" / name, tmp_path)
    result = run("generate", PROMPT, "-m", str(tmp_path))
    assert result.exit_code == 1
    assert f"{tmp_path} has no tokenizer files, such as tokenizer.json; name a tokenizer with --tokenizer" in result.stderr
    options = ("--seed", "1", "-n", "5")
    assert shown("generate", PROMPT, "-m", str(tmp_path), "--tokenizer", "tiny-gpt2", *options).strip()


def differing(params):
    return {name: getattr(params, name) for name in observer.differing(params)}


def test_explain_keeps_the_order_of_more_than_ten_prompts_and_reads_standard_input(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    arguments = ["explain", *(["Lily"] * 10), "-", "--max-tokens", "1", "--html", str(tmp_path / "page.html")]
    rows = json.loads(run(*arguments, "--json", stdin="Once upon\n").stdout)
    assert [row["sequence"] for row in rows] == [str(i) for i in range(11)]
    link, _, *table = shown(*arguments, stdin="Once upon\n").partition("\np: ")[0].splitlines()
    assert link == f"{tmp_path / 'page.html'} replays it in a browser: {(tmp_path / 'page.html').as_uri()}"
    num_shown = sum(line[:1].isdigit() and " - " in line for line in table)
    assert table.index(f"{11 - num_shown} more tokens are in the page, and in the output of --json.") <= 12
    assert '"prompt":"Once upon"' in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_explain_names_the_prompt_that_is_too_long_and_shows_the_others(tmp_path):
    page = tmp_path / "page.html"
    result = run("explain", "Lily", "a " * 600, "--max-tokens", "2", "--html", str(page))
    assert (result.exit_code, page.exists()) == (1, True)
    assert result.stderr.startswith("error: prompt 1: This model's maximum context length")
    page.unlink()
    result = run("explain", "a " * 600, "--html", str(page))
    assert (result.exit_code, page.exists()) == (1, False)  # nothing ran


def test_a_page_that_cannot_be_written_is_one_sentence(tmp_path):
    result = run("explain", PROMPT, "--max-tokens", "1", "--html", str(tmp_path))
    assert (result.exit_code, result.stderr) == (1, f"error: cannot write {tmp_path}: it is a folder; give another path\n")
