"""The smallest server that streams answers of OpenVINO GenAI, for serving.py: `python openvino_server.py PORT SETUP`.

A thread adds the requests that have arrived and makes a step of the ContinuousBatchingPipeline. All tokens of a step reach the
event loop in one call, as ours do. A token's text is that of its id alone, so nothing is held back and no stop string is looked
for. SETUP is the JSON of worker.Setup. The prompt of a request is a list of token ids.
"""

import asyncio
import json
import sys
import threading
from importlib import import_module
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import numpy as np
import openvino
import openvino_genai as genai
from tokenizers import Tokenizer

if TYPE_CHECKING:
    from benchmarks.baselines.worker import Setup

Request = tuple[dict[str, Any], "asyncio.Queue[list[int] | None]"]


class Server:
    def __init__(self, setup: "Setup") -> None:
        self._pipeline = import_module("openvino_engine").Engine(setup)._pipeline
        self._text = Tokenizer.from_file(str(Path(setup.model, "tokenizer.json")))
        self._arrived: SimpleQueue[Request] = SimpleQueue()

    async def run(self, port: int) -> None:
        self._loop = asyncio.get_running_loop()
        threading.Thread(target=self._step_for_ever, daemon=True).start()
        server = await asyncio.start_server(self._answer, "127.0.0.1", port)
        print(f"ready: {genai.__version__}", flush=True)
        await server.serve_forever()

    def _step_for_ever(self) -> None:
        running: dict[int, tuple[Any, asyncio.Queue[list[int] | None]]] = {}
        number = 0
        while True:
            while not running or not self._arrived.empty():
                body, tokens = self._arrived.get()
                prompt = openvino.Tensor(np.array([body["prompt"]], dtype=np.int64))
                running[number] = self._pipeline.add_request(number, prompt, _config(body)), tokens
                number += 1
            self._pipeline.step()
            new: list[tuple[asyncio.Queue[list[int] | None], list[int] | None]] = []
            for index, (handle, tokens) in [*running.items()]:
                if handle.can_read():
                    new += [(tokens, output.generated_ids) for output in handle.read().values()]
                if handle.get_status() != genai.GenerationStatus.RUNNING:
                    new.append((tokens, None))
                    del running[index]
            self._loop.call_soon_threadsafe(_deliver, new)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        kind = "application/json" if head.startswith("get") else "text/event-stream"
        writer.write(f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nConnection: close\r\n\r\n".encode())
        if head.startswith("get"):
            writer.write(b'{"data": [{"id": "openvino"}]}')
        else:
            length = int(head.split("content-length:")[1].split("\r\n")[0])
            await self._stream(json.loads(await reader.readexactly(length)), writer)
        await writer.drain()
        writer.close()

    async def _stream(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        tokens: asyncio.Queue[list[int] | None] = asyncio.Queue()
        self._arrived.put((body, tokens))
        num_tokens, chunk = 0, {"id": "cmpl-0", "object": "text_completion", "created": 0, "model": "openvino"}
        while (ids := await tokens.get()) is not None:
            num_tokens += len(ids)
            _send(writer, chunk | {"choices": [{"index": 0, "text": self._text.decode(ids), "finish_reason": None}]})
        _send(writer, chunk | {"choices": [{"index": 0, "text": "", "finish_reason": "length"}]})
        num_prompt = len(body["prompt"])
        usage = {"prompt_tokens": num_prompt, "completion_tokens": num_tokens, "total_tokens": num_prompt + num_tokens}
        _send(writer, chunk | {"choices": [], "usage": usage})
        writer.write(b"data: [DONE]\n\n")


def _config(body: dict[str, Any]) -> genai.GenerationConfig:
    config = genai.GenerationConfig()
    config.max_new_tokens = config.min_new_tokens = body["max_tokens"]
    config.ignore_eos = True
    return config


def _deliver(new: list[tuple["asyncio.Queue[list[int] | None]", list[int] | None]]) -> None:
    for tokens, ids in new:
        tokens.put_nowait(ids)


def _send(writer: asyncio.StreamWriter, chunk: dict[str, Any]) -> None:
    writer.write(b"data: " + json.dumps(chunk, separators=(",", ":")).encode() + b"\n\n")


if __name__ == "__main__":
    worker = import_module("worker")  # of this folder, as in worker.py itself
    worker.end_with_parent()
    asyncio.run(Server(worker.Setup(**json.loads(sys.argv[2]))).run(int(sys.argv[1])))
