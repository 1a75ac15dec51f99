"""How much of the attention a block selection keeps, and selections to compare it with.

Everything is measured against the teacher: dense causal attention, averaged over the query heads of each index head.
`teacher_block_mass` says how much probability the teacher puts on each key block; the other functions take that.

    mass = teacher_block_mass(q, k, index_heads=2, block_size=8)
    score_recall(mass, block_indices, block_size=8)                     # 1.0: no set of blocks holds more
    score_recall(mass, block_indices, block_size=8, exclude_own=True)   # without the block every selection keeps
    score_recall(mass, last_blocks(N, 8, topk, index_heads=2), block_size=8)    # the control: always show one

**Rows.** A query that sees no more than topk blocks keeps them all, whatever the scores; its recall of 1 says nothing.
Means are over the rows with a choice, more than topk visible blocks, and `all_rows=True` adds the others. A row with
nothing to recall (0 / 0) is left out of every mean. `reduction="none"` returns every row, with NaN in those left out;
a mean over no row is NaN.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from msa_ref.problem import (
    BlockGeometry,
    check_cu_seqlens,
    check_forced_blocks,
    check_integer,
    check_multiple,
    check_selection,
    describe,
    validate_block_indices,
)
from msa_ref.selection import best_blocks, listed_blocks


@torch.no_grad()
def teacher_block_mass(
    q: torch.Tensor, k: torch.Tensor, *, index_heads: int, block_size: int = 128, scale: float | None = None,
    cu_seqlens=None, chunk: int = 128,
) -> torch.Tensor:  # fmt: skip
    """Probability that dense causal attention puts on each key block, averaged over the heads of an index head.

    Each head's softmax is over all visible tokens (not over the selected ones, as in SPEC 5).

    Args:
        q: [B, H, N, D]. k: [B, Hkv, N, D]. Any floating dtype.
        index_heads: Hidx, which divides H.
        block_size, scale, cu_seqlens: as in `sparse_attention`.
        chunk: queries at a time; the largest temporary holds B·H·chunk·N numbers.

    Returns:
        [B, Hidx, N, NB], float32 (float64 for float64 inputs); a row sums to 1.

    Raises:
        TypeError, ValueError: as `sparse_attention`; index_heads that does not divide H; chunk < 1.
    """
    problem = describe(q=q, k=k, block_size=block_size, scale=scale, cu_seqlens=cu_seqlens)
    check_integer("index_heads", index_heads, 1)
    check_integer("chunk", chunk, 1)
    check_multiple("q", "H", problem.heads, "index_heads", "Hidx", index_heads)
    geometry = BlockGeometry(problem.tokens, block_size, cu_seqlens)
    q, k = q.to(problem.accumulator) * problem.scale, k.to(problem.accumulator)
    mass = q.new_zeros(problem.batch, index_heads, problem.tokens, geometry.blocks)
    with torch.autocast(q.device.type, enabled=False):
        for start, end, block in geometry.documents():
            for first in range(start, end, chunk):
                last = min(first + chunk, end)
                rows = q[:, :, first:last].reshape(problem.batch, problem.kv_heads, -1, problem.width)
                logits = rows @ k[:, :, start:last].transpose(-1, -2)  # [B, Hkv, G * queries, keys]
                logits = logits.view(problem.batch, index_heads, -1, last - first, last - start)
                future = torch.ones_like(logits[0, 0, 0], dtype=torch.bool).triu(first - start + 1)
                teacher = logits.masked_fill_(future, -torch.inf).softmax(dim=-1).mean(dim=2)
                padded = F.pad(teacher, (0, -(last - start) % block_size))
                blocks = padded.unflatten(-1, (-1, block_size)).sum(dim=-1)
                mass[:, :, first:last, block : block + blocks.shape[-1]] = blocks
    return mass


def captured_mass(
    mass: torch.Tensor, block_indices: torch.Tensor, *, block_size: int = 128, cu_seqlens=None,
    all_rows: bool = False, reduction: str = "mean",
) -> torch.Tensor:  # fmt: skip
    """Captured mass: the share of the teacher's attention that lies in the selected blocks, between 0 and 1.

    Args:
        mass: [B, Hidx, N, NB], of `teacher_block_mass`.
        block_indices: [B, Hidx, N, topk], int32 or int64, ids in any order, -1 for an unused slot.
        all_rows, reduction: which rows count, and "mean" or "none" (see the module).

    Returns:
        A scalar, or [B, Hidx, N] for reduction="none"; float64.

    Raises:
        TypeError, ValueError: ids out of range, repeated or in the future; shapes that differ; a wrong reduction.
    """
    rows = _Rows(block_indices, block_size, cu_seqlens, mass)
    return rows.reduce((mass.double() * rows.selected).sum(dim=-1), all_rows, reduction)


def score_recall(
    mass: torch.Tensor, block_indices: torch.Tensor, *, block_size: int = 128, local_blocks: int = 1,
    init_blocks: int = 0, cu_seqlens=None, exclude_own: bool = False, all_rows: bool = False, reduction: str = "mean",
) -> torch.Tensor:  # fmt: skip
    """Score recall: the teacher's mass in the selected blocks over the most that as many blocks can hold.

    For each row (index head, query): numerator, the mass of the selected blocks; denominator, the mass of the best set
    of the same size, which holds the forced blocks (SPEC 3) that the selection holds and then the blocks of highest
    mass. So it lies between 0 and 1, and is 1 for `oracle_blocks`. The mean is over rows, every row weighing the same.
    The own block alone often holds most of the mass, which gives any selection a high floor; `exclude_own=True` leaves
    it out of the numerator, of the denominator and of the count of blocks.

    Args:
        mass: [B, Hidx, N, NB], of `teacher_block_mass`.
        block_indices: [B, Hidx, N, topk], int32 or int64, ids in any order, -1 for an unused slot.
        local_blocks, init_blocks: as in the `select_blocks` that chose them.
        all_rows, reduction: which rows count, and "mean" or "none" (see the module).

    Returns:
        A scalar, or [B, Hidx, N] for reduction="none"; float64.

    Raises:
        TypeError, ValueError: ids out of range, repeated or in the future; shapes that differ; a wrong reduction.
    """
    rows = _Rows(block_indices, block_size, cu_seqlens, mass)
    check_forced_blocks(local_blocks, init_blocks)
    counted = rows.visible & ~rows.own if exclude_own else rows.visible
    selected = rows.selected & counted
    forced = selected & rows.geometry.forced_blocks(local_blocks, init_blocks, mass.device)
    mass = mass.double().masked_fill(~counted, 0)
    held = (mass * selected).sum(dim=-1)
    best = mass.gather(-1, mass.masked_fill(forced, 2.0).argsort(dim=-1, descending=True)).cumsum(dim=-1)
    best = best.gather(-1, (selected.sum(dim=-1, keepdim=True) - 1).clamp(min=0)).squeeze(-1)
    best = best.masked_fill(~selected.any(dim=-1), 0)
    return rows.reduce(held / best, all_rows, reduction)


def block_recall(
    block_indices: torch.Tensor, reference_indices: torch.Tensor, *, block_size: int = 128, cu_seqlens=None,
    exclude_own: bool = False, all_rows: bool = False, reduction: str = "mean",
) -> torch.Tensor:  # fmt: skip
    """Block recall: the share of the reference's blocks that were selected, every block counting the same.

    Args:
        block_indices, reference_indices: [B, Hidx, N, topk], int32 or int64, ids in any order, -1 for an unused slot;
            the two may have different numbers of slots. The reference is usually `oracle_blocks`.
        exclude_own: leave each query's own block out of both.
        all_rows, reduction: which rows count, and "mean" or "none" (see the module).

    Returns:
        A scalar, or [B, Hidx, N] for reduction="none"; float64.

    Raises:
        TypeError, ValueError: ids out of range, repeated or in the future; shapes that differ; a wrong reduction.
    """
    rows = _Rows(block_indices, block_size, cu_seqlens)
    reference = _Rows(reference_indices, block_size, cu_seqlens)
    _check_rows("block_indices", block_indices, "reference_indices", reference_indices)
    wanted = reference.selected & ~rows.own if exclude_own else reference.selected
    found = (wanted & rows.selected).sum(dim=-1).double()
    return rows.reduce(found / wanted.sum(dim=-1), all_rows, reduction)


def oracle_blocks(
    mass: torch.Tensor, *, topk: int, block_size: int = 128, local_blocks: int = 1, init_blocks: int = 0,
    cu_seqlens=None,
) -> torch.Tensor:  # fmt: skip
    """The best selection there is: the forced blocks, then those of highest teacher mass, ties to the lower id.

    Args:
        mass: [B, Hidx, N, NB], of `teacher_block_mass`.
        topk, block_size, local_blocks, init_blocks, cu_seqlens: as in `select_blocks` (SPEC 3).

    Returns:
        [B, Hidx, N, topk] int32, ids ascending, then -1.

    Raises:
        TypeError, ValueError: options as in `select_blocks`; a mass whose last axis is not the number of blocks.
    """
    geometry = _check_mass(mass, block_size, cu_seqlens)
    return _choose(mass, geometry, topk, local_blocks, init_blocks)


def last_blocks(
    N: int, block_size: int, topk: int, *, batch: int = 1, index_heads: int = 1, init_blocks: int = 0, cu_seqlens=None
) -> torch.Tensor:  # fmt: skip
    """A control: the newest topk blocks of each query (a sliding window), after init_blocks first ones if asked for.

    Returns:
        [batch, index_heads, N, topk] int32, ids ascending, then -1.

    Raises:
        TypeError, ValueError: options as in `select_blocks`.
    """
    geometry = _geometry(N, block_size, cu_seqlens, batch=batch, index_heads=index_heads)
    newest = torch.arange(geometry.blocks, dtype=torch.float32).expand(batch, index_heads, N, -1)
    return _choose(newest, geometry, topk, 1, init_blocks)


def random_blocks(
    N: int, block_size: int, topk: int, *, seed: int, batch: int = 1, index_heads: int = 1, local_blocks: int = 1,
    init_blocks: int = 0, cu_seqlens=None,
) -> torch.Tensor:  # fmt: skip
    """A control: the forced blocks (by default the query's own), then visible ones drawn uniformly without repetition.

    Returns:
        [batch, index_heads, N, topk] int32, ids ascending, then -1; the same for the same seed.

    Raises:
        TypeError, ValueError: options as in `select_blocks`.
    """
    geometry = _geometry(N, block_size, cu_seqlens, batch=batch, index_heads=index_heads)
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.rand(batch, index_heads, N, geometry.blocks, generator=generator)
    return _choose(drawn, geometry, topk, local_blocks, init_blocks)


class _Rows:
    """The rows of a selection as masks over the blocks: `selected` [B, Hidx, N, NB], `visible` and `own` [N, NB]."""

    def __init__(self, block_indices, block_size, cu_seqlens, mass=None):
        if mass is not None:
            _check_mass(mass, block_size, cu_seqlens)
        validate_block_indices(block_indices, block_size=block_size, cu_seqlens=cu_seqlens)
        if mass is not None:
            _check_rows("mass", mass, "block_indices", block_indices)
        self.geometry = geometry = BlockGeometry(block_indices.shape[2], block_size, cu_seqlens)
        self.visible = geometry.visible_blocks(block_indices.device)
        self.own = geometry.forced_blocks(local_blocks=1, init_blocks=0, device=block_indices.device)
        self.selected = listed_blocks(block_indices, geometry.blocks) & self.visible
        self.choice = self.visible.sum(dim=-1) > block_indices.shape[3]

    def reduce(self, values: torch.Tensor, all_rows: bool, reduction: str) -> torch.Tensor:
        if reduction not in ("mean", "none"):
            raise ValueError(f"reduction must be 'mean' or 'none', got {reduction!r}")
        values = values if all_rows else values.masked_fill(~self.choice, torch.nan)
        return values.nanmean() if reduction == "mean" else values


def _geometry(N: int, block_size: int, cu_seqlens, **sizes) -> BlockGeometry:
    for name, size in {"N": N, "block_size": block_size, **sizes}.items():
        check_integer(name, size, 1)
    check_cu_seqlens(cu_seqlens, sizes["batch"])
    return BlockGeometry(N, block_size, cu_seqlens)


def _check_mass(mass: torch.Tensor, block_size: int, cu_seqlens) -> BlockGeometry:
    if not isinstance(mass, torch.Tensor) or not mass.is_floating_point():
        raise TypeError(f"mass must be a floating-point tensor, got {getattr(mass, 'dtype', type(mass).__name__)}")
    if mass.ndim != 4 or 0 in mass.shape:
        raise ValueError(f"mass must have 4 dimensions [B, Hidx, N, NB], none empty, got shape {tuple(mass.shape)}")
    geometry = _geometry(mass.shape[2], block_size, cu_seqlens, batch=mass.shape[0])
    if mass.shape[3] != geometry.blocks:
        raise ValueError(f"mass must have NB={geometry.blocks} blocks (block_size={block_size}), got {mass.shape[3]}")
    return geometry


def _check_rows(name: str, tensor: torch.Tensor, other_name: str, other: torch.Tensor) -> None:
    if tensor.shape[:3] != other.shape[:3]:
        raise ValueError(
            f"{name} and {other_name} must share [B, Hidx, N], got {tuple(tensor.shape[:3])} and"
            f" {tuple(other.shape[:3])}"
        )


def _choose(score, geometry: BlockGeometry, topk: int, local_blocks: int, init_blocks: int) -> torch.Tensor:
    check_selection(topk, local_blocks, init_blocks)
    return best_blocks(score, geometry, topk, local_blocks, init_blocks)
