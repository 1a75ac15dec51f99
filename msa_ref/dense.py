"""MSA in PyTorch with N x N masks and autograd: written for checking.

Memory grows with N squared. Runs on any device. The contract is SPEC 1 to 8. `msa_attention` does not compose the
three functions with `msa_ref.compose`, as the other implementations do: attention and the teacher of the loss need the
same mask and the same softmax, which are the bulk of the work here and are computed once for both.
"""

import itertools
import math

import torch

from msa_ref.autograd import OnlyOnce
from msa_ref.compose import MSAOutput
from msa_ref.problem import BlockGeometry, check_ids_on_cpu, describe
from msa_ref.selection import best_blocks, listed_blocks


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
    limits = torch.finfo(score.dtype)
    # Ranks: NaN below every number, and above what is not visible.
    score.nan_to_num_(limits.min, limits.max, limits.min / 2)
    score.masked_fill_(~_visible_tokens(geometry, problem.device), -math.inf)
    parts = score.split(geometry.block_start.diff().tolist(), dim=-1)
    block_score = torch.stack([part.amax(-1) for part in parts], -1)  # [B, Hidx, N, NB]
    return best_blocks(block_score, geometry, topk, local_blocks, init_blocks)


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
    check_ids_on_cpu(block_indices, block_size, cu_seqlens)
    mask = _Mask(problem, block_indices, cu_seqlens)

    def attend(q, k, v):
        p, lse = mask.softmax(q, k, problem.scale)
        return _mix(p, v).to(problem.dtype), lse

    return _FirstOrder.apply(attend, q, k, v)


