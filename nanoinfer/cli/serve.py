"""`nanoinfer serve`: an OpenAI-compatible server for one model."""

import importlib.util
import os
import signal
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from nanoinfer.cli.options import EngineOptions, MaxModelLen, cli_errors, expand_options, load_llm
from nanoinfer.errors import InvalidValueError, NanoinferError

API_KEY_VARIABLE = "NANOINFER_API_KEY"


@expand_options
def serve(
    *,
    model_argument: Annotated[str | None, typer.Argument(metavar="[MODEL]", help="The same as --model.")] = None,
    engine: EngineOptions,
    max_model_len: MaxModelLen = None,
    max_num_seqs: Annotated[int, typer.Option(help="Most sequences that run at once.")] = 256,
    max_num_batched_tokens: Annotated[int, typer.Option(help="Most prompt tokens of a step.")] = 4096,
    enable_prefix_caching: Annotated[bool, typer.Option(help="Compute common prefixes of prompts once.")] = True,
    batch_invariant: Annotated[
        bool, typer.Option("--batch-invariant", help="Require that a seed gives the same tokens under any load.")
    ] = False,
    seed: Annotated[int, typer.Option(help="For requests without their own seed.")] = 0,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 is every interface.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on.")] = 8000,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            envvar=API_KEY_VARIABLE, help="Clients need one of these keys for /v1 and /trace; may be given several times."
        ),
    ] = None,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(help="Name that clients give as model; may be given several times. Default: the model's."),
    ] = None,
    max_num_queued_requests: Annotated[
        int, typer.Option(min=0, help="Most requests that wait beside those that run. Further ones get 429.")
    ] = 1024,
    max_body_bytes: Annotated[int, typer.Option(min=1, help="Larger bodies get 413.")] = 2**22,
    shutdown_timeout: Annotated[float, typer.Option(min=0, help="Seconds that running requests have after SIGTERM.")] = 30,
    cors_origin: Annotated[
        list[str] | None, typer.Option(help="Origin whose web pages may call the server, or *; may be given several times.")
    ] = None,
    trace: Annotated[
        bool,
        typer.Option(
            "--trace",
            help="Record the newest steps, without the sampler's stages, and replay answers at /trace/ID. A replay shows the "
            "prompts and answers of all requests that ran in these steps.",
        ),
    ] = False,
) -> None:
    """Serve a model over HTTP, with OpenAI's API and a web page at /.

    Ctrl-C or SIGTERM ends it when the running requests have finished.
    """
    with cli_errors():
        if model_argument is not None and engine.model is not None:
            raise InvalidValueError(f"the model is given twice, {model_argument!r} and --model {engine.model!r}; leave one out")
        engine = replace(engine, model=model_argument or engine.model)
        if any(importlib.util.find_spec(name) is None for name in ("fastapi", "uvicorn", "prometheus_client")):
            raise NanoinferError('the server needs further packages; pip install "nanoinfer[server]"')
        signal.signal(signal.SIGTERM, _exit)  # while the model loads. Then uvicorn's handler is in its place
        from nanoinfer.async_llm import AsyncLLM
        from nanoinfer.models.checkpoint import DEFAULT_MODEL
        from nanoinfer.server.app import ServerSettings
        from nanoinfer.server.run import make_server
        from nanoinfer.tracing.recent import RecentRecorder

        model = engine.model or DEFAULT_MODEL
        recorder = RecentRecorder() if trace else None
        settings = ServerSettings(
            served_model_names=tuple(served_model_name or [Path(model).name if os.path.isdir(model) else model]),
            api_keys=tuple(api_key or ()),
            max_body_bytes=max_body_bytes,
            cors_origins=tuple(cors_origin or ()),
            recorder=recorder,
        )
        async_llm = AsyncLLM(
            lambda: load_llm(
                engine,
                max_model_len=max_model_len,
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                enable_prefix_caching=enable_prefix_caching,
                batch_invariant=batch_invariant,
                seed=seed,
                tracer=recorder,
            ),
            max_num_queued_requests=max_num_queued_requests,
        )
        make_server(async_llm, settings, host=host, port=port, shutdown_timeout=shutdown_timeout).run()


def _exit(number: int, frame: FrameType | None) -> None:
    raise SystemExit(0)
