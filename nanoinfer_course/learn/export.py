"""Make a repository of the learner's own engine: one file that runs alone, its tests, a README with measured badges, an action.

In: the learner's files. Out: a folder. engine.py is tangled from the package's source, templates/engine.py.txt and the
learner's functions. Its tests are the cases of the tasks and answers of the package's engine.
"""

import ast
import json
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from string import Template
from typing import Any

import torch

import nanoinfer
from nanoinfer.errors import InvalidValueError, NanoinferError
from nanoinfer.llm import LLM
from nanoinfer.loading.folders import BUNDLED
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.system.environment import cpu_name
from nanoinfer_course.learn.check import Task
from nanoinfer_course.learn.tangle import missing_names, names_in, repeated_names, simplified, tangle
from nanoinfer_course.learn.workbook import check_new, first_line
from nanoinfer_lab.stories import write

TEMPLATES = Path(__file__).with_name("templates")
PACKAGE = "nanoinfer_course.learn"
MODELS = ("tiny-gpt2", "tiny-qwen3")
MODEL_FILES = ("README.md", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json")
SAMPLED: tuple[dict[str, Any], ...] = (
    {"temperature": 0.7},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.2, "top_k": 20},
    {"temperature": 1.0, "min_p": 0.05, "stop": [". He", "day"]},
    {"temperature": 0.9, "repetition_penalty": 1.2, "min_tokens": 30},
    {"temperature": 1.0, "top_p": 0.95, "top_k": 50, "presence_penalty": 0.5, "frequency_penalty": 0.2},
)
# What one_file/engine.py says of itself
REFERENCE = {
    "title": "An LLM inference engine in one file: continuous batching, paged KV cache, prefix cache, preemption.",
    "origin": "Generated from nanoinfer's source by `make one-file`. Change it there.",
    "model": 'parents[1] / "nanoinfer/loading/bundled/tiny-qwen3"',
}
EXPORTED_MODEL = 'parent / "models" / "tiny-qwen3"'
# Runs a script without what only nanoinfer needs.
ALONE = "import runpy, sys; sys.modules.update(dict.fromkeys(('nanoinfer', 'transformers', 'jaxtyping', 'numpy'))); "
ALONE += "sys.argv[:] = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"


@dataclass
class Own:
    """What a learner's file has: the function, and what the function needs."""

    source: str
    imports: list[str] = field(default_factory=list)
    helpers: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path, function: str) -> "Own":
        """Read a file. Raises: InvalidValueError for an import that one file cannot have."""
        text = path.read_text(encoding="utf-8-sig")
        own = cls("")
        for node in ast.parse(text).body:
            segment = "\n".join(text.splitlines()[first_line(node) - 1 : node.end_lineno])
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(("nanoinfer", "jaxtyping", "__future__")):
                continue  # the one file has the names
            if isinstance(node, ast.Import | ast.ImportFrom):
                own.imports.append(segment)
            elif isinstance(node, ast.FunctionDef) and node.name == function:
                own.source = segment
            elif not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):  # the docstring
                own.helpers.append(segment)
        return own


