"""Solutions of notebook d6."""

import torch
from definitions import definitions
from torch import nn

from nanoinfer import LLM
from nanoinfer.attention.dense import DenseAttention
from nanoinfer.errors import UnsupportedError
from nanoinfer.fast import fuse
from nanoinfer.fast.cpu.accelerate import compile_model
from nanoinfer.fast.cpu.operations import CPUProgram
from nanoinfer.fast.trace import trace

notebook = definitions("d6_a_compiler_for_transformer_layers")
model = notebook.model = LLM(enforce_eager=True, kv_cache_memory=2**24).engine.executor.runner.model
ids, positions = torch.arange(100, 110), torch.arange(10)

# Exercise 1: merge first
first = [fuse.fuse_linears, fuse.merge_linears]
rest = [fuse.fuse_activations, fuse.fuse_factors, fuse.fuse_residuals, fuse.fuse_rotations]
with torch.inference_mode():
    expected = model(ids, positions, DenseAttention())
    counts = []
    for num in range(len(rest) + 1):
        traced, function = notebook.fused_by([*first, *rest[:num]])
        counts.append(sum(node.target not in notebook.VIEW_METHODS for node in notebook.layer_of(traced, 0)))
        assert torch.equal(function(ids, positions, DenseAttention()), expected)
print("operations in a layer:", counts)
# gate_proj and up_proj read the same input, so they are merged as well. Then the SiLU reads a part of a product, and no product
# alone. So neither the activation nor the factor can be fused: two operations over all numbers of the MLP for one product less.
assert counts[0] == counts[1] == counts[2] > counts[3] > counts[4]

# Exercise 2: arrays that results share
try:
    compiled = compile_model(model, keeps_plain=True).model
except UnsupportedError as error:
    print(error)
else:
    [program] = [value for value in vars(compiled.forward.__self__).values() if isinstance(value, CPUProgram)]
    spans = notebook.lifetimes(program.operations)
    widths: list[int] = []  # of the arrays
    array_of: dict[object, int] = {}
    free: list[int] = []
    for i in range(len(program.operations)):
        for buffer, (begin, _) in spans.items():
            if begin == i:
                if not free:
                    free.append(len(widths))
                    widths.append(0)
                best = min(free, key=lambda array, width=buffer.width: abs(widths[array] - width))
                free.remove(best)
                array_of[buffer], widths[best] = best, max(widths[best], buffer.width)
        free += [array_of[buffer] for buffer, (_, end) in spans.items() if end == i]
    print(f"{len(array_of)} results in {len(widths)} arrays with {sum(widths)} numbers for each row")
    assert sum(widths) < sum(buffer.width for buffer in spans) / 3
    # No two results have one array at the same time.
    for one, (begin, end) in spans.items():
        for other, (other_begin, other_end) in spans.items():
            assert one is other or array_of[one] != array_of[other] or end < other_begin or other_end < begin

# Exercise 3: a condition without a branch


class CarefulWhere(nn.Module):
    def forward(self, x):
        return torch.where(x.abs().max() > 100, x / 2, x)


recorded = trace(nn.Sequential(nn.Linear(8, 8), CarefulWhere(), nn.Linear(8, 8)))
print(" -> ".join(node.name for node in recorded.graph.nodes))
assert not recorded.untraced
for size in (1.0, 1000.0):
    x = torch.full((2, 8), size)
    assert torch.equal(CarefulWhere()(x), notebook.Careful()(x))
# torch.where computes x / 2 for every input, and then selects. A branch computes only what it needs, so large computations,
# such as a token's experts, should not be written this way.
