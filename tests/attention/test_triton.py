"""The Triton kernels, run by its interpreter on a CPU (on a GPU they are compiled), against the definition in float64."""

import pytest
import torch

from tests.helpers import tiny_models

pytest.importorskip("triton")

from nanoinfer import LLM, SamplingParams
from nanoinfer.attention import triton as module
from nanoinfer.attention.triton import TritonBackend, copy_blocks, num_splits_for
from tests.emulated_gpu.cases import check_store_int8
from tests.helpers import triton_interpreter  # noqa: F401
from tests.helpers.paged_cases import FAULTS, check_poison_free_reuse, compare, compare_drafts

pytestmark = pytest.mark.slow

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 0.03, torch.float16: 0.004}
RAGGED = [(0, 1), (15, 1), (16, 1), (139, 1), (0, 2), (0, 64), (0, 65), (40, 20), (80, 60)]  # 1 to 140 tokens
FEW = [(15, 1), (139, 1), (0, 65), (80, 40)]


def error_of(lengths, *, head_dim=64, heads=(1, 2), block_size=16, dtype=torch.float32, **more):
    sizes = {"block_size": block_size, "num_kv_heads": heads[0], "group": heads[1], "head_dim": head_dim, "dtype": dtype}
    return compare(TritonBackend(), lengths, device=DEVICE, **sizes, **more)


FP32, BF16, _ = TOLERANCE
CASES = {
    "fp32, 64 numbers, 2x1 heads": (RAGGED, {"heads": (2, 1)}),
    "bf16, 80 numbers, 1x7 heads": (RAGGED, {"dtype": BF16, "head_dim": 80, "heads": (1, 7)}),
    "a window": (FEW, {"window": 20}),
    "a window and sinks": (FEW, {"window": 100, "has_sinks": True}),
    "sinks": (FEW, {"has_sinks": True}),
    **{f"blocks of {size}": (FEW, {"block_size": size}) for size in (64, 256, 3)},
    "decodes of a fused projection": ([(299, 1), (0, 1)], {"packed": True}),
    "a prompt of a fused projection": ([(0, 33)], {"packed": True}),
    "chunks of a fused projection": ([(100, 50), (0, 7)], {"packed": True}),
    "8 bits": (RAGGED, {"in_int8": True}),
    "8 bits, fp16, 80 numbers, 3x2 heads": (FEW, {"in_int8": True, "dtype": torch.float16, "head_dim": 80, "heads": (3, 2)}),
    "8 bits, bf16, a window and sinks": (FEW, {"in_int8": True, "dtype": BF16, "window": 100, "has_sinks": True}),
}
MORE_CASES = {  # every pair of a dtype, a size and numbers of heads
    f"{dtype}, {head_dim} numbers, {heads} heads": (RAGGED, {"dtype": dtype, "head_dim": head_dim, "heads": heads})
    for dtype, head_dim, heads in [
        (BF16, 80, (2, 1)), (FP32, 128, (2, 1)), (BF16, 64, (2, 2)), (FP32, 80, (2, 2)), (BF16, 128, (2, 2)),
        (FP32, 64, (1, 7)), (FP32, 128, (1, 7)), (BF16, 64, (1, 8)), (BF16, 128, (1, 8)), (FP32, 80, (1, 8)),
    ]
}  # fmt: skip
MARKS = [pytest.mark.long] if DEVICE == "cpu" else []


@pytest.mark.parametrize("case", [*CASES, *(pytest.param(case, marks=MARKS) for case in MORE_CASES)])
def test_paged_attention_equals_the_definition_and_freed_blocks_are_not_read(case):
    """Decodes and prefills, with and without cached prefixes, in one step."""
    lengths, given = (CASES | MORE_CASES)[case]
    assert error_of(lengths, **given) < TOLERANCE[given.get("dtype", FP32)]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_the_store_rounds_each_number_as_the_definition_does(dtype):
    assert check_store_int8(dtype, num_tokens=60) == 0


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("lengths", [[(40, 1), (41, 1)], [(17, 5), (40, 30)]], ids=["decode", "prefill"])
def test_the_comparison_notices_an_injected_fault(fault, lengths):
    """The negative control of the tests above: one wrong slot, block or length exceeds their tolerance by far."""
    assert error_of(lengths, spoil=FAULTS[fault]) > 1e-3


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("poisoned", [(0, 0), (2, 17), (3, 4)])
def test_a_token_that_is_not_finite_reaches_later_queries_of_its_sequence_and_no_others(poisoned, dtype):
    lengths = [(40, 1), (7, 1), (0, 30), (20, 9)]
    assert error_of(lengths, heads=(3, 2), head_dim=80, dtype=dtype, poisoned=poisoned) < TOLERANCE[dtype]


