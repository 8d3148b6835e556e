"""The next start maps the weights that an earlier start has packed, and packs again whatever it cannot believe."""

import gc
import hashlib
import json
import mmap
import shutil
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from nanoinfer import LLM, SamplingParams
from nanoinfer.fast.cpu import packs
from nanoinfer.features.adapters.request import LoRARequest
from nanoinfer.features.training.stored import Identity, StoredParameter
from nanoinfer.loading.checkpoint import BUNDLED
from nanoinfer.loading.weights import Source, WeightFiles, Weights
from nanoinfer.system import disk_cache
from tests.helpers.lora_adapters import linear_shapes, write_adapter
from tests.helpers.precompiled import in_new_cache

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("kernels"),
    pytest.mark.skipif(sys.platform == "win32", reason="needs the file locks of Linux or macOS"),
]

PARAMS = SamplingParams(temperature=0, max_tokens=8, logprobs=3, detokenize=False, ignore_eos=True)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder of packed weights, in a new cache."""
    monkeypatch.setenv("NANOINFER_CACHE", str(in_new_cache(tmp_path / "cache")))
    monkeypatch.setattr(packs, "MIN_BYTES", 0)
    return tmp_path / "cache" / "packed"


@pytest.fixture
def checkpoint(tmp_path):
    return Path(shutil.copytree(BUNDLED / "tiny-qwen3", tmp_path / "checkpoint"))


def start(checkpoint, **settings):
    return LLM(str(checkpoint), kv_cache_memory=2**22, max_model_len=64, skip_tokenizer_init=True, **settings)


def answers(llm, **given):
    """Tokens and log-probabilities, bit by bit."""
    outputs = llm.generate([[1, 2, 3, 4], [5, 6]], PARAMS, use_tqdm=False, **given)
    bits = [[{i: one.logprob.hex() for i, one in row.items()} for row in output.outputs[0].logprobs] for output in outputs]
    return [output.outputs[0].token_ids for output in outputs], bits


def answers_of(checkpoint, **settings):
    return answers(start(checkpoint, **settings))


def files(folder):
    return sorted(folder.glob("*.weights"))


@pytest.fixture
def matrices_read(monkeypatch):
    """The names of the matrices that are read from safetensors files."""
    names, read = [], WeightFiles.read

    def recording(self, name, rows=slice(None)):
        names.extend([name] if len(self[name].shape) > 1 else [])
        return read(self, name, rows)

    monkeypatch.setattr(WeightFiles, "read", recording)
    return names


@pytest.mark.parametrize(
    ("model", "settings"),
    [
        ("tiny-qwen3", {"dtype": "float32"}),
        ("tiny-gpt2", {"dtype": "bfloat16"}),
        ("tiny-qwen3", {"quantization": "int8"}),
        ("tiny-gpt2", {"quantization": "int4"}),
    ],
)
def test_the_second_start_has_the_same_bits_and_reads_no_matrix_of_a_linear_layer(folder, matrices_read, model, settings):
    first = answers_of(BUNDLED / model, **settings)
    assert any("mlp" in name for name in matrices_read)
    matrices_read.clear()
    [path] = files(folder)
    content = path.read_bytes()
    assert answers_of(BUNDLED / model, **settings) == first
    assert not any("mlp" in name or "attn" in name or "head" in name for name in matrices_read)
    assert path.read_bytes() == content
    assert [entry.stat().st_mode & 0o777 for entry in (folder, path)] == [0o700, 0o600]


def with_byte_changed(data, share):
    i = int(len(data) * share)
    return data[:i] + bytes([data[i] ^ 1]) + data[i + 1 :]


DAMAGE = {
    "empty": lambda data: b"",
    "cut in the index": lambda data: data[:100],
    "cut by a page": lambda data: data[:-4096],
    "longer": lambda data: data + bytes(64),
    "the end lost": lambda data: data[: len(data) // 2] + bytes(len(data) - len(data) // 2),
    "swapped pages": lambda data: data[:-8192] + data[-4096:] + data[-8192:-4096],
    "the first byte changed": lambda data: with_byte_changed(data, 0),
    "a byte of the index changed": lambda data: with_byte_changed(data, 0.0001),
    "one of the last bytes changed": lambda data: with_byte_changed(data, 0.99999),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_corrupted_file_is_noticed_and_replaced(folder, checkpoint, caplog, damage):
    expected = answers_of(checkpoint)
    [path] = files(folder)
    content = path.read_bytes()
    path.write_bytes(DAMAGE[damage](content))
    assert path.read_bytes() != content
    assert answers_of(checkpoint) == expected
    assert [record.levelname for record in caplog.records if f"{path} are corrupted" in record.message] == ["WARNING"]
    assert path.read_bytes() == content


def rewrite_through_a_mapping(path, content, monkeypatch):
    """Give a file other content, with the status that it had: a file system need not see what is written through a mapping."""
    path, stat = path.resolve(), Path.stat
    status = path.stat()
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapping:
        mapping[:] = content
    monkeypatch.setattr(Path, "stat", lambda self, **given: status if self == path else stat(self, **given))


def test_a_checkpoint_that_was_rewritten_with_the_same_status_is_packed_again(folder, checkpoint, tmp_path, monkeypatch):
    first = answers_of(checkpoint)
    path, tensors = checkpoint / "model.safetensors", load_file(checkpoint / "model.safetensors")
    other = shutil.copytree(checkpoint, tmp_path / "other")
    save_file({name: tensor.roll(1, -1) for name, tensor in tensors.items()}, other / path.name, {"format": "pt"})
    expected = answers_of(other)
    gc.collect()  # the first engine has mapped the checkpoint
    rewrite_through_a_mapping(path, (other / path.name).read_bytes(), monkeypatch)
    assert answers_of(checkpoint) == expected != first
    assert answers_of(checkpoint) == expected
    assert len(files(folder)) == 2  # of each checkpoint one


def without(index, name):
    return {key: one for key, one in index.items() if key != name}


def reindexed(path, change):
    """Replace a file's index, with the digest that it should have."""
    text, arrays = path.read_bytes()[65:].split(b"\n", 1)
    text = json.dumps(change(json.loads(text))).encode().ljust(len(text)) + b"\n"
    path.write_bytes(hashlib.sha256(text).hexdigest().encode() + b"\n" + text + arrays)


