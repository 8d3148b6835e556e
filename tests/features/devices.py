"""Every feature on every device: the answers of a CPU, or the engine's refusal. docs/supported.md shows what was found.

    python -m tests.features.devices          # tries all on the CPU and the simulated GPU, or those named, and renews the table
    python -m tests.features.devices --gpu    # on a GPU
    python -m tests.features.devices --lines FILE    # what `python -m benchmarks.device --output FILE` has found on a GPU

In: the features of covering.py but tool calls, which are grammars, and those of MORE. Out: devices.json, with the outcome of
each feature on each device, the date and the machine.
"""

import argparse
import datetime
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from nanoinfer import LLM, NanoinferError, SamplingParams
from nanoinfer.fast import batch_independence
from nanoinfer.fast.cuda.graphs import StepGraphs
from nanoinfer.system import environment
from tests.features import engines
from tests.features.covering import FACTOR_OF, PAGE, run_of
from tests.features.engines import CANDIDATES, Checkpoints, Oracle, Question
from tests.features.formats import test_packed as packed
from tests.helpers import forked, precompiled

RECORD = Path(__file__).with_name("devices.json")
COMMAND = "python -m tests.features.devices"
MARKED = re.compile(rf"(?<=<!-- {COMMAND} -->\n).*?(?=<!-- end -->)", re.DOTALL)
CPU, SIMULATED, GPU = "CPU", "simulated GPU", "GPU"
NAMES = {CPU: "cpu", SIMULATED: "sim", GPU: "cuda"}  # in engines.DEVICES
# What an outcome says, beside the errors of refusals: the CPU's answers, in replayed steps or not.
GRAPHS, EAGER = "in CUDA graphs", "yes"

CHANGES = {
    "full attention": {"num_hidden_layers": 1},
    "experts": {"num_hidden_layers": 1},
    "sliding windows": {"sliding_window": 10},
    "attention sinks": {"sliding_window": 10},
}
FIRST = 28  # of a prompt, because an interpreter computes each token
PROMPTS = [CANDIDATES[number][FIRST:] for number in range(3)]


def checkpoints_in(folder: Path) -> Checkpoints:
    return Checkpoints(folder, CHANGES, FIRST, num_tokens=4)


def tokens(llm: LLM, **params: Any) -> list[list[int]]:
    sampling = SamplingParams(**{"temperature": 0.0, "max_tokens": 4, "ignore_eos": True, "detokenize": False} | params)
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, sampling, use_tqdm=False)]


def scores(llm: LLM, **params: Any) -> list[float]:
    """Log-probabilities of answers, and of prompts if they are asked for."""
    found = llm.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=3, logprobs=2, **params), use_tqdm=False)
    positions = [one for output in found for one in [*output.outputs[0].logprobs, *(output.prompt_logprobs or [])] if one]
    return [entry.logprob for position in positions for entry in position.values()]


def embeddings(llm: LLM) -> list[list[float]]:
    return [list(output.outputs.embedding) for output in llm.embed(PROMPTS, use_tqdm=False)]


def after_update(llm: LLM) -> list[list[int]]:
    """The tokens before and after a matrix is replaced."""
    before, shape = tokens(llm), (engines.WIDTHS["hidden_size"], engines.WIDTHS["intermediate_size"])
    other = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    llm.update_weights([("model.layers.0.mlp.down_proj.weight", other)])
    return [*before, *tokens(llm)]


def after_sleep(llm: LLM) -> list[list[int]]:
    before = tokens(llm)
    llm.sleep()
    llm.wake_up()
    return [*before, *tokens(llm)]


# a feature that is not in covering.py -> further arguments of LLM, and what is asked
MORE: dict[str, tuple[dict[str, Any], Callable[[LLM], Any]]] = {
    "int8 cache": ({"kv_cache_dtype": "int8"}, tokens),
    "integers of GPTQ": ({"dtype": "bfloat16"}, tokens),
    "sampling": (
        {}, partial(tokens, temperature=0.5, top_k=20, top_p=0.9, min_p=0.01, seed=engines.SEED)
    ),
    "penalties and bias": ({}, partial(tokens, repetition_penalty=1.3, frequency_penalty=0.5, logit_bias={7: 2.0})),
    "log-probabilities": ({}, scores),
    "log-probabilities of prompts": ({}, partial(scores, prompt_logprobs=1)),
    "embeddings": ({}, embeddings),
    "update_weights": ({}, after_update),
    "sleep": ({}, after_sleep),
}  # fmt: skip
FEATURES = (*(feature for feature, factor in FACTOR_OF.items() if factor != "calls"), *MORE)


def asked(checkpoints: Checkpoints, device: str, feature: str, questions: list[Question]) -> Any:
    """What an engine on a device answers."""
    if feature not in MORE:
        answers, num_found = engines.computed(checkpoints, {"device": NAMES[device]} | run_of(feature), questions)
        assert feature != "prefix_cache_dir" or num_found > 0
        return [[answer.token_ids for answer in several] for several in answers]
    arguments, ask = MORE[feature]
    settings = engines.settings(checkpoints, {"device": NAMES[device]} | run_of("full attention")) | arguments
    with LLM(path_of(checkpoints, feature), **settings) as llm:
        return ask(llm)


def path_of(checkpoints: Checkpoints, feature: str) -> Path:
    if feature != "integers of GPTQ":
        return checkpoints.path("full attention")
    path = checkpoints.folder / "gptq"
    if not path.exists():
        packed.save(path, *packed.CASES["gptq"])
    return path