@pytest.mark.parametrize("num_splits", [1, 2, 8, 32])
def test_any_number_of_splits_gives_the_same(num_splits, monkeypatch):
    """Also more splits than tiles: splits without keys must have weight 0."""
    monkeypatch.setattr(module, "num_splits_for", lambda *_: num_splits)
    assert error_of([(0, 1), (63, 1), (64, 1), (299, 1)]) < TOLERANCE[torch.float32]


@pytest.mark.parametrize(("group", "window", "dtype"), [(7, None, FP32), (2, 20, FP32), (1, 70, BF16)])
def test_the_decodes_of_a_sequence_are_computed_together(group, window, dtype):
    """By programs of up to two, eight and eight decodes, of which a sequence has as many as 9."""
    sequences = [(139, 3), (0, 1), (62, 9), (15, 2)]
    more = {"group": group, "window": window, "dtype": dtype, "has_sinks": window is not None, "device": DEVICE}
    assert compare_drafts(TritonBackend(), sequences, **more) < TOLERANCE[dtype]


def test_a_long_sequence_alone_is_split_and_a_full_batch_is_not():
    assert num_splits_for(1, 8, 30_000) == 32
    assert num_splits_for(1, 8, 64) == 1
    assert num_splits_for(64, 8, 30_000) == 1
    assert num_splits_for(16, 8, 30_000) == 4


@pytest.mark.parametrize("num_copies", [1, 5, 70])
def test_copied_blocks_hold_what_their_sources_held_before_any_copy(num_copies):
    """Random permutations: chains and circles. A block has more numbers than a program copies of it."""
    generator = torch.Generator().manual_seed(0)
    pages = torch.randn(2, 80, 3, 27, generator=generator).to(DEVICE)
    sources, targets = (torch.randperm(80, generator=generator)[:num_copies].to(DEVICE) for _ in range(2))
    expected = pages.clone()
    expected[:, targets] = pages[:, sources]
    copy_blocks(pages, sources, targets)
    assert torch.equal(pages, expected)


def test_the_blocks_of_many_heads_are_not_too_large_to_be_copied(monkeypatch):
    """256 blocks of flash-attn, with 32 heads of 128 numbers. Of a grid, CUDA limits all axes but the first to 65,535."""
    grids = []
    monkeypatch.setattr(module, "_copy_kernel", type("", (), {"__getitem__": lambda _, grid: lambda *_: grids.append(grid)})())
    blocks = torch.arange(256)
    copy_blocks(torch.empty(64, 512, 256, 32, 128, device="meta"), blocks, blocks)
    [(_, *others)] = grids
    assert max(others) <= 65_535


@pytest.mark.parametrize(
    ("family", "config", "bytes_per_token"),
    [pytest.param("gpt2", {}, 768, marks=pytest.mark.long), ("qwen3", tiny_models.FEW_HEADS, 256)],
)
def test_the_engine_generates_the_same_with_it_as_with_the_reference(family, config, bytes_per_token, tmp_path):
    """Ragged prompts in chunks, a shared prefix, a cache so small that a sequence is preempted."""
    path = tiny_models.save(family, tmp_path, **config)
    prompts = [list(range(3, 32)), [7] * 16 + [5, 6], list(range(3, 16)), [7] * 16 + [9]]
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, detokenize=False)
    tokens = []
    for backend in ("reference", "triton"):
        llm = LLM(
            str(path), attention_backend=backend, block_size=16, kv_cache_memory=6 * 16 * bytes_per_token, chunk_size=16,
            max_num_batched_tokens=32, device=DEVICE,
        )  # fmt: skip
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert sum(output.metrics.num_preemptions for output in outputs) == 1
        assert sum(output.metrics.num_cached_tokens for output in outputs) == 16
        tokens.append([output.outputs[0].token_ids for output in outputs])
        tiny_models.assert_nothing_is_left(llm)
    assert tokens[0] == tokens[1]


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # numpy's, in the interpreter
def test_a_poisoned_request_stops_no_other(tmp_path):
    check_poison_free_reuse(tiny_models.save("qwen3", tmp_path, **tiny_models.FEW_HEADS), "triton", device=DEVICE)
