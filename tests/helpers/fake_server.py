"""A server of scripted bytes, for what a real one does only when it fails."""

import json
import threading
import time
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace


def reply(status, body, kind="application/json"):
    """The bytes of a response that ends with the connection."""
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    return f"HTTP/1.0 {status} X\r\nContent-Type: {kind}\r\n\r\n".encode() + body


def event(value):
    return b"data: " + (value if isinstance(value, bytes) else json.dumps(value).encode()) + b"\n\n"


def chat_events(*deltas, num_tokens=None, finish_reason="stop", end=b"[DONE]"):
    """The events of a chat's stream: a delta is the content, or a dict. num_tokens: of the usage, or None for no usage."""
    deltas = [{"content": delta} if isinstance(delta, str) else delta for delta in deltas]
    events = [event({"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}) for delta in deltas]
    events.append(event({"choices": [{"index": 0, "delta": {}, "finish_reason": finish_reason}]}))
    if num_tokens is not None:
        usage = {"prompt_tokens": 3, "completion_tokens": num_tokens, "prompt_tokens_details": None}
        events.append(event({"choices": [], "usage": usage}))
    return [*events, event(end)]


def stream(*events):
    return reply(200, b"".join(events), "text/event-stream")


@contextmanager
def serving(*replies, models=("fake",)):
    """Answer posts with the replies, the last again and again. A reply is bytes, or a list of bytes, of seconds to wait
    and of functions to call.

    Yields: url; bodies and headers, of the posts; peak, the most posts that were answered at once.
    """
    seen = SimpleNamespace(bodies=[], headers=[], peak=0)
    lock, running, left = threading.Lock(), [], list(replies)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.wfile.write(reply(200, {"data": [{"id": name} for name in models]}))

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                seen.bodies.append(body)
                seen.headers.append(dict(self.headers))
                running.append(self)
                seen.peak = max(seen.peak, len(running))
                answer = left.pop(0) if len(left) > 1 else left[0]
            try:
                parts = [answer] if isinstance(answer, bytes) else answer
                for number, part in enumerate(parts, start=1):
                    if isinstance(parts, list) and number == len(parts):
                        running.remove(self)  # before the client can know that it is answered
                    if isinstance(part, bytes):
                        self.wfile.write(part)
                    elif callable(part):
                        part()
                    else:
                        time.sleep(part)
            except OSError:
                pass  # the client has closed its connection before the end
            finally:
                with suppress(ValueError):
                    running.remove(self)

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        seen.url = f"http://127.0.0.1:{server.server_port}"
        try:
            yield seen
        finally:
            server.shutdown()
            thread.join()
