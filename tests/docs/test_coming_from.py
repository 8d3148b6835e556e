"""The commands and options of docs/coming_from.md are ours."""

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


def parsed(arguments):
    """The context of the command that these arguments call, which is not run."""
    root = typer.main.get_command(app)
    context = root.make_context("nanoinfer", list(arguments))
    name, command, rest = root.resolve_command(context, list(arguments))
    return command.make_context(name, rest, parent=context)


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
