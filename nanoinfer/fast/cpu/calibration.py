"""Find out how much each input of each linear layer counts, for weights that are rounded to 4 bits (rounding.py).

In: a checkpoint whose model is about to be rounded. Out: the moments of its layers' inputs, kept for the next start, or none.

The model reads some tokens in a single step: those of the user's text, or else random ids, which need no tokenizer and are
nearly as good as a text. It computes in float32, because these kernels have the same bits on every processor. A layer is read
from the checkpoint when it is called, and freed afterwards, so one layer's weights are in memory at a time. Of several ranks,
rank 0 runs the whole model and sends the moments to the others.
"""

import io
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from nanoinfer.attention.cache_sizes import CacheSizes
from nanoinfer.attention.kv_cache import KVCache
from nanoinfer.config import EngineConfig
from nanoinfer.errors import UnsupportedError
from nanoinfer.execution.forward_batch import ForwardBatch
from nanoinfer.execution.model_runner import ModelRunner
from nanoinfer.fast.batch_independence import scratch_sequences
from nanoinfer.fast.compile import CompiledModel
from nanoinfer.fast.cpu.attention import KernelBackend
from nanoinfer.fast.cpu.linear import PackedLinear
from nanoinfer.fast.cpu.packs import KeptArrays
from nanoinfer.fast.cpu.rounding import MeasuredLinear, Moments
from nanoinfer.fast.fuse import FusedLinear
from nanoinfer.loading.checkpoint import Checkpoint
from nanoinfer.loading.held_weights import HeldWeights
from nanoinfer.loading.loader import on_meta
from nanoinfer.loading.weights import StoredParameter, fill, place_weights, progress_bar
from nanoinfer.models.layers import Hidden, Ids, Untraced
from nanoinfer.sampling.draw import philox
from nanoinfer.scheduling.step_plan import ScheduledSequence, StepPlan

logger = logging.getLogger(__name__)

NUM_TOKENS = 512  # of a sequence

Compile = Callable[..., CompiledModel]  # compile_model (accelerate.py)


def find_moments(model: nn.Module, held: HeldWeights, compile_with: Compile) -> Moments:
    """Return the moments of a model's layers: of an earlier start, or computed now. All ranks of a model call it together.

    Args:
        model: the model, or a rank's part of it.
        compile_with: compile_model (accelerate.py).

    Returns:
        The moments, by the names of the weights in the checkpoint. Empty: weights are rounded without them, as the log says.

    Raises:
        UnsupportedError: the user has given a text, and moments cannot be computed or kept.
    """
    moments, origin, way_out = {}, held.origin, "weights are rounded to 4 bits without calibration, which costs quality: %s"
    if held.shards is None or held.shards.rank == 0:
        try:
            moments = _kept_or_measured(model, held, compile_with)
        except UnsupportedError as error:
            if origin is not None and origin.config.calibration is not None:
                raise
            logger.warning(way_out, error)
    if held.shards is None:
        return moments
    content = io.BytesIO()
    torch.save(moments, content)
    sent = torch.frombuffer(content.getbuffer(), dtype=torch.uint8)
    size = int(held.shards.gather(torch.tensor([len(sent)]))[0])
    first = held.shards.gather(F.pad(sent[:size], (0, max(size - len(sent), 0))))[0]
    whole: Moments = torch.load(io.BytesIO(first.numpy().tobytes()))
    stored = {weight.source: weight for weight in model.parameters() if isinstance(weight, StoredParameter)}
    return {name: stored[name].files.inputs(name, values) for name, values in whole.items() if name in stored}


def _kept_or_measured(model: nn.Module, held: HeldWeights, compile_with: Compile) -> Moments:
    """Return the moments of the whole model. Raises: UnsupportedError."""
    stored = next((weight for weight in model.parameters() if isinstance(weight, StoredParameter)), None)
    if stored is None or stored.files.identity is None or held.origin is None or not KeptArrays.are_possible:
        raise UnsupportedError("moments are kept for checkpoints without merged adapters, on Linux and macOS")
    identity = stored.files.identity._replace(part=(0, 1))
    ids = held.calibration_ids
    file = KeptArrays(identity, "moments", (), repr(ids).encode())
    if file.arrays:
        return {name: array.view(torch.float32) for name, [array] in file.arrays.items()}
    moments = _Calibration(held.origin.config, compile_with).run(ids)
    if not file.keep({name: [values.view(torch.uint8)] for name, values in moments.items()}):
        raise UnsupportedError("the folder of packed weights cannot be used, so each start would take longer")
    return moments


