"""`nanoinfer batch`: answer the requests of a file. The job can be interrupted at any time and goes on where it was."""

import asyncio
import secrets
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from tqdm import tqdm

from nanoinfer.cli.options import EngineOptions, MaxModelLen, expand_options, load_llm
from nanoinfer.cli.serve import check_server_packages, served_names

if TYPE_CHECKING:
    from nanoinfer.llm import LLM
    from nanoinfer.server.ledger import Ledger, Row


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
) -> None:
    """Answer the requests of a file, as `nanoinfer serve` would.

    Results are appended to OUTPUT.partial as they end. The same command goes on after an interruption, a crash or a power
    failure. A row's seed comes from the job's seed and its custom_id, so the answers do not depend on the order.
    """
    check_server_packages()
    from nanoinfer.models.checkpoint import DEFAULT_MODEL, file_digests, locate
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
    try:
        if not ledger.is_complete:
            rows = (row for row in read_rows(input_file) if not ledger.is_finished(row.custom_id))
            asyncio.run(_answer(load, served_names(served_model_name, model), rows, ledger, num_rows, seed))
    except KeyboardInterrupt:
        print(f"{ledger.num_finished} of {num_rows} rows are finished; the same command goes on", file=sys.stderr)
        raise
    finally:
        ledger.close()
    print(f"{output}: {num_rows} rows, {ledger.num_errors} of them errors", file=sys.stderr)


async def _answer(
    load: Callable[[], "LLM"], names: tuple[str, ...], rows: Iterator["Row"], ledger: "Ledger", num_rows: int, seed: int
) -> None:
    from nanoinfer.async_llm import AsyncLLM
    from nanoinfer.server.app import ServerSettings, create_app
    from nanoinfer.server.batch import answer_all

    async_llm = AsyncLLM(load)
    app = create_app(async_llm, ServerSettings(served_model_names=names))
    num_concurrent = 2 * async_llm.engine.scheduler.config.max_num_seqs  # so that rows always wait
    try:
        with tqdm(total=num_rows, initial=ledger.num_finished, unit=" rows", disable=None) as bar:

            def write(result: dict[str, Any]) -> None:
                ledger.append(result)
                bar.update()

            await answer_all(app, rows, seed=seed, num_concurrent=num_concurrent, write=write)
    finally:
        await async_llm.shutdown()
