"""Every paged backend of a CPU equals dense attention over each sequence alone, whatever batch, lengths and blocks are."""

import itertools

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nanoinfer import LLM, SamplingParams
from nanoinfer.attention import cpu
from nanoinfer.attention.kv_cache import KVCache, finite_values
from nanoinfer.fast.cpu import native
from nanoinfer.fast.cpu.attention import KernelBackend
from tests.helpers import paged_cases, tiny_models
from tests.helpers.paged_cases import FAULTS, check_poison_free_reuse, compare, metadata_for

CPU = torch.device("cpu")
NAMES = pytest.mark.parametrize("backend", ["reference", "cpu", KernelBackend], ids=["reference", "cpu", "kernels"])


@pytest.mark.slow
@NAMES
@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 90), st.sampled_from([1, 1, 2, 5, 40])), min_size=1, max_size=6),
    block_size=st.sampled_from([1, 4, 16, 64]),
    sizes=st.sampled_from([(1, 1, 8), (2, 2, 8), (3, 1, 8), (2, 2, 10), (2, 7, 10)]),  # each head size and group is compiled
)
def test_paged_attention_equals_dense_attention(backend, lengths, block_size, sizes):
    num_kv_heads, group, head_dim = sizes
    error = compare(backend, lengths, block_size=block_size, num_kv_heads=num_kv_heads, group=group, head_dim=head_dim)
    assert error < 1e-5


@pytest.mark.slow
@NAMES
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("window", [None, 1, 16, 20, 100])
def test_windows_and_sinks_equal_the_definition_and_freed_blocks_are_not_read(backend, window, has_sinks):
    lengths = [(100, 1), (3, 1), (700, 1), (0, 20), (64, 30), (0, 150), (310, 90)]
    for sizes in ({"num_kv_heads": 2, "group": 2, "head_dim": 16}, {"num_kv_heads": 1, "group": 7, "head_dim": 10}):
        for block_size in (4, 64):
            assert compare(backend, lengths, block_size=block_size, window=window, has_sinks=has_sinks, **sizes) < 1e-5


@NAMES
@pytest.mark.slow
def test_that_comparison_notices_a_window_that_is_off_by_one(backend, monkeypatch):
    definition = paged_cases.in_float64
    monkeypatch.setattr(paged_cases, "in_float64", lambda q, k, v, window: definition(q, k, v, window + 1))
    assert compare(backend, [(40, 1), (30, 9)], block_size=4, num_kv_heads=2, group=2, head_dim=8, window=20) > 1e-3


@pytest.mark.slow
@NAMES
@pytest.mark.parametrize(("dtype", "head_dim", "tolerance"), [(torch.bfloat16, 16, 0.05), (torch.float16, 32, 0.01)])
def test_16_bits_stay_within_their_rounding(backend, dtype, head_dim, tolerance):
    lengths = [(100, 1), (3, 1), (0, 20), (64, 30), (0, 70)]
    assert compare(backend, lengths, block_size=16, num_kv_heads=2, group=2, head_dim=head_dim, dtype=dtype) < tolerance


@pytest.mark.slow
@NAMES
@settings(max_examples=10, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 90), st.sampled_from([1, 1, 2, 40])), min_size=1, max_size=6),
    sizes=st.sampled_from([(2, 2, 8), (3, 1, 64)]),  # each is compiled
)
@example(lengths=[(0, 40)], sizes=(3, 1, 64))  # a product in fp32 is a half, which it is not in float64
def test_a_cache_in_8_bits_attends_to_rounded_keys_and_values(backend, lengths, sizes):
    sizes = {"block_size": 16} | dict(zip(("num_kv_heads", "group", "head_dim"), sizes, strict=True))
    assert compare(backend, lengths, **sizes, in_int8=True) < 1e-5


@NAMES
@pytest.mark.parametrize("fault", FAULTS)
def test_the_comparison_notices_an_injected_fault(backend, fault):
    lengths = [(40, 1), (41, 1), (17, 5)]
    assert compare(backend, lengths, block_size=16, num_kv_heads=2, group=2, head_dim=8, spoil=FAULTS[fault]) > 1e-3


POISONED = [(40, 1), (7, 1), (0, 30), (20, 9)]  # decodes, a prompt, a chunk after a cached prefix


@NAMES
@pytest.mark.parametrize("in_int8", [False, True])
@pytest.mark.parametrize("poisoned", [(0, 0), (2, 0), (2, 17), (3, 4)])
@pytest.mark.slow
def test_a_token_that_is_not_finite_reaches_later_queries_of_its_sequence_and_no_others(backend, poisoned, in_int8):
    sizes = {"block_size": 16, "num_kv_heads": 2, "group": 2, "head_dim": 8}
    assert compare(backend, POISONED, **sizes, poisoned=poisoned, in_int8=in_int8) < 1e-5


