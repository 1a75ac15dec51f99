"""Streaming selection: scores, block maxima and top-k without a score matrix."""

import torch

from msa_ref.blockwise.tiles import products
from msa_ref.problem import BlockGeometry, Problem

TILE_QUERIES = 256
CHUNK_KEYS = 2048  # scores that are in memory at a time
MERGED = 8  # chunks whose blocks are merged into the best at a time


def select_forward(index_q, index_k, problem: Problem, geometry: BlockGeometry) -> torch.Tensor:
    """`select_blocks` of validated tensors."""
    ids = index_q.new_full((problem.batch, problem.index_heads, problem.tokens, problem.topk), -1, dtype=torch.int32)
    for batch in range(problem.batch):
        for head in range(problem.index_heads):
            queries = index_q[batch, head].to(problem.accumulator)
            keys = index_k[batch, head // problem.index_group].to(problem.accumulator)
            for start, stop, first_block in geometry.documents():
                _select_document(
                    queries[start:stop], keys[start:stop], first_block, problem, ids[batch, head, start:stop]
                )
    return ids


def _select_document(queries, keys, first_block: int, problem: Problem, ids) -> None:
    length = len(keys)
    size = min(problem.block_size, length)
    keys = torch.nn.functional.pad(keys, (0, 0, 0, -length % size))
    chunk = max(1, CHUNK_KEYS // size)
    buffer = queries.new_empty(TILE_QUERIES * chunk * size)
    for low in range(0, length, TILE_QUERIES):
        high = min(low + TILE_QUERIES, length)
        own = torch.arange(low, high, device=keys.device)[:, None] // size
        visible = (high - 1) // size + 1
        best = queries.new_empty(high - low, 0), own.new_empty(high - low, 0)
        for begin in range(0, visible, MERGED * chunk):
            end = min(begin + MERGED * chunk, visible)
            scores = []
            for first in range(begin, end, chunk):
                piece = keys[first * size : min(first + chunk, end) * size]
                scores.append(_block_scores(products(queries[low:high], piece, buffer), low, first * size, size))
            best = _merge(best, _ranks(torch.cat(scores, 1), begin, own, problem), begin, problem.topk)
        ids[low:high, : best[1].shape[1]] = _ascending(best[1], own, first_block)


def _block_scores(scores, low: int, first: int, size: int) -> torch.Tensor:
    """The highest visible score in each block, [queries, blocks], with NaN and infinity as numbers.

    scores: [queries, keys], overwritten, of queries from token `low` on and keys from token `first` on.
    """
    best = _visible_maximum(scores, low, first, size)
    limits = torch.finfo(scores.dtype)
    numbers = {"nan": limits.min, "posinf": limits.max, "neginf": limits.min / 2}
    if best.isnan().any():  # a NaN hides the numbers beside it
        best = _visible_maximum(scores.nan_to_num_(**numbers), low, first, size)
    return best.nan_to_num_(**numbers)


def _visible_maximum(scores, low: int, first: int, size: int) -> torch.Tensor:
    masked = max(0, low - first)
    if masked < scores.shape[1]:
        key = torch.arange(first + masked, first + scores.shape[1], device=scores.device)
        query = torch.arange(low, low + len(scores), device=scores.device)
        scores[:, masked:].masked_fill_(key > query[:, None], -torch.inf)
    return scores.view(len(scores), -1, size).amax(-1)


def _ranks(scores, begin: int, own, problem: Problem) -> torch.Tensor:
    """Block scores with forced blocks at inf and blocks in the future at -inf."""
    block = torch.arange(begin, begin + scores.shape[1], device=own.device)
    forced = (block > own - problem.local_blocks) | (block < problem.init_blocks)
    return scores.masked_fill_(forced, torch.inf).masked_fill_(block > own, -torch.inf)


def _merge(best, ranks, begin: int, topk: int):
    """The topk best of those kept so far and of later blocks; the lower id of a tie."""
    block = torch.arange(begin, begin + ranks.shape[1], device=ranks.device).expand(len(ranks), -1)
    ranks, block = torch.cat([best[0], ranks], 1), torch.cat([best[1], block], 1)
    order = _best(ranks, block, min(topk, ranks.shape[1]))
    return ranks.gather(1, order), block.gather(1, order)


def _best(ranks, block, count: int) -> torch.Tensor:
    """Where the best ranks of each row are, the lower block of equal ones: [rows, count]."""
    if ranks.dtype == torch.float64:
        by_block = block.argsort(dim=1)
        return by_block.gather(1, ranks.gather(1, by_block).argsort(dim=1, descending=True, stable=True)[:, :count])
    bits = (ranks + 0.0).view(torch.int32)  # -0 becomes 0: they are equal
    sortable = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return ((sortable.long() << 32) + (2**32 - 1 - block)).topk(count, dim=1).indices  # no two are equal


def _ascending(block, own, first_block: int) -> torch.Tensor:
    unused = torch.iinfo(block.dtype).max
    block = block.masked_fill(block > own, unused).sort(dim=1).values
    return torch.where(block == unused, -1, block + first_block).int()
