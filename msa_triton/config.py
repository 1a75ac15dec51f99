"""Tile sizes, warps and pipeline stages of every kernel on every target.

Each kernel has candidates, best first; the first whose tiles fit the shared memory of the target is taken.
`python -m msa_triton.compile_report` shows what the compilers make of the choices.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, replace

KIB = 1024
# Shared memory that one program may have, in bytes.
SHARED_LIMIT = {
    "sm_80": 163 * KIB, "sm_86": 99 * KIB, "sm_87": 163 * KIB, "sm_89": 99 * KIB, "sm_90": 227 * KIB,
    "sm_100": 227 * KIB, "sm_103": 227 * KIB, "sm_120": 99 * KIB, "sm_121": 99 * KIB,
    "gfx942": 64 * KIB, "gfx950": 160 * KIB,
}  # fmt: skip
SMALLEST_LIMIT = 64 * KIB
SMALLEST_DOT = 16  # rows, columns and depth of a matrix product


@dataclass(frozen=True)
class Tile:
    """What one program of a kernel works on at a time.

    Attributes:
        rows: queries times heads. keys: keys of a block at a time; a launcher takes no more than a block has.
        warps: of 32 threads (64 on AMD). stages: tiles in flight between global memory and the multiprocessor.
    """

    rows: int
    keys: int
    warps: int
    stages: int

    @property
    def options(self) -> dict[str, int]:
        return {"num_warps": self.warps, "num_stages": self.stages}

    def split(self, share: int, least_queries: int = 1) -> dict[str, int]:
        """The rows as BQ queries times BH heads, where `share` query heads have one selection."""
        heads = min(padded(share, 1), self.rows // least_queries)
        return {"BQ": self.rows // heads, "BH": heads}


INTERPRETER = Tile(256, 128, 1, 1)  # few large tiles: the interpreter's cost is per operation, not per element
KEY_MAJOR = ("forward_key", "dkdv", "index_key")  # they hold keys of a block and stream rows past them
ACCUMULATORS = 4096  # elements of a row tile for each warp

CANDIDATES = {
    "select": (Tile(128, 128, 8, 3), Tile(64, 128, 4, 2), Tile(64, 128, 4, 1)),
    "forward_query": (Tile(128, 128, 8, 2), Tile(128, 64, 8, 2), Tile(64, 64, 4, 2), Tile(64, 64, 4, 1)),
    "forward_key": (Tile(128, 128, 8, 2), Tile(64, 128, 4, 2), Tile(64, 128, 4, 1)),
    "normalizer": (Tile(128, 128, 8, 2), Tile(128, 64, 8, 2), Tile(64, 64, 4, 2), Tile(64, 64, 4, 1)),
    "combine": (Tile(64, 0, 4, 2),),
    "delta": (Tile(64, 0, 4, 1),),
    "dq": (Tile(128, 64, 8, 2), Tile(64, 64, 4, 2), Tile(64, 32, 4, 1)),
    "dkdv": (Tile(64, 128, 8, 2), Tile(64, 64, 8, 2), Tile(32, 32, 4, 1)),
    "sum_tasks": (Tile(32, 0, 4, 1),),
    "index_query": (Tile(256, 64, 8, 2), Tile(256, 32, 8, 1), Tile(128, 32, 4, 1)),
    "index_key": (Tile(32, 128, 8, 2), Tile(32, 64, 8, 1), Tile(32, 32, 4, 1)),
}
SMALLEST = (Tile(32, 32, 4, 1), Tile(16, 16, 4, 1))  # for wide heads
# float32 products take no matrix instruction, and registers for their operands.
FLOAT32 = {
    "select": Tile(32, 128, 8, 2), "forward_query": Tile(64, 32, 8, 2), "forward_key": Tile(16, 128, 8, 1),
    "normalizer": Tile(32, 32, 8, 2), "dq": Tile(64, 32, 8, 2), "dkdv": Tile(16, 32, 8, 1),
    "index_query": Tile(64, 32, 8, 1), "index_key": Tile(16, 32, 8, 1),
}  # fmt: skip
# Where the first candidate that fits the shared memory needs more registers than the target has.
FIRST = {
    "sm_80": {
        "forward_query": Tile(64, 64, 4, 2), "dkdv": Tile(64, 64, 8, 2), "index_query": Tile(256, 32, 8, 2),
    },
    "sm_100": {"forward_query": Tile(128, 64, 8, 2), "index_query": Tile(256, 32, 8, 2)},
    "sm_120": {
        "forward_query": Tile(64, 64, 4, 2), "select": Tile(64, 128, 8, 2), "dkdv": Tile(64, 64, 8, 2),
        "index_query": Tile(256, 32, 8, 1),
    },
    "gfx942": {"dkdv": Tile(32, 64, 4, 1), "index_key": Tile(32, 64, 4, 1)},
    "gfx950": {
        "forward_query": Tile(64, 64, 4, 2), "forward_key": Tile(64, 128, 4, 1), "dq": Tile(64, 64, 4, 2),
        "dkdv": Tile(32, 128, 4, 1), "index_query": Tile(128, 32, 4, 1), "index_key": Tile(32, 128, 4, 1),
    },
}  # fmt: skip


_forced: dict[str, Tile] = {}


@contextmanager
def forced(kernel: str, tile: Tile):
    """In this context `choose_tile` gives a kernel this tile, if it fits the shared memory: to compare candidates."""
    before = _forced.copy()
    _forced[kernel] = tile
    try:
        yield
    finally:
        _forced.clear()
        _forced.update(before)


def padded(width: int, least: int = SMALLEST_DOT) -> int:
    """The power of two that a tile of `width` columns takes."""
    return max(least, 1 << (width - 1).bit_length())


def choose_tile(kernel: str, target: str, element_size: int, *, block: int, row_width: int, key_width: int) -> Tile:
    """The first candidate of a kernel that fits the shared memory of the target and, if one does, its registers.

    Args:
        kernel: a key of CANDIDATES. target: as `launch.target_of` names it.
        element_size: bytes of an element of the inputs.
        block: tokens in a key block.
        row_width, key_width: padded widths of all that a program loads for a row and for a key.

    Raises:
        ValueError: no candidate fits the shared memory.
    """
    if target == "interpreter" and kernel not in _forced:
        return replace(INTERPRETER, keys=block)
    limit = SHARED_LIMIT.get(target, SMALLEST_LIMIT)
    first = (FLOAT32 if element_size == 4 else FIRST.get(target, {})).get(kernel)
    candidates = ((first,) if first else ()) + CANDIDATES[kernel] + SMALLEST
    fitting = []
    for tile in (_forced[kernel],) if kernel in _forced else candidates:
        tile = replace(tile, keys=block if kernel == "forward_key" else min(tile.keys, block))
        if shared_bytes(kernel, target, element_size, tile, row_width, key_width) <= limit:
            fitting.append(tile)
    if not fitting:
        raise ValueError(
            f"no tile of the {kernel} kernel fits the {limit} bytes of shared memory that a program has on {target}:"
            f" {element_size}-byte elements, block_size={block}, padded widths {row_width} a row and {key_width} a key;"
            f" take a smaller block_size or narrower heads"
        )
    small = [tile for tile in fitting if tile.rows * row_width <= ACCUMULATORS * tile.warps]
    return (small or fitting[-1:])[0]


def shared_bytes(kernel: str, target: str, element_size: int, tile: Tile, row_width: int, key_width: int) -> int:
    """About how much shared memory a program takes."""
    rows, keys = tile.rows * row_width, tile.keys * key_width
    if kernel not in KEY_MAJOR:
        return (rows + tile.stages * keys) * element_size
    if target.startswith("gfx"):  # what a program holds goes on to registers, one tile after the other
        keys //= 2
    return (keys + tile.stages * rows) * element_size
