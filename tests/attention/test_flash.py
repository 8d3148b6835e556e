"""FlashBackend with data: by flash-attn itself on a GPU that has it, else by a double with the package's rules.

The double (tests/helpers/flash_attn_double.py) refuses what the package refuses. On a GPU it is compared with the package.
"""

import importlib
import importlib.util
import inspect
import sys

import pytest
import torch

from nanoinfer import LLM, SamplingParams
from nanoinfer.attention import base
from nanoinfer.errors import UnsupportedError
from tests.helpers import flash_attn_double, tiny_models
from tests.helpers.paged_cases import FAULTS, compare

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
DEVICE = CUDA if torch.cuda.is_available() and importlib.util.find_spec("flash_attn") else CPU
RAGGED = [(0, 1), (15, 1), (255, 1), (256, 1), (299, 1), (0, 2), (0, 65), (40, 20), (256, 44), (200, 300)]
LONG = [(1400, 1), (3, 1), (600, 1), (0, 20), (511, 90), (1000, 300)]  # whole blocks are before the windows
MIXED = [(400, 1), (300, 1), (257, 90), (20, 33)]


@pytest.fixture
def flash(monkeypatch):
    """nanoinfer.attention.flash, with the double if the package is not there."""
    if DEVICE == CPU:
        monkeypatch.setitem(sys.modules, "flash_attn", flash_attn_double)
    monkeypatch.delitem(sys.modules, "nanoinfer.attention.flash", raising=False)
    yield importlib.import_module("nanoinfer.attention.flash")
    sys.modules.pop("nanoinfer.attention.flash", None)


@pytest.fixture
def torchs_flash(monkeypatch):
    """nanoinfer.attention.flash as it is without the package."""
    if "block_table" not in inspect.signature(torch.nn.attention.varlen.varlen_attn).parameters:
        pytest.skip("torch is older than 2.12")
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    monkeypatch.delitem(sys.modules, "nanoinfer.attention.flash", raising=False)
    module = importlib.import_module("nanoinfer.attention.flash")
    if not torch.cuda.is_available():
        monkeypatch.setattr(module, "varlen_attn", flash_attn_double.varlen_attn)
    yield module
    sys.modules.pop("nanoinfer.attention.flash", None)


def error_of(flash, lengths, *, heads=(2, 1), head_dim=64, dtype=torch.bfloat16, **more):
    sizes = {"num_kv_heads": heads[0], "group": heads[1], "head_dim": head_dim, "dtype": dtype}
    return compare(flash.FlashBackend(), lengths, block_size=256, **{"device": DEVICE} | sizes | more)


FP16 = {"dtype": torch.float16}
CASES = {
    **{f"{n}x{group} heads": (RAGGED, {"heads": (n, group), "packed": True}) for n, group in ((2, 1), (2, 2), (1, 7))},
    **{f"window of {n}": (LONG, {"heads": (1, 2), "window": n, "packed": True}) for n in (1, 2, 20, 256, 257, 700, 5000)},
    "decodes": ([(299, 1), (0, 1)], {}),
    "a prompt": ([(0, 33)], {"window": 20}),
    "chunks": ([(100, 50), (0, 7)], {"window": 20}),
    "heads of 8 in fp16": (LONG, FP16 | {"heads": (2, 2), "head_dim": 8}),
    "heads of 80 in fp16": (LONG, FP16 | {"heads": (1, 4), "head_dim": 80, "window": 300}),
    "heads of 128 in fp16": (LONG, FP16 | {"heads": (1, 2), "head_dim": 128}),
    "heads of 256 in fp16": (LONG, FP16 | {"heads": (2, 2), "head_dim": 256, "window": 300}),
}


@pytest.mark.parametrize("case", CASES)
def test_decodes_and_chunks_equal_the_definition_and_freed_blocks_are_not_read(flash, case):
    lengths, given = CASES[case]
    assert error_of(flash, lengths, **given) < (0.004 if "dtype" in given else 0.02)


