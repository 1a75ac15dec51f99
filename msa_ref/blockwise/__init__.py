"""MSA in PyTorch with O(N * topk) memory: key-major traversal and hand-written backward passes.

No tensor grows with N squared, and no sum depends on the order in which threads finish: the same call gives the same
bits every time. Functions, arguments and results are those of SPEC sections 3 to 6 in every implementation.
"""

import torch

from msa_ref.autograd import OnlyOnce
from msa_ref.blockwise.attention import attention_backward, attention_forward
from msa_ref.blockwise.index_loss import index_loss_backward, index_loss_forward
from msa_ref.blockwise.select import select_forward
from msa_ref.blockwise.tiles import reverse_index
from msa_ref.compose import MSAOutput, select_attend_align
from msa_ref.problem import BlockGeometry, check_ids_on_cpu, describe

__all__ = [
    "attention_backward", "attention_forward", "index_kl_loss", "index_loss_backward", "index_loss_forward",
    "msa_attention", "reverse_index", "select_blocks", "select_forward", "sparse_attention",
]  # fmt: skip


@torch.no_grad()
def select_blocks(index_q, index_k, *, topk, block_size=128, local_blocks=1, init_blocks=0, cu_seqlens=None):
    """Keeps, for every query and index head, the forced blocks and then those with the highest score (SPEC 3).

    Args:
        index_q: [B, Hidx, N, Di]; index_k: [B, Hik, N, Di]; one floating-point dtype, any strides.
        topk: blocks kept per query, forced ones included.
        block_size: tokens in a key block.
        local_blocks: newest visible blocks, the query's own first, that are always kept.
        init_blocks: first blocks of the document that are always kept.
        cu_seqlens: None, or the offsets of the documents packed in the row (B = 1).

    Returns:
        [B, Hidx, N, topk] int32: ids in ascending order, then -1. Not differentiable.

    Raises:
        TypeError, ValueError: bad input (SPEC 8), before any work.
    """
    problem = describe(
        index_q=index_q, index_k=index_k, topk=topk, block_size=block_size, local_blocks=local_blocks,
        init_blocks=init_blocks, cu_seqlens=cu_seqlens,
    )  # fmt: skip
    geometry = BlockGeometry(problem.tokens, block_size, cu_seqlens)
    with torch.autocast(problem.device.type, enabled=False):
        return select_forward(index_q, index_k, problem, geometry)


def sparse_attention(q, k, v, block_indices, *, block_size=128, scale=None, cu_seqlens=None):
    """Attends exactly to the visible tokens of the listed blocks (SPEC 4).

    Args:
        q: [B, H, N, D]; k: [B, Hkv, N, D]; v: [B, Hkv, N, Dv]; one floating-point dtype, any strides.
        block_indices: [B, Hidx, N, slots] integer ids in any order, -1 for unused; None for dense causal attention.
        block_size, cu_seqlens: as in `select_blocks`.
        scale: factor of the logits, default D**-0.5.

    Returns:
        (out [B, H, N, Dv] in the dtype of q, lse [B, H, N] float32, or float64 for float64 inputs). lse is the natural
        logarithm of the sum of exponentials, not differentiable. A row with nothing to attend to gives 0 and -inf.

    Raises:
        TypeError, ValueError: bad input (SPEC 8), before any work. On a GPU the ids themselves are not checked.
    """
    problem = describe(
        q=q, k=k, v=v, block_indices=block_indices, block_size=block_size, scale=scale, cu_seqlens=cu_seqlens
    )
    geometry = _geometry(problem, block_indices, cu_seqlens)
    return _SparseAttention.apply(q, k, v, block_indices, problem, geometry)


