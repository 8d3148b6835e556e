"""Load what drafts, and make the planner of an engine with speculative_config, for load.py and build.py."""

from dataclasses import replace

from nanoinfer.build import make_executor, make_runtime
from nanoinfer.config import EngineConfig
from nanoinfer.errors import InvalidValueError, UnsupportedError
from nanoinfer.execution.local_executor import LocalExecutor
from nanoinfer.execution.memory import peak_graph_bytes
from nanoinfer.execution.runtime import Runtime
from nanoinfer.features.drafts.checked import CheckedProposer
from nanoinfer.features.drafts.config import SpeculativeConfig
from nanoinfer.features.drafts.draft_model import DraftModelProposer, QuantizedProposer
from nanoinfer.features.drafts.mtp import MTPProposer, load_module, with_drafter
from nanoinfer.features.drafts.ngram import NGramProposer
from nanoinfer.features.drafts.speculator import Proposer, Speculator
from nanoinfer.features.hybrid.sizes import HybridSizes
from nanoinfer.load import load
from nanoinfer.loading.loader import Loaded
from nanoinfer.models.registry import Model


def load_draft(speculative: SpeculativeConfig, config: EngineConfig, target: Loaded) -> Model | None:
    """Load the model, or the module of the model itself, that drafts for `target`. None: the method needs neither."""
    if speculative.method == "mtp":
        return load_module(target)
    if (name := speculative.model) is None:
        return None
    draft, _ = load(EngineConfig(model=name, dtype=config.dtype, device=config.device, enforce_eager=config.enforce_eager))
    ours, theirs = target.model.config.vocab_size, draft.model.config.vocab_size
    hint = "choose a draft model of the same family"
    if theirs != ours:
        raise InvalidValueError(f"the draft model {name!r} has {theirs} token ids, the model has {ours}; {hint}")
    if target.tokenizer and draft.tokenizer and target.tokenizer.hf.get_vocab() != draft.tokenizer.hf.get_vocab():
        raise InvalidValueError(f"the draft model {name!r} has a different tokenizer; {hint}")
    return draft.model


class Drafts:
    """What drafts for a model. runtime: the runtime of the model, with room for the drafter's cache and steps."""

    def __init__(
        self, speculative: SpeculativeConfig, runtime: Runtime, config: EngineConfig, draft_model: Model | None
    ) -> None:
        """Make the runtime of the drafter: a model, a module of the model, or its rounded copy. draft_model: of load_draft."""
        self._speculative, self._config, self.runtime = speculative, config, runtime
        self._draft: Runtime | None = None
        if speculative.method == "quantized":
            if runtime.rounded_copy is None:
                raise UnsupportedError(
                    "speculative_config with method 'quantized' needs kernels, and neither enforce_eager nor "
                    "tensor_parallel_size; leave them out, or use method 'ngram' or 'draft_model'"
                )
            self._draft = replace(runtime, model=runtime.rounded_copy)
            self.runtime = replace(runtime, kept_step_bytes=peak_graph_bytes(self._draft, config, 0))
        elif draft_model is not None:
            if speculative.method == "mtp":
                runtime, draft = with_drafter(runtime, draft_model)
            else:
                draft = make_runtime(draft_model, draft_config(config))
            if isinstance(draft.sizes, HybridSizes) and draft.sizes.num_state_layers:
                raise UnsupportedError(
                    "the draft model keeps states, which cannot go back to an earlier token; choose one with attention in all "
                    "layers, or use method 'ngram'"
                )
            kept, step_bytes = draft.bytes_per_block // draft.block_size, peak_graph_bytes(draft, config, 0)
            kept, step_bytes = kept + runtime.kept_bytes_per_token, step_bytes + runtime.kept_step_bytes
            self._draft, self.runtime = draft, replace(runtime, kept_bytes_per_token=kept, kept_step_bytes=step_bytes)

    def planner(self, target: LocalExecutor) -> Speculator:
        """Make the planner of the model's engine. target: computes with `runtime`."""
        return Speculator(self._make_proposer(target), self._speculative)

    def _make_proposer(self, target: LocalExecutor) -> Proposer:
        """A rounded copy shares the cache of `target`. The cache of another drafter is attached to it, for as many tokens."""
        method, draft, config = self._speculative.method, self._draft, draft_config(self._config)
        if isinstance(method, type):
            return CheckedProposer(method(self._speculative), target.info.vocab_size)
        if draft is None:
            return NGramProposer(self._speculative)
        if method == "quantized":
            executor = LocalExecutor(draft, target.info, config, cache=target.runner.cache)
            target.graph_owners.append(executor)
            return QuantizedProposer(executor)
        num_blocks = -(-target.info.num_blocks * target.info.block_size // draft.block_size)
        executor = make_executor(draft, config, num_blocks=num_blocks, is_drafter=True)
        target.graph_owners.append(executor)
        return (MTPProposer if method == "mtp" else DraftModelProposer)(executor, config.scheduler)


def draft_config(config: EngineConfig) -> EngineConfig:
    """Return the settings that a drafter shares with the model."""
    return EngineConfig(
        attention_backend=config.attention_backend,
        enforce_eager=config.enforce_eager,
        cudagraph_capture=config.cudagraph_capture,
        screened_head=config.screened_head,
        cache=config.cache,
        scheduler=replace(config.scheduler, batch_invariant=False),
    )
