"""What Triton's interpreter lacks: products of bfloat16, and bfloat16 of integers, libdevice's exp, and speed.

exp has the bits of sampling/exponentials.py here, as the plain stages have on a CPU.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from triton.language.extra import libdevice
from triton.runtime import interpreter

from nanoinfer.attention.triton import _store_kernel
from nanoinfer.sampling.draw import BITS
from nanoinfer.sampling.exponentials import by_torch, table

tl, patch_lang = interpreter.tl, interpreter._patch_lang


@cache
def patch_once(kernel: Any) -> Any:
    """As Triton's interpreter, which makes a language's functions its own at each call of a function: most of its time."""
    patch_lang(kernel)
    return SimpleNamespace(restore=lambda: None)


@contextmanager
def launched() -> Iterator[list[tuple[str, int]]]:
    """List each launch: the kernel's name and its number of programs."""
    kernel_class, launches = type(_store_kernel), []
    run = kernel_class.run

    def listed(kernel: Any, *given: Any, grid: tuple[int, ...], **options: Any) -> Any:
        launches.append((kernel.__name__, math.prod(grid)))
        return run(kernel, *given, grid=grid, **options)

    with mock.patch.object(kernel_class, "run", listed):
        yield launches


def exp(x):
    weights = by_torch(torch.from_numpy(x.handle.data)[None], table(BITS))[0]
    return tl.tensor(interpreter.TensorHandle((weights * 2.0**-BITS).numpy(), tl.float32), x.type)


if not torch.cuda.is_available():

    def dot(builder, a, b, d, *_):
        """Without a BLAS, in some of which (OpenBLAS on Zen 3) the bits of a row depend on its place among the rows."""
        a, b = (builder.cast_impl(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
        products = np.einsum("...ij,...jk->...ik", a.data, b.data, dtype=d.data.dtype)
        return interpreter.TensorHandle(products + d.data, d.dtype.scalar)

    def of_integers(builder, x, kind):
        return builder.cast_impl(builder.cast_impl(x, tl.float32) if kind.scalar == tl.bfloat16 else x, kind)

    interpreter.InterpreterBuilder.create_dot = dot
    interpreter.InterpreterBuilder.create_si_to_fp = of_integers
    libdevice.exp = exp
    np.seterr(over="ignore")  # a GPU divides by a tiny temperature without a warning
    interpreter._patch_lang = patch_once
