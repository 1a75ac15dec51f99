"""Compiles every kernel for named GPUs, on a machine that needs none of them, and reports what the compilers made.

    python -m msa_triton.compile_report [--shape m3 | small] [--dtype bfloat16 ...] [--target sm_90 ...] [--json FILE]

The launchers run in a recording: they prepare every launch as for the named GPU, with the tiles they would choose, and
nothing is launched. Exit status 1 if a kernel does not compile or does not fit the shared memory of its target.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

TARGETS = ("sm_80", "sm_90", "sm_100", "sm_120", "gfx942", "gfx950")
SHAPES = {
    "m3": dict(H=64, Hkv=4, Hidx=4, Hik=1, D=128, block_size=128, topk=16, N=2048),
    "small": dict(H=16, Hkv=4, Hidx=4, Hik=1, D=64, block_size=64, topk=16, N=2048),
}
DTYPES = ("bfloat16", "float16", "float32")
POINTERS = {
    torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.int32: "i32", torch.int64: "i64",
}  # fmt: skip
MATRIX_INSTRUCTIONS = ("UTCHMMA", "UTCQMMA", "UTCOMMA", "HGMMA", "HMMA", "v_mfma", "v_wmma")


@dataclass(frozen=True)
class Compiled:
    """What a kernel became on a target.

    Attributes:
        variant: "sparse", or "dense" where the list of blocks is the whole prefix.
        registers: of a thread. stack_bytes: of a thread, where spilled registers go. spill_loads, spill_stores: bytes
            of spilled registers in the code of a thread. shared_bytes, shared_limit: of a program.
        matrix_instruction: the kinds of matrix instruction, and matrix_count how many of them; None, 0 without any.
        ok: it compiled and fits the shared memory.
    """

    kernel: str
    variant: str
    target: str
    dtype: str
    num_warps: int
    num_stages: int
    registers: int | None = None
    stack_bytes: int | None = None
    spill_loads: int | None = None
    spill_stores: int | None = None
    shared_bytes: int | None = None
    shared_limit: int | None = None
    matrix_instruction: str | None = None
    matrix_count: int = 0
    ok: bool = False
    error: str | None = None


@dataclass(frozen=True)
class Source:
    """A launch without its tensors: a kernel and what Triton would specialise it for; it can go to another process."""

    name: str
    variant: str
    target: str
    dtype: str
    kernel: tuple[str, str]
    signature: dict
    constexprs: dict
    attributes: dict
    options: dict

    @classmethod
    def of(cls, launch, variant: str, target: str, dtype: str) -> Source:
        constants, arguments = dict(launch.constants), launch.arguments
        options = {name: constants.pop(name) for name in ("num_warps", "num_stages")}
        signature, constexprs, attributes = {}, {}, {}
        for position, name in enumerate(launch.kernel.arg_names):
            if name in constants:
                signature[name], constexprs[(position,)] = "constexpr", constants[name]
            elif name in launch.kernel.do_not_specialize:
                signature[name] = _integer(arguments[position])
            else:
                signature[name] = _type_of(arguments[position], (position,), constexprs, attributes)
        kernel = (launch.kernel.fn.__module__, launch.kernel.fn.__name__)
        return cls(_name(launch), variant, target, dtype, kernel, signature, constexprs, attributes, options)

    def compile(self):
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        kernel = getattr(importlib.import_module(self.kernel[0]), self.kernel[1])
        source = ASTSource(fn=kernel, signature=self.signature, constexprs=self.constexprs, attrs=self.attributes)
        nvidia = self.target.startswith("sm_")
        gpu = GPUTarget("cuda", int(self.target[3:]), 32) if nvidia else GPUTarget("hip", self.target, 64)
        return triton.compile(source, target=gpu, options=self.options)


def sources(target: str, dtype: str, *, H, Hkv, Hidx, Hik, D, block_size, topk, N) -> list[Source]:
    """All kernels of forward, backward and KL, sparse and dense, as the launchers would launch them on the target."""
    from msa_ref.problem import BlockGeometry, describe
    from msa_triton import kernels
    from msa_triton.launch import recording

    def tensor(heads):
        return torch.zeros(1, heads, N, D, dtype=getattr(torch, dtype))

    q, k, index_q, index_k = (tensor(heads) for heads in (H, Hkv, Hidx, Hik))
    lse, dkl = torch.zeros(1, H, N), torch.ones(1, Hidx, N)
    geometry = BlockGeometry(N, block_size)
    newest = geometry.block_of[:, None] - torch.arange(topk)
    ids = newest.clamp(min=-1).int().expand(1, Hidx, -1, -1).contiguous()
    found = {}
    for variant, chosen in (("sparse", ids), ("dense", None)):
        options = dict(block_indices=chosen, block_size=block_size)
        problem = describe(q=q, k=k, v=k, index_q=index_q, index_k=index_k, **options)
        with recording(target) as launches:
            if chosen is not None:
                selection = describe(index_q=index_q, index_k=index_k, topk=topk, block_size=block_size)
                kernels.select_forward(index_q, index_k, selection, geometry)
                with suppress(ValueError):  # a key block does not fit the target: "auto" does without this kernel
                    kernels.attention_forward(q, k, k, chosen, problem, geometry, "key")
            kernels.attention_forward(q, k, k, chosen, problem, geometry, "query")
            kernels.attention_backward(q, q, k, k, q, lse, chosen, problem, geometry)
            inputs = q, k, lse, index_q, index_k, chosen, problem, geometry
            kernels.index_loss_forward(*inputs, gradients=False)
            _, *saved = kernels.index_loss_forward(*inputs, gradients=True)
            kernels.index_loss_backward(dkl, saved, *inputs)
        for launch in launches:
            source = Source.of(launch, variant, target, dtype)
            found.setdefault((source.kernel, str(source.signature), str(source.constexprs)), source)
    return list(found.values())


def _name(launch) -> str:
    """The name of a kernel; one of them leaves out the gradient where none is asked for."""
    name = launch.kernel.fn.__name__.removesuffix("_kernel")
    if name == "index_query" and launch.arguments[launch.kernel.arg_names.index("row_sums")] is None:
        return "index_query_value"
    return name


def _type_of(argument, path, constexprs, attributes):
    """The type that Triton gives an argument; notes what it specialises on: None, 1, and multiples of 16."""
    if isinstance(argument, tuple):
        return tuple(_type_of(part, (*path, i), constexprs, attributes) for i, part in enumerate(argument))
    if argument is None or (isinstance(argument, int) and argument == 1):
        constexprs[path] = argument
        return "constexpr"
    if isinstance(argument, float):
        return "fp32"
    if isinstance(argument, int):
        if argument % 16 == 0:
            attributes[path] = [["tt.divisibility", 16]]
        return _integer(argument)
    attributes[path] = [["tt.divisibility", 16]]
    return "*" + POINTERS[argument.dtype]


def _integer(argument: int) -> str:
    return "i32" if -(2**31) <= argument < 2**31 else "i64"


def inspect_nvidia(binary: bytes) -> dict:
    """Registers, stack and matrix instructions of a cubin."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        usage = _output(tool, "-res-usage", file.name)
        code = _output(tool, "-sass", file.name)
    registers, stack = (int(re.search(rf"{word}:(\d+)", usage).group(1)) for word in ("REG", "STACK"))
    instructions = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9_.]+)", code)
    matrix = [name.split(".")[0] for name in instructions if name.split(".")[0] in MATRIX_INSTRUCTIONS]
    # Local memory is spilled registers: these kernels have no arrays of their own.
    sizes = {"": 4, "64": 8, "128": 16}
    spilled = {"LDL": 0, "STL": 0}
    for name in instructions:
        kind, *modifiers = name.split(".")
        if kind in spilled:
            spilled[kind] += max(sizes.get(modifier, 4) for modifier in ("", *modifiers))
    return dict(
        registers=registers, stack_bytes=stack, spill_loads=spilled["LDL"], spill_stores=spilled["STL"],
        **_matrix(matrix),
    )  # fmt: skip


