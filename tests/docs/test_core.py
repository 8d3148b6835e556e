"""The core is what LLM(enforce_eager=True) imports to generate text."""

import re
import subprocess
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

PACKAGE = Path(__file__).parents[2] / "nanoinfer"
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
    "engine/prompts.py": "end_to_end/test_llm.py",
    "execution/packing.py": "execution/test_forward_batch.py",
    "features/metrics/engine_metrics.py": "features/metrics/test_metrics.py",
    "features/chat/methods.py": "end_to_end/test_llm.py",
    "features/embedding/methods.py": "features/embedding/test_pooling.py",
    "features/training/methods.py": "features/training/test_rollouts.py",
    "features/training/loaded_weights.py": "features/training/test_rollouts.py",
    "fast/cuda/integer_kernels.py": "fast/cuda/test_quantized.py",
    "fast/cuda/integers.py": "fast/cuda/test_quantized.py",
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
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)


def test_the_pages_say_how_large_the_core_and_the_package_are():
    """To within a tenth, or a thousand lines."""
    docs, patterns = PACKAGE.parent / "docs", [["*.py"], ["*.cpp", "*.h"]]
    core = num_lines(PACKAGE / file for file in imported())
    python, cpp = (num_lines(path for kind in kinds for path in PACKAGE.rglob(kind)) for kinds in patterns)
    lab_and_course = num_lines(path for one in ("lab", "course") for path in PACKAGE.parent.glob(f"nanoinfer_{one}/**/*.py"))
    sentences = {
        "reading": (r"about ([\d,]+) lines in (\d+) modules", [core, len(imported())]),
        "faq": (
            r"about ([\d,]+) lines of Python, ([\d,]+) of them the core, ([\d,]+) of C\+\+, and ([\d,]+) of lab and course",
            [python, core, cpp, lab_and_course],
        ),
    }
    for page, (sentence, today) in sentences.items():
        [said] = re.findall(sentence, (docs / f"{page}.md").read_text(encoding="utf-8"))
        for number, num in zip(said, today, strict=True):
            assert int(number.replace(",", "")) == pytest.approx(num, rel=0.1, abs=1000 if num > 1000 else 0), page


def test_the_core_imports_nothing_that_it_does_not_use():
    assert [part for part in OPTIONAL if not (PACKAGE / part).exists()] == []
    assert [file for file in imported() if file.startswith(tuple(OPTIONAL)) and not file.startswith(ALWAYS)] == []


def test_every_module_of_the_core_has_a_file_of_tests():
    modules = [Path(file) for file in imported() if not file.endswith("__init__.py")]
    files = {file: TESTED_IN.get(file.as_posix(), file.with_name(f"test_{file.name}")) for file in modules}
    assert [str(file) for file, tests in files.items() if not (PACKAGE.parent / "tests" / tests).exists()] == []


def test_a_part_that_is_used_would_be_seen():
    parts = {"fast/accelerate.py", "models/gpt2.py", "features/drafts/speculator.py"}
    assert parts <= set(
        imported("import nanoinfer.fast.accelerate, nanoinfer.models.gpt2, nanoinfer.features.drafts.speculator")
    )
