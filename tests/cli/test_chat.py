"""`nanoinfer chat` in this process: the commands of a session, and one question. test_terminal.py has a terminal."""

import re
import shutil
import signal
from dataclasses import replace

import pytest
from typer.testing import CliRunner

import nanoinfer.llm
from nanoinfer import LLM, SamplingParams
from nanoinfer.cli.chat_session import COMMANDS, PARAMETERS, ChatSession, complete
from nanoinfer.cli.main import app
from nanoinfer.cli.options import EngineOptions, check_chat_template
from nanoinfer.errors import NanoinferError
from nanoinfer.execution.model_runner import ModelRunner
from nanoinfer.loading.checkpoint import BUNDLED
from nanoinfer.outputs import CompletionOutput, Delta, RequestMetrics, RequestOutput
from tests.helpers import gguf_files

pytestmark = pytest.mark.slow

LILY, TOM = "Tell me a story about Lily", "Tell me a story about Tom"
GREEDY = SamplingParams(temperature=0, max_tokens=12)


@pytest.fixture(scope="module")
def llm():
    return LLM(kv_cache_memory=2**24, block_size=16, max_model_len=128)


@pytest.fixture
def session(llm):
    return ChatSession(llm, GREEDY)


def user(text):
    return {"role": "user", "content": text}


def said(session):
    return [message["content"] for message in session.messages]


def answer(llm, messages, params=GREEDY):
    return llm.chat(messages, params, use_tqdm=False)[0].outputs[0].text


# ---- a session


def test_answers_are_those_of_llm_chat_on_the_conversation(llm, session, capsys):
    session.handle(LILY)
    session.handle(TOM)
    first = answer(llm, [user(LILY)])
    second = answer(llm, [user(LILY), {"role": "assistant", "content": first}, user(TOM)])
    assert said(session) == [LILY, first, TOM, second]
    assert capsys.readouterr().out == f"{first}\n{second}\n"
    session.handle("/clear")
    session.handle(TOM)
    assert said(session) == [TOM, answer(llm, [user(TOM)])]


