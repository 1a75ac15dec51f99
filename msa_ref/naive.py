"""MSA in NumPy, one query at a time, forward and hand-written backward: written for reading.

Every function takes NumPy arrays or PyTorch tensors and returns the kind it was given; sums run in float32 (float64 for
float64 inputs). The contract is SPEC 1 to 8; nothing here is differentiable, the two `_backward` functions are by hand.
"""

import math

import numpy as np
import torch

from msa_ref.compose import MSAOutput, select_attend_align
from msa_ref.problem import BlockGeometry, describe, validate_block_indices


def block_scores(index_q, index_k, *, block_size=128, cu_seqlens=None):
    """Scores every key block for every query: the highest token score among the block's visible tokens (SPEC 3).

    Args:
        index_q: [B, Hidx, N, Di]. index_k: [B, Hik, N, Di].

    Returns:
        [B, Hidx, N, NB], float32 (float64 for float64 inputs); -inf where no token is visible. NaN tokens are ignored
        unless all visible tokens of the block are NaN.

    Raises:
        TypeError, ValueError: SPEC 8.
    """
    call = _Call(index_q=index_q, index_k=index_k, topk=1, block_size=block_size, cu_seqlens=cu_seqlens)
    index_q, index_k = call.arrays["index_q"], call.arrays["index_k"]
    scores = np.full((*index_q.shape[:3], call.geometry.blocks), -np.inf, index_q.dtype)
    for batch, head, query in np.ndindex(index_q.shape[:3]):
        for block in call.visible_blocks(query):
            keys = index_k[batch, head // call.problem.index_group, call.visible_tokens(query, block)]
            scores[batch, head, query, block] = np.fmax.reduce(keys @ index_q[batch, head, query])
    return call.give(scores)


def select_blocks(index_q, index_k, *, topk, block_size=128, local_blocks=1, init_blocks=0, cu_seqlens=None):
    """Keeps at most topk key blocks per query and index head: the forced ones, then the best scored (SPEC 3).

    Args:
        index_q: [B, Hidx, N, Di]. index_k: [B, Hik, N, Di].

    Returns:
        [B, Hidx, N, topk] int32: the kept ids in ascending order, then -1.

    Raises:
        TypeError, ValueError: SPEC 8.
    """
    call = _Call(
        index_q=index_q, index_k=index_k, topk=topk, block_size=block_size, local_blocks=local_blocks,
        init_blocks=init_blocks, cu_seqlens=cu_seqlens,
    )  # fmt: skip
    scores = _to_tensor(block_scores(index_q, index_k, block_size=block_size, cu_seqlens=cu_seqlens)).cpu().numpy()
    block_indices = np.full((*scores.shape[:3], topk), -1, np.int32)
    for batch, head, query in np.ndindex(scores.shape[:3]):
        row = scores[batch, head, query]
        visible = call.visible_blocks(query)
        forced = set(visible[-local_blocks:] if local_blocks else []) | set(visible[:init_blocks])
        others = sorted((block for block in visible if block not in forced), key=lambda block: _rank(row[block], block))
        kept = sorted([*forced, *others[: topk - len(forced)]])
        block_indices[batch, head, query, : len(kept)] = kept
    return call.give(block_indices)


def _rank(score, block):
    """Sort key: the highest score first, NaN after every number, ties to the lower id."""
    return (np.inf, True, block) if np.isnan(score) else (-score, False, block)


def sparse_attention(q, k, v, block_indices, *, block_size=128, scale=None, cu_seqlens=None):
    """Attends to the visible tokens of the listed blocks (SPEC 4).

    Args:
        q: [B, H, N, D]. k: [B, Hkv, N, D]. v: [B, Hkv, N, Dv].
        block_indices: [B, Hidx, N, slots] int32 or int64, -1 for an unused slot; None for all visible blocks.

    Returns:
        out: [B, H, N, Dv], the dtype of q. lse: [B, H, N], float32 (float64 for float64 inputs), natural logarithm.

    Raises:
        TypeError, ValueError: SPEC 8, and what `validate_block_indices` raises.
    """
    call = _Call(q=q, k=k, v=v, block_indices=block_indices, block_size=block_size, scale=scale, cu_seqlens=cu_seqlens)
    q, k, v, problem = call.arrays["q"], call.arrays["k"], call.arrays["v"], call.problem
    out = np.zeros((*q.shape[:3], v.shape[3]), q.dtype)
    lse = np.full(q.shape[:3], -np.inf, q.dtype)
    for batch, head, query in np.ndindex(q.shape[:3]):
        tokens = call.selected_tokens(batch, head // problem.heads_per_index, query)
        if len(tokens) == 0:
            continue
        kv_head = head // problem.group
        logit = problem.scale * (k[batch, kv_head, tokens] @ q[batch, head, query])
        lse[batch, head, query] = _log_sum_exp(logit)
        weight = np.exp(logit - logit.max())
        out[batch, head, query] = weight @ v[batch, kv_head, tokens] / weight.sum()
    return call.give(out, problem.dtype), call.give(lse)


def sparse_attention_backward(q, k, v, block_indices, dout, *, block_size=128, scale=None, cu_seqlens=None):
    """Gradients of `sparse_attention` (SPEC 7).

    Args:
        q, k, v, block_indices: as in `sparse_attention`.
        dout: [B, H, N, Dv], the upstream gradient of out.

    Returns:
        dq, dk, dv: the shapes and dtype of q, k, v.

    Raises:
        TypeError, ValueError: as `sparse_attention`; ValueError for a dout of another shape.
    """
    call = _Call(q=q, k=k, v=v, block_indices=block_indices, block_size=block_size, scale=scale, cu_seqlens=cu_seqlens)
    q, k, v, problem = call.arrays["q"], call.arrays["k"], call.arrays["v"], call.problem
    dout = call.upstream("dout", dout, (*q.shape[:3], v.shape[3]))
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    for batch, head, query in np.ndindex(q.shape[:3]):
        tokens = call.selected_tokens(batch, head // problem.heads_per_index, query)
        if len(tokens) == 0:
            continue
        kv_head, dout_row = head // problem.group, dout[batch, head, query]
        keys, values = k[batch, kv_head, tokens], v[batch, kv_head, tokens]
        logit = problem.scale * (keys @ q[batch, head, query])
        weight = np.exp(logit - logit.max())
        p = weight / weight.sum()
        delta = (weight @ values / weight.sum()) @ dout_row  # out · dout
        ds = p * (values @ dout_row - delta)
        dq[batch, head, query] = problem.scale * (ds @ keys)
        dk[batch, kv_head, tokens] += problem.scale * np.outer(ds, q[batch, head, query])
        dv[batch, kv_head, tokens] += np.outer(p, dout_row)
    return call.give(dq, problem.dtype), call.give(dk, problem.dtype), call.give(dv, problem.dtype)


def index_kl_loss(
    q, k, lse, index_q, index_k, block_indices, *, block_size=128, scale=None, index_scale=None, cu_seqlens=None,
    reduction="mean",
):  # fmt: skip
    """KL(teacher || student): mean attention of an index head's query heads, against the index branch (SPEC 5).

    Args:
        q: [B, H, N, D]. k: [B, Hkv, N, D]. lse: [B, H, N], from `sparse_attention` with the same block_indices.
        index_q: [B, Hidx, N, Di]. index_k: [B, Hik, N, Di].
        block_indices: as in `sparse_attention`.

    Returns:
        A scalar for reduction="mean", [B, Hidx, N] for "none"; float32 (float64 for float64 inputs).

    Raises:
        TypeError, ValueError: SPEC 8, and what `validate_block_indices` raises.
    """
    call = _Call(
        q=q, k=k, lse=lse, index_q=index_q, index_k=index_k, block_indices=block_indices, block_size=block_size,
        scale=scale, index_scale=index_scale, cu_seqlens=cu_seqlens, reduction=reduction,
    )  # fmt: skip
    kl = np.zeros(call.arrays["index_q"].shape[:3], call.arrays["index_q"].dtype)
    for row in np.ndindex(kl.shape):
        tokens, log_teacher, log_student = _log_probabilities(call, *row)
        if len(tokens):
            p_bar = np.exp(log_teacher)
            some = p_bar != 0  # 0 · ln 0 = 0
            kl[row] = p_bar[some] @ (log_teacher[some] - log_student[some])
    return call.give(kl.mean() if reduction == "mean" else kl)


def index_kl_loss_backward(
    q, k, lse, index_q, index_k, block_indices, dkl=1.0, *, block_size=128, scale=None, index_scale=None,
    cu_seqlens=None, reduction="mean",
):  # fmt: skip
    """Gradients of `index_kl_loss`; the teacher (q, k, lse) has none (SPEC 7).

    Args:
        q, k, lse, index_q, index_k, block_indices: as in `index_kl_loss`.
        dkl: the upstream gradient of the loss, a scalar for reduction="mean", [B, Hidx, N] for "none".

    Returns:
        d index_q, d index_k: the shapes and dtype of index_q, index_k.

    Raises:
        TypeError, ValueError: as `index_kl_loss`; ValueError for a dkl of another shape.
    """
    call = _Call(
        q=q, k=k, lse=lse, index_q=index_q, index_k=index_k, block_indices=block_indices, block_size=block_size,
        scale=scale, index_scale=index_scale, cu_seqlens=cu_seqlens, reduction=reduction,
    )  # fmt: skip
    index_q, index_k, problem = call.arrays["index_q"], call.arrays["index_k"], call.problem
    rows = index_q.shape[:3]
    upstream = call.upstream("dkl", dkl, () if reduction == "mean" else rows)
    if reduction == "mean":
        upstream = np.full(rows, upstream / np.prod(rows), index_q.dtype)
    d_index_q, d_index_k = np.zeros_like(index_q), np.zeros_like(index_k)
    for batch, head, query in np.ndindex(rows):
        tokens, log_teacher, log_student = _log_probabilities(call, batch, head, query)
        if len(tokens) == 0:
            continue
        key_head = head // problem.index_group
        ds = upstream[batch, head, query] * (np.exp(log_student) - np.exp(log_teacher))
        d_index_q[batch, head, query] = problem.index_scale * (ds @ index_k[batch, key_head, tokens])
        d_index_k[batch, key_head, tokens] += problem.index_scale * np.outer(ds, index_q[batch, head, query])
    return call.give(d_index_q, problem.dtype), call.give(d_index_k, problem.dtype)


def msa_attention(
    q, k, v, index_q, index_k, *, topk=16, block_size=128, local_blocks=1, init_blocks=0, scale=None, index_scale=None,
    cu_seqlens=None,
) -> MSAOutput:  # fmt: skip
    """Selects blocks, attends to them and measures how well the index branch predicts attention (SPEC 6).

    Args:
        q: [B, H, N, D]. k: [B, Hkv, N, D]. v: [B, Hkv, N, Dv]. index_q: [B, Hidx, N, Di]. index_k: [B, Hik, N, Di].
        topk: blocks kept per query; None for the dense warm-up.

    Raises:
        TypeError, ValueError: SPEC 8.
    """
    result = select_attend_align(
        select_blocks, sparse_attention, index_kl_loss, *map(_to_tensor, (q, k, v, index_q, index_k)), topk=topk,
        block_size=block_size, local_blocks=local_blocks, init_blocks=init_blocks, scale=scale,
        index_scale=index_scale, cu_seqlens=_to_tensor(cu_seqlens),
    )  # fmt: skip
    if isinstance(q, torch.Tensor):
        return result
    return MSAOutput(*(None if value is None else value.numpy() for value in result))


def _log_probabilities(call, batch, head, query):
    """The tokens of I_tok, the teacher's log-probabilities and the student's, for one query of one index head."""
    arrays, problem = call.arrays, call.problem
    tokens = call.selected_tokens(batch, head, query)
    if len(tokens) == 0:
        return tokens, None, None
    keys = arrays["index_k"][batch, head // problem.index_group, tokens]
    index_logit = problem.index_scale * (keys @ arrays["index_q"][batch, head, query])
    log_student = _log_softmax(index_logit)
    log_p = []
    for query_head in range(head * problem.heads_per_index, (head + 1) * problem.heads_per_index):
        keys = arrays["k"][batch, query_head // problem.group, tokens]
        logit = problem.scale * (keys @ arrays["q"][batch, query_head, query])
        log_p.append(_log_softmax(logit))
    return tokens, np.logaddexp.reduce(log_p) - math.log(len(log_p)), log_student


def _log_sum_exp(logit):
    top = logit.max()
    return top + np.log(np.exp(logit - top).sum())


def _log_softmax(logit):
    shifted = logit - logit.max()
    return shifted - np.log(np.exp(shifted).sum())


class _Call:
    """The edge: checks the arguments, holds them as arrays of the accumulator's dtype, gives results back in kind."""

    def __init__(self, *, cu_seqlens=None, block_size=128, **arguments):
        first = next(iter(arguments.values()))
        self.numpy = isinstance(first, np.ndarray)
        cu_seqlens = _to_tensor(cu_seqlens)
        arguments = {name: _to_tensor(value) for name, value in arguments.items()}
        self.problem = describe(cu_seqlens=cu_seqlens, block_size=block_size, **arguments)
        self.geometry = BlockGeometry(self.problem.tokens, block_size, cu_seqlens)
        self.block_start = self.geometry.block_start.tolist()
        self.first_block, self.block_of = self.geometry.first_block.tolist(), self.geometry.block_of.tolist()
        self.block_indices = arguments.pop("block_indices", None)
        if self.block_indices is not None:
            validate_block_indices(self.block_indices, block_size=block_size, cu_seqlens=cu_seqlens)
            self.block_indices = self.block_indices.cpu().numpy()
        tensors = {name: value for name, value in arguments.items() if isinstance(value, torch.Tensor)}
        self.arrays = {name: self._array(tensor) for name, tensor in tensors.items()}

    def _array(self, tensor):
        return tensor.detach().to("cpu", self.problem.accumulator).contiguous().numpy()

    def upstream(self, name, gradient, shape):
        gradient = self._array(torch.as_tensor(_to_tensor(gradient)))
        if gradient.shape != shape:
            raise ValueError(f"{name} must have shape {shape}, got {gradient.shape}")
        return gradient

    def give(self, array, dtype=None):
        """The array as the kind, on the device, and in the dtype (None: its own) that the caller expects."""
        tensor = torch.as_tensor(array).to(self.problem.device, dtype)
        return tensor.numpy() if self.numpy else tensor

    def visible_blocks(self, query):
        return range(self.first_block[query], self.block_of[query] + 1)

    def visible_tokens(self, query, block):
        return range(self.block_start[block], min(self.block_start[block + 1], query + 1))

    def selected_tokens(self, batch, index_head, query):
        """I_tok: the visible tokens of the blocks listed for (index_head, query); all visible ones without a list."""
        visible = self.visible_blocks(query)
        listed = visible if self.block_indices is None else self.block_indices[batch, index_head, query].tolist()
        return [token for block in listed if block in visible for token in self.visible_tokens(query, block)]


def _to_tensor(value):
    # The copy drops negative strides, which PyTorch does not have.
    return torch.from_numpy(value.copy()) if isinstance(value, np.ndarray) else value
