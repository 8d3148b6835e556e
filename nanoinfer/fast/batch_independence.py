"""Check whether a prompt's hidden rows have the same bits in any batch, with the compiled model on this machine.

In: a compiled model, with its attention and its cache's sizes. Out: True or False. Rows of the kernels are independent by
construction, so this checks the rest: a user's model or attention, and compilers that reorder additions.

A prompt and two decode steps run alone, then together with other prompts, and with batch_invariant also token by token, each
on a CPU with every number of threads up to torch's, because a team that is in use leaves one thread (fast/cpu/program.cpp).
"""

from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor, nn

from nanoinfer.execution.forward_batch import ForwardBatch
from nanoinfer.execution.model_runner import ModelRunner
from nanoinfer.execution.runtime import Runtime
from nanoinfer.fast.cpu.threads import num_threads, one_torch_thread
from nanoinfer.fast.trace import copied
from nanoinfer.features.batch_invariant.single_queries import InvariantRunner
from nanoinfer.features.hybrid.cache import states_of
from nanoinfer.features.hybrid.tables import tables_of
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.scheduling.sequence import Sequence
from nanoinfer.scheduling.step_plan import ScheduledSequence, StepPlan

PROMPT_LENGTHS = (5, 37, 1, 66, 20)  # the second prompt is compared
COMPARED = 1
NUM_DECODES = 2


@torch.inference_mode()
def is_batch_independent(runtime: Runtime, *, has_single_queries: bool = False) -> bool:
    """Whether rows are independent of batch and threads, and with has_single_queries (batch_invariant) also of the chunk."""
    config, num_groups = runtime.model.config, len(runtime.sizes.windows)
    longest = config.max_position_embeddings - NUM_DECODES
    if longest < 1:
        return False  # max_position_embeddings is too small for the check
    lengths = [min(length, longest) for length in PROMPT_LENGTHS]
    generator = torch.Generator().manual_seed(0)
    token_ids = [
        torch.randint(0, config.vocab_size, (length + NUM_DECODES,), generator=generator).tolist() for length in lengths
    ]
    sequences = scratch_sequences(token_ids, runtime.block_size, num_groups)
    num_blocks = num_groups * sum(len(seq.block_table) for seq in sequences)
    runner = ModelRunner(runtime.model, runtime.make_cache(num_blocks, len(sequences)), runtime.begin_step)
    runner = InvariantRunner(runner) if has_single_queries else runner
    decodes = [1] * NUM_DECODES
    run = partial(hidden_rows, runner)
    results = []
    numbers = range(1, num_threads() + 1) if runtime.device.type == "cpu" else [1]
    for num in numbers:
        with one_torch_thread(num), runtime.in_step():
            results.append(run([sequences[COMPARED]], [[num] for num in (lengths[COMPARED], *decodes)]))
            results.append(run(sequences, [lengths, *([num] * len(sequences) for num in decodes)]))
            if has_single_queries:
                results.append(run([sequences[COMPARED]], [[1]] * len(results[0])))
    return all(same_bits(result, results[0]) for result in results)


def scratch_sequences(token_ids: list[list[int]], block_size: int, num_groups: int = 1) -> list[Sequence]:
    """Make a sequence for each list of ids, with blocks for all of its tokens, which follow those of the sequence before it.

    num_groups: the number of KV groups, each of which has its own blocks.
    """
    sequences: list[Sequence] = []
    num_blocks = 0
    for i, ids in enumerate(token_ids):
        seq = Sequence(str(i), ids, SamplingParams(), seed=0, max_num_tokens=len(ids))
        tables: list[list[int]] = []
        for _ in range(num_groups):
            first, num_blocks = num_blocks, num_blocks + -(-len(ids) // block_size)
            tables.append(list(range(first, num_blocks)))
        seq.block_table, *tables_of(seq).block_tables = tables
        sequences.append(seq)
    return sequences


def same_bits(first: Tensor, other: Tensor) -> bool:
    """Whether two tensors are equal bit by bit. NaN equals NaN, since a corrupted weight does not show the order of a sum."""
    integers = {4: torch.int32, 2: torch.int16}[first.dtype.itemsize]
    return torch.equal(first.contiguous().view(integers), other.contiguous().view(integers))


def hidden_rows(runner: ModelRunner, sequences: list[Sequence], steps: list[list[int]]) -> Float[Tensor, "num_tokens hidden"]:
    """Return the rows of the compared or only sequence. steps: for each step, the number of new tokens of each sequence."""
    cache, device = runner.cache, next(runner.model.parameters()).device
    compared = sequences[COMPARED if len(sequences) > 1 else 0]
    for seq in sequences:
        seq.num_computed_tokens = 0
    rows = []
    for nums in steps:
        items = [ScheduledSequence(seq, num) for seq, num in zip(sequences, nums, strict=True)]
        items.sort(key=lambda item: item.num_new_tokens > 1)  # the scheduler's order
        for item in items if states_of(cache) else ():
            seq, record, state_slot = item.sequence, tables_of(item.sequence), int(item.sequence.request_id)
            record.state_slot = state_slot if seq.num_computed_tokens else -1
            record.state_writes = {seq.num_computed_tokens + item.num_new_tokens: state_slot}
        hidden = runner.forward(ForwardBatch.build(StepPlan(tuple(items)), cache.block_size, device))
        start = 0
        for item in items:
            if item.sequence is compared:
                rows.append(hidden[start : start + item.num_new_tokens].clone())
            start += item.num_new_tokens
            item.sequence.num_computed_tokens += item.num_new_tokens
    return torch.cat(rows)


def one_layer_of_each_kind(model: nn.Module, num_layers: int) -> nn.Module:
    """Return the model with a layer of each kind: most have a single kind, some an MLP in some layers and experts in others.

    A model without a list of layers keeps all of them. The given model stays unchanged.
    """
    few = copied(model)
    for name, child in few.named_children():
        if isinstance(child, nn.ModuleList) and len(child) == num_layers:
            few.register_module(name, nn.ModuleList({repr(layer): layer for layer in child}.values()))
            break
    return few
