"""Key-major traversal: which queries chose each key block, and tiles of them that stay in cache.

A tile is a few of the queries that chose one key block, times the query heads that share its selection. Its rows are
gathered from a token-major copy, so that one query's heads are one contiguous piece of memory, and every tile of a
call has the same number of rows: what later tokens hold never changes a bit of an earlier row.
"""

import torch

from msa_ref.problem import BlockGeometry, Problem

TILE_ROWS = 2048
DENSE_BLOCK = 128


def reverse_index(block_indices: torch.Tensor, geometry: BlockGeometry) -> tuple[torch.Tensor, torch.Tensor]:
    """The transpose of a selection as CSR: the queries that chose each key block, in ascending order.

    Args:
        block_indices: [N, slots], the ids that one index head chose; ids not visible to their query are left out.

    Returns:
        queries: [edges] int64; offsets: [NB + 1] int64; block b was chosen by queries[offsets[b]:offsets[b + 1]].
    """
    ids = block_indices.long()
    first = geometry.first_block.to(ids.device)[:, None]
    own = geometry.block_of.to(ids.device)[:, None]
    query, slot = ((ids >= first) & (ids <= own)).nonzero(as_tuple=True)
    blocks, order = ids[query, slot].sort(stable=True)
    counts = torch.bincount(blocks, minlength=geometry.blocks)
    return query[order], torch.cat([counts.new_zeros(1), counts.cumsum(0)])


def key_major_tiles(block_indices: torch.Tensor | None, geometry: BlockGeometry, tile: int, device=None):
    """Yields (start, stop, queries, future) over key blocks, then over tiles of the queries that chose the block.

    Args:
        block_indices: [N, slots], or None for all visible blocks.
        tile: the largest number of queries in a tile.
        device: where the yielded tensors live; that of block_indices if there are any.

    Yields:
        start, stop: the key block's tokens; queries: [n] int64, ascending;
        future: [n, 1, stop - start] bool, True where the key comes after the query; None where it never does.
    """
    for start, stop, chosen in _chosen_by(block_indices, geometry, device):
        keys = torch.arange(start, stop, device=chosen.device)
        own = int((chosen < stop).sum())
        for at in range(0, len(chosen), tile):
            queries = chosen[at : at + tile]
            future = (keys > queries[:, None])[:, None] if at < own else None
            yield start, stop, queries, future


def _chosen_by(block_indices, geometry, device):
    if block_indices is None:
        for begin, end, _ in geometry.documents():
            for start in range(begin, end, DENSE_BLOCK):
                yield start, min(start + DENSE_BLOCK, end), torch.arange(start, end, device=device)
        return
    queries, offsets = reverse_index(block_indices, geometry)
    bounds, offsets = geometry.block_start.tolist(), offsets.tolist()
    for block in range(geometry.blocks):
        if offsets[block] < offsets[block + 1]:
            yield bounds[block], bounds[block + 1], queries[offsets[block] : offsets[block + 1]]


def queries_per_tile(problem: Problem, block_indices: torch.Tensor | None) -> int:
    """Queries in a tile: about TILE_ROWS rows over the heads, but no more than a block is usually chosen by."""
    most = TILE_ROWS // problem.heads_per_index
    if block_indices is not None:
        most = min(most, block_indices.shape[-1] * problem.block_size)
    return max(1, most)


def token_major(heads: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[heads, N, width] of any strides to a contiguous [N, heads, width] of `dtype`."""
    return heads.transpose(0, 1).to(dtype, memory_format=torch.contiguous_format).contiguous()


class TileLogits:
    """Logits of gathered row tiles against key blocks, in buffers that every tile reuses.

    Args:
        rows: [N, R, width] contiguous; keys: [N, width], already multiplied by the scale.
        tile: queries in a full tile. longest: tokens in the longest key block.

    Attributes:
        gathered: [n, R, width], the rows of the last tile.
        full: [tile * R, keys], the logits of the last tile and, below its n * R rows, padding; what a call returned is
            a view of it.
    """

    def __init__(self, rows: torch.Tensor, keys: torch.Tensor, tile: int, longest: int):
        self.rows, self.keys = rows, keys
        _, self.heads, width = rows.shape
        self.tile = tile
        self._gathered = rows.new_zeros(tile, self.heads, width)
        self._logits = rows.new_zeros(tile * self.heads * longest)

    def __call__(self, start: int, stop: int, queries: torch.Tensor) -> torch.Tensor:
        """The logits [n, R, stop - start] of a tile; valid until the next call."""
        self.gathered = self._gathered[: len(queries)]
        torch.index_select(self.rows, 0, queries, out=self.gathered)
        self.full = self._logits[: self.tile * self.heads * (stop - start)].view(-1, stop - start)
        torch.mm(self._gathered.flatten(0, 1), self.keys[start:stop].T, out=self.full)
        return self.full.view(self.tile, self.heads, -1)[: len(queries)]
