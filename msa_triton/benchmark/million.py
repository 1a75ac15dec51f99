"""One training step of a million tokens on the CPU: forward, KL loss and backward of MSA, in float32.

    python -m msa_triton.benchmark million [--tokens 1048576] [--rows 64] [--json FILE]

H = 4 query heads of width 64 on one KV head, one index head of width 64, blocks of 128, topk 16; standard normal
inputs. At the end some rows, all of their heads, are checked against float64: kept blocks, out, dq and d index_q.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict, dataclass

from msa_triton.benchmark import options as kinds
from msa_triton.benchmark.checks import check_rows, chosen_rows
from msa_triton.benchmark.output import GB, Progress, digits, text_table, write_json
from msa_triton.benchmark.step import load_everything, msa_step, normal_inputs
from msa_triton.benchmark.timing import peak_memory, restart_peak_memory

SIZES = dict(heads=4, kv_heads=1, index_heads=1, index_key_heads=1, width=64, index_width=64, block_size=128, topk=16)
PHASES = ("inputs", "select", "attend", "align", "backward", "check")
STEP = PHASES[1:-1]


@dataclass(frozen=True)
class Phase:
    """seconds: how long it took. peak_bytes: the most resident memory meanwhile (`timing.restart_peak_memory`)."""

    name: str
    seconds: float
    peak_bytes: int


class Phases:
    """Measures phases that follow one another; each ends when the next one begins."""

    def __init__(self, progress: Progress):
        self.finished: list[Phase] = []
        self._progress = progress
        self._name = None

    def begin(self, name: str) -> None:
        self.end()
        self._progress.begin(name)
        restart_peak_memory()
        self._name, self._start = name, time.perf_counter()

    def end(self) -> None:
        if self._name is not None:
            self.finished.append(Phase(self._name, time.perf_counter() - self._start, peak_memory()))
            self._name = None


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=kinds.count, default=2**20, help="length N, default 1048576")
    parser.add_argument("--rows", type=kinds.whole(4), default=64, help="queries that are checked")
    kinds.add_threads(parser)
    kinds.add_common(parser)


def run(options: argparse.Namespace) -> int:
    shape = kinds.checked(options.parser, tokens=options.tokens, dtype="float32", **SIZES)
    threads = kinds.use_threads(options.threads)
    load_everything(shape)
    with Progress(len(PHASES)) as progress:
        phases = Phases(progress)
        phases.begin("inputs")
        inputs = normal_inputs(shape, options.seed)
        step = msa_step(inputs, shape, phase=phases.begin)
        phases.begin("check")
        rows = chosen_rows(shape, options.rows, options.seed)
        errors = check_rows(inputs, step, shape, rows)
        phases.end()
    found = phases.finished
    seconds = sum(phase.seconds for phase in found if phase.name in STEP)
    peak = max(phase.peak_bytes for phase in found)
    write_json(
        options.json, "million", threads=threads, seed=options.seed, shape=asdict(shape),
        phases=[asdict(phase) for phase in found], step_seconds=seconds, peak_bytes=peak, kl=float(step.kl),
        checked_rows=rows, errors=errors,
    )  # fmt: skip
    print(f"N={shape.tokens}, {SIZES}, float32, {threads} threads; GB are 1e9 bytes")
    total = Phase("step", seconds, peak)
    print(table([*found, total]))
    worst = ", ".join(f"{name} {error:.1e}" for name, error in errors.items())
    print(f"step: {' + '.join(STEP)}; its peak is that of the process. KL loss {float(step.kl):.4f} nats")
    print(f"{len(rows)} rows agree with float64: largest relative errors {worst}")
    return 0


def table(phases: list[Phase]) -> str:
    columns = {
        "phase": lambda phase: phase.name, "seconds": lambda phase: digits(phase.seconds, ".2f"),
        "peak GB": lambda phase: digits(phase.peak_bytes / GB, ".2f"),
    }  # fmt: skip
    return text_table(columns, phases)
