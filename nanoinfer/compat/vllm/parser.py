"""vLLM's parser of a command line, and EngineArgs as its options."""

import argparse
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import MISSING
from typing import Any, get_args, get_origin

from nanoinfer.arguments import Bytes, declarations, size_in_bytes
from nanoinfer.compat.vllm.neutral import NEUTRAL


class FlexibleArgumentParser(argparse.ArgumentParser):
    """An ArgumentParser that reads --max_num_seqs as --max-num-seqs, as vLLM's does."""

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: object = None) -> Any:  # type: ignore[override]
        given = sys.argv[1:] if args is None else args
        dashed = [re.sub(r"^--[^=]+", lambda option: option[0].replace("_", "-"), one) for one in given]
        return super().parse_known_args(dashed, namespace)


def add_cli_arguments(parser: argparse.ArgumentParser, arguments: type) -> argparse.ArgumentParser:
    """Add an option for each argument that a command line can give, and for each of vLLM's, which are left out if not given."""
    for name, one in declarations(arguments).items():
        text, default = " ".join(one.sentences).replace("%", "%%"), None if one.default is MISSING else one.default
        _add_option(parser, name, size_in_bytes if one.marker(Bytes) else one.text_type, default, text)
    for name, accepted in NEUTRAL["EngineArgs"].items():
        kind = bool if isinstance(accepted[0][0], bool) else _json_or_text
        _add_option(parser, name, kind, argparse.SUPPRESS, argparse.SUPPRESS)
    return parser


def given_arguments(args: argparse.Namespace, arguments: type) -> dict[str, Any]:
    """Take the arguments from those that a parser (add_cli_arguments) has read, and leave out the script's own."""
    names = declarations(arguments).keys() | NEUTRAL["EngineArgs"].keys()
    return {name: value for name, value in vars(args).items() if name in names}


def _add_option(parser: argparse.ArgumentParser, name: str, kind: Any, default: object, text: str) -> None:
    """kind: a type, or a function that reads a text. None: a text cannot give the argument, which gets no option."""
    option = "--" + name.replace("_", "-")
    options: dict[str, Any] = {"default": default, "help": text}
    if kind is bool:
        parser.add_argument(option, action=argparse.BooleanOptionalAction, **options)
    elif get_origin(kind) is list:  # `--lora a b` is `--lora a --lora b`
        parser.add_argument(option, action="extend", nargs="+", type=get_args(kind)[0], **options)
    elif kind is not None:
        parser.add_argument(option, type=json.loads if kind is dict else kind, **options)


def _json_or_text(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return text