OF_TORCH = ["2x2 heads", "window of 20", "window of 5000", "decodes", "a prompt", "chunks", "heads of 80 in fp16"]


@pytest.mark.gpu
@pytest.mark.parametrize("case", OF_TORCH)
def test_torchs_varlen_attn_does_the_same_without_the_package(torchs_flash, case):
    lengths, given = CASES[case]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    assert torchs_flash.FlashBackend.library == "torch's varlen_attn"
    assert error_of(torchs_flash, lengths, device=device, **given) < (0.004 if "dtype" in given else 0.02)


def with_lengths(lens):
    return {"seqused_k": lens, "cu_seq_k": torch.nn.functional.pad(lens.cumsum(0), (1, 0)).int()}


OF_TORCH_FAULTS = {  # changed arguments, and the reason if they are refused
    "a longer window": (lambda a: with_window(1, a), None),
    "another sequence's table": (lambda a: {"block_table": a["block_table"].flip(0)}, None),
    "lengths before the step": (lambda a: with_lengths(a["seqused_k"] - 1), None),
    "keys with as many heads as queries": (lambda a: {"enable_gqa": False}, "same number of heads"),
    "lengths in int64": (lambda a: {"seqused_k": a["seqused_k"].long()}, "in int32"),
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="would read outside the tensors")
@pytest.mark.parametrize("fault", OF_TORCH_FAULTS)
def test_an_injected_fault_in_an_argument_of_torchs_is_refused_or_noticed(torchs_flash, fault, monkeypatch):
    change, reason = OF_TORCH_FAULTS[fault]
    inject(torchs_flash, "varlen_attn", change, monkeypatch)
    if reason is None:
        assert error_of(torchs_flash, MIXED, heads=(1, 2), window=20) > 0.05
    else:
        with pytest.raises((AssertionError, ValueError), match=reason):
            error_of(torchs_flash, MIXED, heads=(1, 2), window=20)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernel is interpreted")
def test_one_kernel_stores_keys_and_values_where_there_is_triton(flash, monkeypatch):
    pytest.importorskip("triton")
    from tests.helpers import triton_interpreter  # noqa: F401

    monkeypatch.setattr(flash, "has_store_kernel", lambda device: True)
    monkeypatch.setattr(flash.FlashBackend, "begin_step", lambda self, cache, metadata: Stored(cache, metadata))

    class Stored(flash.WindowedFlashAttend):
        def __call__(self, layer, q, k, v, **options):
            monkeypatch.setattr(self._cache, "write", None)
            return super().__call__(layer, q, k, v, **options)

    for more in ({"packed": True}, {"poisoned": (2, 17)}):
        assert error_of(flash, [(400, 1), (7, 1), (0, 30), (20, 9)], heads=(2, 2), window=300, **more) < 0.02


@pytest.mark.parametrize("fault", FAULTS)
def test_the_comparison_notices_an_injected_fault_in_the_metadata(flash, fault):
    assert error_of(flash, [(400, 1), (300, 1), (257, 90)], spoil=FAULTS[fault]) > 0.05


def with_window(by, arguments):
    left, right = arguments["window_size"]
    return {"window_size": (left + by, right)}


def inject(flash, name, change, monkeypatch):
    """Replace some arguments of a function of the package. change: takes the named arguments, returns those to replace."""
    function = getattr(flash, name)
    monkeypatch.setattr(flash, name, lambda *args, **named: function(*args, **named | change(named)))


