"""What every Triton kernel keeps to, read from its source: rules whose breach no run on a CPU can show.

Each rule takes a parsed file and yields what breaks it as "file:line: what". A short kernel that breaks it stands
beside it, so that a rule that finds nothing is known to look.
"""

import ast
from pathlib import Path

import pytest
import torch
from compare import random_inputs
from kernel_kinds import INT, KERNELS, LONG, NONE, OTHER, Pointer, constants_of, is_jit, jit_functions, problems_of

from msa_triton import index_kl_loss, select_blocks, sparse_attention
from msa_triton.config import CANDIDATES, FIRST, INTERPRETER, SMALLEST, SMALLEST_DOT, padded
from msa_triton.launch import recording

PACKAGE = Path(__file__).parent.parent / "msa_triton"
TREES = {path.name: ast.parse(path.read_text()) for path in sorted(PACKAGE.glob("*.py"))}
# Head counts that a model has once and for all, widths, and the tile sizes that follow from them.
CONSTEXPR = {
    "R", "KV_SHARE", "KEY_SHARE", "HEADS_PER_KEY", "PAIRS", "D", "D_PAD", "DV", "DV_PAD", "DI", "DI_PAD", "WIDTH",
    "PAD", "BLOCK", "TOPK", "SLOTS", "SLOTS_PAD", "BQ", "BH", "BN", "ROWS", "CHUNKS", "PIECES", "DENSE",
}  # fmt: skip
MOST_LINES = 120


def nodes(tree, kind):
    return (node for node in ast.walk(tree) if isinstance(node, kind))


def calls(tree, name):
    """Calls of tl.<name>."""
    return (node for node in nodes(tree, ast.Call) if ast.unparse(node.func) == f"tl.{name}")


def keywords(call):
    return {keyword.arg: keyword.value for keyword in call.keywords}


def at(file, node, what="") -> str:
    return f"{file}:{node.lineno}: {what or ast.unparse(node)}"


def masked_loads_say_what_the_rest_is(file, tree):
    for load in calls(tree, "load"):
        if (len(load.args) > 1 or "mask" in keywords(load)) and "other" not in keywords(load):
            yield at(file, load)


def dots_are_exact(file, tree):
    """Without the keyword a float32 product is rounded to TF32 on a GPU."""
    for dot in calls(tree, "dot"):
        if ast.unparse(keywords(dot).get("input_precision", ast.Constant(None))) != "'ieee'":
            yield at(file, dot)


def nothing_is_atomic(file, tree):
    for node in nodes(tree, ast.Attribute):
        if node.attr.startswith("atomic"):
            yield at(file, node)


def nothing_is_tuned_at_run_time(file, tree):
    for function in nodes(tree, ast.FunctionDef):
        for decorator in function.decorator_list:
            if any(word in ast.unparse(decorator) for word in ("autotune", "heuristics")):
                yield at(file, decorator)


def kernels_fit_on_two_screens(file, tree):
    for function in filter(is_jit, nodes(tree, ast.FunctionDef)):
        lines = function.end_lineno - function.decorator_list[0].lineno + 1
        if lines > MOST_LINES:
            yield at(file, function, f"{function.name} has {lines} lines")


def grids_have_one_axis(file, tree):
    for call in (*calls(tree, "program_id"), *calls(tree, "num_programs")):
        if ast.unparse(call.args[0] if call.args else keywords(call)["axis"]) != "0":
            yield at(file, call)


def lengths_are_not_constants(file, tree):
    """Each new value of a constexpr compiles the kernel again."""
    for function in filter(is_jit, nodes(tree, ast.FunctionDef)):
        for argument in function.args.args:
            constant = argument.annotation is not None and "constexpr" in ast.unparse(argument.annotation)
            if constant and argument.arg not in CONSTEXPR:
                yield at(file, argument)


def kernels_are_at_module_level(file, tree):
    for function in filter(is_jit, nodes(tree, ast.FunctionDef)):
        if function not in tree.body:
            yield at(file, function, function.name)


def triton_names_are_public(file, tree):
    for node in nodes(tree, (ast.Import, ast.ImportFrom, ast.Attribute)):
        if isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            names = [alias.name for alias in node.names]
        for parts in (name.split(".") for name in names):
            hidden = [part for part in parts[1:] if part.startswith("_") and not part.endswith("__")]
            if parts[0] in ("triton", "tl") and (hidden or "interpreter" in parts):
                yield at(file, node)