def test_a_turn_computes_only_its_new_tokens(llm, session):
    session.handle("/system A beginning that no other test has")
    lengths, cached = [], []
    for question in (LILY, TOM, LILY):
        session.handle(question)
        lengths.append(len(session.output.prompt_token_ids) + len(session.output.outputs[0].token_ids))
        cached.append(session.output.metrics.num_cached_tokens)
    # All full blocks of what was computed before: the newest token has no keys and values yet.
    assert cached[1:] == [(length - 1) // 16 * 16 for length in lengths[:2]]


def test_a_question_that_does_not_fit_is_refused_and_the_conversation_stays(session, capsys):
    session.handle(LILY)
    before = said(session)
    with pytest.raises(NanoinferError, match=r"maximum context length is 128 tokens"):
        session.handle(LILY * 100)
    assert (said(session), session.num_dropped) == (before, 0)
    session.handle(TOM)
    assert len(said(session)) == 4


def test_where_an_answer_is_cut_it_is_noted(session, capsys, caplog):
    session.handle(LILY)
    assert "(the answer is cut: max_tokens is 12)" in capsys.readouterr().err
    session.params = replace(session.params, max_tokens=1000)
    session.handle("a " * 100)
    assert "(the answer is cut: the context of 128 tokens is full)" in capsys.readouterr().err
    assert not caplog.messages  # the note says it, and the engine nothing of max_tokens
    session.handle("/set stop Once")
    session.handle(LILY)
    assert session.output.outputs[0].finish_reason == "stop"
    assert "cut" not in capsys.readouterr().err


def test_a_full_context_is_noted_once_and_the_answers_go_on(session, capsys):
    session.handle("/system You tell stories.")
    for _ in range(9):
        session.handle(LILY)
        assert session.output.metrics.num_output_tokens == 12
        assert "You tell stories." in session.output.prompt
    assert (len(said(session)), session.num_dropped > 6) == (18, True)
    assert capsys.readouterr().err.count("the context is full: from now on") == 1


def test_an_empty_answer_is_noted_and_not_kept(session, capsys):
    session.handle(TOM)
    before = said(session)
    session.handle("/set allowed_token_ids [0]")  # EOS alone
    session.handle("/retry")
    assert "the answer is empty" in capsys.readouterr().err
    assert said(session) == before, "the old answer is kept"
    session.handle("/clear")
    session.handle(LILY)
    assert said(session) == []


def test_an_answer_that_fails_is_an_error_and_not_kept(session, monkeypatch, capsys):
    failed = CompletionOutput(0, "Once", [5], finish_reason="error", error="no finite logits")
    output = RequestOutput("0", None, [5], [failed], finished=True, metrics=RequestMetrics(0.0))
    monkeypatch.setattr(LLM, "stream", lambda *_: (Delta(*delta) for delta in (("Once", [5]), ("", [], output))))
    with pytest.raises(NanoinferError, match="no finite logits"):
        session.handle(LILY)
    assert (capsys.readouterr().out, said(session)) == ("Once\n", [])


def test_ctrl_c_keeps_what_was_shown(llm, session, monkeypatch, capsys, python_handles_ctrl_c):
    forward, steps = ModelRunner.forward, iter(range(1000))

    def interrupted(self, batch):
        if next(steps) == 4:
            signal.raise_signal(signal.SIGINT)
        return forward(self, batch)

    monkeypatch.setattr(ModelRunner, "forward", interrupted)
    session.handle(LILY)
    shown = capsys.readouterr()
    assert (said(session), shown.out, shown.err) == ([LILY, shown.out.strip()], shown.out, "(stopped)\n")
    whole = answer(llm, [user(LILY)])
    assert whole.startswith(said(session)[1])
    assert 0 < len(said(session)[1]) < len(whole)
    session.handle("/retry")
    assert said(session) == [LILY, whole]
    assert llm.engine.num_unfinished == 0


def test_retry_draws_another_answer_and_a_seed_repeats_the_session(llm):
    params = replace(GREEDY, temperature=1.0, seed=5)
    texts = []
    for _ in range(2):
        session = ChatSession(llm, params)
        session.handle(LILY)
        [_, first] = said(session)
        session.handle("/retry")
        texts.append((first, said(session)[1]))
    assert texts[0] == texts[1]
    assert texts[0] == tuple(answer(llm, [user(LILY)], replace(params, seed=seed)) for seed in (5, 6))
    assert texts[0][0] != texts[0][1]  # equal by chance in principle, but the seed is fixed


def test_a_seed_is_drawn_where_none_is_given(llm):
    seeds = {ChatSession(llm, GREEDY).params.seed for _ in range(3)}
    assert len(seeds) == 3
    session = ChatSession(llm, replace(GREEDY, seed=7))
    session.handle("/set seed None")
    assert session.params.seed not in (None, 7)


def test_set_changes_one_parameter(session):
    for command, name, value in (
        ("/set temperature 0.5", "temperature", 0.5),
        ("/set  top_k   7", "top_k", 7),
        ("/set max_tokens None", "max_tokens", None),
        ("/set stop END of it", "stop", ("END of it",)),
        ("/set stop '\\n'", "stop", ("\n",)),
        ('/set stop ["a", "b"]', "stop", ("a", "b")),
        ("/set logit_bias {5: 1.5}", "logit_bias", {5: 1.5}),
        ("/set ignore_eos true", "ignore_eos", True),
        ("/set stop none", "stop", ()),
        ("/set stop 'none'", "stop", ("none",)),
    ):
        before = session.params
        session.handle(command)
        assert session.params == replace(before, **{name: value}), command


def test_help_lists_every_command(session, capsys):
    session.handle("/help")
    shown = capsys.readouterr().err
    assert [name for name in COMMANDS if f"/{name}" not in shown] == []


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ("/hlep", "there is no command /hlep; did you mean /help?"),
        ("/xyz", "known are /help, /clear"),
        ("/", "there is no command /;"),
        ("/usr/bin is what?", "put a space before a question that begins with /"),
        ("/set temperatur 1", "no parameter 'temperatur'; did you mean temperature?"),
        ("/set n 2", "no parameter 'n'; known are temperature"),
        ("/set temperature -1", "temperature must be finite and >= 0, got -1"),
        ("/set temperature high", "temperature must be a number, got 'high'"),
        ("/set temperature " + "9" * 5000, "temperature must be"),
        ("/set top_k " + "(" * 5000, "top_k must be an integer"),
        ("/set min_tokens 100", "min_tokens must not pass max_tokens"),
        ("/set stop_token_ids [99999]", "stop_token_ids has the token id 99999"),
        ("/save", "write /save FILE, got '/save'"),
        ("/clear all", "write /clear, got '/clear all'"),
        ("/load /no/such/file", "cannot read /no/such/file"),
        ("/save /no/such/folder/file", "cannot write /no/such/folder/file"),
        ("/load ~nobody-here/file", "~nobody-here/file is in no home folder that is known; give another path"),
        ("/save ~nobody-here/file", "~nobody-here/file is in no home folder that is known; give another path"),
        ("/stats", "no statistics"),
        ("/retry", "no question to answer again"),
        ("\udcff", "not valid Unicode"),
    ],
)
def test_a_mistake_is_one_sentence_and_changes_nothing(session, message, words):
    before = session.params
    with pytest.raises(NanoinferError) as raised:
        session.handle(message)
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)
    assert (session.params, said(session)) == (before, [])


