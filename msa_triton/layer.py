"""An attention layer with an index branch: projections, per-head norm, RoPE, and the three phases of training."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from msa_ref import dense
from msa_ref.problem import BlockGeometry, check_cu_seqlens, check_integer, describe
from msa_triton import attention
from msa_triton.backend import BACKENDS

MODES = ("dense", "warm-up", "sparse")


class MSAttention(nn.Module):
    """Causal grouped-query attention that learns which key blocks to read (P 3).

    The index branch reads the detached hidden state (P eq. 11), so that the KL loss trains the index branch alone and
    the language-model loss everything else.

    Args:
        hidden_size: width of the hidden state.
        heads, kv_heads: query and KV heads, H and Hkv. head_width, value_width: D (default hidden_size // heads) and Dv
            (default D).
        index_heads, index_key_heads, index_width: Hidx (default Hkv), Hik, Di (default D).
        block_size, topk, local_blocks, init_blocks, scale, index_scale: as in `msa_attention`.
        qk_norm: RMS norm of every head of q, k, index_q and index_k, with one weight per channel.
        rotary_width: leading channels of a head that RoPE turns, in both branches; None for all, 0 for none.
        rope_theta: base of the RoPE wavelengths.
        bias: whether the projections have a bias.
        backend: "auto", "triton" or "torch" as in `msa_attention`, or "dense": the N x N masks of `msa_ref.dense`,
            which are faster than blocks on a CPU at a few hundred tokens. Mode "dense" uses PyTorch's attention with
            any backend.

    Raises:
        TypeError, ValueError: sizes or options that no call could have (SPEC 8).
    """

    def __init__(
        self, hidden_size: int, *, heads: int, kv_heads: int, head_width: int | None = None,
        value_width: int | None = None, index_heads: int | None = None, index_key_heads: int = 1,
        index_width: int | None = None, block_size: int = 128, topk: int = 16, local_blocks: int = 1,
        init_blocks: int = 0, scale: float | None = None, index_scale: float | None = None, qk_norm: bool = True,
        rotary_width: int | None = None, rope_theta: float = 10000.0, bias: bool = False, backend: str = "auto",
    ):  # fmt: skip
        super().__init__()
        for name, count in (("hidden_size", hidden_size), ("heads", heads), ("kv_heads", kv_heads)):
            check_integer(name, count, 1)
        head_width = hidden_size // heads if head_width is None else head_width
        value_width = head_width if value_width is None else value_width
        index_heads = kv_heads if index_heads is None else index_heads
        index_width = head_width if index_width is None else index_width
        self.sizes = {
            "q": (heads, head_width), "k": (kv_heads, head_width), "v": (kv_heads, value_width),
            "index_q": (index_heads, index_width), "index_k": (index_key_heads, index_width),
        }  # fmt: skip
        self.blocks = dict(topk=topk, block_size=block_size, local_blocks=local_blocks, init_blocks=init_blocks)
        self.scale, self.index_scale = scale, index_scale
        self.rotary_width, self.rope_theta, self.backend = rotary_width, rope_theta, backend
        self._check()
        for name, (count, width) in self.sizes.items():
            self.add_module(name, nn.Linear(hidden_size, count * width, bias=bias))
            if name != "v":
                self.add_module(f"{name}_norm", nn.RMSNorm(width, eps=1e-6) if qk_norm else nn.Identity())
        self.output = nn.Linear(heads * value_width, hidden_size, bias=bias)

    def forward(
        self, hidden: Tensor, *, mode: str = "sparse", cu_seqlens=None, select: Callable | None = None
    ) -> tuple[Tensor, Tensor]:
        """Attends, and measures how far the index branch is from the attention.

        Args:
            hidden: [B, N, hidden_size]. Under `torch.autocast` the branches are cast to the dtype of v.
            mode: "dense": plain causal attention, the index branch does not run; "warm-up": the same attention, with
                the KL over the full prefix; "sparse": attention and KL over the selected blocks.
            cu_seqlens: as in `msa_attention`; RoPE positions restart with each document.
            select: in mode "sparse", takes the arguments of `select_blocks` in its place, to try another selection.

        Returns:
            (output [B, N, hidden_size], kl_loss: a scalar in nats, 0 in mode "dense").

        Raises:
            ValueError: an unknown mode; a hidden state of another width; bad cu_seqlens.
        """
        if mode not in MODES:
            raise ValueError(f"mode must be one of {MODES}, got {mode!r}")
        if hidden.ndim != 3 or hidden.shape[2] != self.q.in_features:
            expected = f"[B, N, {self.q.in_features}]"
            raise ValueError(f"hidden must have shape {expected}, got {tuple(hidden.shape)}")
        document, position = _places(hidden, cu_seqlens)
        q, k, v = self._heads(("q", "k", "v"), hidden, position)
        if mode == "dense":
            out, kl_loss = self._plain(q, k, v, document), hidden.new_zeros((), dtype=torch.float32)
        else:
            index = self._heads(("index_q", "index_k"), hidden.detach(), position, v.dtype)
            out, kl_loss = self._attend(q, k, v, *index, mode, document, cu_seqlens, select)
        return self.output(out.transpose(1, 2).flatten(2)), kl_loss

    def project(self, hidden: Tensor, *, cu_seqlens=None) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """(q, k, v, index_q, index_k) as `forward` gives them to `msa_attention`, each [B, heads, N, width]."""
        _, position = _places(hidden, cu_seqlens)
        q, k, v = self._heads(("q", "k", "v"), hidden, position)
        return q, k, v, *self._heads(("index_q", "index_k"), hidden.detach(), position, v.dtype)

    def index_parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of the index branch, which only the KL loss trains."""
        for name in ("index_q", "index_k", "index_q_norm", "index_k_norm"):
            yield from getattr(self, name).parameters()

    def _check(self) -> None:
        probe = {name: torch.empty(1, count, 1, width) for name, (count, width) in self.sizes.items()}
        describe(**probe, **self.blocks, scale=self.scale, index_scale=self.index_scale)
        if self.backend not in (*BACKENDS, "dense"):
            raise ValueError(f"backend must be one of {(*BACKENDS, 'dense')}, got {self.backend!r}")
        narrowest = min(self.sizes["q"][1], self.sizes["index_q"][1])
        if self.rotary_width is None and any(self.sizes[name][1] % 2 for name in ("q", "index_q")):
            raise ValueError("RoPE needs even widths; give an even rotary_width")
        if self.rotary_width is not None and (self.rotary_width % 2 or not 0 <= self.rotary_width <= narrowest):
            raise ValueError(f"rotary_width must be even and within 0 .. {narrowest}, got {self.rotary_width}")

    def _heads(self, names, hidden: Tensor, position: Tensor, dtype: torch.dtype | None = None) -> list[Tensor]:
        heads = []
        for name in names:
            rows = getattr(self, name)(hidden).unflatten(2, self.sizes[name])
            if name != "v":
                rows = getattr(self, f"{name}_norm")(rows)
                rows = rotate(rows, position, self.rotary_width, self.rope_theta)
            heads.append(rows.transpose(1, 2))
        return [tensor.to(dtype or heads[-1].dtype) for tensor in heads]

    def _plain(self, q: Tensor, k: Tensor, v: Tensor, document: Tensor | None) -> Tensor:
        mask = None if document is None else (document[:, None] == document).tril()
        return functional.scaled_dot_product_attention(
            q, k, v, mask, is_causal=mask is None, scale=self.scale, enable_gqa=True
        )

    def _attend(self, q, k, v, index_q, index_k, mode, document, cu_seqlens, select):
        module, options = attention, dict(cu_seqlens=cu_seqlens, backend=self.backend)
        if self.backend == "dense":
            module, options = dense, dict(cu_seqlens=cu_seqlens)
        scales = dict(scale=self.scale, index_scale=self.index_scale)
        blocks = self.blocks if mode == "sparse" else {**self.blocks, "topk": None}
        if mode == "warm-up" and self.backend == "dense":
            # The output has the same bits as in mode "dense": warming up the index changes nothing else.
            teacher = (tensor.detach() for tensor in (q, k, v))
            kl_loss = dense.msa_attention(*teacher, index_q, index_k, **blocks, **scales, **options).kl_loss
            return self._plain(q, k, v, document), kl_loss
        if mode == "warm-up" or select is None:
            return module.msa_attention(q, k, v, index_q, index_k, **blocks, **scales, **options)[:2]
        ids = select(index_q, index_k, **blocks, cu_seqlens=cu_seqlens)
        options["block_size"] = self.blocks["block_size"]
        out, lse = module.sparse_attention(q, k, v, ids, scale=self.scale, **options)
        return out, module.index_kl_loss(q, k, lse, index_q, index_k, ids, **scales, **options)


def rotate(rows: Tensor, position: Tensor, width: int | None = None, theta: float = 10000.0) -> Tensor:
    """Rotary position embedding: turns channel pairs (c, c + width / 2) by position * theta ** (-2 c / width).

    Args:
        rows: [B, N, heads, channels]; the channels after the first `width` (default: all) stay as they are.
        position: [N], tokens since the document's start.

    Returns:
        The rotated rows, in float32 under half precision as type promotion has it.
    """
    width = rows.shape[-1] if width is None else width
    exponent = torch.arange(0, width, 2, device=rows.device, dtype=torch.float32) / max(width, 1)
    angle = (position[:, None] * theta**-exponent)[:, None]  # [N, 1, width / 2]
    cos, sin = angle.cos(), angle.sin()
    left, right, rest = rows.split([width // 2, width // 2, rows.shape[-1] - width], dim=-1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin, rest], dim=-1)


def _places(hidden: Tensor, cu_seqlens) -> tuple[Tensor | None, Tensor]:
    """The document of each token (None if there is one) and its position in it; checks cu_seqlens."""
    token = torch.arange(hidden.shape[1], device=hidden.device)
    if cu_seqlens is None:
        return None, token
    check_cu_seqlens(cu_seqlens, hidden.shape[0])
    if not torch.compiler.is_compiling():
        BlockGeometry(hidden.shape[1], 1, cu_seqlens)
    offsets = torch.as_tensor(cu_seqlens, device=hidden.device).long()
    document = torch.searchsorted(offsets, token, right=True) - 1
    return document, token - offsets[document]
