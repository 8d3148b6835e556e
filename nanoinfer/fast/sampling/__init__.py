"""Routes of the sampler, which give the tokens of its stages in less time. `make_routes` lists those of a device."""

from contextlib import suppress

import torch

from nanoinfer.errors import UnsupportedError
from nanoinfer.fast.cuda.graphs import CUDACapture
from nanoinfer.fast.sampling.cuda_graphs import SamplerGraphs
from nanoinfer.fast.sampling.few_logits import FewLogits
from nanoinfer.fast.sampling.greedy import GreedyKernel
from nanoinfer.sampling.routes import Route


def make_routes(device: torch.device, dtype: torch.dtype, vocab_size: int, max_num_graph_rows: int) -> tuple[Route, ...]:
    """Make the routes of a model, in the order in which the sampler tries them.

    max_num_graph_rows: the rows of the largest step that a CUDA graph draws. 0: no CUDA graphs.
    """
    routes: list[Route] = [FewLogits()]
    if device.type == "cpu":
        with suppress(UnsupportedError):
            routes.insert(0, GreedyKernel(dtype, vocab_size))
    elif max_num_graph_rows:
        routes.insert(0, SamplerGraphs(max_num_graph_rows, CUDACapture()))
    return tuple(routes)
