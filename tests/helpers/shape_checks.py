"""The shapes and types that annotations state, checked while tests run.

A check costs more than the arithmetic of a tiny model: a decode step of tiny-gpt2 takes 10 ms of CPU with every call
checked, 3 ms with none and 4.4 ms with one in 16 (2 cores, AMD Zen 5). So of each function, the first calls of every test are
checked and then one in EVERY, a prime number: a multiple of the layers would meet the same layer each time.
"""

import functools
import types
from collections import Counter

import jaxtyping
import torch

# The modules and packages whose annotations are checked. Public functions check their arguments themselves. (Triton reads its
# kernels' source and must find it as it was written.)
ARITHMETIC = """
    attention.base attention.dense attention.kv_cache attention.reference attention.cpu attention.flash
    models.registry models.layers models.rope models.gpt2 models.qwen models.llama models.qwen_moe
    loading.loader loading.weights features.training.stored features.quantization.rounding
    execution.forward_batch execution.model_runner execution.local_executor execution.runtime
    sampling features.structured.grammar features.structured.json_schema
    features.tracing.stage_trace features.own_code features.distributed.split_sampling
    fast.fuse fast.cpu.attention fast.cpu.linear fast.cpu.quantized fast.cuda.compile fast.cuda.graphs fast.sampling
""".split()
NUM_FIRST = 8
EVERY = 61

_num_calls: Counter[types.CodeType] = Counter()  # in this test
_check_every_call = jaxtyping.jaxtyped


def install():
    """Check the functions of ARITHMETIC, whose modules are imported from now on."""
    jaxtyping.jaxtyped = check_some_calls  # the hook writes this name above every function and class
    jaxtyping.install_import_hook([f"nanoinfer.{name}" for name in ARITHMETIC], "beartype.beartype")


def start_test():
    """The next call of each function is its first."""
    _num_calls.clear()


def check_some_calls(*, typechecker):
    """As jaxtyping.jaxtyped, which checks every call."""
    check = _check_every_call(typechecker=typechecker)

    def decorate(checkable):
        if not isinstance(checkable, types.FunctionType):
            return check(checkable)  # a class
        checked = None  # made when it is needed: a function inside another is defined at every call of that one

        @functools.wraps(checkable)
        def call(*args, **kwargs):
            nonlocal checked
            number = _num_calls[checkable.__code__]
            _num_calls[checkable.__code__] = number + 1
            if number >= NUM_FIRST and number % EVERY:
                return checkable(*args, **kwargs)
            if any(isinstance(argument, torch.fx.Proxy) for argument in args):  # a symbol has no shape
                return checkable(*args, **kwargs)
            checked = checked or check(checkable)
            return checked(*args, **kwargs)

        return call

    return decorate