DECODE, CHUNKS = "flash_attn_with_kvcache", "flash_attn_varlen_func"
ARGUMENT_FAULTS = {  # function, changed arguments, and the package's reason if it is the package that notices
    "a table in int64 (decode)": (DECODE, lambda a: {"block_table": a["block_table"].long()}, "block_table must have dtype"),
    "a table in int64 (chunks)": (CHUNKS, lambda a: {"block_table": a["block_table"].long()}, "block_table must have dtype"),
    "a transposed table": (CHUNKS, lambda a: {"block_table": a["block_table"].T.contiguous().T}, "contiguous last dimension"),
    "lengths in int64": (DECODE, lambda a: {"cache_seqlens": a["cache_seqlens"].long()}, "seqlens_k must have dtype int32"),
    "starts in int64": (CHUNKS, lambda a: {"cu_seqlens_q": a["cu_seqlens_q"].long()}, "must have dtype int32"),
    "keys of one sequence fewer": (CHUNKS, lambda a: {"cu_seqlens_k": a["cu_seqlens_k"][1:]}, "cu_seqlens_k"),
    "tables of all sequences": (CHUNKS, lambda a: {"block_table": torch.cat([a["block_table"]] * 2)}, "block_table"),
    "another sequence's table (decode)": (DECODE, lambda a: {"block_table": a["block_table"].flip(0)}, None),
    "another sequence's table (chunks)": (CHUNKS, lambda a: {"block_table": a["block_table"].flip(0)}, None),
    "lengths before the step": (DECODE, lambda a: {"cache_seqlens": a["cache_seqlens"] - 1}, None),
    "keys of queries' lengths": (CHUNKS, lambda a: {"cu_seqlens_k": a["cu_seqlens_q"]}, None),
    "no causal": (CHUNKS, lambda a: {"causal": False, "window_size": (a["window_size"][0], -1)}, None),
    "a longer window (decode)": (DECODE, lambda a: with_window(1, a), None),
    "a longer window (chunks)": (CHUNKS, lambda a: with_window(1, a), None),
    "a shorter window (decode)": (DECODE, lambda a: with_window(-1, a), None),
    "a shorter window (chunks)": (CHUNKS, lambda a: with_window(-1, a), None),
    "no window": (CHUNKS, lambda a: {"window_size": (-1, -1)}, None),
}


# What the package does not check, so that its kernels would read or leave out other memory.
UNCHECKED = {
    "starts of the whole step": (CHUNKS, lambda a: {"cu_seqlens_q": a["cu_seqlens_q"] + 2}, "cu_seqlens_q must cover"),
    "too few queries": (CHUNKS, lambda a: {"max_seqlen_q": a["max_seqlen_q"] - 1}, "later queries"),
    "too few keys": (CHUNKS, lambda a: {"max_seqlen_k": 256}, "later keys"),
    "a table that is too narrow": (CHUNKS, lambda a: {"block_table": a["block_table"][:, :1]}, "the end of a row"),
    "no window, so that freed blocks are read": (DECODE, lambda a: {"window_size": (-1, -1)}, "a block outside the cache"),
}


@pytest.mark.parametrize("fault", [*ARGUMENT_FAULTS, *UNCHECKED])
def test_an_injected_fault_in_an_argument_is_refused_or_noticed(flash, fault, monkeypatch):
    if fault in UNCHECKED and DEVICE == CUDA:
        pytest.skip("would read outside the tensors")
    name, change, reason = (ARGUMENT_FAULTS | UNCHECKED)[fault]
    inject(flash, name, change, monkeypatch)
    if reason is None:
        assert error_of(flash, MIXED, window=20) > 0.05
    else:
        with pytest.raises((AssertionError, RuntimeError), match=reason):
            error_of(flash, MIXED, window=20)