JIT = "import triton\nimport triton.language as tl\n@triton.jit\ndef kernel(x, y, N, BQ: tl.constexpr):\n"
RULES = {
    masked_loads_say_what_the_rest_is: JIT + "    a = tl.load(x + y, mask=y < N)",
    dots_are_exact: JIT + "    a = tl.dot(x, y)",
    nothing_is_atomic: JIT + "    tl.atomic_add(x, y)",
    nothing_is_tuned_at_run_time: JIT.replace("@triton.jit", "@triton.autotune([], [])\n@triton.jit") + "    pass",
    kernels_fit_on_two_screens: JIT + "    x += y\n" * (MOST_LINES - 1),
    grids_have_one_axis: JIT + "    a = tl.program_id(1)",
    lengths_are_not_constants: JIT.replace("N,", "N: tl.constexpr,") + "    pass",
    kernels_are_at_module_level: "def outer():\n    @triton.jit\n    def kernel(x):\n        pass",
    triton_names_are_public: "from triton.runtime.interpreter import interpreter_builder",
}
EXACTLY_ENOUGH = {
    masked_loads_say_what_the_rest_is: JIT + "    a = tl.load(x + y, mask=y < N, other=0) + tl.load(x)",
    dots_are_exact: JIT + "    a = tl.dot(x, y, input_precision='ieee')",
    kernels_fit_on_two_screens: JIT + "    x += y\n" * (MOST_LINES - 2),
    triton_names_are_public: "import triton\nfrom triton.language import load\nprint(triton.__version__)",
}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_rule(rule):
    assert [found for file, tree in TREES.items() for found in rule(file, tree)] == []
    broken = list(rule("broken.py", ast.parse(RULES[rule])))
    assert len(broken) == 1 and broken[0].startswith("broken.py:"), broken
    if rule in EXACTLY_ENOUGH:
        assert list(rule("right.py", ast.parse(EXACTLY_ENOUGH[rule]))) == []


@pytest.mark.parametrize("source", [
    "from triton._C import libtriton", "import triton._utils", "x = triton._C", "from triton import _utils",
    "import triton.runtime.interpreter", "x = tl.core._unwrap",
])  # fmt: skip
def test_private_names_are_found_however_they_are_written(source):
    assert list(triton_names_are_public("broken.py", ast.parse(source)))


def test_the_rules_see_every_kernel():
    kernels = {name for name in jit_functions(TREES) if name.endswith("_kernel")}
    assert kernels == KERNELS


# Addresses


@pytest.fixture(scope="module")
def launches():
    """Every kernel as the launchers call it: both schedules and dense, with documents and without."""
    with recording("sm_90") as found:
        for cu_seqlens in (None, [0, 5, 37]):
            q, k, v, index_q, index_k = (t.requires_grad_() for t in random_inputs(0, B=1, N=37).values())
            options = dict(block_size=16, cu_seqlens=cu_seqlens, backend="triton")
            ids = select_blocks(index_q, index_k, topk=2, **options)
            for listed, schedule in ((ids, "query"), (ids, "key"), (None, "query")):
                out, lse = sparse_attention(q, k, v, listed, schedule=schedule, **options)
                kl = index_kl_loss(q, k, lse, index_q, index_k, listed, **options)
                torch.autograd.grad((out.sum() + kl), (q, index_q))
    return found


def kinds(launch) -> dict:
    """{argument: kind} of a launch, for the arguments that are not constexpr."""

    def kind(value):
        if isinstance(value, torch.Tensor):
            return Pointer({torch.int32: INT, torch.int64: LONG}.get(value.dtype, OTHER))
        if isinstance(value, tuple):
            return tuple(map(kind, value))
        return NONE if value is None else INT if isinstance(value, int) else OTHER

    names = launch.kernel.arg_names
    return {name: kind(value) for name, value in zip(names, launch.arguments, strict=False)}


def test_addresses_are_int64(launches):
    """An address is a pointer plus int64; no stride, length or count is multiplied in int32.

    2**20 tokens of 64 heads of width 128 are 2**33 elements, and Triton computes with integer arguments in int32 when
    their values fit. `kernel_kinds` follows the kinds of a kernel's values from its arguments, as the launchers pass
    them, through the helpers. `tl.arange` and `tl.program_id`, int32 arguments and elements of int32 tensors have to be
    cast before they enter an address; a column that is only compared need not be.
    """
    functions, constants = jit_functions(TREES), constants_of(TREES)
    variants = {(one.kernel.__name__, tuple(kinds(one).items())): kinds(one) for one in launches}
    assert {name for name, _ in variants} == KERNELS
    found = {problem for (name, _), one in variants.items() for problem in problems_of(name, one, functions, constants)}
    assert not found, "\n".join(sorted(found))


