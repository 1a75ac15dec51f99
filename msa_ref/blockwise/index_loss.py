"""The KL loss of the index branch, key-major, forward and hand-written backward.

The gradient of a row's KL is its upstream gradient times student minus teacher, and the forward pass has both. So it
also sums what an upstream gradient of 1 would give: if all rows then get the same one, as from the mean, nothing is
left to do but to multiply. Until then Hidx N Di + Hik N Di numbers are kept. (Where some differ, the last bits of
d index_k depend on whether any do.)
"""

import torch

from msa_ref.blockwise.attention import Selection, exp_, longest_block, selections, stream
from msa_ref.blockwise.tiles import TileProducts, queries_per_tile, query_tiles
from msa_ref.problem import BlockGeometry, Problem

PIECES = 8  # tiles of the teacher in one of the student


def index_loss_forward(
    q, k, lse, index_q, index_k, block_indices, problem: Problem, geometry: BlockGeometry, gradients: bool
):
    """(KL [B, Hidx, N], d index_q, d index_k) of validated tensors.

    The gradients are those for an upstream gradient of 1, in the dtype of sums; empty tensors without `gradients`.
    """
    kl = q.new_zeros(problem.batch, problem.index_heads, problem.tokens, dtype=problem.accumulator)
    unit = (_zeros(index_q, problem), _zeros(index_k, problem)) if gradients else (None, None)
    for selection in selections(q, k, block_indices, problem, geometry):
        _walk(selection, lse, index_q, index_k, problem, kl, *unit)
    return kl, *(unit if gradients else (kl.new_empty(0), kl.new_empty(0)))


def index_loss_backward(
    dkl, unit, q, k, lse, index_q, index_k, block_indices, problem: Problem, geometry: BlockGeometry
):
    """(d index_q, d index_k) for the upstream gradient dkl [B, Hidx, N] (SPEC 7); unit: those for 1, or empty."""
    inputs = q, k, lse, index_q, index_k, block_indices, problem, geometry
    unit_q, unit_k = unit if unit[0].numel() else index_loss_forward(*inputs, gradients=True)[1:]
    first = dkl[0, 0, 0].to(problem.accumulator)
    if (dkl == first).all():
        dindex_k = unit_k * first
    else:
        dindex_k = _zeros(index_k, problem)
        for selection in selections(q, k, block_indices, problem, geometry):
            _walk(selection, lse, index_q, index_k, problem, None, None, dindex_k, dkl)
    return (unit_q * dkl[..., None]).to(problem.dtype), dindex_k.to(problem.dtype)


def _zeros(index, problem: Problem):
    return index.new_zeros(index.shape, dtype=problem.accumulator)


def _walk(selection: Selection, lse, index_q, index_k, problem: Problem, kl, dindex_q, dindex_k, dkl=None) -> None:
    """Adds the rows of a selection to kl, dindex_q and dindex_k, unless None; a dkl of None is 1.

    The student has one row a query where the teacher has one a head: its tiles have more queries, and the teacher fills
    them piece by piece.
    """
    place = selection.batch, selection.index_head
    key_place = selection.batch, selection.index_head // problem.index_group
    student, teacher = Student(index_q[place], index_k[key_place], selection, problem), selection.softmax(lse)
    for start, stop, tiles in selection.blocks(student.tile):
        dkeys = None if dindex_k is None else student.logits_of.sums(start, stop)
        for queries, future in tiles:
            p, scratch = student.buffers(start, stop, len(queries))
            pieces = query_tiles(start, stop, queries, selection.tile)
            for (piece, piece_future), p_piece in zip(pieces, p.split(selection.tile), strict=True):
                teacher.mean(selection.logits_of(start, stop, piece), piece, piece_future, p_piece)
            log_p_index = student(start, stop, queries, future)  # [n, 1, keys], as p is
            if kl is not None:
                smallest = torch.finfo(p.dtype).tiny  # 0 ln 0 = 0
                torch.clamp(p, min=smallest, out=scratch).log_().sub_(log_p_index).mul_(p)
                kl[place].index_add_(0, queries, scratch.sum((1, 2)))
            if dkeys is None:
                continue
            dlogits = exp_(log_p_index, future, student.logits_of.steep).sub_(p)
            if dkl is not None:
                dlogits.mul_(dkl[place][queries, None, None])
            student.logits_of.add(dkeys, student.logits_of.full)
            if dindex_q is not None:
                drows = student.logits_of.back(student.logits_of.full, student.keys[start:stop], len(queries))
                dindex_q[place].index_add_(0, queries, drows[:, 0])
        if dkeys is not None:
            dindex_k[key_place][start:stop].add_(dkeys.sum(0).T, alpha=problem.index_scale)


class Student:
    """Log-probabilities of one index head over the tokens of a selection.

    Attributes:
        tile: queries in a tile. keys: [N, Di], multiplied by index_scale. logits_of: their products with the
            index queries.
    """

    def __init__(self, index_q, index_k, selection: Selection, problem: Problem):
        self.tile = queries_per_tile(PIECES * selection.tile, problem, selection.ids)
        self.keys = index_k.to(problem.accumulator) * problem.index_scale
        rows = index_q.to(problem.accumulator).contiguous()[:, None]
        self.logits_of = TileProducts(rows, self.keys, self.tile, longest_block(problem))
        self._shift, total = stream(self.logits_of, selection.blocks(self.tile), selection.geometry)
        self._log_total = total.log()
        self._buffers = rows.new_empty(2, self.tile * longest_block(problem))

    def buffers(self, start: int, stop: int, count: int):
        """Two buffers [count, 1, keys]. Large tensors are not made anew for each tile: that costs page faults."""
        return self._buffers[:, : count * (stop - start)].view(2, count, 1, stop - start)

    def __call__(self, start: int, stop: int, queries, future):
        """[n, 1, keys]: log-probabilities, 0 in the future; valid until the next call."""
        logits = self.logits_of(start, stop, queries)
        logits.sub_(self._shift[queries][..., None]).sub_(self._log_total[queries][..., None])
        if future is not None:
            logits[: len(future)].masked_fill_(future, 0)
        return logits
