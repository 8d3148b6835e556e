"""Train a checkpoint's model, with log-probabilities that have the sampler's bits.

In: a checkpoint, and token ids. Out: log-probabilities with gradients, and the weights under the checkpoint's names for
LLM.update_weights. The model's file is traced and fused as in the engine (fast/), so that each number is rounded where the
engine rounds it, and the operations are those of functions.py. It runs on a CPU with a C++ compiler, and needs
LLM(batch_invariant=True) with the same dtype for equal bits.
"""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate, repeat
from numbers import Integral

import torch
from jaxtyping import Float
from torch import Tensor, fx, nn

from nanoinfer.attention.kv_cache import KVCache
from nanoinfer.errors import InvalidTypeError, InvalidValueError, UnsupportedError, check_number, shown
from nanoinfer.execution.forward_batch import ForwardBatch
from nanoinfer.fast.batch_independence import scratch_sequences
from nanoinfer.fast.cpu.attention import KernelBackend
from nanoinfer.fast.cpu.layers import has_kernel
from nanoinfer.fast.fuse import FusedLinear, FusedRotation, fuse
from nanoinfer.fast.trace import trace
from nanoinfer.features.batch_invariant.single_queries import single_queries
from nanoinfer.features.hybrid.sizes import HybridSizes
from nanoinfer.features.logprobs.token_logprobs import log_softmax
from nanoinfer.features.policy import functions
from nanoinfer.features.training.loaded_weights import LoadedWeights
from nanoinfer.loading.checkpoint import Checkpoint
from nanoinfer.loading.loader import load_model
from nanoinfer.sampling.stages import divided
from nanoinfer.scheduling.step_plan import ScheduledSequence, StepPlan

_TRAINED: dict[type, Callable[..., nn.Module]] = {
    FusedLinear: functions.TrainedLinear,
    FusedRotation: partial(functions.TrainedModule, kernel=functions.rotate),
}


