"""Attention and KL loss with N x N masks in one pass: the fastest way on a CPU at a few hundred tokens.

The probabilities are computed once and serve the output, the teacher of the KL loss, and the backward pass. A tile of
queries meets only the keys before its end, which saves a good third of the square.
"""

from __future__ import annotations

import torch
from torch import Tensor

from msa_ref.problem import BlockGeometry, Problem, describe, validate_block_indices
from msa_triton.attention import refuse_second_derivative

TILE = 128
LEAST = torch.finfo(torch.float32).min


def masked_attention(
    q: Tensor, k: Tensor, v: Tensor, index_q: Tensor, index_k: Tensor, block_indices: Tensor | None, *,
    block_size: int = 128, scale: float | None = None, index_scale: float | None = None, cu_seqlens=None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`sparse_attention` and `index_kl_loss` together (SPEC 4, 5); memory grows with N squared.

    Args:
        q, k, v, index_q, index_k, block_indices and the options: as in `sparse_attention` and `index_kl_loss`.

    Returns:
        (out [B, H, N, Dv] in the dtype of q, the mean KL in nats, a float32 scalar; float64 for float64 inputs).

    Raises:
        TypeError, ValueError: bad arguments (SPEC 8). RuntimeError: when a second derivative is asked for.
    """
    problem = describe(
        q=q, k=k, v=v, index_q=index_q, index_k=index_k, block_indices=block_indices, block_size=block_size,
        scale=scale, index_scale=index_scale, cu_seqlens=cu_seqlens,
    )  # fmt: skip
    if block_indices is not None and block_indices.device.type == "cpu":
        validate_block_indices(block_indices, block_size=block_size, cu_seqlens=cu_seqlens)
    geometry = BlockGeometry(problem.tokens, block_size, cu_seqlens)
    bias, nothing = _bias(problem, block_indices, geometry)
    with torch.autocast(problem.device.type, enabled=False):
        return _Masked.apply(q, k, v, index_q, index_k, bias, nothing, problem)


def _bias(problem: Problem, block_indices: Tensor | None, geometry: BlockGeometry) -> tuple[Tensor, Tensor | None]:
    """What hides keys from queries, and the queries that see nothing.

    Returns:
        [B, Hidx, N, N]: 0 where a query (row) attends to a key (column), -inf elsewhere, but 0 in the rows
        that attend to nothing; [B, Hidx, N] bool, True in those rows, or None if there are none.
    """
    document = geometry.first_block.to(problem.device)
    visible = (document[:, None] == document).tril_()
    bias = torch.zeros_like(visible, dtype=problem.accumulator).masked_fill_(~visible, -torch.inf)
    if block_indices is None:
        return bias.expand(problem.batch, problem.index_heads, -1, -1), None
    slots = block_indices.long().masked_fill(block_indices < 0, geometry.blocks)
    listed = bias.new_full((*slots.shape[:3], geometry.blocks + 1), -torch.inf).scatter_(-1, slots, 0)
    bias = bias.repeat(*slots.shape[:2], 1, 1)
    for start, end, block in geometry.documents():
        stop = block + -(-(end - start) // geometry.block_size)
        tokens = listed[..., block:stop, None].expand(-1, -1, -1, -1, geometry.block_size).flatten(-2)
        bias[..., start:end] += tokens[..., : end - start]
    own, first = geometry.block_of.to(problem.device)[:, None], document[:, None]
    nothing = ~((block_indices >= first) & (block_indices <= own)).any(-1)
    if not nothing.any():
        return bias, None
    return bias.masked_fill_(nothing[..., None], 0), nothing


class _Masked(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, index_q, index_k, bias, nothing, problem):
        queries, keys, values = _grouped(problem, problem.kv_heads, q, k, v)
        index_queries, index_keys = _grouped(problem, problem.index_key_heads, index_q, index_k)
        scaled, index_scaled = queries * problem.scale, index_queries * problem.index_scale
        out = queries.new_empty(*queries.shape[:-1], problem.value_width)
        divergence, saved = queries.new_zeros(()), []
        for low in range(0, problem.tokens, TILE):
            rows, seen = slice(low, low + TILE), slice(0, low + TILE)
            tile_bias = bias[:, :, None, rows, seen]
            p = _logits(scaled[:, :, :, rows], keys[:, :, :, seen], tile_bias).softmax(-1)
            logits = _logits(index_scaled[:, :, :, rows], index_keys[:, :, :, seen], tile_bias)
            p_idx, log_p_idx = logits.softmax(-1), logits.log_softmax(-1)
            if nothing is not None:
                p.masked_fill_(nothing[:, :, None, rows, None], 0)
                p_idx.masked_fill_(nothing[:, :, None, rows, None], 0)
            p_bar = p.mean(2, keepdim=True)
            error = p_idx.sub_(p_bar)
            divergence += torch.xlogy(p_bar, p_bar).sub_(p_bar.mul_(log_p_idx.clamp_(min=LEAST))).sum()
            p = p.view(*queries.shape[:3], *p.shape[-2:])
            out[:, :, :, rows] = p @ values[:, :, :, seen]
            saved += [p, error]
        ctx.save_for_backward(q, k, v, index_q, index_k, out, *saved)
        ctx.problem = problem
        rows = problem.batch * problem.index_heads * problem.tokens
        return out.flatten(1, 2).to(q.dtype), divergence / rows

    @staticmethod
    def backward(ctx, dout, dkl):
        with torch.no_grad():
            gradients = _backward(ctx.problem, dout, dkl, *ctx.saved_tensors)
        return *_Once.apply(*gradients, dout, dkl, *ctx.saved_tensors[:5]), None, None, None


class _Once(torch.autograd.Function):
    """Passes five gradients on; asking for their own gradients raises, whatever they were computed from."""

    @staticmethod
    def forward(ctx, *tensors):
        return tuple(gradient.view_as(gradient) for gradient in tensors[:5])

    @staticmethod
    def backward(ctx, *_):
        refuse_second_derivative()


def _backward(problem: Problem, dout, dkl, q, k, v, index_q, index_k, out, *saved) -> list[Tensor]:
    queries, keys, values, dout = _grouped(problem, problem.kv_heads, q, k, v, dout)
    index_queries, index_keys = _grouped(problem, problem.index_key_heads, index_q, index_k)
    index_step = dkl * problem.index_scale / (problem.batch * problem.index_heads * problem.tokens)
    delta = (out * dout).sum(-1, keepdim=True)
    gradients = [torch.zeros_like(tensor) for tensor in (queries, keys, values, index_queries, index_keys)]
    dq, dk, dv, dindex_q, dindex_k = gradients
    for tile, low in enumerate(range(0, problem.tokens, TILE)):
        rows, seen = slice(low, low + TILE), slice(0, low + TILE)
        p, error = saved[2 * tile : 2 * tile + 2]
        here = dout[:, :, :, rows]
        dv[:, :, :, seen] += (p.mT @ here).sum(2, keepdim=True)
        ds = (here @ values[:, :, :, seen].mT).sub_(delta[:, :, :, rows]).mul_(p).mul_(problem.scale)
        dq[:, :, :, rows] = ds @ keys[:, :, :, seen]
        dk[:, :, :, seen] += (ds.mT @ queries[:, :, :, rows]).sum(2, keepdim=True)
        ds = (error * index_step).view(*index_queries.shape[:3], *error.shape[-2:])
        dindex_q[:, :, :, rows] = ds @ index_keys[:, :, :, seen]
        dindex_k[:, :, :, seen] += (ds.mT @ index_queries[:, :, :, rows]).sum(2, keepdim=True)
    return [gradient.flatten(1, 2).to(q.dtype) for gradient in gradients]


def _grouped(problem: Problem, groups: int, *heads: Tensor) -> list[Tensor]:
    """[B, heads, N, width] as [B, groups, heads / groups, N, width] in the accumulator's dtype."""
    return [tensor.unflatten(1, (groups, -1)).to(problem.accumulator) for tensor in heads]


def _logits(queries: Tensor, keys: Tensor, bias: Tensor) -> Tensor:
    """[B, Hidx, heads per index head, rows, keys] of grouped query heads or index heads, with the bias added."""
    logits = queries @ keys.mT
    return logits.view(*bias.shape[:2], -1, *logits.shape[-2:]).add_(bias)
