"""One training step of attention, MSA and dense, timed phase by phase.

The phases of MSA: select (`select_blocks`), attend (`sparse_attention`), align (`index_kl_loss`), and backward, which
is one backward pass from a random upstream gradient of out and 1 for the KL loss.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from msa_ref.problem import KERNEL_BLOCK_SIZES, check_integer, check_multiple, check_selection
from msa_triton import index_kl_loss, select_blocks, sparse_attention
from msa_triton.benchmark.timing import Laps

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Shape:
    """Sizes of one call with B = 1 and Dv = D (SPEC 1); dtype is the name of one of `DTYPES`.

    Raises:
        TypeError, ValueError: sizes that do not go together (SPEC 8).
    """

    tokens: int
    heads: int = 16
    kv_heads: int = 1
    index_heads: int = 1
    index_key_heads: int = 1
    width: int = 64
    index_width: int = 64
    block_size: int = 128
    topk: int = 16
    dtype: str = "float32"

    def __post_init__(self):
        for name in ("tokens", "heads", "kv_heads", "index_heads", "index_key_heads", "width", "index_width"):
            check_integer(name, getattr(self, name), 1)
        check_multiple("q", "H", self.heads, "k", "Hkv", self.kv_heads)
        check_multiple("q", "H", self.heads, "index_q", "Hidx", self.index_heads)
        check_multiple("index_q", "Hidx", self.index_heads, "k", "Hkv", self.kv_heads)
        check_multiple("index_q", "Hidx", self.index_heads, "index_k", "Hik", self.index_key_heads)
        check_selection(self.topk, 1, 0)
        if self.block_size not in KERNEL_BLOCK_SIZES:
            raise ValueError(f"block_size must be one of {KERNEL_BLOCK_SIZES}, got {self.block_size}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {DTYPES}, got {self.dtype!r}")

    @property
    def share(self) -> int:
        """Query heads with one selection."""
        return self.heads // self.index_heads


class Inputs(NamedTuple):
    """q, dout: [1, H, N, D]. k, v: [1, Hkv, N, D]. index_q: [1, Hidx, N, Di]. index_k: [1, Hik, N, Di].

    All are transposed views of [1, N, heads, width], which is what a projection gives.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    index_q: Tensor
    index_k: Tensor
    dout: Tensor


class Step(NamedTuple):
    """What one step computed: block_indices as `select_blocks`, None for dense attention; gradients of the inputs."""

    out: Tensor
    lse: Tensor
    kl: Tensor
    block_indices: Tensor | None
    dq: Tensor
    dk: Tensor
    dv: Tensor
    d_index_q: Tensor
    d_index_k: Tensor
    milliseconds: dict[str, float]


def normal_inputs(shape: Shape, seed: int, device: torch.device | str = "cpu") -> Inputs:
    """Standard normal inputs: the index is then random too, so that neighbouring queries share few blocks."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(heads: int, width: int) -> Tensor:
        size = (1, shape.tokens, heads, width)
        dtype = getattr(torch, shape.dtype)
        return torch.randn(size, generator=generator, dtype=dtype, device=device).transpose(1, 2)

    return Inputs(
        q=normal(shape.heads, shape.width), k=normal(shape.kv_heads, shape.width),
        v=normal(shape.kv_heads, shape.width), index_q=normal(shape.index_heads, shape.index_width),
        index_k=normal(shape.index_key_heads, shape.index_width), dout=normal(shape.heads, shape.width),
    )  # fmt: skip


def msa_step(inputs: Inputs, shape: Shape, *, warm_up: bool = False, backend: str = "auto", phase=None) -> Step:
    """Forward and backward of MSA.

    Args:
        warm_up: dense attention and the KL over the full causal prefix, nothing selected (topk=None).
        phase: called with the name of each phase when it begins.

    Returns:
        `Step`; milliseconds has select (not in the warm-up), attend, align, forward (the sum of these), backward and
        total.
    """
    begin = phase or (lambda name: None)
    options = dict(block_size=shape.block_size, backend=backend)
    *leaves, dout = inputs
    q, k, v, index_q, index_k = leaves = [tensor.detach().requires_grad_() for tensor in leaves]
    laps = Laps(q.device)
    ids = None
    if not warm_up:
        begin("select")
        ids = select_blocks(index_q, index_k, topk=shape.topk, **options)
        laps.mark("select")
    begin("attend")
    out, lse = sparse_attention(q, k, v, ids, **options)
    laps.mark("attend")
    begin("align")
    kl = index_kl_loss(q, k, lse, index_q, index_k, ids, **options)
    laps.mark("align")
    begin("backward")
    # Not backward(): that would copy each gradient into .grad wherever its layout is not that of the input.
    gradients = torch.autograd.grad([out, kl], leaves, [dout, torch.ones_like(kl)])
    laps.mark("backward")
    return Step(out.detach(), lse, kl.detach(), ids, *gradients, _with_sums(laps.milliseconds()))


def load_everything(shape: Shape, backend: str = "auto") -> None:
    """Runs a step of a few tokens: what PyTorch loads when it is first needed belongs to no measurement."""
    short = replace(shape, tokens=min(shape.tokens, 2 * shape.block_size))
    msa_step(normal_inputs(short, seed=0), short, backend=backend)


def dense_step(inputs: Inputs) -> dict[str, float]:
    """Milliseconds of dense causal attention by PyTorch's SDPA: forward, backward and total.

    On a CPU the KV heads are expanded first, which is faster there than SDPA's own grouped heads (enable_gqa), and q
    and dout are best head-major. The caller makes these copies with `head_major`, outside the timing.
    """
    q, k, v = leaves = [tensor.detach().requires_grad_() for tensor in inputs[:3]]
    laps = Laps(q.device)
    if q.device.type == "cpu":
        k, v = (tensor[:, :, None].expand(-1, -1, q.shape[1] // k.shape[1], -1, -1).flatten(1, 2) for tensor in (k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    laps.mark("forward")
    torch.autograd.grad(out, leaves, inputs.dout)
    laps.mark("backward")
    milliseconds = laps.milliseconds()
    return {**milliseconds, "total": sum(milliseconds.values())}


def head_major(inputs: Inputs) -> Inputs:
    """Copies with contiguous heads."""
    return Inputs(*(tensor.contiguous() for tensor in inputs))


def _with_sums(phases: dict[str, float]) -> dict[str, float]:
    backward = phases.pop("backward")
    forward = sum(phases.values())
    return {**phases, "forward": forward, "backward": backward, "total": forward + backward}
