"""Triton's interpreter keeps bfloat16 as 16-bit integers and (in 3.9) multiplies those. Here it converts them first."""

import torch
from triton.runtime import interpreter

if not torch.cuda.is_available():
    dot_of_floats = interpreter.InterpreterBuilder.create_dot

    def dot(builder, a, b, *more):
        widened = (
            builder.cast_impl(x, interpreter.tl.float32) if x.dtype.scalar == interpreter.tl.bfloat16 else x for x in (a, b)
        )
        return dot_of_floats(builder, *widened, *more)

    interpreter.InterpreterBuilder.create_dot = dot
