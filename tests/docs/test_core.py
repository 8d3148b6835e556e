"""The core, what a token passes on a CPU, is small enough to read in an evening. docs/reading.md says how many lines it has."""

import ast
import io
import re
import sys
import tokenize
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "nanoinfer"
PAGE = PACKAGE.parent / "docs" / "reading.md"
SENTENCE = re.compile(r"([\d,]+) lines of code \(([\d,]+) with docstrings, comments and blank lines\)")

# In the order of a token's journey through a loaded Qwen model, from LLM.generate to the RequestOutput. No loading, no errors,
# no C++ kernels and no modules that call them: these files define what they compute.
CORE = """
    llm.py sampling_params.py engine/inputs.py tokenization/tokenizer.py
    engine/llm_engine.py engine/guards.py engine/request.py
    scheduling/sequence.py scheduling/scheduler.py scheduling/block_manager.py scheduling/step_plan.py
    execution/executor.py execution/uniproc_executor.py execution/forward_batch.py execution/model_runner.py
    devices/transfer.py devices/openmp.py
    models/qwen.py models/layers.py models/cpu_blocks.py models/cpu_linear.py
    attention/base.py attention/kv_cache.py attention/cpu.py
    sampling/sampler.py sampling/batch.py sampling/state.py sampling/stages.py sampling/draw.py sampling/fast.py
    sampling/logprobs.py
    engine/stopping.py tokenization/detokenizer.py outputs.py
""".split()


def num_code_lines(source: str) -> int:
    """Lines that hold code: no docstring, no comment alone, not blank."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in (tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING):
            lines |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(node):
            lines -= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return len(lines)


def count() -> tuple[int, int]:
    sources = [(PACKAGE / name).read_text(encoding="utf-8") for name in CORE]
    return sum(map(num_code_lines, sources)), sum(len(source.splitlines()) for source in sources)


def test_code_lines_are_those_with_code():
    assert (
        num_code_lines('"""Doc.\n\nMore."""\n\nx = (\n    1\n)  # one\n# two\n\ndef f():\n    "doc"\n    return """a\nb"""\n')
        == 6
    )


def test_the_core_is_under_4000_lines_and_the_page_says_the_number():
    num_code, num_all = count()
    assert num_code < 4000
    assert SENTENCE.search(PAGE.read_text(encoding="utf-8")).groups() == (f"{num_code:,}", f"{num_all:,}"), (
        "run: python tests/docs/test_core.py"
    )


if __name__ == "__main__":
    num_code, num_all = count()
    text = SENTENCE.sub(
        f"{num_code:,} lines of code ({num_all:,} with docstrings, comments and blank lines)",
        PAGE.read_text(encoding="utf-8"),
    )
    sys.exit(PAGE.write_text(text, encoding="utf-8") == 0)
