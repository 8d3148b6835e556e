"""Digests of the log-probabilities of every family, in every dtype, eager and compiled, on the machine at hand.

In: the package that Python imports. Out: a file with the numbers of each case, and a table of the cases in which two such files
differ. The numbers depend on the processor, so they are compared with those of another commit on the same machine, and never
committed. Only the public interface is used: LLM, SamplingParams and outputs.
"""

import hashlib
import json
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
import transformers

from nanoinfer import LLM, BeamSearchParams, NanoinferError, SamplingParams
from nanoinfer.features.adapters.request import LoRARequest
from tests.helpers import gguf_files, lora_adapters, tiny_models

DTYPES = ("float32", "bfloat16", "float16")
# Chunks of 16 and windows of 24 are shorter than the first two prompts, which begin alike.
PROMPTS = [[(7 * i + i * i) % 96 for i in range(45)], [(7 * i + i * i) % 96 for i in range(20)] + [5] * 9, [3], [95, 1, 2]]
SETTINGS = {"kv_cache_memory": 2**22, "chunk_size": 16, "block_size": 8, "max_num_seqs": 8, "seed": 0, "max_model_len": 128}
GGUF_TYPES = (("F32", ()), ("BF16", ()), ("BF16", ("Q8_0", "Q4_0")))


def cases() -> Iterator[tuple[str, str, dict]]:
    """(name, checkpoint, arguments of LLM): all families, then one family or two with each other feature."""
    for family in tiny_models.FAMILIES:
        for dtype in DTYPES:
            for mode, eager in ("eager", True), ("compiled", False):
                yield f"{family} {dtype} {mode}", family, {"dtype": dtype, "enforce_eager": eager}
    for family in ("qwen3_wide", "qwen3_moe_wide", "gpt2_wide"):
        for quantization in ("int8", "int4"):
            for mode, eager in ("eager", True), ("compiled", False):
                yield f"{family} {quantization} {mode}", family, {"quantization": quantization, "enforce_eager": eager}
    for mode, eager in ("eager", True), ("compiled", False):
        for file in (f"gguf_{i}" for i in range(len(GGUF_TYPES))):
            yield f"{file} {mode}", file, {"dtype": "bfloat16", "enforce_eager": eager}
        for family in ("qwen3", "gpt2", "qwen3_5", "gemma3_window"):
            yield f"{family} adapters {mode}", family, {"dtype": "float32", "enforce_eager": eager, "enable_lora": True}
    for family in ("qwen3", "gemma3_window", "qwen3_5"):
        drafts = {"method": "ngram", "prompt_lookup_min": 1, "adaptive": False}
        yield f"{family} drafts", family, {"dtype": "float32", "speculative_config": drafts}
        yield f"{family} async", family, {"dtype": "float32", "async_scheduling": True}
        yield f"{family} batch_invariant", family, {"dtype": "bfloat16", "batch_invariant": True}
    yield "qwen3 int8 cache", "qwen3", {"dtype": "bfloat16", "kv_cache_dtype": "int8"}
    yield "qwen3 prefixes from files", "qwen3", {"dtype": "float32", "prefix_cache_dir": "prefixes"}


def checkpoint(name: str, folder: Path) -> Path:
    """Return a checkpoint, which is made if it is new."""
    path = folder / name
    if name.startswith("gguf_"):
        path = path.with_suffix(".gguf")
        if not path.exists():
            type_name, blocks = GGUF_TYPES[int(name.removeprefix("gguf_"))]
            model = tiny_models.build("qwen3", **_WIDE)
            gguf_files.write(path, gguf_files.metadata_of(model.config), gguf_files.tensors_of(model, type_name, blocks))
    elif not path.exists():
        is_wide = name.endswith("_wide")
        tiny_models.save(name.removesuffix("_wide"), path, **(_WIDE_GPT2 if name == "gpt2_wide" else _WIDE if is_wide else {}))
    return path


# Widths that are multiples of 32, as 4 bits need.
_WIDE = {"hidden_size": 64, "intermediate_size": 96}
_WIDE_GPT2 = {"n_embd": 64}