def test_set_lists_every_parameter_and_default_takes_one_back(session, capsys):
    for line in ("/set top_k 3", "/set temperature 0.5", "/set temperature default", "/set"):
        session.handle(line)
    shown = capsys.readouterr().err
    assert session.params.temperature == GREEDY.temperature == 0
    listed = dict(re.findall(r"^  (\w+) {2,}(.+)$", shown, re.MULTILINE))
    assert (listed["temperature"], listed["top_k"], [*listed]) == ("0.0", "3", PARAMETERS)
    assert max(map(len, shown.splitlines())) <= 80
    session.handle("/set top_k")
    assert capsys.readouterr().err == "(top_k is 3)\n"


def test_tab_completes_commands_parameters_and_files(tmp_path):
    (tmp_path / "talk.json").touch()
    for line, completed in (
        ("/he", ["/help"]),
        ("/set temp", ["/set temperature"]),
        ("/set stop", ["/set stop", "/set stop_token_ids"]),
        ("/set stop END", []),
        ("What is /he", []),
        (f"/load {tmp_path}/ta", [f"/load {tmp_path}/talk.json"]),
        ("/clear ta", []),
    ):
        before, _, _ = line.rpartition(" ")
        assert [f"{before} {word}".strip() for word in complete(line)] == completed


def test_only_a_line_that_begins_with_a_slash_is_a_command(session):
    for question in (" /exit", "/exit\nor not?"):
        session.handle("/clear")
        session.handle(question)
        assert said(session)[0] == question.strip()
    with pytest.raises(EOFError):
        session.handle("/exit")


def test_a_conversation_is_saved_and_loaded(llm, session, tmp_path):
    session.handle(LILY)
    session.handle(f"/save {tmp_path}/my talk.json")
    other = ChatSession(llm, GREEDY)
    other.handle(f"/load {tmp_path}/my talk.json")
    assert said(other) == said(session) != []


def test_stats_follow_each_answer_if_asked_for(llm, capsys):
    session = ChatSession(llm, GREEDY, shows_stats=True)
    session.handle(LILY)
    stats = capsys.readouterr().err.splitlines()[-1]
    assert re.match(r"\(prompt .* tokens/s, context of ", stats)
    session.handle("/stats")
    assert capsys.readouterr().err == stats + "\n"


# ---- the command, where standard input is no terminal


def run(*arguments, stdin=""):
    return CliRunner().invoke(app, ["chat", *arguments], input=stdin)


