"""The cases of `gpu`: one shape at one length, and one part: a selection, SDPA or the warm-up. How each is measured."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from msa_triton.benchmark.checks import check_rows, chosen_rows
from msa_triton.benchmark.flops import dense_flops, eq12_ratio, step_flops
from msa_triton.benchmark.measure import (
    SECONDS,
    SELECTIONS,
    UNION_QUERIES,
    FastestSDPA,
    bound_milliseconds,
    time_msa,
    union,
)
from msa_triton.benchmark.step import Shape, msa_step

CHECKED_ROWS = 8
OVERHEAD = 5.0  # seconds of a case: making inputs, and the repeats of a short one
CAUTIOUS = 0.1  # of the matrix rate: what a case is expected to reach before any of its kind has run


@dataclass
class Row:
    """What was measured in one case.

    Attributes:
        shape: a key of `gpu.SHAPES`.
        part: "random" or "overlapping" selection, "SDPA", or "warm-up" (MSA with topk=None).
        status: "measured", "skipped", "out of memory" or "failed"; note says why.
        milliseconds: medians of each phase over `runs`.
        tflops: useful TFLOP/s, as `flops` counts them. share: of the rate of a large matrix product of this run.
        peak_bytes: most memory PyTorch allocated, inputs included.
        union: mean number of blocks that 8 adjacent queries chose.
        bound: lower bound in milliseconds of the kernels of each phase, for GPUs that `msa_ref.cost.bounds` knows.
        eq12_ratio: dense FLOPs over those of MSA, forward (P eq. 12). speedup: SDPA's total over this total.
        backend: of SDPA. errors: against float64, relative (`checks`).
    """

    shape: str
    tokens: int
    part: str
    status: str = "measured"
    note: str | None = None
    milliseconds: dict[str, float] | None = None
    runs: int | None = None
    tflops: float | None = None
    share: float | None = None
    peak_bytes: int | None = None
    union: float | None = None
    bound: dict[str, float] | None = None
    eq12_ratio: float | None = None
    speedup: float | None = None
    backend: str | None = None
    errors: dict[str, float] | None = None


class Estimates:
    """How many seconds a case takes, from its FLOPs and the rate of the last one of the same shape and part.

    Args:
        matrix_rate: FLOP per second of a large matrix product.
    """

    def __init__(self, matrix_rate: float):
        self._cautious = CAUTIOUS * matrix_rate
        self._rates = {}

    def seconds(self, kind: tuple[str, str], flops: int) -> float:
        run = flops / self._rates.get(kind, self._cautious)
        checked = kind[1] != "SDPA"
        return OVERHEAD + (2 * run if checked or run < SECONDS else run)

    def record(self, kind: tuple[str, str], flops: int, milliseconds: float) -> None:
        self._rates[kind] = 1e3 * flops / milliseconds


def flops_of(part: str, shape: Shape) -> int:
    """Useful FLOPs of a case."""
    return dense_flops(shape)["total"] if part == "SDPA" else step_flops(shape, part == "warm-up")["total"]


def measure(row: Row, shape: Shape, device: torch.device, seed: int, gpu: str | None, sdpa: FastestSDPA) -> None:
    """Fills in a row; what goes wrong becomes its status and note."""
    try:
        _restart_peak(device)
        if row.part == "SDPA":
            row.milliseconds, row.runs, row.backend = sdpa.time(row.shape, shape)
        else:
            _measure_msa(row, shape, device, seed, gpu)
        row.peak_bytes = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    except torch.OutOfMemoryError as error:
        row.status, row.note = "out of memory", str(error).splitlines()[0]
    except Exception as error:
        row.status, row.note = "failed", f"{type(error).__name__}: {error}".strip().splitlines()[0]


def _measure_msa(row: Row, shape: Shape, device: torch.device, seed: int, gpu: str | None) -> None:
    warm_up = row.part == "warm-up"
    inputs = SELECTIONS[row.part](shape, seed, device)
    step = msa_step(inputs, shape, warm_up=warm_up, backend="triton")
    row.errors = check_rows(inputs, step, shape, chosen_rows(shape, CHECKED_ROWS, seed))
    if not warm_up:
        row.eq12_ratio = eq12_ratio(shape)
        row.union = union(step.block_indices, UNION_QUERIES, shape.block_size)
        if gpu and shape.dtype == "bfloat16":
            row.bound = bound_milliseconds(gpu, shape, inputs, step.block_indices)
    del step
    _restart_peak(device)
    row.milliseconds, row.runs = time_msa(inputs, shape, warm_up)


def _restart_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
