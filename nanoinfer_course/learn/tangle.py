"""Tangle a template and parts of the package's source into one module that does not import the package.

In: a template, and bodies of functions that replace the package's. Out: the text of the module. The source is read each time,
so the module cannot become stale. A line of the template stands for definitions:

    #: from nanoinfer.scheduling.pool                   those of a module
    #: from nanoinfer.sampling.batch import A, B        some of them, in this order. "except" instead of "import": all others
    #: from nanoinfer.scheduling.scheduler.Scheduler    inside a class: the fields and methods of a class

Three rules decide what is taken:

1. A definition that something taken mentions by name, unless the template has a definition of this name. A class has its
   mentioned fields and methods.
2. Nobody observes the module, so what the package tells its observer is left out, with assignments that only this reads.
3. Of a docstring the first line, without what it raises. Names of types in annotations lose their quotes, and of a declared
   parameter its meaning becomes a comment.
"""

import ast
import builtins
import re
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain

from nanoinfer_course.learn.workbook import first_line, names_of, read_module

FACTS: dict[str, object] = {}  # expressions of the package that have one value in the module: none, it takes whole functions
DIRECTIVE = re.compile(r" *#: from (nanoinfer[a-z0-9_.]*)(?:\.([A-Z]\w*))?(?: (import|except) (.+))?$")

Definition = ast.FunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign


@dataclass
class Excerpt:
    """A definition that may be taken. members: the fields and methods of a class."""

    names: set[str]
    text: str
    prefix: str  # "." of a member
    members: list["Excerpt"] = field(default_factory=list)
    is_taken: bool = False

    def take(self, used: set[str]) -> bool:
        """Take what `used` mentions, and add what it mentions itself. Return whether something was taken."""
        is_special = self.text.startswith("def __")
        news = not self.is_taken and bool(is_special or {self.prefix + name for name in self.names} & used)
        if news:
            self.is_taken = True
            used |= names_in(self.text)
        if self.is_taken:
            news |= sum(member.take(used) for member in self.members) > 0
        return news

    def emit(self) -> str:
        members = [textwrap.indent(member.emit(), " " * 4) for member in self.members if member.is_taken]
        if not members:
            return self.text
        if self.text.endswith("\n    pass"):  # a class without a docstring
            return self.text.removesuffix("    pass") + join(members)
        return join([self.text, *members])


def tangle(template: str, bodies: Mapping[tuple[str, str], str], used: set[str]) -> str:
    """Return the module's text.

    Args:
        template: the text with directives.
        bodies: (module, qualified name) -> the source of a function that takes the place of the package's.
        used: names that others read of the module.
    """
    bare = re.sub(r"#: from .*", "pass", template)  # a class may have nothing else
    own = {(owner, name) for owner, node in _definitions(ast.parse(bare)) for name in names_of(node)}
    used = used | names_in(bare)
    directives = [(number, found) for number, line in enumerate(template.splitlines()) if (found := DIRECTIVE.fullmatch(line))]
    own |= {(found[2] or "", name) for _, found in directives if found[3] == "import" for name in found[4].split(", ")}
    excerpts: dict[int, list[Excerpt]] = {}
    headers: dict[int, list[str]] = {}
    for number, found in directives:
        module, owner, named = found[1], found[2] or "", (found[4] or "").split(", ")
        nodes = {name: node for its, node in _definitions(read_module(module)[1]) if its == owner for name in names_of(node)}
        if found[3] == "import":
            nodes = {name: nodes[name] for name in named}
        else:
            left_out = {name for its_owner, name in own if its_owner == owner}.union(named)
            nodes = {name: node for name, node in nodes.items() if name not in left_out}
        excerpts[number] = [_excerpt(module, node, owner, bodies) for node in dict.fromkeys(nodes.values())]
        if template.splitlines()[number - 1].startswith("class "):  # the template's class has the docstring of the package's
            [node] = [node for _, node in _definitions(read_module(module)[1]) if names_of(node) == {owner}]
            headers[number] = _excerpt(module, node, "", {}).text.splitlines()[node.lineno - first_line(node) + 1 :]
    while sum(excerpt.take(used) for excerpt in chain.from_iterable(excerpts.values())):
        pass
    lines: list[str] = []
    for number, line in enumerate(template.splitlines()):
        if number not in excerpts:
            lines.append(line)
        elif taken := [excerpt.emit() for excerpt in excerpts[number] if excerpt.is_taken]:
            indent, num_empty = line[: len(line) - len(line.lstrip())], 1 if line.startswith(" ") else 2
            if number - 1 in excerpts and re.search(r"^ *(def|class) ", f"{lines[-1]}\n{taken[0]}", re.MULTILINE):
                lines += [""] * num_empty
            lines += [*headers[number], ""] if '"""' in "".join(headers.get(number, ())) else []
            lines.append(textwrap.indent(join(taken, num_empty), indent))
    # collections.abc.Sequence has another name in the module, because Sequence is a class of it.
    return spaced("\n".join(lines)).replace("Sequence[", "ListLike[")