ONE_LINE = ("--temperature", "0", "--max-tokens", "12")


def test_a_question_is_answered_once_without_prompts(llm, monkeypatch, capsys):
    for arguments, stdin, question in (
        ([LILY], "", LILY),
        ([], LILY + "\n", LILY),
        ([], f"{LILY}\n/exit\n{TOM}\n", f"{LILY}\n/exit\n{TOM}"),  # one question, and no commands
        ([LILY], "Once upon a time\n", f"Once upon a time\n\n{LILY}"),
    ):
        result = run(*arguments, *ONE_LINE, stdin=stdin)
        assert (result.exit_code, result.stdout) == (0, answer(llm, [user(question)]) + "\n")
        assert result.stderr == "(the answer is cut: max_tokens is 12)\n"
    result = run(stdin="\n")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("error: there is no question")
    monkeypatch.setattr("sys.stdin", None)  # a closed standard input is an empty one
    app(["chat", LILY, *ONE_LINE], standalone_mode=False)
    assert capsys.readouterr().out == answer(llm, [user(LILY)]) + "\n"


def test_variables_reach_the_template(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(LLM, "stream", lambda self, prompt, params: seen.append(prompt["prompt"]) or (_ for _ in ()))
    folder = tmp_path / "model"
    shutil.copytree(BUNDLED / "tiny-qwen3", folder)
    template = "{{ messages[0].content }}{% if enable_thinking is false %} NO{% endif %}{{ tone }}"
    (folder / "chat_template.jinja").write_text(template)
    for options in ([], ["--no-thinking"], ["--chat-template-kwargs", '{"tone": "!", "enable_thinking": false}']):
        run("Hi", "--model", str(folder), *options)
    assert seen == ["Hi", "Hi NO", "Hi NO!"]


def test_a_variable_that_has_no_effect_is_one_sentence():
    for options, words in (
        (["--no-thinking"], "this checkpoint's chat template has no variable 'enable_thinking'"),
        (["--chat-template-kwargs", "{"], "--chat-template-kwargs must be JSON, got '{'"),
        (["--chat-template-kwargs", "[1]"], "must be a JSON object such as"),
        (["--chat-template-kwargs", '{"tone": 1}'], "no variable 'tone'"),
        (["--chat-template-kwargs", '{"messages": []}'], "messages"),
        (["--no-thinking", "--chat-template-kwargs", '{"enable_thinking": true}'], "contradicts"),
    ):
        result = run(LILY, *options)
        assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (1, "", 1)
        assert words in result.stderr


def test_a_model_without_a_template_is_refused_before_it_is_loaded(gpt2_path, tmp_path, monkeypatch):
    monkeypatch.setattr(nanoinfer.llm, "LLM", None)
    base = shutil.copytree(BUNDLED / "tiny-qwen3", tmp_path / "base", ignore=shutil.ignore_patterns("*.jinja"))
    file = gguf_files.write(tmp_path / "file.gguf", {"general.architecture": "llama"}, {})
    for model in (gpt2_path, base, file):
        for command in (["chat", "Hello"], ["generate", "--chat", "Hello"]):
            result = CliRunner().invoke(app, [*command, "--model", str(model)])
            assert result.exit_code == 1
            words = f"error: {model} has no chat template; continue a text with `nanoinfer generate`, or"
            assert result.stderr.startswith(words)
    # A template may be that of another tokenizer, or in a GGUF file.
    written = gguf_files.write(tmp_path / "with.gguf", {"tokenizer.chat_template": "{{ messages }}"}, {})
    for options in (EngineOptions(model=str(gpt2_path), tokenizer="tiny-gpt2"), EngineOptions(model=str(written))):
        check_chat_template(options)


def test_ctrl_c_ends_a_single_answer_as_a_shell_expects(monkeypatch, python_handles_ctrl_c):
    monkeypatch.setattr(ModelRunner, "forward", lambda self, batch: signal.raise_signal(signal.SIGINT))
    assert run(LILY).exit_code == 130
