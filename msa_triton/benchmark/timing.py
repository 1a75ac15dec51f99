"""Clocks, medians and peak memory."""

from __future__ import annotations

import re
import statistics
import sys
import time
from pathlib import Path

import torch


class Laps:
    """Milliseconds from mark to mark, by the clock of the CPU, or by events on a GPU, so that no mark waits for it.

    On a GPU the times are those of its current stream, from the moment when all earlier work is done.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._names = []
        self._wait()
        self._times = [self._now()]

    def mark(self, name: str) -> None:
        """Ends the lap of this name; the next one begins."""
        self._names.append(name)
        self._times.append(self._now())

    def milliseconds(self) -> dict[str, float]:
        """Each lap's time, by name; waits for the GPU."""
        self._wait()
        pairs = zip(self._times, self._times[1:], strict=False)
        spans = [a.elapsed_time(b) if self._on_gpu else 1e3 * (b - a) for a, b in pairs]
        return dict(zip(self._names, spans, strict=True))

    @property
    def _on_gpu(self) -> bool:
        return self._device.type == "cuda"

    def _wait(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize(self._device)

    def _now(self):
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event


def medians(runs: list[dict[str, float]]) -> dict[str, float]:
    """The median of every entry over several runs."""
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


def repeated(run, most: int, seconds: float) -> list[dict[str, float]]:
    """The times of up to `most` runs after a warm-up, as many as fit `seconds`, at least one.

    Args:
        run: does the work once and returns milliseconds, "total" among them.

    A first run that takes longer than `seconds` is itself the measurement.
    """
    first = run()
    fitting = int(1e3 * seconds / max(first["total"], 1e-6))
    return [run() for _ in range(min(most, fitting))] if fitting else [first]


def peak_memory() -> int:
    """The most resident memory of this process so far, or since `restart_peak_memory`, in bytes.

    Linux: VmHWM. Its ru_maxrss is of no use in a child, where it starts at the parent's peak.
    """
    status = Path("/proc/self/status")
    if status.exists() and (found := re.search(r"VmHWM:\s*(\d+) kB", status.read_text())):
        return 1024 * int(found.group(1))
    if sys.platform == "win32":
        import psutil

        return psutil.Process().memory_info().peak_wset
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def restart_peak_memory() -> None:
    """`peak_memory` counts from now, on Linux; elsewhere it goes on counting from the start of the process."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pass