def inspect_amd(assembly: str) -> dict:
    """Registers, stack and matrix instructions of AMD assembly, whose metadata says the rest."""

    def metadata(word: str) -> int:
        return int(re.search(rf"\.{word}:\s*(\d+)", assembly).group(1))

    matrix = re.findall(r"\b(v_mfma|v_wmma)", assembly)
    return dict(
        registers=metadata("vgpr_count"), stack_bytes=metadata("private_segment_fixed_size"),
        spill_loads=4 * len(re.findall(r"\bscratch_load", assembly)),
        spill_stores=4 * len(re.findall(r"\bscratch_store", assembly)), **_matrix(matrix),
    )  # fmt: skip


def _matrix(found: list[str]) -> dict:
    return dict(matrix_instruction="+".join(sorted(set(found))) or None, matrix_count=len(found))


def _output(*command) -> str:
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, check=True).stdout


def report(source: Source) -> Compiled:
    """Compiles and inspects one kernel; an error becomes part of the report."""
    from msa_triton.config import SHARED_LIMIT

    limit = SHARED_LIMIT[source.target]
    row = dict(
        kernel=source.name, variant=source.variant, target=source.target, dtype=source.dtype, **source.options,
        shared_limit=limit,
    )  # fmt: skip
    try:
        compiled = source.compile()
    except Exception as error:
        return Compiled(**row, error=f"{type(error).__name__}: {error}".strip().splitlines()[-1])
    found = inspect_nvidia(compiled.asm["cubin"]) if "cubin" in compiled.asm else inspect_amd(compiled.asm["amdgcn"])
    shared = compiled.metadata.shared
    return Compiled(**row, **found, shared_bytes=shared, ok=shared <= limit)


