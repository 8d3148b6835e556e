"""Finding a checkpoint: folders, the bundled models, hub names (never the network), and what is wrong with a bad one."""

import json
import re
import shutil
from pathlib import Path
from unittest.mock import Mock

import huggingface_hub
import pytest
import transformers
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError
from huggingface_hub.utils import filter_repo_objects

from nanoinfer.errors import CheckpointError, CheckpointNotFoundError, WeightsError
from nanoinfer.loading import hub
from nanoinfer.loading.checkpoint import BUNDLED, Checkpoint, bundled_models, locate
from nanoinfer.loading.weights import WeightFiles


@pytest.fixture
def folder(gpt2_path, tmp_path):
    return shutil.copytree(gpt2_path, tmp_path / "checkpoint")


def write_json(path, content):
    path.write_text(json.dumps(content))


def test_a_folder_is_opened_where_it_lies(folder):
    checkpoint = Checkpoint.open(str(folder))
    assert checkpoint.path == folder
    assert checkpoint.config["architectures"] == ["GPT2LMHeadModel"]
    assert checkpoint.weight_files == [folder / "model.safetensors"]
    (folder / "generation_config.json").unlink()
    assert Checkpoint.open(str(folder)).generation_config == {}
    with pytest.raises(CheckpointError, match="has no revision 'v2'; leave revision out"):
        Checkpoint.open(str(folder), "v2")


def test_a_model_in_the_box_is_found_by_its_name_and_no_name_is_tiny_qwen3():
    for name, architecture in (("tiny-qwen3", "Qwen3ForCausalLM"), ("tiny-gpt2", "GPT2LMHeadModel")):
        checkpoint = Checkpoint.open(name)
        assert checkpoint.path == BUNDLED / name
        assert checkpoint.config["architectures"] == [architecture]
        assert name in bundled_models()
    assert Checkpoint.open(None) == Checkpoint.open("tiny-qwen3")


def test_a_folder_of_the_users_goes_before_the_box(folder, monkeypatch):
    monkeypatch.chdir(folder.parent)
    folder.rename(folder.parent / "tiny-qwen3")
    assert Checkpoint.open("tiny-qwen3").config["architectures"] == ["GPT2LMHeadModel"]


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        ("/no/such/folder", "there is no folder '/no/such/folder'"),
        ("", "name is empty"),
        ("~/no-such-folder", "there is no folder"),
        ("not a hub name!", "neither a folder nor a possible hub name.* tiny-gpt2, tiny-qwen3"),
        ("owner/not-in-the-cache", "the hub did not give it .revision main.*HF_HUB_OFFLINE=1 is set, and the hub's .*unset"),
        ("tiny-qwen", "did you mean 'tiny-qwen3'. Otherwise check the name, unset HF_HUB_OFFLINE to download it, or use"),
        ("tiny_qwen3", "did you mean 'tiny-qwen3'"),
        ("x" * 5000, "cannot be used as a folder .File name too long.; bundled are tiny-gpt2, tiny-qwen3"),
        ("\udcff", "cannot be used as a folder"),
        ("~nobody-here/x", "cannot be used as a folder .Could not determine home directory"),
    ],
)
def test_a_model_that_is_not_there_is_refused_with_what_to_try(model, sentence):
    with pytest.raises(CheckpointNotFoundError, match=sentence):
        Checkpoint.open(model)


