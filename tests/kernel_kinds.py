"""What width the integers of a Triton kernel have: its source walked with the kinds of its arguments.

A kernel's addresses are right for any size if (1) what is added to a pointer is int64, or a constant, and (2) no
product with a runtime argument (a stride, a length, a count) is taken in int32. `problems_of` follows the values of a
kernel, through the helpers it calls, and says where either is broken. Columns that are only compared may stay int32.
"""

import ast
from dataclasses import dataclass

KERNELS = {
    "select_kernel", "forward_query_kernel", "forward_key_kernel", "combine_kernel", "normalizer_kernel",
    "delta_kernel", "dq_kernel", "dkdv_kernel", "sum_tasks_kernel", "index_query_kernel", "index_key_kernel",
}  # fmt: skip

LONG, INT, SMALL, OTHER, NONE = "int64", "int32", "constant", "other", "None"  # other: floats and masks
SAME_AS_FIRST = ("max", "min", "sum", "trans", "reshape", "broadcast_to", "abs")


@dataclass(frozen=True)
class Pointer:
    """To elements of a kind."""

    element: str


def promoted(*kinds):
    """The kind of a sum of such values."""
    for kind in (OTHER, LONG, INT):
        if kind in kinds:
            return kind
    return kinds[0] if kinds else OTHER


def weakest(one, other):
    """What is known of a value that comes from one of two branches."""
    if one == other:
        return one
    if isinstance(one, tuple) and isinstance(other, tuple):
        return tuple(map(weakest, one, other))
    for kind in (INT, SMALL, LONG):
        if kind in (one, other):
            return kind
    return OTHER


def is_jit(node) -> bool:
    return isinstance(node, ast.FunctionDef) and any("triton.jit" in ast.unparse(d) for d in node.decorator_list)


def jit_functions(trees: dict[str, ast.Module]) -> dict:
    """{name: (file, definition)} of the kernels and helpers at the module level of parsed files."""
    return {node.name: (file, node) for file, tree in trees.items() for node in tree.body if is_jit(node)}


def constants_of(trees: dict[str, ast.Module]) -> dict:
    """The kinds of the names in capitals that the files define."""
    found = {}
    for tree in trees.values():
        for node in tree.body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                text = ast.unparse(node.value)
                found[node.targets[0].id] = OTHER if "." in text.replace("tl.constexpr", "") else SMALL
    return found


def problems_of(kernel: str, arguments: dict, functions: dict, constants: dict) -> list[str]:
    """What is wrong with a kernel, as "file:line: what"; arguments: {name: kind} of those that are not constexpr."""
    found = {}
    _Walk(functions, constants, found).call(kernel, arguments)
    return sorted(found)


