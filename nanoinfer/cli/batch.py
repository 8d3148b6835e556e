"""`nanoinfer batch`: answer the requests of a file, in a job that can be interrupted and continued at any time."""

import asyncio
import math
import os
import secrets
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from tqdm import tqdm

from nanoinfer.cli import options
from nanoinfer.cli.serve import SERVER_PACKAGES, served_names
from nanoinfer.config import EngineArgs
from nanoinfer.errors import InvalidValueError
from nanoinfer.server.settings import ServerSettings

if TYPE_CHECKING:
    from nanoinfer.server.async_llm import AsyncLLM
    from nanoinfer.server.batch import Manifest, ResultFile


@dataclass(frozen=True, kw_only=True)
class JobOptions:
    """The options of a job, besides the engine's."""

    max_num_seqs: Annotated[int, EngineArgs] = 256
    batch_invariant: Annotated[bool, EngineArgs] = False
    seed: Annotated[
        int | None,
        typer.Option(min=0, max=2**64 - 1, help="The job's, from which requests get their own. Default: drawn, and kept."),
    ] = None
    served_model_name: Annotated[list[str] | None, ServerSettings] = None
    retry_errors: Annotated[bool, typer.Option("--retry-errors", help="Answer requests again that ended in an error.")] = False
    ray: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Compute on a Ray cluster: host:port, auto, or local for this machine alone."),
    ] = None
    replicas: Annotated[int, typer.Option(min=1, help="Engines, each in a process of its own. More than one need --ray.")] = 1


@options.expand_options
def batch(
    *,
    input_file: Annotated[
        Path, typer.Argument(metavar="INPUT", help="A JSONL file in OpenAI's batch format.", exists=True, dir_okay=False)
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="JSONL file for the results.", dir_okay=False)],
    engine: options.EngineOptions,
    job: JobOptions,
) -> None:
    """Answer the requests of a file, as `nanoinfer serve` would.

    Results are appended to OUTPUT.partial as they end. The same command continues after an interruption, a crash or a power
    failure. A request's seed comes from the job's seed and its custom_id, so the answers do not depend on the order.

    The exit code is 0 when every request has a result, even if some results are errors, as in OpenAI's batches.
    """
    if not output.absolute().parent.is_dir():
        raise InvalidValueError(f"cannot write {output}: there is no such folder; give another path")
    options.check_packages("server", *SERVER_PACKAGES)
    if job.ray is not None:
        options.check_packages("ray", "ray")
    elif job.replicas > 1:
        hint = "give --ray local for several engines on this machine"
        raise InvalidValueError(f"--replicas {job.replicas} requires --ray; {hint}")
    from nanoinfer.loading.checkpoint import DEFAULT_MODEL
    from nanoinfer.server.batch import ResultFile

    engine = replace(engine, model=engine.model or DEFAULT_MODEL)
    manifest = _make_manifest(input_file, output, engine, job)
    results = ResultFile(output, manifest, retry_errors=job.retry_errors)
    num_requests = manifest.num_requests
    if results.num_finished:
        print(f"{results.num_finished} of {num_requests} requests were finished before", file=sys.stderr)
    try:
        if not results.is_complete:
            _answer_all(input_file, results, engine, job)
    except KeyboardInterrupt:
        print(f"{results.num_finished} of {num_requests} requests are finished; the same command continues", file=sys.stderr)
        raise
    finally:
        results.close()
    print(f"{output}: {num_requests} requests, {results.num_errors} of them errors", file=sys.stderr)


def _make_manifest(input_file: Path, output: Path, engine: options.EngineOptions, job: JobOptions) -> "Manifest":
    """Check the input, and describe the job. Its seed is the user's, or else that of an earlier run."""
    from nanoinfer.loading.checkpoint import file_digests, locate
    from nanoinfer.server.batch import Manifest, check_requests, read_manifest

    input_digest, num_requests = check_requests(input_file)
    seed, earlier = job.seed, read_manifest(output)
    if seed is None:
        seed = secrets.randbits(64) if earlier is None else earlier.seed
    names = ("dtype", "quantization", "lora", "max_model_len", "stages", "logits_processors")
    return Manifest(
        input_digest=input_digest,
        num_requests=num_requests,
        model=file_digests(locate(str(engine.model), engine.revision)),
        options={name: getattr(engine, name) for name in names},
        seed=seed,
    )


def _answer_all(input_file: Path, results: "ResultFile", engine: options.EngineOptions, job: JobOptions) -> None:
    """Answer the unfinished requests by an engine in this process, or by the replicas of a Ray cluster."""
    settings = ServerSettings(served_model_name=served_names(job.served_model_name, str(engine.model)))
    load = partial(
        options.load_async_llm,
        engine,
        max_num_seqs=job.max_num_seqs,
        batch_invariant=job.batch_invariant,
        seed=results.manifest.seed,
        streaming=False,
    )
    if job.ray is None:
        asyncio.run(_answer(load, settings, input_file, results))
        return
    num_left = results.manifest.num_requests - results.num_finished
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Ray sends usage statistics by default
    from nanoinfer.server.ray_batch import answer_all_on_ray, connected

    with connected(job.ray, num_cpus=job.replicas * (engine.threads or 1)), _writing(results) as write:
        answer_all_on_ray(
            results.unanswered(input_file),
            load,
            settings,
            seed=results.manifest.seed,
            num_replicas=job.replicas,
            batch_size=min(job.max_num_seqs, math.ceil(num_left / (4 * job.replicas))),
            resources=options.ray_resources(engine),
            write=write,
        )


async def _answer(load: Callable[[], "AsyncLLM"], settings: ServerSettings, input_file: Path, results: "ResultFile") -> None:
    from nanoinfer.server.app import create_app
    from nanoinfer.server.batch import answer_all
    from nanoinfer.server.run import share_the_process

    requests = results.unanswered(input_file)
    async with load() as async_llm:
        app = create_app(async_llm, settings)
        share_the_process()
        num_concurrent = 2 * async_llm.engine.scheduler.config.max_num_seqs  # so that requests are always waiting
        with _writing(results) as write:
            await answer_all(app, requests, seed=results.manifest.seed, num_concurrent=num_concurrent, write=write)


@contextmanager
def _writing(results: "ResultFile") -> Iterator[Callable[[dict[str, object]], None]]:
    """Yield a function that appends a result to the file and advances a progress bar."""
    num_requests, num_finished = results.manifest.num_requests, results.num_finished
    with tqdm(total=num_requests, initial=num_finished, unit=" requests", disable=None) as bar:

        def write(result: dict[str, object]) -> None:
            results.append(result)
            bar.update()

        yield write
