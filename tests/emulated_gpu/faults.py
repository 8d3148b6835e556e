"""Faults that are injected in a kernel's source or in its PTX. The emulator must find each (test_cases.py).

A fault of the PTX stands for one of the compiler, which the interpreter never sees. Some of the source's are hidden from the
interpreter too: memory outside a tensor can be read there, and what nobody wrote happens to be 0.
"""

import importlib.util
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from unittest import mock

import torch

from nanoinfer.attention import triton
from nanoinfer.fast.cuda import (
    decode_kernels,
    draw_kernel,
    experts,
    fused_kernels,
    integer_kernels,
    integers,
    invariant,
    linear_kernel,
    lora,
)
from tests.emulated_gpu import cases

SHORT = [(15, 1), (70, 1), (100, 45)]


def attention(option: str = "window and sinks", dtype: torch.dtype = torch.float16) -> float:
    return cases.check_attention(dtype, 64, option, SHORT)


@dataclass(frozen=True)
class InPtx:
    """A change of what the compiler wrote: of one occurrence of a pattern.

    Attributes:
        found: the kind of fault that the emulator raises, or "values" if the result is wrong.
        at: which occurrence, from 0.
        arch: the architecture that it is compiled for.
    """

    kernel: str
    pattern: str
    replacement: str
    found: str
    case: Callable[[], float] = lambda: attention("plain")
    at: int = 0
    arch: int = 80

    def edit(self, ptx: str) -> str:
        match = list(re.finditer(self.pattern, ptx))[self.at]
        return ptx[: match.start()] + match.expand(self.replacement) + ptx[match.end() :]


@dataclass(frozen=True)
class InSource:
    """A change of a kernel's source: of every occurrence of a text.

    Attributes:
        hidden_from: a case that passes in the interpreter. None: the interpreter's tests see the fault.
        arch: the architecture that it is compiled for.
    """

    module: ModuleType
    old: str
    new: str
    found: str
    case: Callable[[], float] = attention
    hidden_from: Callable[[], float] | None = None
    arch: int = 80

    @contextmanager
    def injected(self) -> Iterator[None]:
        """Let cases.py use a changed copy of the module, in a file that Triton can read."""
        text = Path(self.module.__file__).read_text()
        assert self.old in text, f"{self.old!r} is not in {self.module.__name__}"
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "changed_kernels.py")
            path.write_text(text.replace(self.old, self.new))
            spec = importlib.util.spec_from_file_location(Path(folder).name, path)
            changed = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = changed  # it stays, because Triton reports at exit what is left of a module that is gone
            with mock.patch.object(cases, self.module.__name__.rsplit(".", 1)[1], changed):
                spec.loader.exec_module(changed)
                yield


def _of(check: Callable[[torch.dtype], float], dtype: torch.dtype = torch.float32) -> Callable[[], float]:
    return lambda: check(dtype)


def linear(option: str) -> Callable[[], float]:
    return lambda: cases.check_linear(torch.float16, option)


def invariant_linear(option: str = "split residual") -> float:
    return cases.check_invariant(torch.float16, option)


def draw() -> float:
    return cases.check_draw("ties")


def choose() -> float:
    return cases.check_choose("ties", torch.float32)


def decode_linear(option: str = "gated with norm") -> float:
    return cases.check_decode_linear(torch.bfloat16, option)


def integer_linear(bits: int, option: str = "norm and bias") -> Callable[[], float]:
    return lambda: cases.check_integer_linear(torch.bfloat16, bits, option)


def decode_attention() -> float:
    return cases.check_decode_attention(torch.bfloat16, 64, "plain")


def int8() -> float:
    return attention("int8")


def store_int8() -> float:
    return cases.check_store_int8(torch.float16, num_tokens=60)


def decode_attention_int8() -> float:
    return cases.check_decode_attention(torch.bfloat16, 64, "int8")


def drafts(option: str = "alone") -> float:
    return cases.check_drafts(torch.bfloat16, option)


def drafts_together() -> float:
    return drafts("together")


def paged_drafts() -> float:
    return cases.check_paged_drafts(torch.bfloat16)


