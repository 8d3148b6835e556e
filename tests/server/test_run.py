"""What `nanoinfer serve` prints, and sets for the whole process: the switch interval, what garbage collection leaves out."""

import json

import pytest

from tests.helpers import forked

pytestmark = pytest.mark.slow

# Each entry: the switch interval in units of Python's default, whether objects are exempt from garbage collection, and whether
# one of the engine is. gc.get_objects() has those that a collection would examine. The process may have imported the package
# before the script begins, so nothing is compared with its start.
SCRIPT = """
import asyncio, gc, json, os, signal, sys, threading, urllib.request

seen = {}

def observe(name, engine=None):
    is_exempt = engine is not None and not any(one is engine.scheduler for one in gc.get_objects())
    seen[name] = (sys.getswitchinterval() / 0.005, gc.get_freeze_count() > 0, is_exempt)

from nanoinfer import AsyncLLM, SamplingParams
from nanoinfer.cli.main import app
from nanoinfer.server.run import Server
import nanoinfer.cli.serve

observe("importing")
params, load = SamplingParams(max_tokens=2), {"kv_cache_memory": 2**22}

async def generate():
    async with AsyncLLM("tiny-qwen3", **load) as async_llm:
        async for _ in async_llm.generate("Hello", params):
            observe("AsyncLLM", async_llm.engine)

asyncio.run(generate())
startup = Server.startup

async def observed_startup(self, sockets):
    await startup(self, sockets)

    def post():
        url = f"http://127.0.0.1:{sockets[0].getsockname()[1]}/v1/completions"
        body = json.dumps({"prompt": "Hello", "max_tokens": 2}).encode()
        urllib.request.urlopen(urllib.request.Request(url, body, {"Content-Type": "application/json"}), timeout=60).close()
        observe("serve", self._async_llm.engine)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=post).start()

Server.startup = observed_startup
try:
    app(["serve", "tiny-qwen3", "--port", "0", "--kv-cache-memory", "4MiB"])
except (SystemExit, KeyboardInterrupt):
    pass
print(json.dumps(seen))
"""


def test_a_server_switches_threads_ten_times_as_often_and_exempts_what_was_loaded_and_nothing_else_does(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT, encoding="utf-8")
    ended = forked.run_script(tmp_path / "script.py", cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    banner = [line.removeprefix("INFO:     ") for line in ended.stderr.splitlines()]
    assert banner[0].startswith("tiny-qwen3: float32 on cpu, ")
    assert banner[1].startswith("running on http://127.0.0.1:")
    assert banner[2].startswith("requests without a seed draw theirs from --seed ")
    assert banner[3] == "Shutting down"  # uvicorn says nothing before
    seen = json.loads(ended.stdout.splitlines()[-1])
    unchanged = [pytest.approx(1), False, False]
    assert seen == {"importing": unchanged, "AsyncLLM": unchanged, "serve": [pytest.approx(0.1), True, True]}