def index_kl_loss(
    q, k, lse, index_q, index_k, block_indices, *, block_size=128, scale=None, index_scale=None, cu_seqlens=None,
    reduction="mean",
):  # fmt: skip
    """KL divergence of the index branch (student) from its query heads' mean attention (teacher), in nats (SPEC 5).

    Args:
        q: [B, H, N, D]. k: [B, Hkv, N, D].
        lse: [B, H, N], from `sparse_attention` with the same block_indices; its values are not read here, as the
            softmax of q and k is computed again.
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
    check_ids_on_cpu(block_indices, block_size, cu_seqlens)
    mask = _Mask(problem, block_indices, cu_seqlens)
    with torch.no_grad(), _no_autocast(problem.device):
        p_bar = _teacher(problem, mask.softmax(q, k, problem.scale)[0])

    def divergence(index_q, index_k):
        kl = mask.divergence(p_bar, index_q, index_k, problem.index_scale)
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
    problem = describe(
        q=q, k=k, v=v, index_q=index_q, index_k=index_k, topk=topk, block_size=block_size, local_blocks=local_blocks,
        init_blocks=init_blocks, scale=scale, index_scale=index_scale, cu_seqlens=cu_seqlens,
    )  # fmt: skip
    block_indices = None
    if topk is not None:
        block_indices = select_blocks(
            index_q, index_k, topk=topk, block_size=block_size, local_blocks=local_blocks, init_blocks=init_blocks,
            cu_seqlens=cu_seqlens,
        )  # fmt: skip
    mask = _Mask(problem, block_indices, cu_seqlens)

    def attend(q, k, v):
        p, lse = mask.softmax(q, k, problem.scale)
        return _mix(p, v).to(problem.dtype), lse, _teacher(problem, p.detach())

    out, lse, p_bar = _FirstOrder.apply(attend, q, k, v)

    def align(index_q, index_k):
        return (mask.divergence(p_bar, index_q, index_k, problem.index_scale).mean(),)

    (kl_loss,) = _FirstOrder.apply(align, index_q, index_k)
    return MSAOutput(out, kl_loss, block_indices, lse)


class _Mask:
    """I_tok of every query and index head as an N x N mask, and what is computed under it."""

    def __init__(self, problem, block_indices, cu_seqlens):
        selected = _selected_tokens(problem, block_indices, cu_seqlens)  # [B, Hidx, N, N]
        self.accumulator, self.hidden = problem.accumulator, ~selected
        self.empty = ~selected.any(-1, keepdim=True)
        # A row that selects nothing keeps its logits, so that no NaN arises; its results are overwritten.
        self.masked = self.hidden & ~self.empty

    def softmax(self, q, k, scale):
        """p [B, H, N, N], 0 outside the selection, and lse [B, H, N]."""
        logit = self._logits(q, k, scale)
        p = torch.softmax(logit, -1)
        # The largest probability of a row is exp(largest logit - lse).
        lse = logit.detach().amax(-1) - p.detach().amax(-1).log()
        if self.empty.any():
            empty = self.empty.repeat_interleave(q.shape[1] // self.empty.shape[1], dim=1)
            p, lse = p.masked_fill(empty, 0), lse.masked_fill(empty[..., 0], -math.inf)
        return p, lse

    def divergence(self, p_bar, index_q, index_k, index_scale):
        """KL [B, Hidx, N] from the teacher p_bar [B, Hidx, N, N] to the index branch."""
        log_student = torch.log_softmax(self._logits(index_q, index_k, index_scale), -1).masked_fill(self.hidden, 0)
        return torch.nn.functional.kl_div(log_student, p_bar, reduction="none").sum(-1)  # 0 · ln 0 = 0

    def _logits(self, left, right, scale):
        logit = _products(left.to(self.accumulator) * scale, right, self.accumulator)
        logit = logit.unflatten(1, (self.hidden.shape[1], -1))
        return torch.where(self.masked[:, :, None], -math.inf, logit).flatten(1, 2)


def _teacher(problem, p):
    return p.unflatten(1, (problem.index_heads, problem.heads_per_index)).mean(2)


def _mix(p, v):
    """[B, H, N, Dv]: the rows of v weighted by p [B, H, N, N]; adjacent heads of p share a head of v."""
    return _grouped(p, v.to(p.dtype))


def _products(left, right, dtype):
    """[B, heads, N, N]: every row of left with every row of right; adjacent heads of left share a head of right."""
    return _grouped(left.to(dtype), right.to(dtype).transpose(-1, -2))


def _grouped(left, right):
    """left [B, heads, N, n] times right [B, shared heads, n, m], without copies of right."""
    rows = left.unflatten(1, (right.shape[1], -1)).flatten(2, 3)
    return (rows @ right).unflatten(2, (-1, left.shape[2])).flatten(1, 2)


def _visible_tokens(geometry, device):
    """[N, N]: token j (column) is visible to query i (row)."""
    document = geometry.first_block.to(device)
    token = torch.arange(geometry.tokens, device=device)
    return (token <= token[:, None]) & (document == document[:, None])


def _selected_tokens(problem, block_indices, cu_seqlens):
    """[B, Hidx, N, N]: I_tok as a mask."""
    geometry = BlockGeometry(problem.tokens, problem.block_size, cu_seqlens)
    visible = _visible_tokens(geometry, problem.device)
    if block_indices is None:
        return visible.expand(problem.batch, problem.index_heads, -1, -1)
    listed = listed_blocks(block_indices, geometry.blocks)
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
        ctx.save_for_backward(*tensors)
        results = tuple(output.detach() for output in ctx.outputs)
        constant = (not output.requires_grad for output in ctx.outputs)
        ctx.mark_non_differentiable(*itertools.compress(results, constant))
        return results

    @staticmethod
    def backward(ctx, *gradients):
        def differentiate(*_):
            pairs = zip(ctx.outputs, gradients, strict=True)
            used = [(output, gradient) for output, gradient in pairs if gradient is not None]
            wanted = [tensor for tensor in ctx.inputs if tensor.requires_grad]
            if not used or not wanted:
                return (None,) * len(ctx.inputs)
            outputs, upstream = zip(*used, strict=True)
            with _no_autocast(ctx.inputs[0].device):
                found = iter(torch.autograd.grad(outputs, wanted, upstream, retain_graph=True, allow_unused=True))
            return tuple(next(found) if tensor.requires_grad else None for tensor in ctx.inputs)

        # `differentiate` does not read the inputs: they are passed so that autograd sees the result depend on them, and
        # differentiating it raises instead of giving zero.
        return None, *OnlyOnce.apply(differentiate, *gradients, *ctx.saved_tensors)