def numbers_of(llm: LLM, lora_requests: list[LoRARequest | None] | None) -> list[list[float]]:
    """Return ids and log-probabilities, as one list for each answer and prompt."""
    greedy = SamplingParams(temperature=0.0, max_tokens=12, logprobs=3, prompt_logprobs=2, detokenize=False)
    drawn = SamplingParams(temperature=0.8, top_p=0.9, seed=1, max_tokens=8, logprobs=0, detokenize=False)
    outputs = llm.generate(PROMPTS, greedy, use_tqdm=False, lora_request=lora_requests)
    outputs += llm.generate(PROMPTS[:2], drawn, use_tqdm=False, lora_request=lora_requests and lora_requests[:2])
    numbers = []
    for output in outputs:
        positions = [position for position in output.prompt_logprobs or [] if position]
        numbers.append([number for position in positions for i, one in position.items() for number in (i, one.logprob)])
        [answer] = output.outputs
        of_answer = [number for position in answer.logprobs for i, one in position.items() for number in (i, one.logprob)]
        numbers.append([*answer.token_ids, *of_answer])
    if lora_requests is None:
        [beams] = llm.beam_search([PROMPTS[0]], BeamSearchParams(beam_width=2, max_tokens=4))
        numbers += [[*beam.token_ids, beam.cum_logprob] for beam in beams.sequences]
    return numbers


def save(checkpoints: Path, output: Path, part_of_name: str = "") -> None:
    """Compute the cases whose name contains a text, and write their numbers as JSON.

    checkpoints: a folder, in which those that are missing are made.
    """
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    checkpoints.mkdir(exist_ok=True)
    found = {}
    for name, model, arguments in cases():
        if part_of_name not in name:
            continue
        try:
            found[name] = compute(checkpoint(model, checkpoints), arguments)
        except NanoinferError as error:
            found[name] = f"{type(error).__name__}: {error}"
    output.write_text(json.dumps(found))


def compute(path: Path, arguments: dict) -> list[list[float]]:
    """Return the numbers of a case. With a folder for prefixes, those before and after a restart."""
    requests = None
    if arguments.get("enable_lora"):
        adapter = path.with_name(f"{path.name}-adapter")
        if not adapter.exists():
            lora_adapters.write_adapter(adapter, lora_adapters.linear_shapes(path))
        requests = [LoRARequest("adapter", 1, str(adapter)), None, None, LoRARequest("adapter", 1, str(adapter))]
    numbers = []
    with tempfile.TemporaryDirectory() as folder:
        is_kept = "prefix_cache_dir" in arguments
        own = {"prefix_cache_dir": folder} if is_kept else {}
        for _ in range(2 if is_kept else 1):
            with LLM(str(path), **SETTINGS | arguments | own) as llm:
                numbers += numbers_of(llm, requests)
    return numbers


def digest(numbers: list[list[float]] | str) -> str:
    if isinstance(numbers, str):
        return numbers
    return hashlib.blake2b(b"".join(struct.pack(f"{len(one)}d", *one) for one in numbers), digest_size=8).hexdigest()


def compare(base: Path, here: Path) -> bool:
    """Print in which cases two files differ, and how far. Returns whether they are equal."""
    before, after = (json.loads(path.read_text()) for path in (base, here))
    different = [name for name in before if digest(before[name]) != digest(after.get(name, "not computed"))]
    different += [name for name in after if name not in before]
    if different:
        print(f"{'case':40} {'base':16} {'here':16} largest difference")
    for name in different:
        ones = before.get(name, "not computed"), after.get(name, "not computed")
        print(f"{name:40} {digest(ones[0])[:16]:16} {digest(ones[1])[:16]:16} {_how_far(*ones)}")
    print(f"{len(before)} cases: the log-probabilities of {len(different)} differ")
    return not different


def _how_far(before: list[list[float]] | str, after: list[list[float]] | str) -> str:
    """The largest difference of ids and log-probabilities, or the error of a case that has none."""
    if isinstance(before, str) or isinstance(after, str):
        return after if isinstance(after, str) else str(before)
    if [len(one) for one in before] != [len(one) for one in after]:
        return "other lengths"
    return f"{max(abs(a - b) for one, other in zip(before, after, strict=True) for a, b in zip(one, other, strict=True)):.3g}"
