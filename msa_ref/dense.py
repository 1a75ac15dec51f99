"""MSA in PyTorch with N x N masks and autograd: written for checking.

Memory grows with N squared. Runs on any device. The contract is SPEC 1 to 8.
"""

import itertools
import math

import torch
from torch.autograd.function import once_differentiable

from msa_ref.compose import MSAOutput, select_attend_align
from msa_ref.problem import BlockGeometry, describe, validate_block_indices


@torch.no_grad()
def select_blocks(index_q, index_k, *, topk, block_size=128, local_blocks=1, init_blocks=0, cu_seqlens=None):
    """Keeps at most topk key blocks per query and index head: the forced ones, then the best scored (SPEC 3).

    Args:
        index_q: [B, Hidx, N, Di]. index_k: [B, Hik, N, Di].

    Returns:
        [B, Hidx, N, topk] int32: the kept ids in ascending order, then -1. Not differentiable.

    Raises:
        TypeError, ValueError: SPEC 8.
    """
    problem = describe(
        index_q=index_q, index_k=index_k, topk=topk, block_size=block_size, local_blocks=local_blocks,
        init_blocks=init_blocks, cu_seqlens=cu_seqlens,
    )  # fmt: skip
    geometry = BlockGeometry(problem.tokens, block_size, cu_seqlens)
    with _no_autocast(problem.device):
        score = _products(index_q, index_k, problem.accumulator)  # [B, Hidx, N, N]
    hidden = ~_visible_tokens(geometry, problem.device) | score.isnan()
    parts = score.masked_fill(hidden, -math.inf).split(geometry.block_start.diff().tolist(), dim=-1)
    block_score = torch.stack([part.amax(-1) for part in parts], -1)  # [B, Hidx, N, NB]
    parts = hidden.split(geometry.block_start.diff().tolist(), dim=-1)
    unscored = torch.stack([part.all(-1) for part in parts], -1)

    block = torch.arange(geometry.blocks, device=problem.device)
    own = geometry.block_of.to(problem.device)[:, None]
    first = geometry.first_block.to(problem.device)[:, None]
    visible = (first <= block) & (block <= own)  # [N, NB]
    forced = visible & ((block > own - local_blocks) | (block < first + init_blocks))
    # Forced blocks, then scored, then visible blocks of NaN scores, then the rest; two stable sorts, major key last.
    standing = torch.where(forced, 3, torch.where(visible, 2 - unscored.int(), 0))
    order = block_score.argsort(dim=-1, descending=True, stable=True)
    order = order.gather(-1, standing.gather(-1, order).argsort(dim=-1, descending=True, stable=True))[..., :topk]
    beyond = geometry.blocks  # sorts after every id
    kept = order.masked_fill(standing.gather(-1, order) == 0, beyond).sort(dim=-1).values
    kept = kept.masked_fill(kept == beyond, -1)
    return torch.nn.functional.pad(kept, (0, topk - kept.shape[-1]), value=-1).int()


def sparse_attention(q, k, v, block_indices, *, block_size=128, scale=None, cu_seqlens=None):
    """Attends to the visible tokens of the listed blocks (SPEC 4).

    Args:
        q: [B, H, N, D]. k: [B, Hkv, N, D]. v: [B, Hkv, N, Dv].
        block_indices: [B, Hidx, N, slots] int32 or int64, -1 for an unused slot; None for all visible blocks.
            Its values are checked on the CPU only: on a GPU the check would wait for the device.

    Returns:
        out: [B, H, N, Dv], the dtype of q. lse: [B, H, N], float32 (float64 for float64 inputs), natural logarithm,
        not differentiable.

    Raises:
        TypeError, ValueError: SPEC 8. RuntimeError: a second derivative was asked for.
    """
    problem = describe(
        q=q, k=k, v=v, block_indices=block_indices, block_size=block_size, scale=scale, cu_seqlens=cu_seqlens
    )
    selected = _selected_tokens(problem, block_indices, cu_seqlens)
    selected = selected.repeat_interleave(problem.heads_per_index, dim=1)

    def attend(q, k, v):
        logit = _masked_logits(problem.scale, q, k, selected, problem.accumulator)
        p = torch.softmax(logit, -1).masked_fill(~selected, 0)
        out = p @ v.to(problem.accumulator).repeat_interleave(problem.group, dim=1)
        lse = torch.logsumexp(logit.detach(), -1).masked_fill(~selected.any(-1), -math.inf)
        return out.to(problem.dtype), lse

    return _FirstOrder.apply(attend, q, k, v)