def found(checkpoints: Checkpoints, device: str, feature: str, questions: list[Question]) -> dict[str, Any]:
    """The answers on a device and whether steps were replayed, or the error of a refusal."""
    replayed, try_replay = [], StepGraphs.try_replay

    def noted(graphs: StepGraphs, *step: Any) -> Any:
        hidden = try_replay(graphs, *step)
        replayed.append(hidden is not None)
        return hidden

    with mock.patch.object(StepGraphs, "try_replay", noted):
        try:
            answers = asked(checkpoints, device, feature, questions)
        except NanoinferError as error:
            return {"refused": str(error).replace(str(checkpoints.folder), "FOLDER")}
    return {"answers": answers, "outcome": GRAPHS if any(replayed) else EAGER}


def print_found(*arguments: Any) -> None:
    """Print what a process of its own has found on the simulated device, which is known to its process for good."""
    from tests.helpers import simulated_device

    simulated_device.install()
    short = mock.patch.object(batch_independence, "PROMPT_LENGTHS", (3, 6, 1))  # of the check of batch_invariant at load
    with simulated_device.engine_may_use_it(), short:
        print(f"\n{json.dumps(found(*arguments))}")


def outcome(checkpoints: Checkpoints, oracle: Oracle, device: str, feature: str) -> str:
    """The outcome of a feature on a device. Raises: AssertionError for answers that are not those of a CPU."""
    if feature in MORE:
        questions, expected = [], asked(checkpoints, CPU, feature, [])
    else:
        questions, expected = oracle.questions(run_of(feature))
    if device == SIMULATED:
        done = forked.run_function(print_found, checkpoints, device, feature, questions)
        assert done.returncode == 0, done.stderr[-3000:]
        here = json.loads(done.stdout.splitlines()[-1])
    else:
        here = found(checkpoints, device, feature, questions)
    if "refused" in here:
        return str(here["refused"])
    if "embedding" in feature or "log-prob" in feature:
        torch.testing.assert_close(torch.tensor(here["answers"]), torch.tensor(expected), rtol=1e-4, atol=1e-4)
    else:
        assert here["answers"] == expected, feature
    return str(here["outcome"])


@contextmanager
def prepared() -> Iterator[tuple[Checkpoints, Oracle]]:
    with tempfile.TemporaryDirectory() as folder, forked.ranks():
        checkpoints = checkpoints_in(Path(folder))
        yield checkpoints, Oracle(checkpoints)


def recorded() -> dict[str, Any]:
    return dict(json.loads(RECORD.read_text(encoding="utf-8"))) if RECORD.exists() else {}


def record(device: str, machine: str, outcomes: dict[str, str]) -> None:
    """Add outcomes to the record of a device, and renew the table."""
    known, today = recorded(), str(datetime.date.today())
    found = known.get(device, {}).get("outcomes", {}) | {feature: [text, today] for feature, text in outcomes.items()}
    known[device] = {"machine": machine, "outcomes": {name: found[name] for name in FEATURES if name in found}}
    RECORD.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), known), encoding="utf-8")


def table(known: dict[str, Any]) -> str:
    """The features with the same outcomes in a row, a column for each device, and the reasons of refusals, in Markdown."""
    rows: dict[tuple[str, ...], list[str]] = {}
    reasons: list[str] = []
    for feature in FEATURES:
        cells = []
        for device in NAMES:
            found, _ = known.get(device, {}).get("outcomes", {}).get(feature, ("not run", ""))
            cells.append(found if found in (GRAPHS, EAGER, "not run") else "refused")
            if cells[-1] == "refused" and found not in reasons:
                reasons.append(found)
        rows.setdefault(tuple(cells), []).append(feature)
    dates = {device: min(date for _, date in known[device]["outcomes"].values()) for device in known}
    about = [f"{device}: {known[device]['machine']}, {date}" for device, date in dates.items()]
    lines = [f"{'. '.join(about)}.", "", f"| feature | {' | '.join(NAMES)} |", "|---" * 4 + "|"]
    lines += [f"| {', '.join(features)} | {' | '.join(cells)} |" for cells, features in rows.items()]
    return "\n".join([*lines, "", *(f"- {reason}" for reason in reasons), ""])


def with_table(page: str, known: dict[str, Any]) -> str:
    return MARKED.sub(lambda _: table(known), page, count=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("features", nargs="*", default=FEATURES, metavar="feature")
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--lines", type=Path)
    given = parser.parse_args()
    if given.lines is not None:
        lines = [json.loads(line) for line in given.lines.read_text(encoding="utf-8").splitlines() if line.startswith("{")]
        outcomes = {line["what"]: line["outcome"] for line in lines if line["part"] == "features" and "outcome" in line}
        record(GPU, next(line["what"] for line in lines if line["part"] == "machine"), outcomes)
        return
    machines = {CPU: environment.cpu_name(), SIMULATED: f"Triton {metadata.version('triton')}'s interpreter"}
    if given.gpu:
        machines = {GPU: torch.cuda.get_device_name()}
    with prepared() as (checkpoints, oracle):
        for feature in given.features:
            for device in machines:
                try:
                    of_device = outcome(checkpoints, oracle, device, feature)
                except AssertionError as error:
                    print(device, feature, "WRONG", error, flush=True)
                    continue
                print(device, feature, of_device, sep=" | ", flush=True)
                record(device, machines[device], {feature: of_device})


if __name__ == "__main__":
    if not torch.cuda.is_available():
        os.environ |= {"TRITON_INTERPRET": "1", "TRITON_DEFAULT_FP_FUSION": "1"}  # of the process that devices are forked from
    precompiled.install()
    main()
