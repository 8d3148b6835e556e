"""What Triton's interpreter lacks: products of bfloat16, and bfloat16 of integers, libdevice's exp, and speed.

exp has the bits of sampling/exponentials.py here, as the plain stages have on a CPU. The interpreter would take three
times as long if it found the type and the shape of each result anew.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from numpy.typing import NDArray
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
    patch_operators()
    return SimpleNamespace(restore=lambda: None)


OPERATORS = {
    "__add__": np.add, "__radd__": np.add, "__sub__": np.subtract, "__rsub__": lambda x, y: y - x, "__mul__": np.multiply,
    "__rmul__": np.multiply, "__truediv__": np.divide, "__and__": np.bitwise_and, "__or__": np.bitwise_or, "__lt__": np.less,
    "__le__": np.less_equal, "__gt__": np.greater, "__ge__": np.greater_equal, "__eq__": np.equal, "__ne__": np.not_equal,
}  # fmt: skip
FAMILIES = {"int1": bool, "int32": int, "int64": int, "fp16": float, "fp32": float}  # whose operations are numpy's


@cache
def patch_operators() -> None:
    """The language's own operators are those of patch_lang by now."""
    for name, operation in OPERATORS.items():
        setattr(tl.tensor, name, with_known_types(getattr(tl.tensor, name), operation))


def with_known_types(operator: Callable[..., Any], operation: Callable[..., NDArray]) -> Callable[..., Any]:
    """Call numpy's operation at once for operands of types for which the interpreter's operator did the same before."""
    known: dict[tuple[Any, Any], tuple[Callable[..., NDArray], Any]] = {}

    def compute(x: Any, y: Any) -> Any:
        is_tensor = isinstance(y, tl.tensor)
        types = x.type.name, y.type.name if is_tensor else type(y)
        if types in known:
            function, result_type = known[types]
            y = y.handle.data if is_tensor else x.handle.data.dtype.type(y)
            return tl.tensor(interpreter.TensorHandle(function(x.handle.data, y), result_type.scalar), result_type)
        result, function = operator(x, y), operation
        family, other = FAMILIES.get(x.dtype.name), FAMILIES.get(y.dtype.name) if is_tensor else type(y)
        if x.dtype.is_ptr() and operation is np.add:
            num_bytes = max(1, x.dtype.element_ty.primitive_bitwidth // 8)
            function = lambda pointers, y: pointers + num_bytes * y.astype(np.uint64)  # noqa: E731
            is_plain = is_tensor and other is int
        elif family is bool:
            is_plain = other is bool and operation in (np.bitwise_and, np.bitwise_or)
        else:
            is_plain = family is not None and (other is family or (other is int and not is_tensor))
        if is_plain:
            y = y.handle.data if is_tensor else x.handle.data.dtype.type(y)
            if function(x.handle.data, y).dtype == result.handle.data.dtype:
                known[types] = function, result.type
        return result

    return compute


def found_once(find: Callable[..., Any], name_of: Callable[..., Any]) -> Callable[..., Any]:
    """As `find`, which is called once for arguments of the same name."""
    found: dict[Any, Any] = {}

    def get(*arguments: Any) -> Any:
        name = name_of(*arguments)
        if name not in found:
            found[name] = find(*arguments)
        return found[name]

    return get


def shape_of(kind: Any) -> tuple[Any, Any]:
    sizes = kind.shape if kind.is_block() else ()
    return tl.tuple([tl.constexpr(size) for size in sizes]), tl.constexpr(math.prod(sizes))


def init_tensor(tensor: Any, handle: Any, kind: Any) -> None:
    tensor.handle, tensor.type, tensor.dtype = handle, kind, kind.scalar
    tensor.shape, tensor.numel = known_shape(kind)


def attributes_of_block(element: Any, shape: Any) -> dict[str, Any]:
    block = object.__new__(tl.block_type)
    init_block(block, element, shape)
    return vars(block)


def init_known_block(block: Any, element: Any, shape: Any) -> None:
    block.__dict__ = known_block(element, shape)


def broadcast_unless_known(semantic: Any, x: Any, y: Any) -> tuple[Any, Any]:
    types = x.type.name, y.type.name
    pair = (x, y) if types in of_one_shape else broadcast(semantic, x, y)
    if pair[0] is x and pair[1] is y:
        of_one_shape.add(types)
    return pair


known_shape = found_once(shape_of, lambda kind: kind.name)
known_block = found_once(
    attributes_of_block,
    lambda element, shape: (element.name, *(size.value if isinstance(size, tl.constexpr) else size for size in shape)),
)
of_one_shape: set[tuple[str, str]] = set()
init_block, equal, broadcast = tl.block_type.__init__, tl.dtype.__eq__, interpreter.TritonSemantic.broadcast_impl_value


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
    # The interpreter would add integers once more in 64 bits, and not look at the result.
    interpreter.interpreter_builder.options = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
    interpreter._get_np_dtype = found_once(interpreter._get_np_dtype, lambda kind: kind.name)
    interpreter.TritonSemantic.broadcast_impl_value = broadcast_unless_known
    tl.dtype.__eq__ = lambda x, y: x is y or equal(x, y)
    tl.tensor.__init__, tl.block_type.__init__ = init_tensor, init_known_block