def mixture() -> float:
    return cases.check_experts(torch.bfloat16, "silu")


def route() -> float:
    return cases.check_route(torch.bfloat16)


def clamped() -> float:
    return cases.check_experts(torch.bfloat16, "clamped with bias")


def of_lora() -> float:
    return cases.check_lora(torch.bfloat16)


def step() -> float:
    return cases.check_step("qwen3", 1, torch.bfloat16)


_DEPENDS = r"griddepcontrol\.wait ;"  # what makes a kernel wait for those before it
_LATER = _DEPENDS + r"(?s:(.*?))({})"
_WAITS = "    if PDL:\n        gdc_launch_dependents()\n        gdc_wait()\n"
_TOTAL = "    total = tl.zeros([ROWS, COLUMNS], tl.float32)\n"
_ARRIVES = 'counter, 1, sem="acq_rel"'
_BARRIER, _WAIT = r"bar\.sync\s+0;", r"cp\.async\.wait_group\s+\d;"
_SHUFFLE = r"(shfl\.sync\.bfly\.b32\s+%r\d+, %r\d+), {}, 31"
_FOUR = r"\{[^}]*\}"  # registers
FAULTS: dict[str, InPtx | InSource] = {
    "decode: no barrier after the block table": InPtx("_decode_kernel", _BARRIER, "", "RaceFault"),
    "decode: no wait for the keys": InPtx("_decode_kernel", _WAIT, "", "InFlightFault", at=1),
    "decode: an exchange with the wrong lane": InPtx("_decode_kernel", _SHUFFLE.format(2), r"\1, 4, 31", "RaceFault"),
    "prefill: a wait that leaves a group in flight": InPtx("_prefill_kernel", _WAIT, "cp.async.wait_group 1;", "InFlightFault"),
    "prefill: values that are not transposed": InPtx("_prefill_kernel", r"\.trans\.", ".", "values"),
    "prefill: exchanged fragments of an mma": InPtx(
        "_prefill_kernel", rf"(mma\.sync\S+ {_FOUR}, \{{ )(%r\d+), (%r\d+)", r"\1\3, \2", "values"
    ),
    "rms_norm: an exchange with the wrong lane": InPtx(
        "_rms_norm_kernel", _SHUFFLE.format(1), r"\1, 2, 31", "RaceFault", _of(cases.check_rms_norm)
    ),
    "store: a mask that is always true": InPtx(
        "_store_kernel", r"@%p\d+ st\.global", "st.global", "OutsideFault", _of(cases.check_store), at=1
    ),
    "store: exchanged strides": InSource(
        triton, "v + token * v_stride", "v + token * k_stride", "OutsideFault", _of(cases.check_store)
    ),
    "gate: a mask shifted by one": InSource(
        fused_kernels, "columns < SIZE\n    gate", "columns <= SIZE\n    gate", "OutsideFault", _of(cases.check_gate)
    ),
    "gate: a GELU without its cube": InSource(
        fused_kernels, "0.044715 * gate * gate * gate", "0.044715 * gate", "values", _of(cases.check_gate)
    ),
    "rms_norm: a residual that is read without its mask": InSource(
        fused_kernels, "residual + row * SIZE + columns, mask=inside, other=0.0", "residual + row * SIZE + columns",
        "OutsideFault", _of(cases.check_rms_norm), hidden_from=_of(cases.check_rms_norm),
    ),
    "rms_norm: the residual of the first row": InSource(
        fused_kernels, "residual + row * SIZE", "residual", "values", _of(cases.check_rms_norm)
    ),
    "rotate: a norm without its offset": InSource(
        triton, "return scale + 1.0 if", "return scale + 0.0 if", "values", _of(cases.check_rotate)
    ),
    "rotate: a weight that is read without its mask": InSource(
        triton, "weight + places, mask=inside, other=0.0", "weight + places", "OutsideFault",
        _of(cases.check_rotate, torch.bfloat16), hidden_from=_of(cases.check_rotate),
    ),
    "rotate: numbers that turn though they are beyond the rotated part": InSource(
        triton, "tl.where(dims < ROTATED, rotated, number)", "rotated", "values", _of(cases.check_rotate)
    ),
    "rotate: keys that are multiplied by the factor of queries": InSource(
        triton, "k_eps, None, heads", "k_eps, factor, heads", "values", _of(cases.check_rotate)
    ),
    "rotate: an int32 offset that overflows": InSource(
        triton, "token = tl.program_id(0).to(tl.int64)", "token = tl.program_id(0)", "OutsideFault",
        _of(cases.check_far_rotate, torch.bfloat16), hidden_from=_of(cases.check_rotate),
    ),
    "rotate: a token whose queries are not stored": InSource(
        triton, "mask=(heads < HEADS) & (dims < HEAD_DIM)", "mask=(heads < HEADS) & (dims < HEAD_DIM) & (token > 0)",
        "values", _of(cases.check_rotate),
    ),
    "copy: the last block left out": InSource(
        triton, "(copies < num_copies)[:, None]", "(copies < num_copies - 1)[:, None]", "values", _of(cases.check_copy)
    ),
    "store: integers cut instead of rounded": InSource(
        triton, "return (numbers + 12582912.0) - 12582912.0,", "return numbers,", "values", store_int8
    ),
    "store: product and sum rounded once": InSource(
        triton, "tl.minimum(tl.maximum(heads * factors[:, None], -127.0), 127.0)", "heads * factors[:, None]", "values",
        store_int8, hidden_from=store_int8,
    ),
    "store: a quotient that is rounded twice": InSource(
        triton, "tl.div_rn(127.0, tl.where(largest > 0, largest, 1.0))",
        "127 * tl.div_rn(1.0, tl.where(largest > 0, largest, 1.0))", "values", store_int8,
    ),
    "store: a scale that stands for heads that do not exist": InSource(
        triton, "scale[:, None], mask=heads < KV_HEADS", "scale[:, None]", "OutsideFault", store_int8
    ),
    "attention: the scales of another KV head": InSource(
        triton, "NUM_KV_HEADS + kv_head) * BLOCK_SIZE + keys", "NUM_KV_HEADS) * BLOCK_SIZE + keys", "values", int8
    ),
    "attention: values without their scale": InSource(triton, "weights *= v_scale[None, :]", "weights *= 1", "values", int8),
    "decode_attention: a new key that is not rounded as it is stored": InSource(
        decode_kernels, "seen_key, seen_value = k_integers * k_scale[:, None], v_integers * v_scale[:, None]",
        "seen_key, seen_value = key, value", "values", decode_attention_int8,
    ),
    "attention: a block table that is read without its mask": InSource(
        triton, "keys // BLOCK_SIZE, mask=inside, other=0)", "keys // BLOCK_SIZE)", "OutsideFault", hidden_from=attention
    ),
    "attention: a causal mask shifted by one": InSource(
        triton, "keys[None, :] <= positions[:, None]", "keys[None, :] < positions[:, None]", "values"
    ),
    "prefill: the wrong KV head": InSource(triton, "head // (NUM_HEADS // NUM_KV_HEADS)", "head % NUM_KV_HEADS", "values"),
    "decode: a split without keys that writes nothing": InSource(
        triton, "tl.store(partial_m + where, m, mask=rows < GROUP * num_queries)",
        "tl.store(partial_m + where, m, mask=(rows < GROUP * num_queries) & (first_key < last_key))", "UnwrittenFault",
        lambda: attention("plain"),
    ),
    "merge: a split that is left out": InSource(triton, "static_range(NUM_SPLITS)", "static_range(NUM_SPLITS - 1)", "values"),
    "merge: the sink of another head": InSource(triton, "row % NUM_HEADS", "row // NUM_HEADS", "values"),
    "linear: no barrier before a tile is read": InPtx("_linear_kernel", _BARRIER, "", "RaceFault", linear("plain")),
    "linear: exchanged gate and up": InSource(
        linear_kernel, "_activated(total, ACTIVATION) * up", "_activated(up, ACTIVATION) * total", "values", linear("gated")
    ),
    "linear: a bias that is read without its mask": InSource(
        linear_kernel, "bias + columns, mask=inside, other=0.0", "bias + columns", "OutsideFault", linear("bias"),
        hidden_from=linear("bias"),
    ),
    "linear: a part of the integers that is multiplied by the inputs of the other": InSource(
        linear_kernel, " * GROUP + part * BYTES", " * GROUP + (8 // BITS - 1 - part) * BYTES", "values",
        lambda: cases.check_linear(torch.float16, "split residual", 4),
    ),
    "integer_linear: zeros that are not subtracted": InSource(
        integer_kernels, " - zero * tl.sum(a, 1)[None, :]", "", "values", integer_linear(8)
    ),
    "integer_linear: the scale of another group": InSource(
        integer_kernels, "tl.sum(scale * sums", "tl.sum(tl.flip(scale, 1) * sums", "values", integer_linear(8)
    ),
    "integer_linear: a product that is fused with the sum over threads": InSource(
        integer_kernels, "sums + 0.0, 1)", "sums, 1)", "RaceFault", integer_linear(8), hidden_from=integer_linear(8)
    ),
    "integer_linear: inputs that are read without their mask": InSource(
        integer_kernels, "x + inputs, mask=inputs < NUM_IN, other=0.0", "x + inputs", "OutsideFault", integer_linear(4)
    ),
    "integer_linear: no wait": InPtx(
        "_integer_linear_kernel", _DEPENDS, "", "DependencyFault", integer_linear(8), arch=90
    ),
    "widen: the groups of the next output": InSource(
        integers, "inside = (columns < NUM_OUT)[:, None] & (groups < NUM_IN // GROUP)[None, :]",
        "inside = (columns < NUM_OUT)[:, None] & (groups < NUM_IN // GROUP + 1)[None, :]", "OutsideFault",
        lambda: cases.check_widen(torch.bfloat16, 4),
    ),
    "widen: a mask of 16 inputs more": InSource(
        integers, "wide, mask=inputs < NUM_IN", "wide, mask=inputs < NUM_IN + 16", "OutsideFault",
        lambda: cases.check_widen(torch.bfloat16, 4),
    ),
    "invariant: no wait for a tile": InPtx("_invariant_linear_kernel", _WAIT, "", "InFlightFault", invariant_linear),
    "invariant: rows that are read without their mask": InSource(
        invariant, "mask=there[:, None] & within[None, :]", "mask=within[None, :]", "OutsideFault", invariant_linear
    ),
    "invariant: parts that are added in falling order": InSource(
        invariant, "range(NUM_SPLITS)", "range(NUM_SPLITS - 1, -1, -1)", "values", invariant_linear
    ),
    "invariant: many rows whose inputs are not split": InSource(
        invariant, "1 if arrivals is None else num_splits_of(num_out, num_in)", "1", "values", invariant_linear
    ),
    "invariant: keys that are split by the number of rows": InSource(
        triton, "num_splits = num_splits or num_splits_for", "num_splits = num_splits_for", "values",
        _of(cases.check_invariant_decode),
    ),
    "draw: an exchange of a scan with the wrong lane": InPtx(
        "_sum_kernel", r"(shfl\.sync\.up\.b32\s+%r\d+, %r\d+), 4,", r"\1, 2,", "RaceFault", draw, at=-1
    ),
    "draw: parts that list at the same place": InSource(
        draw_kernel, 'tl.atomic_add(num_listed + row, num, sem="relaxed")', "tl.load(num_listed + row)", "RaceFault", draw
    ),
    "draw: a list that is longer than its memory": InSource(
        draw_kernel, "mask=(is_listed == 1) & (at < LIST)", "mask=is_listed == 1", "OutsideFault", draw
    ),
    "draw: a list whose length is not set to 0": InSource(
        draw_kernel, "    tl.store(num_listed + row, 0)\n", "", "UnwrittenFault", draw
    ),
    "draw: a full list that is read": InSource(
        draw_kernel, "tl.where(num <= LIST, num, 0)", "tl.minimum(num, LIST)", "values", draw
    ),
    "draw: a list that is too short for top_p": InSource(
        draw_kernel, "< p * total.to(tl.float64), 0", "< 0.0, 0", "values", draw
    ),
    "draw: a bound that only the largest logit reaches": InSource(
        draw_kernel, "tl.where(k < VOCAB, k, TRIED)", "tl.where(k < VOCAB, 1, TRIED)", "values", draw
    ),
    "draw: equal logits in falling order of the ids": InSource(
        draw_kernel, "+ ((1 << BITS) - 1 - ids)", "+ ids", "values", draw
    ),
    "draw: the words of a position exchanged": InSource(
        draw_kernel, ", low, high, 0, 0)", ", high, low, 0, 0)", "values", draw
    ),
    "draw: logits that are read without their mask": InSource(
        draw_kernel, 'ids, mask=ids < VOCAB, other=float("-inf")', "ids", "OutsideFault", draw
    ),
    "choose: another exp than torch's": InSource(draw_kernel, "libdevice.exp(below)", "tl.exp(below)", "values", choose),
    "choose: a NaN that the largest logit hides": InSource(
        draw_kernel, 'tl.where(logit < float("inf"), logit, float("inf"))', "logit", "values", choose
    ),
    "PDL: no wait": InPtx("_decode_linear_kernel", _DEPENDS, "", "DependencyFault", decode_linear, arch=90),
    "PDL: later kernels are started, and earlier ones not waited for": InPtx(
        "_decode_linear_kernel", _DEPENDS, "griddepcontrol.launch_dependents ;", "DependencyFault", decode_linear, arch=90
    ),
    "PDL: a wait after the first activations": InPtx(
        "_decode_linear_kernel", _LATER.format("shfl"), r"\1 griddepcontrol.wait ;\n\t\2", "DependencyFault", decode_linear,
        arch=90,
    ),
    "PDL: a wait after the rows are stored": InPtx(
        "_decode_linear_kernel", _LATER.format("ret;"), r"\1 griddepcontrol.wait ;\n\t\2", "DependencyFault", decode_linear,
        arch=90,
    ),
    "PDL: a residual that is read with the weights": InSource(
        decode_kernels, _WAITS + _TOTAL, _TOTAL + "    if residual is not None:\n        total += tl.load(residual)\n" + _WAITS,
        "DependencyFault", lambda: decode_linear("residual"), arch=90,
    ),
    "PDL: weights that the step writes": InSource(
        decode_kernels, "    scale, eps, zero_centred = norm or", "    weight.mul_(1)\n    scale, eps, zero_centred = norm or",
        "DependencyFault", decode_linear, arch=90,
    ),
    "PDL: a launch whose kernel does not know": InSource(
        decode_kernels, "*arguments, uses_pdl,", "*arguments, False,", "DependencyFault", decode_linear, arch=90
    ),
    "PDL: a program that ends before it waits": InSource(
        decode_kernels, "    inside = columns < NUM_OUT\n",
        "    inside = columns < NUM_OUT\n    if tl.program_id(0) == 1:\n        return\n", "DependencyFault", decode_linear,
        arch=90,
    ),
    "PDL: programs without keys end before they wait": InSource(
        decode_kernels, "    keys = first_key +", "    if first_key > last_key:\n        return\n    keys = first_key +",
        "DependencyFault", decode_attention, arch=90,
    ),
    "PDL: queries that are read with the old keys": InPtx(
        "_decode_attention_kernel", _LATER.format(r"atom\.global"), r"\1 griddepcontrol.wait ;\n\t\2", "DependencyFault",
        step, arch=90,
    ),
    "decode_attention: a merge that nothing orders": InSource(
        decode_kernels, _ARRIVES, 'counter, 1, sem="relaxed"', "RaceFault", decode_attention
    ),
    "decode_attention: an arrival that acquires nothing": InSource(
        decode_kernels, _ARRIVES, 'counter, 1, sem="release"', "RaceFault", decode_attention
    ),
    "decode_attention: an arrival that releases nothing": InSource(
        decode_kernels, _ARRIVES, 'counter, 1, sem="acquire"', "RaceFault", decode_attention, arch=90
    ),
    "decode_attention: an arrival that other programs do not see": InSource(
        decode_kernels, _ARRIVES, 'counter, 1, sem="acq_rel", scope="cta"', "RaceFault", decode_attention
    ),
    "decode_attention: the last program but one merges": InSource(
        decode_kernels, "== NUM_SPLITS - 1:\n        for head", "== NUM_SPLITS - 2:\n        for head", "RaceFault",
        decode_attention,
    ),
    "decode_attention: a counter that is not reset": InSource(
        decode_kernels, "        tl.store(counter, 0)\n", "", "values", decode_attention
    ),
    "decode_attention: the slots of drafts count as old keys": InSource(
        decode_kernels, "num_old = tl.min(tl.where(is_seen, new_keys, seq_len), 0)", "num_old = seq_len", "RaceFault", drafts
    ),
    "decode_attention: a draft that does not see the one before it": InSource(
        decode_kernels, "(new_keys < seq_len)", "(new_keys == seq_len - 1)", "RaceFault", drafts
    ),
    "decode_attention: the score of the new key without its scale": InSource(
        decode_kernels, "query * seen_key, 0.0), 1) * scale", "query * seen_key, 0.0), 1)", "values", decode_attention
    ),
    "drafts: a draft that sees those after it": InSource(
        decode_kernels, "is_visible = position <= positions", "is_visible = position >= 0", "values", drafts_together
    ),
    "drafts: keys of the first row alone are stored": InSource(
        decode_kernels, "(other < row + num_queries)", "(other < row + 1)", "values", drafts_together
    ),
    "drafts: the last program merges the first row alone": InSource(
        decode_kernels, "range(GROUP * num_queries)", "range(GROUP)", "values", drafts_together
    ),
    "drafts: programs without queries end before they wait": InSource(
        decode_kernels, "    keys = first_key +", "    if num_queries == 0:\n        return\n    keys = first_key +",
        "DependencyFault", drafts_together, arch=90,
    ),
    "drafts: a program that takes the rows of the next sequence": InSource(
        triton, "tl.where(firsts == first, 1, 0)", "tl.where(firsts >= first, 1, 0)", "RaceFault", paged_drafts
    ),
    "drafts: first rows that are read without their mask": InSource(
        triton, "mask=decodes < num_decodes, other=-1", "", "OutsideFault", paged_drafts
    ),
    "drafts: a window from the last query on": InSource(
        triton, "seq_len - (num_queries - 1) - WINDOW", "seq_len - WINDOW", "values", paged_drafts
    ),
    "decode_linear: a norm over the first tile": InSource(
        decode_kernels, "_sum_of_squares(x + row * x_stride, NUM_IN, TILE)", "tl.sum(a * a, 0)", "values", decode_linear
    ),
    "linear: a sum over parts that nothing orders": InSource(
        linear_kernel, 'sem="acq_rel"', 'sem="relaxed"', "RaceFault", linear("split residual")
    ),
    "experts: up that reads the gate's rows": InSource(
        experts, "starts + NUM_OUT * NUM_IN", "starts", "values", mixture
    ),
    "experts: the bias of the first expert": InSource(
        experts, "bias + first_row + columns", "bias + columns", "values", clamped
    ),
    "experts: a gate that is not clamped": InSource(
        experts, "gate = tl.where(gate > LIMIT, LIMIT, gate)", "gate = gate", "values", clamped
    ),
    "experts: the weight of a row's first expert for all": InSource(
        experts, "tl.load(routing + pair) * own.to", "tl.load(routing + row * TOP_K) * own.to", "values", mixture
    ),
    "experts: another row's inputs": InSource(experts, "pair // TOP_K * NUM_IN", "pair * NUM_IN", "OutsideFault", mixture),
    "experts: a list with a hole": InSource(
        experts, "own + count + places - 1", "own + count + places", "UnwrittenFault", mixture
    ),
    "experts: pairs of others in a list": InSource(experts, "ids, mask=is_own)", "ids)", "OutsideFault", mixture),
    "experts: a tile that is counted twice": InSource(
        experts, "(ends <= number)", "(ends < number)", "UnwrittenFault", mixture
    ),
    "experts: one tile of each expert": InSource(
        experts, "(lengths + ROWS - 1) // ROWS", "tl.minimum(lengths, 1)", "UnwrittenFault", mixture
    ),
    "experts: lists that are read beyond their end": InSource(
        experts, "there = places < count", "there = places < count + 1", "UnwrittenFault", mixture
    ),
    "experts: columns of down beyond the last": InSource(
        experts, "mask=there[:, None] & inside[None, :])", "mask=there[:, None])", "OutsideFault", mixture
    ),
    "experts: a residual that is added twice": InSource(
        experts, "total += tl.load(residual", "total += 2 * tl.load(residual", "values", clamped
    ),
    "route: an expert that is chosen again": InSource(
        experts, "is_left = is_left & (experts != expert)", "is_left = is_left", "values", route
    ),
    "route: NaN that is hidden": InSource(
        experts, 'tl.where(is_bad, float("nan"), exponential / total)', "exponential / total", "values", route
    ),
    "route: a softmax over the experts that are left": InSource(
        experts, "if NORMED else exponential, 0)", "if NORMED else tl.where(is_left, exponential, 0.0), 0)", "values", route
    ),
    "route: the second of equal scores": InSource(
        experts, "experts, EXPERTS), 0)", "EXPERTS - 1 - experts, EXPERTS), 0)", "values", route
    ),
    "route: rows that are packed": InSource(
        experts, "row * stride + experts", "row * NUM_EXPERTS + experts", "OutsideFault", route
    ),
    "experts: a sum over the wrong pairs": InSource(
        experts, "row * TOP_K + TOP_K)", "row * TOP_K + TOP_K - 1)", "values", mixture
    ),
    "experts: inputs that are multiplied on their way": InPtx("_grouped_kernel", _WAIT, "", "InFlightFault", mixture),
    "PDL: experts that are read before the router has ended": InPtx(
        "_few_gated_kernel", _LATER.format("shfl"), r"\1 griddepcontrol.wait ;\n\t\2", "DependencyFault", mixture, arch=90
    ),
    "shrink: rows beyond the step that are read": InSource(
        lora, "mask=(used == adapter)[:, None] & within", "mask=within", "OutsideFault", of_lora
    ),
    "shrink: an adapter that reaches the rows of others": InSource(
        lora, "tl.where((used == adapter)[:, None], product, total)", "total + product", "values", of_lora
    ),
    "shrink: a part of the inputs that no program has": InSource(
        lora, "triton.cdiv(num_in, _PART), min", "num_in // _PART, min", "values", of_lora
    ),
    "shrink: no wait for the rows": InPtx("_shrink_kernel", _WAIT, "", "InFlightFault", of_lora),
    "expand: the outputs of the next layer": InSource(
        lora, "columns < tl.load(starts + layer + 1)", "columns >= 0", "OutsideFault", of_lora
    ),
    "expand: the products of the first layer for all": InSource(lora, "layer * RANK + ", "", "values", of_lora),
    "expand: rows without an adapter that are read": InSource(
        lora, "+ at, mask=is_used, other=0.0", "+ at", "OutsideFault", of_lora
    ),
    "linear: no barrier after fragments are put in shared memory": InPtx(
        "_linear_kernel", r"(stmatrix[^;]*;(?s:.*?))bar\S+\s+[-0]\d*;", r"\1", "RaceFault", linear("gated"), arch=90
    ),
}  # fmt: skip


def found(name: str) -> str:
    """Emulate with a fault. Returns the name of what the emulator raised, "values" if the result is wrong, or "nothing"."""
    from tests.emulated_gpu.emulation import emulated_gpu
    from tests.emulated_gpu.memory import Fault

    fault = FAULTS[name]
    try:
        if isinstance(fault, InPtx):
            with emulated_gpu({fault.kernel: fault.edit}, arch=fault.arch):
                share_of_tolerance = fault.case()
        else:
            with fault.injected(), emulated_gpu(arch=fault.arch):
                share_of_tolerance = fault.case()
    except Fault as error:
        print(error, file=sys.stderr)
        return type(error).__name__
    return "nothing" if share_of_tolerance <= 1 else "values"
