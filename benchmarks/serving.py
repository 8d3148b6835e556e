"""Measure `nanoinfer serve` under some clients, interleaved with OpenVINO's pipeline behind a small server and LLM.generate.

In: a checkpoint with or without a tokenizer, numbers of clients, OpenVINO's Python. Out: output tokens per second, and ratios.
All requests have 64 tokens in and 64 out, greedy. `LLM.generate` runs as many requests at a time as there are clients.
"""

import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import torch
import typer
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from benchmarks import program
from benchmarks.baselines.worker import Setup
from nanoinfer.errors import NanoinferError
from nanoinfer.fast.cpu.native import cache_folder
from nanoinfer.loading.checkpoint import Checkpoint
from nanoinfer_lab.bench.client import Client
from nanoinfer_lab.bench.offline import load, run_workload
from nanoinfer_lab.bench.serve import Target, run
from nanoinfer_lab.bench.workloads import Workload

LENGTH = 64  # tokens in, and out
ROUNDS = 4  # requests of each client in a run


def main(
    model: Annotated[str, typer.Argument(help="A folder, or the name of a bundled model.")],
    openvino: Annotated[str | None, typer.Option(help="The Python that has openvino-genai. Without it ours is alone.")] = None,
    clients: Annotated[str, typer.Option(help="Numbers of clients, with commas between them.")] = "8,32",
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    repeats: Annotated[int, typer.Option(min=1, help="Measured runs.")] = 5,
) -> None:
    """Measure the server under some clients, in turns with OpenVINO's pipeline and with LLM.generate."""
    numbers = [int(number) for number in clients.split(",")]
    most = max(numbers)
    workloads = {n: Workload(name=f"{n}", input_lens=(LENGTH,) * n, output_lens=(LENGTH,) * n) for n in numbers}
    with ExitStack() as stack:
        folder = stack.enter_context(_with_tokenizer(Checkpoint.open(model, None).path))
        llm = load(str(folder), [workloads[most]], dtype=dtype, device="cpu")
        options = ["--dtype", dtype, "--device", "cpu", "--max-num-seqs", str(most), "--no-enable-prefix-caching"]
        ours = ["-m", "nanoinfer", "serve", str(folder), *options, "--port"]
        servers = {"server": stack.enter_context(_server([sys.executable, *ours], ()))}
        if openvino is not None:
            cache = cache_folder() / "baselines" / f"serving-{folder.name}"
            cache.mkdir(parents=True, exist_ok=True)
            setup = Setup(
                model=str(folder), cache=str(cache), dtype=dtype, device="cpu", num_threads=torch.get_num_threads(),
                max_model_len=2 * LENGTH, max_num_seqs=most, num_cache_tokens=2 * LENGTH * most,
            )  # fmt: skip
            path = Path(__file__).parent / "baselines" / "openvino_server.py"
            servers["openvino"] = stack.enter_context(_server([openvino, str(path)], (json.dumps(asdict(setup)),)))
        for number, workload in workloads.items():
            speeds: dict[str, list[float]] = {}
            for index in range(repeats + 1):
                found = {name: _speed(client, number) for name, client in servers.items()}
                start = time.perf_counter()
                for part in range(ROUNDS):
                    run_workload(llm, workload, index * ROUNDS + part)
                found["offline"] = ROUNDS * number * LENGTH / (time.perf_counter() - start)
                for name, speed in found.items():
                    speeds.setdefault(name, []).extend([speed] if index else [])  # the first run warms up
            medians = {name: statistics.median(values) for name, values in speeds.items()}
            ratios = {f"to {name}": round(medians["server"] / speed, 3) for name, speed in medians.items() if name != "server"}
            print(
                json.dumps({"clients": number, **{name: round(speed) for name, speed in medians.items()}, **ratios}), flush=True
            )


def _speed(client: Client, number: int) -> float:
    """Return the output tokens per second of a server under some clients that send one request after the other."""
    num_requests = ROUNDS * number
    workload = Workload(name="serving", input_lens=(LENGTH,) * num_requests, output_lens=(LENGTH,) * num_requests)
    figures = run(Target(client=client, model=client.first_model(), max_concurrency=number), workload, {}).figures
    if figures.num_failed:
        raise NanoinferError(f"{client.url} failed: {figures.failures}")
    return figures.output_tokens_per_s


@contextmanager
def _with_tokenizer(checkpoint: Path) -> Iterator[Path]:
    """Yield the checkpoint's folder, or one like it with a tokenizer of a word for each id, if it has none."""
    if (checkpoint / "tokenizer.json").exists():
        yield checkpoint
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary, checkpoint.name)
        folder.mkdir()
        for path in checkpoint.iterdir():
            (folder / path.name).symlink_to(path.resolve())
        vocabulary = {f"w{i} ": i for i in range(json.loads((folder / "config.json").read_text())["vocab_size"])}
        Tokenizer(WordLevel(vocabulary, unk_token="w0 ")).save(str(folder / "tokenizer.json"))
        yield folder


@contextmanager
def _server(command: list[str], arguments: tuple[str, ...]) -> Iterator[Client]:
    """Start a server with a free port after the command, and yield its client."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    process = subprocess.Popen([*command, str(port), *arguments], stdout=subprocess.DEVNULL, env=environment)
    client = Client(f"http://127.0.0.1:{port}")
    try:
        while True:
            try:
                client.first_model()
                break
            except NanoinferError:
                if process.poll() is not None:
                    raise NanoinferError(f"{command[0]} has ended with {process.returncode}") from None
                time.sleep(0.2)
        yield client
    finally:
        process.terminate()
        process.wait()


app = program(main)

if __name__ == "__main__":
    app()
