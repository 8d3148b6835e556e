"""`nanoinfer serve`: an OpenAI-compatible server for one model."""

import os
import signal
import sys
from contextlib import ExitStack, suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from nanoinfer.cli.options import EngineOptions, ServedModelName, busy, check_packages, expand_options, load_async_llm
from nanoinfer.config import AsyncEngineArgs
from nanoinfer.errors import InvalidValueError, NanoinferError
from nanoinfer.lora.request import LoRARequest
from nanoinfer.sampling_params import SamplingParams, StructuredOutputsParams

if TYPE_CHECKING:
    from nanoinfer.async_llm import AsyncLLM
    from nanoinfer.server.limits import ServerSettings
    from nanoinfer.tracing.recent import RecentRecorder

API_KEY_VARIABLE = "NANOINFER_API_KEY"
SERVER_PACKAGES = ("fastapi", "uvicorn", "prometheus_client")


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """The options of a server apart from the engine's, which Ray Serve takes, too (cli/ray_serve.py)."""

    heading: ClassVar[str] = "Server"
    max_num_seqs: Annotated[int, AsyncEngineArgs] = 256
    max_num_batched_tokens: Annotated[int, AsyncEngineArgs] = 4096
    enable_prefix_caching: Annotated[bool, AsyncEngineArgs] = True
    batch_invariant: Annotated[bool, AsyncEngineArgs] = False
    seed: Annotated[int | None, AsyncEngineArgs] = None
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            envvar=API_KEY_VARIABLE,
            help="Clients need one of these keys for every POST, /v1 and /trace; may be given several times.",
        ),
    ] = None
    served_model_name: ServedModelName = None
    max_num_queued_requests: Annotated[int, AsyncEngineArgs] = 1024
    max_body_bytes: Annotated[int, typer.Option(min=1, help="Larger bodies get 413.")] = 2**22
    ignore_unknown_fields: Annotated[
        bool, typer.Option("--ignore-unknown-fields", help="Ignore fields that are unknown or not supported, instead of 400.")
    ] = False
    max_stored_responses: Annotated[
        int, typer.Option(min=0, help="Responses of /v1/responses that are kept in memory for previous_response_id.")
    ] = 0
    enable_weight_update: Annotated[
        bool,
        typer.Option("--enable-weight-update", help="Let clients pause the server, and replace its weights."),
    ] = False
    enable_lora: Annotated[bool, AsyncEngineArgs] = False
    max_loras: Annotated[int, AsyncEngineArgs] = 1
    max_lora_rank: Annotated[int, AsyncEngineArgs] = 16
    lora_modules: Annotated[
        list[str] | None, typer.Option(help="An adapter of --enable-lora; may be given several times.", metavar="NAME=PATH")
    ] = None
    enable_lora_update: Annotated[
        bool, typer.Option("--enable-lora-update", help="Let clients load adapters from any folder, and drop them.")
    ] = False
    reasoning_parser: Annotated[
        str | None, typer.Option(help="qwen3 (<think>), openai_gptoss (channels) or none. Default: by the chat template.")
    ] = None
    tool_call_parser: Annotated[
        str | None, typer.Option(help="hermes (<tool_call>), openai (channels) or none. Default: by the chat template.")
    ] = None
    cors_origin: Annotated[
        list[str] | None, typer.Option(help="Origin whose web pages may call the server, or *; may be given several times.")
    ] = None


