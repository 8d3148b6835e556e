"""Small changes of a source, as a mistake would make them: other comparisons, operators and constants, and lines left out."""

import ast
from collections.abc import Iterator

COMPARISONS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
OPERATORS = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip


def mutants(source: str, ignored: frozenset[str] = frozenset()) -> Iterator[tuple[str, str]]:
    """Yield a description and a source for each change of a function's body.

    ignored: statements with an `if` on one of these names, or a call of one, stay as they are.
    """
    (function,) = ast.parse(source).body
    for index, node in enumerate(ast.walk(function)):
        for number in range(2):
            tree = ast.parse(source)
            changed = list(ast.walk(tree.body[0]))[index]
            if _is_left_alone(node, function, ignored) or not _change(tree, changed, number):
                continue
            ast.fix_missing_locations(tree)
            line = ast.unparse(node).partition("\n")[0]
            yield f"line {node.lineno}: {line[:60]} [{type(node).__name__} {number}]", ast.unparse(tree)


def _is_left_alone(node: ast.AST, function: ast.FunctionDef, ignored: frozenset[str]) -> bool:
    outside = [function.args, *function.decorator_list, *([function.returns] if function.returns else [])]
    outside += [part for part in ast.walk(function) if isinstance(part, ast.Assert | ast.Raise | ast.AnnAssign)]
    outside += function.body[:1] if ast.get_docstring(function) else []
    for part in ast.walk(function):
        named = part.test if isinstance(part, ast.If) else part if isinstance(part, ast.Expr) else None
        if named and ignored & {name.attr for name in ast.walk(named) if isinstance(name, ast.Attribute)}:
            outside.append(part)
    return any(node is inner for part in outside for inner in ast.walk(part))


def _change(tree: ast.Module, node: ast.AST, number: int) -> bool:
    """Change a node in place. number: which of its changes. Returns False if it has no such change."""
    if isinstance(node, ast.Compare) and number == 0:
        node.ops[0] = COMPARISONS[type(node.ops[0])]()
    elif isinstance(node, ast.BinOp | ast.BoolOp | ast.AugAssign) and type(node.op) in OPERATORS and number == 0:
        node.op = OPERATORS[type(node.op)]()
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not) and number == 0:
        _replace(tree, node, node.operand)
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool) and number == 0:
        node.value = not node.value
    elif isinstance(node, ast.Constant) and type(node.value) in (int, float):
        node.value += 1 - 2 * number
    elif (isinstance(node, ast.Assign | ast.AugAssign) and number == 1) or (isinstance(node, ast.Expr) and number == 0):
        _replace(tree, node, ast.Pass())
    elif isinstance(node, ast.If | ast.While | ast.IfExp) and number == 0:
        node.test = ast.UnaryOp(ast.Not(), node.test)
    elif isinstance(node, ast.Call) and len(node.args) == 2 and ast.unparse(node.func) not in ("min", "max") and number == 0:
        node.args.reverse()
    elif isinstance(node, ast.Return) and node.value is not None and number == 0:
        node.value = ast.Constant(None)
    else:
        return False
    return True


def _replace(tree: ast.Module, old: ast.AST, new: ast.AST) -> None:
    class Replace(ast.NodeTransformer):
        def visit(self, node: ast.AST) -> ast.AST:
            return ast.copy_location(new, node) if node is old else self.generic_visit(node)

    Replace().visit(tree)
