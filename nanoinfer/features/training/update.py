"""Replace the weights of a loaded model, while its compiled programs and their addresses stay as they are.

In: a runner whose weights load.py has placed, and tensors under the names of its checkpoint. Out: the same model with
other values. Names, shapes, transposed matrices, tied heads and parts of ranks follow the rules of loading (weights.py).
`check` runs on rank 0 before anything changes, and `fill`, `fill_from`, `finish` and `release` on every rank.
"""

import os.path
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from nanoinfer.engine.llm_engine import LLMEngine
from nanoinfer.errors import InvalidTypeError, UnsupportedError, WeightsError, first_ten, shown
from nanoinfer.execution.local_executor import LocalExecutor
from nanoinfer.execution.model_runner import ModelRunner
from nanoinfer.features.training.freed_memory import FreedMemory
from nanoinfer.features.training.loaded_weights import LoadedWeights, Origin
from nanoinfer.loading.checkpoint import Checkpoint
from nanoinfer.loading.config_json import read_config
from nanoinfer.loading.weights import FLOAT_DTYPES, TensorInfo, WeightFiles, Weights, divided, find_tensors
from nanoinfer.system.pages import release_pages

_DTYPE_NAMES = {dtype: name for name, dtype in FLOAT_DTYPES.items()}


class GivenWeights(Weights):
    """Tensors that a caller gives instead of a checkpoint's files."""

    def __init__(self, pairs: Iterable[tuple[str, Tensor]]) -> None:
        """Raises: InvalidTypeError for anything but pairs, WeightsError for a name that is given twice."""
        self._tensors: dict[str, Tensor] = {}
        for pair in pairs if isinstance(pairs, Iterable) else [pairs]:
            if not isinstance(pair, tuple | list) or len(pair) != 2 or not isinstance(pair[0], str):
                raise InvalidTypeError(f"pairs must be (name, tensor) pairs, got {shown(pair)}; pass model.named_parameters()")
            name, tensor = pair
            if not isinstance(tensor, Tensor):
                raise InvalidTypeError(f"the weight of {name!r} must be a torch.Tensor, got {shown(tensor)}")
            if name in self:
                raise WeightsError(f"{name!r} is given twice; give it once")
            if tensor.is_meta:
                raise WeightsError(f"{name!r} is on the meta device and has no numbers; load it first")
            self._tensors[name] = tensor.detach()
            self[name] = TensorInfo(tuple(tensor.shape), _DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype)))

    def read(self, name: str, rows: slice = slice(None)) -> Tensor:
        return self._tensors[name][rows]


def runner_of(engine: LLMEngine) -> ModelRunner:
    return cast(LocalExecutor, engine.executor).runner


def weights_of(runner: ModelRunner) -> LoadedWeights:
    return cast(LoadedWeights, runner.weights)  # build.py has made it


def origin_of(runner: ModelRunner) -> Origin:
    """Return how a runner's model was loaded. Raises: UnsupportedError if its weights cannot be replaced."""
    origin = weights_of(runner).origin
    if origin is None:
        raise UnsupportedError("this engine's model was not loaded from a checkpoint; change its parameters yourself")
    config = origin.config
    hint = None
    if config.quantization:
        hint = f"are rounded by quantization={config.quantization!r}; load the model without it"
    elif config.lora:
        hint = "have adapters merged into them; load the model without lora=, and give it merged weights"
    if hint is not None:
        raise UnsupportedError(f"the weights of this LLM cannot be replaced: they {hint}")
    return origin


def check(origin: Origin, weights: Weights) -> bool:
    """Compare names, shapes and dtypes with the model's. Returns whether the tensors are all of its weights.

    Raises: WeightsError if a tensor does not fit.
    """
    with torch.device("meta"):
        targets, rules = dict(origin.model_class(origin.sizes).named_parameters()), origin.rules
    sources, problems = find_tensors(targets, weights, rules)
    for name in weights:
        if name.removeprefix(rules.prefix) == rules.head and rules.head not in targets:  # a tied head
            embedding = sources.get(rules.embedding)
            if embedding is None or not torch.equal(weights.read(name), weights.read(embedding)):
                problems.append(f"tied: {name} must come with the embedding that it shares ({rules.embedding}), and equal it")
    if problems:
        raise WeightsError("the weights do not fit the model, and none was changed: " + first_ten(problems, "; "))
    return len(sources) == len(targets)


