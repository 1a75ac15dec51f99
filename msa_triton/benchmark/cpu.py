"""MSA against dense causal attention on the CPU: one training step each, forward and backward, in one process.

    python -m msa_triton.benchmark cpu [--tokens 8192 16384 32768 65536] [--heads 16] [--json FILE]

Both are PyTorch: `select_blocks`, `sparse_attention` and `index_kl_loss` against `scaled_dot_product_attention`. The
inputs are standard normal, so that the selection is random: the hardest case for MSA, as neighbouring queries share few
blocks. At each length, first a step's peak memory is measured in a process of its own; then one step is run and checked
against float64 (which warms MSA up; SDPA is warmed up on 2048 tokens); then MSA and SDPA are timed in turn. Times are
medians. SDPA computes the output alone, the MSA step the index loss and its gradients too. The ratio of eq. 12 counts
forward FLOPs, without the loss.
"""

from __future__ import annotations

import argparse
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace

import torch

from msa_triton.benchmark import options as kinds
from msa_triton.benchmark.checks import check_rows, chosen_rows
from msa_triton.benchmark.flops import eq12_ratio, step_flops
from msa_triton.benchmark.output import GB, Progress, digits, text_table, write_json
from msa_triton.benchmark.step import DTYPES, Shape, dense_step, head_major, load_everything, msa_step, normal_inputs
from msa_triton.benchmark.timing import medians, peak_memory, restart_peak_memory

TOKENS = (8192, 16384, 32768, 65536)
CHECKED_ROWS = 8
WARM_UP_TOKENS = 2048
SIZES = ("heads", "kv_heads", "index_heads", "index_key_heads", "width", "index_width", "topk")


@dataclass(frozen=True)
class Row:
    """What was measured at one length.

    Attributes:
        runs: of which the times are medians.
        msa, sdpa: milliseconds of each phase; None without SDPA.
        ratio: SDPA's total over MSA's. eq12_ratio: dense FLOPs over those of MSA (P eq. 12). share: of it reached.
        gflops: useful GFLOP per second of the MSA step, as `flops` counts them.
        peak_bytes: most resident memory of a process that runs one MSA step; idle_bytes: before it made its inputs.
        errors: against float64, relative (`checks`).
    """

    tokens: int
    runs: int
    msa: dict[str, float]
    sdpa: dict[str, float] | None
    ratio: float | None
    eq12_ratio: float
    share: float | None
    gflops: float
    peak_bytes: int
    idle_bytes: int
    errors: dict[str, float]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=kinds.count, nargs="+", default=TOKENS, help="lengths N")
    for name in SIZES:
        default = Shape.__dataclass_fields__[name].default
        parser.add_argument(f"--{name.replace('_', '-')}", type=kinds.count, default=default)
    parser.add_argument("--block-size", type=kinds.count, default=128, help="16, 32, 64 or 128")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--repeats", type=kinds.count, default=3, help="runs, but one at the largest of several N")
    parser.add_argument("--no-dense", action="store_true", help="without SDPA, whose time grows with N squared")
    kinds.add_threads(parser)
    kinds.add_common(parser)


def run(options: argparse.Namespace) -> int:
    sizes = {name: getattr(options, name) for name in (*SIZES, "block_size", "dtype")}
    shapes = [kinds.checked(options.parser, tokens=tokens, **sizes) for tokens in options.tokens]
    threads = kinds.use_threads(options.threads)
    longest = max(options.tokens) if len(shapes) > 1 else None
    runs = [1 if shape.tokens == longest else options.repeats for shape in shapes]
    rows = []
    with Progress(sum(runs) * (1 if options.no_dense else 2) + 2 * len(shapes)) as progress:
        for shape, count in zip(shapes, runs, strict=True):
            rows.append(measure(shape, count, threads, options.seed, not options.no_dense, progress))
            write_json(
                options.json, "cpu", threads=threads, seed=options.seed, shape=sizes, rows=[asdict(row) for row in rows]
            )
    print(f"{sizes}, {threads} threads, standard normal inputs; ms; GB are 1e9 bytes")
    print(table(rows))
    return 0


def measure(shape: Shape, runs: int, threads: int, seed: int, dense: bool, progress: Progress) -> Row:
    progress.begin(f"N={shape.tokens} memory")
    idle_bytes, peak_bytes = peak_of_a_process(shape, seed, threads)
    progress.begin(f"N={shape.tokens} check")
    inputs = normal_inputs(shape, seed)
    errors = check_rows(inputs, msa_step(inputs, shape), shape, chosen_rows(shape, CHECKED_ROWS, seed))
    if dense:
        dense_inputs = head_major(inputs)
        short = replace(shape, tokens=min(shape.tokens, WARM_UP_TOKENS))
        dense_step(head_major(normal_inputs(short, seed)))
    msa, sdpa = [], []
    for _ in range(runs):
        progress.begin(f"N={shape.tokens} MSA")
        msa.append(msa_step(inputs, shape).milliseconds)
        if dense:
            progress.begin(f"N={shape.tokens} SDPA")
            sdpa.append(dense_step(dense_inputs))
    msa, sdpa = medians(msa), medians(sdpa) if dense else None
    ratio, expected = sdpa["total"] / msa["total"] if dense else None, eq12_ratio(shape)
    return Row(
        tokens=shape.tokens, runs=runs, msa=msa, sdpa=sdpa, ratio=ratio, eq12_ratio=expected,
        share=ratio / expected if dense else None, gflops=step_flops(shape)["total"] / msa["total"] / 1e6,
        peak_bytes=peak_bytes, idle_bytes=idle_bytes, errors=errors,
    )  # fmt: skip


def peak_of_a_process(shape: Shape, seed: int, threads: int) -> tuple[int, int]:
    """(bytes before, most bytes) of a fresh process that runs one MSA step and nothing else."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_peak_of_step, shape, seed, threads).result()


def _peak_of_step(shape: Shape, seed: int, threads: int) -> tuple[int, int]:
    torch.set_num_threads(threads)
    load_everything(shape)
    restart_peak_memory()
    before = peak_memory()
    msa_step(normal_inputs(shape, seed), shape)
    return before, peak_memory()


def table(rows: list[Row]) -> str:
    """The rows as text; milliseconds but for the ratios, GFLOP/s and GB."""

    def time(side: str, phase: str):
        return lambda row: digits((getattr(row, side) or {}).get(phase))

    columns = {"N": lambda row: row.tokens, "runs": lambda row: row.runs}
    columns |= {name: time("msa", name) for name in ("select", "attend", "align", "backward")}
    columns |= {"MSA": time("msa", "total"), "SDPA fwd": time("sdpa", "forward")}
    columns |= {"SDPA bwd": time("sdpa", "backward"), "SDPA": time("sdpa", "total")}
    columns |= {
        "SDPA/MSA": lambda row: digits(row.ratio, ".2f"), "eq. 12": lambda row: digits(row.eq12_ratio, ".3f"),
        "share": lambda row: digits(row.share, ".0%"), "GFLOP/s": lambda row: digits(row.gflops, ".1f"),
        "peak GB": lambda row: digits(row.peak_bytes / GB, ".2f"),
    }  # fmt: skip
    return text_table(columns, rows)
