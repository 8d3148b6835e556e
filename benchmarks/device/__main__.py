"""The command: which parts run, for how long, against which tree, and where their results go."""

import json
import os
import sys
import tempfile
import time
from contextlib import ExitStack
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import torch
import typer

from benchmarks import program
from benchmarks.device.checks import machine
from benchmarks.device.parts import PARTS, Setup
from benchmarks.device.processes import OTHER, ROOT, THIS, Line, run_parts
from benchmarks.device.table import block_of
from nanoinfer.cli.options import check_writable
from nanoinfer.errors import InvalidValueError
from nanoinfer.loading.checkpoint import locate
from nanoinfer_lab.bench.random_models import write_checkpoint

RANDOM_MODEL = "qwen3-0.6b"
TINY_MODEL = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 1}  # each program is interpreted


def main(
    *,
    seconds: Annotated[float, typer.Option(help="The time of all parts together.", min=1.0)] = 560.0,
    parts: Annotated[str | None, typer.Option(help="Only these parts, with commas, such as tests,steps.")] = None,
    output: Annotated[Path | None, typer.Option(help="A file that gets each JSON line at once.")] = None,
    block: Annotated[Path | None, typer.Option(help="A file to which the table is added, such as BENCHMARKS.md.")] = None,
    against: Annotated[
        Path | None, typer.Option(help="Another tree of the project, measured interleaved with this one.")
    ] = None,
    nano_vllm: Annotated[
        Path | None, typer.Option(help="nano-vllm's folder, to measure it interleaved with this engine.")
    ] = None,
    model: Annotated[str | None, typer.Option(help=f"A checkpoint's folder. Default: {RANDOM_MODEL}, random weights.")] = None,
    simulate: Annotated[bool, typer.Option(help="Try the parts without a GPU: tiny shapes on a simulated device.")] = False,
) -> None:
    """Test and measure a GPU: parts in the order of their worth, a JSON line for each result, a table at the end."""
    start, device = time.monotonic(), "sim" if simulate else "cuda" if torch.cuda.is_available() else ""
    if block is not None and device != "cuda":
        raise InvalidValueError(f"a block for {block} needs a CUDA device, and this run has none; leave the block out")
    for name, folder, needed in (("against", against, "nanoinfer"), ("nano_vllm", nano_vllm, "nanovllm")):
        if folder is not None and not (folder / needed).is_dir():
            raise InvalidValueError(f"{name} must be a folder with {needed}/ in it, got {str(folder)!r}; give a checkout")
    for path in filter(None, (block, output)):
        check_writable(path)
    if model is not None:
        model = str(locate(model).resolve())  # the parts run in another folder
    if simulate and find_spec("triton") is None:
        raise InvalidValueError("simulate needs Triton and the other packages of the tests; run: make test, or leave it out")
    names, lines = _names(parts, nano_vllm is not None), list[Line]()
    with ExitStack() as stack:
        files = [sys.stdout] if output is None else [sys.stdout, stack.enter_context(output.open("w", encoding="utf-8"))]

        def emit(line: Line) -> None:
            lines.append(line)
            for file in files:
                print(json.dumps(line), file=file, flush=True)

        emit({"part": "machine", "tree": THIS} | machine(simulate))
        if model is None and device:
            model = stack.enter_context(tempfile.TemporaryDirectory())
            if simulate:
                import_module("tests.helpers.tiny_models").save("qwen3", Path(model), **TINY_MODEL)
            else:
                write_checkpoint(RANDOM_MODEL, Path(model))
        trees = {THIS: ROOT} if against is None else {THIS: ROOT, OTHER: against.resolve()}
        left = seconds - (time.monotonic() - start)
        run_parts(names, Setup(device, model or ""), trees, _environment(simulate, nano_vllm), left, emit)
    print(block_of(lines))
    if block is not None:
        with block.open("a", encoding="utf-8") as page:
            page.write(f"\n{block_of(lines)}")
    wrong = ("failed", "stopped")
    sys.exit(int(any(line.get("passed") is False or line.get("state", "").startswith(wrong) for line in lines)))


def _names(parts: str | None, has_nano_vllm: bool) -> list[str]:
    """Return the names of the parts to run. Raises: InvalidValueError for an unknown one."""
    known = [part.name for part in PARTS if has_nano_vllm or part.name != "nano-vllm"]
    names = known if parts is None else parts.split(",")
    for name in names:
        if name not in known:
            further = "" if has_nano_vllm else ", and with nano_vllm=FOLDER nano-vllm"
            raise InvalidValueError(
                f"parts must be some of {', '.join(known)}{further}, with commas between them, got {name!r}"
            )
    return names


def _environment(simulate: bool, nano_vllm: Path | None) -> dict[str, str]:
    """Return the environment of the parts' processes."""
    added = {"TRITON_INTERPRET": "1", "TRITON_DEFAULT_FP_FUSION": "1", "CUDA_VISIBLE_DEVICES": ""} if simulate else {}
    if nano_vllm is not None:
        added["PYTHONPATH"] = os.pathsep.join(filter(None, [str(nano_vllm.resolve()), os.environ.get("PYTHONPATH")]))
    return os.environ | added


app = program(main)
if __name__ == "__main__":
    app()
