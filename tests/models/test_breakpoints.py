"""The promise of README.md: `LLM(enforce_eager=True)` runs the file as you read it, and a breakpoint in it stops."""

import ast
import bdb
import inspect
import sys
from pathlib import Path

import pytest
import torch

from nanoinfer import LLM, SamplingParams
from nanoinfer.models import gpt2, qwen

PROMPT, NUM_TOKENS = [5, 300, 7, 7, 20], 4
PARAMS = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)


class Debugger(bdb.Bdb):
    """Stops at every line of a file's forward methods, and notes the lines and the local variables there."""

    def __init__(self, file):
        super().__init__()
        self.lines = statements_of(file)
        self.stops = []  # (line, {name: a tensor})
        for line in self.lines:
            assert self.set_break(str(file), line) is None

    def user_line(self, frame):
        if self.break_here(frame):
            tensors = {name: x for name, x in frame.f_locals.items() if isinstance(x, torch.Tensor)}
            self.stops.append((frame.f_lineno, tensors))
        self.set_continue()

    def run_in(self, function):
        """Call a function with the breakpoints."""
        previous = sys.gettrace()
        try:
            return self.runcall(function)
        finally:
            sys.settrace(previous)
            self.clear_all_breaks()  # bdb keeps them for all debuggers


def statements_of(file):
    """The first line of every statement in a forward method."""
    nodes = ast.walk(ast.parse(file.read_text(encoding="utf-8")))
    methods = [node for node in nodes if isinstance(node, ast.FunctionDef) and node.name == "forward"]
    return {node.lineno for method in methods for one in method.body for node in ast.walk(one) if isinstance(node, ast.stmt)}


def debugged(module, enforce_eager):
    """The stops during generate(), its token ids, and those without a debugger."""
    file, name = Path(inspect.getfile(module)), module.__name__.rpartition(".")[2]
    bundled = {"gpt2": "tiny-gpt2", "qwen": "tiny-qwen3"}[name]
    llm = LLM(bundled, enforce_eager=enforce_eager, kv_cache_memory=2**22)

    def generate():
        return llm.generate([PROMPT], PARAMS, use_tqdm=False)[0].outputs[0].token_ids

    expected, debugger = generate(), Debugger(file)
    llm.reset_prefix_cache()
    return debugger, debugger.run_in(generate), expected


@pytest.mark.parametrize("module", [gpt2, qwen], ids=["gpt2", "qwen"])
def test_a_breakpoint_stops_at_every_line_of_forward_in_every_step_and_sees_the_tensors(module):
    debugger, token_ids, expected = debugged(module, enforce_eager=True)
    assert token_ids == expected
    assert {line for line, _ in debugger.stops} == debugger.lines
    ids = [seen["input_ids"].tolist() for line, seen in debugger.stops if "input_ids" in seen and "x" not in seen]
    assert ids == [PROMPT, *([token_id] for token_id in expected[:-1])]  # the model's first line: once in each step
    q = [seen["q"] for _, seen in debugger.stops if "q" in seen]
    assert {x.shape[0] for x in q} == {len(PROMPT), 1}
    assert all(type(x) is torch.Tensor and x.isfinite().all() and x.any() for x in q)


@pytest.mark.slow
@pytest.mark.usefixtures("kernels")
def test_in_a_compiled_model_the_layers_lines_are_not_run():
    """The negative control: what is compiled does not stop there."""
    debugger, token_ids, expected = debugged(qwen, enforce_eager=False)
    assert token_ids == expected
    assert {line for line, _ in debugger.stops} < debugger.lines
