"""A port is bound before a model is loaded, and only this server's names are answered."""

import socket

import pytest
from typer.testing import CliRunner

from nanoinfer import AsyncLLM
from nanoinfer.cli import serve
from nanoinfer.cli.main import app
from nanoinfer.errors import InvalidValueError
from nanoinfer.server.listen import bind, host_names, is_allowed
from tests.helpers import http_server


@pytest.fixture
def used_port():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening.getsockname()[1]


def test_a_port_in_use_is_one_sentence_before_a_model_is_loaded(used_port, monkeypatch):
    monkeypatch.setattr(serve, "load_server_llm", lambda *arguments: pytest.fail("a model is loaded"))
    result = CliRunner().invoke(app, ["serve", "--port", str(used_port)])
    assert result.exit_code == 1
    assert f"port {used_port} is in use; stop the other server, or choose another --port" in result.output
    assert result.output.count("\n") == 1


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid", "x" * 100])
def test_a_host_that_is_not_this_machine_is_refused(host):
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


@pytest.mark.parametrize(
    ("header", "further", "expected"),
    [
        ("localhost:8000", [], True),
        ("127.0.0.1", [], True),
        ("[::1]:8000", [], True),
        ("192.168.0.7:80", [], True),
        ("Served.Example.:8000", [], True),
        ("evil.example", [], False),
        ("localhost.evil.example:8000", [], False),
        ("127.0.0.1.evil.example", [], False),
        ("gpu.example:8000", ["GPU.example"], True),
        ("anything", ["*"], True),
    ],
)
def test_a_host_header_has_an_address_or_a_name_of_the_server(header, further, expected):
    assert is_allowed(header, host_names("served.example", further)) == expected


@pytest.mark.slow
def test_another_host_gets_403_on_every_path(monkeypatch):
    with http_server.serving(lambda: AsyncLLM("tiny-qwen3", seed=0), allowed_hosts=("localhost",)) as server:
        for host, status in (("evil.example", 403), (f"localhost:{server.port}", 200)):
            headers = {"Host": host}
            responses = [server.get(path, headers=headers) for path in ("/", "/health", "/v1/models")]
            responses.append(server.post("/tokenize", {"prompt": "x"}, headers=headers))
            assert {response.status_code for response in responses} == {status}
        assert "serve with --allowed-hosts evil.example" in server.get("/", headers={"Host": "evil.example"}).text


def test_the_banner_names_model_dtype_context_cache_and_page(server, capfd):
    from nanoinfer.server.run import banner
    from nanoinfer.server.settings import ServerSettings

    lines = banner(server.async_llm, ServerSettings(served_model_name=("tiny",)), "0.0.0.0", 80).splitlines()
    assert lines[0].startswith("tiny: float32 on cpu, context 512 tokens, KV cache ")
    assert lines[0].endswith(" 256 sequences at a time")
    assert lines[1] == "running on http://127.0.0.1:80 (OpenAI's API at /v1, a web page at /); Ctrl-C ends it"
    assert lines[2:] == ["requests without a seed draw theirs from --seed 0"]