@pytest.mark.skipif(DEVICE == CUDA, reason="would read outside the tensors")
def test_rows_that_are_not_aligned_are_refused_by_the_double(flash):
    q, pages = torch.zeros(3, 2, 12, dtype=torch.bfloat16)[:, :, 4:], torch.zeros(1, 256, 2, 8, dtype=torch.bfloat16)
    lengths, table = torch.ones(3, dtype=torch.int32), torch.zeros(3, 1, dtype=torch.int32)
    with pytest.raises(AssertionError, match="multiples of 16 bytes"):
        flash.flash_attn_with_kvcache(q[:, None], pages, pages, cache_seqlens=lengths, block_table=table)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == CPU, reason="needs a CUDA device and flash-attn")
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window_size", [(-1, -1), (0, 0), (19, 0), (300, -1), (-1, 5), (40, 30)])
@pytest.mark.parametrize("head_dim", [64, 256])
def test_the_double_equals_the_package(flash, causal, window_size, head_dim):
    q, k, v = (torch.randn(*size, head_dim, device=DEVICE).half() for size in ((160, 4), (5, 256, 2), (5, 256, 2)))
    table = torch.tensor([[4, 0], [2, 3]], dtype=torch.int32, device=DEVICE)
    options = {"block_table": table, "causal": causal, "window_size": window_size}
    ends = torch.tensor([[0, 60, 160], [0, 400, 700]], dtype=torch.int32, device=DEVICE)
    options |= {"cu_seqlens_q": ends[0], "cu_seqlens_k": ends[1], "max_seqlen_q": 100, "max_seqlen_k": 400}
    expected = flash_attn_double.flash_attn_varlen_func(q, k, v, **options)
    torch.testing.assert_close(flash.flash_attn_varlen_func(q, k, v, **options), expected, atol=0.003, rtol=0.003)
    options = {"block_table": table, "causal": causal, "window_size": window_size, "cache_seqlens": ends[1].diff()}
    expected = flash_attn_double.flash_attn_with_kvcache(q[:2, None], k, v, **options)
    torch.testing.assert_close(flash.flash_attn_with_kvcache(q[:2, None], k, v, **options), expected, atol=0.003, rtol=0.003)


@pytest.mark.parametrize("poisoned", [(0, 0), (2, 17), (3, 4)])
@pytest.mark.slow
def test_a_token_that_is_not_finite_reaches_later_queries_of_its_sequence_and_no_others(flash, poisoned):
    """The kernels mask scores by selection and values by weight 0, as the double does."""
    assert error_of(flash, [(400, 1), (7, 1), (0, 30), (20, 9)], heads=(2, 2), poisoned=poisoned) < 0.02


# ---- in an engine

FAMILIES = {
    "gpt2": {"n_head": 6},
    "qwen3": {},
    "mistral_window": {"sliding_window": 300},
    "gemma3_window": {"sliding_window": 300},
}


TOLERANCE = 0.1 if DEVICE == CUDA else 0.005  # of log-probabilities. The double rounds as the reference does.


def difference_in_an_engine(flash, family, tmp_path, monkeypatch):
    """The largest difference between log-probabilities of new tokens and those of the reference backend in the same steps.

    There are chunks, mixed steps, decodes and prefix hits, and sequences that leave whole blocks before their windows. In other
    steps the reference's own products may differ: torch's depend on the number of rows, on some processors by more than this.
    """
    sizes = {"n_positions" if family == "gpt2" else "max_position_embeddings": 2048}
    path = tiny_models.save(family, tmp_path, **FAMILIES[family], **sizes)
    monkeypatch.setattr(flash.FlashBackend, "unsupported_reason", lambda *model: None)  # also on a CPU
    prompts = [[(31 * i) % tiny_models.VOCAB_SIZE for i in range(length)] for length in (1, 40, 300, 700, 1100)]
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, detokenize=False, logprobs=0)
    settings = {"device": str(DEVICE), "dtype": "bfloat16", "block_size": 256, "chunk_size": 160, "kv_cache_memory": 2**24}
    settings["enforce_eager"] = DEVICE == CPU  # a GPU replays decode steps
    found = []
    for name in ("flash", "reference"):
        llm = LLM(path, attention_backend=name, **settings)
        first, again = (llm.generate(prompts, params, use_tqdm=False) for _ in range(2))
        assert [output.metrics.num_cached_tokens for output in again] == [0, 0, 256, 512, 1024]
        tiny_models.assert_nothing_is_left(llm)
        found.append([output.outputs[0] for output in (*first, *again)])
    differences = []
    for ours, expected in zip(*found, strict=True):
        for here, there, token, other in zip(ours.logprobs, expected.logprobs, ours.token_ids, expected.token_ids, strict=True):
            differences.append(abs(here[token].logprob - there[other].logprob))
            if token != other:  # two tokens of nearly equal log-probabilities: what follows them is not comparable
                break
    assert len(differences) > len(found[0]) * 5, "so many tokens are compared"
    return max(differences)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_an_engine_scores_its_tokens_as_the_reference_backend_does(flash, family, tmp_path, monkeypatch):
    assert difference_in_an_engine(flash, family, tmp_path, monkeypatch) < TOLERANCE


