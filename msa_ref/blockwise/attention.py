"""Attention over the selected blocks, key-major, forward and hand-written backward."""

import torch

from msa_ref.blockwise.tiles import (
    CUT,
    DENSE_BLOCK,
    TILE_ROWS,
    TileProducts,
    key_blocks,
    queries_per_tile,
    reverse_index,
    token_major,
)
from msa_ref.problem import BlockGeometry, Problem

COARSE = 1e-4  # the largest relative error of a probability that the rounding of its LSE may cause
SLACK = CUT / 2  # a logit may exceed the shift of its row by this much before the row is rescaled


def attention_forward(q, k, v, block_indices, problem: Problem, geometry: BlockGeometry):
    """(out, lse) of validated tensors."""
    dtype = problem.accumulator
    out = q.new_empty(problem.batch, problem.tokens, problem.heads, problem.value_width)
    lse = q.new_empty(problem.batch, problem.heads, problem.tokens, dtype=dtype)
    # A tile has one buffer of logits here and two in the backward pass, which share the cache.
    for selection in selections(q, k, block_indices, problem, geometry, tiles=2):
        values = v[selection.batch, selection.kv_head].to(dtype).contiguous()
        rows = out[selection.batch, :, selection.heads]
        mixed = zeros_for(rows, dtype)
        shift, total = stream(selection.logits_of, selection.blocks(), geometry, values, mixed)
        rows.copy_(mixed.div_(total.masked_fill(total == 0, 1)[..., None]))
        # A document's first token sees only itself: its v, to the last bit, and not v · p / p.
        first = geometry.document_start[:-1].to(v.device)
        alone = v[selection.batch, selection.kv_head, first, None]
        rows[first] = torch.where(total[first][..., None] > 0, alone, rows[first])
        lse[selection.batch, selection.heads] = (shift + total.log()).T
    return out.transpose(1, 2), lse


def stream(logits_of: TileProducts, blocks, geometry: BlockGeometry, values=None, mixed=None):
    """Sums of exponentials of every row over its selected tokens, one key block at a time.

    Any shift that keeps the exponentials in range serves. So a row that cannot have a large logit keeps 0 (`bounded`),
    and others are rescaled only when a logit exceeds their shift by SLACK, not at every new maximum: both save passes
    over the logits and over `mixed`. What a row gets depends on nothing that comes after it.

    Args:
        logits_of: the logits of N x R rows. blocks: the key blocks and the tiles of the queries that chose them.
        values: [N, Dv]; mixed: [N, R, Dv], zeros, becomes the sum of exp(logit - shift) times the values.

    Returns:
        shift, total: [N, R]; total is the sum of exp(logit - shift), 0 for a row without tokens.
    """
    bounds = logits_of.bounds(geometry)
    shift = torch.full_like(bounds, -torch.inf).masked_fill_(bounds < SLACK - 1, 0)
    total, bounded = torch.zeros_like(shift), not shift.any()
    for start, stop, tiles in blocks:
        for queries, future in tiles:
            logits = logits_of(start, stop, queries)
            if not bounded:
                _shift(logits, queries, future, shift, total, mixed)
            exp_(logits, future, logits_of.steep)
            total[queries] += logits.sum(-1)
            if mixed is not None:
                mixed.index_add_(0, queries, logits_of.back(logits_of.full, values[start:stop], len(queries)))
    return shift, total


def _shift(logits, queries, future, shift, total, mixed) -> None:
    """Raises the shift of rows that need it, rescales their sums, and subtracts the shift from the logits."""
    if future is not None:
        logits[: len(future)].masked_fill_(future, -torch.inf)
    largest, before = logits.amax(-1), shift[queries]
    now = torch.where(largest > before + SLACK, largest, before)
    shift[queries] = now
    logits.sub_(now[..., None])
    shrink, so_far = before.sub_(now).exp_(), total[queries]
    if not torch.equal(so_far * shrink, so_far):
        total[queries] = so_far * shrink
        if mixed is not None:
            mixed[queries] *= shrink[..., None]


def attention_backward(dout, q, k, v, out, lse, block_indices, problem: Problem, geometry: BlockGeometry):
    """(dq, dk, dv) of validated tensors (SPEC 7)."""
    dtype = problem.accumulator
    dq = q.new_empty(problem.batch, problem.tokens, problem.heads, problem.width)
    dk, dv = k.new_zeros(k.shape, dtype=dtype), v.new_zeros(v.shape, dtype=dtype)
    for selection in selections(q, k, block_indices, problem, geometry):
        batch, heads, kv_head, tile = selection.batch, selection.heads, selection.kv_head, selection.tile
        values = v[batch, kv_head].to(dtype).contiguous()
        dweights_of = TileProducts(token_major(dout[batch, heads], dtype), values, tile, longest_block(problem))
        logits_of, softmax = selection.logits_of, selection.softmax(lse)
        product = values.new_empty(problem.tokens, problem.value_width)  # of one head at a time, to save memory
        pairs = zip(out[batch, heads], dout[batch, heads], strict=True)
        delta = torch.stack([torch.mul(o.to(dtype), do.to(dtype), out=product).sum(-1) for o, do in pairs], 1)
        rows = dq[batch, :, heads]
        drows = zeros_for(rows, dtype)
        for start, stop, tiles in selection.blocks():
            dkeys, dvalues = logits_of.sums(start, stop), dweights_of.sums(start, stop)
            for queries, future in tiles:
                weights = softmax(logits_of(start, stop, queries), queries, future)
                dlogits = dweights_of(start, stop, queries)
                dweights_of.add(dvalues, logits_of.full)
                dlogits.sub_(delta[queries][..., None]).mul_(weights)
                logits_of.add(dkeys, dweights_of.full)
                drows.index_add_(0, queries, logits_of.back(dweights_of.full, selection.keys[start:stop], len(queries)))
            dk[batch, kv_head, start:stop].add_(dkeys.sum(0).T, alpha=problem.scale)
            dv[batch, kv_head, start:stop].add_(dvalues.sum(0).T)
        rows.copy_(drows)
    return dq.transpose(1, 2), dk.to(k.dtype), dv.to(v.dtype)