def spaced(text: str) -> str:
    """Return a module's text with two empty lines around its functions and classes, as a formatter puts them."""
    lines, end, is_large = text.splitlines(), 0, False
    new: list[str] = []
    for node in ast.parse(text).body:
        start, was_large, is_large = first_line(node) - 1, is_large, isinstance(node, ast.FunctionDef | ast.ClassDef)
        between = lines[end:start]  # empty lines and comments
        if new and (was_large or is_large):
            between = ["", "", *"\n".join(between).strip("\n").splitlines()]
        new += between + lines[start : node.end_lineno]
        end = node.end_lineno or 0
    return "\n".join([*new, ""])


def join(texts: list[str], num_empty: int = 1) -> str:
    """Join definitions, with empty lines around functions and classes."""
    joined = ""
    for before, text in zip(["", *texts], texts, strict=False):
        is_plain = not any(re.search(r"^ *(def|class) ", each, re.MULTILINE) for each in (before, text))
        joined += ("" if not joined else "\n" if is_plain else "\n" * (num_empty + 1)) + text
    return joined


def names_in(text: str) -> set[str]:
    """Return the names that a text reads or writes. Those of attributes and of keyword arguments begin with "."."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Attribute):
            found |= {f".{node.attr}", node.attr}
        elif isinstance(node, ast.keyword) and node.arg:
            found.add(f".{node.arg}")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            found |= {node.value, f".{node.value}"}  # an annotation, or the name of an attribute
    return found


def missing_names(text: str) -> set[str]:
    """Return the names that a module reads and that nothing in it defines."""
    read: set[str] = set()
    defined = {*dir(builtins), "__file__"}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Name):
            (read if isinstance(node.ctx, ast.Load) else defined).add(node.id)
        elif isinstance(node, ast.arg):
            defined.add(node.arg)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            defined.add(node.name)
        elif isinstance(node, ast.alias):
            defined.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.ExceptHandler) and node.name:
            defined.add(node.name)
    return read - defined


def repeated_names(text: str) -> set[str]:
    """Return the names that a module defines more than once."""
    names = Counter(chain.from_iterable(names_of(node) for owner, node in _definitions(ast.parse(text)) if not owner))
    return {name for name, number in names.items() if number > 1}


def _definitions(tree: ast.Module) -> Iterator[tuple[str, Definition]]:
    """Yield the definitions of a module and of its classes, each with the name of its class or ""."""
    for node in tree.body:
        if isinstance(node, Definition):
            yield "", node
        for member in node.body if isinstance(node, ast.ClassDef) else ():
            if isinstance(node, ast.ClassDef) and isinstance(member, Definition):
                yield node.name, member


def _text(module: str, node: Definition) -> str:
    """Return the lines of a definition, with its decorators and the comments directly above it."""
    lines, _ = read_module(module)
    start = first_line(node) - 1
    while lines[start - 1].lstrip().startswith("#") and "# fmt: " not in lines[start - 1]:
        start -= 1
    return textwrap.dedent("\n".join(lines[start : node.end_lineno]))


def _excerpt(module: str, node: Definition, owner: str, bodies: Mapping[tuple[str, str], str]) -> Excerpt:
    names, text, prefix = names_of(node), _text(module, node), "." if owner else ""
    if not isinstance(node, ast.ClassDef) or "NamedTuple" in map(ast.unparse, node.bases):  # whose fields have their place
        place = module, ".".join(filter(None, (owner, *names)))
        return Excerpt(names, simplified(bodies.get(place, text)), prefix)
    members = [_excerpt(module, member, node.name, bodies) for member in node.body if isinstance(member, Definition)]
    first = node.body[0]
    has_doc = isinstance(first, ast.Expr)
    num_lines = len(text.splitlines()) - ((node.end_lineno or 0) - (first.end_lineno or 0 if has_doc else node.lineno))
    header = "\n".join(text.splitlines()[:num_lines])
    return Excerpt(names, simplified(header if has_doc else f"{header}\n    pass"), prefix, members)


# ---- rules 2 and 3


def simplified(text: str) -> str:
    """Apply the rules to the text of a definition, an edit at a time."""
    read = _names_read(text)
    while (edited := _edited(text)) != text:
        text = edited
    for name in sorted(read - _names_read(text)):
        text = re.sub(rf"^( +){name} = (self\..*\(.*\))$", r"\1\2", text, flags=re.MULTILINE)  # which may change something
        text = re.sub(rf"^ +{name} = .*\n", "", text, flags=re.MULTILINE)
    return text


def _names_read(text: str) -> set[str]:
    return {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}


def _edited(text: str) -> str:
    """Return the text after the first edit that a rule asks for, outermost first."""
    for node in _walk(ast.parse(text)):
        if isinstance(node, ast.Expr | ast.Assign) and ast.unparse(node).startswith(("self.observer.", "self.observer = ")):
            return _with_lines(text, node.lineno - 1, node.end_lineno or 0, [])
        if isinstance(node, ast.FunctionDef) and "observer" in [argument.arg for argument in node.args.args]:
            signature = " ".join(line.strip() for line in text.splitlines()[node.lineno - 1 : node.body[0].lineno - 1])
            signature = re.sub(
                r"\( | (?=\))|,(?= \))", lambda found: found[0].strip(" ,"), re.sub(r",? observer: [^,)]*", "", signature)
            )
            return _with_lines(text, node.lineno - 1, node.body[0].lineno - 1, [" " * node.col_offset + signature])
        for decorator in getattr(node, "decorator_list", ()):
            if ast.unparse(decorator).startswith("wrap_torch_function("):  # which is for traces
                return _with_lines(text, decorator.lineno - 1, decorator.end_lineno, [])
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and (doc := ast.get_docstring(node)):
            first, kept = node.body[0], [doc.splitlines()[0].partition(" Raises: ")[0]]
            if isinstance(node, ast.ClassDef):
                kept = re.split(r"\n+(?=Args|Attributes|Returns|Raises|Source|>>>|$)", doc)[0].splitlines()
                kept[1:] = textwrap.dedent("\n".join(kept[1:])).splitlines()
            if kept != doc.splitlines() or (first.end_lineno or 0) - first.lineno >= len(kept) + 1:
                quoted = ['"""' + kept[0], *kept[1:-1], *([kept[-1], '"""'] if kept[1:] else [])]
                quoted[-1] += '"""' * (not kept[1:])
                new = [(" " * first.col_offset + line).rstrip() for line in quoted]
                return _with_lines(text, first.lineno - 1, first.end_lineno or 0, new)
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation).startswith("Annotated["):
            return _with_lines(text, node.lineno - 1, node.end_lineno or 0, [_with_comment(text, node)])
        for annotation in (getattr(node, "annotation", None), getattr(node, "returns", None)):
            for part in ast.walk(annotation) if isinstance(annotation, ast.expr) else ():
                if isinstance(part, ast.Constant) and _is_type(part.value):
                    return _replaced(text, part, str(part.value))
    return text


