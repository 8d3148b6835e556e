"""`nanoinfer verify`: compare a model, as this machine runs it, with transformers' code for the same model.

Each variant of the model answers ten prompts greedily, first one at a time, then all together and with log-probabilities. Then
transformers reads the same tokens in float32. Only one model is in memory at a time. docs/checkpoints.md says how the variants
are judged.
"""

import gc
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from importlib.metadata import version
from itertools import chain, groupby
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from nanoinfer.cli.options import busy, print_table
from nanoinfer.config import BITS
from nanoinfer.errors import InvalidValueError, NanoinferError, OutOfMemoryError, UnsupportedError, first_line
from nanoinfer.features.formats.gguf_families import GGUFCheckpoint
from nanoinfer.llm import LLM
from nanoinfer.loading import loader
from nanoinfer.loading.checkpoint import DEFAULT_MODEL, Checkpoint
from nanoinfer.loading.config_json import read_config
from nanoinfer.loading.devices import resolve_device
from nanoinfer.outputs import LogprobsOnePosition, sum_of_logprobs
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.system.process import available_cpu_memory
from nanoinfer.system.progress import progress_bar
from nanoinfer_lab import stories

PROMPTS = (
    "Once upon a time",
    "The capital of France is",
    "Water boils at 100 degrees because",
    "Question: What is 17 + 25?\nAnswer:",
    "1, 1, 2, 3, 5, 8, 13,",
    "def fibonacci(n):\n    ",
    '{"name": "Lily", "age": 7, "likes": [',
    "Die Hauptstadt von Deutschland ist",
    "今天天气很好，我们",
    "\n\n".join(stories.write(random.Random(seed)) for seed in range(5)),  # the text whose perplexity is measured
)
MAX_PROMPT_TOKENS = 480  # of the text, which is longer
NUM_NEW_TOKENS = 32  # of each answer
NUM_LOGPROBS = 5  # the number of tokens that the engine reports at each position, and the position's own
LIKELY = 3.0  # how much smaller than the largest the log-probability of a token may be that is compared
FLOAT32_BOUND = 1e-3
MEAN_FACTOR, LARGEST_FACTOR = 1.25, 2.0  # in 16 bits the bounds are this many times the differences of transformers itself
MAX_LINES = 10  # of tokens that differ


@dataclass(frozen=True, slots=True)
class DifferingToken:
    """A token of a greedy answer that is not the most likely token in transformers."""

    prompt: int  # the index in PROMPTS
    num_together: int  # the number of prompts that were answered at the same time
    position: int  # the index in the answer
    token: str
    expected: str  # the most likely token in transformers
    distance: float  # between the log-probabilities of both in transformers
    is_near_tie: bool | None  # whether the distance is within the bound of the largest difference. None: there is none


@dataclass(frozen=True, slots=True)
class Differences:
    """Differences of log-probabilities from those of transformers in float32, for tokens that are likely there."""

    largest: float
    mean: float


@dataclass(frozen=True, slots=True)
class Variant:
    """The comparison of a variant of the model with transformers in float32."""

    name: str
    num_tokens: int  # of all answers
    differing: list[DifferingToken]
    differences: Differences
    bounds: Differences | None  # None: none are known, because the weights were rounded to integers
    agreement: float  # the share of positions whose most likely token is the same
    perplexity: float  # of the last prompt
    expected_perplexity: float  # in transformers

    @property
    def has_failed(self) -> bool:
        if self.bounds is None:
            return False
        is_close = self.differences.largest <= self.bounds.largest and self.differences.mean <= self.bounds.mean
        return not is_close or not all(token.is_near_tie for token in self.differing)


@dataclass(frozen=True, slots=True)
class Verification:
    """The comparisons of all variants of a model."""

    model: str
    reference: str  # the checkpoint that transformers has read
    transformers: str  # the version
    device: str
    has_same_ids: bool | None  # whether the tokenizers of model and reference give the same ids. None: both are the same
    variants: list[Variant]

    @property
    def has_failed(self) -> bool:
        return self.has_same_ids is False or any(variant.has_failed for variant in self.variants)


@dataclass(frozen=True, slots=True, eq=False)
class _Reading:
    """Tokens, and the log-probabilities that the engine has reported for them."""

    prompt: int  # the index in PROMPTS
    num_together: int  # as in DifferingToken
    ids: list[int]  # of the prompt and its answer
    num_prompt_tokens: int
    logprobs: Sequence[LogprobsOnePosition]  # of ids[1:], or of the first of them


