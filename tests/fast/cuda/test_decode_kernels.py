"""A layer of a step with few rows takes five kernels, which give what the kernels of larger steps give."""

from unittest.mock import Mock

import pytest
import torch

pytest.importorskip("triton")

from torch.utils._pytree import tree_map

from nanoinfer.attention.kv_cache import KVCache
from nanoinfer.attention.triton import Rotation, TritonBackend, paged_attention
from nanoinfer.fast.cuda import decode_kernels, pdl
from nanoinfer.fast.cuda.accelerate import compile_model
from nanoinfer.fast.cuda.decode_kernels import MAX_ROWS, decode_attention, decode_linear
from nanoinfer.fast.cuda.fused_kernels import Norm
from nanoinfer.fast.cuda.linear_kernel import Arrivals, few_rows_linear
from nanoinfer.fast.cuda.pdl import PDLCapture
from nanoinfer.fast.fuse import ACTIVATIONS
from nanoinfer.loading import loader
from nanoinfer.loading.checkpoint import Checkpoint
from tests.helpers import paged_cases, tiny_models
from tests.helpers.paged_cases import metadata_for, replaced
from tests.helpers.triton_interpreter import launched

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BLOCK_SIZE, NUM_BLOCKS, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 4, 90, 4, 2, 24
# the tokens in the cache of each row. Equal blocks: drafts of one sequence. There are up to three tiles and two splits
LENGTHS = {"one row": [140], "rows": [0, 3, 139, 64], "drafts": [70, 71, 72, 5]}


