"""What clients send besides plain HTTP/1.1: wishes for HTTP/2, HTTP/1.0, long URLs, and bodies that are no JSON in UTF-8."""

import gzip
import json
import logging
import socket

import pytest

COMPLETIONS = "/v1/completions"
BODY = json.dumps({"prompt": "Hello", "max_tokens": 2, "seed": 1}).encode()
STREAMED = json.dumps({"prompt": "Hello", "max_tokens": 2, "seed": 1, "stream": True}).encode()
H2C = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA\r\n"


def exchange(server, pieces):
    """Send the pieces in packets of their own, and return all that the server answers until it closes the connection."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=600) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for piece in pieces:
            connection.sendall(piece)
        return b"".join(iter(lambda: connection.recv(2**16), b""))


def post(body, *headers, version=b"1.1"):
    head = [b"POST /v1/completions HTTP/%b" % version, b"Host: x", b"Content-Type: application/json", *headers]
    return b"\r\n".join([*head, b"Content-Length: %d" % len(body), b"", body])


@pytest.mark.parametrize("num_pieces", [1, 40])
def test_a_wish_for_http_2_is_ignored_and_the_body_is_read(server, num_pieces):
    request = post(BODY, H2C[:-2].replace(b"Upgrade, ", b"close, Upgrade, "))
    size = -(-len(request) // num_pieces)
    answer = exchange(server, [request[i : i + size] for i in range(0, len(request), size)])
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert json.loads(body)["usage"]["completion_tokens"] == 2


def test_a_chunked_body_and_further_requests_follow_a_wish_for_http_2(server):
    chunked = post(BODY, H2C[:-2]).replace(
        b"Content-Length: %d\r\n\r\n%b" % (len(BODY), BODY),
        b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY),
    )
    answer = exchange(server, [chunked + post(BODY, H2C[:-2]) + post(BODY, b"Connection: close")])
    assert answer.count(b"HTTP/1.1 200 OK\r\n") == answer.count(b'"completion_tokens":2') == 3


def test_a_wish_for_a_websocket_is_ignored_and_many_in_one_packet_are_answered_one_by_one(server):
    head = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, close\r\nUpgrade: websocket\r\n\r\n"
    assert exchange(server, [head]).startswith(b"HTTP/1.1 200 OK\r\n")
    one = b"GET /ping HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n"
    assert exchange(server, [one * 300 + one.replace(b"Upgrade\r\n", b"Upgrade, close\r\n")]).count(b" 200 OK\r\n") == 301


def test_a_stream_for_http_1_0_has_no_chunks_and_ends_with_the_connection(server):
    head, _, body = exchange(server, [post(STREAMED, version=b"1.0")]).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head.lower()
    assert body.startswith(b"data: {")
    assert body.endswith(b"data: [DONE]\n\n")
    events = [json.loads(line.removeprefix(b"data: ")) for line in body.split(b"\n\n")[:-2]]
    whole = server.post(COMPLETIONS, json.loads(BODY)).json()
    assert "".join(event["choices"][0]["text"] for event in events) == whole["choices"][0]["text"]


def test_a_whole_answer_for_http_1_0_has_its_length_and_one_to_head_no_body(server):
    head, _, body = exchange(server, [post(BODY, version=b"1.0")]).partition(b"\r\n\r\n")
    assert f"content-length: {len(body)}\r\n".encode() in head.lower() + b"\r\n"
    answer = exchange(server, [b"HEAD /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"])
    assert (answer.startswith(b"HTTP/1.1 200 OK\r\n"), answer.endswith(b"\r\n\r\n")) == (True, True)


def test_a_long_url_is_414_and_not_logged(server, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("uvicorn.access"), "propagate", True)
    for url in ("/" + "a" * 20_000, "/health?" + "b" * 20_000, "/" + "%20" * 3000):
        with caplog.at_level(logging.INFO, logger="uvicorn.access"):
            response = server.get(url)
        assert response.status_code == 414
        error = {"message": "the URL has more than 8192 bytes; shorten it", "type": "invalid_request_error"}
        assert response.json()["error"] == error | {"param": None, "code": None}
    lines = [record.getMessage() for record in caplog.records if record.name == "uvicorn.access"]
    assert len(lines) >= 3
    assert max(map(len, lines)) < 500


@pytest.mark.parametrize("path", [COMPLETIONS, "/tokenize"])
def test_a_body_that_is_no_json_object_in_utf_8_is_refused_by_what_it_is(server, path):
    text = json.dumps({"prompt": "Hello"} | ({"max_tokens": 1} if path == COMPLETIONS else {}))

    def answer(content, **headers):
        return server.post(path, content=content, headers={"Content-Type": "application/json"} | headers)

    for content, words in [
        (b"", "the body must be a JSON object in UTF-8, got nothing"),
        (b" \r\n", "got nothing"),
        (iter([b""]), "got nothing"),  # chunked
        (text.encode("utf-16"), "got UTF-16 or UTF-32"),
        (text.encode("utf-16-be"), "got UTF-16 or UTF-32"),
        (text.encode("utf-32"), "got UTF-16 or UTF-32"),
        (f"[{text}]".encode(), f"the body must be one JSON object, got [{text}"[:90]),
        (b"null", "the body must be one JSON object, got null"),
        (b'"x"', 'got "x"'),
        (gzip.compress(text.encode()), "got gzip"),
    ]:
        refused = answer(content)
        assert (refused.status_code, words in refused.json()["error"]["message"]) == (400, True), refused.text
    refused = answer(gzip.compress(text.encode()), **{"Content-Encoding": "gzip"})
    assert (refused.status_code, "Content-Encoding: gzip is not read" in refused.json()["error"]["message"]) == (415, True)
    for accepted in (answer(text.encode("utf-8-sig")), answer(text.encode(), **{"Content-Encoding": "utf-8"})):
        assert accepted.status_code == 200
