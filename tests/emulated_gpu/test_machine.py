"""Short PTX, written by hand: what the emulator computes, and the faults that it reports with the instruction and its line."""

import re

import numpy as np
import pytest
import torch

from tests.emulated_gpu import machine
from tests.emulated_gpu.memory import (
    DependencyFault,
    DivergenceFault,
    GlobalMemory,
    InFlightFault,
    OutsideFault,
    RaceFault,
    UnwrittenFault,
)
from tests.emulated_gpu.ptx import parse
from tests.emulated_gpu.table import Table, wavefronts

# A body begins with r1 = tid, r2 = 4 * tid, r3 = byte 4 * tid of shared memory, rd1 and rd2 = element tid of source and out.
KERNEL = """
.visible .entry kernel(
	.param .u64 .ptr .global .align 1 kernel_param_0,
	.param .u64 .ptr .global .align 1 kernel_param_1
)
.reqntid {num_threads}
{{
	.reg .pred %p<9>;
	.reg .b16 %rs<9>;
	.reg .b32 %r<40>;
	.reg .b64 %rd<9>;
	.loc 1 1 0
	ld.param.b64 %rd1, [kernel_param_0];
	ld.param.b64 %rd2, [kernel_param_1];
	mov.u32 %r1, %tid.x;
	shl.b32 %r2, %r1, 2;
	mov.b32 %r4, global_smem;
	add.s32 %r3, %r4, %r2;
	mul.wide.u32 %rd3, %r1, 4;
	add.s64 %rd1, %rd1, %rd3;
	add.s64 %rd2, %rd2, %rd3;
{body}
	ret;
}}
	.file	1 "/kernels/kernel.py"
"""
SHARED = 1024


def emulate(body, *, num_threads=64, source=None, written=None, earlier=None, grid=(1,), observe=None, is_dependent=False):
    """Execute a body, a statement a line, on lines 10, 11, ... of the kernel's source. Returns the output."""
    statements = [line.strip() for line in body.strip().splitlines()]
    lines = [line if line.endswith(":") else f"\t.loc 1 {number} 0\n\t{line}" for number, line in enumerate(statements, 10)]
    kernel = parse(KERNEL.format(num_threads=num_threads, body="\n".join(lines)))
    source = torch.arange(100, 100 + num_threads, dtype=torch.int32) if source is None else source
    out = torch.zeros(num_threads, dtype=torch.int32)
    memory = GlobalMemory()
    arguments = [memory.add("source", source, written, earlier), memory.add("out", out)]
    machine.emulate(kernel, grid, arguments, memory, SHARED, observe, is_dependent)
    return out


def raises(fault, *parts):
    """A fault whose text has these parts in this order."""
    return pytest.raises(fault, match=".*".join(map(re.escape, parts)))


WRITE_OWN = "ld.global.b32 %r5, [%rd1];\nst.shared.b32 [%r3], %r5;\n"
READ_NEXT = "xor.b32 %r6, %r3, {};\nld.shared.b32 %r7, [%r6];\nst.global.b32 [%rd2], %r7;\n"
COPY = "cp.async.ca.shared.global [%r3], [%rd1], 0x4;\ncp.async.commit_group;\n"


