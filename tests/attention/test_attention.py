"""Every paged backend equals dense attention over each sequence alone, whatever the batch, the lengths and the blocks."""

import subprocess
import sys
from pathlib import Path

import pytest
import tiny_models
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_cases import FAULTS, check_poison_free_reuse, compare

from nanoinfer import LLM, SamplingParams
from nanoinfer.attention import base
from nanoinfer.attention.base import register_backend, select_backend
from nanoinfer.attention.dense import DenseAttention
from nanoinfer.attention.kv_cache import KVCache
from nanoinfer.attention.reference import ReferenceBackend
from nanoinfer.cli import doctor
from nanoinfer.errors import InvalidTypeError, InvalidValueError, UnsupportedError
from nanoinfer.execution.memory import available_cpu_memory, memory_for_cache

CPU = torch.device("cpu")


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 90), st.sampled_from([1, 1, 2, 5, 40])), min_size=1, max_size=6),
    block_size=st.sampled_from([1, 4, 16, 64]),
    heads=st.sampled_from([(1, 1), (2, 2), (2, 7), (3, 1)]),
    head_dim=st.sampled_from([8, 10]),
)
def test_paged_attention_equals_dense_attention(backend, lengths, block_size, heads, head_dim):
    num_kv_heads, group = heads
    error = compare(backend, lengths, block_size=block_size, num_kv_heads=num_kv_heads, group=group, head_dim=head_dim)
    assert error < 1e-5


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_bf16_stays_within_its_rounding(backend):
    lengths = [(100, 1), (3, 1), (0, 20), (64, 30)]
    assert compare(backend, lengths, block_size=16, num_kv_heads=2, group=2, head_dim=16, dtype=torch.bfloat16) < 0.05


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("fault", FAULTS)
def test_the_comparison_notices_a_planted_fault(backend, fault):
    lengths = [(40, 1), (41, 1), (17, 5)]
    assert compare(backend, lengths, block_size=16, num_kv_heads=2, group=2, head_dim=8, spoil=FAULTS[fault]) > 1e-3


POISONED = [(40, 1), (7, 1), (0, 30), (20, 9)]  # decodes, a prompt, a chunk after a cached prefix


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("poisoned", [(0, 0), (2, 0), (2, 17), (3, 4)])
def test_a_token_that_is_not_finite_reaches_later_queries_of_its_sequence_and_no_others(backend, poisoned):
    assert compare(backend, POISONED, block_size=16, num_kv_heads=2, group=2, head_dim=8, poisoned=poisoned) < 1e-5


def test_that_test_notices_values_that_are_stored_as_they_are(monkeypatch):
    monkeypatch.setattr("nanoinfer.attention.cpu.finite_values", lambda k, v: (k, v))
    assert compare("cpu", POISONED, block_size=16, num_kv_heads=2, group=2, head_dim=8, poisoned=(2, 17)) == float("inf")


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("family", ["gpt2", "qwen3"])
def test_a_poisoned_request_stops_no_other(family, backend, tmp_path):
    check_poison_free_reuse(tiny_models.save(family, tmp_path), backend)


def test_dense_attention_is_transformers_formula_by_hand():
    """Two tokens, one head of size 1: the first sees itself, the second weighs both by exp(q k)."""
    q, k, v = torch.tensor([1.0, 2.0]), torch.tensor([0.0, 1.0]), torch.tensor([10.0, 20.0])
    out = DenseAttention()(0, *(x.view(2, 1, 1) for x in (q, k, v))).flatten()
    weight = torch.tensor(2.0).exp() / (1 + torch.tensor(2.0).exp())
    torch.testing.assert_close(out, torch.stack([torch.tensor(10.0), 10 + 10 * weight]))