class _Calibration:
    """A checkpoint's whole model in float32, whose linear layers add the squares of their inputs to `moments`."""

    def __init__(self, config: EngineConfig, compile_with: Compile) -> None:
        self.moments: dict[str, Tensor] = {}
        model, files = on_meta(Checkpoint.open(config.model, config.revision))
        place_weights(model, files, model.weight_rules, torch.float32)
        tables = [module for module in model.modules() if type(module) is nn.Linear or isinstance(module, nn.Embedding)]
        fill(model, torch.device("cpu"), kept={table.weight for table in tables})
        compile_measured = partial(compile_with, pack=self._measured)
        layers = [child for child in model.children() if isinstance(child, nn.ModuleList)]
        self._bar = progress_bar("calibrating", sum(map(len, layers)))
        for several in layers:
            for i, layer in enumerate(several):
                several[i] = _Once(partial(compile_measured, layer), self._bar)
        for path, module in list(model.named_modules()):
            parent, _, name = path.rpartition(".")
            if isinstance(module, nn.Embedding):
                setattr(model.get_submodule(parent), name, _Rows(module.weight))
            elif f"{path}.weight" == model.weight_rules.head:
                sums = self.moments[module.weight.source] = torch.zeros(module.in_features)
                setattr(model.get_submodule(parent), name, _Inputs(sums, module.out_features))
        self._model: Any = compile_measured(model.eval()).model

    def _measured(self, fused: FusedLinear, **options: Any) -> PackedLinear:
        sums = torch.zeros(fused.in_features)
        self.moments |= {linear.weight.source: sums for linear in fused.linears}
        return MeasuredLinear(fused, sums=sums, **options)

    @torch.inference_mode()
    def run(self, ids: Sequence[int]) -> Moments:
        """Read tokens, and return the moments. ids: empty: random ones."""
        config = self._model.config
        length = min(NUM_TOKENS, config.max_position_embeddings)
        random = philox((np.arange(NUM_TOKENS, dtype=np.uint64), 0, 0, 0), (0, 0))[0] * config.vocab_size >> 32
        ids = ids or random.tolist()
        texts = [list(ids[start : start + length]) for start in range(0, len(ids), length)]
        backend = KernelBackend(
            torch.float32,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
        )
        sizes, block_size = CacheSizes.of(config), backend.default_block_size
        sequences = scratch_sequences(texts, block_size, len(sizes.groups))
        num_blocks = len(sizes.groups) * sum(len(seq.block_table) for seq in sequences)
        options = {"block_size": block_size, "dtype": torch.float32, "layout": backend.layout}
        cache = KVCache.for_model(sizes, num_blocks=num_blocks, num_state_slots=len(sequences), **options)
        for i, seq in enumerate(sequences):
            seq.state_slot, seq.state_writes = -1, {len(seq.token_ids): i}
        plan = StepPlan(tuple(ScheduledSequence(seq, len(seq.token_ids)) for seq in sequences))
        batch = ForwardBatch.build(plan, block_size, torch.device("cpu"))
        self._model.compute_logits(ModelRunner(self._model, cache, backend).forward(batch))
        self._bar.close()
        return self.moments


class _Once(Untraced):
    """A layer that is read from the checkpoint when it is called, and freed afterwards."""

    def __init__(self, compile_layer: Callable[[], CompiledModel], bar: Any) -> None:
        super().__init__()
        self._compile, self._bar = compile_layer, bar

    def forward(self, *given: Any) -> Tensor:
        out: Tensor = self._compile().model(*given)
        self._bar.update()
        return out


class _Rows(Untraced):
    """An embedding that reads its table piece by piece."""

    def __init__(self, table: StoredParameter) -> None:
        super().__init__()
        self._table = [table]  # no parameter of the module

    def forward(self, input_ids: Ids) -> Hidden:
        [table] = self._table
        out = torch.empty(len(input_ids), table.shape[1])
        for rows in table.pieces():
            inside = (input_ids >= rows.start) & (input_ids < rows.stop)
            out[inside] = table.read(rows)[input_ids[inside] - rows.start]
        return out


class _Inputs(Untraced):
    """The LM head, of which only the inputs matter."""

    def __init__(self, sums: Float[Tensor, " in"], num_out: int) -> None:
        super().__init__()
        self._sums, self._num_out = sums, num_out

    def forward(self, x: Hidden) -> Tensor:
        for row in x:  # torch's sum has another order on other processors
            self._sums += row * row
        return x.new_zeros(()).expand(len(x), self._num_out)