class _Walk:
    def __init__(self, functions, constants, found):
        self.functions, self.constants, self.found = functions, constants, found
        self.file, self.values, self.returned = "", {}, None

    def call(self, name, arguments):
        self.file, definition = self.functions[name]
        self.values = {
            argument.arg: arguments.get(argument.arg, SMALL if "constexpr" in ast.unparse(argument) else OTHER)
            for argument in definition.args.args
        }
        self.block(definition.body)
        return self.returned

    def report(self, node, message):
        self.found[f"{self.file}:{node.lineno}: {message}: {ast.unparse(node)}"] = True

    def block(self, statements):
        for statement in statements:
            self.statement(statement)

    def statement(self, node):
        if isinstance(node, ast.Assign):
            self.assign(node.targets[0], self.kind(node.value))
        elif isinstance(node, ast.AugAssign):
            self.assign(node.target, self.kind(ast.copy_location(ast.BinOp(node.target, node.op, node.value), node)))
        elif isinstance(node, ast.Return):
            self.returned = self.kind(node.value)
        elif isinstance(node, ast.If):
            self.branch(node)
        elif isinstance(node, ast.For):
            before = dict(self.values)
            self.assign(node.target, promoted(*map(self.kind, node.iter.args)))
            for _ in range(2):  # what the first round leaves behind is what the second one finds
                self.block(node.body)
                self.values = self.merged(self.values, before)
        elif isinstance(node, ast.Expr):
            self.kind(node.value)
        else:
            raise NotImplementedError(f"{self.file}:{node.lineno}: {ast.unparse(node)}")

    def branch(self, node):
        wanted = self.decided(node.test)
        if wanted is not None:
            return self.block(node.body if wanted else node.orelse)
        self.kind(node.test)
        before = dict(self.values)
        self.block(node.body)
        after, self.values = self.values, before
        self.block(node.orelse)
        self.values = self.merged(after, self.values)

    def decided(self, test):
        """True or False for `x is None` and `x is not None`, which Triton decides while it compiles; else None."""
        if isinstance(test, ast.Compare) and isinstance(test.ops[0], (ast.Is, ast.IsNot)):
            return (self.kind(test.left) == NONE) == isinstance(test.ops[0], ast.Is)
        return None

    @staticmethod
    def merged(one, other):
        return {n: weakest(one.get(n, other.get(n)), other.get(n, one.get(n))) for n in one.keys() | other.keys()}

    def assign(self, target, kind):
        if isinstance(target, ast.Tuple):
            kinds = kind if isinstance(kind, tuple) else (kind,) * len(target.elts)
            for part, part_kind in zip(target.elts, kinds, strict=True):
                self.assign(part, part_kind)
        else:
            self.values[target.id] = kind

    def kind(self, node):
        if isinstance(node, ast.Constant):
            return NONE if node.value is None else SMALL if type(node.value) is int else OTHER
        if isinstance(node, ast.Name):
            return self.values.get(node.id, self.constants.get(node.id, OTHER))
        if isinstance(node, ast.Tuple):
            return tuple(map(self.kind, node.elts))
        if isinstance(node, ast.BinOp):
            return self.operation(node)
        if isinstance(node, ast.UnaryOp):
            return self.kind(node.operand)
        if isinstance(node, ast.Subscript):
            value = self.kind(node.value)
            return value[node.slice.value] if isinstance(value, tuple) else value
        if isinstance(node, ast.Call):
            return self.function(node)
        if isinstance(node, ast.Compare):
            for part in (node.left, *node.comparators):
                self.kind(part)
        return OTHER

    def operation(self, node):
        left, right = self.kind(node.left), self.kind(node.right)
        for pointer, offset in ((left, right), (right, left)):
            if isinstance(pointer, Pointer):
                if offset not in (LONG, SMALL):
                    self.report(node, f"an address from an offset of kind {offset}")
                return pointer
        if isinstance(node.op, ast.Mult) and {left, right} <= {INT, SMALL} and INT in (left, right):
            self.report(node, "a product in int32")
        return OTHER if isinstance(node.op, ast.Div) else promoted(left, right)

    def function(self, node):
        arguments = [self.kind(argument) for argument in node.args]
        for part in (*(keyword.value for keyword in node.keywords), getattr(node.func, "value", None)):
            if part is not None:
                self.kind(part)
        name = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
        if name in self.functions and isinstance(node.func, ast.Name):
            parameters = [argument.arg for argument in self.functions[name][1].args.args]
            helper = _Walk(self.functions, self.constants, self.found)
            return helper.call(name, dict(zip(parameters, arguments, strict=True)))
        if name == "to":
            return {"tl.int64": LONG, "tl.int32": INT}.get(ast.unparse(node.args[0]), OTHER)
        if name in ("program_id", "arange"):
            return INT
        if name == "load":
            return arguments[0].element if isinstance(arguments[0], Pointer) else OTHER
        if name in ("where", "minimum", "maximum", "cdiv"):
            return promoted(*arguments[-2:])
        if name in ("full", "zeros"):
            return {"tl.int64": LONG, "tl.int32": INT}.get(ast.unparse(node.args[-1]), OTHER)
        return arguments[0] if name in SAME_AS_FIRST else OTHER