def test_that_test_notices_values_that_are_stored_as_they_are(monkeypatch):
    monkeypatch.setattr("nanoinfer.attention.kv_cache.finite_values", lambda k, v: (k, v))
    assert compare("cpu", POISONED, block_size=16, num_kv_heads=2, group=2, head_dim=8, poisoned=(2, 17)) == float("inf")


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("family", ["gpt2_untied", "qwen3"])
def test_a_poisoned_request_stops_no_other(family, backend, tmp_path):
    check_poison_free_reuse(tiny_models.save(family, tmp_path), backend)


@pytest.mark.parametrize(("num_heads", "head_dim", "block_size"), [(6, 32, 64), (12, 64, 64), (4, 64, 16), (4, 12, 8)])
def test_masked_blocks_at_the_end_of_a_table_change_no_bit_of_the_plain_definition(num_heads, head_dim, block_size):
    """A row is padded beside longer ones. Sums of few columns would be interleaved by fours: 6 blocks differ from 8."""
    generator = torch.Generator().manual_seed(0)
    for num_blocks in (1, 2, 3, 5, 6, 7, 11):
        q, k, v = torch.randn(3, 1, num_heads, head_dim, generator=generator)
        pages = torch.randn(2, 40, num_heads, block_size, head_dim, generator=generator)
        seq_len = num_blocks * block_size - 3
        table = torch.randperm(40, generator=generator)[:num_blocks].unsqueeze(0)
        outputs = []
        for padding in (0, 1, 2, 3, 4, 5, 6, 7, 9, 20):
            tables = torch.nn.functional.pad(table, (0, padding))
            rows = cpu.DecodeRows(table[:, -1] * block_size + (seq_len - 1) % block_size, tables, torch.tensor([seq_len]))
            outputs.append(decoded(cpu.CPUBackend(), q, k, v, *pages, rows))
            assert torch.equal(outputs[-1], outputs[0]), (num_blocks, padding)


