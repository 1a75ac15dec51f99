"""MSA by the Triton kernels against dense causal attention on a GPU, in bfloat16.

    python -m msa_triton.benchmark gpu [--shapes a,b] [--tokens N ...] [--budget 480] [--json FILE]
    python -m msa_triton.benchmark gpu --tune [--kernels dq dkdv] [--json FILE]

Shapes: (a) H = 16, Hkv = 2, Hidx = 4; (b) H = 64, Hkv = Hidx = 4; both of width 128 and with one index key head, blocks
of 128 and topk 16. Each is timed with a random selection (standard normal inputs) and with one whose neighbouring
queries share most blocks, as a trained model's do; then SDPA; then the dense warm-up step. Before it is timed, a step
is checked against float64 in a few rows. What the time left does not allow is skipped, with a line that says so.
`--json` puts the rows into a file after each of them: as notebooks/data/gpu_benchmark.json, notebook 11 shows it.

Exit status: 0; 1 if a check failed or a case raised an error; 2 without a GPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict

import torch

from msa_triton.benchmark import options as kinds
from msa_triton.benchmark import tune
from msa_triton.benchmark.cases import Estimates, Row, flops_of, measure
from msa_triton.benchmark.measure import BACKENDS, FastestSDPA, known_gpu, matrix_rate
from msa_triton.benchmark.output import GB, Progress, digits, text_table, write_json
from msa_triton.benchmark.step import Shape

WIDE = dict(width=128, index_width=128, index_key_heads=1, dtype="bfloat16")
SHAPES = {
    "a": (dict(heads=16, kv_heads=2, index_heads=4, **WIDE), (2**14, 2**15, 2**16, 2**17)),
    "b": (dict(heads=64, kv_heads=4, index_heads=4, **WIDE), (2**15, 2**17, 2**19, 2**20)),
}
PARTS = (("random", "overlapping"), ("SDPA",), ("warm-up",))  # what matters most comes before the time is over


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shapes", type=_shapes, default=list(SHAPES), help="which shapes, default a,b")
    parser.add_argument("--tokens", type=kinds.count, nargs="+", help="lengths N instead of those of the shapes")
    parser.add_argument("--budget", type=kinds.seconds, default=480.0, help="seconds in all, default 480")
    parser.add_argument("--tune", action="store_true", help="compare the tiles of each kernel instead")
    parser.add_argument("--kernels", nargs="+", choices=tune.KERNELS, default=tune.KERNELS, help="for --tune")
    kinds.add_common(parser)


def run(options: argparse.Namespace) -> int:
    cases = [
        (name, kinds.checked(options.parser, tokens=tokens, **SHAPES[name][0]))
        for name in options.shapes
        for tokens in sorted(set(options.tokens or SHAPES[name][1]))
    ]
    reason = unavailable()
    if reason:
        print(reason, file=sys.stderr)
        return 2
    device = torch.device("cuda", torch.cuda.current_device())
    if options.tune:
        return tune.run(cases, options.kernels, device, options.budget, options.seed, options.json)
    return run_cases(cases, device, options.budget, options.seed, options.json)


def unavailable() -> str | None:
    """Why the kernels cannot run compiled here; None if they can."""
    if not torch.cuda.is_available():
        return (
            f"the gpu benchmark needs a CUDA or ROCm device, and PyTorch {torch.__version__} finds none;"
            " `python -m msa_triton.benchmark cpu` needs none"
        )
    if importlib.util.find_spec("triton") is None:
        return "the gpu benchmark needs Triton, which is not installed"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "the gpu benchmark needs compiled kernels: unset TRITON_INTERPRET"
    return None


def run_cases(
    cases: list[tuple[str, Shape]], device: torch.device, budget: float, seed: int, json, backends=BACKENDS, size=None
) -> int:
    """Measures cases (name of the shape, shape) within `budget` seconds, prints a table and writes the JSON.

    Args:
        device: a GPU; or the CPU, where the kernels run in Triton's interpreter, to test this code.
        backends: of SDPA to try. size: of the matrix product that is the yardstick.

    Returns:
        1 if a case failed, else 0.
    """
    end = time.monotonic() + budget
    dtype = getattr(torch, cases[0][1].dtype)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    rate = matrix_rate(dtype, device, **({} if size is None else {"size": size}))
    estimates, sdpa, rows = Estimates(rate), FastestSDPA(backends, device, seed), []
    sizes = {shape_name: {**asdict(shape), "tokens": None} for shape_name, shape in cases}
    ordered = [(part, *case) for parts in PARTS for case in cases for part in parts]
    with Progress(len(ordered)) as progress:
        for part, shape_name, shape in ordered:
            progress.begin(f"{shape_name} N={shape.tokens} {part}")
            row, flops = Row(shape_name, shape.tokens, part), flops_of(part, shape)
            needed, left = estimates.seconds((shape_name, part), flops), end - time.monotonic()
            if needed > left:
                row.status, row.note = "skipped", f"estimated {needed:.0f} s, {max(0.0, left):.0f} s left"
                print(f"skipped {shape_name} N={shape.tokens} {part}: {row.note}")
            else:
                measure(row, shape, device, seed, known_gpu(name), sdpa)
            if row.milliseconds:
                estimates.record((shape_name, part), flops, row.milliseconds["total"])
                row.tflops = flops / row.milliseconds["total"] / 1e9
                row.share = 1e12 * row.tflops / rate
            rows.append(row)
            _compare(rows)
            write_json(
                json, "gpu", gpu=name, matrix_tflops=rate / 1e12, budget=budget, seed=seed, shapes=sizes,
                rows=[asdict(row) for row in rows],
            )  # fmt: skip
    print(
        f"{name}, {cases[0][1].dtype}, seed {seed}; a product of two large matrices reaches {rate / 1e12:.4g} TFLOP/s"
    )
    print("ms; GB are 1e9 bytes; U: blocks of 8 adjacent queries; bound: lower bound of the kernels' total in ms")
    print(table(rows))
    return int(any(row.status == "failed" for row in rows))


def table(rows: list[Row]) -> str:
    """The rows as text, in milliseconds, GB and shares."""

    def time_of(phase: str):
        return lambda row: digits((row.milliseconds or {}).get(phase))

    columns = {"shape": lambda row: row.shape, "N": lambda row: row.tokens, "part": lambda row: row.part}
    columns |= {phase: time_of(phase) for phase in ("select", "attend", "align", "forward", "backward", "total")}
    columns |= {
        "TFLOP/s": lambda row: digits(row.tflops), "share": lambda row: digits(row.share, ".0%"),
        "peak GB": lambda row: digits(row.peak_bytes and row.peak_bytes / GB),
        "U": lambda row: digits(row.union, ".1f"), "SDPA/this": lambda row: digits(row.speedup, ".2f"),
        "eq. 12": lambda row: digits(row.eq12_ratio, ".3f"),
        "bound": lambda row: digits((row.bound or {}).get("total")),
        "note": lambda row: row.backend if row.status == "measured" else f"{row.status}: {row.note}",
    }  # fmt: skip
    return text_table(columns, rows)


def _compare(rows: list[Row]) -> None:
    """Fills in the speed-ups over SDPA of the lengths at which that was measured."""
    dense = {(row.shape, row.tokens): row.milliseconds for row in _measured(rows) if row.part == "SDPA"}
    for row in _measured(rows):
        if row.part != "SDPA" and (row.shape, row.tokens) in dense:
            row.speedup = dense[row.shape, row.tokens]["total"] / row.milliseconds["total"]


def _measured(rows: list[Row]) -> Iterator[Row]:
    return (row for row in rows if row.milliseconds)


def _shapes(text: str) -> list[str]:
    names = text.split(",")
    if not set(names) <= set(SHAPES):
        raise argparse.ArgumentTypeError(f"must be of {', '.join(SHAPES)}, with commas between them, got {text!r}")
    return names
