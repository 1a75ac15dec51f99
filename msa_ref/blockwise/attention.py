"""Attention over the selected blocks, key-major, forward and hand-written backward."""

import torch

from msa_ref.blockwise.tiles import DENSE_BLOCK, TileLogits, key_major_tiles, queries_per_tile, token_major
from msa_ref.problem import BlockGeometry, Problem

COARSE = 1e-4  # the largest relative error of a probability that the rounding of its LSE may cause


def attention_forward(q, k, v, block_indices, problem: Problem, geometry: BlockGeometry):
    """(out, lse) of validated tensors."""
    out = q.new_empty(problem.batch, problem.heads, problem.tokens, problem.value_width)
    lse = q.new_empty(problem.batch, problem.heads, problem.tokens, dtype=problem.accumulator)
    tile = queries_per_tile(problem, block_indices)
    for batch, index_head, heads, kv_head in selections(problem):
        rows = token_major(q[batch, heads], problem.accumulator)
        keys = k[batch, kv_head].to(problem.accumulator) * problem.scale
        values = v[batch, kv_head].to(problem.accumulator).contiguous()
        ids = ids_of(block_indices, batch, index_head)
        mixed, largest, total = stream(rows, keys, values, ids, problem, geometry, tile)
        mixed.div_(total.masked_fill(total == 0, 1)[..., None])
        out[batch, heads], lse[batch, heads] = mixed.transpose(0, 1), (largest + total.log()).T
    return out, lse


def stream(rows, keys, values, ids, problem: Problem, geometry: BlockGeometry, tile: int):
    """Online softmax of every row over its selected tokens, one key block at a time.

    Args:
        rows: [N, R, width]; keys: [N, width], scaled; values: [N, Dv], or None for the LSE alone.
        ids: [N, slots], or None for all visible blocks.

    Returns:
        mixed: [N, R, Dv], the values weighted by exp(logit - largest), or None; largest: [N, R], the largest logit;
        total: [N, R], the sum of exp(logit - largest). lse = largest + ln total.
    """
    largest = rows.new_full(rows.shape[:2], -torch.inf)
    total = torch.zeros_like(largest)
    logits_of = TileLogits(rows, keys, tile, longest_block(problem))
    mixed = None
    if values is not None:
        mixed = rows.new_zeros(*rows.shape[:2], values.shape[1])
        product = rows.new_empty(tile * rows.shape[1], values.shape[1])
    for start, stop, queries, future in key_major_tiles(ids, geometry, tile, rows.device):
        weights = logits_of(start, stop, queries)
        if future is not None:
            weights.masked_fill_(future, -torch.inf)
        before = largest[queries]
        now = torch.maximum(before, weights.amax(-1))
        weights.sub_(now[..., None]).exp_()
        rescale = before.sub_(now).exp_()
        largest[queries] = now
        total[queries] = total[queries].mul_(rescale).add_(weights.sum(-1))
        if values is not None:
            torch.mm(logits_of.full, values[start:stop], out=product)
            update = product.view(tile, rows.shape[1], -1)[: len(queries)]
            mixed[queries] = mixed[queries].mul_(rescale[..., None]).add_(update)
    return mixed, largest, total


class Softmax:
    """Turns the logits of a tile into probabilities, given the LSE of every row.

    An LSE of thousands is too coarse in float32 (near 4e8 it steps by 32). Where there is one, the largest logit and
    the sum of exponentials are computed again, and in those rows used one after the other.
    """

    def __init__(self, lse, rows, keys, ids, problem: Problem, geometry: BlockGeometry, tile: int):
        self.shift, self.total = lse.T.contiguous(), None
        coarse = (self.shift.abs() * torch.finfo(lse.dtype).eps > COARSE) & (self.shift != -torch.inf)
        if coarse.any():
            _, largest, total = stream(rows, keys, None, ids, problem, geometry, tile)
            self.shift, self.total = torch.where(coarse, largest, self.shift), total.where(coarse, 1.0)

    def __call__(self, logits, queries, future):
        """[n, R, keys] in place: probabilities, 0 in the future."""
        p = logits.sub_(self.shift[queries][..., None]).exp_()
        if self.total is not None:
            p.div_(self.total[queries][..., None])
        return p if future is None else p.masked_fill_(future, 0)


def attention_backward(dout, q, k, v, out, lse, block_indices, problem: Problem, geometry: BlockGeometry):
    """(dq, dk, dv) of validated tensors (SPEC 7)."""
    dtype = problem.accumulator
    dq = q.new_empty(q.shape)
    dk, dv = k.new_zeros(k.shape, dtype=dtype), v.new_zeros(v.shape, dtype=dtype)
    tile, longest = queries_per_tile(problem, block_indices), longest_block(problem)
    for batch, index_head, heads, kv_head in selections(problem):
        keys, values = k[batch, kv_head].to(dtype) * problem.scale, v[batch, kv_head].to(dtype).contiguous()
        delta = (out[batch, heads].to(dtype) * dout[batch, heads].to(dtype)).sum(-1).T.contiguous()
        ids = ids_of(block_indices, batch, index_head)
        logits_of = TileLogits(token_major(q[batch, heads], dtype), keys, tile, longest)
        dweights_of = TileLogits(token_major(dout[batch, heads], dtype), values, tile, longest)
        softmax = Softmax(lse[batch, heads], logits_of.rows, keys, ids, problem, geometry, tile)
        drows = torch.zeros_like(logits_of.rows)
        for start, stop, queries, future in key_major_tiles(ids, geometry, tile, q.device):
            weights = softmax(logits_of(start, stop, queries), queries, future)
            dlogits = dweights_of(start, stop, queries).sub_(delta[queries][..., None])
            if future is not None:
                dlogits.masked_fill_(future, 0)
            weights, dlogits = weights.flatten(0, 1), dlogits.mul_(weights).flatten(0, 1)
            dv[batch, kv_head, start:stop].addmm_(weights.T, dweights_of.gathered.flatten(0, 1))
            dk[batch, kv_head, start:stop].addmm_(dlogits.T, logits_of.gathered.flatten(0, 1), alpha=problem.scale)
            drows.index_add_(0, queries, (dlogits @ keys[start:stop]).view_as(logits_of.gathered))
        dq[batch, heads] = drows.transpose(0, 1)
    return dq, dk.to(k.dtype), dv.to(v.dtype)


def selections(problem: Problem):
    """Yields (batch, index head, slice of its query heads, KV head): the rows that share one selection."""
    share = problem.heads_per_index
    for batch in range(problem.batch):
        for index_head in range(problem.index_heads):
            heads = slice(index_head * share, (index_head + 1) * share)
            yield batch, index_head, heads, index_head // problem.index_heads_per_kv


def ids_of(block_indices, batch: int, index_head: int):
    """The ids [N, slots] of one index head, or None for all visible blocks."""
    return None if block_indices is None else block_indices[batch, index_head]


def longest_block(problem: Problem) -> int:
    """Tokens of the longest key block of a traversal."""
    return min(problem.tokens, max(problem.block_size, DENSE_BLOCK))