@dataclass(frozen=True, slots=True)
class _Expected:
    """The log-probabilities in transformers of the tokens of a reading, after the first."""

    reported: Tensor  # of the ids that the engine has reported: [num_reported]
    is_likely: Tensor  # whether these are likely: [num_reported]
    own: Tensor  # of each token: [num_tokens - 1]
    largest: Tensor  # of the most likely token: [num_tokens - 1]
    most_likely: Tensor  # the id of the most likely token: [num_tokens - 1]


def examine(
    model: str | None,
    revision: str | None = None,
    *,
    against: str | None = None,
    variants: str | None = None,
    device: str = "auto",
) -> Verification:
    """Run the variants of a model, and compare them with transformers.

    Args:
        model: a name as for LLM.
        revision: the model's branch, tag or commit in the hub.
        against: the name of the checkpoint that transformers reads. None: the model's own.
        variants: dtypes and quantizations, separated by commas. None: float32, bfloat16, and on a CPU int8 and int4.
        device: where both run: "auto", "cpu" or "cuda".

    Raises:
        InvalidValueError: an argument is wrong, or the two checkpoints do not belong together.
        UnsupportedError: nanoinfer or transformers cannot run the model.
        OutOfMemoryError: the model in float32 does not fit into the memory.
        NanoinferError: the engine failed. The errors of loading are raised as well.
    """
    on = resolve_device(device)
    names = _variant_names(variants, on)
    model = DEFAULT_MODEL if model is None else model
    checkpoint = Checkpoint.open(model, revision)
    reference = checkpoint if against is None else Checkpoint.open(against)
    _check_reference(reference, checkpoint, against)
    tokenizer = reference.load_tokenizer()
    if tokenizer is None:
        raise UnsupportedError(f"{reference.path} has no tokenizer files, such as tokenizer.json; add them for the prompts")
    prompts, has_same_ids = [tokenizer.encode(text) for text in PROMPTS], None
    if against is not None and (other := checkpoint.load_tokenizer()) is not None:
        has_same_ids = prompts == [other.encode(text) for text in PROMPTS]
    readings = {}
    for number, name in enumerate(names, 1):
        with busy(f"{model} in {name}, {number} of {len(names)}; then transformers reads the answers"):
            readings[name] = _run(str(checkpoint.path), name, prompts, on)
    bounds = {} if _is_quantised(checkpoint) else {"float32": Differences(FLOAT32_BOUND, FLOAT32_BOUND)}
    with busy(f"{reference.path} in transformers"):
        expected = _read_with_transformers(reference, torch.float32, on, chain(*readings.values()))
        for name in {"bfloat16", "float16"} & readings.keys() if bounds else ():
            rounded = _read_with_transformers(reference, getattr(torch, name), on, readings[name])
            own = _differences((rounded[one].reported, expected[one]) for one in readings[name])
            bounds[name] = Differences(LARGEST_FACTOR * own.largest, MEAN_FACTOR * own.mean)
    compared = [_compare(name, readings[name], expected, bounds.get(name), tokenizer.token_text) for name in names]
    return Verification(model, str(reference.path), version("transformers"), str(on), has_same_ids, compared)


def print_report(report: Verification) -> None:
    """Print a table with a column for each variant, and the tokens that differ."""
    print(f"{report.model}, compared with {report.reference} in transformers {report.transformers} in float32\n")
    labels = ("equal tokens", "largest difference", "its bound", "mean difference", "its bound", "most likely token equal")
    columns: list[Sequence[str]] = [(*labels, "perplexity", "its ratio", "result")]
    for found in report.variants:
        bounds = ("", "") if found.bounds is None else (f"{found.bounds.largest:.2g}", f"{found.bounds.mean:.2g}")
        column = [f"{found.num_tokens - len(found.differing)} of {found.num_tokens}"]
        column += [f"{found.differences.largest:.2g}", bounds[0], f"{found.differences.mean:.2g}", bounds[1]]
        column += [f"{found.agreement:.2%}", f"{found.perplexity:.4f}", f"{found.perplexity / found.expected_perplexity:.4f}"]
        columns.append([*column, "no bound" if found.bounds is None else "FAILED" if found.has_failed else "passed"])
    print_table(("", *(found.name for found in report.variants)), zip(*columns, strict=True))
    if report.has_same_ids is not None:
        print(f"\nThe tokenizers of both give {'the same' if report.has_same_ids else 'OTHER'} ids.")
    judged = [(found.name, token) for found in report.variants for token in found.differing if token.is_near_tie is not None]
    if judged:
        print()
    for name, token in judged[:MAX_LINES]:
        what = "a near-tie" if token.is_near_tie else "WRONG"
        where = f"prompt {token.prompt}, {token.num_together} at a time, token {token.position}"
        print(f"{name}, {where}: {token.token!r}, not {token.expected!r}, which is {token.distance:.2g} more likely: {what}")
    if len(judged) > MAX_LINES:
        print(f"and {len(judged) - MAX_LINES} more, which --json lists")


