"""Drafts by multi-token prediction: an extra layer of the checkpoint reads the model's hidden rows.

In: sequences. Out: draft token ids. The module computes a draft from the newest token and the hidden row before it, and the
next draft from that draft and its own row. It has a KV cache and a draft sequence of every sequence, like a draft model. Its
tokens begin with the sequence's second token, so that its token i goes with the model's row i.

Once the drafts are verified, the module computes again from the model's rows what it computed from its own. The model's rows
are kept in slots like keys and values, so they are there after a prefix hit, and a step that writes a token's slot writes its
row.
"""

from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from nanoinfer.errors import UnsupportedError
from nanoinfer.execution.forward_batch import ForwardBatch
from nanoinfer.execution.model_runner import ModelRunner, RunnerWrapper
from nanoinfer.execution.runtime import Runtime
from nanoinfer.features.drafts.draft_model import Draft, DraftModelProposer
from nanoinfer.features.hybrid.cache import HybridCache
from nanoinfer.features.hybrid.qwen_next import Qwen3_5ForCausalLM, QwenNextConfig, QwenNextDecoderLayer
from nanoinfer.features.hybrid.sizes import HybridSizes
from nanoinfer.features.hybrid.states import Recur
from nanoinfer.features.training.loaded_weights import LoadedWeights
from nanoinfer.loading.loader import Loaded
from nanoinfer.loading.weights import fill, find_sources
from nanoinfer.models.layers import Hidden, Ids, ZeroCentredRMSNorm
from nanoinfer.models.qwen import QwenForCausalLM
from nanoinfer.models.registry import Model, WeightRules
from nanoinfer.scheduling.sequence import Sequence
from nanoinfer.scheduling.step_plan import ScheduledSequence, StepPlan


class QwenNextDrafter(nn.Module):
    """Multi-token prediction: maps a token and the model's hidden row before it to a row from which the head reads the next.

        fc([norm(embedding of token t + 1), norm(hidden row t)]), then a layer with attention and a norm

    The model's row is the row after the last norm, as the head reads it. For a second draft, the module's own row takes its
    place. The embedding, the angles and the head are the model's.

    Source: https://arxiv.org/abs/2412.19437, section 2.2, as Qwen's checkpoints have it, where the embedding comes first.
    """

    Config = QwenNextConfig
    weight_rules = WeightRules(prefix="mtp.", embedding="", ignored=("model.", "lm_head."))
    target: tuple[QwenForCausalLM]  # in a tuple, so that its parameters are not this module's
    kept: Tensor  # the model's hidden rows, [num_blocks, block_size, hidden], a row for each slot of its cache

    def __init__(self, config: QwenNextConfig) -> None:
        super().__init__()
        sparse = replace(
            config, num_hidden_layers=1, layer_types=("full_attention",), decoder_sparse_step=1, mlp_only_layers=()
        )
        self.config = config = sparse if config.sparse_layers else replace(sparse, mlp_only_layers=(0,))
        self.pre_fc_norm_embedding = ZeroCentredRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.pre_fc_norm_hidden = ZeroCentredRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.layers = nn.ModuleList([QwenNextDecoderLayer(config, 0)])
        self.norm = ZeroCentredRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, input_ids: Ids, positions: Ids, attend: Recur, hidden: Hidden) -> Hidden:
        [model] = self.target
        embedded = self.pre_fc_norm_embedding(model.embed_tokens(input_ids))
        x = self.fc(torch.cat((embedded, self.pre_fc_norm_hidden(hidden)), dim=-1))
        cos, sin = model.rotary_emb(positions, x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin, attend)
        return self.norm(x)

    def compute_logits(self, hidden: Float[Tensor, "*rows hidden"]) -> Float[Tensor, "*rows vocab"]:
        return self.target[0].compute_logits(hidden)


def load_module(target: Loaded) -> Model:
    """Load the module of a checkpoint, which shares the model's embedding and head. Raises: UnsupportedError, WeightsError."""
    model, hint = target.model, "use method 'ngram', or 'draft_model' with a smaller model"
    if not isinstance(model, Qwen3_5ForCausalLM):
        raise UnsupportedError(f"method 'mtp' needs Qwen3.5 or Qwen3-Next, got a {type(model).__name__}; {hint}")
    weights, rules = target.checkpoint.open_weights(), QwenNextDrafter.weight_rules
    if not any(name.startswith(rules.prefix) for name in weights):
        raise UnsupportedError(
            f"method 'mtp' needs weights whose names begin with {rules.prefix!r}, and the checkpoint has none: transformers "
            f"leaves them out when it saves a model; take the published checkpoint, or {hint}"
        )
    with torch.device("meta"):
        module = QwenNextDrafter(model.config)
    weight = next(model.parameters())
    fill(module, find_sources(module, weights, weight.dtype), weight.device)
    return cast(Model, module.to(weight.device).eval())


