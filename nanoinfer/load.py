"""Make an LLMEngine from an EngineConfig: load the checkpoint with its draft model and its ranks, then call build.py.

Placing gives a model its weights as the config says. Without a feature it does what loading/loader.py does by itself.
"""

import logging
import os
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanoinfer.build import make_engine
from nanoinfer.config import DTYPES, EngineConfig, dtype_of_rounded
from nanoinfer.engine.llm_engine import LLMEngine
from nanoinfer.errors import OutOfMemoryError, UnsupportedError, first_line, is_out_of_memory
from nanoinfer.loading.checkpoint import ADAPTER_CONFIG, Checkpoint
from nanoinfer.scheduling.scheduler import scheduling_classes

if TYPE_CHECKING:
    import torch

    from nanoinfer.features.distributed.runner import LeadingShards
    from nanoinfer.features.distributed.sharding import Shards
    from nanoinfer.features.training.loaded_weights import LoadedWeights
    from nanoinfer.features.training.stored import Identity
    from nanoinfer.loading.loader import Loaded
    from nanoinfer.loading.weights import Sources, Weights

logger = logging.getLogger(__name__)

_IMPORTED_BY = os.getpid()  # another process is a fork


def load_engine(config: EngineConfig) -> tuple[LLMEngine, Checkpoint]:
    """Load a checkpoint and make its engine. Returns the checkpoint too, for its generation_config. Raises: as LLM() does."""
    try:
        return _load_engine(config)
    except Exception as error:
        if isinstance(error, OutOfMemoryError) or not is_out_of_memory(error):
            raise
        raise OutOfMemoryError(
            f"memory ran out while the model was loaded ({first_line(error)}); use quantization='int4', a smaller model or a "
            "lower kv_cache_memory, or raise the limit of this process (ulimit -v)"
        ) from error


def _load_engine(config: EngineConfig) -> tuple[LLMEngine, Checkpoint]:
    from nanoinfer.system.process import prepare_threads

    prepare_threads(is_forked=os.getpid() != _IMPORTED_BY)
    scheduling_classes(config)  # raises for wrong classes before the model is loaded
    shards: LeadingShards | None = None
    if config.tensor_parallel_size > 1:
        from nanoinfer.features.distributed.launch import start

        config, shards = start(config)  # under torchrun, ranks above 0 serve rank 0 inside this call, and exit
    with nullcontext() if shards is None else shards.workers.watched():
        (loaded, weights), draft_model = load(config, shards), None
        if config.speculative is not None:
            from nanoinfer.features.drafts.build import load_draft

            draft_model = load_draft(config.speculative, config, loaded)
        engine = make_engine(
            loaded.model,
            config,
            weights=weights,
            draft_model=draft_model,
            tokenizer=loaded.tokenizer,
            eos_token_ids=loaded.eos_token_ids,
            shards=shards,
        )
    if loaded.tokenizer is None and not config.skip_tokenizer_init:
        text = (
            "%s has no tokenizer, such as tokenizer.json: prompts must be token ids, and requests need detokenize=False; pass "
            "tokenizer=... for text, or skip_tokenizer_init=True"
        )
        logger.warning(text, loaded.checkpoint.path)
    engine.observer.engine_loaded(engine, weights.num_parameters)
    engine.observer.flush()
    opened = loaded.checkpoint  # in another format than safetensors, its header may be large
    return engine, Checkpoint(opened.path, opened.config, opened.generation_config, opened.weight_files)


def load(config: EngineConfig, shards: "Shards | None" = None) -> "tuple[Loaded, LoadedWeights]":
    """Load a model, its tokenizer and its EOS ids. shards: the ranks that share the model. None: this process has all of it."""
    from nanoinfer.loading import loader

    checkpoint = Checkpoint.open(config.model, config.revision)
    if not config.lora and not config.enable_lora and (checkpoint.path / ADAPTER_CONFIG).exists():
        text = "the LoRA adapter in %s is not used, while transformers with peft loads it; lora=%r merges it into the weights"
        logger.warning(text, checkpoint.path, str(checkpoint.path))
    placing = Placing(checkpoint, config, shards)
    loaded = loader.load(checkpoint, placing.config, placing)
    if config.calibration is not None:
        from nanoinfer.fast.cpu.calibration import read_calibration

        placing.weights.calibration_ids = read_calibration(config.calibration, loaded.tokenizer)
    return loaded, placing.weights


