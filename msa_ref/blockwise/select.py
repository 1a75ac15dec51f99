"""Streaming selection: scores, block maxima and top-k without a score matrix."""

import torch

from msa_ref.problem import BlockGeometry, Problem

TILE_QUERIES = 256
CHUNK_KEYS = 2048


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
    for low in range(0, length, TILE_QUERIES):
        high = min(low + TILE_QUERIES, length)
        own = torch.arange(low, high, device=keys.device)[:, None] // size
        visible = (high - 1) // size + 1
        best = queries.new_empty(high - low, 0), own.new_empty(high - low, 0)
        for begin in range(0, visible, chunk):
            end = min(begin + chunk, visible)
            scores = queries[low:high] @ keys[begin * size : end * size].T
            best = _merge(best, _ranks(scores, low, begin, own, size, problem), begin, problem.topk)
        ids[low:high, : best[1].shape[1]] = _ascending(best[1], own, first_block)


def _ranks(scores, low: int, begin: int, own, size: int, problem: Problem) -> torch.Tensor:
    """Block scores as sortable numbers: forced +inf, then numbers, then NaN, then not visible -inf."""
    limits = torch.finfo(scores.dtype)
    scores.nan_to_num_(limits.min, limits.max, limits.min / 2)
    first_masked = max(0, low - begin * size)
    if first_masked < scores.shape[1]:
        key = torch.arange(begin * size + first_masked, begin * size + scores.shape[1], device=own.device)
        query = torch.arange(low, low + len(scores), device=own.device)
        scores[:, first_masked:].masked_fill_(key > query[:, None], -torch.inf)
    ranks = scores.view(len(scores), -1, size).amax(-1)
    block = torch.arange(begin, begin + ranks.shape[1], device=own.device)
    forced = (block > own - problem.local_blocks) | (block < problem.init_blocks)
    return ranks.masked_fill_(forced & (block <= own), torch.inf)


def _merge(best, ranks, begin: int, topk: int):
    """The topk best of those kept so far and a chunk of later blocks; a stable sort keeps the lower id of a tie."""
    block = torch.arange(begin, begin + ranks.shape[1], device=ranks.device).expand(len(ranks), -1)
    ranks, block = torch.cat([best[0], ranks], 1), torch.cat([best[1], block], 1)
    ranks, order = ranks.sort(dim=1, descending=True, stable=True)
    return ranks[:, :topk], block.gather(1, order[:, :topk])


def _ascending(block, own, first_block: int) -> torch.Tensor:
    unused = torch.iinfo(block.dtype).max
    block = block.masked_fill(block > own, unused).sort(dim=1).values
    return torch.where(block == unused, -1, block + first_block).int()
