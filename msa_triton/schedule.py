"""Who works on what: the reverse index cut into tasks (key-major), and the unions of query tiles (query-major).

All of it is sorting and scanning by PyTorch. No value of a selection is read back to the host, and every order is
fixed, so that the same selection gives the same sums in the same order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from triton import cdiv

from msa_ref.problem import BlockGeometry, Problem
from msa_triton.config import Tile, padded
from msa_triton.launch import place

TASK_EDGES = 2048  # most queries of one task: a block that every query chose is shared between programs
WORKING_BYTES = 2**30  # what the partial results of one launch may take, if that holds those of one head
DENSE_TASKS = 8  # about the most tasks of one block where every query sees it


class Tasks(NamedTuple):
    """Key-major work: each task is a key block and a run of the edges (query, slot) that lead to it.

    Attributes:
        edges: int32 [pairs, N * slots], for each (batch, index head) pair the positions query * slots + slot, sorted by
            block and then by position; None in the dense case, where the edges of a block are queries in sequence.
        tasks: int32 [pairs, most tasks, 3]: block, first edge, end edge; unused ones are empty. One pair if dense.
        offsets: int32 [pairs, NB + 1]: the tasks of block b are offsets[b] .. offsets[b + 1] - 1.
    """

    edges: torch.Tensor | None
    tasks: torch.Tensor
    offsets: torch.Tensor

    @property
    def edge_count(self) -> int:
        """Edges of a pair; 0 in the dense case."""
        return 0 if self.edges is None else self.edges.shape[1]


def visible_ids(block_indices: torch.Tensor | None, geometry: BlockGeometry) -> torch.Tensor | None:
    """[B * Hidx, N, slots] int32, contiguous: the ids that their query sees, -1 for the others; None stays None."""
    if block_indices is None:
        return None
    ids = block_indices.flatten(0, 1)
    _, own, first = place(geometry, ids.device)
    if own is None:
        own, first = torch.arange(geometry.tokens, device=ids.device) // geometry.block_size, ids.new_zeros(1)
    return ids.where((ids >= first[:, None]) & (ids <= own[:, None]), -1).int().contiguous()


def reverse_tasks(ids: torch.Tensor, blocks: int, task_edges: int | None = None) -> Tasks:
    """The transpose of a selection as CSR, cut into tasks.

    Args:
        ids: [pairs, N, slots] of `visible_ids`, or a range of its queries; edges then count from the range's first.
        blocks: NB.
        task_edges: the most edges of a task, TASK_EDGES unless given.
    """
    task_edges = task_edges or TASK_EDGES
    flat = ids.flatten(1)
    sorted_ids, edges = flat.where(flat >= 0, blocks).sort(dim=1, stable=True)
    starts = torch.arange(blocks + 1, dtype=torch.int32, device=ids.device).expand(len(ids), -1).contiguous()
    starts = torch.searchsorted(sorted_ids, starts)
    tasks, offsets = _cut(starts[:, :-1], starts[:, 1:], task_edges, blocks + flat.shape[1] // task_edges)
    return Tasks(edges.int(), tasks, offsets)


def dense_tasks(geometry: BlockGeometry, device, task_edges: int | None = None) -> Tasks:
    """The tasks of dense attention: to each block, all later queries of its document and its own."""
    task_edges = task_edges or max(TASK_EDGES, -(-geometry.tokens // DENSE_TASKS))
    starts = geometry.block_start[:-1]
    ends = geometry.document_start[torch.searchsorted(geometry.document_start, starts, right=True)]
    most = int(((ends - starts + task_edges - 1) // task_edges).sum())
    tasks, offsets = _cut(starts[None], ends[None], task_edges, most)
    return Tasks(None, tasks.to(device), offsets.to(device))


def _cut(starts: torch.Tensor, ends: torch.Tensor, task_edges: int, most: int):
    """Runs [pairs, NB] of edges as tasks [pairs, most, 3] of at most `task_edges`, and the offsets of each block's."""
    counts = (ends - starts + task_edges - 1) // task_edges
    offsets = torch.nn.functional.pad(counts.cumsum(1), (1, 0))
    task = torch.arange(most, device=starts.device).expand(len(starts), -1).contiguous()
    block = torch.searchsorted(offsets[:, 1:].contiguous(), task, right=True)
    used = block < starts.shape[1]
    block = block.where(used, 0)
    begin = starts.gather(1, block) + (task - offsets.gather(1, block)) * task_edges
    end = torch.minimum(begin + task_edges, ends.gather(1, block))
    return torch.stack([block, begin, end.where(used, begin)], 2).int(), offsets.int()