def zeros_for(rows, dtype):
    """Zeros in which to sum rows [N, R, width]: the rows themselves where they lie in one piece and have the dtype."""
    if rows.is_contiguous() and rows.dtype == dtype:
        return rows.zero_()
    return rows.new_zeros(rows.shape, dtype=dtype)


def exp_(logits, future, steep: bool):
    """exp of the shifted logits of a tile, in place, and 0 where a key is in the future.

    PyTorch's exp takes up to 100 times as long where its result underflows, so where that can be logits are cut off at
    -CUT: nothing, beside the sum of a row.
    """
    inside = logits[: 0 if future is None else len(future)]
    (logits if steep else inside).clamp_(-CUT, CUT)
    logits.exp_()
    if future is not None:
        inside.masked_fill_(future, 0)
    return logits


class Softmax:
    """Turns the logits of a tile into probabilities.

    Args:
        shift: [N, R], what is subtracted from the logits of a row. steep: see `exp_`.
        total: [N, R], the sum of exp(logit - shift) of a row, or None for 1.
    """

    def __init__(self, shift, total, steep: bool):
        self.shift, self.total, self.steep = shift, total, steep

    def __call__(self, logits, queries, future):
        """[n, R, keys] in place: probabilities, 0 in the future."""
        p = exp_(logits.sub_(self.shift[queries][..., None]), future, self.steep)
        return p if self.total is None else p.div_(self.total[queries][..., None])

    def mean(self, logits, queries, future, out):
        """[n, 1, keys], into out: the mean over the R rows of their probabilities."""
        p = exp_(logits.sub_(self.shift[queries][..., None]), future, self.steep)
        share = p.new_full((len(queries), p.shape[1]), 1 / p.shape[1])
        if self.total is not None:
            share.div_(self.total[queries])
        torch.bmm(share[:, None], p, out=out)


class Selection:
    """The rows that share one selection: all query heads of one index head of a batch row.

    Attributes:
        batch, index_head, kv_head: numbers. heads: the slice of query heads.
        ids: [N, slots], or None for all visible blocks. tile: queries in a tile.
        keys: [N, D], multiplied by the scale. logits_of: their products with the query rows.
    """

    def __init__(
        self, q, k, block_indices, batch: int, index_head: int, problem: Problem, geometry: BlockGeometry, tile: int
    ):
        share, dtype = problem.heads_per_index, problem.accumulator
        self.batch, self.index_head, self.kv_head = batch, index_head, index_head // problem.index_heads_per_kv
        self.heads = slice(index_head * share, (index_head + 1) * share)
        self.ids = None if block_indices is None else block_indices[batch, index_head]
        self.tile = tile
        self.geometry, self._reverse = geometry, None if self.ids is None else reverse_index(self.ids, geometry)
        self.keys = k[batch, self.kv_head].to(dtype) * problem.scale
        rows = token_major(q[batch, self.heads], dtype)
        self.logits_of = TileProducts(rows, self.keys, self.tile, longest_block(problem))

    def blocks(self, tile: int | None = None):
        """`key_blocks` of the selection; tile: queries in a tile, default `self.tile`."""
        return key_blocks(self._reverse, self.geometry, tile or self.tile, self.keys.device)

    def softmax(self, lse) -> Softmax:
        """Softmax with the given lse [B, H, N].

        An LSE of thousands is too coarse in float32 (near 4e8 it steps by 32). Where there is one, shift and total are
        computed again, and in those rows used one after the other.
        """
        shift = lse[self.batch, self.heads].T.contiguous()
        coarse = (shift.abs() * torch.finfo(lse.dtype).eps > COARSE) & (shift != -torch.inf)
        if not coarse.any():
            return Softmax(shift, None, self.logits_of.steep)
        exact, total = stream(self.logits_of, self.blocks(), self.geometry)
        return Softmax(torch.where(coarse, exact, shift), total.where(coarse, 1.0), self.logits_of.steep)


def selections(q, k, block_indices, problem: Problem, geometry: BlockGeometry, tiles: int = 1):
    """Yields the `Selection` of every batch row and index head, with tiles of about `tiles` times TILE_ROWS rows."""
    tile = queries_per_tile(tiles * TILE_ROWS // problem.heads_per_index, problem, block_indices)
    for batch in range(problem.batch):
        for index_head in range(problem.index_heads):
            yield Selection(q, k, block_indices, batch, index_head, problem, geometry, tile)


def longest_block(problem: Problem) -> int:
    """Tokens of the longest key block of a traversal."""
    return min(problem.tokens, max(problem.block_size, DENSE_BLOCK))