class Policy(nn.Module):
    """A model with gradients: `Policy("tiny-qwen3")(sequences)`.

    Args:
        model: a bundled name, a folder, or a name on the hub, as in LLM(model).
        dtype: the dtype of the weights, as in LLM(dtype).

    Raises:
        UnsupportedError: a part of the model cannot be traced, such as experts, has no kernel here, or has a window.
    """

    def __init__(self, model: str | os.PathLike[str] | None = None, dtype: str = "auto") -> None:
        super().__init__()
        checkpoint = Checkpoint.open(None if model is None else os.fspath(model))
        self.model = load_model(checkpoint, dtype)
        self._places = LoadedWeights(self.model).places
        for places in self._places.values():
            module, name = places[0]
            parameter = nn.Parameter(getattr(module, name).detach().clone())  # what was loaded may be a view of the file
            for module, name in places:
                setattr(module, name, parameter)
        config, weight = self.model.config, next(self.model.parameters())
        self._sizes = HybridSizes.of(config)
        if self._sizes.num_state_layers or self._sizes.windows != (None,):
            raise UnsupportedError("a Policy attends to all tokens, and this model has windows or states; train another one")
        self._backend = KernelBackend.of(config, weight.dtype)
        # In tuples, because the parameters belong to the model.
        self._head = (functions.TrainedLinear(FusedLinear(self.model.lm_head)),)
        self._layers = (_with_gradients(self.model),)

    def forward(
        self,
        sequences: Sequence[Sequence[int]],
        temperature: float = 1.0,
        masks: Sequence[Sequence[Sequence[int]]] | None = None,
    ) -> list[Float[Tensor, " num_following"]]:
        """Return, for each sequence of ids, the log-probability of every token after the first, in fp32.

        Args:
            sequences: the prompts with their answers, as token ids.
            temperature: the divisor of the logits, > 0. LLM.compute_logprobs returns the same numbers without gradients.
            masks: for each sequence, the sampling_mask of its answer, whose tokens get their probability among the ids that
                could be drawn. An LLM(logprobs_mode="processed") reports the same numbers for a request without penalties.

        Raises:
            InvalidTypeError, InvalidValueError: not lists of this model's ids, too many, or masks that do not fit.
        """
        check_number("temperature", temperature, math.ulp(0.0), math.inf, "finite and > 0")
        if masks is not None and len(masks) != len(sequences):
            raise InvalidValueError(f"masks must be one per sequence, got {len(masks)} for {len(sequences)}")
        given = [self._checked(ids, mask) for ids, mask in zip(sequences, masks or repeat(()), strict=False)]
        several = [item for item in given if len(item[0]) > 1]
        found = iter(self._logprobs(several, [len(ids) for ids, _ in several], temperature) if several else ())
        return [next(found) if len(ids) > 1 else torch.empty(0) for ids, _ in given]

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights for LLM.update_weights."""
        for name, [(module, leaf), *_] in self._places.items():
            weight = getattr(module, leaf).detach()
            yield name, weight.T if name.endswith(self.model.weight_rules.transpose) else weight

    def _checked(self, given: object, mask: object) -> tuple[list[int], list[list[int]]]:
        """Return the ids of a sequence and the mask of its answer. Raises: the errors of forward."""
        ids, num_positions = self._ids("a sequence", given), self.model.config.max_position_embeddings
        if not isinstance(mask, list | tuple):
            raise InvalidTypeError(f"a mask must be an answer's sampling_mask, got {shown(mask)}; set return_sampling_mask")
        if not len(mask) + 1 <= max(1, len(ids)) <= num_positions:
            raise InvalidValueError(
                f"a sequence must have at most {num_positions} tokens, and more than its mask, got {len(ids)} tokens and a "
                f"mask of {len(mask)}"
            )
        return ids, [self._ids("each entry of a mask", allowed) for allowed in mask]

    def _ids(self, name: str, given: object) -> list[int]:
        ids, vocab_size = given.tolist() if isinstance(given, Tensor) else given, self.model.config.vocab_size
        if not isinstance(ids, list | tuple) or not all(isinstance(i, Integral) for i in ids):
            raise InvalidTypeError(f"{name} must be a list of token ids, got {shown(ids)}; a tokenizer encodes text")
        if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
            raise InvalidValueError(f"this model's token ids are 0 .. {vocab_size - 1}, got {shown(ids)}")
        return list(ids)

    def _logprobs(
        self, given: list[tuple[list[int], list[list[int]]]], lengths: list[int], temperature: float
    ) -> Sequence[Tensor]:
        size = self._backend.default_block_size
        scratch = scratch_sequences([ids for ids, _ in given], size)
        cache = KVCache(
            num_layers=self._sizes.num_layers,
            num_kv_heads=self._sizes.num_kv_heads,
            head_dim=self._sizes.head_dim,
            num_blocks=sum(len(seq.block_table) for seq in scratch),
            block_size=size,
            dtype=next(self.model.parameters()).dtype,
            layout=self._backend.layout,
        )
        plan = StepPlan(tuple(ScheduledSequence(seq, num) for seq, num in zip(scratch, lengths, strict=True)))
        batch = ForwardBatch.build(plan, size, torch.device("cpu"))
        attend = functions.TrainedAttention(self._backend.begin_step(cache, single_queries(batch.attention)), lengths)
        hidden = self._layers[0](batch.input_ids, batch.positions, attend)
        rows = torch.cat([part[:-1] for part in torch.arange(len(hidden)).split(lengths)])
        logits: Tensor = self._head[0](hidden[rows]).float()
        banned = torch.zeros(logits.shape if any(mask for _, mask in given) else (1, 1), dtype=torch.bool)
        for (_, mask), end in zip(given, accumulate(num - 1 for num in lengths), strict=True):
            for row, ids in enumerate(mask, end - len(mask)):
                banned[row] = True
                banned[row, ids] = False
        logits = logits.masked_fill(banned, -torch.inf)  # `divided` subtracts the largest remaining logit
        if temperature != 1.0:
            logits = divided(logits, logits.new_full((len(logits),), temperature))
        logprobs = functions.KernelFunction.apply(log_softmax, partial(torch.log_softmax, dim=-1), 1, logits)
        found = logprobs.gather(-1, batch.input_ids[rows + 1].unsqueeze(-1)).squeeze(-1)
        return torch.split(found, [num - 1 for num in lengths])


def _with_gradients(model: nn.Module) -> fx.GraphModule:
    """Return the model's forward pass, fused as in the engine, with operations that have gradients."""
    traced = trace(model)
    fuse(traced)
    for node in list(traced.graph.nodes):
        module = traced.module(node)
        norm = partial(functions.TrainedModule, kernel=functions.normalize) if has_kernel(module) else None
        make = _TRAINED.get(type(module), norm)
        if make is not None:
            others = [tuple(node.kwargs)] if node.kwargs else []  # a linear layer's further inputs: factor, residual
            node.target = traced.name("trained", make(module, *others))
    if traced.untraced:
        names = ", ".join(traced.untraced)
        raise UnsupportedError(f"{names} cannot be traced, so its bits would differ; train a model without experts")
    return fx.GraphModule(traced.owned, traced.graph)
