"""The selection kernel: scores, block maxima and top-k in one pass, the best blocks of a row in registers."""

import torch
import triton
import triton.language as tl

from msa_ref.problem import BlockGeometry, Problem
from msa_triton.config import SMALLEST_DOT, choose_tile, padded
from msa_triton.launch import computable, launch, place, target_of
from msa_triton.tiles import LENGTHS, block_bounds, document_block, load_rows, own_block, visible_keys

LOWEST_NUMBER = tl.constexpr(-3.4028234663852886e38)
FORCED = tl.constexpr(2**31 - 1)  # ranks are float32 scores as sortable int32; no score maps to these two
ABSENT = tl.constexpr(-(2**31))
MOST_KEPT = 4096  # keys that the rows of a tile keep in registers
MOST_KEPT_ON = {"sm_90": 8192}  # where twice as many fit: tiles of 128 rows up to topk 64, of 64 rows at 128
NO_BLOCK = tl.constexpr(2**31 - 1)  # sorts after every id


def select_forward(index_q, index_k, problem: Problem, geometry: BlockGeometry) -> torch.Tensor:
    """`select_blocks` of validated tensors."""
    index_q, index_k = computable(index_q, index_k)
    width = padded(problem.index_width)
    slots_pad = padded(min(problem.topk, geometry.blocks), 1)  # a power of two: few variants at short lengths
    tile = choose_tile(
        "select", target_of(index_q), index_q.element_size(), block=problem.block_size, row_width=width, key_width=width
    )
    most_kept = MOST_KEPT_ON.get(target_of(index_q), MOST_KEPT)
    rows = max(SMALLEST_DOT, min(tile.rows, most_kept // slots_pad))
    ids = index_q.new_full((problem.batch, problem.index_heads, problem.tokens, problem.topk), -1, dtype=torch.int32)
    launch(
        select_kernel,
        triton.cdiv(problem.tokens, rows) * problem.index_heads * problem.batch,
        index_q, index_k, ids, *place(geometry, index_q.device), index_q.stride(), index_k.stride(),
        problem.tokens, problem.index_heads, problem.local_blocks, problem.init_blocks,
        HEADS_PER_KEY=problem.index_group, DI=problem.index_width, DI_PAD=width, BLOCK=problem.block_size,
        TOPK=problem.topk, SLOTS=min(problem.topk, slots_pad), SLOTS_PAD=slots_pad, BQ=rows, **tile.options,
    )  # fmt: skip
    return ids


@triton.jit
def block_scores(q_tile, keys, start, stop, seen, stride_n, stride_d, DI: tl.constexpr, DI_PAD: tl.constexpr,
                 BLOCK: tl.constexpr):  # fmt: skip
    """[BQ]: the highest score of each row in a block; seen: visible keys of each row, None for all.

    -inf, the least number, counts as the lowest finite score, and -inf stands for rows with no number at all.
    """
    column = tl.arange(0, BLOCK)
    key = start + column.to(tl.int64)
    key_tile = load_rows(keys, key * stride_n, key < stop, stride_d, DI, DI_PAD)  # [BLOCK, DI]
    scores = tl.dot(q_tile, tl.trans(key_tile), input_precision="ieee")  # [BQ, BLOCK]
    counts = scores == scores
    if seen is not None:
        counts = counts & (column[None, :] < seen[:, None])
    return tl.max(tl.where(counts, tl.maximum(scores, LOWEST_NUMBER), float("-inf")), 1)


@triton.jit
def insert(best, scores, block, own, first, visible, local_blocks, init_blocks):
    """Replaces the worst key of each row by that of a block, if it is better and visible."""
    bits = tl.where(scores == 0, 0.0, scores).to(tl.int32, bitcast=True)  # -0 and +0 are equal
    rank = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    forced = (block > own - local_blocks) | (block < first + init_blocks)
    rank = tl.where(forced, FORCED, rank)
    key = tl.where(visible, (rank.to(tl.int64) << 32) + (2**32 - 1 - block), ABSENT << 32)
    worst = tl.min(best, 1)
    return tl.where((best == worst[:, None]) & (key > worst)[:, None], key[:, None], best)


@triton.jit(do_not_specialize=LENGTHS)
def select_kernel(
    index_q, index_k, ids, block_start, block_of, first_block, q_strides, k_strides, N, Hidx, local_blocks, init_blocks,
    HEADS_PER_KEY: tl.constexpr, DI: tl.constexpr, DI_PAD: tl.constexpr, BLOCK: tl.constexpr, TOPK: tl.constexpr,
    SLOTS: tl.constexpr, SLOTS_PAD: tl.constexpr, BQ: tl.constexpr,
):  # fmt: skip
    """Block ids of a tile of BQ queries of one index head; the longest walks of all heads come first.

    A row keeps its best blocks as int64 keys, the rank above and the complement of the id below: of equal ranks the
    lower id is greater, and no two keys are equal, so that the smallest is one slot.
    """
    program = tl.program_id(0).to(tl.int64)
    tiles = tl.cdiv(N, BQ).to(tl.int64)
    pairs = tl.num_programs(0).to(tl.int64) // tiles
    tile, head, batch = tiles - 1 - program // pairs, program % pairs % Hidx, program % pairs // Hidx
    query = tile * BQ + tl.arange(0, BQ).to(tl.int64)
    valid = query < N
    own = own_block(query, valid, block_of, BLOCK)
    first = document_block(query, valid, first_block)

    offset = batch * q_strides[0] + head * q_strides[1] + query * q_strides[2]
    q_tile = load_rows(index_q, offset, valid, q_strides[3], DI, DI_PAD)  # [BQ, DI]
    keys = index_k + batch * k_strides[0] + head // HEADS_PER_KEY * k_strides[1]
    slot = tl.arange(0, SLOTS_PAD).to(tl.int64)
    empty = tl.where(slot < SLOTS, (ABSENT << 32) + slot, FORCED << 32)
    best = tl.broadcast_to(empty[None, :], (BQ, SLOTS_PAD))

    begin = document_block(tile * BQ, True, first_block)
    last = tl.minimum(tile * BQ + BQ, N) - 1
    full = own_block(tile * BQ, True, block_of, BLOCK)  # the blocks before are whole and in the past of every row
    if first_block is not None:
        full = tl.where(document_block(last, True, first_block) == begin, full, begin)
    for block in range(begin, full):
        start, stop = block_bounds(block, block_start, N, BLOCK)
        score = block_scores(q_tile, keys, start, stop, None, k_strides[2], k_strides[3], DI, DI_PAD, BLOCK)
        best = insert(best, score, block, own, first, valid, local_blocks, init_blocks)
    for block in range(full, own_block(last, True, block_of, BLOCK) + 1):
        start, stop = block_bounds(block, block_start, N, BLOCK)
        seen = visible_keys(query, first, valid, None, block, start, stop)
        score = block_scores(q_tile, keys, start, stop, seen, k_strides[2], k_strides[3], DI, DI_PAD, BLOCK)
        best = insert(best, score, block, own, first, seen > 0, local_blocks, init_blocks)

    kept = tl.where((slot < SLOTS) & (best >= (ABSENT + 1) << 32), 2**32 - 1 - (best & (2**32 - 1)), NO_BLOCK)
    ascending = tl.full((BQ, SLOTS_PAD), -1, tl.int64)
    for at in range(SLOTS):
        least = tl.min(kept, 1)
        kept = tl.where(kept == least[:, None], NO_BLOCK, kept)
        ascending = tl.where((slot == at)[None, :] & (least < NO_BLOCK)[:, None], least[:, None], ascending)
    row = ((batch * Hidx + head) * N + query) * TOPK
    tl.store(ids + row[:, None] + slot[None, :], ascending.to(tl.int32), mask=valid[:, None] & (slot < SLOTS)[None, :])