def index_kl_loss(
    q, k, lse, index_q, index_k, block_indices, *, block_size=128, scale=None, index_scale=None, cu_seqlens=None,
    reduction="mean",
):  # fmt: skip
    """KL(teacher || student): mean attention of an index head's query heads, against the index branch (SPEC 5).

    Args:
        q: [B, H, N, D]; k: [B, Hkv, N, D]; the teacher, which gets no gradient.
        lse: [B, H, N], from `sparse_attention` with the same block_indices, scale and documents.
        index_q: [B, Hidx, N, Di]; index_k: [B, Hik, N, Di]; the student.
        block_indices, block_size, scale, cu_seqlens: as in `sparse_attention`; None for the full causal prefix.
        index_scale: factor of the index logits, default Di**-0.5.
        reduction: "mean" over B, Hidx and N (a row with nothing visible counts as 0), or "none".

    Returns:
        Nats; a scalar, or [B, Hidx, N]; float32 (float64 for float64 inputs).

    Raises:
        TypeError, ValueError: bad input (SPEC 8), before any work. On a GPU the ids themselves are not checked.
    """
    problem = describe(
        q=q, k=k, lse=lse, index_q=index_q, index_k=index_k, block_indices=block_indices, block_size=block_size,
        scale=scale, index_scale=index_scale, cu_seqlens=cu_seqlens, reduction=reduction,
    )  # fmt: skip
    geometry = _geometry(problem, block_indices, cu_seqlens)
    gradients = torch.is_grad_enabled() and (index_q.requires_grad or index_k.requires_grad)
    kl = _IndexLoss.apply(
        index_q, index_k, q.detach(), k.detach(), lse.detach(), block_indices, problem, geometry, gradients
    )
    return kl.mean() if reduction == "mean" else kl


def msa_attention(
    q, k, v, index_q, index_k, *, topk=16, block_size=128, local_blocks=1, init_blocks=0, scale=None,
    index_scale=None, cu_seqlens=None,
) -> MSAOutput:  # fmt: skip
    """Selects blocks, attends to them, and measures how far the index is from the attention (SPEC 6).

    Args:
        q, k, v, index_q, index_k, scale, index_scale: as in `sparse_attention` and `index_kl_loss`.
        topk, block_size, local_blocks, init_blocks, cu_seqlens: as in `select_blocks`; topk=None is the dense warm-up.

    Raises:
        TypeError, ValueError: bad input (SPEC 8), before any work.
    """
    return select_attend_align(
        select_blocks, sparse_attention, index_kl_loss, q, k, v, index_q, index_k, topk=topk, block_size=block_size,
        local_blocks=local_blocks, init_blocks=init_blocks, scale=scale, index_scale=index_scale, cu_seqlens=cu_seqlens,
    )  # fmt: skip


def _geometry(problem, block_indices, cu_seqlens) -> BlockGeometry:
    check_ids_on_cpu(block_indices, problem.block_size, cu_seqlens)
    return BlockGeometry(problem.tokens, problem.block_size, cu_seqlens)


class _SparseAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, block_indices, problem, geometry):
        with torch.autocast(problem.device.type, enabled=False):
            out, lse = attention_forward(q, k, v, block_indices, problem, geometry)
        ctx.save_for_backward(q, k, v, out, lse, block_indices)
        ctx.call = problem, geometry
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx, dout, _):
        q, k, v, out, lse, block_indices = ctx.saved_tensors
        with torch.autocast(dout.device.type, enabled=False):
            gradients = OnlyOnce.apply(attention_backward, dout, q, k, v, out, lse, block_indices, *ctx.call)
        return *gradients, None, None, None


class _IndexLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, index_q, index_k, q, k, lse, block_indices, problem, geometry, gradients):
        arguments = q, k, lse, index_q, index_k, block_indices
        with torch.autocast(problem.device.type, enabled=False):
            kl, *unit = index_loss_forward(*arguments, problem, geometry, gradients)
        ctx.save_for_backward(*unit, *arguments)
        ctx.call = problem, geometry
        return kl

    @staticmethod
    def backward(ctx, dkl):
        unit_q, unit_k, *arguments = ctx.saved_tensors
        with torch.autocast(dkl.device.type, enabled=False):
            gradients = OnlyOnce.apply(index_loss_backward, dkl, (unit_q, unit_k), *arguments, *ctx.call)
        return *gradients, *(None,) * 7
