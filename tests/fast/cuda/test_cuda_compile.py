"""A model compiled for a GPU gives the textbook's logits. Where there is no GPU, Triton interprets its kernels."""

from collections import Counter

import pytest
import torch
from torch import nn

from tests.helpers import tiny_models

pytest.importorskip("triton")

from nanoinfer.attention.kv_cache import KVCache
from nanoinfer.attention.triton import TritonBackend
from nanoinfer.fast.cuda import accelerate, compile
from nanoinfer.fast.cuda.accelerate import compile_model
from nanoinfer.features.hybrid.attention import HybridDenseAttention
from nanoinfer.features.hybrid.groups import GroupedAttend
from nanoinfer.features.hybrid.sizes import kv_groups
from nanoinfer.loading import devices, loader
from nanoinfer.loading.checkpoint import Checkpoint
from nanoinfer.models.layers import RMSNorm, apply_rotary
from nanoinfer.models.qwen import QwenDecoderLayer
from tests.helpers.paged_cases import metadata_for
from tests.helpers.triton_interpreter import launched

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FACTOR = 1.25 if DEVICE == "cuda" else 1.6  # the interpreter cuts bits off where it should round to bf16
IDS = torch.arange(1, 31) * 31 % tiny_models.VOCAB_SIZE

HALF = "bfloat16" if DEVICE == "cpu" or devices.gpu_has_bf16(torch.device(DEVICE)) else "float16"


def load(path, dtype="float32", device=DEVICE):
    return loader.load_model(Checkpoint.open(str(path)), dtype, device)


@torch.inference_mode()
def logits_of(model, num_tokens=13):
    ids = IDS[:num_tokens].to(next(model.parameters()).device)
    return model.compute_logits(model(ids, torch.arange(len(ids), device=ids.device), HybridDenseAttention())).float().cpu()


def assert_same_logits(path, dtype, compiled):
    """In fp32 within rounding. In 16 bits as near the fp32 truth as the textbook, times FACTOR."""
    if dtype == "float32":
        torch.testing.assert_close(logits_of(compiled), logits_of(load(path, device="cpu")), atol=1e-4, rtol=0)
        return
    textbook = load(path, dtype)
    for num_tokens in (13, 30):  # one kernel for few rows, and the products of torch
        truth = logits_of(load(path, device="cpu"), num_tokens)
        error_of_textbook = (logits_of(textbook, num_tokens) - truth).abs().mean()
        assert error_of_textbook < 0.1 * truth.abs().mean()  # the comparison means something
        assert (logits_of(compiled, num_tokens) - truth).abs().mean() < FACTOR * error_of_textbook


def kernels_of(model):
    return [type(module).__name__ for module in model.forward.__self__.modules() if module.__module__ == compile.__name__]


@pytest.mark.slow
@pytest.mark.parametrize(  # Triton's interpreter is slow
    ("family", "dtype"),
    [
        ("qwen2", HALF),
        ("qwen3", "float32"),
        ("qwen3", HALF),
        ("qwen2_moe", "float32"),
        ("gpt_oss_window", "float32"),
        ("gemma3_window", HALF),
    ],
)
def test_a_family_gives_the_textbooks_logits(family, dtype, tmp_path):
    path = tiny_models.save(family, tmp_path)
    report = compile_model(load(path, dtype))
    assert "" in report.compiled
    assert_same_logits(path, dtype, report.model)


def test_gpt2_stays_as_it_is(tmp_path):
    report = compile_model(load(tiny_models.save("gpt2", tmp_path)))
    assert report.compiled == {}
    assert "forward" not in vars(report.model)


def test_a_layer_has_a_kernel_for_all_between_its_products(tmp_path):
    """Of a layer: two norms, two rotations with norms, q, k and v, gate and up, and two products that add the residual."""
    report = compile_model(load(tiny_models.save("qwen3", tmp_path)))
    assert report.compiled == {"": 2 * 8 + 2}
    num = Counter(kernels_of(report.model))
    assert (num["KernelRMSNorm"], num["KernelRotation"], num["FewRowsLinear"], num["AddedLinear"]) == (5, 4, 4, 4)
    assert num["RotatedAttention"] == 2
    modules = report.model.forward.__self__.modules()
    assert all(module.in_place for module in modules if isinstance(module, compile.AddedLinear))


def test_a_layer_of_gemma3_has_no_operation_of_torch_but_views(tmp_path):
    """A layer has four norms, of which two add, four products, and the attention. torch scales the embedding."""
    model = compile_model(load(tiny_models.save("gemma3_window", tmp_path, num_hidden_layers=3))).model
    num = Counter(kernels_of(model))
    num_layers, _ = num.pop("RotatedAttention"), num.pop("KernelRotation")
    assert num == {"KernelRMSNorm": 4 * num_layers + 1, "FewRowsLinear": 4 * num_layers, "KernelAngles": 2}
    called = [node for node in model.forward.__self__.graph.nodes if node.op in ("call_function", "call_method")]
    views = {"narrow", "unflatten", "flatten", "getattr", "getitem"}
    assert sorted({getattr(node.target, "__name__", node.target) for node in called} - views) == ["mul", "new_full"]