@pytest.mark.slow
@pytest.mark.parametrize("num_threads", [1, 2])
def test_the_compiled_decode_equals_the_plain_one_and_enforce_eager_never_compiles(num_threads):
    """In another process, because compiled code cannot run under the shape checks. Also compares the bits of rows."""
    code = """
import torch, logging, sys
from nanoinfer.attention import cpu
torch.manual_seed(0); torch.set_num_threads(int(sys.argv[1]))
k_pages, v_pages = torch.randn(2, 9, 4, 16, 64).unbind(0); v_pages = v_pages.mT.contiguous()
tables, lens = torch.randperm(9)[:6].view(3, 2), torch.tensor([5, 32, 17])
q, k, v = torch.randn(3, 8, 64), *torch.randn(2, 3, 4, 64)
def where(tables, lens):
    last = lens - 1
    return cpu.DecodeIndices(tables.gather(1, last[:, None] // 16)[:, 0], last % 16, tables, lens)
def plain(part, where):
    return cpu.paged_decode(q[part], k[part], v[part], k_pages, v_pages, *where)
def of(backend, part, where):
    return backend.decode(q[part], k[part], v[part], k_pages, v_pages, where)
eager = cpu.CPUBackend(enforce_eager=True); of(eager, slice(3), where(tables, lens))
assert not eager._kinds
backend = cpu.CPUBackend(); small = torch.randn(2, 9, 1, 16, 8)
backend.decode(*torch.randn(3, 3, 1, 8), small[0], small[1].mT.contiguous(), where(tables, lens))
assert not backend._kinds, "a small model is not worth compiling for"
of(backend, slice(3), where(tables, lens))
print("compiled", backend._may_compile)
for n in (1, 2, 3):
    for blocks in (1, 2):
        args = slice(n), where(tables[:n, :blocks].contiguous(), lens[:n].clamp(max=16 * blocks))
        torch.testing.assert_close(of(backend, *args), plain(*args), atol=1e-5, rtol=0)
lens = torch.tensor([5, 16, 17])
together = of(backend, slice(3), where(tables, lens))
for i in range(3):
    for blocks in (1, 2):
        if lens[i] <= 16 * blocks:
            one = slice(i, i + 1)
            alone = of(backend, one, where(tables[one, :blocks].contiguous(), lens[one]))
            assert torch.equal(alone, together[one]), (i, blocks)
"""
    done = subprocess.run([sys.executable, "-c", code, str(num_threads)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    if "compiled False" in done.stdout:
        pytest.skip("there is no C++ compiler here; the plain form was used")


@pytest.mark.parametrize(("num_heads", "head_dim", "block_size"), [(6, 32, 64), (12, 64, 64), (4, 64, 16), (2, 32, 64)])
def test_masked_blocks_at_the_end_of_a_table_change_no_bit_of_the_plain_form(num_heads, head_dim, block_size):
    """A row is padded beside longer ones. Sums of few columns would be interleaved by fours: 6 blocks differ from 8."""
    from nanoinfer.attention import cpu

    generator = torch.Generator().manual_seed(0)
    for num_blocks in (1, 2, 3, 5, 6, 7, 11):
        q, k, v = torch.randn(3, 1, num_heads, head_dim, generator=generator)
        k_pages = torch.randn(40, num_heads, block_size, head_dim, generator=generator)
        v_pages = torch.randn(40, num_heads, head_dim, block_size, generator=generator)
        seq_len = num_blocks * block_size - 3
        table = torch.randperm(40, generator=generator)[:num_blocks].unsqueeze(0)
        alone = None
        for padding in (0, 1, 2, 3, 9, 20):
            tables = torch.nn.functional.pad(table, (0, padding))
            where = table[:, -1], torch.tensor([(seq_len - 1) % block_size]), tables, torch.tensor([seq_len])
            out = cpu.paged_decode(q, k, v, k_pages, v_pages, *where)
            alone = out if alone is None else alone
            assert torch.equal(out, alone), (num_blocks, padding)


def test_a_row_has_the_same_bits_beside_longer_ones_where_heads_are_few_and_small():
    """8 slots x 4 heads are 32 columns, of which torch adds every fourth block to one of four sums."""
    from nanoinfer.attention import cpu

    generator = torch.Generator().manual_seed(0)
    k_pages, v_pages = torch.randn(40, 4, 8, 12, generator=generator), torch.randn(40, 4, 12, 8, generator=generator)
    q, k, v = torch.randn(3, 1, 4, 12, generator=generator)
    backend, table = cpu.CPUBackend(), torch.randperm(40, generator=generator)[:6].unsqueeze(0)
    alone = None
    for padding in range(8):
        tables = torch.nn.functional.pad(table, (0, padding))
        where = cpu.DecodeIndices(table[:, -1], torch.tensor([4]), tables, torch.tensor([45]))
        out = backend.decode(q, k, v, k_pages, v_pages, where)
        alone = out if alone is None else alone
        assert torch.equal(out, alone), padding


def test_a_compiled_form_whose_rows_depend_on_each_other_is_not_used(monkeypatch, caplog, tmp_path):
    """A stand-in for torch.compile: correct for several sequences, another order of addition for one."""
    from nanoinfer.attention import cpu

    monkeypatch.setenv("NANOINFER_CACHE", str(tmp_path))
    reorders, num_compiled_calls = True, 0

    def compiled(q, k, v, k_pages, v_pages, *where):
        nonlocal num_compiled_calls
        num_compiled_calls += 1
        if not reorders or len(q) > 1:
            return cpu.paged_decode(q, k, v, k_pages, v_pages, *where)
        return cpu.paged_decode(q.flip(2), k.flip(2), v, k_pages.flip(3), v_pages, *where)  # the sum over head_dim, backwards

    monkeypatch.setattr(torch, "compile", lambda *args, **kwargs: compiled)
    args = *torch.randn(3, 2, 4, 64), torch.randn(3, 4, 16, 64), torch.randn(3, 4, 64, 16)
    where = cpu.DecodeIndices(torch.tensor([0, 1]), torch.tensor([4, 8]), torch.tensor([[0], [1]]), torch.tensor([5, 9]))
    for attempt in range(2):  # the second finds the verdict
        num_compiled_calls = 0
        assert torch.equal(cpu.CPUBackend().decode(*args, where), cpu.paged_decode(*args, *where))
        assert caplog.text.count("compiled for one sequence it gives different bits than for several") == attempt + 1
        assert (num_compiled_calls > 0) == (attempt == 0)
    monkeypatch.setenv("NANOINFER_CACHE", str(tmp_path / "another machine"))
    reorders, num_compiled_calls = False, 0
    backend = cpu.CPUBackend()
    backend.decode(*args, where)
    assert backend._may_compile
    assert num_compiled_calls > 10


def test_without_a_compiler_the_plain_form_stays(monkeypatch, caplog):
    from nanoinfer.attention import cpu

    def broken(*args, **kwargs):
        raise RuntimeError("no C++ compiler")

    monkeypatch.setattr(torch, "compile", lambda *args, **kwargs: broken)
    caplog.set_level("INFO")
    backend = cpu.CPUBackend()
    args = *torch.randn(3, 2, 4, 64), torch.randn(3, 4, 16, 64), torch.randn(3, 4, 64, 16)
    where = cpu.DecodeIndices(torch.tensor([0, 1]), torch.tensor([4, 8]), torch.tensor([[0], [1]]), torch.tensor([5, 9]))
    for _ in range(2):
        assert torch.equal(backend.decode(*args, where), cpu.paged_decode(*args, *where))
    assert caplog.text.count("could not be compiled (no C++ compiler)") == 1


def test_attention_is_compiled_when_a_model_is_loaded_and_not_while_it_writes(monkeypatch, caplog):
    """torch.compile compiles again for two arguments that are one tensor, so the arguments at loading are separate ones."""
    from nanoinfer.attention import cpu

    num_kinds, num_aliases = [], []

    def compile_copy(function):
        num_kinds.append(1)

        def compiled(*args):
            num_aliases.append(len(args) - len({id(one) for one in args}))
            return function(*args)

        return compiled

    monkeypatch.setattr(cpu, "_compile_copy", compile_copy)
    monkeypatch.setattr(cpu, "SMALL_MODEL_BYTES", 0)
    monkeypatch.setattr(cpu, "verdict", lambda check, measure: "compiled")  # as at a second load
    llm = LLM(kv_cache_memory=2**22, block_size=64)
    assert caplog.text.count("compiling the paged decode attention") == 1
    assert (len(num_kinds), num_aliases) == (2, [0, 0])  # one sequence, of one block and of several
    caplog.clear()
    llm.generate([1] * 10, SamplingParams(max_tokens=20, ignore_eos=True), use_tqdm=False)
    assert (len(num_kinds), caplog.text) == (2, "")
    assert len(num_aliases) > 20
    llm.generate([[1], [2]], SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)
    assert len(num_kinds) == 3
    LLM(kv_cache_memory=2**22, enforce_eager=True)
    assert (len(num_kinds), caplog.text) == (3, "")


def test_an_unknown_or_unsupported_backend_is_refused_by_name(caplog):
    model = (torch.float32, 64)
    with pytest.raises(InvalidValueError, match="one of reference, cpu, flash, triton, torch, got 'flashy'"):
        select_backend("flashy", CPU, *model)
    with pytest.raises(UnsupportedError, match="'cpu' cannot be used: it runs on cpu only, not on meta; use 'auto'"):
        select_backend("cpu", torch.device("meta"), *model)
    with pytest.raises(UnsupportedError, match="'torch' cannot be used: it runs on cuda only, not on cpu"):
        select_backend("torch", CPU, *model)
    assert select_backend("auto", CPU, *model)[0] == "cpu"


def test_a_registered_backend_is_used_and_a_class_that_is_no_backend_is_refused(monkeypatch):
    class Counting(ReferenceBackend):
        num_steps = 0

        def begin_step(self, cache, metadata):
            Counting.num_steps += 1
            return super().begin_step(cache, metadata)

    monkeypatch.setitem(base.BACKENDS, "counting", ReferenceBackend)  # removed afterwards
    register_backend("counting", ReferenceBackend)
    register_backend("counting", Counting)  # a registered name may be replaced
    params = SamplingParams(temperature=0, max_tokens=5)
    llm = LLM(attention_backend="counting")
    Counting.num_steps = 0  # loading runs it, too
    ours = llm.generate("Once upon a", params, use_tqdm=False)
    assert Counting.num_steps == 5
    assert ours[0].outputs == LLM(attention_backend="reference").generate("Once upon a", params, use_tqdm=False)[0].outputs
    assert "counting" in {check.backend for check in doctor.examine().checks}
    with pytest.raises(InvalidValueError, match="'auto' is reserved"):
        register_backend("auto", Counting)
    for nothing in (object, Counting(), "nanoinfer"):
        with pytest.raises(InvalidTypeError, match="must be a class like AttentionBackend"):
            register_backend("nothing", nothing)


def test_a_gpus_cache_leaves_room_for_other_allocations_and_for_a_step(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (600, 1000))  # free, total
    cuda = torch.device("cuda")
    assert memory_for_cache(cuda, None, 0.9) == 500  # 900 in all, less the 400 that are taken
    assert memory_for_cache(cuda, None, 0.9, step_bytes=120) == 380
    assert memory_for_cache(cuda, None, 0.9, step_bytes=800) == 0
    assert memory_for_cache(cuda, 600, 0.9, step_bytes=120) == 600  # the argument
    with pytest.raises(InvalidValueError, match="601 bytes, but 600 are free on cuda; lower kv_cache_memory"):
        memory_for_cache(cuda, 601, 0.9)


def test_copied_blocks_hold_what_their_sources_held_before_any_copy():
    cache = KVCache(num_layers=1, num_blocks=3, block_size=1, num_kv_heads=1, head_dim=1)
    cache.write(0, torch.arange(3), *(torch.tensor([1.0, 2.0, 3.0]).view(3, 1, 1),) * 2)
    cache.copy_blocks([(0, 1), (1, 2)])
    assert cache.layer(0)[0].flatten().tolist() == [1, 1, 2]


def test_the_cache_never_takes_more_than_is_free():
    free = available_cpu_memory()
    assert free > 0
    assert memory_for_cache(CPU, None, 0.9) <= free
    assert memory_for_cache(CPU, 1000, 0.9) == 1000
    with pytest.raises(InvalidValueError, match=r"kv_cache_memory is .* bytes, but .* are free"):
        memory_for_cache(CPU, 2**60, 0.9)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_an_unused_cache_takes_no_memory():
    def anonymous():
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        return int(status["RssAnon"].split()[0]) * 1024

    before = anonymous()
    cache = KVCache(num_layers=4, num_blocks=1024, block_size=64, num_kv_heads=4, head_dim=64)
    assert sum(pages.nbytes for layer in range(4) for pages in cache.layer(layer)) == 2**29
    assert anonymous() - before < 2**24
    assert cache.layer(3)[1][::100].count_nonzero() == 0


@pytest.mark.parametrize("block_size", [1, 2, 3, 16, 17])
def test_the_check_of_the_compiled_form_takes_blocks_of_any_size(block_size):
    from nanoinfer.attention import cpu

    def decode(q, k, v, k_pages, v_pages, where):
        return cpu.paged_decode(q, k, v, k_pages, v_pages, *where)

    def depending(q, *rest):
        return decode(q, *rest) * (1.0 if len(q) > 1 else 1.5)

    k_pages, v_pages = torch.zeros(3, 4, block_size, 64), torch.zeros(3, 4, 64, block_size)
    assert cpu.rows_are_independent(decode, 8, k_pages, v_pages)
    assert not cpu.rows_are_independent(depending, 8, k_pages, v_pages)
