"""Block ids and block masks: choosing the ids of the best blocks, and the mask of the listed ones."""

import torch
import torch.nn.functional as F

from msa_ref.problem import BlockGeometry


def best_blocks(
    score: torch.Tensor, geometry: BlockGeometry, topk: int, local_blocks: int, init_blocks: int
) -> torch.Tensor:
    """The forced blocks of each query, then its visible blocks of highest score, ties to the lower id (SPEC 3).

    Args:
        score: [..., N, NB], without NaN in a visible block.
        topk, local_blocks, init_blocks: as `check_selection` accepts them.

    Returns:
        [..., N, topk] int32, ids ascending, then -1.
    """
    visible = geometry.visible_blocks(score.device)
    forced = geometry.forced_blocks(local_blocks, init_blocks, score.device)
    rank = score.masked_fill(~visible, -torch.inf).masked_fill(forced, torch.inf)
    # Of equal scores a stable sort puts the lower id first.
    order = rank.argsort(dim=-1, descending=True, stable=True)[..., :topk]
    beyond = geometry.blocks  # sorts after every id
    kept = order.masked_fill(~visible.expand_as(rank).gather(-1, order), beyond).sort(dim=-1).values
    return F.pad(kept.masked_fill(kept == beyond, -1), (0, topk - kept.shape[-1]), value=-1).int()


def listed_blocks(block_indices: torch.Tensor, blocks: int) -> torch.Tensor:
    """[..., blocks] bool: which blocks the ids [..., slots] list; a negative id lists none."""
    slots = block_indices.long().masked_fill(block_indices < 0, blocks)
    listed = torch.zeros(*slots.shape[:-1], blocks + 1, dtype=torch.bool, device=slots.device)
    return listed.scatter_(-1, slots, True)[..., :blocks]
