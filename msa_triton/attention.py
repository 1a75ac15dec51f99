"""The public operations: checked arguments, choice of the implementation, autograd, `torch.compile`.

Each operation and each backward pass is one PyTorch operator (`torch.ops.msa.*`). An operator is opaque to
`torch.compile`, which needs only the shapes that the `register_fake` functions give. The implementation behind them is
a module with five functions, `msa_ref.blockwise` or `msa_triton.kernels`; forward and backward take the same one.
"""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

from msa_ref.autograd import refuse_second_derivative
from msa_ref.compose import MSAOutput, select_attend_align
from msa_ref.problem import BlockGeometry, accumulator_of, check_ids_on_cpu, describe
from msa_triton.backend import choose, module_of

SCHEDULES = ("auto", "query", "key")


def select_blocks(
    index_q: Tensor, index_k: Tensor, *, topk: int, block_size: int = 128, local_blocks: int = 1, init_blocks: int = 0,
    cu_seqlens=None, backend: str = "auto",
) -> Tensor:  # fmt: skip
    """Chooses for every query and index head the topk key blocks to attend to (SPEC 3); not differentiable.

    Args:
        index_q: [B, Hidx, N, Di] and index_k: [B, Hik, N, Di], float16, bfloat16, float32 or float64.
        topk: blocks kept per query, the forced ones included; may exceed the number of blocks.
        block_size: tokens in a block.
        local_blocks: newest visible blocks that are always kept; init_blocks: first blocks of the document likewise.
        cu_seqlens: None, or document offsets 0 = c0 <= c1 <= ... = N (B = 1), a list of ints or an int tensor.
        backend: "triton" is the kernels, which take no float64, and block sizes 16, 32, 64 and 128; CPU tensors go
            through Triton's interpreter, which is for study and tests. "torch" is blockwise PyTorch. "auto" is "triton"
            for tensors on a GPU where Triton is installed, "torch" for others.

    Returns:
        int32 [B, Hidx, N, topk]: ids in ascending order, then -1.

    Raises:
        TypeError, ValueError: bad arguments (SPEC 8). RuntimeError: backend "triton" without Triton.
    """
    backend = choose(backend, index_q)
    problem = describe(
        index_q=index_q, index_k=index_k, topk=topk, block_size=block_size, local_blocks=local_blocks,
        init_blocks=init_blocks, cu_seqlens=cu_seqlens, kernel=backend == "triton",
    )  # fmt: skip
    _check_backend(backend, problem.device)
    return _select_op(
        index_q.detach(), index_k.detach(), _offsets(cu_seqlens), topk, block_size, local_blocks, init_blocks, backend
    )


