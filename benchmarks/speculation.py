"""Compare generation with and without drafts, interleaved, on one engine.

Random weights do not copy text. How predictable an answer is comes from allowed_token_ids: with one id every draft is right,
with two ids about half of those guessed by n-grams are, and among all ids nothing repeats. The first case is an upper bound
of the gain on copied or lightly edited text, the last one the cost on all other text.

Nor do random weights agree with their copy in 4 bits, as trained ones do: the largest logits are too close to each other.
--train-steps 60 trains the random model for some minutes to repeat a text after any prompt, without a restriction of ids.
"""

import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal, cast

import torch
import typer

from benchmarks import program
from nanoinfer.cli.options import AsJson, print_table
from nanoinfer.engine.observer import Observer, Planner
from nanoinfer.errors import InvalidValueError
from nanoinfer.features.drafts.speculator import Proposer, Speculator
from nanoinfer.llm import LLM
from nanoinfer.scheduling.sequence import Sequence
from nanoinfer_lab.bench.offline import run_workload
from nanoinfer_lab.bench.random_models import checkpoint_of
from nanoinfer_lab.bench.timing import figures
from nanoinfer_lab.bench.workloads import Workload
from nanoinfer_lab.cli.bench import ModelOptions, Repeats

PROMPT_LEN, OUTPUT_LEN = 64, 192
PERIOD = 40  # tokens of the text that a model is trained to repeat
# (name, allowed_token_ids, number of requests)
CASES = (
    ("1 stream, repeating", [5], 1),
    ("1 stream, two ids", [5, 6], 1),
    ("1 stream, random", None, 1),
    ("64 streams, repeating", [5], 64),
    ("64 streams, random", None, 64),
)


@dataclass(frozen=True, slots=True)
class Result:
    """plain, drafting: output tokens per second, the medians of the runs.

    drafted, accepted: draft tokens of all runs. propose_us: the time of one proposal for one sequence, in microseconds.
    """

    name: str
    plain: float
    drafting: float
    drafted: int
    accepted: int
    propose_us: float

    @property
    def ratio(self) -> float:
        return self.drafting / self.plain


def run(llm: LLM, repeats: int) -> list[Result]:
    """Measure every case, `repeats` times with and without drafts.

    llm: made with speculative_config.
    """
    return [_case(llm, repeats, name, allowed, num) for name, allowed, num in CASES]


def _case(llm: LLM, repeats: int, name: str, allowed: list[int] | None, num_requests: int) -> Result:
    engine, speculator = llm.engine, llm.engine.planner
    assert isinstance(speculator, Speculator)
    plain_observer, observer = cast(Observer, engine.scheduler.observer), engine.observer  # without and with the speculator
    workload = Workload(
        name=name,
        input_lens=(PROMPT_LEN,) * num_requests,
        output_lens=(OUTPUT_LEN,) * num_requests,
        sampling={"temperature": 1.0, "seed": 0, "allowed_token_ids": allowed},
    )
    speeds: dict[bool, list[float]] = {False: [], True: []}
    before = (speculator.counts.num_draft_tokens, speculator.counts.num_accepted_tokens)
    speculator.proposer = timed = _TimedProposer(proposer := speculator.proposer)
    try:
        for repeat in range(repeats + 1):
            for is_drafting in (False, True):
                engine.planner, engine.observer = (speculator, observer) if is_drafting else (Planner(), plain_observer)
                speed = figures(run_workload(llm, workload, repeat)).output_tokens_per_s
                if repeat:  # the first run warms up
                    speeds[is_drafting].append(speed)
    finally:
        engine.planner, engine.observer = speculator, observer
        speculator.proposer = proposer
    drafted, accepted = speculator.counts.num_draft_tokens - before[0], speculator.counts.num_accepted_tokens - before[1]
    plain, drafting = (statistics.median(speeds[is_drafting]) for is_drafting in (False, True))
    return Result(name, plain, drafting, drafted, accepted, 1e6 * timed.seconds / max(timed.num_proposals, 1))


class _TimedProposer:
    """A proposer that adds up how long another one takes."""

    def __init__(self, proposer: Proposer) -> None:
        self.seconds, self.num_proposals = 0.0, 0
        self._proposer = proposer
        self.forget = proposer.forget

    def propose(self, sequences: list[Sequence], limits: list[int]) -> list[list[int]]:
        start = time.perf_counter()
        drafts = self._proposer.propose(sequences, limits)
        self.seconds += time.perf_counter() - start
        self.num_proposals += len(sequences)
        return drafts


def train_to_repeat(folder: Path, num_steps: int) -> None:
    """Train a checkpoint with random weights to repeat a text of PERIOD ids, which begins anywhere, after a random prompt.

    transformers' GPT-2 reaches a loss of 0.01 in 60 steps. The checkpoint is replaced.
    """
    import transformers

    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()  # without dropout
    dtype, model = model.dtype, model.float()
    text = torch.randint(model.config.vocab_size, (PERIOD,))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    for _ in range(num_steps):
        prompt = torch.randint(model.config.vocab_size, (int(torch.randint(1, PROMPT_LEN, ())),))
        ids = torch.cat([prompt, text.roll(int(torch.randint(PERIOD, ()))).repeat(3)]).unsqueeze(0)
        loss = model(input_ids=ids, labels=ids.where(torch.arange(ids.shape[1]) > len(prompt), -100)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"trained to a loss of {loss.item():.3f}", file=sys.stderr)
    model.to(dtype).save_pretrained(folder)


def main(
    *,
    measured: ModelOptions,
    method: Annotated[Literal["ngram", "quantized"], typer.Option(help="Earlier text, or the model in 4 bits.")] = "ngram",
    num_speculative_tokens: Annotated[int, typer.Option(min=1, max=64, help="Maximum number of tokens of a draft.")] = 8,
    train_steps: Annotated[int, typer.Option(min=0, help="Train the random model first, to repeat a text.")] = 0,
    repeats: Repeats = 3,
    as_json: AsJson = False,
) -> None:
    """Compare generation with and without drafts, on repetitive and random text."""
    if train_steps and measured.random_model is None:
        raise InvalidValueError("--train-steps trains a random model, got none; give --random-model")
    config = {"method": method, "num_speculative_tokens": num_speculative_tokens}
    with checkpoint_of(measured.model, measured.random_model, measured.dtype) as checkpoint:
        if train_steps:
            train_to_repeat(Path(str(checkpoint)), train_steps)
        llm = LLM(checkpoint, dtype=measured.dtype, device=measured.device, speculative_config=config, seed=0)
        results = run(llm, repeats)
    if as_json:
        print(json.dumps([asdict(result) | {"ratio": result.ratio} for result in results], indent=1))
        return
    rows = []
    for result in results:
        speeds = (f"{result.plain:.1f}", f"{result.drafting:.1f}", f"{result.ratio:.2f}")
        rows.append((result.name, *speeds, f"{result.accepted} of {result.drafted}", f"{result.propose_us:.0f}"))
    print_table(("case", "plain", "drafts", "ratio", "accepted", "us"), rows, title="output tokens per second")
    print("accepted: draft tokens. us: microseconds of a proposal for one sequence.")


app = program(main)
if __name__ == "__main__":
    app()
