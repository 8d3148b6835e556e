"""The settings of a server, apart from those of its engine.

In: options of `nanoinfer serve` (cli/serve.py), or the same names in a config of Ray Serve. Out: checked values.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge
from typing_extensions import Doc

from nanoinfer.arguments import Allowed, read_fields
from nanoinfer.errors import InvalidValueError, shown


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """The settings, whose first sentences are the help of the options."""

    # fmt: off
    served_model_name: Annotated[Sequence[str], Doc(
        "Name that requests give as model (default: the model's). Answers contain the first.")] = ()
    api_key: Annotated[Sequence[str], Doc(
        "Key that clients need for every POST and /v1 (default: those in NANOINFER_API_KEY).")] = ()
    cache_salt_by_key: Annotated[bool, Doc(
        "Share cached prefixes only between requests with the same API key.")] = False
    allowed_hosts: Annotated[Sequence[str] | None, Doc(
        "Further name of this server that requests may address, or *, besides localhost, this machine's name, --host and "
        "addresses. None is any name.")] = None
    root_path: Annotated[str, Doc(
        "Prefix of this server's paths behind a proxy, such as /llm, whether or not the proxy removes it.")] = ""
    max_body_bytes: Annotated[int, Ge(1), Doc("The most bytes of a body. Larger bodies get 413.")] = 2**22
    ignore_unknown_fields: Annotated[bool, Doc("Ignore fields that are unknown or not supported, instead of 400.")] = False
    max_stored_responses: Annotated[int, Ge(0), Doc(
        "Responses of /v1/responses that are kept in memory for previous_response_id.")] = 0
    enable_weight_update: Annotated[bool, Doc("Let clients pause the server, and replace its weights.")] = False
    lora_modules: Annotated[Sequence[str], Doc("An adapter of --enable-lora, as NAME=PATH.")] = ()
    enable_lora_update: Annotated[bool, Doc("Let clients load adapters from any folder, and drop them.")] = False
    reasoning_parser: Annotated[str | None,
        Allowed("'qwen3', 'openai_gptoss' or 'none'; without it, the template decides"),
        Doc('"qwen3" (<think>), "openai_gptoss" (channels) or "none" (default: by the chat template).')] = None
    tool_call_parser: Annotated[str | None, Allowed("'hermes', 'openai' or 'none'; without it, the template decides"),
        Doc('"hermes" (<tool_call>), "openai" (channels) or "none" (default: by the chat template).')] = None
    cors_origin: Annotated[Sequence[str], Doc("Origin whose web pages may call the server, or *.")] = ()
    metrics_prefix: Annotated[str, Doc(
        "Prefix of the names in /metrics. vllm: fits the boards that are made for vLLM.")] = "nanoinfer:"
    record: Annotated[str | None, Doc(
        "File that gets a line for each answer: its arrival, its lengths and hashes of its prompt, no text. `bench serve` and "
        "`simulate` read it.")] = None
    # fmt: on

    def __post_init__(self) -> None:
        read_fields(self, ServerSettings)
        if self.root_path and not re.fullmatch(r"(/[\w.~-]+)+", self.root_path):
            raise InvalidValueError(
                f"root_path must begin with / and not end with it, such as /llm, got {shown(self.root_path)}"
            )
