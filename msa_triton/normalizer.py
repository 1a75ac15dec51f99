"""What turns the logits of a row into probabilities again, from the LSE of the forward pass."""

import torch
import triton
import triton.language as tl

from msa_ref.problem import BlockGeometry, Problem
from msa_triton.config import choose_tile
from msa_triton.launch import launch, target_of
from msa_triton.schedule import QueryWalk, attention_sizes
from msa_triton.tiles import (
    LENGTHS,
    LOG2_E,
    block_bounds,
    document_block,
    load_ids,
    load_rows,
    online_softmax,
    query_program,
    row_tile,
    visible_keys,
    walk,
)  # fmt: skip

# Beyond this |lse| the rounding of a float32 LSE would change a probability by more than 1e-4 of itself.
COARSE = tl.constexpr(1e-4 * 2**23)


def normalizer(q, k, lse, ids, problem: Problem, geometry: BlockGeometry):
    """(shift, log_total), both float32 [B, H, N]: p = exp2((s - shift) * scale * log2(e) - log_total).

    s is the unscaled dot product. Mostly shift is lse / scale and log_total 0. Rows whose LSE is too coarse (near 4e8 a
    float32 steps by 32) get their largest logit, and the logarithm of the sum relative to it, computed again.
    """
    sizes = attention_sizes(problem)
    tile = choose_tile(
        "normalizer", target_of(q), q.element_size(), block=problem.block_size, row_width=sizes["D_PAD"],
        key_width=sizes["D_PAD"],
    )  # fmt: skip
    rows = QueryWalk(ids, tile, problem, geometry, unions=False)
    shift, log_total = (torch.empty(lse.shape, dtype=torch.float32, device=q.device) for _ in range(2))
    sizes = {name: sizes[name] for name in ("R", "KV_SHARE", "BLOCK", "D", "D_PAD")}
    launch(
        normalizer_kernel, rows.programs, q, k, lse.contiguous(), *rows.arguments, shift, log_total, q.stride(),
        k.stride(), problem.tokens, problem.index_heads, problem.scale, problem.scale * LOG2_E, BN=tile.keys, **sizes,
        **rows.constants, **tile.options,
    )  # fmt: skip
    return shift, log_total


@triton.jit(do_not_specialize=LENGTHS)
def normalizer_kernel(
    q, k, lse, ids, block_start, block_of, first_block, shift, log_total, q_strides, k_strides, N,
    Hidx, scale, scale_log2,
    R: tl.constexpr, KV_SHARE: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, BLOCK: tl.constexpr,
    SLOTS: tl.constexpr, SLOTS_PAD: tl.constexpr, BQ: tl.constexpr, BH: tl.constexpr, BN: tl.constexpr,
    CHUNKS: tl.constexpr,
):  # fmt: skip
    """Rows of BQ queries times BH heads; if the LSE of one is coarse, which is rare, a walk over all visible blocks."""
    tile, chunk, pair = query_program(N, BQ, CHUNKS)
    batch, index_head = pair // Hidx, pair % Hidx
    query, head, valid = row_tile(tile, chunk, N, R, BQ, BH)
    row = (pair * R + head) * N + query
    known = tl.load(lse + row, mask=valid, other=0.0)
    coarse = (tl.abs(known) > COARSE) & (known != float("-inf"))
    largest = tl.full((BQ * BH,), float("-inf"), tl.float32)
    total = tl.zeros((BQ * BH,), tl.float32)
    if tl.max(coarse.to(tl.int32), 0) > 0:
        first = document_block(query, valid, first_block)
        q_row = batch * q_strides[0] + (index_head * R + head) * q_strides[1] + query * q_strides[2]
        q_tile = load_rows(q, q_row, valid, q_strides[3], D, D_PAD)  # [BQ * BH, D]
        k += batch * k_strides[0] + index_head // KV_SHARE * k_strides[1]
        listed = ids
        if ids is not None:
            listed = load_ids(ids, pair, query, valid, N, SLOTS, SLOTS_PAD)  # [rows, SLOTS]
        begin, end = walk(tile, None, block_of, first_block, N, BLOCK, BQ)
        for step in range(begin * (BLOCK // BN), end * (BLOCK // BN)):
            block = step // (BLOCK // BN)
            start, stop = block_bounds(block, block_start, N, BLOCK)
            column = step % (BLOCK // BN) * BN + tl.arange(0, BN).to(tl.int64)
            key = start + column
            k_tile = load_rows(k, key * k_strides[2], key < stop, k_strides[3], D, D_PAD)  # [BN, D]
            seen = visible_keys(query, first, valid, listed, block, start, stop)
            logits = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee")  # [BQ * BH, BN]
            logits = tl.where(column.to(tl.int32)[None, :] < seen[:, None], logits, float("-inf"))
            now, base = online_softmax(logits, largest)
            total *= tl.exp2((largest - base) * scale_log2)
            total += tl.sum(tl.exp2((logits - base[:, None]) * scale_log2), 1)
            largest = now
    total = tl.where(coarse & (total > 0), total, 1.0)
    tl.store(shift + row, tl.where(coarse, largest, known / scale), mask=valid)
    tl.store(log_total + row, tl.log2(total), mask=valid)