@pytest.mark.slow
def test_that_comparison_notices_a_window_that_is_off_by_one(flash, tmp_path, monkeypatch):
    inject(flash, DECODE, lambda arguments: with_window(1, arguments), monkeypatch)
    assert difference_in_an_engine(flash, "mistral_window", tmp_path, monkeypatch) > TOLERANCE


def test_sinks_are_left_to_other_backends(flash, tmp_path, monkeypatch):
    path = tiny_models.save("gpt_oss_window", tmp_path)
    monkeypatch.setattr(flash.FlashBackend, "unsupported_reason", lambda *model: None)
    with pytest.raises(UnsupportedError, match="'flash' cannot be used: it does not support attention sinks"):
        LLM(path, attention_backend="flash", kv_cache_memory=2**24)


# ---- selection


@pytest.fixture
def a_gpu(monkeypatch):
    """The parts of torch.cuda that the selection of a backend calls, and a torch before 2.12."""
    monkeypatch.setattr(torch.nn.attention.varlen, "varlen_attn", lambda query, key, value: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    yield
    sys.modules.pop("nanoinfer.attention.flash", None)


def test_auto_takes_the_first_supported_backend_and_logs_the_reasons_against_the_others(a_gpu, monkeypatch, caplog):
    pytest.importorskip("triton")
    monkeypatch.setitem(sys.modules, "flash_attn", None)  # as if it were not installed
    monkeypatch.delitem(sys.modules, "nanoinfer.attention.flash", raising=False)
    caplog.set_level("INFO", logger="nanoinfer")
    assert base.select_backend("auto", CUDA, torch.bfloat16, 128)[0] == "triton"
    monkeypatch.setitem(sys.modules, "nanoinfer.attention.triton", None)
    assert base.select_backend("auto", CUDA, torch.bfloat16, 128)[0] == "reference"
    assert "attention_backend: not triton, because" in caplog.text
    reason = f"flash_attn is not installed, and torch {torch.__version__} has no paged attention, which 2.12 has"
    assert f"attention_backend: not flash, because {reason}" in caplog.text


def test_flash_gives_the_reason_where_it_is_not_supported(flash, a_gpu, monkeypatch):
    def unsupported_reason(device=CUDA, dtype=torch.bfloat16, head_dim=128, block_size=None):
        return base.find_backend("flash", device, dtype, head_dim, block_size)[1]

    assert unsupported_reason() is unsupported_reason(block_size=512) is None
    assert unsupported_reason(dtype=torch.float32) == "it supports float16 and bfloat16, not float32"
    assert unsupported_reason(head_dim=100) == "it supports a head_dim in multiples of 8 up to 256, not 100"
    assert unsupported_reason(head_dim=264) == "it supports a head_dim in multiples of 8 up to 256, not 264"
    assert unsupported_reason(device=CPU) == "it runs on cuda only, not on cpu"
    assert unsupported_reason(block_size=16) == "it requires a block_size in multiples of 256, not 16"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert unsupported_reason() == "it requires an Ampere GPU or a newer one, not a GPU"