@expand_options
def serve(
    *,
    model_argument: Annotated[str | None, typer.Argument(metavar="MODEL", help="The same as --model.")] = None,
    engine: EngineOptions,
    options: ServerOptions,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 is every interface.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on.")] = 8000,
    allowed_hosts: Annotated[
        list[str] | None,
        typer.Option(
            help="Further name of this server that requests may address, or *. Without: localhost, this machine's name, --host "
            "and addresses. May be given several times."
        ),
    ] = None,
    shutdown_timeout: Annotated[float, typer.Option(min=0, help="Seconds that running requests have after SIGTERM.")] = 30,
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
    if model_argument is not None and engine.model is not None:
        raise InvalidValueError(f"the model is given twice, {model_argument!r} and --model {engine.model!r}; leave one out")
    engine = replace(engine, model=model_argument or engine.model)
    check_api_keys(options.api_key)
    warn_without_key(host, options.api_key)
    check_packages("server", *SERVER_PACKAGES)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # while the model loads. Later uvicorn replaces the handler
    from nanoinfer.server.listen import bind, cannot_listen, host_names

    with ExitStack() as stack:
        sockets = [stack.enter_context(one) for one in bind(host, port)]
        with busy("Starting"):
            from nanoinfer.server.run import Server, share_the_process
            from nanoinfer.tracing.recent import RecentRecorder

        recorder = RecentRecorder() if trace else None
        async_llm = load_server_llm(engine, options, recorder)
        settings = make_settings(engine, options, recorder)
        settings = replace(settings, allowed_hosts=host_names(host, allowed_hosts or []))
        server = Server(async_llm, settings, shutdown_timeout=shutdown_timeout)
        share_the_process()
        try:
            server.run(sockets)
        except OSError as error:  # another server began to listen meanwhile
            raise cannot_listen(host, port, error) from error


def load_server_llm(engine: EngineOptions, options: ServerOptions, recorder: "RecentRecorder | None" = None) -> "AsyncLLM":
    """Load a server's model, and print the seed if it was drawn."""
    if (options.lora_modules or options.enable_lora_update) and not options.enable_lora:
        raise InvalidValueError("--lora-modules and --enable-lora-update need --enable-lora; add it, or leave them out")
    names = {field.name for field in fields(ServerOptions)} & {field.name for field in fields(AsyncEngineArgs)}
    async_llm = load_async_llm(engine, tracer=recorder, **{name: getattr(options, name) for name in names})
    if options.seed is None:
        seed = async_llm.engine.seed
        print(f"seed {seed} was drawn; --seed {seed} gives the same answers", file=sys.stderr)
    with busy("Preparing structured output"), suppress(NanoinferError):  # no llguidance, or no tokenizer that it can use
        # Converting the tokenizer takes seconds, for which every stream would wait during the first structured request.
        first = SamplingParams(structured_outputs=StructuredOutputsParams(choice=["yes"]), detokenize=False)
        async_llm.engine.inputs.prepare([0], first)
    return async_llm


def make_settings(engine: EngineOptions, options: ServerOptions, recorder: "RecentRecorder | None" = None) -> "ServerSettings":
    from nanoinfer.loading.checkpoint import DEFAULT_MODEL
    from nanoinfer.server.limits import ServerSettings

    same = {field.name for field in fields(ServerOptions)} & {field.name for field in fields(ServerSettings)}
    return ServerSettings(
        **{name: getattr(options, name) for name in same},
        served_model_names=served_names(options.served_model_name, engine.model or DEFAULT_MODEL),
        api_keys=tuple(options.api_key or ()),
        cors_origins=tuple(options.cors_origin or ()),
        weight_updates=engine.tensor_parallel_size if options.enable_weight_update else 0,
        adapters=lora_requests(options.lora_modules),
        lora_updates=options.enable_lora_update,
        recorder=recorder,
    )


def lora_requests(modules: list[str] | None) -> dict[str, LoRARequest]:
    """Return the adapters of --lora-modules by their names."""
    requests: dict[str, LoRARequest] = {}
    for number, module in enumerate(modules or [], start=1):
        name, _, path = module.partition("=")
        if not (name and path) or name in requests:
            raise InvalidValueError(f"--lora-modules must be NAME=PATH with a new name, got {module!r}")
        requests[name] = LoRARequest(name, number, path)
    return requests


def served_names(given: list[str] | None, model: str) -> tuple[str, ...]:
    """Return the names that requests may give as model."""
    return tuple(given or [Path(model).name if os.path.exists(model) else model])


def warn_without_key(host: str, api_keys: list[str] | None) -> None:
    """Say on stderr that a server which other machines may reach has no key."""
    if not api_keys and host not in ("localhost", "::1") and not host.startswith("127."):
        print(
            f"warning: everyone who can reach {host} can use this server, because it has no key; set --api-key or "
            f"{API_KEY_VARIABLE}, or listen on 127.0.0.1",
            file=sys.stderr,
        )


def check_api_keys(api_keys: list[str] | None) -> None:
    """Refuse keys that no client can send, or that were set by mistake. Messages never contain a key."""
    if not api_keys and API_KEY_VARIABLE in os.environ:
        raise InvalidValueError(f"{API_KEY_VARIABLE} is empty; set it to a key, or unset it for a server without keys")
    for number, key in enumerate(api_keys or (), start=1):
        if not key or key != key.strip() or not (key.isascii() and key.isprintable()):
            raise InvalidValueError(
                f"API key {number} is empty, has spaces around it, or has characters other than printable ASCII; "
                f"give another --api-key or {API_KEY_VARIABLE}"
            )
