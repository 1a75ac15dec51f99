"""A step's results against float64, row by row, written as SPEC 3, 4, 5 and 7 say it."""

from __future__ import annotations

import torch
from torch import Tensor

from msa_triton.benchmark.step import Inputs, Shape, Step

# The largest error of a row: max |difference| over max |reference|. Narrow types round each result to 8 or 11 bits.
LIMITS = {
    "float32": {"out": 1e-5, "dq": 1e-4, "d_index_q": 1e-4},
    "bfloat16": {"out": 2e-2, "dq": 2e-2, "d_index_q": 2e-2},
    "float16": {"out": 2e-2, "dq": 2e-2, "d_index_q": 2e-2},
}
SCORE_TOLERANCE = 1e-5  # of the largest score of a row: scores are sums in float32
PIECE = 2**16  # keys that are scored at a time


class CheckFailed(Exception):
    """A result that differs from float64 by more than rounding explains."""


def chosen_rows(shape: Shape, count: int, seed: int) -> list[int]:
    """At most `count` queries: the first, the last, some that see no more than topk blocks, and random ones."""
    generator = torch.Generator().manual_seed(seed)
    early = min(shape.topk * shape.block_size, shape.tokens)
    few = max(1, count // 4)
    rows = torch.randint(early, (few,), generator=generator).tolist()
    rows += torch.randint(shape.tokens, (max(0, count - few - 2),), generator=generator).tolist()
    return sorted({0, shape.tokens - 1, *rows})


@torch.no_grad()
def check_rows(inputs: Inputs, step: Step, shape: Shape, rows: list[int]) -> dict[str, float]:
    """The largest errors of out, dq and d_index_q over all heads of some queries; the kept blocks are checked too.

    The error of a row is relative to the largest reference value in that row; where a query sees one token, and every
    gradient is 0, to the largest in all rows.

    Raises:
        CheckFailed: an error above `LIMITS`, or blocks that `select_blocks` should not have kept.
    """
    differences, sizes = {}, {}
    for row in rows:
        for head in range(shape.index_heads):
            if step.block_indices is None:
                tokens = torch.arange(row + 1, device=inputs.q.device)
            else:
                blocks = check_blocks(inputs, step.block_indices, shape, row, head)
                tokens = tokens_of(blocks, shape.block_size, row)
            heads = slice(head * shape.share, (head + 1) * shape.share)
            actual = (step.out[0, heads, row], step.dq[0, heads, row], step.d_index_q[0, head, row])
            for name, value, reference in zip(
                LIMITS[shape.dtype], actual, reference_row(inputs, shape, row, head, tokens), strict=True
            ):
                # What is below the smallest number of the dtype is 0 in it.
                least = torch.finfo(value.dtype).smallest_normal * torch.finfo(value.dtype).eps
                at = (name, row, head)
                differences[at] = float((value.double() - reference).abs().max()) - least
                sizes[at] = float(reference.abs().max()) if len(tokens) > 1 else 0.0
    return _worst(differences, sizes, LIMITS[shape.dtype])


def reference_row(inputs: Inputs, shape: Shape, row: int, head: int, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """out [R, D], dq [R, D] and d_index_q [Di] in float64, for the R query heads of an index head and one query.

    Args:
        head: index head. tokens: [n] int64, those that the query attends to.
    """
    kv_head = head * shape.kv_heads // shape.index_heads
    heads = slice(head * shape.share, (head + 1) * shape.share)
    q, dout = inputs.q[0, heads, row].double(), inputs.dout[0, heads, row].double()
    k, v = inputs.k[0, kv_head, tokens].double(), inputs.v[0, kv_head, tokens].double()
    scale = shape.width**-0.5
    p = (scale * q @ k.T).softmax(dim=-1)  # [R, n]
    out = p @ v
    dp, delta = dout @ v.T, (out * dout).sum(-1, keepdim=True)
    dq = scale * (p * (dp - delta)) @ k

    index_scale = shape.index_width**-0.5
    index_k = inputs.index_k[0, head * shape.index_key_heads // shape.index_heads, tokens].double()
    p_index = (index_scale * index_k @ inputs.index_q[0, head, row].double()).softmax(dim=-1)  # [n]
    upstream = 1 / (shape.index_heads * shape.tokens)  # of the mean over index heads and tokens
    d_index_q = upstream * index_scale * (p_index - p.mean(0)) @ index_k
    return out, dq, d_index_q


def check_blocks(inputs: Inputs, block_indices: Tensor, shape: Shape, row: int, head: int) -> Tensor:
    """The blocks kept for one query, int64 [kept]; raises CheckFailed unless they are right.

    They are right if they ascend, are as many as they may be, hold the query's own block, and none of the visible
    blocks that were dropped scores higher in float64 than one that was kept, rounding aside.
    """
    listed = block_indices[0, head, row].long()
    own = row // shape.block_size
    kept = min(shape.topk, own + 1)
    blocks = listed[:kept]
    where = f"query {row}, index head {head}: blocks {listed.tolist()}"
    ascending = bool((blocks.diff() > 0).all()) and bool((listed[kept:] == -1).all())
    if not ascending or blocks[0] < 0 or blocks[-1] != own:
        raise CheckFailed(f"{where} must be {kept} ascending ids that end with its own block {own}, then -1")
    scores = block_scores(inputs, shape, row, head)
    chosen = torch.zeros_like(scores, dtype=torch.bool).index_fill_(0, blocks, True)
    dropped = scores.masked_fill(chosen, -torch.inf)
    lowest = scores[blocks[:-1]].min() if kept > 1 else torch.inf
    if kept < own + 1 and kept > 1 and dropped.max() > lowest + SCORE_TOLERANCE * scores.abs().max():
        raise CheckFailed(
            f"{where} leave out block {int(dropped.argmax())}, which scores {float(dropped.max()):.6g}, and keep one"
            f" that scores {float(lowest):.6g}"
        )
    return blocks


def block_scores(inputs: Inputs, shape: Shape, row: int, head: int) -> Tensor:
    """float64 [own block + 1]: the highest score of a visible token in each block that a query sees."""
    keys = inputs.index_k[0, head * shape.index_key_heads // shape.index_heads]
    query = inputs.index_q[0, head, row].double()
    pieces = [keys[at : min(at + PIECE, row + 1)].double() @ query for at in range(0, row + 1, PIECE)]
    scores = torch.nn.functional.pad(torch.cat(pieces), (0, -(row + 1) % shape.block_size), value=-torch.inf)
    return scores.view(-1, shape.block_size).amax(-1)


def tokens_of(blocks: Tensor, block_size: int, row: int) -> Tensor:
    """int64 [n]: the visible tokens of some blocks."""
    tokens = (blocks[:, None] * block_size + torch.arange(block_size, device=blocks.device)).flatten()
    return tokens[tokens <= row]


def _worst(differences: dict, sizes: dict, limits: dict[str, float]) -> dict[str, float]:
    errors = {}
    for name, limit in limits.items():
        places = [at for at in differences if at[0] == name]
        largest = max(sizes[at] for at in places) or 1.0
        found = {at: max(differences[at], 0.0) / (sizes[at] or largest) for at in places}
        for (_, row, head), error in found.items():
            if not error <= limit:  # NaN too
                raise CheckFailed(
                    f"{name} of query {row}, index head {head}: error {error:.3g} of the largest value, limit {limit}"
                )
        errors[name] = max(found.values())
    return errors
