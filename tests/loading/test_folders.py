"""The folders that checkpoints are looked for in."""

from nanoinfer.loading.folders import BUNDLED, bundled_models, list_bundled, list_folder


def test_the_bundled_models_are_the_folders_with_a_config():
    assert {"tiny-gpt2", "tiny-qwen3"} <= set(bundled_models()) == {path.parent.name for path in BUNDLED.glob("*/config.json")}
    assert bundled_models() == sorted(bundled_models())
    assert list_bundled() == f"bundled are {', '.join(bundled_models())}"


def test_a_folder_that_is_none_has_no_files(tmp_path):
    (tmp_path / "a").touch()
    assert list_folder(tmp_path) == ["a"]
    assert list_folder(tmp_path / "a") == list_folder(tmp_path / "b") == []
    assert list_folder(type(tmp_path)("a\0b")) == []
