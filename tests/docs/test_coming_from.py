"""A test holds each line of docs/coming_from.md, and its commands are ours."""

import re
import shlex
from pathlib import Path

import typer

from nanoinfer.cli.main import app

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/coming_from.md").read_text(encoding="utf-8")
ROWS = [line for line in PAGE.splitlines() if line.startswith("| ") and line != "| there | here |"]
SAME_AS_IN_VLLM = """
api-key attention-backend dtype enable-lora enable-prefix-caching enforce-eager host kv-cache-dtype logits-processors
lora-modules max-lora-rank max-loras max-model-len max-num-batched-tokens max-num-seqs port quantization
reasoning-parser revision root-path scheduler-cls scheduling-policy seed served-model-name speculative-config
ssl-certfile ssl-keyfile tensor-parallel-size tokenizer tool-call-parser uds
""".split()
# The test that holds the lines with these beginnings. Those below hold the others.
HELD_BY = {
    "`ollama ": "test_ollamas_commands_say_what_to_type",
    "`OLLAMA_HOST` for": "test_ollamas_paths_are_404_with_those_to_use",
    "a Q4_0": "test_a_gguf_file_chats_ends_its_text_and_runs_in_8_bits",
    "a prompt longer": "test_a_prompt_that_is_too_long_is_an_error_result_and_the_others_finish",
    "a long chat": "test_a_full_context_leaves_out_the_oldest_turns_and_keeps_the_system_message",
    "parallel requests": "test_the_tokens_of_a_seed_are_those_of_generate_under_a_mixed_load",
    "tool calls": "test_random_weights_make_valid_calls_if_they_must",
    "`from vllm": "test_a_vllm_script_runs_with_only_its_imports_changed_or_as_its_row_says",
    "nearly": "test_greedy_tokens_equal_transformers_over_a_ragged_batch",
    "another text": "test_requests_get_the_same_bits_alone_and_together_and_the_sessions_hold",
    "export": "test_logits_equal_transformers_in_fp32",
    "no breakpoint": "test_the_core_imports_nothing_that_it_does_not_use",
}


def parsed(arguments):
    """The context of the command that these arguments call, which is not run."""
    root = typer.main.get_command(app)
    context = root.make_context("nanoinfer", list(arguments))
    name, command, rest = root.resolve_command(context, list(arguments))
    return command.make_context(name, rest, parent=context)


def test_a_test_holds_every_line():
    sources = [path.read_text(encoding="utf-8") for path in ROOT.glob("tests/**/test_*.py")]
    defined = {name for source in sources for name in re.findall(r"^def (test_\w+)", source, re.MULTILINE)}
    assert set(HELD_BY.values()) <= defined
    known = (*(f"| {start}" for start in HELD_BY), "| `--")
    assert [row for row in ROWS if not row.startswith(known) and "| `nanoinfer " not in row] == []
    assert all(any(row.startswith(start) for row in ROWS) for start in known)


def test_every_command_of_the_page_is_one_that_the_parser_reads():
    commands = re.findall(r"`nanoinfer ([^`]+)`", PAGE)
    assert len(commands) >= 12
    for command in commands:
        parsed(shlex.split(command))  # raises typer.Exit for what it cannot read


def test_vllms_options_are_ours_or_not_as_the_page_says():
    ours = {option for param in parsed(["serve"]).command.params for option in param.opts}
    rows = [row.strip("| ").split(" | ") for row in ROWS if row.startswith("| `--")]
    named = [(option, here.startswith("the same")) for theirs, here in rows for option in re.findall(r"`(--[\w-]+)", theirs)]
    assert len(named) >= 15
    assert [option for option, is_ours in named if (option in ours) is not is_ours] == []
    assert {option for option, is_ours in named if is_ours} <= {f"--{name}" for name in SAME_AS_IN_VLLM} <= ours