def one_file(tasks: list[Task], files: Mapping[str, Path], title: str, readers: Iterable[str] = ()) -> str:
    """Return the text of the engine.

    Args:
        tasks: all tasks.
        files: task -> the learner's file. Empty: the package's own functions.
        title: the first line of the text.
        readers: the texts of modules that read names of the engine.

    Raises:
        InvalidValueError: a learner's file reads or defines names that one file cannot have.
    """
    own = {task.name: Own.read(files[task.name], task.function.name) for task in tasks if task.name in files}
    imports = [text for each in own.values() for text in each.imports]
    helpers = [text for each in own.values() for text in each.helpers]
    bodies = {(task.function.module, task.function.qualname): own[task.name].source for task in tasks if own}
    about = {
        "title": title,
        "origin": f"Tangled from the source of nanoinfer {nanoinfer.__version__}.",
        "model": EXPORTED_MODEL,
    }
    before, _, server = _template("engine.py", about).partition("# ---- 18.")
    # The tasks' functions, and all that a task says a learner has.
    names = [name for task in tasks for entry in (*task.have, f"- {task.function.name}") for name in entry.split()[1:]]
    used = {prefix + name for name in names for prefix in ("", ".")}
    used = used.union(*map(names_in, (_reference(tasks), *readers, *helpers)))
    engine = tangle(f"{before}{_read('parts.py')}# ---- 19.{server}", bodies, used)
    in_engine = _imported(engine)
    imports = [f"{text}\n" for text in dict.fromkeys(imports) if not _imported(text) <= in_engine]
    helpers = [f"{text}\n\n\n" for text in dict.fromkeys(helpers)]
    for place, texts in (("\nBool = Float", imports), ("# ---- 1.", helpers)):
        engine = engine.replace(place, "".join(texts) + place, 1)
    if missing := missing_names(engine):
        raise InvalidValueError(f"your files read {', '.join(sorted(missing))}, which one file does not have; do without")
    if repeated := repeated_names(engine):
        raise InvalidValueError(
            f"one file would define {', '.join(sorted(repeated))} more than once; rename those of your files"
        )
    return engine


def reference_file() -> str:
    """Return the text of one_file/engine.py."""
    return tangle(_template("engine.py", REFERENCE), {}, set())


def export(folder: Path, tasks: list[Task], files: Mapping[str, Path], num_prompts: int) -> dict[str, Any]:
    """Write the repository, and grade and measure it in a process that cannot import the package.

    Args:
        folder: a new folder.
        tasks: all tasks.
        files: task -> the learner's file. Empty: the package's own functions.
        num_prompts: how many prompts both engines answer, with each model greedily and sampled.

    Returns:
        what measure.py has printed, and the number of lines.

    Raises:
        InvalidValueError: the folder is not empty, or as one_file.
        NanoinferError: the engine does not run.
    """
    check_new(folder)
    name = folder.resolve().name
    num_own = sum(_is_own(files[task.name], task) for task in tasks if files)
    authors = f"{num_own} of its {len(tasks)} tasks are the owner's work." if files else "The reference version."
    cases = dict(_case_modules(tasks))
    readers = [text for module, text in cases.items() if module != "workbook"]
    texts = {"measure.py": _read("measure.py"), "tests/test_engine.py": _read("test_engine.py")}
    engine = one_file(tasks, files, f"{name}: an LLM inference engine in one file. {authors}", [*readers, *texts.values()])
    texts |= {f"tests/cases/{module}.py": text for module, text in cases.items()} | {
        "engine.py": engine,
        "pyproject.toml": _template("pyproject.toml", {"name": re.sub(r"\W+", "-", name)}),
        ".github/workflows/test.yml": _read("test.yml"),
        "tests/reference.py": _reference(tasks),
        "tests/answers.json": json.dumps({model: _answers(model, num_prompts) for model in MODELS}, indent=0),
    }
    for path, text in texts.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text, encoding="utf-8")
    for model in MODELS:
        (folder / "models" / model).mkdir(parents=True)
        for path in MODEL_FILES:
            shutil.copyfile(BUNDLED / model / path, folder / "models" / model / path)
    report = _measured(folder)
    report["lines"] = len(engine.splitlines())
    values = {
        **report,
        "name": name,
        "authors": authors,
        "num_passed": report["functions"] - len(report["refused"]),
        "num_differ": len(report["differ"]),
        "num_near_ties": len(report["near_ties"]),
        "bandwidth": round(100 * report["bandwidth_share"], 1),
        "color": "red" if report["refused"] or report["differ"] else "brightgreen",
        "machine": cpu_name(),
        "torch": torch.__version__,
        "date": date.today().isoformat(),
    }
    (folder / "README.md").write_text(_template("README.md", values), encoding="utf-8")
    return report


