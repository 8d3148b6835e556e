"""`nanoinfer serve`: an OpenAI-compatible server for one model."""

import os
import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nanoinfer.cli.options import BatchingOptions, EngineOptions, busy, check_packages, expand_options, load_async_llm
from nanoinfer.config import AsyncEngineArgs
from nanoinfer.errors import InvalidValueError, NanoinferError
from nanoinfer.features.structured.params import StructuredOutputsParams
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.server.listen import bind, bind_uds, cannot_listen, host_names, read_certificate
from nanoinfer.server.settings import ServerSettings

if TYPE_CHECKING:
    from nanoinfer.server.async_llm import AsyncLLM

DEFAULT_ADDRESS = "127.0.0.1", 8000
API_KEY_VARIABLE = "NANOINFER_API_KEY"
SERVER_PACKAGES = ("fastapi", "uvicorn", "prometheus_client")


@dataclass(frozen=True, kw_only=True)
class ServerOptions(BatchingOptions, ServerSettings):
    """The options of a server, some of which are arguments of its engine. Ray Serve takes them, too (cli/ray_serve.py)."""

    seed: Annotated[int | None, AsyncEngineArgs] = None
    max_num_queued_requests: Annotated[int, AsyncEngineArgs] = 1024


@expand_options
def serve(
    *,
    model_argument: Annotated[str | None, typer.Argument(metavar="MODEL", help="The same as --model.")] = None,
    engine: EngineOptions,
    options: ServerOptions,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 is every interface.")] = DEFAULT_ADDRESS[0],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on.")] = DEFAULT_ADDRESS[1],
    uds: Annotated[str | None, typer.Option(help="Path of a Unix socket to listen on, instead of --host and --port.")] = None,
    ssl_certfile: Annotated[str | None, typer.Option(help="Certificate for https, a PEM file.")] = None,
    ssl_keyfile: Annotated[str | None, typer.Option(help="The certificate's key, if it is in another file.")] = None,
    shutdown_timeout: Annotated[float, typer.Option(min=0, help="Seconds that running requests have after SIGTERM.")] = 30,
) -> None:
    """Serve a model over HTTP, with OpenAI's API and a web page at /.
    Ctrl-C or SIGTERM ends it when the running requests have finished.
    """
    if model_argument is not None and engine.model is not None:
        raise InvalidValueError(f"the model is given twice, {model_argument!r} and --model {engine.model!r}; leave one out")
    engine = replace(engine, model=model_argument or engine.model)
    options = replace(options, api_key=api_keys(options.api_key), allowed_hosts=host_names(host, options.allowed_hosts or ()))
    if uds is None:
        warn_without_key(host, options.api_key)
    elif (host, port) != DEFAULT_ADDRESS:
        raise InvalidValueError(f"--uds {uds!r} takes the place of --host {host} and --port {port}; leave it or them out")
    check_packages("server", *SERVER_PACKAGES)
    ssl_context = read_certificate(ssl_certfile, ssl_keyfile)
    with ExitStack() as stack:
        # The handler while the model loads. While the server runs, uvicorn replaces it.
        previous = signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        stack.callback(signal.signal, signal.SIGTERM, previous)
        sockets = [stack.enter_context(one) for one in (bind(host, port) if uds is None else [bind_uds(uds)])]
        if uds is not None:
            stack.callback(os.unlink, uds)
        with busy("Starting"):
            from nanoinfer.server.run import Server, share_the_process

        async_llm, settings = load_server_llm(engine, options)
        server = Server(async_llm, settings, shutdown_timeout=shutdown_timeout, ssl_context=ssl_context)
        share_the_process()
        try:
            server.run(sockets)
        except OSError as error:  # another server began to listen meanwhile
            raise cannot_listen(host, port, error) from error


def load_server_llm(engine: EngineOptions, options: ServerOptions) -> tuple["AsyncLLM", ServerSettings]:
    """Load a server's model. Returns the options with the model's name, too."""
    from nanoinfer.loading.checkpoint import DEFAULT_MODEL

    if (options.lora_modules or options.enable_lora_update) and not options.enable_lora:
        raise InvalidValueError("--lora-modules and --enable-lora-update need --enable-lora; add it, or leave them out")
    if options.cache_salt_by_key and not options.api_key:
        raise InvalidValueError(
            f"--cache-salt-by-key has no effect without API keys; set --api-key or {API_KEY_VARIABLE}, or leave it out"
        )
    names = {field.name for field in fields(ServerOptions)} & {field.name for field in fields(AsyncEngineArgs)}
    async_llm = load_async_llm(engine, **{name: getattr(options, name) for name in names})
    with busy("Preparing structured output"), suppress(NanoinferError):  # no llguidance, or no tokenizer that it can use
        # Converting the tokenizer takes seconds, for which every stream would wait during the first structured request.
        first = SamplingParams(structured_outputs=StructuredOutputsParams(choice=["yes"]), detokenize=False)
        async_llm.engine.inputs.prepare([0], first)
    return async_llm, replace(options, served_model_name=served_names(options.served_model_name, engine.model or DEFAULT_MODEL))


def served_names(given: Sequence[str] | None, model: str) -> Sequence[str]:
    """Return the names that requests may give as model."""
    return given or [Path(model).name if os.path.exists(model) else model]


def warn_without_key(host: str, keys: Sequence[str]) -> None:
    """Say on stderr that a server which other machines may reach has no key."""
    if not keys and host not in ("localhost", "::1") and not host.startswith("127."):
        print(
            f"warning: everyone who can reach {host} can use this server, because it has no key; set --api-key or "
            f"{API_KEY_VARIABLE}, or listen on 127.0.0.1",
            file=sys.stderr,
        )


def api_keys(given: Sequence[str]) -> Sequence[str]:
    """Return the given keys, or those of the environment.

    Raises: InvalidValueError for keys that no client can send, or that were set by mistake. Its message never contains a key.
    """
    keys = given or os.environ.get(API_KEY_VARIABLE, "").split()
    if not keys and API_KEY_VARIABLE in os.environ:
        raise InvalidValueError(f"{API_KEY_VARIABLE} is empty; set it to a key, or unset it for a server without keys")
    for number, key in enumerate(keys, start=1):
        if not key or key != key.strip() or not (key.isascii() and key.isprintable()):
            raise InvalidValueError(
                f"API key {number} is empty, has spaces around it, or has characters other than printable ASCII; "
                f"give another --api-key or {API_KEY_VARIABLE}"
            )
    return keys