def _with_comment(text: str, node: ast.AnnAssign) -> str:
    """Return a field, declared as `name: Annotated[type, ..., Doc(meaning)] = value`, with the meaning as its comment."""
    kind, *others = node.annotation.slice.elts  # type: ignore[attr-defined]
    calls = [each for each in others if isinstance(each, ast.Call) and ast.unparse(each.func) == "Doc"]
    meaning = ast.literal_eval(calls[0].args[0]).partition(". ")[0].rstrip(".")
    assert node.value is not None, "a declared parameter has a default"
    return f"{ast.unparse(node.target)}: {_segment(text, kind)} = {_segment(text, node.value)}  # {meaning}"


def _is_type(value: object) -> bool:
    """Whether a string of an annotation is a type, and not the axes of a shape."""
    if not isinstance(value, str) or not value[:1].isalpha():
        return False
    try:
        ast.parse(value, mode="eval")
    except SyntaxError:
        return False
    return True


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes from the outermost on, except those in f-strings, whose places Python 3.11 does not know."""
    nodes = [node]
    for each in nodes:
        yield each
        nodes += () if isinstance(each, ast.JoinedStr) else ast.iter_child_nodes(each)


def _segment(text: str, node: ast.expr) -> str:
    segment = ast.get_source_segment(text, node)
    assert segment is not None, "the node is a part of the text"
    return segment


def _replaced(text: str, node: ast.expr, new: str) -> str:
    lines = text.splitlines(keepends=True)
    start = sum(map(len, lines[: node.lineno - 1])) + len(lines[node.lineno - 1].encode()[: node.col_offset].decode())
    return text[:start] + new + text[start + len(_segment(text, node)) :]


def _with_lines(text: str, start: int, stop: int, new: list[str]) -> str:
    lines = text.splitlines()
    return "\n".join(lines[:start] + new + lines[stop:])
