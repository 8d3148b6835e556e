"""Other weights in any tensor have another digest, although only some pages are read."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from nanoinfer.fast.cpu import identity
from nanoinfer.fast.cpu.identity import MAX_PAGES, PAGE, sampled_digest
from nanoinfer.loading.checkpoint import Checkpoint
from tests.helpers import gguf_files, tiny_models


def digest(path):
    return sampled_digest(Checkpoint.open(str(path)))


@pytest.fixture
def qwen3(qwen3_path, tmp_path):
    return Path(shutil.copytree(qwen3_path, tmp_path / "qwen3"))


def test_a_change_of_any_tensor_changes_the_digest(qwen3):
    path, first = qwen3 / "model.safetensors", digest(qwen3)
    tensors = load_file(path)
    for name, tensor in tensors.items():
        save_file(tensors | {name: tensor + 1}, path, {"format": "pt"})
        assert digest(qwen3) != first, name
    save_file(tensors, path, {"format": "pt"})
    assert digest(qwen3) == first


def test_a_change_of_any_tensor_of_a_gguf_file_changes_the_digest(tmp_path):
    model = tiny_models.build("qwen3")
    metadata, tensors = gguf_files.metadata_of(model.config), gguf_files.tensors_of(model)
    first = digest(gguf_files.write(tmp_path / "model.gguf", metadata, tensors))
    for name, (number, shape, content) in tensors.items():
        other = tensors | {name: (number, shape, bytes(byte ^ 1 for byte in content))}
        assert digest(gguf_files.write(tmp_path / "model.gguf", metadata, other)) != first, name


def test_tensors_with_each_others_names_have_another_digest(qwen3):
    path, first = qwen3 / "model.safetensors", digest(qwen3)
    size, rest = path.read_bytes()[:8], path.read_bytes()[8:]
    header, data = rest[: int.from_bytes(size, "little")], rest[int.from_bytes(size, "little") :]
    swapped = header.replace(b".q_norm", b".?").replace(b".k_norm", b".q_norm").replace(b".?", b".k_norm")
    assert swapped != header
    path.write_bytes(size + swapped + data)
    assert digest(qwen3) != first


def test_an_index_that_gives_a_tensor_to_another_shard_changes_the_digest(qwen3):
    tensors = load_file(qwen3 / "model.safetensors")
    (qwen3 / "model.safetensors").unlink()
    name = next(iter(tensors))
    save_file(tensors, qwen3 / "a.safetensors", {"format": "pt"})
    save_file({name: tensors[name] + 1}, qwen3 / "b.safetensors", {"format": "pt"})

    def digest_with(shard):
        weight_map = dict.fromkeys(tensors, "a.safetensors") | {"moved": "b.safetensors", name: shard}
        (qwen3 / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        return digest(qwen3)

    assert digest_with("a.safetensors") != digest_with("b.safetensors")


def test_no_more_than_the_most_pages_are_read_and_they_come_from_all_files(qwen3, monkeypatch):
    (qwen3 / "model.safetensors").unlink()
    num = MAX_PAGES // 2  # in each of three files
    tensors = {f"{i}.{j}": torch.ones(PAGE // 4) * i for i in range(3) for j in range(num)}
    for i in range(3):
        save_file({name: one for name, one in tensors.items() if name[0] == str(i)}, qwen3 / f"{i}.safetensors")
    monkeypatch.setattr(identity, "MAX_PAGES", 3 * num)
    every = digest(qwen3)
    monkeypatch.undo()
    assert digest(qwen3) != every
    for i in range(3):
        changed = {name: one + 1 for name, one in tensors.items() if name[0] == str(i)}
        before = digest(qwen3)
        save_file(changed, qwen3 / f"{i}.safetensors")
        assert digest(qwen3) != before