REST_OF_INDEX = "checkpoint", "made_from", "checksum"


@pytest.mark.parametrize(
    "change",
    [
        partial(without, name="arrays"),
        *(pytest.param(partial(without, name=name), marks=pytest.mark.long) for name in REST_OF_INDEX),
        lambda index: [],
        lambda index: index | {"arrays": dict.fromkeys(index["arrays"], 5)},
        lambda index: index | {"arrays": {name: ["5"] for name in index["arrays"]}},
    ],
)
def test_an_index_that_lacks_something_is_a_corrupted_index(folder, checkpoint, caplog, change):
    expected = answers_of(checkpoint)
    [path] = files(folder)
    content = path.read_bytes()
    shutil.copyfile(path, folder / f"{0:032x}.weights")  # that of another model, which is read to see whether that is gone
    for one in files(folder):
        reindexed(one, change)
    assert answers_of(checkpoint) == expected
    assert [record.levelname for record in caplog.records if f"{path} are corrupted" in record.message] == ["WARNING"]
    assert path.read_bytes() == content


def test_a_file_of_other_code_is_replaced(folder, checkpoint, monkeypatch):
    answers_of(checkpoint)
    [path] = files(folder)
    content = path.read_bytes()
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "another")
    answers_of(checkpoint)
    assert files(folder) == [path]
    assert path.read_bytes() != content


def test_dtypes_quantisations_and_ranks_have_files_of_their_own(folder, checkpoint):
    paths = set()
    for part, dtype, quantization in [
        ((0, 1), torch.float32, None),
        ((0, 2), torch.float32, None),
        ((1, 2), torch.float32, None),
        ((0, 1), torch.bfloat16, None),
        ((0, 1), torch.bfloat16, "int8"),
    ]:
        layer, source = torch.nn.Linear(8, 8, dtype=dtype), Source(Weights(), "", dtype, is_transposed=False)
        layer.weight = StoredParameter.of(layer.weight, source, Identity([str(checkpoint)], part, ""))
        paths.add(packs.Packs(layer, quantization)._file)
    assert len(paths) == 5


