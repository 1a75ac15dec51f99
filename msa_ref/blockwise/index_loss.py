"""The KL loss of the index branch, key-major, forward and hand-written backward."""

import torch

from msa_ref.blockwise.attention import Softmax, ids_of, longest_block, selections, stream
from msa_ref.blockwise.tiles import TileLogits, key_major_tiles, queries_per_tile, token_major
from msa_ref.problem import BlockGeometry, Problem


def index_loss_forward(q, k, lse, index_q, index_k, block_indices, problem: Problem, geometry: BlockGeometry):
    """KL [B, Hidx, N] of validated tensors."""
    kl = q.new_zeros(problem.batch, problem.index_heads, problem.tokens, dtype=problem.accumulator)
    branches = _branches(q, k, lse, index_q, index_k, block_indices, problem, geometry)
    for batch, index_head, _, tiles in branches:
        row_kl = kl[batch, index_head]
        for _, _, queries, future, teacher, student, _ in tiles:
            if future is not None:
                student.masked_fill_(future[:, 0], 0)
            row_kl.index_add_(0, queries, (torch.xlogy(teacher, teacher) - teacher * student).sum(-1))
    return kl


def index_loss_backward(dkl, q, k, lse, index_q, index_k, block_indices, problem: Problem, geometry: BlockGeometry):
    """(d index_q, d index_k) for the upstream gradient dkl [B, Hidx, N] (SPEC 7)."""
    dindex_q = index_q.new_empty(index_q.shape)
    dindex_k = index_k.new_zeros(index_k.shape, dtype=problem.accumulator)
    branches = _branches(q, k, lse, index_q, index_k, block_indices, problem, geometry)
    for batch, index_head, keys, tiles in branches:
        upstream = dkl[batch, index_head].to(problem.accumulator)
        drows = q.new_zeros(problem.tokens, problem.index_width, dtype=problem.accumulator)
        dkeys = torch.zeros_like(keys)
        for start, stop, queries, future, teacher, student, index_rows in tiles:
            dlogits = student.exp_().sub_(teacher).mul_(upstream[queries, None])
            if future is not None:
                dlogits.masked_fill_(future[:, 0], 0)
            drows.index_add_(0, queries, dlogits @ keys[start:stop])
            dkeys[start:stop].addmm_(dlogits.T, index_rows, alpha=problem.index_scale)
        dindex_q[batch, index_head] = drows
        dindex_k[batch, index_head // problem.index_group] += dkeys
    return dindex_q, dindex_k.to(index_k.dtype)


def _branches(q, k, lse, index_q, index_k, block_indices, problem: Problem, geometry: BlockGeometry):
    """Yields (batch, index head, scaled index keys, its tiles) of every index head."""
    dtype, tile = problem.accumulator, queries_per_tile(problem, block_indices)
    for batch, index_head, heads, kv_head in selections(problem):
        ids = ids_of(block_indices, batch, index_head)
        keys = k[batch, kv_head].to(dtype) * problem.scale
        teacher = TileLogits(token_major(q[batch, heads], dtype), keys, tile, longest_block(problem))
        index_keys = index_k[batch, index_head // problem.index_group].to(dtype) * problem.index_scale
        index_rows = index_q[batch, index_head].to(dtype).contiguous()[:, None]
        student = TileLogits(index_rows, index_keys, tile, longest_block(problem))
        _, largest, total = stream(index_rows, index_keys, None, ids, problem, geometry, tile)
        log_softmax = (largest, total.log())
        softmax = Softmax(lse[batch, heads], teacher.rows, keys, ids, problem, geometry, tile)
        yield batch, index_head, index_keys, _tiles(teacher, softmax, student, log_softmax, ids, geometry, tile)


def _tiles(teacher_logits, softmax, student_logits, log_softmax, ids, geometry: BlockGeometry, tile: int):
    """Yields (start, stop, queries, future, teacher, student, index rows) of every tile.

    teacher: [n, keys], the mean probability over the query heads, 0 in the future; student: [n, keys], the
    log-probability of the index, not masked; index rows: [n, Di], the gathered index queries.
    """
    largest, log_total = log_softmax
    for start, stop, queries, future in key_major_tiles(ids, geometry, tile, largest.device):
        teacher = softmax(teacher_logits(start, stop, queries), queries, future).mean(1)
        student = student_logits(start, stop, queries)[:, 0].sub_(largest[queries]).sub_(log_total[queries])
        yield start, stop, queries, future, teacher, student, student_logits.gathered[:, 0]