def table(rows: list[Compiled]) -> str:
    """The report as text."""
    columns = {
        "kernel": "kernel", "variant": "variant", "target": "target", "dtype": "dtype", "warps": "num_warps",
        "stages": "num_stages", "regs": "registers", "stack": "stack_bytes", "spill ld": "spill_loads",
        "spill st": "spill_stores", "shared": "shared_bytes", "limit": "shared_limit", "matrix": "matrix_instruction",
        "count": "matrix_count",
    }  # fmt: skip
    cells = [list(columns)]
    for row in rows:
        found = [getattr(row, name) for name in columns.values()]
        cells.append(["-" if value is None else str(value) for value in found])
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells]
    for i, row in enumerate(rows, 1):
        lines[i] += "" if row.ok else f"  FAILED: {row.error or 'more shared memory than the target has'}"
    return "\n".join(lines)


def main(arguments=None) -> int:
    parser = argparse.ArgumentParser(prog="python -m msa_triton.compile_report", description=__doc__.split("\n\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="m3")
    parser.add_argument("--target", choices=TARGETS, nargs="+", default=TARGETS)
    parser.add_argument("--dtype", choices=DTYPES, nargs="+", default=["bfloat16"])
    parser.add_argument("--kernel", nargs="+", help="only these kernels")
    parser.add_argument("--json", type=Path, help="write the report to this file as well")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes that compile")
    options = parser.parse_args(arguments)
    if "triton" in sys.modules:
        raise RuntimeError("the report needs a process of its own, in which triton has not been imported yet")
    os.environ["TRITON_INTERPRET"] = "0"
    from tqdm import tqdm

    work = [
        source
        for target in options.target
        for dtype in options.dtype
        for source in sources(target, dtype, **SHAPES[options.shape])
        if not options.kernel or source.name in options.kernel
    ]
    with multiprocessing.get_context("spawn").Pool(options.jobs) if options.jobs > 1 else nullcontext() as pool:
        compiled = pool.imap(report, work) if pool else map(report, work)
        rows = list(tqdm(compiled, total=len(work), unit="kernel"))
    print(table(rows))
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    return 0 if all(row.ok for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
