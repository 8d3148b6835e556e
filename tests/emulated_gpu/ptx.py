"""Read PTX: a kernel's text becomes blocks of instructions, each with the line of Python that it was compiled from.

In: the text that Triton's compiler wrote. Out: `Kernel`, which machine.py executes. A block ends with a branch, a return or the
next label.
"""

import linecache
import re
from dataclasses import dataclass, field

_COMMENT = re.compile(r"//.*")
_LOCATION = re.compile(r"\.loc\s+(\d+) (\d+) (\d+)(?:.*inlined_at (\d+) (\d+) (\d+))?")
_INLINE = re.compile(r"// begin inline asm\s*\{(.*?)\n\}\s*// end inline asm", re.DOTALL)
_FILE = re.compile(r'\.file\s+(\d+) "([^"]*)"')
_PARAMETER = re.compile(r"\.param\s+.*?\b(\w+_param_\d+)\b")
_INSTRUCTION = re.compile(r"(?:@(!?)(%p\d+)\s+)?([a-z][\w.:]*)\s*(.*)")
_OPERAND = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+")

Place = tuple[int, int, int]  # file, line and column of a source


@dataclass(slots=True)
class Instruction:
    """An instruction as it is written, and its place.

    Attributes:
        name: with its types, such as "add.s32".
        operands: as they are written: a register, a number, an address in brackets, or registers in braces.
        guard: the predicate that decides whether a thread executes it, and whether it is negated. None: all threads do.
        line: of the PTX, from 1.
        source: the line of Python, such as "triton.py:89: k = tl.load(...)".
    """

    text: str
    name: str
    operands: list[str]
    guard: tuple[str, bool] | None
    line: int
    source: str = ""

    def __str__(self) -> str:
        return f"`{self.text}` (PTX line {self.line}; {self.source or 'no source'})"


@dataclass(slots=True)
class Kernel:
    """A kernel's code. labels: the index of the block that each label begins."""

    name: str
    parameters: list[str]
    num_threads: int
    num_registers: dict[str, int]  # by the prefix of their names: %p, %rs, %r, %rd
    blocks: list[list[Instruction]] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)


def parse(text: str) -> Kernel:
    """Read the one kernel of a PTX file.

    Raises:
        ValueError: a line that is no instruction, label or directive that is known.
    """
    text = _INLINE.sub(_without_scope, text)
    files = {int(number): path for number, path in _FILE.findall(text)}
    head, body = text.split("\n{", 1)
    body = body.split("\n}", 1)[0]
    kernel = Kernel(
        name=re.search(r"\.entry\s+(\w+)", head)[1],
        parameters=_PARAMETER.findall(head),
        num_threads=int(re.search(r"\.reqntid\s+(\d+)", head)[1]),
        num_registers={prefix: int(count) for prefix, count in re.findall(r"\.reg\s+\.\w+\s+(%\w+)<(\d+)>", body)},
        blocks=[[]],
    )
    callers: dict[Place, Place] = {}
    source, own_file = "", None
    for number, line in enumerate(body.split("\n"), 1 + head.count("\n") + 1):
        line = _COMMENT.sub("", line).strip()
        if found := _LOCATION.match(line):
            *place, file, row, column = (int(part) if part else None for part in found.groups())
            own_file = own_file or place[0]
            if file:
                callers[tuple(place)] = file, row, column
            source = _describe(tuple(place), callers, files, own_file)
        elif line.endswith(":"):
            if line.startswith("$L__BB"):
                if kernel.blocks[-1]:
                    kernel.blocks.append([])
                kernel.labels[line[:-1]] = len(kernel.blocks) - 1
        elif line and line not in "{}" and not line.startswith("."):
            for part in line.rstrip(";").split(";"):
                instruction = _instruction(part.strip(), number, source)
                kernel.blocks[-1].append(instruction)
                if instruction.name.split(".")[0] in ("bra", "ret"):
                    kernel.blocks.append([])
    return kernel


def _without_scope(inline: re.Match[str]) -> str:
    """Inline code whose braces are left out, and whose own registers, s0 and f0, have names of all the kernel's."""
    return re.sub(r"(?<![\w.%])([sf])(?=\d|<)", r"%inline_\1", inline[1])


def _instruction(text: str, line: int, source: str) -> Instruction:
    found = _INSTRUCTION.fullmatch(text)
    if not found:
        raise ValueError(f"PTX line {line} is no instruction: {text}")
    negated, predicate, name, operands = found.groups()
    guard = (predicate, bool(negated)) if predicate else None
    return Instruction(" ".join(text.split()), name, _OPERAND.findall(operands), guard, line, source)


def _describe(place: Place, callers: dict[Place, Place], files: dict[int, str], own_file: int) -> str:
    """The innermost line in the kernel's own file that led to a place, with its text."""
    seen = set()
    while place[0] != own_file and place in callers and place not in seen:
        seen.add(place)
        place = callers[place]
    path = files.get(place[0], "?")
    return f"{path.rsplit('/', 1)[-1]}:{place[1]}: {linecache.getline(path, place[1]).strip()}".rstrip(": ")