def is_file(path: str) -> bool:
    return os.path.isfile(path) and path.endswith(".safetensors")  # False for a name that is too long


def open_path(origin: Origin, path: str) -> Weights:
    """Open a file of tensors, or a checkpoint of the same model. Raises: WeightsError for anything else."""
    if is_file(path):
        return divided(WeightFiles([Path(path)]), origin.rules)
    if not os.path.isdir(path):
        raise WeightsError(
            f"{shown(path)} is neither a folder nor a .safetensors file of this machine; download the checkpoint, and give "
            "its folder"
        )
    checkpoint = Checkpoint.open(path)
    model_class, sizes = read_config(checkpoint)
    ours = vars(origin.sizes) | {"tie_word_embeddings": None}
    if model_class is not origin.model_class or vars(sizes) | {"tie_word_embeddings": None} != ours:
        raise WeightsError(f"{checkpoint.config_path} is not the config of this LLM's model; make a new LLM of it")
    return checkpoint.open_weights()


def fill(runner: ModelRunner, name: str, tensor: Tensor) -> None:
    """Replace a weight on this rank. Call `finish` after the last weight."""
    _fill(runner, GivenWeights([(name, tensor)]))


def fill_from(runner: ModelRunner, path: str) -> None:
    """Replace the weights on this rank by its part of those of a file or a checkpoint. Call `finish` afterwards."""
    _fill(runner, open_path(origin_of(runner), path))


def finish(runner: ModelRunner) -> None:
    """Renew everything that kernels computed from the weights on this rank."""
    weights_of(runner).finish()


def _fill(runner: ModelRunner, weights: Weights) -> None:
    held, origin = weights_of(runner), origin_of(runner)
    if origin.shards is not None:
        weights = origin.shards.shard_of(weights, origin.model_class, origin.sizes)
    for name in weights:
        values = weights.read(name)
        held.write(name.removeprefix(origin.rules.prefix), values.T if name.endswith(origin.rules.transpose) else values)


def release_all(engine: LLMEngine, *, weights: bool, is_kept: bool) -> None:
    """Free the memory of the KV caches, or of the weights, on all ranks. is_kept: as in `release`."""
    executor = cast(LocalExecutor, engine.executor)
    executor.drop_graphs()
    executor.runner.on_all_ranks(partial(release, weights=weights, is_kept=is_kept))
    for drafter in _drafters(engine, weights=weights):
        release(drafter, weights=weights, is_kept=True)


def release(runner: ModelRunner, *, weights: bool, is_kept: bool) -> None:
    """Free the memory of the KV cache, or of the weights, on this rank. is_kept: a GPU's weights are kept on the host."""
    held, tag = weights_of(runner), "weights" if weights else "kv_cache"
    tensors = held.tensors() if weights else runner.cache.tensors()
    if tensors[0].device.type == "cpu":
        for tensor in tensors:
            release_pages(tensor)
    elif tag in held.freed:
        held.freed[tag].is_kept &= is_kept
    else:  # of rounded weights only the arrays of kernels can be replaced
        held.freed[tag] = FreedMemory([*tensors, *(runner.model.parameters() if is_kept else ())], is_kept=is_kept)


def take_back_all(engine: LLMEngine, *, weights: bool) -> bool:
    """Allocate a GPU's memory again after release_all. Returns whether it has its contents."""
    is_kept = runner_of(engine).on_all_ranks(partial(take_back, weights=weights))
    for drafter in _drafters(engine, weights=weights):
        take_back(drafter, weights=weights)
    return is_kept


def take_back(runner: ModelRunner, *, weights: bool) -> bool:
    freed = weights_of(runner).freed.pop("weights" if weights else "kv_cache", None)
    return freed is not None and freed.take_back()


def _drafters(engine: LLMEngine, *, weights: bool) -> list[ModelRunner]:
    """Return the runners of drafters, whose caches have the same tokens, and whose weights keep their memory."""
    owners = cast(LocalExecutor, engine.executor).graph_owners
    return [owner.runner for owner in owners if isinstance(owner, LocalExecutor) and not weights]
