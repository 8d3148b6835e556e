"""Time the drawing of a step's tokens, compared with transformers' warpers and torch.multinomial.

Both sides get the same logits, interleaved, so that other work of the machine affects both. A ratio is between the two medians.
The logits are those of a fairly confident model: the r-th most probable token has a probability proportional to 1 / r ** 2, in
a different order for each row. The case "flat" shows the cost of top_p where many tokens are nearly equally probable.
"""

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from benchmarks import program
from nanoinfer.cli.options import AsJson, print_table
from nanoinfer.fast.sampling.few_logits import FewLogits
from nanoinfer.sampling.batch import SamplingBatch
from nanoinfer.sampling.routes import RoutedSampler
from nanoinfer.sampling.sampler import HeadRows
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.scheduling.sequence import Sequence

NUM_ROWS = 64
NUM_OUTPUT_TOKENS = 1000  # of each row, for the penalties
VOCAB_SIZES = (50257, 151936)  # GPT-2's and Qwen's

Draw = Callable[[Tensor], object]  # logits [NUM_ROWS, vocab] -> the tokens, in any form


@dataclass(frozen=True, slots=True)
class Result:
    """ours_ms and theirs_ms: median milliseconds of drawing the tokens of NUM_ROWS rows."""

    name: str
    vocab_size: int
    ours_ms: float
    theirs_ms: float

    @property
    def ratio(self) -> float:
        """The time of the other side divided by nanoinfer's."""
        return self.theirs_ms / self.ours_ms


def run(repeats: int) -> list[Result]:
    """Measure every case, `repeats` times each."""
    return [result for vocab_size in VOCAB_SIZES for result in _cases(vocab_size, repeats)]


@torch.inference_mode()
def _cases(vocab_size: int, repeats: int) -> list[Result]:
    confident = _confident_logits(vocab_size)
    flat = torch.randn(NUM_ROWS, vocab_size, generator=torch.Generator().manual_seed(0))
    warpers = [TemperatureLogitsWarper(0.8)]
    top_p, top_k = TopPLogitsWarper(0.9), TopKLogitsWarper(40)
    results = []
    for name, logits, params, theirs in (
        ("temperature", confident, {"temperature": 0.8}, warpers),
        ("top_p", confident, {"temperature": 0.8, "top_p": 0.9}, [*warpers, top_p]),
        ("top_p, flat", flat, {"temperature": 0.8, "top_p": 0.9}, [*warpers, top_p]),
        ("top_k, top_p", confident, {"temperature": 0.8, "top_k": 40, "top_p": 0.9}, [*warpers, top_k, top_p]),
    ):
        ours, other = _in_turns([_sample(vocab_size, params), _warp_and_draw(theirs)], logits, repeats)
        results.append(Result(name, vocab_size, ours, other))
    ours, other = _in_turns(
        [_sample(vocab_size, {"temperature": 0.0}), lambda logits: logits.argmax(dim=-1).tolist()], confident, repeats
    )
    results.append(Result("greedy, and argmax", vocab_size, ours, other))
    plain = {"temperature": 0.8, "top_k": 40}
    for name, penalty in (("repetition", 1.1), ("frequency", 0.1), ("presence", 0.1)):
        penalized = _sample(vocab_size, plain | {f"{name}_penalty": penalty})
        ours, other = _in_turns([penalized, _sample(vocab_size, plain)], confident, repeats)
        results.append(Result(f"{name}_penalty, and none", vocab_size, ours, other))
    return results


def _sample(vocab_size: int, params: dict[str, Any]) -> Draw:
    """Draw with the sampler. The batch is built from the sequences every time, as in the engine."""
    generator = torch.Generator().manual_seed(0)
    sampler = RoutedSampler([FewLogits()])
    sequences = []
    for row in range(NUM_ROWS):
        seq = Sequence(str(row), [row], SamplingParams(seed=row, max_tokens=None, **params), row, 10**6)
        seq.token_ids += torch.randint(vocab_size, (NUM_OUTPUT_TOKENS,), generator=generator).tolist()
        sequences.append(seq)
    batch: SamplingBatch | None = None

    def draw(logits: Tensor) -> object:
        nonlocal batch
        batch = SamplingBatch.build(sequences, vocab_size, logits.device, batch)
        output = sampler(HeadRows(logits, lambda logits: logits), batch).read()
        for seq, token_id in zip(sequences, output.token_ids, strict=True):
            seq.token_ids.append(token_id)
        return output

    return draw


def _warp_and_draw(warpers: list[Any]) -> Draw:
    """Draw as generate of transformers does."""
    processors = LogitsProcessorList(warpers)
    input_ids = torch.zeros(NUM_ROWS, 1, dtype=torch.int64)
    return lambda logits: torch.multinomial(processors(input_ids, logits).softmax(dim=-1), num_samples=1).squeeze(1).tolist()


def _in_turns(functions: list[Draw], logits: Tensor, repeats: int) -> list[float]:
    """The median time of each function in milliseconds, without the first call. Each call gets its own copy of the logits."""
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(repeats + 1):
        for function_times, function in zip(times, functions, strict=True):
            own_logits = logits.clone()
            start = time.perf_counter()
            function(own_logits)
            function_times.append((time.perf_counter() - start) * 1e3)
    return [statistics.median(function_times[1:]) for function_times in times]


def _confident_logits(vocab_size: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    falling = -2 * torch.arange(1, vocab_size + 1, dtype=torch.float32).log()
    return torch.stack([falling[torch.randperm(vocab_size, generator=generator)] for _ in range(NUM_ROWS)])


def main(
    *,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each side of a case.")] = 20,
    as_json: AsJson = False,
) -> None:
    """Time the drawing of the tokens of 64 rows, compared with transformers' warpers and multinomial, in a minute or two."""
    results = run(repeats)
    if as_json:
        print(json.dumps([asdict(result) | {"ratio": result.ratio} for result in results], indent=1))
        return
    rows = []
    for result in results:
        numbers = (f"{result.ours_ms:.2f}", f"{result.theirs_ms:.2f}", f"{result.ratio:.1f}")
        rows.append((result.name, str(result.vocab_size), *numbers))
    print_table(("case", "vocabulary", "nanoinfer ms", "other ms", "ratio"), rows, title=f"{NUM_ROWS} rows")


app = program(main)
if __name__ == "__main__":
    app()
