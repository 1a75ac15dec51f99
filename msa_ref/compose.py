"""`msa_attention` of `naive`, `blockwise` and `msa_triton`: select, attend, align."""

from typing import Any, NamedTuple

from msa_ref.problem import describe


class MSAOutput(NamedTuple):
    """What `msa_attention` returns.

    Attributes:
        out: [B, H, N, Dv], the dtype of q.
        kl_loss: scalar, float32 (float64 for float64 inputs), in nats: the mean of KL over batch, index heads, queries.
        block_indices: [B, Hidx, N, topk] int32, or None in the dense warm-up (topk=None).
        lse: [B, H, N], float32 (float64 for float64 inputs), natural logarithm.
    """

    out: Any
    kl_loss: Any
    block_indices: Any
    lse: Any


def select_attend_align(
    select_blocks, sparse_attention, index_kl_loss, q, k, v, index_q, index_k, *, topk, block_size, local_blocks,
    init_blocks, scale, index_scale, cu_seqlens,
) -> MSAOutput:  # fmt: skip
    """Composes the three operations of one implementation (SPEC 6); topk=None is the dense warm-up."""
    describe(
        q=q, k=k, v=v, index_q=index_q, index_k=index_k, topk=topk, block_size=block_size, local_blocks=local_blocks,
        init_blocks=init_blocks, scale=scale, index_scale=index_scale, cu_seqlens=cu_seqlens,
    )  # fmt: skip
    place = {"block_size": block_size, "cu_seqlens": cu_seqlens}
    block_indices = None
    if topk is not None:
        block_indices = select_blocks(
            index_q, index_k, topk=topk, local_blocks=local_blocks, init_blocks=init_blocks, **place
        )
    out, lse = sparse_attention(q, k, v, block_indices, scale=scale, **place)
    kl_loss = index_kl_loss(q, k, lse, index_q, index_k, block_indices, scale=scale, index_scale=index_scale, **place)
    return MSAOutput(out, kl_loss, block_indices, lse)
