"""Key-major traversal: which queries chose each key block, and tiles of them that stay in cache.

A tile is a few of the queries that chose one key block, times the query heads that share its selection. Its rows are
gathered from a token-major copy, so that one query's heads are one contiguous piece of memory, and every tile of a
call has the same number of rows: what later tokens hold never changes a bit of an earlier row.
"""

import math
from functools import cached_property

import torch

from msa_ref.problem import BlockGeometry, Problem

TILE_ROWS = 2048
DENSE_BLOCK = 128
CUT = 80  # exp(-CUT) is still a normal float32
PARTS = 8  # products over the rows of a tile that are computed apart, each by one thread


def reverse_index(block_indices: torch.Tensor, geometry: BlockGeometry) -> tuple[torch.Tensor, torch.Tensor]:
    """The transpose of a selection as CSR: the queries that chose each key block, in ascending order.

    Args:
        block_indices: [N, slots], the ids that one index head chose; ids not visible to their query are left out.

    Returns:
        queries: [edges] int64; offsets: [NB + 1] int64; block b was chosen by queries[offsets[b]:offsets[b + 1]].
    """
    first = geometry.first_block.to(block_indices.device)[:, None]
    own = geometry.block_of.to(block_indices.device)[:, None]
    seen = (block_indices >= first) & (block_indices <= own)
    blocks, order = block_indices.int().where(seen, geometry.blocks).flatten().sort(stable=True)
    counts = torch.bincount(blocks, minlength=geometry.blocks + 1)[:-1]
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    return order[: offsets[-1]] // block_indices.shape[1], offsets


def key_blocks(reverse, geometry: BlockGeometry, tile: int, device):
    """Yields (start, stop, tiles) for every key block that was chosen.

    Args:
        reverse: the result of `reverse_index`, or None for all visible blocks.
        tile: the largest number of queries in a tile.
        device: where the yielded tensors live.

    Yields:
        start, stop: the key block's tokens; tiles yields the queries that chose it as pairs (queries, future):
        queries: [n] int64, ascending; future: [m, 1, stop - start] bool for the first m queries, True where the key
        comes after the query. The other queries see all keys; None if all do.
    """
    for start, stop, chosen in _chosen_by(reverse, geometry, device):
        yield start, stop, query_tiles(start, stop, chosen, tile)


def query_tiles(start: int, stop: int, chosen: torch.Tensor, tile: int):
    """Yields (queries, future), as `key_blocks` has them, of tiles of the queries `chosen`."""
    keys = torch.arange(start, stop, device=chosen.device)
    own = int((chosen < stop).sum())
    for at in range(0, len(chosen), tile):
        queries = chosen[at : at + tile]
        inside = queries[: max(0, own - at), None]
        yield queries, (keys > inside)[:, None] if len(inside) else None


def _chosen_by(reverse, geometry, device):
    if reverse is None:
        for begin, end, _ in geometry.documents():
            for start in range(begin, end, DENSE_BLOCK):
                yield start, min(start + DENSE_BLOCK, end), torch.arange(start, end, device=device)
        return
    queries, offsets = reverse[0], reverse[1].tolist()
    bounds = geometry.block_start.tolist()
    for block in range(geometry.blocks):
        if offsets[block] < offsets[block + 1]:
            yield bounds[block], bounds[block + 1], queries[offsets[block] : offsets[block + 1]]


def queries_per_tile(most: int, problem: Problem, block_indices: torch.Tensor | None) -> int:
    """Queries in a tile: `most`, but no more than a block is usually chosen by."""
    if block_indices is not None:
        most = min(most, block_indices.shape[-1] * min(problem.block_size, problem.tokens))
    return max(1, most)


