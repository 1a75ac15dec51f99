"""Times the kernels with other tiles than `msa_triton.config` chooses; the table there is then changed by hand.

For each kernel that has a choice: every candidate of the table, and neighbours of the first of them (other warps, other
stages). A kernel's launches are recorded, run once in order, which compiles them and fills every buffer, and then those
of the kernel alone are timed. A tile that does not fit, compile or run is a row with its error.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from msa_ref.problem import BlockGeometry, describe
from msa_triton import config, launch
from msa_triton.benchmark.output import Progress, digits, text_table, write_json
from msa_triton.benchmark.step import Inputs, Shape, Step, msa_step, normal_inputs
from msa_triton.benchmark.timing import Laps, medians, repeated
from msa_triton.config import Tile

KERNELS = tuple(kernel for kernel, candidates in config.CANDIDATES.items() if len(candidates) > 1)
REPEATS, SECONDS = 10, 0.5
LEAST_LEFT = 10.0  # seconds: a kernel takes some to compile
WARPS, STAGES = (4, 8, 16), (1, 2, 3, 4)


@dataclass
class Row:
    """One tile of one kernel: rows, keys, warps and stages as in `config.Tile`, keys as a launcher asks for them.

    Attributes:
        listed: it is in the table of `config`, and not only a neighbour.
        milliseconds: median of the kernel's launches in one pass of its phase; None if there is an error.
    """

    shape: str
    tokens: int
    kernel: str
    rows: int
    keys: int
    warps: int
    stages: int
    listed: bool
    milliseconds: float | None = None
    error: str | None = None


def run(
    cases: list[tuple[str, Shape]], kernels, device: torch.device, budget: float, seed: int, json: Path | None
) -> int:
    """Times the tiles of some kernels at the shortest length of each shape, prints a table and the best; returns 0."""
    end = time.monotonic() + budget
    shortest = {}
    for name, shape in cases:
        shortest[name] = min(shape, shortest.get(name, shape), key=lambda one: one.tokens)
    rows, target = [], None
    for name, shape in shortest.items():
        inputs = normal_inputs(shape, seed, device)
        step = msa_step(inputs, shape, backend="triton")
        target = launch.target_of(inputs.q)
        calls = _calls(inputs, step, shape)
        tiles = sorted(_tiles(kernels, target), key=lambda tile: not tile[2])  # those of the table come first
        with Progress(len(tiles)) as progress:
            for kernel, tile, listed in tiles:
                row = Row(name, shape.tokens, kernel, tile.rows, tile.keys, tile.warps, tile.stages, listed)
                progress.begin(f"{name} {kernel}")
                if time.monotonic() > end - LEAST_LEFT:
                    row.error = f"skipped: fewer than {LEAST_LEFT:.0f} s left"
                else:
                    _measure(row, calls[kernel], tile, target, device)
                rows.append(row)
                write_json(
                    json, "tune", target=target, best=_best(rows), seed=seed,
                    shapes={key: asdict(value) for key, value in shortest.items()}, rows=[asdict(row) for row in rows],
                )  # fmt: skip
    print(table(rows))
    print(f"fastest on {target}:")
    for one in _best(rows):
        tile = Tile(one["rows"], one["keys"], one["warps"], one["stages"])
        print(f'  {one["shape"]} N={one["tokens"]}  "{one["kernel"]}": {tile}  {digits(one["milliseconds"])} ms')
    return 0


def kernel_milliseconds(kernel: str, call, target: str, device: torch.device) -> float:
    """Median milliseconds of one kernel's launches in a call of a launcher.

    Args:
        call: runs a launcher; target: what `launch.target_of` says of its tensors.
    """
    with launch.recording(target) as launches:
        call()
    own = [one for one in launches if one.kernel.fn.__name__ == f"{kernel}_kernel"]
    if not own:
        raise RuntimeError(f"nothing launches the {kernel} kernel here")
    _launch(launches)

    def once() -> dict[str, float]:
        laps = Laps(device)
        _launch(own)
        laps.mark("total")
        return laps.milliseconds()

    return medians(repeated(once, REPEATS, SECONDS))["total"]


def neighbours(tile: Tile) -> list[Tile]:
    """The tile with half and twice the warps, and with a stage less and more, within `WARPS` and `STAGES`."""
    warps = [replace(tile, warps=warps) for warps in (tile.warps // 2, 2 * tile.warps) if warps in WARPS]
    return warps + [replace(tile, stages=stages) for stages in (tile.stages - 1, tile.stages + 1) if stages in STAGES]


def table(rows: list[Row]) -> str:
    names = ("shape", "tokens", "kernel", "rows", "keys", "warps", "stages")
    columns = {name: (lambda row, name=name: getattr(row, name)) for name in names}
    columns["table"] = lambda row: "yes" if row.listed else None
    columns["ms"] = lambda row: digits(row.milliseconds)
    columns["error"] = lambda row: row.error
    return text_table(columns, sorted(rows, key=lambda row: (row.shape, row.tokens, KERNELS.index(row.kernel))))


def _tiles(kernels, target: str):
    """Yields (kernel, tile, whether the table has it), each once."""
    for kernel in kernels:
        first = config.FIRST.get(target, {}).get(kernel)
        listed = list(dict.fromkeys(((first,) if first else ()) + config.CANDIDATES[kernel]))
        yield from ((kernel, tile, True) for tile in listed)
        yield from ((kernel, tile, False) for tile in neighbours(listed[0]) if tile not in listed)


def _measure(row: Row, call, tile: Tile, target: str, device: torch.device) -> None:
    try:
        with config.forced(row.kernel, tile):
            row.milliseconds = kernel_milliseconds(row.kernel, call, target, device)
    except Exception as error:
        row.error = f"{type(error).__name__}: {error}".strip().splitlines()[0]


def _calls(inputs: Inputs, step: Step, shape: Shape) -> dict:
    """{kernel: a call of the launchers that launch it}, with the results of a step."""
    from msa_triton import kernels

    q, k, v, index_q, index_k, dout = inputs
    geometry = BlockGeometry(shape.tokens, shape.block_size)
    selection = describe(index_q=index_q, index_k=index_k, topk=shape.topk, block_size=shape.block_size, kernel=True)
    problem = describe(
        q=q, k=k, v=v, index_q=index_q, index_k=index_k, block_indices=step.block_indices, block_size=shape.block_size,
        kernel=True,
    )  # fmt: skip
    ids, lse = step.block_indices, step.lse
    dkl = torch.full(index_q.shape[:3], 1 / (shape.index_heads * shape.tokens), device=q.device)

    def attend(schedule):
        return lambda: kernels.attention_forward(q, k, v, ids, problem, geometry, schedule)

    def align():
        inputs = q, k, lse, index_q, index_k, ids, problem, geometry
        _, *saved = kernels.index_loss_forward(*inputs, gradients=True)
        kernels.index_loss_backward(dkl, saved, *inputs)

    def backward():
        kernels.attention_backward(dout, q, k, v, step.out, lse, ids, problem, geometry)

    return {
        "select": lambda: kernels.select_forward(index_q, index_k, selection, geometry),
        "forward_query": attend("query"), "forward_key": attend("key"), "normalizer": backward, "dq": backward,
        "dkdv": backward, "index_query": align, "index_key": align,
    }  # fmt: skip


def _launch(launches: list[launch.Launch]) -> None:
    for one in launches:
        launch.launch(one.kernel, one.programs, *one.arguments, **one.constants)


def _best(rows: list[Row]) -> list[dict]:
    """The fastest row of each shape and kernel."""
    best = {}
    for row in (row for row in rows if row.milliseconds is not None):
        kind = row.shape, row.tokens, row.kernel
        if kind not in best or row.milliseconds < best[kind].milliseconds:
            best[kind] = row
    return [asdict(row) for row in best.values()]
