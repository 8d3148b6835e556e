"""The tables of parameters, made of their declarations: a short one in supported.md, and those of the API reference.

`python docs/parameters.py` writes the table of supported.md.
"""

import re
from dataclasses import MISSING, is_dataclass
from pathlib import Path

import nanoinfer
from nanoinfer.arguments import declarations
from nanoinfer.sampling_params import SamplingParams

PAGE = Path(__file__).with_name("supported.md")
MARKED = re.compile(r"(<!-- python docs/parameters.py -->\n)[\s\S]*?(\n<!-- end -->)")


def table(arguments: type) -> str:
    """The declarations of a dataclass as a table of Markdown."""
    rows = []
    for name, one in declarations(arguments).items():
        default = "" if one.default in (None, MISSING) else f"`{one.default!s}`"
        text = " ".join(one.sentences).replace("|", r"\|")
        rows.append(f"| `{name}` | {default} | {text} |")
    return "\n".join(["| parameter | default | what it does |", "|---|---|---|", *rows])


def short_table(arguments: type) -> str:
    """The same in two columns, with the first sentence and the range of each parameter."""
    rows = []
    for name, one in declarations(arguments).items():
        default = "" if one.default in (None, MISSING) else f"={one.default!s}"
        rows.append(f"| `{name}{default}` | {one.sentences[0]} |")
    return "\n".join(["| parameter and default | what it does |", "|---|---|", *rows])


def reference() -> list[str]:
    """The parts of the API reference: each public name, whose docstring mkdocstrings reads, and the table of its arguments."""
    parts = []
    for name in nanoinfer.__all__[1:]:
        public = getattr(nanoinfer, name)
        parts.append(f"::: {nanoinfer._MODULES[name]}.{name}")
        if is_dataclass(public) and isinstance(public, type) and "Args:" in (public.__doc__ or ""):
            parts.append(table(public))  # "Args: as declared below", which the reader of the source does not see
    return parts


def with_table(text: str) -> str:
    """The text of supported.md with its table."""
    text, count = MARKED.subn(lambda found: found[1] + short_table(SamplingParams) + found[2], text)
    assert count == 1
    return text


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