def test_updates_and_sleep_do_not_change_the_file(folder, checkpoint):
    expected = answers_of(checkpoint)
    [path] = files(folder)
    content = path.read_bytes()
    llm = start(checkpoint)  # mapped
    tensors = load_file(checkpoint / "model.safetensors")
    llm.update_weights((name, tensor.flip(0)) for name, tensor in tensors.items() if "down_proj" in name)
    assert answers(llm) != expected
    assert path.read_bytes() == content
    if sys.platform == "linux":
        llm.sleep(2)
        llm.wake_up()
        llm.update_weights_from_path(str(checkpoint))
        assert answers(llm) == expected
    assert path.read_bytes() == content
    assert answers_of(checkpoint) == expected


def test_adapters_of_requests_work_and_merged_adapters_are_not_kept(folder, checkpoint, tmp_path):
    write_adapter(tmp_path / "adapter", linear_shapes(checkpoint), rank=4, r=4, lora_alpha=64)
    request = LoRARequest("adapter", 1, str(tmp_path / "adapter"))
    merged = answers_of(checkpoint, lora=str(tmp_path / "adapter"))
    assert not files(folder)
    plain = answers_of(checkpoint)
    assert merged != plain
    [path] = files(folder)
    adapted = [answers(start(checkpoint, enable_lora=True), lora_request=request) for _ in range(2)]
    assert files(folder) == [path]
    assert adapted[0] == adapted[1]
    assert adapted[0][0] == merged[0]
    assert answers_of(checkpoint, lora=str(tmp_path / "adapter")) == merged


def fill_disk(path):
    raise OSError(28, "No space left on device")


OBSTACLES = {
    "a file": lambda folder, patch: folder.write_text(""),
    "open to others": lambda folder, patch: folder.mkdir() or folder.chmod(0o777),
    "a full disk": lambda folder, patch: patch.setattr(disk_cache, "stamp", fill_disk),  # after some bytes
    "no space": lambda folder, patch: patch.setattr(packs.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(9, 0, 9)),
}


@pytest.mark.parametrize("obstacle", OBSTACLES)
def test_a_folder_that_cannot_be_used_is_a_line_in_the_log(folder, checkpoint, caplog, monkeypatch, obstacle):
    OBSTACLES[obstacle](folder, monkeypatch)
    answers_of(checkpoint)
    [record] = [record for record in caplog.records if record.name == packs.__name__]
    assert record.levelname == "WARNING"
    assert f"packed weights cannot be kept in {folder}: " in record.message
    assert not folder.is_dir() or {path.name for path in folder.iterdir()} <= {"lock"}


def test_the_files_that_were_used_longest_ago_make_room(folder, checkpoint, monkeypatch):
    start(checkpoint, dtype="float32")
    [largest] = files(folder)
    monkeypatch.setattr(packs, "MAX_BYTES", largest.stat().st_size * 9 // 5)
    (folder / "writing").write_bytes(b"half")  # of a process that was killed
    start(checkpoint, dtype="bfloat16")
    [smaller] = set(files(folder)) - {largest}
    start(checkpoint, dtype="float32")  # used
    start(checkpoint, dtype="float16")
    assert largest in files(folder)
    assert smaller not in files(folder)
    assert not (folder / "writing").exists()
    assert sum(path.stat().st_size for path in files(folder)) <= packs.MAX_BYTES
    monkeypatch.setattr(packs, "MAX_BYTES", 1000)
    start(checkpoint, quantization="int8")
    assert largest in files(folder)  # what does not fit removes nothing


def test_the_file_of_a_checkpoint_that_is_gone_is_removed_and_small_models_are_not_kept(folder, checkpoint, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(packs, "MIN_BYTES", 2**26)
        start(checkpoint)
    assert not files(folder)
    start(checkpoint)
    [gone] = files(folder)
    gc.collect()
    shutil.rmtree(checkpoint)
    start(BUNDLED / "tiny-qwen3")
    [path] = files(folder)
    assert path != gone
