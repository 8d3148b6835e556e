"""A port is bound before a model is loaded, and only this server's names are answered."""

import shutil
import signal
import socket
import subprocess

import httpx2
import pytest
from typer.testing import CliRunner

from nanoinfer.cli import serve
from nanoinfer.cli.main import app
from nanoinfer.errors import InvalidValueError, NanoinferError
from nanoinfer.server import run
from nanoinfer.server.listen import bind, bind_uds, host_names, is_allowed, read_certificate, url_of
from nanoinfer.server.settings import ServerSettings
from tests.helpers import http_server


@pytest.fixture
def used_port():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening.getsockname()[1]


def test_a_port_in_use_is_one_sentence_before_a_model_is_loaded(used_port, monkeypatch):
    monkeypatch.setattr(serve, "load_server_llm", lambda *arguments: pytest.fail("a model is loaded"))
    before = signal.getsignal(signal.SIGTERM)
    result = CliRunner().invoke(app, ["serve", "--port", str(used_port)])
    assert signal.getsignal(signal.SIGTERM) is before
    assert result.exit_code == 1
    assert f"port {used_port} is in use; stop the other server, or choose another --port" in result.output
    assert result.output.count("\n") == 1


def test_a_host_that_is_not_this_machine_is_refused():
    for host in ("192.0.2.1", "no-such-host.invalid", "x" * 100):
        with pytest.raises(InvalidValueError, match=r"--host .* (not known|not an address of this machine)"):
            bind(host, 0)


def test_every_address_of_a_host_is_bound_and_none_listens_yet():
    sockets = bind("localhost", 0)
    addresses = {one.getsockname()[0] for one in sockets}
    assert "127.0.0.1" in addresses
    for one in sockets:
        with socket.socket(one.family) as client:
            assert client.connect_ex(one.getsockname()) != 0
        one.close()


@pytest.fixture
def path(tmp_path_factory):
    """Of a Unix socket, which has at most 107 characters."""
    return str(tmp_path_factory.mktemp("uds") / "socket")


def test_a_path_is_bound_unless_a_server_or_a_file_is_there(path, tmp_path):
    with bind_uds(path) as first:
        first.listen()
        with pytest.raises(NanoinferError, match=r"--uds .*socket' cannot be used \(Address already in use\); choose another"):
            bind_uds(path)
        assert url_of(first, is_https=False) == f"unix:{path}"
    bind_uds(path).close()  # the first server was killed, and has left its socket
    file = tmp_path / "file"
    file.write_text("of somebody")
    for wrong in (str(file), str(tmp_path / "nowhere" / "socket"), "x" * 200):
        with pytest.raises(NanoinferError, match="cannot be used"):
            bind_uds(wrong)
    assert file.read_text() == "of somebody"


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """The files of a certificate and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    folder = tmp_path_factory.mktemp("certificate")
    files = [str(folder / "certificate.pem"), str(folder / "key.pem")]
    options = "-x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj /CN=localhost".split()
    subprocess.run(["openssl", "req", *options, "-out", files[0], "-keyout", files[1]], check=True, capture_output=True)
    return files


def test_requests_come_over_https_and_a_unix_socket(path, certificate):
    context = read_certificate(*certificate)
    with http_server.serving(bound=bind_uds(path), ssl_context=context) as served:
        transport = httpx2.HTTPTransport(uds=path, verify=False)
        with httpx2.Client(transport=transport, base_url="https://localhost") as client:
            assert client.get("/health").status_code == 200
            answer = client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1})
            assert answer.json()["usage"]["completion_tokens"] == 1
        assert served.num_unfinished() == 0


def test_a_certificate_that_cannot_be_used_is_one_sentence(certificate, tmp_path):
    (tmp_path / "other").write_text("no certificate")
    assert read_certificate(None, None) is None
    for files, message in (
        ((None, certificate[1]), "--ssl-keyfile .* needs --ssl-certfile"),
        ((certificate[0], None), "--ssl-certfile .* cannot be used"),
        ((str(tmp_path / "nowhere"), None), "No such file"),
        ((str(tmp_path / "other"), certificate[1]), "give a certificate and its key as PEM files"),
    ):
        with pytest.raises(InvalidValueError, match=message):
            read_certificate(*files)


def test_the_options_reach_the_server_and_nothing_is_left(path, certificate, monkeypatch):
    seen = []

    class Seen:
        def __init__(self, async_llm, settings, *, shutdown_timeout, ssl_context):
            seen.append((settings.root_path, ssl_context is not None))

        def run(self, bound):
            seen.append(url_of(*bound, is_https=False))

    monkeypatch.setattr(run, "Server", Seen)
    monkeypatch.setattr(serve, "load_server_llm", lambda engine, options: (seen.append("loaded"), options))
    monkeypatch.setattr(run, "share_the_process", lambda: seen.append("shared"))
    before = signal.getsignal(signal.SIGTERM)
    files = ["--ssl-certfile", certificate[0], "--ssl-keyfile", certificate[1]]
    for _ in range(2):  # the path is free again
        result = CliRunner().invoke(app, ["serve", "--uds", path, "--root-path", "/llm", *files])
        assert result.exit_code == 0, result.output
        assert "warning" not in result.output
    assert seen == ["loaded", ("/llm", True), "shared", f"unix:{path}"] * 2
    assert signal.getsignal(signal.SIGTERM) is before
    for wrong, message in (
        (["--uds", path, "--port", "80"], "takes the place of --host 127.0.0.1 and --port 80"),
        (["--root-path", "llm/"], "--root-path must begin with /"),
    ):
        result = CliRunner().invoke(app, ["serve", *wrong])
        assert result.exit_code == 1
        assert message in " ".join(result.output.split())


def test_a_host_header_has_an_address_or_a_name_of_the_server():
    allowed = "localhost:8000 127.0.0.1 [::1]:8000 192.168.0.7:80 Served.Example.:8000 gpu.example:8000".split()
    refused = "evil.example localhost.evil.example:8000 127.0.0.1.evil.example".split()
    names = host_names("served.example", ["GPU.example"])
    assert [header for header in allowed + refused if is_allowed(header, names)] == allowed
    assert not is_allowed("gpu.example", host_names("served.example", []))
    assert is_allowed("anything", host_names("served.example", ["*"]))


@pytest.mark.slow
def test_another_host_gets_403_on_every_path():
    with http_server.serving(allowed_hosts=("localhost",)) as server:
        for host, status in (("evil.example", 403), (f"localhost:{server.port}", 200)):
            headers = {"Host": host}
            responses = [server.get(path, headers=headers) for path in ("/", "/health", "/v1/models")]
            responses.append(server.post("/tokenize", {"prompt": "x"}, headers=headers))
            assert {response.status_code for response in responses} == {status}
        assert "serve with --allowed-hosts evil.example" in server.get("/", headers={"Host": "evil.example"}).text


def test_the_banner_names_model_dtype_context_cache_and_page(server):
    lines = run.banner(server.async_llm, ServerSettings(served_model_name=("tiny",)), "http://127.0.0.1:80").splitlines()
    assert lines[0].startswith("tiny: float32 on cpu, context 512 tokens, KV cache ")
    assert lines[0].endswith(" 256 sequences at a time")
    assert lines[1] == "running on http://127.0.0.1:80 (OpenAI's API at /v1, a web page at /); Ctrl-C ends it"
    assert lines[2:] == ["requests without a seed draw theirs from --seed 0"]