HELPER = """
@triton.jit
def row_of(x, head, strides, BQ: tl.constexpr):
    return x + head * strides[1] + tl.arange(0, BQ).to(tl.int64) * strides[2]
@triton.jit
def kernel(x, ids, table, N, strides, R: tl.constexpr, BQ: tl.constexpr):
"""


@pytest.mark.parametrize("body, broken", [
    ("tl.load(x + tl.arange(0, BQ))", True),
    ("tl.load(x + tl.arange(0, BQ).to(tl.int64))", False),
    ("tl.load(x + tl.program_id(0) * BQ)", True),
    ("tl.load(x + tl.program_id(0).to(tl.int64) * N)", False),
    ("tl.load(x + (tl.program_id(0) * N).to(tl.int64))", True),  # the product has overflowed before the cast
    ("tl.load(x + tl.load(ids))", True),
    ("tl.load(x + tl.load(ids).to(tl.int64) * N)", False),
    ("tl.load(x + tl.load(table) * N)", False),
    ("tl.load(ids) * strides[0]", True),
    ("row_of(x, tl.program_id(0), strides, BQ)", True),
    ("row_of(x, tl.program_id(0).to(tl.int64), strides, BQ)", False),
    ("tl.arange(0, BQ)[None, :] < N", False),
    ("x += N * R", True),
    ("tl.store(x + tl.arange(0, BQ), 0.0)", True),
    ("for head in range(R):\n        tl.load(x + head * strides[1])", True),
    ("for head in range(tl.load(table), N):\n        tl.load(x + head * strides[1])", False),
    ("at = tl.load(table)\n    for head in range(R):\n        tl.load(x + at)\n        at = tl.load(ids)", True),
    ("if N is None:\n        tl.load(x + N)", False),
    ("if N > 4:\n        tl.load(x + N)", True),
])  # fmt: skip
def test_kinds_are_followed(body, broken):
    trees = {"source.py": ast.parse(HELPER + f"    {body}\n")}
    arguments = {"x": Pointer(OTHER), "ids": Pointer(INT), "table": Pointer(LONG), "N": INT, "strides": (INT,) * 4}
    found = problems_of("kernel", arguments, jit_functions(trees), constants_of(trees))
    assert bool(found) is broken, found


# Tiles


def test_tiles_are_large_enough_for_a_matrix_product():
    """Triton compiles no product with a side below 16 and only powers of two; its interpreter takes anything."""

    def fits(side):
        return side >= SMALLEST_DOT and side & (side - 1) == 0

    assert SMALLEST_DOT == 16 and all(fits(padded(width)) and padded(width) >= width for width in range(1, 1025))
    chosen = [tile for tiles in (*CANDIDATES.values(), SMALLEST) for tile in tiles]
    chosen += [tile for tiles in FIRST.values() for tile in tiles.values()]
    for tile in {*chosen, INTERPRETER}:
        assert fits(tile.rows) and (tile.keys == 0 or fits(tile.keys)), tile
        for share in range(1, 131):
            split, student = tile.split(share), tile.split(share, SMALLEST_DOT)
            for sizes in (split, student):
                assert sizes["BQ"] * sizes["BH"] == tile.rows and 1 <= sizes["BH"] <= padded(share, 1)
            assert fits(student["BQ"]), (tile, share)  # index_query has products with a row for each query


def test_recorded_tiles_are_large_enough(launches):
    for one in launches:
        name, sizes = one.kernel.__name__, one.constants
        sides = [sizes[side] for side in ("BLOCK", "BN", "D_PAD", "DV_PAD", "DI_PAD", "PAD") if side in sizes]
        if name not in ("sum_tasks_kernel", "delta_kernel"):
            sides.append(sizes["BQ"] * sizes.get("BH", 1))
        if name == "index_query_kernel":
            sides.append(sizes["BQ"])
        assert min(sides) >= SMALLEST_DOT, (name, sizes)
        assert set(sizes) - {"num_warps", "num_stages"} <= CONSTEXPR