def key_tasks(ids: torch.Tensor | None, geometry: BlockGeometry, device) -> Tasks:
    """The tasks of `visible_ids`, or of dense attention for None."""
    return dense_tasks(geometry, device) if ids is None else reverse_tasks(ids, geometry.blocks)


def ranges(count: int, bytes_each: int, at_least: int = 0):
    """Yields [start, stop) over `count` things of `bytes_each`: as many as WORKING_BYTES or `at_least` hold, or one."""
    step = max(1, max(WORKING_BYTES, at_least) // bytes_each)
    for start in range(0, count, step):
        yield start, min(start + step, count)


def slot_count(ids: torch.Tensor | None) -> int:
    return 1 if ids is None else ids.shape[2]


def tile_unions(ids: torch.Tensor | None, tile_queries: int, blocks: int) -> torch.Tensor | None:
    """The blocks that each tile of adjacent queries needs, by one sort of their lists, which may have any order.

    Args:
        ids: [pairs, N, slots] of `visible_ids`.
        tile_queries: queries of a tile. blocks: NB.

    Returns:
        int32 [pairs, tiles, 1 + most]: the number of blocks, then their ids in ascending order; None for None.
    """
    if ids is None:
        return None
    pairs, tokens, slots = ids.shape
    if tokens % tile_queries:
        ids = torch.nn.functional.pad(ids, (0, 0, 0, -tokens % tile_queries), value=-1)
    listed = ids.view(pairs, -1, tile_queries * slots).sort(dim=2).values
    first = listed >= 0
    first[:, :, 1:] &= listed[:, :, 1:] != listed[:, :, :-1]
    position = first.cumsum(2)
    size = position[:, :, -1].int()
    unions = listed.new_full((*size.shape, 1 + min(listed.shape[2], blocks)), blocks)
    unions.scatter_(2, position, listed)  # a repeated id lands on its equal, -1 where the size will be
    unions[:, :, 0] = size
    return unions


class QueryWalk:
    """What every query-major kernel takes besides its tensors.

    Attributes:
        tiles: of queries. programs: of a grid with one for each tile, chunk of heads and pair.
        arguments: ids, with unions those and their row length, and the place of blocks and documents.
        constants: tile sizes.
    """

    def __init__(
        self, ids, tile: Tile, problem: Problem, geometry: BlockGeometry, least_queries: int = 1, unions: bool = True
    ):
        split = tile.split(problem.heads_per_index, least_queries)
        lists = (ids,)
        if unions:
            union = tile_unions(ids, split["BQ"], geometry.blocks)
            lists = (ids, union, 0 if union is None else union.shape[2])
        tiles, chunks = cdiv(problem.tokens, split["BQ"]), cdiv(problem.heads_per_index, split["BH"])
        self.tiles = tiles
        self.programs = tiles * chunks * problem.index_heads * problem.batch
        self.arguments = (*lists, *place(geometry, problem.device))
        self.constants = dict(split, CHUNKS=chunks, SLOTS=slot_count(ids), SLOTS_PAD=padded(slot_count(ids), 1))


def attention_sizes(problem: Problem) -> dict[str, int]:
    """The constants of a problem that the attention kernels share."""
    return dict(
        R=problem.heads_per_index, KV_SHARE=problem.index_heads_per_kv, BLOCK=problem.block_size, D=problem.width,
        D_PAD=padded(problem.width), DV=problem.value_width, DV_PAD=padded(problem.value_width or 1),
    )  # fmt: skip