def cache_of(num_layers, num_kv_heads, head_dim):
    sizes = {"num_layers": num_layers, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    return KVCache(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, device=DEVICE, **sizes)


def attention_inputs(lengths, generator):
    """The metadata of decodes, and q, k, v, angles and norms. Values of the last row are not finite in one head."""
    metadata = metadata_for([(num, 1) for num in lengths], BLOCK_SIZE, NUM_BLOCKS, generator, DEVICE)
    metadata = replaced(metadata, block_tables=metadata.block_tables.int())
    if lengths == LENGTHS["drafts"]:
        tables = metadata.block_tables
        tables[:2] = tables[2]
        slots = [int(tables[2, num // BLOCK_SIZE]) * BLOCK_SIZE + num % BLOCK_SIZE for num in lengths[:3]]
        metadata.slot_mapping[:3] = torch.tensor(slots)
    numbers = torch.randn(len(lengths), NUM_HEADS + 2 * NUM_KV_HEADS, HEAD_DIM, generator=generator).to(DEVICE)
    numbers[-1, -1, 3] = float("inf")
    angles = torch.randn(2, len(lengths), 1, HEAD_DIM, generator=generator).to(DEVICE)
    norms = torch.randn(2, HEAD_DIM, generator=generator).to(DEVICE)
    rotation = Rotation(*angles, norms[0], 1e-6, norms[1], 1e-6)
    return metadata, numbers.split([NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS], dim=1), rotation


@pytest.mark.slow
@pytest.mark.parametrize("rows", LENGTHS)
@pytest.mark.parametrize("in_int8", [False, True], ids=["numbers", "8 bits"])
@pytest.mark.parametrize("options", [{}, {"window": 69}, {"window": 2, "sinks": torch.linspace(-1, 2, NUM_HEADS).to(DEVICE)}])
def test_one_kernel_rotates_stores_and_attends_as_four(rows, options, in_int8):
    """The rows of a draft attend to those before it, whose keys the same launch stores. The counters end at 0.

    A program computes the rows of a sequence together or alone. A number near the middle of two integers may become either.
    """
    lengths, arrivals, found = LENGTHS[rows], Arrivals(), []
    for is_fused, are_together in ((True, False), (True, True), (False, True), (False, False)):
        metadata, (q, k, v), rotation = attention_inputs(lengths, torch.Generator().manual_seed(0))
        if are_together:
            firsts = [0, 0, 0, 3] if rows == "drafts" else range(len(lengths))
            metadata = replaced(metadata, first_decodes=torch.tensor([*firsts], device=DEVICE), max_num_decodes=3)
        sizes = {"num_blocks": NUM_BLOCKS, "block_size": BLOCK_SIZE, "num_kv_heads": NUM_KV_HEADS, "head_dim": HEAD_DIM}
        cache = paged_cases.cache_of("NHD", torch.float32, in_int8, num_layers=1, device=DEVICE, **sizes)
        slots = torch.arange(NUM_BLOCKS * BLOCK_SIZE, device=DEVICE)
        old = torch.randn(2, len(slots), NUM_KV_HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(1))
        cache.write(0, slots, *old.to(DEVICE))
        if is_fused:
            out = decode_attention(cache, metadata, 0, q, k, v, rotation, arrivals, **options)
            assert not arrivals.counters(MAX_ROWS * NUM_KV_HEADS, out.device).any()
        else:
            out = paged_attention(cache, metadata, 0, q, k, v, rotation=rotation, **options)
        found.append([out, *cache.gather(0, torch.arange(NUM_BLOCKS, device=DEVICE), len(slots))])
    for other in found[:3]:
        torch.testing.assert_close(other, found[3], rtol=1e-4, atol=0.03 if in_int8 else 1e-5, equal_nan=True)
    assert found[3][0].isnan().any(-1).sum() == NUM_HEADS // NUM_KV_HEADS  # the comparison sees the value that is not finite


E = 2**-24  # the unit roundoff of fp32
OPTIONS = ["plain", "bias", "norm", "residual", "norm, bias and gate", "zero-centred norm and gate of GELU"]


def linear_inputs(option, num_rows, num_in, num_out):
    """The arguments of decode_linear, with x as a part of wider rows."""
    generator = torch.Generator().manual_seed(0)
    num_weights = num_out * (1 + ("gate" in option))
    shapes = (num_rows, num_in + 3), (num_weights, num_in), (num_weights,), (num_in,), (num_rows, num_out)
    x, weight, bias, scale, residual = (torch.randn(shape, generator=generator).to(DEVICE) for shape in shapes)
    return {
        "x": x[:, :num_in], "weight": weight, "bias": bias if "bias" in option else None,
        "norm": Norm(scale, 1e-6, "zero-centred" in option) if "norm" in option else None,
        "residual": residual if option == "residual" else None, "gated": "gate" in option,
        "activation": "gelu_tanh" if "GELU" in option else "silu",
    }  # fmt: skip


def definition_and_tolerance(x, weight, bias, norm, residual, gated, activation):
    """In float64. A sum of n terms is off by (n + 32) e of their magnitudes: n roundings, and those of a norm."""
    x, tolerance = x.double(), 0.0
    if norm is not None:
        x = x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt() * (norm.weight.double() + norm.zero_centred)
    out, terms = x @ weight.double().T, x.abs() @ weight.double().abs().T
    for added in (bias, residual):
        if added is not None:
            out, terms = out + added.double(), terms + added.double().abs()
    tolerance = terms * (x.shape[1] + 32) * E
    if gated:
        (gate, up), (of_gate, of_up) = out.chunk(2, -1), tolerance.chunk(2, -1)
        activated = ACTIVATIONS[activation](gate)
        out, slope = activated * up, gate.abs() * (1.6 + 0.072 * gate.square())  # the slope is at least gelu_tanh's, and silu's
        tolerance = 1.2 * up.abs() * of_gate + activated.abs() * of_up  # silu' and gelu' are below 1.2
        tolerance += (16 + 6 * slope) * E * out.abs()
    return out, tolerance


@pytest.mark.slow
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("num_in", [80, 5000])  # one tile, and three
def test_a_linear_layer_with_all_around_it_is_the_definition_and_a_row_has_the_same_bits_in_any_number_of_rows(option, num_in):
    given = linear_inputs(option, MAX_ROWS, num_in, 9)
    out = decode_linear(**given)
    expected, tolerance = definition_and_tolerance(**given)
    assert (out.double() - expected).abs().le(tolerance).all()
    assert not (out.double().roll(1, 1) - expected).abs().le(tolerance).all()
    given = tree_map(lambda value: value.bfloat16() if isinstance(value, torch.Tensor) else value, given)
    together = decode_linear(**given)
    for row in range(MAX_ROWS):
        one = slice(row, row + 1)
        alone = {"x": given["x"][one], "residual": None if given["residual"] is None else given["residual"][one]}
        assert torch.equal(decode_linear(**given | alone), together[one])


@pytest.mark.slow
def test_a_layer_with_few_columns_is_split_by_its_inputs_and_a_row_keeps_its_bits():
    x, weight, residual = (torch.randn(shape).to(DEVICE, torch.bfloat16) for shape in ((16, 1100), (40, 1100), (16, 40)))
    arrivals = Arrivals()
    with launched() as launches:
        out = few_rows_linear(x, weight, None, residual=residual, arrivals=arrivals)
        alone = few_rows_linear(x[5:10], weight, None, residual=residual[5:10], arrivals=arrivals)
    assert launches == [("_linear_kernel", 3 * 2)] * 2
    assert torch.equal(alone, out[5:10])
    expected = x.double() @ weight.double().T + residual.double()
    plain = few_rows_linear(x, weight, None, residual=residual)
    assert (out.double() - expected).abs().max() <= 2 * (plain.double() - expected).abs().max()


def test_layers_of_other_dtypes_layouts_and_more_rows_are_not_supported():
    linear = torch.nn.Linear(4, 6).requires_grad_(False)
    x = torch.empty(MAX_ROWS, 4)
    assert decode_kernels.supports(x, linear)
    assert decode_kernels.supports(x, linear, Norm(torch.empty(4), 1e-6))
    assert not decode_kernels.supports(x, linear, Norm(torch.empty(4).half(), 1e-6))
    assert not decode_kernels.supports(x, linear, Norm(torch.empty(8)[::2], 1e-6))
    assert not decode_kernels.supports(torch.empty(MAX_ROWS + 1, 4), linear)
    assert not decode_kernels.supports(x.half(), linear)
    assert not decode_kernels.supports(torch.empty(4, MAX_ROWS).t(), linear)
    linear.weight = torch.nn.Parameter(torch.empty(4, 6).t(), requires_grad=False)
    assert not decode_kernels.supports(x, linear)


def test_a_capture_that_fails_is_tried_again_without_pdl_if_kernels_use_it(monkeypatch):
    monkeypatch.setattr(pdl, "_uses_pdl", {})
    capture, tried = PDLCapture(lambda run: (list, run()), torch.device("cuda", 1)), []

    def run():
        tried.append(pdl.may_use(1))
        if tried[-1]:
            raise RuntimeError("invalid resource handle")
        return torch.zeros(1)

    assert len(capture(run)) == 2
    assert tried == [True, False]
    for device, error in ((0, RuntimeError), (1, torch.OutOfMemoryError)):
        monkeypatch.setattr(pdl, "_uses_pdl", {device: True})
        with pytest.raises(error):
            capture(Mock(side_effect=error("anything")))
        assert pdl.may_use(device)


def decode_step(model, cache, lengths):
    """The hidden rows of a step of decodes."""
    metadata = metadata_for([(num, 1) for num in lengths], BLOCK_SIZE, NUM_BLOCKS, torch.Generator().manual_seed(0), DEVICE)
    ids, positions = torch.arange(5, 5 + len(lengths)).to(DEVICE), torch.tensor(lengths).to(DEVICE)
    return model(ids, positions, TritonBackend().begin_step(cache, metadata))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "quantization"),
    [
        *((family, None) for family in ("qwen2", "qwen3", "llama", "gemma3_window")),
        ("qwen2", "int4"),
        pytest.param("gemma3_window", "int8", marks=pytest.mark.long),
    ],
)
def test_a_layer_of_few_rows_has_five_launches(family, quantization, tmp_path, monkeypatch):
    """And one more for each norm, rotation or merge in a larger step, whose numbers are the same. Gemma 3 has two more.

    Weights in 8 or 4 bits are widened in a larger step.
    """
    num_angles, num_more = (2, 2) if family == "gemma3_window" else (1, 0)
    path = tiny_models.save(family, tmp_path, **({"hidden_size": 64, "intermediate_size": 128} if quantization else {}))
    model = loader.load_model(Checkpoint.open(str(path)), "float32", DEVICE)
    compiled, config, found = compile_model(model, quantization).model, model.config, []
    for max_rows in (MAX_ROWS, 0):
        monkeypatch.setattr(decode_kernels, "MAX_ROWS", max_rows)
        cache = cache_of(config.num_hidden_layers, config.num_key_value_heads, config.head_dim)
        with launched() as launches, torch.inference_mode():
            found.append([decode_step(compiled, cache, [6, 0, 33]), *cache.pages])
        names = [name for name, _ in launches]
        product, attention = "_integer_linear_kernel" if quantization else "_decode_linear_kernel", "_decode_attention_kernel"
        after = ["_rms_norm_kernel"] * (num_more // 2)
        layer = [product, attention, product, *after, product, product, *after]
        num_launches = (len(names) - 1 - num_angles) // config.num_hidden_layers
        layer = layer if max_rows else names[num_angles : num_angles + num_launches]
        assert max_rows or ("_widen_kernel" in layer) == bool(quantization)
        assert names == [*["_angles_kernel"] * num_angles, *layer * config.num_hidden_layers, "_rms_norm_kernel"]
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-5)