def token_major(heads: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[heads, N, width] of any strides to a contiguous [N, heads, width] of `dtype`; a copy only where needed."""
    return heads.transpose(0, 1).to(dtype, memory_format=torch.contiguous_format).contiguous()


def products(rows: torch.Tensor, keys: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
    """rows keys^T, [n, keys], in a flat buffer, as a batch of products of some rows each: threads share it evenly."""
    parts, out = math.gcd(len(rows), PARTS), buffer[: len(rows) * len(keys)].view(len(rows), len(keys))
    torch.bmm(rows.reshape(parts, -1, rows.shape[1]), keys.T.expand(parts, -1, -1), out=out.view(parts, -1, len(keys)))
    return out


class TileProducts:
    """Products of gathered row tiles with the keys of a block, in buffers that every tile reuses.

    A product of all rows of a tile is a batch of PARTS products: each thread then works on rows of its own, which stay
    in its cache for the element-wise steps between.

    Args:
        rows: [N, R, width] contiguous; keys: [N, width].
        tile: queries in a full tile. longest: tokens in the longest key block.

    Attributes:
        full: [tile, R, keys], the products of the last tile; the first n of it are what a call returns. Those below are
            0, as long as nothing is written there.
    """

    def __init__(self, rows: torch.Tensor, keys: torch.Tensor, tile: int, longest: int):
        self.rows, self._keys, self._tile, self._block = rows, keys, tile, None
        self._parts = math.gcd(tile * rows.shape[1], PARTS)
        self._gathered = rows.new_zeros(tile, *rows.shape[1:])
        self._products, self._back = rows.new_empty(tile * rows.shape[1] * longest), None

    @cached_property
    def _norms(self) -> tuple[torch.Tensor, torch.Tensor]:
        return tuple(torch.linalg.vector_norm(vectors, dim=-1) for vectors in (self.rows, self._keys))

    @cached_property
    def steep(self) -> bool:
        """Whether a product may lie further than CUT below the LSE of its row (by the Cauchy-Schwarz inequality)."""
        rows, keys = self._norms
        return not 2 * rows.max() * keys.max() < CUT - math.log(len(keys))  # also where there is a NaN

    def bounds(self, geometry: BlockGeometry) -> torch.Tensor:
        """[N, R]: no product of a row with a key of its document, up to itself, is larger (Cauchy-Schwarz)."""
        rows, keys = self._norms
        return rows * torch.cat([keys[start:stop].cummax(0).values for start, stop, _ in geometry.documents()])[:, None]

    def __call__(self, start: int, stop: int, queries: torch.Tensor) -> torch.Tensor:
        """<row, key> of a tile, [n, R, stop - start]; valid until the next call."""
        if self._block != (start, stop):
            self._enter(start, stop)
        count = len(queries)
        if count == self._tile:
            torch.index_select(self.rows, 0, queries, out=self._gathered)
        else:
            torch.index_select(self.rows, 0, queries, out=self._gathered[:count])
            self._gathered[count:].zero_()
        torch.bmm(self._in_parts(self._gathered), self._block_keys, out=self._in_parts(self.full))
        return self.full[:count]

    def _enter(self, start: int, stop: int) -> None:
        size = stop - start
        heads = self.rows.shape[1]
        self.full = self._products[: self._tile * heads * size].view(self._tile, heads, size)
        self._block, self._block_keys = (start, stop), self._keys[start:stop].T.expand(self._parts, -1, -1)

    def _in_parts(self, tile: torch.Tensor) -> torch.Tensor:
        """[tile, R, width] as [parts, tile * R / parts, width]."""
        return tile.view(self._parts, -1, tile.shape[2])

    def sums(self, start: int, stop: int) -> torch.Tensor:
        """Zeros for `add`: [parts, width of the rows, keys]."""
        return self.rows.new_zeros(self._parts, self.rows.shape[2], stop - start)

    def add(self, sums: torch.Tensor, weights: torch.Tensor) -> None:
        """Adds rows^T weights of the last tile; weights: [tile, R, keys], 0 below the queries of a short tile."""
        sums.baddbmm_(self._in_parts(self._gathered).transpose(1, 2), self._in_parts(weights))

    def back(self, weights: torch.Tensor, vectors: torch.Tensor, count: int) -> torch.Tensor:
        """weights vectors, [count, R, width]; weights: [tile, R, keys], vectors: [keys, width].

        Valid until the next call; all calls must have vectors of one width.
        """
        if self._back is None:
            self._back = weights.new_empty(*weights.shape[:2], vectors.shape[1])
        torch.bmm(self._in_parts(weights), vectors.expand(self._parts, -1, -1), out=self._in_parts(self._back))
        return self._back[:count]
