"""Take the functions of a notebook without running it, so that its solutions need no copy of them."""

import ast
import builtins
from pathlib import Path
from types import ModuleType

import nbformat

FOLDER = Path(__file__).parents[1]


def definitions(stem: str) -> ModuleType:
    """A module with the imports, functions, classes and UPPER_CASE constants of a notebook.

    A constant that is computed from something else than these is left out. What a function reads besides them is set on the
    module: `notebook.llm = LLM()`.
    """
    cells = nbformat.read(FOLDER / f"{stem}.ipynb", as_version=4).cells
    module = ModuleType(stem)
    for cell in cells:
        for node in ast.parse(cell.source).body if cell.cell_type == "code" else ():
            is_constant = isinstance(node, ast.Assign) and all(
                isinstance(target, ast.Name) and target.id.isupper() for target in node.targets
            )
            if is_constant and not _names_of(node) <= set(vars(module)) | set(dir(builtins)):
                continue
            if is_constant or isinstance(node, ast.Import | ast.ImportFrom | ast.FunctionDef | ast.ClassDef):
                code = compile(ast.Module([node], type_ignores=[]), f"{stem}.ipynb", "exec")
                exec(code, vars(module))
    return module


def _names_of(node: ast.AST) -> set[str]:
    """The names that an expression reads."""
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Load)}