def sparse_attention(
    q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor | None, *, block_size: int = 128,
    scale: float | None = None, cu_seqlens=None, backend: str = "auto", schedule: str = "auto",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Causal softmax attention over the visible tokens of the listed blocks (SPEC 4).

    On CPU tensors the values of block_indices are checked. On a GPU they are not, because the check would wait for the
    device (nor while `torch.compile` traces); there, call `validate_block_indices` when in doubt: an id listed twice
    counts once or twice, and gradients need not match the output.

    Inputs must be finite: 0 * inf spoils rows that do not see the token. In float16 the kernels round dS to float16, so
    that gradients beyond its range need a smaller loss scale, or bfloat16.

    Args:
        q: [B, H, N, D], k: [B, Hkv, N, D], v: [B, Hkv, N, Dv], one floating-point dtype, any strides.
        block_indices: [B, Hidx, N, slots] int32 or int64, distinct ids in any order, -1 for an unused slot; None means
            all visible blocks: dense attention.
        scale: factor on the logits, default D**-0.5. Other arguments as in `select_blocks`.
        schedule: of the kernels' forward pass, for study: "query" walks the blocks of a tile of queries, "key" the
            queries of a key block (not for block_indices None); "auto" chooses by the sizes.

    Returns:
        out [B, H, N, Dv] in the dtype of q, differentiable once in q, k and v; lse [B, H, N] float32 (float64 for
        float64 inputs), natural logarithm, not differentiable. A row with nothing visible has out 0 and lse -inf.

    Raises:
        TypeError, ValueError: bad arguments (SPEC 8).
        RuntimeError: backend "triton" without Triton; a second derivative is asked for.
    """
    return _sparse_attention(
        q, k, v, block_indices, block_size=block_size, scale=scale, cu_seqlens=cu_seqlens, backend=backend,
        schedule=schedule, check=True,
    )  # fmt: skip


def index_kl_loss(
    q: Tensor, k: Tensor, lse: Tensor, index_q: Tensor, index_k: Tensor, block_indices: Tensor | None, *,
    block_size: int = 128, scale: float | None = None, index_scale: float | None = None, cu_seqlens=None,
    reduction: str = "mean", backend: str = "auto",
) -> Tensor:  # fmt: skip
    """KL(teacher || student): mean attention of an index head's query heads, against the index branch (SPEC 5).

    The teacher (q, k, lse) is taken as a constant: only index_q and index_k get gradients. The values of block_indices
    are checked where `sparse_attention` checks them.

    Args:
        q: [B, H, N, D], k: [B, Hkv, N, D], lse: [B, H, N] from `sparse_attention` with the same ids and scale.
        index_q: [B, Hidx, N, Di], index_k: [B, Hik, N, Di].
        block_indices: [B, Hidx, N, slots] int32 or int64; None means all visible blocks: the dense warm-up.
        index_scale: factor on the student's logits, default Di**-0.5.
        reduction: "mean" over B, Hidx and N, or "none". Other arguments as in `sparse_attention`.

    Returns:
        The loss in nats, float32 (float64 for float64 inputs): a scalar, or [B, Hidx, N]. A row with nothing visible
        counts as 0.

    Raises:
        TypeError, ValueError: bad arguments (SPEC 8).
        RuntimeError: backend "triton" without Triton; a second derivative is asked for.
    """
    return _index_kl_loss(
        q, k, lse, index_q, index_k, block_indices, block_size=block_size, scale=scale, index_scale=index_scale,
        cu_seqlens=cu_seqlens, reduction=reduction, backend=backend, check=True,
    )  # fmt: skip


def msa_attention(
    q: Tensor, k: Tensor, v: Tensor, index_q: Tensor, index_k: Tensor, *, topk: int | None = 16, block_size: int = 128,
    local_blocks: int = 1, init_blocks: int = 0, scale: float | None = None, index_scale: float | None = None,
    cu_seqlens=None, backend: str = "auto",
) -> MSAOutput:  # fmt: skip
    """MiniMax Sparse Attention: selects blocks, attends to them, and aligns the index branch (SPEC 6; P Alg. 1).

    The selection itself passes no gradient: out is differentiable in q, k and v, and kl_loss alone trains index_q and
    index_k. Minimise L_LM + lambda * (sum over layers of kl_loss). The KL is always computed; for evaluation without it
    call `select_blocks` and `sparse_attention`. Nothing is cast under autocast. Inputs must be finite.

    Args:
        q: [B, H, N, D], k: [B, Hkv, N, D], v: [B, Hkv, N, Dv], index_q: [B, Hidx, N, Di], index_k: [B, Hik, N, Di], one
            floating-point dtype, any strides.
        topk: blocks per query; None is the dense warm-up, with the KL over the full causal prefix. Other arguments as
            in the three operations.

    Returns:
        MSAOutput(out, kl_loss, block_indices, lse); block_indices is None in the warm-up.

    Raises:
        TypeError, ValueError: bad arguments (SPEC 8).
        RuntimeError: backend "triton" without Triton; a second derivative is asked for.
    """
    backend = choose(backend, q)
    return select_attend_align(
        partial(select_blocks, backend=backend),
        partial(_sparse_attention, backend=backend, schedule="auto", check=False),
        partial(_index_kl_loss, reduction="mean", backend=backend, check=False),
        q, k, v, index_q, index_k, topk=topk, block_size=block_size, local_blocks=local_blocks,
        init_blocks=init_blocks, scale=scale, index_scale=index_scale, cu_seqlens=cu_seqlens,
    )  # fmt: skip


def _sparse_attention(q, k, v, block_indices, *, block_size, scale, cu_seqlens, backend, schedule, check):
    backend = choose(backend, q)
    problem = describe(
        q=q, k=k, v=v, block_indices=block_indices, block_size=block_size, scale=scale, cu_seqlens=cu_seqlens,
        kernel=backend == "triton",
    )  # fmt: skip
    _check_backend(backend, problem.device, scale=problem.scale)
    _check_schedule(schedule, backend, block_indices)
    _check_ids(check, block_indices, block_size, cu_seqlens)
    _refuse_tangents(q, k, v)
    return _attention_op(q, k, v, block_indices, _offsets(cu_seqlens), block_size, problem.scale, backend, schedule)


def _index_kl_loss(
    q, k, lse, index_q, index_k, block_indices, *, block_size, scale, index_scale, cu_seqlens, reduction, backend, check
):
    backend = choose(backend, q)
    problem = describe(
        q=q, k=k, lse=lse, index_q=index_q, index_k=index_k, block_indices=block_indices, block_size=block_size,
        scale=scale, index_scale=index_scale, cu_seqlens=cu_seqlens, reduction=reduction, kernel=backend == "triton",
    )  # fmt: skip
    _check_backend(backend, problem.device, scale=problem.scale, index_scale=problem.index_scale)
    _check_ids(check, block_indices, block_size, cu_seqlens)
    _refuse_tangents(index_q, index_k)
    gradients = torch.is_grad_enabled() and (index_q.requires_grad or index_k.requires_grad)
    kl, *_ = _index_loss_op(
        q.detach(), k.detach(), lse.detach(), index_q, index_k, block_indices, _offsets(cu_seqlens), block_size,
        problem.scale, problem.index_scale, backend, gradients,
    )  # fmt: skip
    return kl.mean() if reduction == "mean" else kl


def _check_schedule(schedule: str, backend: str, block_indices: Tensor | None) -> None:
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule must be one of {SCHEDULES}, got {schedule!r}")
    if schedule != "auto" and backend != "triton":
        raise ValueError(f'schedule={schedule!r} is for the kernels (backend="triton"), got backend {backend!r}')
    if schedule == "key" and block_indices is None:
        raise ValueError('schedule="key" needs block_indices: partial results of dense attention grow with N squared')


def _check_backend(backend: str, device: torch.device, **scales: float) -> None:
    """Refuses what a backend cannot run here; a call that `torch.compile` traces is refused when it runs."""
    if torch.compiler.is_compiling():
        return
    module_of(backend, device)
    for name, scale in scales.items():
        if backend == "triton" and not 1e-30 <= scale <= 1e30:
            raise ValueError(f"{name} must be from 1e-30 to 1e30 for the Triton kernels, got {scale}")


def _check_upstream(name: str, gradient: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if gradient.shape != shape or gradient.dtype != dtype:
        raise ValueError(f"{name} must be {dtype} {tuple(shape)}, got {gradient.dtype} {tuple(gradient.shape)}")


def _check_ids(check: bool, block_indices: Tensor | None, block_size: int, cu_seqlens) -> None:
    if check and not torch.compiler.is_compiling():
        check_ids_on_cpu(block_indices, block_size, cu_seqlens)


def _refuse_tangents(*tensors: Tensor) -> None:
    """Forward-mode derivatives would silently be 0: PyTorch's custom operators have backward formulas only."""
    if not torch.compiler.is_compiling() and any(unpack_dual(tensor).tangent is not None for tensor in tensors):
        raise RuntimeError("MSA has no forward-mode derivative; use backward()")


def _offsets(cu_seqlens) -> Tensor | None:
    if cu_seqlens is None or isinstance(cu_seqlens, Tensor):
        return cu_seqlens
    return torch.tensor(cu_seqlens, dtype=torch.int64)


@contextmanager
def _call(backend: str, cu_seqlens: Tensor | None, **arguments):
    """Yields the implementation, the problem and the geometry of one operator call, with autocast off."""
    problem = describe(cu_seqlens=cu_seqlens, kernel=backend == "triton", **arguments)
    geometry = BlockGeometry(problem.tokens, problem.block_size, cu_seqlens)
    with torch.autocast(problem.device.type, enabled=False):
        yield module_of(backend, problem.device), problem, geometry


@torch.library.custom_op("msa::select_blocks", mutates_args=())
def _select_op(
    index_q: Tensor, index_k: Tensor, cu_seqlens: Tensor | None, topk: int, block_size: int, local_blocks: int,
    init_blocks: int, backend: str,
) -> Tensor:  # fmt: skip
    options = dict(topk=topk, block_size=block_size, local_blocks=local_blocks, init_blocks=init_blocks)
    with _call(backend, cu_seqlens, index_q=index_q, index_k=index_k, **options) as (module, problem, geometry):
        return module.select_forward(index_q, index_k, problem, geometry)


@_select_op.register_fake
def _(index_q, index_k, cu_seqlens, topk, block_size, local_blocks, init_blocks, backend):
    return index_q.new_empty((*index_q.shape[:3], topk), dtype=torch.int32)


def _empty_heads(q: Tensor, width: int, backend: str) -> Tensor:
    """[B, H, N, width] with the strides that the implementation gives it."""
    batch, heads, tokens = q.shape[:3]
    if backend == "torch":
        return q.new_empty(batch, tokens, heads, width).transpose(1, 2)
    return q.new_empty(batch, heads, tokens, width)


@torch.library.custom_op("msa::sparse_attention", mutates_args=())
def _attention_op(
    q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor | None, cu_seqlens: Tensor | None, block_size: int,
    scale: float, backend: str, schedule: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    options = dict(block_indices=block_indices, block_size=block_size, scale=scale)
    with _call(backend, cu_seqlens, q=q, k=k, v=v, **options) as (module, problem, geometry):
        _check_schedule(schedule, backend, block_indices)
        chosen = {"schedule": schedule} if backend == "triton" else {}
        return module.attention_forward(q, k, v, block_indices, problem, geometry, **chosen)


@_attention_op.register_fake
def _(q, k, v, block_indices, cu_seqlens, block_size, scale, backend, schedule):
    out = _empty_heads(q, v.shape[3], backend)
    return out, q.new_empty(q.shape[:3], dtype=accumulator_of(q.dtype))


@torch.library.custom_op("msa::sparse_attention_backward", mutates_args=())
def _attention_backward_op(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, block_indices: Tensor | None,
    cu_seqlens: Tensor | None, block_size: int, scale: float, backend: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    options = dict(block_indices=block_indices, block_size=block_size, scale=scale)
    with _call(backend, cu_seqlens, q=q, k=k, v=v, lse=lse, **options) as (module, problem, geometry):
        _check_upstream("dout", dout, (*q.shape[:3], v.shape[3]), q.dtype)
        return module.attention_backward(dout, q, k, v, out, lse, block_indices, problem, geometry)


@_attention_backward_op.register_fake
def _(dout, q, k, v, out, lse, block_indices, cu_seqlens, block_size, scale, backend):
    dq = _empty_heads(q, q.shape[3], backend)
    return dq, k.new_empty(k.shape), v.new_empty(v.shape)


@torch.library.custom_op("msa::index_kl_loss", mutates_args=())
def _index_loss_op(
    q: Tensor, k: Tensor, lse: Tensor, index_q: Tensor, index_k: Tensor, block_indices: Tensor | None,
    cu_seqlens: Tensor | None, block_size: int, scale: float, index_scale: float, backend: str, gradients: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """KL [B, Hidx, N], and what a backward pass takes from the forward pass; empty tensors without `gradients`."""
    options = dict(block_indices=block_indices, block_size=block_size, scale=scale, index_scale=index_scale)
    with _call(backend, cu_seqlens, q=q, k=k, lse=lse, index_q=index_q, index_k=index_k, **options) as call:
        module, problem, geometry = call
        return module.index_loss_forward(q, k, lse, index_q, index_k, block_indices, problem, geometry, gradients)


@_index_loss_op.register_fake
def _(q, k, lse, index_q, index_k, block_indices, cu_seqlens, block_size, scale, index_scale, backend, gradients):
    kl = index_q.new_empty(index_q.shape[:3], dtype=accumulator_of(index_q.dtype))
    if not gradients:
        return kl, kl.new_empty(0), kl.new_empty(0)
    if backend == "triton":
        return kl, index_q.new_empty(index_q.shape), kl.new_empty((2, *kl.shape))
    return kl, kl.new_empty(index_q.shape), kl.new_empty(index_k.shape)


@torch.library.custom_op("msa::index_kl_loss_backward", mutates_args=())
def _index_loss_backward_op(
    dkl: Tensor, saved_q: Tensor, saved_k: Tensor, q: Tensor, k: Tensor, lse: Tensor, index_q: Tensor, index_k: Tensor,
    block_indices: Tensor | None, cu_seqlens: Tensor | None, block_size: int, scale: float, index_scale: float,
    backend: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    options = dict(block_indices=block_indices, block_size=block_size, scale=scale, index_scale=index_scale)
    with _call(backend, cu_seqlens, q=q, k=k, lse=lse, index_q=index_q, index_k=index_k, **options) as call:
        module, problem, geometry = call
        _check_upstream("dkl", dkl, index_q.shape[:3], problem.accumulator)
        saved = saved_q, saved_k
        return module.index_loss_backward(dkl, saved, q, k, lse, index_q, index_k, block_indices, problem, geometry)


@_index_loss_backward_op.register_fake
def _(
    dkl, saved_q, saved_k, q, k, lse, index_q, index_k, block_indices, cu_seqlens, block_size, scale, index_scale,
    backend,
):  # fmt: skip
    return index_q.new_empty(index_q.shape), index_k.new_empty(index_k.shape)


def _save_attention(ctx, inputs, output):
    q, k, v, block_indices, cu_seqlens, *ctx.options, _ = inputs
    out, lse = output
    ctx.save_for_backward(q, k, v, out, lse, block_indices, cu_seqlens)
    ctx.mark_non_differentiable(lse)
    ctx.set_materialize_grads(False)


def _attention_gradients(ctx, dout, _):
    gradients = (None,) * 3
    if dout is not None:
        gradients = _attention_backward_op(dout, *ctx.saved_tensors, *ctx.options)
    return *gradients, *(None,) * 6


def _save_index_loss(ctx, inputs, output):
    ctx.save_for_backward(*output[1:], *inputs[:7])
    ctx.options = inputs[7:-1]
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _index_loss_gradients(ctx, dkl, *_):
    gradients = (None,) * 2
    if dkl is not None:
        gradients = _index_loss_backward_op(dkl, *ctx.saved_tensors, *ctx.options)
    return *(None,) * 3, *gradients, *(None,) * 7


_attention_op.register_autograd(_attention_gradients, setup_context=_save_attention)
_index_loss_op.register_autograd(_index_loss_gradients, setup_context=_save_index_loss)
_attention_backward_op.register_autograd(refuse_second_derivative)
_index_loss_backward_op.register_autograd(refuse_second_derivative)