def test_without_a_home_folder_or_one_to_write_a_model_of_the_hub_is_refused_with_hf_home(no_home, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", "~/.cache/huggingface/hub")  # as of a process without one
    words = "keeps models in the home folder, and this user has none; set HF_HOME to a folder for models, or use a folder"
    with pytest.raises(CheckpointNotFoundError, match=words):
        Checkpoint.open("owner/name")
    with pytest.raises(CheckpointNotFoundError, match=r"cannot be used as a folder .Could not determine home directory"):
        Checkpoint.open("~/model")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", "/nonexistent")
    monkeypatch.setattr(hub, "snapshot_download", Mock(side_effect=PermissionError(13, "Permission denied", "/nonexistent")))
    with pytest.raises(CheckpointNotFoundError, match="'/nonexistent' cannot be written; set HF_HOME to a folder that can be"):
        Checkpoint.open("owner/name")


def test_a_near_miss_of_a_folder_or_of_a_cached_model_is_suggested(folder, monkeypatch):
    cache = folder.parent / "cache"
    (cache / "models--Qwen--Qwen3-0.6B").mkdir(parents=True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    with pytest.raises(CheckpointNotFoundError, match=f"there is no folder '{folder}s'; did you mean '{folder}'"):
        Checkpoint.open(f"{folder}s")
    with pytest.raises(CheckpointNotFoundError, match=r"did you mean 'Qwen/Qwen3-0\.6B'"):
        Checkpoint.open("qwen/Qwen3-0.6b")
    with pytest.raises(CheckpointNotFoundError, match="folder; bundled are"):
        Checkpoint.open("Qwen/Qwen3-0.6B")  # which is its own name


def test_a_file_without_permission_is_no_corrupted_file(folder, monkeypatch):
    """A patch, because the superuser has every permission."""
    path_open = Path.open

    def refusing(path, *args, **kwargs):
        if path.name == "model.safetensors":
            raise PermissionError(13, "Permission denied", str(path))
        return path_open(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", refusing)
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read: Permission denied"):
        Checkpoint.open(str(folder))
    with pytest.raises(WeightsError, match=r"model\.safetensors cannot be read: Permission denied"):
        WeightFiles([folder / "model.safetensors"])


def test_a_hub_model_is_downloaded_by_name_and_revision_without_files_that_are_not_needed(folder, monkeypatch):
    calls = []

    def snapshot_download(name, **arguments):
        calls.append((name, arguments))
        return str(folder)

    monkeypatch.setattr(hub, "snapshot_download", snapshot_download)
    assert Checkpoint.open("owner/name", "v2").path == folder
    [(name, arguments)] = calls
    patterns = {key: arguments.pop(key) for key in ("allow_patterns", "ignore_patterns")}
    assert (name, arguments) == ("owner/name", {"revision": "v2"})
    needed = ["config.json", "generation_config.json", "model.safetensors", "model-00001-of-00002.safetensors"]
    needed += ["model.safetensors.index.json", "tokenizer.json", "merges.txt", "tokenizer.model", "chat_template.jinja"]
    other = ["pytorch_model.bin", "model.gguf", "README.md", "onnx/model.onnx", "onnx/config.json", "fp16/model.safetensors"]
    other += ["consolidated.safetensors", "consolidated.00.safetensors"]
    assert list(filter_repo_objects(needed + other, **patterns)) == needed
    locate("owner/name", with_weights=False)  # for LLM(tokenizer=...)
    patterns = {key: calls[1][1][key] for key in patterns}
    assert list(filter_repo_objects(needed + other, **patterns)) == [
        name for name in needed if "00001" not in name and name != "model.safetensors"
    ]


def test_a_hub_model_in_the_cache_is_found_offline_at_the_revision_asked_for(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    repository = tmp_path / "cache" / "models--owner--name"
    (repository / "refs").mkdir(parents=True)
    for revision, commit in (("main", "a" * 40), ("v2", "b" * 40)):
        (repository / "refs" / revision).write_text(commit)
        shutil.copytree(folder, repository / "snapshots" / commit)
    assert Checkpoint.open("owner/name").path.name == "a" * 40
    assert Checkpoint.open("owner/name", "v2").path.name == "b" * 40
    with pytest.raises(CheckpointNotFoundError, match="revision v3"):
        Checkpoint.open("owner/name", "v3")


def test_a_folder_with_pickles_only_is_refused_with_how_to_convert_and_one_without_weights_is_not_told_of_them(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(
        CheckpointNotFoundError, match=r"holds no \*\.safetensors or \*\.gguf file, so it has no weights; "
    ) as caught:
        Checkpoint.open(str(folder))
    assert "from_pretrained" not in str(caught.value)
    for pickle in ("pytorch_model.bin", "model.pt", "model.pth"):
        (folder / pickle).touch()
        with pytest.raises(CheckpointNotFoundError, match=r"holds no \*\.safetensors") as caught:
            Checkpoint.open(str(folder))
        assert f"AutoModelForCausalLM.from_pretrained('{folder}').save_pretrained('converted')" in str(caught.value)
        (folder / pickle).unlink()


def test_a_folder_of_the_hubs_cache_names_its_snapshots(folder, tmp_path):
    repository = tmp_path / "models--owner--name"
    shutil.copytree(folder, repository / "snapshots" / "abc")
    sentence = (
        f"{repository} is a folder of the hub's cache; give the name 'owner/name', or a snapshot: {repository}/snapshots/abc"
    )
    with pytest.raises(CheckpointNotFoundError, match=f"^{re.escape(sentence)}$"):
        Checkpoint.open(str(repository))


@pytest.mark.parametrize(
    ("error_class", "sentence"),
    [
        (GatedRepoError, r"it is gated.*accept its conditions at https://\S+/owner/name and log in with `hf auth login`"),
        (RepositoryNotFoundError, "there is no such model, or it is private; check the name, and for a private one log in"),
        (RevisionNotFoundError, "revision v9.: it has no such revision; check the name of the branch, tag or commit"),
        (RuntimeError, "503 Server Error"),
        (HfHubHTTPError, "503 Server Error; check the name and the network .a download continues where it stopped."),
    ],
)
def test_what_the_hub_refuses_is_said_with_a_hint(monkeypatch, error_class, sentence):
    """GatedRepoError is a RepositoryNotFoundError: the order of the questions matters."""
    error = error_class.__new__(error_class)  # its constructor takes a response of the HTTP library of the installed version
    Exception.__init__(error, "503 Server Error")

    def refusing(*args, **kwargs):
        raise error

    monkeypatch.setattr(hub, "snapshot_download", refusing)
    with pytest.raises(CheckpointNotFoundError, match=sentence):
        Checkpoint.open("owner/name", "v9")


def test_the_index_decides_which_files_are_the_weights_unless_one_file_has_them(folder):
    index = {"weight_map": {"a": "shard-1.safetensors", "b": "shard-2.safetensors", "c": "shard-1.safetensors"}}
    write_json(folder / "model.safetensors.index.json", index)  # which a sharded predecessor left
    assert Checkpoint.open(str(folder)).weight_files == [folder / "model.safetensors"]
    (folder / "model.safetensors").rename(folder / "shard-2.safetensors")
    (folder / "consolidated.safetensors").touch()
    (folder.parent / "blob").touch()
    (folder / "shard-1.safetensors").symlink_to(folder.parent / "blob")  # as in the hub's cache
    assert Checkpoint.open(str(folder)).weight_files == [folder / "shard-1.safetensors", folder / "shard-2.safetensors"]
    write_json(folder / "model.safetensors.index.json", {"weight_map": index["weight_map"] | {"d": "0.safetensors"}})
    with pytest.raises(CheckpointNotFoundError, match=r"names 0\.safetensors, not in the folder"):
        Checkpoint.open(str(folder))
    for wrong in ({"metadata": {}}, {"weight_map": {"a": 5}}, [1, 2]):
        write_json(folder / "model.safetensors.index.json", wrong)
        with pytest.raises(CheckpointError, match=r"has no weight_map|index\.json must hold a JSON object"):
            Checkpoint.open(str(folder))


@pytest.mark.parametrize("weights", ["adapter_model.safetensors", "adapter_model.bin"])
def test_a_lora_adapter_as_model_is_refused_with_its_base_and_the_way_to_load_it(folder, weights):
    (folder / "model.safetensors").rename(folder / weights)
    for base in ("owner/the-base", None):
        write_json(folder / "adapter_config.json", {"peft_type": "LORA", "base_model_name_or_path": base})
        with pytest.raises(CheckpointNotFoundError) as caught:
            Checkpoint.open(str(folder))
        assert f"{folder} is a LoRA adapter, not a model" in str(caught.value)
        assert f"model={base or 'BASE_MODEL'!r}, lora={str(folder)!r}" in str(caught.value)
        (folder / "config.json").unlink(missing_ok=True)  # for the second one


def test_an_adapters_file_is_none_of_the_models_weights(folder):
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    shutil.copyfile(folder / "weights.safetensors", folder / "adapter_model.safetensors")
    write_json(folder / "adapter_config.json", {"peft_type": "LORA"})
    assert Checkpoint.open(str(folder)).weight_files == [folder / "weights.safetensors"]


@pytest.mark.parametrize(
    ("generation_config", "config", "eos_token_ids"),
    [
        ({"eos_token_id": 3}, {"eos_token_id": 9}, {3}),
        ({"eos_token_id": [3, 0]}, {"eos_token_id": 9}, {3, 0}),
        ({"eos_token_id": 0}, {"eos_token_id": 9}, {0}),
        ({"eos_token_id": None}, {"eos_token_id": 9}, {9}),
        (None, {"eos_token_id": [9, 8]}, {9, 8}),
        ({}, {"eos_token_id": None}, set()),
    ],
)
def test_eos_ids_are_generation_configs_or_else_configs(folder, generation_config, config, eos_token_ids):
    (folder / "generation_config.json").unlink()
    if generation_config is not None:
        write_json(folder / "generation_config.json", generation_config)
    write_json(folder / "config.json", config)
    assert Checkpoint.open(str(folder)).eos_token_ids == eos_token_ids


def test_defaults_are_generation_configs_by_our_names_and_do_sample_false_is_greedy(folder):
    given = {"min_new_tokens": 2, "no_repeat_ngram_size": 3, "stop_strings": ["a"], "bad_words_ids": [[5]], "top_k": None}
    ours = {"min_tokens": 2, "no_repeat_ngram_size": 3, "stop": ["a"], "bad_words": [[5]]}
    for more, defaults in (
        ({}, {}),
        ({"temperature": 0.5}, {"temperature": 0.5}),
        ({"temperature": 0.5, "do_sample": None}, {"temperature": 0.5}),
        ({"temperature": 0.5, "do_sample": True}, {"temperature": 0.5}),
        ({"temperature": 0.5, "do_sample": False}, {"temperature": 0.0}),
        ({"do_sample": False}, {"temperature": 0.0}),
        ({"min_p": "", "top_k": None}, {}),
    ):
        write_json(folder / "generation_config.json", given | more)
        assert Checkpoint.open(str(folder)).sampling_defaults == ours | defaults
    write_json(folder / "generation_config.json", {"do_sample": "no"})
    with pytest.raises(CheckpointError, match="do_sample must be true or false, got 'no'"):
        _ = Checkpoint.open(str(folder)).sampling_defaults


def test_settings_that_are_not_applied_are_named_unless_they_change_nothing(folder):
    named = {"suppress_tokens": [0, 5], "begin_suppress_tokens": [7], "forced_eos_token_id": 0, "forced_bos_token_id": 1}
    named |= {"num_beams": 4, "typical_p": 0.9, "epsilon_cutoff": 1e-3, "eta_cutoff": 1e-3, "min_length": 9, "max_length": 4096}
    named |= {"guidance_scale": 1.5, "encoder_repetition_penalty": 1.2, "penalty_alpha": 0.6, "num_return_sequences": 2}
    named |= {"sequence_bias": [[[5], -1.0]], "exponential_decay_length_penalty": [3, 1.1], "top_h": 0.4, "dola_layers": "low"}
    write_json(folder / "generation_config.json", named | {"temperature": 0.5, "eos_token_id": 0, "length_penalty": 2.0})
    words = Checkpoint.open(str(folder)).settings_not_applied().split("=")
    assert {word.rpartition(" ")[2] for word in words[:-1]} == named.keys()
    neutral = {"num_beams": 1, "typical_p": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "min_length": 0, "max_length": 20}
    neutral |= {"guidance_scale": 1.0, "encoder_repetition_penalty": 1.0, "suppress_tokens": [], "num_return_sequences": 1}
    for given in (neutral, transformers.GenerationConfig().to_dict(), {}):
        write_json(folder / "generation_config.json", given)
        assert Checkpoint.open(str(folder)).settings_not_applied() == ""


def test_a_file_instead_of_its_folder_and_a_folder_instead_of_config_json_are_refused(folder):
    with pytest.raises(CheckpointNotFoundError, match="is a file; give the folder"):
        Checkpoint.open(str(folder / "model.safetensors"))
    (folder / "config.json").unlink()
    (folder / "config.json").mkdir()
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read"):
        Checkpoint.open(str(folder))


def test_a_model_that_was_downloaded_in_part_names_the_variable_that_keeps_the_rest_away(folder, monkeypatch):
    """As after `nanoinfer inspect`. A repository that has only pickles is another matter."""
    (folder / "model.safetensors").unlink()
    monkeypatch.setattr(hub, "snapshot_download", lambda name, **_: str(folder))
    with pytest.raises(CheckpointNotFoundError, match=r"HF_HUB_OFFLINE=1 is set, .*only a part of it; .*unset HF_HUB_OFFLINE"):
        Checkpoint.open("owner/name")
    assert locate("owner/name", with_weights=False) == folder
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(CheckpointNotFoundError, match=r"from_pretrained\('owner/name'\)"):  # of pickles nothing is downloaded
        Checkpoint.open("owner/name")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    (folder / "pytorch_model.bin").touch()
    with pytest.raises(CheckpointNotFoundError, match=r"reads safetensors only"):
        Checkpoint.open("owner/name")