BARRIER, ARRIVE = "bar.sync 0;\n", "cp.async.wait_group 0;\n"
MEET = "bar.sync 0;\nld.shared.b32 %r7, [%r4];\nst.global.b32 [%rd2], %r7;"
SECOND_COPY = "add.s32 %r9, %r3, 512;\ncp.async.ca.shared.global [%r9], [%rd1], 0x4;\ncp.async.commit_group;\n"
SUM = "setp.ge.u32 %p1, %r1, 32;\n@%p1 bra $L__BB0_1;\nmov.b32 %r5, -1;\nredux.sync.add.s32 %r6, %r1, %r5;\n"
NOTHING = "setp.lt.u32 %p1, %r1, 3;\nselp.b32 %r9, 4, 0, %p1;\nselp.b64 %rd4, %rd1, 0, %p1;\n"
NOTHING += "cp.async.ca.shared.global [%r3], [%rd4], 0x4, %r9;\ncp.async.commit_group;\ncp.async.wait_group 0;\n"
SHUFFLE = "shfl.sync.bfly.b32 %r8, %r5, 1, 31, -1;\n"
RIGHT = {  # what happens -> a body, and the output of each of 64 threads
    "a barrier orders what threads exchange": (WRITE_OWN + BARRIER + READ_NEXT.format(128), lambda i: 100 + (i ^ 32)),
    "a warp meets": (WRITE_OWN + "bar.warp.sync -1;\n" + READ_NEXT.format(4), lambda i: 100 + (i ^ 1)),
    "a warp meets in an exchange": (WRITE_OWN + SHUFFLE + READ_NEXT.format(4), lambda i: 100 + (i ^ 1)),
    "lanes write equal values to one place": ("mov.b32 %r5, 7;\nst.shared.b32 [%r4], %r5;\n" + MEET, lambda i: 7),
    "a copy is there after the wait and a barrier": (
        COPY + ARRIVE + BARRIER + READ_NEXT.format(128), lambda i: 100 + (i ^ 32),
    ),
    "a copy is complete for its own thread": (COPY + ARRIVE + READ_NEXT.format(0), lambda i: 100 + i),
    "the older of two groups has landed": (
        COPY + SECOND_COPY + "cp.async.wait_group 1;\n" + READ_NEXT.format(0), lambda i: 100 + i,
    ),
    "a copy of no bytes writes zeros and reads no address": (NOTHING + READ_NEXT.format(0), lambda i: 100 + i if i < 3 else 0),
    "a scan reads the lane below, and the lowest lanes keep their own": (
        "ld.global.b32 %r5, [%rd1];\nshfl.sync.up.b32 %r6, %r5, 4, 0, -1;\nst.global.b32 [%rd2], %r6;",
        lambda i: 100 + i - (4 if i % 32 >= 4 else 0),
    ),
    "a sum is one of whole warps where others are elsewhere": (
        SUM + "st.global.b32 [%rd2], %r6;\n$L__BB0_1:", lambda i: 496 if i < 32 else 0,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("body", "expected"), RIGHT.values(), ids=RIGHT)
def test_threads_exchange_what_is_ordered(body, expected):
    assert emulate(body).tolist() == [*map(expected, range(64))]


ELSEWHERE = "setp.lt.u32 %p1, %r1, 5;\n@%p1 bra $L__BB0_1;\n{}\n$L__BB0_1:"
BITS = "and.b32 %r5, %r1, {};\ncvt.u64.u32 %rd4, %r5;\nadd.s64 %rd4, %rd4, 0x40000000;\nst.shared.b64 [%r4], %rd4;"
READ_THEN = "st.shared.b32 [%r3], %r1;\nbar.sync 0;\n" + READ_NEXT.format(128)
COPIED_BY_ANOTHER = "thread 0 of", "writes", "cp.async.ca", "kernel.py:10", "thread 32 of", "reads"
IN_FLIGHT = "thread 0 of", "ld.shared.b32", "kernel.py:", "cp.async.ca", "kernel.py:10"
OTHERS_WRITE = "setp.eq.b32 %p1, %r1, 1;\n@!%p1 st.global.b32 [%rd2], %r1;\n@%p1 ld.global.b32 %r5, [%rd2+-4];"
WRONG = {  # what is wrong -> a body, the fault, and parts of its text
    "no barrier between warps": (
        WRITE_OWN + READ_NEXT.format(128), RaceFault,
        ("byte 0 of", "thread 0 of program (0, 0, 0) writes", "st.shared.b32", "kernel.py:11", "thread 32 of", "reads",
         "ld.shared.b32", "kernel.py:13"),
    ),
    "a read before another thread's write": (
        READ_THEN + "st.shared.b32 [%r3], %r7;", RaceFault, ("reads", "kernel.py:13", "writes", "kernel.py:15"),
    ),
    "lanes of a warp that does not meet": (
        WRITE_OWN + READ_NEXT.format(4), RaceFault, ("thread 0 of", "kernel.py:11", "thread 1 of", "kernel.py:13"),
    ),
    "another warp than the one that meets": (
        WRITE_OWN + "bar.warp.sync -1;\n" + READ_NEXT.format(128), RaceFault, ("kernel.py:11", "kernel.py:14"),
    ),
    "lanes write different values to one place": (
        "st.shared.b32 [%r4], %r1;\n" + MEET, RaceFault, ("write different values", "kernel.py:10"),
    ),
    "integers of 64 bits that differ in one": (BITS.format(1), RaceFault, ("write different values", "kernel.py:13")),
    "a copy without a wait": (COPY + BARRIER + READ_NEXT.format(0), InFlightFault, IN_FLIGHT),
    "a copy whose group is left in flight": (
        COPY + "cp.async.wait_group 1;\n" + BARRIER + READ_NEXT.format(0), InFlightFault, IN_FLIGHT,
    ),
    "the newest group of two": (
        COPY + SECOND_COPY + "cp.async.wait_group 1;\n" + READ_NEXT.format(512), InFlightFault, ("byte 512", "kernel.py:13"),
    ),
    "another thread's copy without a barrier": (COPY + ARRIVE + READ_NEXT.format(128), RaceFault, COPIED_BY_ANOTHER),
    "a barrier before the wait": (COPY + BARRIER + ARRIVE + READ_NEXT.format(128), RaceFault, COPIED_BY_ANOTHER),
    "a copy after a read": (READ_THEN + COPY, RaceFault, ("reads", "kernel.py:13", "writes", "cp.async.ca")),
    "an element after the last": (
        "ld.global.b32 %r5, [%rd1+4];", OutsideFault, ("thread 63 of", "element 64 of source", "kernel.py:10"),
    ),
    "an element before the first": ("ld.global.b32 %r5, [%rd1+-4];", OutsideFault, ("thread 0 of", "element -1 of source")),
    "no tensor": ("mov.b64 %rd4, 0;\nld.global.b32 %r5, [%rd4];", OutsideFault, ("address 0x0", "kernel.py:11")),
    "half an element": ("ld.global.b32 %r5, [%rd1+2];", OutsideFault, ("no multiple of 4",)),
    "after shared memory": (
        "st.shared.b32 [%r3+1020], %r1;", OutsideFault, ("thread 1 of", "byte 1024 of shared memory", "kernel.py:10"),
    ),
    "before shared memory": ("ld.shared.b32 %r5, [%r2];", OutsideFault, ("byte -4096",)),
    "shared memory that nobody wrote": (
        "ld.shared.b32 %r5, [%r3];", UnwrittenFault, ("byte 0 of shared memory", "kernel.py:10"),
    ),
    "a read of what another thread wrote in the launch": (
        OTHERS_WRITE, RaceFault,
        ("thread 0 of program (0, 0, 0) writes element 0 of out", "thread 1 of", "reads it in the same launch", "kernel.py:12"),
    ),
    "a barrier without some": (ELSEWHERE.format("bar.sync 0;"), DivergenceFault, ("kernel.py:12",)),
    "an exchange without some": (
        ELSEWHERE.format("shfl.sync.bfly.b32 %r8, %r1, 1, 31, -1;"), DivergenceFault, ("kernel.py:12",),
    ),
    "matrices without some": (
        ELSEWHERE.format("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r8}, [%r4];"), DivergenceFault, ("kernel.py:12",),
    ),
    "an unknown instruction": ("sin.approx.f32 %r5, %r1;", NotImplementedError, ("sin.approx.f32", "kernel.py:10")),
}  # fmt: skip


@pytest.mark.parametrize(("body", "fault", "parts"), WRONG.values(), ids=WRONG)
def test_what_a_gpu_would_not_report_is_a_fault(body, fault, parts):
    with raises(fault, *parts):
        emulate(body)


# Four programs store 100 * program + tid. The last to arrive stores the sum over programs, and resets the counter.
LAST = """
    ld.param.b64 %rd7, [kernel_param_0];
    mov.u32 %r10, %ctaid.x;
    mad.lo.s32 %r11, %r10, 100, %r1;
    mul.wide.u32 %rd3, %r10, 256;
    add.s64 %rd3, %rd3, %rd1;
    setp.eq.b32 %p1, %r1, 0;
    mov.b32 %r12, 1;
    st.global.b32 [%rd3], %r11;
    bar.sync 0;
    @%p1 atom.global.gpu.acq_rel.add.u32 %r13, [%rd7+1024], %r12;
    @%p1 st.shared.b32 [%r4], %r13;
    bar.sync 0;
    ld.shared.b32 %r14, [%r4];
    setp.ne.b32 %p2, %r14, 3;
    @%p2 bra $L__BB0_1;
    ld.global.b32 %r15, [%rd1];
    ld.global.b32 %r16, [%rd1+256];
    ld.global.b32 %r17, [%rd1+512];
    ld.global.b32 %r18, [%rd1+768];
    add.s32 %r15, %r15, %r16;
    add.s32 %r15, %r15, %r17;
    add.s32 %r15, %r15, %r18;
    st.global.b32 [%rd2], %r15;
    mov.b32 %r19, 0;
    @%p1 st.global.b32 [%rd7+1024], %r19;
    $L__BB0_1:
"""
UNORDERED = {  # what is wrong with the last arrival -> texts and what replaces them
    "nothing is released": (("acq_rel", "acquire"),),
    "nothing is acquired": (("acq_rel", "release"),),
    "neither": (("acq_rel", "relaxed"),),
    "the scope of a program": ((".gpu.", ".cta."),),
    "threads that may not have stored when the first one releases": (("%r11;\n    bar.sync 0;", "%r11;"),),
    "other threads than the one that acquires": (
        ("setp.ne.b32 %p2, %r14, 3;", "setp.ne.b32 %p2, %r10, 3;"), ("    bar.sync 0;\n    ld.shared.b32 %r14, [%r4];\n", ""),
    ),
    "a read before the arrival": (("    setp.eq.b32 %p1", "    ld.global.b32 %r20, [%rd1+768];\n    setp.eq.b32 %p1"),),
    "a store after the arrival": (("    ld.shared.b32 %r14", "    st.global.b32 [%rd3], %r10;\n    ld.shared.b32 %r14"),),
    "a reset by the first program": (("setp.ne.b32 %p2, %r14, 3;", "setp.ne.b32 %p2, %r14, 0;"),),
}  # fmt: skip


def sum_by_the_last(*replaced):
    body, source = LAST, torch.zeros(4 * 64 + 1, dtype=torch.int32)
    for old, new in replaced:
        assert old in body
        body = body.replace(old, new)
    return emulate(body, source=source, grid=(4,)).tolist(), int(source[-1])


def test_the_last_program_reads_what_the_others_have_released_and_the_counter_serves_again():
    assert sum_by_the_last() == ([600 + 4 * i for i in range(64)], 0)
    assert (
        sum_by_the_last(("st.global.b32 [%rd7+1024], %r19", "atom.global.gpu.relaxed.exch.b32 %r20, [%rd7+1024], %r19"))[1] == 0
    )
    assert sum_by_the_last((".gpu.", ".sys."))[1] == 0


@pytest.mark.parametrize("replaced", UNORDERED.values(), ids=UNORDERED)
def test_what_no_release_orders_is_a_race_of_programs(replaced):
    with raises(RaceFault, "of source", "nothing that orders them"):
        sum_by_the_last(*replaced)


WAIT, READ, WRITE = "griddepcontrol.wait;\n", "ld.global.b32 %r5, [%rd1];\n", "st.global.b32 [%rd2], %r1;\n"
LOOK_AHEAD = "setp.ge.u32 %p1, %r1, 32;\n@%p1 " + READ + "griddepcontrol.launch_dependents;\n" + WAIT + READ + WRITE
EARLY = {  # what a program does that may run while earlier kernels do -> a body, and parts of the fault's text
    "it reads what they write": (READ + WAIT, ("thread 0 of", "element 0 of source", "earlier kernel", "kernel.py:10")),
    "it has only said that later ones may start": (
        "griddepcontrol.launch_dependents;\n" + READ + WAIT, ("thread 0 of", "element 0 of source", "kernel.py:11"),
    ),
    "it copies what they write": (COPY + WAIT, ("thread 0 of", "element 0 of source", "cp.async", "kernel.py:10")),
    "it writes": (WRITE + WAIT, ("thread 0 of", "writes before griddepcontrol.wait", "kernel.py:10")),
    "it counts": ("atom.global.gpu.acq_rel.add.u32 %r5, [%rd2], %r1;\n" + WAIT, ("writes before", "kernel.py:10")),
    "it does not wait": ("griddepcontrol.launch_dependents;\n", ("thread 0 of program (0, 0, 0)", "ends without")),
    "some of its threads do not wait": ("setp.lt.u32 %p1, %r1, 40;\n@%p1 " + WAIT, ("thread 40 of", "ends without")),
}  # fmt: skip


def test_a_program_that_has_waited_reads_what_earlier_kernels_wrote():
    """They wrote the first 32 elements. The others may be read before."""
    earlier = np.zeros((64, 4), bool)
    earlier[:32, 0] = True
    assert emulate(LOOK_AHEAD, earlier=earlier, is_dependent=True).tolist() == [*range(64)]
    emulate(READ + WRITE, earlier=earlier)  # not dependent: it starts when they have ended


@pytest.mark.parametrize(("body", "parts"), EARLY.values(), ids=EARLY)
def test_a_program_that_does_something_too_early_is_a_fault(body, parts):
    with raises(DependencyFault, *parts):
        emulate(body, earlier=np.ones((64, 4), bool), is_dependent=True)


def test_what_another_program_writes_later_must_not_be_read_before_it():
    body = "mov.u32 %r10, %ctaid.x;\nsetp.eq.b32 %p1, %r10, 1;\nld.global.b32 %r5, [%rd1];\n{}st.global.b32 [%rd1], %r5;"
    with raises(
        RaceFault, "thread 0 of program (0, 0, 0) reads element 0 of source", "program (1, 0, 0) writes", "kernel.py:13"
    ):
        emulate(body.format("@%p1 "), grid=(2,))
    emulate(body.format(""))  # each thread reads its own element


def test_what_lies_between_the_rows_of_a_view_is_outside_it():
    view = torch.zeros(64, 2, dtype=torch.int32)[:, 0]
    emulate("and.b32 %r5, %r1, 1;\nsetp.eq.b32 %p1, %r5, 0;\n@%p1 ld.global.b32 %r6, [%rd1];", source=view)
    with raises(OutsideFault, "thread 1 of", "element 1 of source"):
        emulate("ld.global.b32 %r6, [%rd1];", source=view)


def test_an_element_may_be_read_after_it_was_written():
    written = np.arange(64) != 5
    with raises(UnwrittenFault, "thread 5 of", "element 5 of source", "kernel.py:10"):
        emulate("ld.global.b32 %r5, [%rd1];", written=written)
    emulate("setp.eq.b32 %p1, %r1, 5;\n@%p1 st.global.b32 [%rd1], %r1;\nld.global.b32 %r5, [%rd1];", written=written)
    assert written.all()


def test_tensors_are_written_by_one_thread_of_a_launch_and_have_one_address_also_as_input_and_output():
    with raises(
        RaceFault, "thread 0 of program (1, 0, 0)", "element 0 of out", "thread 0 of program (0, 0, 0)", "kernel.py:10"
    ):
        emulate("st.global.b32 [%rd2], %r1;", grid=(2,))
    memory, tensor = GlobalMemory(), torch.zeros(4)
    assert memory.add("residual", tensor) == memory.add("out", tensor) != memory.add("other", torch.zeros(4))


def test_integers_of_64_bits_are_rounded_to_float64_and_cut_off_on_the_way_back():
    body = "mov.b64 %rd4, {};\ncvt.rn.f64.s64 %rd5, %rd4;\nmov.b64 %rd6, 0x3FE8000000000000;\nmul.f64 %rd5, %rd5, %rd6;\n"
    body += "cvt.rzi.s64.f64 %rd7, %rd5;\ncvt.u32.u64 %r5, %rd7;\nst.global.b32 [%rd2], %r5;"
    for number, three_quarters in ((7, 5), (-7, -5), (2**53 + 3, 3)):  # the last is 2^53 + 4, and its lower word is stored
        assert emulate(body.format(number))[0] == three_quarters


def test_threads_that_diverge_meet_again():
    body = """
        setp.lt.u32 %p1, %r1, 5;
        mov.b32 %r5, 0;
        @%p1 bra $L__BB0_2;
        $L__BB0_1:
        add.s32 %r5, %r5, 1;
        setp.lt.u32 %p2, %r5, %r1;
        @%p2 bra $L__BB0_1;
        bra.uni $L__BB0_3;
        $L__BB0_2:
        mov.b32 %r5, -1;
        $L__BB0_3:
        bar.sync 0;
        st.global.b32 [%rd2], %r5;
    """
    assert emulate(body).tolist() == [-1] * 5 + list(range(5, 64))


def test_integers_wrap_and_widen_as_their_types_say():
    """-3 by several instructions: the same bits, read as signed or not."""
    body = "sub.s32 %r5, %r1, {};\n{}\nst.global.b32 [%rd2], %r6;"
    cases = {
        "shr.u32 %r6, %r5, 28;": 15, "bfe.s32 %r6, %r5, 1, 2;": -2, "bfe.u32 %r6, %r5, 1, 2;": 2, "shl.b32 %r6, %r5, 32;": 0,
        "mul.wide.u32 %rd4, %r5, 2;\nshr.u64 %rd5, %rd4, 32;\ncvt.u32.u64 %r6, %rd5;": 1,
        "mul.wide.s32 %rd4, %r5, 2;\nshr.s64 %rd5, %rd4, 32;\ncvt.u32.u64 %r6, %rd5;": -1,
        "setp.gt.u32 %p1, %r5, 7;\nselp.b32 %r6, 1, 0, %p1;": 1, "neg.s32 %r6, %r5;": 3,
        "redux.sync.add.s32 %r6, %r5, -1;": -96 + 31 * 16, "mul.lo.s32 %r6, %r5, 0x40000000;": 0x40000000,
        "mul.hi.u32 %r6, %r5, 3;": 2, "mul.hi.s32 %r6, %r5, 3;": -1, "add.s16x2 %r6, %r5, 0x10004;": 1,
        "prmt.b32 %r6, %r5, %r1, 0x5410U;": 0xFFFD, "prmt.b32 %r6, %r1, %r5, 0x0465;": 0x00FDFFFF,
    }  # fmt: skip
    for instructions, expected in cases.items():
        assert emulate(body.format(3, instructions))[0] == expected, instructions


@pytest.mark.parametrize("name", ["bf16", "f16"])
def test_numbers_are_rounded_to_even_and_infinities_and_nan_stay(name):
    dtype = {"bf16": torch.bfloat16, "f16": torch.float16}[name]
    numbers = [1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-11, 1 + 3 * 2**-11, 7e4, -3.4e38, float("inf"), float("nan"), 1e-7, -0.0]
    source = torch.tensor(numbers + [0.5] * 54)
    body = f"ld.global.b32 %r5, [%rd1];\ncvt.rn.{name}x2.f32 %r6, %r5, 0f3F800000;\nst.global.b32 [%rd2], %r6;"
    out = emulate(body, source=source).view(dtype).view(64, 2)
    assert torch.equal(out[:, 0], torch.ones(64, dtype=dtype))  # the second operand is the lower half
    assert out[:, 1].nan_to_num(9).tolist() == source.to(dtype).nan_to_num(9).tolist()


MATRICES = """
    ld.global.b32 %r5, [%rd1];
    st.shared.b32 [%r3], %r5;
    bar.sync 0;
    and.b32 %r9, %r1, 15;
    shl.b32 %r9, %r9, 4;
    add.s32 %r9, %r4, %r9;
    ldmatrix.sync.aligned.m8n8.x2{}.shared.b16 {{%r10, %r11}}, [%r9];
    st.global.b32 [%rd2], %r1{};
"""


@pytest.mark.parametrize("transposed", ["", ".trans"])
def test_stmatrix_puts_back_what_ldmatrix_gives(transposed):
    body = (
        MATRICES.format(transposed, 0).split("st.global")[0]
        + f"""
        add.s32 %r9, %r9, 512;
        stmatrix.sync.aligned.m8n8.x2{transposed}.shared.b16 [%r9], {{%r10, %r11}};
        bar.sync 0;
        ld.shared.b32 %r12, [%r3+512];
        st.global.b32 [%rd2], %r12;
    """
    )
    source = torch.arange(64, dtype=torch.int32) * 65537 + 7
    assert torch.equal(emulate(body, source=source), source)
    once = body.replace(".trans", "", 1)
    assert torch.equal(emulate(once, source=source), source) == (not transposed)


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("transposed", ["", ".trans"])
def test_ldmatrix_gives_each_lane_two_numbers_of_a_row(number, transposed):
    source = torch.arange(128, dtype=torch.int16)
    out = emulate(MATRICES.format(transposed, number), source=source.view(torch.int32)).view(torch.int16).view(2, 32, 2)
    matrix = source.view(2, 8, 8)[number]
    expected = (matrix.T if transposed else matrix).reshape(32, 2)
    assert torch.equal(out[0], expected)
    assert torch.equal(out[1], expected)


def test_mma_multiplies_the_matrices_that_the_lanes_hold():
    """Each lane loads its own numbers, placed as the PTX manual's figures of m16n8k16 place them."""
    a, b, c = torch.randint(-8, 8, (16, 16)), torch.randint(-8, 8, (16, 8)), torch.randint(-8, 8, (16, 8))
    rows, columns = torch.arange(32) // 4, torch.arange(32) % 4 * 2
    halves_a = [a[rows + 8 * (i % 2), columns + 8 * (i // 2) + half] for i in range(4) for half in range(2)]
    halves_b = [b[columns + 8 * i + half, rows] for i in range(2) for half in range(2)]
    numbers_c = [c[rows + 8 * (i // 2), columns + i % 2] for i in range(4)]
    words = torch.stack([*halves_a, *halves_b], 1).to(torch.bfloat16).view(torch.int32)  # [32, 6]
    source = torch.cat((words, torch.stack(numbers_c, 1).float().view(torch.int32)), 1).contiguous()  # [32, 10]
    expected = (a @ b + c).float()
    for i in range(4):
        body = "mul.wide.u32 %rd4, %r1, 36;\nadd.s64 %rd4, %rd4, %rd1;\n"
        body += "".join(f"ld.global.b32 %r{10 + j}, [%rd4+{4 * j}];\n" for j in range(10))
        body += "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%r20, %r21, %r22, %r23}, {%r10, %r11, %r12, %r13}, "
        body += f"{{%r14, %r15}}, {{%r16, %r17, %r18, %r19}};\nst.global.b32 [%rd2], %r{20 + i};"
        out = emulate(body, num_threads=32, source=source).view(torch.float32)
        assert torch.equal(out, expected[rows + 8 * (i // 2), columns + i % 2])


@pytest.mark.parametrize(
    ("stride", "size", "expected"),
    [(4, 4, (1, 1)), (0, 4, (1, 1)), (8, 4, (1, 2)), (128, 4, (1, 32)), (16, 16, (4, 4)), (64, 16, (4, 16))],
)
def test_words_of_one_bank_take_a_wavefront_each(stride, size, expected):
    assert wavefronts(np.arange(32) * stride, size) == expected


def test_the_table_counts_what_the_first_warp_executes_by_lines():
    table = Table("kernel")
    emulate(WRITE_OWN + "bar.sync 0;\nadd.s32 %r6, %r3, %r2;\nst.shared.b32 [%r6], %r5;", grid=(2,), observe=table.observe)
    rows = [row.strip("| ").split(" | ") for row in str(table).splitlines()[2:]]
    assert rows == [
        ["`kernel.py:1`", "9", "0", "0", "0", "0", "0"],
        ["`kernel.py:10`", "1", "1", "0", "0", "0", "0"],
        ["`kernel.py:11`", "1", "0", "1", "0", "0", "0"],
        ["`kernel.py:12`", "1", "0", "0", "0", "0", "1"],
        ["`kernel.py:13`", "1", "0", "0", "0", "0", "0"],
        ["`kernel.py:14`", "2", "0", "1", "1", "0", "0"],
        ["`total`", "15", "1", "2", "1", "0", "1"],
    ]
