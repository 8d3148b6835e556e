"""`nanoinfer batch`: answer the requests of a file. The job can be interrupted at any time and goes on where it was."""

import asyncio
import math
import os
import secrets
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from tqdm import tqdm

from nanoinfer.cli.options import EngineOptions, MaxModelLen, check_packages, expand_options, load_llm, ray_resources
from nanoinfer.cli.serve import SERVER_PACKAGES, served_names
from nanoinfer.errors import InvalidValueError

if TYPE_CHECKING:
    from nanoinfer.llm import LLM
    from nanoinfer.server.app import ServerSettings
    from nanoinfer.server.ledger import Row


@expand_options
def batch(
    *,
    input_file: Annotated[
        Path, typer.Argument(metavar="INPUT", help="A JSONL file in OpenAI's batch format.", exists=True, dir_okay=False)
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="Where the results go, a JSONL file.", dir_okay=False)],
    engine: EngineOptions,
    max_model_len: MaxModelLen = None,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Most sequences that run at once.")] = 256,
    batch_invariant: Annotated[
        bool, typer.Option("--batch-invariant", help="Require that a row's answer does not depend on the others.")
    ] = False,
    seed: Annotated[
        int | None,
        typer.Option(min=0, max=2**64 - 1, help="The job's, from which a row gets its own. Default: drawn, and kept."),
    ] = None,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(help="Name that requests give as model; may be given several times. Default: the model's."),
    ] = None,
    retry_errors: Annotated[bool, typer.Option("--retry-errors", help="Answer the rows again that ended in an error.")] = False,
    ray: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Compute on a Ray cluster: host:port, auto, or local for this machine alone."),
    ] = None,
    replicas: Annotated[int, typer.Option(min=1, help="Engines, each in a process of its own. More than one need --ray.")] = 1,
) -> None:
    """Answer the requests of a file, as `nanoinfer serve` would.

    Results are appended to OUTPUT.partial as they end. The same command goes on after an interruption, a crash or a power
    failure. A row's seed comes from the job's seed and its custom_id, so the answers do not depend on the order.
    """
    check_packages("server", *SERVER_PACKAGES)
    if ray is not None:
        check_packages("ray", "ray", "pyarrow", "pandas")
    elif replicas > 1:
        raise InvalidValueError(f"--replicas {replicas} requires --ray; give --ray local for several engines on this machine")
    from nanoinfer.models.checkpoint import DEFAULT_MODEL, file_digests, locate
    from nanoinfer.server.app import ServerSettings
    from nanoinfer.server.ledger import Ledger, Manifest, check_rows, read_manifest, read_rows

    model = engine.model or DEFAULT_MODEL
    input_digest, num_rows = check_rows(input_file)
    begun = read_manifest(output)
    if seed is None:
        seed = secrets.randbits(64) if begun is None else begun.seed
    manifest = Manifest(
        input_digest=input_digest,
        num_rows=num_rows,
        model=file_digests(locate(model, engine.revision)),
        options={
            "dtype": engine.dtype,
            "quantization": engine.quantization,
            "lora": engine.lora,
            "max_model_len": max_model_len,
        },
        seed=seed,
    )
    ledger = Ledger(output, manifest, retry_errors=retry_errors)
    if ledger.num_finished:
        print(f"{ledger.num_finished} of {num_rows} rows were finished before", file=sys.stderr)
    load = partial(
        load_llm,
        replace(engine, model=model),
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        batch_invariant=batch_invariant,
        seed=seed,
    )
    settings = ServerSettings(served_model_names=served_names(served_model_name, model))
    rows = (row for row in read_rows(input_file) if not ledger.is_finished(row.custom_id))
    num_left = num_rows - ledger.num_finished

    @contextmanager
    def writing() -> Iterator[Callable[[dict[str, Any]], None]]:
        """Append results to the ledger, and show how many there are."""
        with tqdm(total=num_rows, initial=ledger.num_finished, unit=" rows", disable=None) as bar:

            def write(result: dict[str, Any]) -> None:
                ledger.append(result)
                bar.update()

            yield write

    try:
        if ledger.is_complete:
            pass
        elif ray is None:
            asyncio.run(_answer(load, settings, rows, seed, writing()))
        else:
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Ray sends usage statistics by default
            from nanoinfer.server.ray_batch import answer_all_on_ray, connected

            with connected(ray, num_cpus=replicas * (engine.threads or 1)), writing() as write:
                answer_all_on_ray(
                    rows,
                    load,
                    settings,
                    seed=seed,
                    num_replicas=replicas,
                    batch_size=min(max_num_seqs, math.ceil(num_left / (4 * replicas))),
                    resources=ray_resources(engine),
                    write=write,
                )
    except KeyboardInterrupt:
        print(f"{ledger.num_finished} of {num_rows} rows are finished; the same command goes on", file=sys.stderr)
        raise
    finally:
        ledger.close()
    print(f"{output}: {num_rows} rows, {ledger.num_errors} of them errors", file=sys.stderr)


async def _answer(
    load: Callable[[], "LLM"],
    settings: "ServerSettings",
    rows: Iterator["Row"],
    seed: int,
    writing: AbstractContextManager[Callable[[dict[str, Any]], None]],
) -> None:
    from nanoinfer.async_llm import AsyncLLM
    from nanoinfer.server.app import create_app
    from nanoinfer.server.batch import answer_all
    from nanoinfer.server.run import share_the_process

    async_llm = AsyncLLM(load, streaming=False)
    app = create_app(async_llm, settings)
    share_the_process()
    num_concurrent = 2 * async_llm.engine.scheduler.config.max_num_seqs  # so that rows always wait
    try:
        with writing as write:
            await answer_all(app, rows, seed=seed, num_concurrent=num_concurrent, write=write)
    finally:
        await async_llm.shutdown()