def _variant_names(variants: str | None, device: torch.device) -> list[str]:
    """Return the names of the variants. Raises: InvalidValueError if there is no such variant on the device."""
    known = ["float32", "bfloat16", *(BITS if device.type == "cpu" else ())]
    names = known if variants is None else variants.split(",")
    if unknown := set(names) - {*known, "float16"}:
        raise InvalidValueError(
            f"variants must be names of {', '.join(known)} and float16 with commas between them, got {variants!r} on {device}; "
            f"leave out {', '.join(sorted(unknown))}"
        )
    return names


def _check_reference(reference: Checkpoint, checkpoint: Checkpoint, against: str | None) -> None:
    """Check that transformers can run the reference, and that its tokens are those of the model."""
    import transformers

    if isinstance(reference, GGUFCheckpoint) or _is_quantised(reference):
        hint = "name the checkpoint that it was made from with --against" if against is None else "name an unquantised one"
        raise InvalidValueError(f"transformers must read unquantised safetensors, got {str(reference.path)!r}; {hint}")
    model, _ = loader.on_meta(reference)
    num_tokens, its_num_tokens = (read_config(one)[1].vocab_size for one in (checkpoint, reference))
    if num_tokens != its_num_tokens:
        raise InvalidValueError(
            f"--against must have the {num_tokens} tokens of the model's vocabulary, got {against!r} with {its_num_tokens}"
        )
    try:
        config = transformers.AutoConfig.from_pretrained(reference.path, trust_remote_code=False)
        transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    except Exception as error:  # transformers raises many classes
        raise UnsupportedError(
            f"transformers {version('transformers')} does not know the model in {reference.path} ({first_line(error)[:300]}); "
            "install a newer version"
        ) from error
    _check_configuration(reference, config.to_dict())
    needed, available = sum(4 * weight.numel() for weight in model.parameters()), available_cpu_memory()
    if needed > available:
        raise OutOfMemoryError(
            f"transformers needs {needed / 1e9:.1f} GB for the weights in float32, and {available / 1e9:.1f} GB of memory are "
            "available; verify a smaller model of the family"
        )


def _check_configuration(reference: Checkpoint, theirs: dict[str, Any]) -> None:
    """Refuse a transformers that reads other numbers than nanoinfer from config.json, such as another theta of RoPE.

    theirs: its configuration. transformers 4 keeps rope_parameters, and computes with rope_theta and rope_scaling.
    """
    if version("transformers").startswith("4."):
        theirs.pop("rope_parameters", None)
    family, ours = read_config(reference)
    try:
        other = [*_differing_fields(ours, family.Config.from_hf(theirs))]
    except NanoinferError as error:
        other = [first_line(error)]
    if other:
        raise UnsupportedError(
            f"transformers {version('transformers')} reads config.json in {reference.path} differently: {', '.join(other)}; "
            "install a newer version"
        )


def _differing_fields(ours: Any, theirs: Any) -> Iterator[str]:
    """Name each field with another value, and both values. A field such as RoPE's has fields of its own."""
    for name in (field.name for field in fields(ours)):
        value, its = getattr(ours, name), getattr(theirs, name)
        if is_dataclass(value):
            yield from (f"{name}.{part}" for part in _differing_fields(value, its))
        elif its != value:
            yield f"{name} is {its!r} there and {value!r} here"


def _is_quantised(checkpoint: Checkpoint) -> bool:
    if isinstance(checkpoint, GGUFCheckpoint):
        return any(tensor.block_type.num_weights > 1 for tensor in checkpoint.file.tensors.values())
    return bool(checkpoint.config.get("quantization_config"))


