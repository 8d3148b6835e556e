"""What every test shares: no network, few threads, shape checks on, and tiny checkpoints to compare with transformers."""

import atexit
import faulthandler
import gc
import logging
import os
import shutil
import sys
import tempfile

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # Triton 3.9 warns where it is not set
if "NANOINFER_CACHE" not in os.environ:  # no verdict of an earlier run; xdist's processes share the first one's
    os.environ["NANOINFER_CACHE"] = tempfile.mkdtemp(prefix="nanoinfer-tests-")
    atexit.register(shutil.rmtree, os.environ["NANOINFER_CACHE"], ignore_errors=True)
os.environ["HF_HOME"] = os.path.join(os.environ["NANOINFER_CACHE"], "huggingface")  # no model of the user's
if not os.access(os.path.expanduser("~"), os.W_OK):  # Chromium, IPython and matplotlib need a home folder. no_home has none.
    os.environ["HOME"] = tempfile.mkdtemp(prefix="home-", dir=os.environ["NANOINFER_CACHE"])
if not os.access(".", os.W_OK):  # hypothesis keeps what failed in the checkout
    os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = os.path.join(os.environ["NANOINFER_CACHE"], "hypothesis")
os.environ["OMP_WAIT_POLICY"] = "passive"  # a thread that waits leaves the core to the other test process

import pytest
from hypothesis import HealthCheck, settings

from tests.helpers.prepared import prepare

# A busy machine is no failure.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")


def pytest_configure(config):
    """Prepare a process that runs tests. The one that only starts such processes (-n) imports no torch."""
    if getattr(config.option, "numprocesses", None):
        return
    gc.disable()  # until all tests are imported, which makes objects that stay, and to search them takes a fifth of its time
    assert prepare.cache_info().currsize or "nanoinfer" not in sys.modules, "a conftest.py imports nanoinfer before prepare()"
    prepare()


def pytest_runtest_setup():
    if shape_checks := sys.modules.get("tests.helpers.shape_checks"):
        shape_checks.start_test()


PATIENCE_MS = 600_000  # of a browser, whose own is 30 s

collect_ignore = ["real"]  # `make test-real` names the folder, which is then collected


def pytest_collection_modifyitems(config, items):
    """Leave the tests marked long out unless -m names them. An -m in addopts would be replaced by that of the command."""
    if "long" not in config.option.markexpr:
        left_out = [item for item in items if item.get_closest_marker("long")]
        items[:] = [item for item in items if not item.get_closest_marker("long")]
        config.hook.pytest_deselected(items=left_out)


def pytest_collection_finish():
    """Exempt what was imported from garbage collection, each of which would examine torch and every test for 0.2 s of CPU."""
    gc.collect()
    gc.freeze()
    gc.enable()
    atexit.register(gc.unfreeze)  # libraries check at exit that what they made was freed


def pytest_runtest_call(item):
    """Lift the limit of faulthandler_timeout for tests that take minutes."""
    if item.get_closest_marker("long"):
        faulthandler.cancel_dump_traceback_later()


def pytest_runtest_teardown():
    """A command sets the level of its process's loggers (cli/main.py), which is a test's process here."""
    for name in ("nanoinfer", "nanoinfer.fast.cpu.native"):
        logging.getLogger(name).setLevel(logging.NOTSET)


@pytest.fixture
def no_home(tmp_path, monkeypatch):
    """As in a container whose user is only a number: no HOME, and the system does not know the user. In an empty folder."""
    pwd = pytest.importorskip("pwd", reason="Windows has no such users")
    for name in ("HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME", "NANOINFER_CACHE", "HF_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def kernels():
    """Skip where the C++ kernels cannot be compiled."""
    import torch

    from nanoinfer.errors import UnsupportedError
    from nanoinfer.fast.cpu.attention import KernelBackend

    try:
        KernelBackend(torch.float32, num_heads=4, num_kv_heads=2, head_dim=16)
    except UnsupportedError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def gpt2_path(tmp_path_factory):
    from tests.helpers import tiny_models

    return tiny_models.save("gpt2", tmp_path_factory.mktemp("gpt2"))


@pytest.fixture(scope="session")
def qwen3_path(tmp_path_factory):
    from tests.helpers import tiny_models

    return tiny_models.save("qwen3", tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="session")
def tools_path(tmp_path_factory):
    from tests.helpers import tool_cases

    return tool_cases.save_checkpoint(tmp_path_factory.mktemp("tools"))


@pytest.fixture(scope="session")
def reranker_path(tmp_path_factory):
    from tests.helpers import pooling_cases

    return pooling_cases.save_reranker(tmp_path_factory.mktemp("reranker"))


@pytest.fixture(scope="session")
def embedding_path(reranker_path, tmp_path_factory):
    from tests.helpers import pooling_cases

    return pooling_cases.save_embedding(reranker_path, tmp_path_factory.mktemp("embedding") / "model")


def patient(make):
    """Return a function that makes a context or a page as `make` does, which waits PATIENCE_MS for what is asked for."""

    def make_patient(**options):
        made = make(**options)
        made.set_default_timeout(PATIENCE_MS)
        return made

    return make_patient


@pytest.fixture(scope="module")
def browser():
    """A real browser, which runs until the file's tests have ended. Its event loop belongs to the thread that tests run in."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "microsoft-edge")
    on_path = [{"executable_path": path} for path in map(shutil.which, names) if path is not None]
    with sync_api.sync_playwright() as playwright:
        # Otherwise Chrome where its installer puts it, or Playwright's own browser.
        for where in on_path[:1] or [{"channel": "chrome"}, {}]:
            try:
                chromium = playwright.chromium.launch(args=["--no-sandbox"], timeout=PATIENCE_MS, **where)
            except sync_api.Error:
                if on_path:
                    raise
                continue
            chromium.new_context, chromium.new_page = map(patient, (chromium.new_context, chromium.new_page))
            yield chromium
            chromium.close()
            return
        pytest.skip("neither Chromium nor Chrome is on this machine")