def with_drafter(runtime: Runtime, drafter: Any) -> tuple[Runtime, Runtime]:
    """Return the runtime of a model that keeps its hidden rows, and that of its drafter, which shares embedding and head."""
    drafter.target = (runtime.model,)
    draft = replace(
        runtime,
        model=drafter,
        sizes=replace(HybridSizes.of(drafter.config), head_dim=runtime.sizes.head_dim),
        weights=LoadedWeights(),
        wrappers=(partial(DrafterRunner, drafter=drafter),),
    )
    kept_bytes = runtime.model.config.hidden_size * runtime.dtype.itemsize
    wrap = partial(KeepingRunner, drafter=drafter)
    return replace(runtime, wrappers=(*runtime.wrappers, wrap), kept_bytes_per_token=kept_bytes), draft


class KeepingRunner(RunnerWrapper):
    """Keeps the hidden row of each slot of the cache for the drafter."""

    def __init__(self, inner: ModelRunner, drafter: QwenNextDrafter) -> None:
        super().__init__(inner)
        weight = next(iter(self.model.parameters()))
        sizes = self.cache.num_blocks, self.cache.block_size, self.model.config.hidden_size
        drafter.kept = self._kept = torch.zeros(sizes, dtype=weight.dtype, device=weight.device)
        assert isinstance(self.cache, HybridCache)
        self.cache.attached.append(self._kept)

    def forward(self, batch: ForwardBatch) -> Float[Tensor, "num_tokens hidden"]:
        for source, target in batch.block_copies:
            self._kept[target] = self._kept[source]
        hidden = super().forward(batch)
        self._kept.flatten(0, 1)[batch.attention.slot_mapping] = hidden
        return hidden


class DrafterRunner(RunnerWrapper):
    """The runner of a drafter, whose forward pass has an extra argument: the hidden row before each token."""

    def __init__(self, inner: ModelRunner, drafter: QwenNextDrafter) -> None:
        super().__init__(inner)
        self._drafter = drafter
        # Each sequence of the next step, with the slots of the model's rows that its tokens follow. An empty list: its token
        # follows the drafter's own row of the previous step.
        self.hidden_slots: list[tuple[Sequence, list[int]]] = []
        self._latest: dict[Sequence, Tensor] = {}  # each sequence's row of the previous step

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> Float[Tensor, "num_tokens hidden"]:
        kept = self._drafter.kept.flatten(0, 1)
        before = torch.cat([kept[slots] if slots else self._latest[seq] for seq, slots in self.hidden_slots])
        attend = self.begin_step(self.cache, batch)
        hidden: Tensor = self._drafter(batch.input_ids, batch.positions, attend, before)
        ends = batch.attention.query_start_loc_cpu[1:]
        self._latest = {seq: hidden[end - 1 : end] for (seq, _), end in zip(self.hidden_slots, ends, strict=True)}
        return hidden


class _DraftSequence(Sequence):
    """A sequence without its first token, which still counts for positions, so that the same random numbers are drawn."""

    __slots__ = ()

    @property
    def num_new_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens


class MTPProposer(DraftModelProposer):
    """Runs the drafter, as a Proposer."""

    draft_seq_class = _DraftSequence
    _sequences: dict[Sequence, Sequence]  # draft sequence that drafts -> its sequence

    def propose(self, sequences: list[Sequence], limits: list[int]) -> list[list[int]]:
        self._sequences = {self._draft_seq(seq): seq for seq in sequences}
        limits = [limit if len(seq.token_ids) > 1 else 0 for seq, limit in zip(sequences, limits, strict=True)]
        drafts = super().propose(sequences, limits)
        for draft_seq, seq in self._sequences.items():
            draft_seq.num_computed_tokens = min(draft_seq.num_computed_tokens, len(seq.token_ids) - 1)
        return drafts

    def _draft_seq(self, seq: Sequence) -> Sequence:
        draft_seq = self._draft_seqs.get(seq) or self._new_draft_seq(seq)
        draft_seq.token_ids, draft_seq.num_tokens = seq.token_ids[1:], len(seq.token_ids)
        draft_seq.num_computed_tokens = min(draft_seq.num_computed_tokens, max(len(draft_seq.token_ids) - 1, 0))
        return draft_seq

    def _plan(self, drafts: list[Draft]) -> StepPlan | None:
        if (plan := super()._plan(drafts)) is not None:
            assert isinstance(self._executor.runner, DrafterRunner)
            self._executor.runner.hidden_slots = [(item.sequence, self._slots(item)) for item in plan.scheduled]
        return plan

    def _slots(self, item: ScheduledSequence) -> list[int]:
        """Return the slots of the model's rows that the draft sequence's new tokens follow. []: the newest token is a draft."""
        seq, start = self._sequences[item.sequence], item.sequence.num_computed_tokens
        if start >= len(seq.token_ids) - 1:
            return []
        size = self.block_manager.block_size  # the model's cache has the same block size
        return [seq.block_table[i // size] * size + i % size for i in range(start, start + item.num_new_tokens)]