def index_kl_loss(
    q, k, lse, index_q, index_k, block_indices, *, block_size=128, scale=None, index_scale=None, cu_seqlens=None,
    reduction="mean",
):  # fmt: skip
    """KL divergence of the index branch (student) from its query heads' mean attention (teacher), in nats (SPEC 5).

    Args:
        q: [B, H, N, D]. k: [B, Hkv, N, D]. lse: [B, H, N], from `sparse_attention` with the same block_indices.
        index_q: [B, Hidx, N, Di]. index_k: [B, Hik, N, Di].
        block_indices: as in `sparse_attention`.

    Returns:
        A scalar for reduction="mean", [B, Hidx, N] for "none"; float32 (float64 for float64 inputs). Differentiable in
        index_q and index_k only.

    Raises:
        TypeError, ValueError: SPEC 8. RuntimeError: a second derivative was asked for.
    """
    problem = describe(
        q=q, k=k, lse=lse, index_q=index_q, index_k=index_k, block_indices=block_indices, block_size=block_size,
        scale=scale, index_scale=index_scale, cu_seqlens=cu_seqlens, reduction=reduction,
    )  # fmt: skip
    selected = _selected_tokens(problem, block_indices, cu_seqlens)
    by_head = selected.repeat_interleave(problem.heads_per_index, dim=1)
    with torch.no_grad(), _no_autocast(problem.device):
        logit = _masked_logits(problem.scale, q, k, by_head, problem.accumulator)
        log_p = _log_softmax(logit, lse).unflatten(1, (problem.index_heads, problem.heads_per_index))
        log_teacher = torch.logsumexp(log_p, 2) - math.log(problem.heads_per_index)
        p_bar = log_teacher.exp().masked_fill(~selected, 0)

    def divergence(index_q, index_k):
        index_logit = _masked_logits(problem.index_scale, index_q, index_k, selected, problem.accumulator)
        log_student = _log_softmax(index_logit, torch.logsumexp(index_logit, -1))
        # 0 · ln 0 = 0
        kl = (p_bar * (log_teacher - log_student).masked_fill(p_bar == 0, 0)).sum(-1)
        return (kl.mean() if reduction == "mean" else kl,)

    return _FirstOrder.apply(divergence, index_q, index_k)[0]


def msa_attention(
    q, k, v, index_q, index_k, *, topk=16, block_size=128, local_blocks=1, init_blocks=0, scale=None, index_scale=None,
    cu_seqlens=None,
) -> MSAOutput:  # fmt: skip
    """Selects blocks, attends to them and measures how well the index branch predicts attention (SPEC 6).

    Args:
        q: [B, H, N, D]. k: [B, Hkv, N, D]. v: [B, Hkv, N, Dv]. index_q: [B, Hidx, N, Di]. index_k: [B, Hik, N, Di].
        topk: blocks kept per query; None for the dense warm-up.

    Raises:
        TypeError, ValueError: SPEC 8. RuntimeError: a second derivative was asked for.
    """
    return select_attend_align(
        select_blocks, sparse_attention, index_kl_loss, q, k, v, index_q, index_k, topk=topk, block_size=block_size,
        local_blocks=local_blocks, init_blocks=init_blocks, scale=scale, index_scale=index_scale,
        cu_seqlens=cu_seqlens,
    )  # fmt: skip


def _products(left, right, dtype):
    """[B, heads, N, N]: every row of left with every row of right, whose heads are shared by adjacent heads of left."""
    shared = left.shape[1] // right.shape[1]
    return left.to(dtype) @ right.to(dtype).repeat_interleave(shared, dim=1).transpose(-1, -2)


def _masked_logits(scale, left, right, selected, dtype):
    """Scaled products, -inf outside the selection; 0 in rows that select nothing, so that their softmax is finite."""
    logit = scale * _products(left, right, dtype)
    return logit.masked_fill(~selected, -math.inf).masked_fill(~selected.any(-1, keepdim=True), 0)


def _log_softmax(logit, lse):
    # Normalised once more because lse is rounded: float32 steps by 32 at a logit of 4e8.
    return torch.log_softmax(logit - lse.masked_fill(lse.isneginf(), 0)[..., None], -1)


def _visible_tokens(geometry, device):
    """[N, N]: token j (column) is visible to query i (row)."""
    document = geometry.first_block.to(device)
    token = torch.arange(geometry.tokens, device=device)
    return (token <= token[:, None]) & (document == document[:, None])


def _selected_tokens(problem, block_indices, cu_seqlens):
    """[B, Hidx, N, N]: I_tok as a mask."""
    geometry = BlockGeometry(problem.tokens, problem.block_size, cu_seqlens)
    visible = _visible_tokens(geometry, problem.device)
    shape = (problem.batch, problem.index_heads, problem.tokens)
    if block_indices is None:
        return visible.expand(*shape, -1)
    if not block_indices.is_cuda:
        validate_block_indices(block_indices, block_size=problem.block_size, cu_seqlens=cu_seqlens)
    unused = geometry.blocks
    slots = block_indices.long().masked_fill(block_indices < 0, unused)
    listed = torch.zeros(*shape, geometry.blocks + 1, dtype=torch.bool, device=problem.device).scatter(-1, slots, True)
    return listed[..., geometry.block_of.to(problem.device)] & visible


def _no_autocast(device):
    return torch.autocast(device.type, enabled=False)


class _FirstOrder(torch.autograd.Function):
    """Runs a function of tensors that autograd can differentiate, and lets it be differentiated once, not twice."""

    @staticmethod
    def forward(ctx, function, *tensors):
        ctx.set_materialize_grads(False)
        needed = ctx.needs_input_grad[1:]
        with torch.set_grad_enabled(any(needed)), _no_autocast(tensors[0].device):
            ctx.inputs = [tensor.detach().requires_grad_(need) for tensor, need in zip(tensors, needed, strict=True)]
            ctx.outputs = function(*ctx.inputs)
        results = tuple(output.detach() for output in ctx.outputs)
        constant = (not output.requires_grad for output in ctx.outputs)
        ctx.mark_non_differentiable(*itertools.compress(results, constant))
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients):
        pairs = zip(ctx.outputs, gradients, strict=True)
        used = [(output, gradient) for output, gradient in pairs if gradient is not None]
        wanted = [tensor for tensor in ctx.inputs if tensor.requires_grad]
        if not used or not wanted:
            return (None,) * (1 + len(ctx.inputs))
        outputs, gradients = zip(*used, strict=True)
        with _no_autocast(ctx.inputs[0].device):
            found = iter(torch.autograd.grad(outputs, wanted, gradients, retain_graph=True, allow_unused=True))
        return None, *(next(found) if tensor.requires_grad else None for tensor in ctx.inputs)
