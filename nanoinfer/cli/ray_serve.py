"""The server as a Ray Serve deployment: `serve run nanoinfer.cli.ray_serve:build_app model=Qwen/Qwen3-0.6B`.

In: the options of `nanoinfer serve` by their Python names, from the command line or from a Serve config file. Out: an
application, whose replicas each have an engine and the endpoints. Ray's configuration decides how many replicas run, and where.
"""

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import TypeVar, get_type_hints

from pydantic import TypeAdapter, ValidationError
from ray import serve
from starlette.types import ASGIApp

from nanoinfer.arguments import Bytes, declarations, size_in_bytes
from nanoinfer.cli.options import EngineOptions, ray_resources
from nanoinfer.cli.serve import ServerOptions, api_keys, load_server_llm
from nanoinfer.config import EngineArgs
from nanoinfer.errors import InvalidValueError
from nanoinfer.server.app import create_app
from nanoinfer.server.run import share_the_process

G = TypeVar("G")


def build_app(args: dict[str, object]) -> serve.Application:
    """Make the application of one deployment, named nanoinfer.

    args: fields of EngineOptions and ServerOptions, as values or as text. api_key defaults to the keys in the environment.
    Raises: InvalidValueError if a name is not an option, or a value cannot be converted.
    """
    names = {field.name for group in (EngineOptions, ServerOptions) for field in fields(group)}
    if unknown := sorted(args.keys() - names):
        allowed = ", ".join(sorted(names))
        raise InvalidValueError(f"{', '.join(unknown)} is not an option of the server; the options are {allowed}")
    engine, options = _read(EngineOptions, args), _read(ServerOptions, args)
    options = replace(options, api_key=api_keys(options.api_key))
    deployment = serve.deployment(
        name="nanoinfer",
        ray_actor_options=ray_resources(engine),
        max_ongoing_requests=options.max_num_seqs + options.max_num_queued_requests,  # AsyncLLM refuses more
    )
    return deployment(serve.ingress()(ServeReplica)).bind(engine, options)


class ServeReplica:
    """An engine and its HTTP endpoints. Ray makes the application when the engine is loaded."""

    def __init__(self, engine: EngineOptions, options: ServerOptions) -> None:
        self._async_llm, self._settings = load_server_llm(engine, options)
        share_the_process()

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return create_app(self._async_llm, self._settings)

    def check_health(self) -> None:
        """Raise if the engine is dead, so that Ray replaces the replica."""
        self._async_llm.check_health()


def _read(group: type[G], args: dict[str, object]) -> G:
    """Make a group of options. A single string becomes a list if the option is a list."""
    hints, sizes = get_type_hints(group), [name for name, one in declarations(EngineArgs).items() if one.marker(Bytes)]
    given = {field.name: args[field.name] for field in fields(group) if field.name in args}  # type: ignore[arg-type]
    for name, value in given.items():
        if name in sizes:
            given[name] = size_in_bytes(str(value))
        elif isinstance(value, str) and hints[name] in (list[str] | None, Sequence[str], Sequence[str] | None):
            given[name] = [value]
    try:
        return TypeAdapter(group).validate_python(given)
    except ValidationError as error:
        first = error.errors()[0]
        raise InvalidValueError(f"{first['loc'][0]}: {first['msg']}, got {first['input']!r}") from error