def random_decode(lens, *, num_heads, num_kv_heads, head_dim, dtype, block_size=16):
    """Arguments of paged_decode: rows of these lengths, in scattered blocks. Slots that hold no token are NaN."""
    generator = torch.Generator().manual_seed(0)
    metadata = metadata_for([(n - 1, 1) for n in lens], block_size, 80, generator)
    q, k, v = (
        torch.randn(len(lens), heads, head_dim, generator=generator).to(dtype)
        for heads in (num_heads, num_kv_heads, num_kv_heads)
    )
    pages = torch.full((2, 80, num_kv_heads, block_size, head_dim), float("nan"), dtype=dtype)
    for table, seq_len in zip(metadata.block_tables, lens, strict=True):
        for token in range(seq_len):
            page = pages[:, table[token // block_size], :, token % block_size]
            page.copy_(torch.randn(page.shape, generator=generator))
    rows = cpu.DecodeRows(metadata.slot_mapping, metadata.block_tables, metadata.seq_lens)
    return q, k, v, *pages.unbind(), rows


def of_rows(part, q, k, v, k_pages, v_pages, rows):
    """The arguments for some rows, whose tables are no longer than they need."""
    slots, tables, lens = (index[part] for index in rows)
    num_blocks = -(-int(lens.max()) // k_pages.shape[2])
    return q[part], k[part], v[part], k_pages, v_pages, cpu.DecodeRows(slots, tables[:, :num_blocks].contiguous(), lens)


def decoded(kernels, q, k, v, k_pages, v_pages, rows):
    return kernels.decode(q, k, v, CacheOf(k_pages, v_pages), 0, rows, None, None)


class CacheOf(KVCache):
    """A cache of one layer, whose pages are these."""

    num_layers, layout = 1, "HND"

    def __init__(self, k_pages, v_pages):
        self._layers, self.block_size = [(k_pages, v_pages)], k_pages.shape[2]


SPANS = [5, 600, 256, 257, 17, 1]  # one to three spans of the kernel, some of them full


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "dtype", "tolerance"),
    [(2, 2, 64, torch.bfloat16, 0.01), (4, 2, 10, torch.float32, 1e-6)],
)
def test_a_row_of_the_kernel_has_the_same_bits_alone_in_any_batch_and_with_any_threads(
    num_heads, num_kv_heads, head_dim, dtype, tolerance
):
    args = random_decode(SPANS, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=dtype)
    kernels = KernelBackend(dtype, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)
    outputs = {}
    for num_threads in (1, 2, 5):
        torch.set_num_threads(num_threads)
        try:
            outputs[num_threads] = decoded(kernels, *args)
            alone = [decoded(kernels, *of_rows(slice(i, i + 1), *args)) for i in range(len(SPANS))]
        finally:
            torch.set_num_threads(1)
        assert torch.equal(torch.cat(alone), outputs[num_threads])
        assert torch.equal(outputs[num_threads], outputs[1])
    k_pages, v_pages = (pages.nan_to_num(nan=0.0) for pages in args[3:5])  # the plain definition needs finite values
    plain = decoded(cpu.CPUBackend(), *args[:3], k_pages, v_pages, args[5])
    assert (outputs[1] - plain).abs().max() < tolerance


def test_the_kernel_stores_every_row_before_it_attends():
    """Rows of one sequence, as drafts are: each attends to the tokens before it, which the same call stores."""
    q, k, v, k_pages, v_pages, rows = random_decode([33], num_heads=2, num_kv_heads=2, head_dim=8, dtype=torch.float32)
    k_pages, v_pages = k_pages.nan_to_num(), v_pages.nan_to_num()
    q, k, v = torch.randn(3, 5, 2, 8, generator=torch.Generator().manual_seed(1))
    table, lens = rows.block_tables.repeat(5, 1), torch.arange(29, 34)
    rows = cpu.DecodeRows(table[0, (lens - 1) // 16] * 16 + (lens - 1) % 16, table, lens)
    expected = decoded(cpu.CPUBackend(), q, k, v, k_pages.clone(), v_pages.clone(), rows)
    kernels = KernelBackend(torch.float32, num_heads=2, num_kv_heads=2, head_dim=8)
    assert (decoded(kernels, q, k, v, k_pages, v_pages, rows) - expected).abs().max() < 1e-6


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.slow
def test_the_kernel_stores_values_that_are_not_finite_as_finite_values_does(bad):
    q, k, v, k_pages, v_pages, rows = random_decode([3, 20], num_heads=2, num_kv_heads=2, head_dim=64, dtype=torch.bfloat16)
    v[0, 1, 63] = bad
    kernels = KernelBackend(torch.bfloat16, num_heads=2, num_kv_heads=2, head_dim=64)
    decoded(kernels, q, k, v, k_pages, v_pages, rows)
    for pages, stored in zip((k_pages, v_pages), finite_values(k, v), strict=True):
        found = pages[rows.slots // 16, :, rows.slots % 16]
        assert torch.equal(found.nan_to_num(nan=7.0), stored.nan_to_num(nan=7.0))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "dtype"),
    [
        (2, 2, 64, torch.bfloat16),
        (4, 2, 10, torch.float32),
        pytest.param(7, 1, 5, torch.bfloat16, marks=pytest.mark.long),
        pytest.param(4, 2, 80, torch.float32, marks=pytest.mark.long),
    ],
)
def test_a_row_of_the_prefill_kernel_has_the_same_bits_in_any_chunk_batch_and_number_of_threads(
    num_heads, num_kv_heads, head_dim, dtype
):
    lens = [1, 63, 200, 130]
    generator = torch.Generator().manual_seed(0)
    metadata = metadata_for([(0, n) for n in lens], 16, 40, generator)
    q, k, v = (
        torch.randn(sum(lens), heads, head_dim, generator=generator).to(dtype)
        for heads in (num_heads, num_kv_heads, num_kv_heads)
    )
    q[100] = v[100] = 0.0  # exact zeros, which must have the same sign
    kernels = KernelBackend(dtype, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)

    def rows(chunks, num_threads=1):
        """Attend in one call: (sequence, first token, end) of each chunk."""
        packed = torch.cat([metadata.query_start_loc[i] + torch.arange(start, end) for i, start, end in chunks])
        starts = torch.tensor([0] + [end - start for _, start, end in chunks]).cumsum(0) + 3  # counted from any token
        which = [i for i, _, _ in chunks]
        torch.set_num_threads(num_threads)
        try:
            lens = torch.tensor([end for _, _, end in chunks])
            part = cpu.PrefillChunks(metadata.slot_mapping[packed], starts, metadata.block_tables[which], lens)
            return kernels.prefill(q[packed], k[packed], v[packed], CacheOf(*pages), 0, part, None, None)
        finally:
            torch.set_num_threads(1)

    pages = torch.full((2, 40, num_kv_heads, 16, head_dim), float("nan"), dtype=dtype)
    whole = rows([(i, 0, n) for i, n in enumerate(lens)])
    assert torch.equal(whole.view(torch.uint8), rows([(i, 0, n) for i, n in enumerate(lens)], 3).view(torch.uint8))
    for i, n in enumerate(lens):
        expected = whole[metadata.query_start_loc[i] : metadata.query_start_loc[i + 1]]
        cuts = sorted({0, min(5, n), min(64, n), min(97, n), n})
        parts = [rows([(i, start, end)]) for start, end in itertools.pairwise(cuts)]
        assert torch.equal(torch.cat(parts).view(torch.uint8), expected.contiguous().view(torch.uint8))


@pytest.mark.slow
def test_without_a_compiler_the_plain_runtime_serves_and_the_log_says_why(monkeypatch, caplog):
    def answer(backend_class, **options):
        llm = LLM(kv_cache_memory=2**22, **options)
        assert type(llm.engine.executor.runner.begin_step.__self__.backend) is backend_class
        return llm.generate("Once upon a", SamplingParams(temperature=0, max_tokens=5), use_tqdm=False)[0].outputs

    with monkeypatch.context() as patch:
        patch.setenv("CXX", "/no/such/compiler -O3")
        native.load.cache_clear()
        plain = answer(cpu.CPUBackend)
    why = "the model runs without its C++ kernels, which are faster: no C++ compiler works (there is no /no/such/compiler)"
    assert caplog.text.count(why) == 1
    assert answer(KernelBackend) == answer(cpu.CPUBackend, enforce_eager=True) == plain