class Placing:
    """Gives a model its weights as a config says: with adapters merged, a rank's part, rounded, or stored for kernels.

    Raises: UnsupportedError for rounded weights on a GPU with ranks or adapters of requests.
    """

    config: EngineConfig  # with the dtype of rounded weights
    weights: "LoadedWeights"  # those that were placed

    def __init__(self, checkpoint: Checkpoint, config: EngineConfig, shards: "Shards | None") -> None:
        self.config = replace(config, dtype=_dtype_of_rounded(config)) if config.quantization else config
        self._checkpoint, self._shards = checkpoint, shards
        # Before the files are opened, so that files that are replaced at this moment have another identity at the next start.
        self._files = [(path, path.stat()) for path in map(Path.resolve, checkpoint.weight_files)]

    def __call__(self, model: Any, weights: "Weights", dtype: "torch.dtype", device: "torch.device") -> Any:
        from nanoinfer.features.training.loaded_weights import LoadedWeights, Origin
        from nanoinfer.loading.devices import check_memory
        from nanoinfer.loading.weights import fill, find_sources

        config, shards, whole = self.config, self._shards, model.config
        num_parameters = sum(weight.numel() for weight in model.parameters())
        num_stored_bits = 8 * sum(status.st_size for _, status in self._files) / num_parameters
        if config.lora:
            from nanoinfer.features.adapters.lora import LoraWeights

            weights = LoraWeights(weights, config.lora, model.weight_rules)
        if shards is not None:
            model, weights = shards.split(model, weights)
        origin, sources = Origin(config, type(model), model.weight_rules, whole, shards), find_sources(model, weights, dtype)
        # Rounded weights cannot be replaced, and places would keep the original weights alive.
        self.weights = LoadedWeights(None if config.quantization else model, origin, num_parameters)
        is_cpu = device.type == "cpu"
        if config.quantization or (is_cpu and (not config.enforce_eager or num_stored_bits < 12)):
            self._store_linears(model, sources, dtype, device, num_stored_bits)
        else:
            check_memory(model, dtype, device, 1 if shards is None else shards.size)
        fill(model, sources, device)
        if shards is not None:
            shards.join(model, whole.vocab_size)
        return model

    def _store_linears(
        self, model: Any, sources: "Sources", dtype: "torch.dtype", device: "torch.device", num_stored_bits: float
    ) -> None:
        """Leave the matrices of linear layers in the checkpoint for kernels, or round them, or read them without kernels."""
        from torch import nn

        from nanoinfer.features.quantization import rounding
        from nanoinfer.features.training import stored

        config, for_kernels = self.config, not self.config.enforce_eager
        identity = self._identity(model) if for_kernels and not config.lora else None
        stored.store(model, sources, {module.weight for module in model.modules() if type(module) is nn.Linear}, identity)
        num_ranks = 1 if self._shards is None else self._shards.size
        rounding.compare_memory(model, dtype, device, config, num_stored_bits, num_ranks)
        if not for_kernels:
            if config.quantization:
                rounding.quantize_model(model, config.quantization, device)
            stored.load(model, device)
        elif device.type != "cpu":  # whose kernels read an embedding's table in 16 bits
            for module in model.modules():
                if isinstance(module, nn.Embedding):
                    stored.load(module, device)

    def _identity(self, model: Any) -> "Identity":
        from nanoinfer.fast.cpu.identity import sampled_digest
        from nanoinfer.features.training.stored import Identity

        states = [(status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns) for _, status in self._files]
        what = states, sampled_digest(self._checkpoint), self._checkpoint.config, type(model), model.weight_rules
        part = (0, 1) if self._shards is None else (self._shards.rank, self._shards.size)
        return Identity([str(path) for path, _ in self._files], part, repr(what))


def _dtype_of_rounded(config: EngineConfig) -> str:
    """Return the dtype in which a model with rounded weights computes.

    Raises: InvalidValueError for float16 on a CPU, UnsupportedError for what a GPU cannot do.
    """
    from nanoinfer.loading.devices import gpu_has_bf16, resolve_device

    dtype, device = DTYPES[config.dtype], resolve_device(config.device)
    if device.type == "cpu":
        if dtype == "float16":
            raise dtype_of_rounded(config)
        return "bfloat16"
    others = {"enable_lora": config.enable_lora, "batch_invariant": config.scheduler.batch_invariant}
    for name, value in {**others, "tensor_parallel_size": config.tensor_parallel_size}.items():
        if value > 1 or value is True:
            raise UnsupportedError(
                f"quantization={config.quantization!r} with {name}={value} runs on a CPU only, got device {str(device)!r}; "
                "leave one of the two out"
            )
    return dtype if dtype != "auto" else "bfloat16" if gpu_has_bf16(device) else "float16"