def _run(path: str, name: str, prompts: list[list[int]], device: torch.device) -> list[_Reading]:
    """Answer the prompts with a variant of the model, one at a time and together. The last reading is that of the text."""
    dtype, quantization = ("auto", name) if name in BITS else (name, None)
    greedy = SamplingParams(temperature=0, max_tokens=NUM_NEW_TOKENS, ignore_eos=True, detokenize=False)
    reported = replace(greedy, logprobs=NUM_LOGPROBS, prompt_logprobs=NUM_LOGPROBS)
    readings = []
    with LLM(path, dtype=dtype, quantization=quantization, device=str(device), seed=0, skip_tokenizer_init=True) as llm:
        limit = min(MAX_PROMPT_TOKENS, llm.info.max_model_len - NUM_NEW_TOKENS)
        cut = [prompt[:limit] for prompt in prompts]
        outputs = [llm.generate([prompt], greedy, use_tqdm=False)[0] for prompt in tqdm(cut, name, leave=False, disable=None)]
        outputs += llm.generate(cut, reported, use_tqdm=False)
    for number, output in enumerate(outputs):
        [answer] = output.outputs
        if answer.error:
            raise NanoinferError(f"the engine failed in {name}: {answer.error}")
        logprobs = [position for position in (*(output.prompt_logprobs or ()), *(answer.logprobs or ())) if position]
        num_together = 1 if number < len(cut) else len(cut)
        ids, num_prompt_tokens = output.prompt_token_ids + answer.token_ids, len(output.prompt_token_ids)
        readings.append(_Reading(number % len(cut), num_together, ids, num_prompt_tokens, logprobs))
    return readings


@torch.inference_mode()
def _read_with_transformers(
    reference: Checkpoint, dtype: torch.dtype, device: torch.device, readings: Iterable[_Reading]
) -> dict[_Reading, _Expected]:
    """Compute the log-probabilities of readings with transformers' code."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(reference.path, dtype=dtype, trust_remote_code=False)
    model = model.to(device).eval()
    expected = {}
    by_ids = [(ids, [*group]) for ids, group in groupby(sorted(readings, key=attrgetter("ids")), key=attrgetter("ids"))]
    for ids, group in progress_bar("reading in transformers", steps=by_ids):
        logits = model(torch.tensor([ids], device=device), use_cache=False).logits[0, :-1]
        rows = logits.float().log_softmax(-1).cpu()
        own = rows.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        largest, most_likely = rows.max(-1)
        for reading in group:
            places = [(i, token_id) for i, position in enumerate(reading.logprobs) for token_id in position]
            i, token_ids = torch.tensor(places, dtype=torch.long).view(-1, 2).T
            reported = rows[i, token_ids]
            expected[reading] = _Expected(reported, reported > largest[i] - LIKELY, own, largest, most_likely)
    del model
    gc.collect()  # the parts of a model may refer to each other in circles
    return expected


def _compare(
    name: str,
    readings: list[_Reading],
    expected: dict[_Reading, _Expected],
    bounds: Differences | None,
    token_text: Callable[[int], str],
) -> Variant:
    """Compare the readings of a variant with transformers. token_text: returns the text of an id."""
    differing, reported, same = [], [], []
    for reading in readings:
        theirs = expected[reading]
        values = [entry.logprob for position in reading.logprobs for entry in position.values()]
        reported.append((torch.tensor(values), theirs))
        ours = [max(position, key=lambda token_id: position[token_id].logprob) for position in reading.logprobs]
        same += [token_id == its for token_id, its in zip(ours, theirs.most_likely.tolist(), strict=False)]
        for i in range(reading.num_prompt_tokens - 1, len(reading.ids) - 1):
            if (distance := (theirs.largest[i] - theirs.own[i]).item()) > 0:
                texts = token_text(reading.ids[i + 1]), token_text(int(theirs.most_likely[i]))
                is_near_tie = None if bounds is None else distance <= bounds.largest
                place = reading.prompt, reading.num_together, i - reading.num_prompt_tokens + 1
                differing.append(DifferingToken(*place, *texts, distance, is_near_tie))
    text, num = readings[-1], readings[-1].num_prompt_tokens - 1
    log_likelihood = sum_of_logprobs(text.ids[1 : num + 1], list(text.logprobs[:num])) or 0.0
    return Variant(
        name,
        sum(len(reading.ids) - reading.num_prompt_tokens for reading in readings),
        differing,
        _differences(reported),
        bounds,
        sum(same) / len(same),
        math.exp(-log_likelihood / num),
        math.exp(-expected[text].own[:num].mean().item()),
    )


def _differences(reported: Iterable[tuple[Tensor, _Expected]]) -> Differences:
    """Compare log-probabilities [num_reported] of readings with those that are expected."""
    found = torch.cat([(values - theirs.reported).abs()[theirs.is_likely] for values, theirs in reported])
    return Differences(found.max().item(), found.mean().item())