class TwiceResidual(QwenDecoderLayer):
    """The input of the layer is read again after its sum, so it may not be overwritten."""

    def forward(self, x, cos, sin, attend):
        return super().forward(x, cos, sin, attend) * 0.5 + x


class ViewOfResidual(QwenDecoderLayer):
    """A view of the input is read again after the sum."""

    def forward(self, x, cos, sin, attend):
        halves = x.unflatten(-1, (2, -1))
        return super().forward(x, cos, sin, attend) * 0.5 + halves.flatten(1)


@pytest.mark.slow
@pytest.mark.parametrize("layer_class", [TwiceResidual, ViewOfResidual])
def test_a_residual_that_is_read_later_is_not_overwritten(layer_class, tmp_path):
    path = tiny_models.save("qwen3", tmp_path)
    model, expected = load(path), load(path)
    for one in (model, expected):
        one.layers[1].__class__ = layer_class
    torch.testing.assert_close(logits_of(compile_model(model).model), logits_of(expected), atol=1e-4, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", HALF])
def test_the_comparison_notices_a_product_that_forgets_the_residual(dtype, tmp_path, monkeypatch):
    monkeypatch.setattr(compile.AddedLinear, "forward", lambda self, x, residual: self.linear(x))
    path = tiny_models.save("qwen3", tmp_path)
    with pytest.raises(AssertionError):
        assert_same_logits(path, dtype, compile_model(load(path, dtype)).model)


def in_two_merges(x, a, b, c):
    """`a` stands in a product with b, and in another with c."""
    y = x * 2
    return torch.maximum(a(x), b(x)) * torch.maximum(a(y), c(y))


def its_own_gate(x, a, b, c):
    """The gate and up are one layer."""
    return (nn.functional.silu(a(x)) * a(x)) ** 2 + torch.maximum(b(x), c(x))


def with_a_weight_read(x, a, b, c):
    """The model reads a weight itself."""
    return torch.maximum(a(x), b(x)) + nn.functional.linear(x, a.weight) ** 2 + c(x) ** 2


def called_twice(x, a, b, c):
    """Two layers are called with two inputs, and one merged layer computes both. The third product adds a residual."""
    y = x * 2
    return torch.maximum(a(x), b(x)) * torch.maximum(a(y), b(y)) + c(x + y)


class ThreeLayers(nn.Module):
    """Computes something of an input and three linear layers."""

    def __init__(self, compute):
        super().__init__()
        self.layers = nn.ModuleDict({name: nn.Linear(8, 6, bias=False) for name in "abc"}).requires_grad_(False)
        self.compute = compute

    def forward(self, x):
        return self.compute(x, *self.layers.values())


@pytest.mark.parametrize(
    ("compute", "num_kernels"), [(in_two_merges, 1), (its_own_gate, 1), (with_a_weight_read, 0), (called_twice, 3)]
)
def test_a_weight_is_kept_once_and_an_update_reaches_every_product_with_it(compute, num_kernels):
    torch.manual_seed(0)
    model, x = ThreeLayers(compute), torch.randn(3, 8)
    compiled = compile_model(model)
    assert compiled.compiled.get("", 0) == num_kernels
    computing = [module.linear for module in compiled.model.modules() if isinstance(module, compile.FewRowsLinear)]
    weights = [*model.parameters(), *(linear.weight for linear in computing)]
    kept = {weight.untyped_storage().data_ptr(): weight.untyped_storage().nbytes() for weight in weights}
    assert sum(kept.values()) == 3 * 8 * 6 * 4
    with torch.inference_mode():
        for _ in range(2):
            torch.testing.assert_close(compiled.model(x), ThreeLayers.forward(model, x))
            for weight in model.parameters():
                weight.copy_(torch.randn_like(weight))


class LateProduct(nn.Module):
    """The input of a norm is overwritten between the norm and the product that reads it."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleDict({name: nn.Linear(8, 8, bias=False) for name in "abcd"}).requires_grad_(False)
        self.norm = RMSNorm(8, 1e-6).requires_grad_(False)
        nn.init.normal_(self.norm.weight)

    def forward(self, x):
        a, b, c, d = self.layers.values()
        first = x + a(x)
        normed = self.norm(first)
        second = first + b(x)
        return torch.maximum(c(normed), d(normed)) + second


def test_a_norm_whose_input_is_overwritten_does_not_move_behind_that():
    torch.manual_seed(0)
    model, x = LateProduct(), torch.randn(3, 8)
    compiled = compile_model(model).model
    assert any(isinstance(one, compile.AddedLinear) and one.in_place for one in compiled.forward.__self__.modules())
    torch.testing.assert_close(compiled(x.to(DEVICE)).cpu(), model(x))


def test_without_triton_the_model_stays_unchanged_and_one_log_line_says_so(tmp_path, monkeypatch, caplog):
    def missing(name):
        raise ModuleNotFoundError("No module named 'triton'", name="triton")

    monkeypatch.setattr(accelerate, "import_module", missing)
    model = load(tiny_models.save("qwen3", tmp_path))
    caplog.clear()
    with caplog.at_level("INFO", "nanoinfer.fast"):
        assert "forward" not in vars(compile_model(model).model)
    [record] = caplog.records
    assert record.message.startswith("triton is not installed: norms, rotations and gates run as torch's own operators")


class Rotated(nn.Module):
    """The attention of one layer with heads of 6 numbers: 4 of queries, 2 of keys, and 2 of values."""

    def __init__(self, compute):
        super().__init__()
        self.compute = compute

    def forward(self, q, k, v, cos, sin, attend):
        return self.compute(q, k, v, cos, sin, attend)


def plainly(q, k, v, cos, sin, attend):
    return attend(1, apply_rotary(q, cos, sin), apply_rotary(k, cos, sin), v)


def read_again(q, k, v, cos, sin, attend):
    q = apply_rotary(q, cos, sin)
    return attend(0, q, apply_rotary(k, cos, sin), v) + q


def with_other_angles(q, k, v, cos, sin, attend):
    return attend(0, apply_rotary(q, cos, sin), apply_rotary(k, sin, cos), v)


def with_keys_as_values(q, k, v, cos, sin, attend):
    k = apply_rotary(k, cos, sin)
    return attend(0, apply_rotary(q, cos, sin), k, k)


def with_wider_values(q, k, v, cos, sin, attend):
    """There are more values than keys, which is for an attention of the user's own."""
    return plainly(q, k, torch.cat((v, v), 1), cos, sin, attend)


@pytest.mark.parametrize(
    ("compute", "num_fused"),
    [(plainly, 1), (read_again, 0), (with_other_angles, 0), (with_keys_as_values, 0), (with_wider_values, 1)],
)
def test_a_rotation_moves_into_the_attention_if_only_the_attention_reads_it(compute, num_fused):
    torch.manual_seed(0)
    q, k, v = (torch.randn(3, num_heads, 6) for num_heads in (4, 2, 2))
    cos, sin = torch.randn(2, 3, 1, 6)

    def sums(layer, q, k, v):
        return q * k.sum(1, keepdim=True) + v.sum(1, keepdim=True)

    model = compile_model(Rotated(compute)).model
    assert kernels_of(model).count("RotatedAttention") == num_fused
    found = model(*(x.to(DEVICE) for x in (q, k, v, cos, sin)), sums).cpu()
    torch.testing.assert_close(found, compute(q, k, v, cos, sin, sums))


def heads_of(num_tokens, generator):
    """Queries, keys and values as a fused projection gives them. Values of a head of the second token are not finite."""
    qkv = torch.randn(num_tokens, 8, 6, generator=generator).to(DEVICE)
    qkv[1, 7, 3] = float("inf")
    return qkv.split([4, 2, 2], dim=1)


@pytest.mark.parametrize("in_groups", [False, True])
def test_one_kernel_with_a_program_for_each_token_rotates_and_stores(in_groups):
    """The pages and the results are those of two rotations and a store. The second layer may have a window."""
    generator = torch.Generator().manual_seed(0)
    cos, sin = torch.randn(2, 5, 1, 6, generator=generator).to(DEVICE)
    q, k, v = heads_of(5, generator)
    model, found = compile_model(Rotated(plainly)).model, []
    for is_fused in (True, False):
        sizes = {"num_layers": 1 if in_groups else 2, "num_blocks": 6, "block_size": 4, "num_kv_heads": 2, "head_dim": 6}
        cache = KVCache(**sizes, device=DEVICE)
        metadata = metadata_for([(2, 1), (0, 4)], 4, 6, generator.manual_seed(1), DEVICE)
        attend = TritonBackend().begin_step(cache, metadata)
        if in_groups:
            other = metadata_for([(2, 1), (0, 4)], 4, 6, generator.manual_seed(2), DEVICE)
            attend = GroupedAttend(cache, TritonBackend(), (other, metadata), kv_groups([None, 8]))
        with launched() as launches:
            # the second one could be any function
            out = model(q, k, v, cos, sin, attend if is_fused else lambda *heads, attend=attend: attend(*heads))
        num_programs = [num for name, num in launches if "rotate" in name or "store" in name]
        assert num_programs == ([5] if is_fused else [5, 5, 5])
        found.append([out, *cache.pages])
    assert any(pages.isnan().any() for pages in found[0][1:])  # the key of values that are not finite
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-5, equal_nan=True)
