"""The core is what LLM(enforce_eager=True) imports to generate text. docs/reading.md says how large it is, and docs/faq.md how
large the package is.

`python tests/docs/test_core.py` writes the numbers into the pages after a change.
"""

import re
import subprocess
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

PACKAGE = Path(__file__).parents[2] / "nanoinfer"
DOCS = PACKAGE.parent / "docs"
# The sentences with the numbers, by their page.
SENTENCES = {
    DOCS / "reading.md": re.compile(r"[\d,]+ lines in \d+ modules"),
    DOCS / "faq.md": re.compile(r"about [\d,]+ lines of Python, [^|]+ of lab and course"),
}
# Parts that are imported when they are used.
OPTIONAL = """
    features/ fast/ server/ cli/ compat/ loading/hub.py
    models/gpt2.py models/llama.py models/qwen_moe.py models/gemma3.py models/gpt_oss.py
""".split()
# Of these, what every run imports: methods of LLM, an engine's counts, the sampler's reports, and where its weights are held.
OF_LLM = [f"features/{one}/{file}" for one in ("chat", "embedding", "training") for file in ("__init__.py", "methods.py")]
ALWAYS = ("features/__init__.py", *OF_LLM, "features/metrics/", "features/logprobs/__init__.py")
ALWAYS += ("features/logprobs/token_logprobs.py", "features/training/loaded_weights.py")

# The other modules of the core have a file of their own name in the folder of tests that mirrors theirs.
TESTED_IN = {
    "llm.py": "end_to_end/test_llm.py",
    "execution/packing.py": "execution/test_forward_batch.py",
    "features/metrics/engine_metrics.py": "features/metrics/test_metrics.py",
    "features/chat/methods.py": "end_to_end/test_llm.py",
    "features/embedding/methods.py": "features/embedding/test_pooling.py",
    "features/training/methods.py": "features/training/test_rollouts.py",
    "loading/config_json.py": "models/test_config_json.py",
    "loading/devices.py": "loading/test_loader.py",
    "models/windows.py": "features/hybrid/test_attention.py",
    "scheduling/observer.py": "engine/test_observer.py",
    "system/progress.py": "cli/test_terminal.py",
}


@cache
def imported(run: str = "LLM(enforce_eager=True, kv_cache_memory=2**22).generate('Once', use_tqdm=False)") -> tuple[str, ...]:
    """The files of the package that are imported when a new interpreter runs this, as "models/qwen.py"."""
    code = (
        f"import sys; from nanoinfer import LLM; {run}; "
        "print(*(module.__file__ for name, module in sys.modules.items() if name.partition('.')[0] == 'nanoinfer'), sep='\\n')"
    )
    files = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()
    return tuple(sorted(Path(file).relative_to(PACKAGE).as_posix() for file in files))


def num_lines(files: Iterable[Path]) -> int:
    """The lines, with docstrings and blank lines."""
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)


def with_sizes(page: Path) -> str:
    """The text of a page with today's numbers: those of the core, or those of the package in thousands."""
    core = num_lines(PACKAGE / file for file in imported())
    python, cpp = (num_lines(path for kind in kinds for path in PACKAGE.rglob(kind)) for kinds in (["*.py"], ["*.cpp", "*.h"]))
    lab_and_course = num_lines(path for one in ("lab", "course") for path in PACKAGE.parent.glob(f"nanoinfer_{one}/**/*.py"))
    sentence = f"{core:,} lines in {len(imported())} modules"
    if page.stem == "faq":
        rounded = [f"{round(num, -3):,}" for num in (python, core, cpp, lab_and_course)]
        sentence = "about {} lines of Python, {} of them the core, {} of C++, and {} of lab and course".format(*rounded)
    return SENTENCES[page].sub(sentence, page.read_text(encoding="utf-8"))


@pytest.mark.parametrize("page", SENTENCES, ids=lambda page: page.stem)
def test_the_page_says_how_large_the_core_is(page):
    text = page.read_text(encoding="utf-8")
    assert len(SENTENCES[page].findall(text)) == 1
    assert with_sizes(page) == text, "run: python tests/docs/test_core.py"


@pytest.mark.parametrize("part", OPTIONAL)
def test_the_core_imports_nothing_that_it_does_not_use(part):
    assert any(path.as_posix().startswith((PACKAGE / part).as_posix()) for path in PACKAGE.rglob("*.py"))
    assert [file for file in imported() if file.startswith(part) and not file.startswith(ALWAYS)] == []


def test_every_module_of_the_core_has_a_file_of_tests():
    modules = [Path(file) for file in imported() if not file.endswith("__init__.py")]
    files = {file: TESTED_IN.get(file.as_posix(), file.with_name(f"test_{file.name}")) for file in modules}
    assert [str(file) for file, tests in files.items() if not (PACKAGE.parent / "tests" / tests).exists()] == []


def test_a_part_that_is_used_would_be_seen():
    tracer, drafts = "from nanoinfer import Recorder", "speculative_config={'method': 'ngram'}"
    run = f"{tracer}; LLM('tiny-gpt2', kv_cache_memory=2**22, tracer=Recorder(), {drafts})"
    parts = {"fast/accelerate.py", "models/gpt2.py", "features/tracing/events.py", "features/drafts/speculator.py"}
    assert parts <= set(imported(run))


if __name__ == "__main__":
    for each in SENTENCES:
        each.write_text(with_sizes(each), encoding="utf-8")
