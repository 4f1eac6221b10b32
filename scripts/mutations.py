"""Change a syntax tree in small ways, one at a time, to make mutants.

A change stands in a function, or in the value of a name of the module. Texts, annotations,
defaults of arguments, class bodies and what is raised are left as they are.
"""

import ast
import copy
from collections.abc import Callable, Iterator
from typing import NamedTuple

COMPARED = {
    ast.Lt: (ast.LtE, ast.GtE), ast.LtE: (ast.Lt, ast.Gt), ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt), ast.Eq: (ast.NotEq,), ast.NotEq: (ast.Eq,), ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,), ast.In: (ast.NotIn,), ast.NotIn: (ast.In,),
}  # fmt: skip
COMPUTED = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd, ast.BitXor: ast.BitOr, ast.LShift: ast.RShift, ast.RShift: ast.LShift,
}  # fmt: skip
_PAIRS = "min max, any all, floor ceil, amin amax, argmin argmax, add sub, mul div, prod sum"
CALLED = {a: b for pair in _PAIRS.split(", ") for a, b in (pair.split(), pair.split()[::-1])}
TEXTS = (ast.JoinedStr, ast.List, ast.ListComp)
NOT_CHANGED = ("strict", "stacklevel", "encoding", "file", "flush")  # keywords of calls


class Change(NamedTuple):
    """One change of a tree. apply: makes it in the tree that it was found in."""

    function: str  # dotted, "" for a name of the module
    line: int
    kind: str
    old: str
    new: str
    apply: Callable[[], None]


def changes(tree: ast.Module) -> list[Change]:
    """Return the possible changes of `tree`, in its order."""
    return list(_in_body(tree.body, ""))


def _in_body(body: list[ast.stmt], prefix: str) -> Iterator[Change]:
    """Yield those of a module or class: of its functions, and of the names of a module."""
    for statement in body:
        if isinstance(statement, ast.FunctionDef):
            yield from _in_function(statement, prefix + statement.name)
        elif isinstance(statement, ast.ClassDef):
            yield from _in_body(statement.body, f"{prefix}{statement.name}.")
        elif isinstance(statement, ast.Assign) and not prefix:
            yield from _of_children(statement, "", fields=("value",))


def _in_function(function: ast.FunctionDef, name: str) -> Iterator[Change]:
    body = function.body
    if isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
        body = body[1:]  # the docstring
    for statement in body:
        yield from _of_node(function, "body", function.body.index(statement), statement, name)


def _of_children(parent: ast.AST, name: str, fields: tuple | None = None) -> Iterator[Change]:
    for field, value in ast.iter_fields(parent):
        if fields is not None and field not in fields:
            continue
        for place, node in enumerate(value) if isinstance(value, list) else ((None, value),):
            if isinstance(node, ast.AST):
                yield from _of_node(parent, field, place, node, name)


def _of_node(
    parent: ast.AST, field: str, place: int | None, node: ast.AST, name: str
) -> Iterator[Change]:
    """Yield the changes of `node`, which is this field of its parent, and of all below it."""
    if isinstance(node, ast.FunctionDef):
        yield from _in_function(node, f"{name}.{node.name}")
        return
    if isinstance(node, ast.keyword) and node.arg in NOT_CHANGED:
        return
    if isinstance(node, (ast.Raise, ast.Assert, ast.ClassDef, ast.arguments)):
        if isinstance(node, ast.Raise):
            yield _change(parent, field, place, node, ast.Pass(), name, "not raised")
        return
    for kind, new in _instead_of(node):
        yield _change(parent, field, place, node, new, name, kind)
    fields = ("value",) if isinstance(node, ast.AnnAssign) else None
    yield from _of_children(node, name, fields)


def _change(parent, field, place, node, new, name, kind) -> Change:
    def apply() -> None:
        if place is None:
            setattr(parent, field, placed)
        else:
            getattr(parent, field)[place] = placed

    placed = ast.fix_missing_locations(ast.copy_location(new, node))
    return Change(name, node.lineno, kind, _text(node), _text(new), apply)


def _text(node: ast.AST) -> str:
    return ast.unparse(node).partition("\n")[0]


def _instead_of(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    if isinstance(node, ast.Constant):
        yield from (("constant", ast.Constant(value)) for value in _other_values(node.value))
    elif isinstance(node, ast.stmt):
        yield from _instead_of_statement(node)
    elif isinstance(node, ast.Call):
        yield from _instead_of_call(node)
    else:
        yield from _instead_of_operator(node)


def _other_values(value: object) -> list:
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, value - 1]
    return [value * 1.5 if value else 1.0] if isinstance(value, float) else []


def _instead_of_statement(node: ast.stmt) -> Iterator[tuple[str, ast.AST]]:
    match node:
        case ast.AugAssign(op=operator):
            if type(operator) in COMPUTED:
                yield "arithmetic", _with(node, op=COMPUTED[type(operator)]())
            yield "left out", ast.Pass()
        case ast.If(test=test) | ast.While(test=test) if not isinstance(test, ast.Compare):
            yield "condition", _with(node, test=ast.UnaryOp(ast.Not(), test))
        case ast.Return(value=value) if value is not None and not _is_none(value):
            yield "returned", _with(node, value=ast.Constant(None))
        case ast.Expr(value=ast.Call()) | ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield "left out", ast.Pass()
        case ast.Continue():
            yield "left out", ast.Break()
        case ast.Break():
            yield "left out", ast.Pass()


def _instead_of_operator(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    match node:
        case ast.Compare(ops=[operator]):
            for new in COMPARED[type(operator)]:
                yield "comparison", _with(node, ops=[new()])
        case ast.BinOp(left=left, right=right, op=operator):
            text = isinstance(left, TEXTS) or isinstance(right, TEXTS) or _is_text(left, right)
            if type(operator) in COMPUTED and not text:
                yield "arithmetic", _with(node, op=COMPUTED[type(operator)]())
        case ast.UnaryOp(operand=operand):
            yield "sign", operand
        case ast.BoolOp(op=operator, values=values):
            other = ast.Or() if isinstance(operator, ast.And) else ast.And()
            yield "and, or", _with(node, op=other)
            for value in values:
                others = [one for one in values if one is not value]
                alone = len(others) == 1
                yield "and, or", others[0] if alone else _with(node, values=others)
        case ast.IfExp(body=body, orelse=orelse):
            yield "condition", _with(node, body=orelse, orelse=body)


def _instead_of_call(node: ast.Call) -> Iterator[tuple[str, ast.AST]]:
    function, arguments = node.func, node.args
    called = function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")
    if called in CALLED:
        field = "id" if isinstance(function, ast.Name) else "attr"
        yield "called", _with(node, func=_with(function, **{field: CALLED[called]}))
    if called in ("abs", "sorted", "round", "float", "int") and arguments:
        yield "called", arguments[0]
    if len(arguments) >= 2 and not any(isinstance(one, ast.Starred) for one in arguments[:2]):
        yield "arguments", _with(node, args=[arguments[1], arguments[0], *arguments[2:]])
    for keyword in node.keywords:
        if keyword.arg is not None and keyword.arg not in NOT_CHANGED:
            rest = [other for other in node.keywords if other is not keyword]
            yield "arguments", _with(node, keywords=rest)


def _with(node: ast.AST, **fields) -> ast.AST:
    new = copy.copy(node)
    for field, value in fields.items():
        setattr(new, field, value)
    return new


def _is_text(*nodes: ast.expr) -> bool:
    return any(isinstance(one, ast.Constant) and isinstance(one.value, str) for one in nodes)


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None
