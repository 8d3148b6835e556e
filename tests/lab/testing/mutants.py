"""Changes of one place of a source, which tests should find. After `python -m tests.mutations record`, this command says which
changes of the scheduler the explorer's worlds find:

    python -m tests.mutations try nanoinfer/scheduling --tests tests/lab/testing

A change turns a comparison, + or -, and or or, not, or a number, or it removes a statement. What is told to observers and
users is left out.
"""

import ast

FEATURES = {"observer"}
FUNCTIONS = {"explain", "named_tables", "close", "num_blocks_for_forks", "scheduling_classes"}
PAIRS = (
    (ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.In, ast.NotIn), (ast.Is, ast.IsNot), (ast.Add, ast.Sub),
    (ast.And, ast.Or),
)  # fmt: skip
OTHER = {one: other for pair in PAIRS for one, other in (pair, pair[::-1])}


class Change(ast.NodeTransformer):
    """Visits the places that can change, and changes the one with the given number."""

    def __init__(self, number: int = -1):
        self.number, self.places, self.function = number, [], ""

    def visit(self, node: ast.AST) -> ast.AST:
        match node:
            case ast.FunctionDef(name=name) if name in FUNCTIONS:
                return node
            case ast.If(test=test) | ast.Expr(value=test) if any(
                getattr(part, "attr", "") in FEATURES for part in ast.walk(test)
            ):
                return node
            case ast.Assign(targets=[ast.Name(name)]) if name.isupper():  # a constant of the module
                return node
            case ast.Assert() | ast.Raise() | ast.arguments() | ast.AnnAssign() | ast.Call(func=ast.Name("dataclass")):
                return node
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                self.function = name
            case ast.Compare(ops=[operator]) if type(operator) in OTHER:
                return self.place(node, ast.Compare(node.left, [OTHER[type(operator)]()], node.comparators))
            case ast.BinOp(op=ast.Add() | ast.Sub()):
                return self.place(node, ast.BinOp(node.left, OTHER[type(node.op)](), node.right))
            case ast.BoolOp():
                return self.place(node, ast.BoolOp(OTHER[type(node.op)](), node.values))
            case ast.UnaryOp(op=ast.Not()):
                return self.place(node, node.operand)
            case ast.Constant(value=bool(value)):
                return self.place(node, ast.Constant(not value))
            case ast.Constant(value=int(value)):
                return self.place(node, ast.Constant(value + 1))
            case ast.Assign() | ast.AugAssign() | ast.Expr(value=ast.Call()):
                return self.place(node, ast.Pass())
        return self.generic_visit(node)

    def place(self, node: ast.AST, changed: ast.AST) -> ast.AST:
        self.places.append((self.function, node.lineno, f"{ast.unparse(node)} -> {ast.unparse(changed)}"))
        if len(self.places) - 1 == self.number:
            return ast.copy_location(changed, node)
        return self.generic_visit(node)