def _reference(tasks: list[Task]) -> str:
    """Return a module that has the package's own functions, for the cases to compare with."""
    text = "\n\n\n".join(simplified(task.function.source) for task in tasks)
    doc = '"""The functions of the tasks as nanoinfer has them, which the cases compare with those of engine.py."""'
    return f"{doc}\n\nfrom engine import {', '.join(sorted(missing_names(text)))}\n\n\n{text}\n"


def _case_modules(tasks: list[Task]) -> Iterator[tuple[str, str]]:
    """Yield the modules of the tasks' cases, whose imports of the package become imports of the one file."""
    rows = [f"    {(task.name, task.function.qualname, task.cases_in)!r}," for task in tasks]
    workbook = tangle(_template("workbook.py", {"tasks": "\n".join(rows)}), {}, {"WIDTH", "filled"})
    yield "workbook", workbook
    for name in sorted({"check", *(task.cases_in for task in tasks)}):
        text = Path(__file__).with_name(f"{name}.py").read_text(encoding="utf-8").replace(PACKAGE, "cases")
        lines = text.splitlines()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and (module := node.module or "").startswith(("nanoinfer", "cases")):
                imported = [alias.name for alias in node.names]
                if module == "cases.workbook":
                    imported = [each for each in imported if f" {each}(" in workbook or each in names_in(workbook)]
                new = f"from {module if module.startswith('cases') else 'engine'} import {', '.join(imported)}"
                num_lines = (node.end_lineno or 0) - node.lineno + 1  # stays, because of the nodes that follow
                lines[node.lineno - 1 : node.end_lineno] = [" " * node.col_offset + new] + [""] * (num_lines - 1)
        yield name, "\n".join([*lines, ""])


def _answers(model: str, num_prompts: int) -> list[dict[str, Any]]:
    """Return what the package's engine answers: each prompt greedily and sampled."""
    rng = random.Random(0)
    prompts, params = [], []
    for number in range(num_prompts):
        words = write(rng).split(" ")
        prompts += 2 * [" ".join(words[: rng.randint(1, min(40, len(words)))])]
        sampled = SAMPLED[number % len(SAMPLED)] | {"seed": number}
        params += [{"temperature": 0, "max_tokens": 48}, sampled | {"max_tokens": 48}]
    with LLM(model, dtype="float32", enforce_eager=True, attention_backend="reference", kv_cache_memory=2**26) as llm:
        outputs = llm.generate(prompts, [SamplingParams(**each) for each in params], use_tqdm=sys.stderr.isatty())
    return [
        {"prompt": prompt, "params": each, "token_ids": output.outputs[0].token_ids, "text": output.outputs[0].text}
        for prompt, each, output in zip(prompts, params, outputs, strict=True)
    ]


def _measured(folder: Path) -> dict[str, Any]:
    """Run measure.py in a process that cannot import the package. Raises: NanoinferError if it fails."""
    command = [sys.executable, "-c", ALONE, "measure.py"]
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if not run.stdout:
        raise NanoinferError(f"{folder}/measure.py fails: {(run.stderr.strip() or 'it ends early').splitlines()[-1]}")
    report: dict[str, Any] = json.loads(run.stdout)
    return report


def _is_own(file: Path, task: Task) -> bool:
    """Return whether a file's function is another than the package's, which `nanoinfer learn solve` writes."""
    return ast.dump(ast.parse(Own.read(file, task.function.name).source)) != ast.dump(ast.parse(task.function.source))


def _imported(text: str) -> set[str]:
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import | ast.ImportFrom)]
    return {ast.unparse(alias) for node in nodes for alias in node.names}


def _read(name: str) -> str:
    return (TEMPLATES / f"{name}.txt").read_text(encoding="utf-8")


def _template(name: str, values: Mapping[str, Any]) -> str:
    return Template(_read(name)).substitute(values)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(reference_file(), encoding="utf-8")
