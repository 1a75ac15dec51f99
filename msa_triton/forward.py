"""The forward pass of sparse attention, query-major and key-major, and the launcher that chooses between them.

Logits stay unscaled dot products until their row's maximum is subtracted: p = exp2((s - max) * scale * log2(e)). Then
neither the rounding of a large product nor a fused multiply-add can move the weights of a row.
"""

import torch
import triton
import triton.language as tl

from msa_ref.problem import BlockGeometry, Problem
from msa_triton.config import Tile, choose_tile
from msa_triton.launch import computable, launch, place, target_of
from msa_triton.schedule import QueryWalk, attention_sizes, ranges, reverse_tasks, visible_ids
from msa_triton.tiles import (
    LENGTHS,
    LN_2,
    LOG2_E,
    block_at,
    block_bounds,
    document_block,
    edge_tile,
    load_ids,
    load_rows,
    load_task,
    online_softmax,
    query_program,
    row_tile,
    store_rows,
    task_program,
    visible_keys,
    walk,
)  # fmt: skip


def attention_forward(q, k, v, block_indices, problem: Problem, geometry: BlockGeometry, schedule: str = "auto"):
    """(out, lse) of validated tensors; schedule "auto" takes what `choose_schedule` says."""
    q, k, v = computable(q, k, v)
    if schedule == "auto":
        schedule = choose_schedule(q, problem, geometry, block_indices)
    rows = (problem.batch, problem.heads, problem.tokens)
    out, lse = q.new_empty(*rows, problem.value_width), q.new_empty(rows, dtype=torch.float32)
    run = query_major if schedule == "query" else key_major
    run(q, k, v, visible_ids(block_indices, geometry), out, lse, problem, geometry)
    return out.to(problem.dtype), lse


def choose_schedule(q, problem: Problem, geometry: BlockGeometry, block_indices) -> str:
    """"query" or "key", from sizes alone: what later tokens hold must not change how earlier rows are rounded.

    A query-major tile wastes rows where its queries share few blocks: where there are many queries in a tile, because
    few heads share a selection, unless there are few blocks at all. Key-major holds a whole key block, if that fits.
    """
    few_blocks = block_indices is None or 2 * geometry.blocks <= 5 * block_indices.shape[-1]
    if few_blocks or problem.heads_per_index >= 8:
        return "query"
    try:
        _key_tile(q, problem)
    except ValueError:
        return "query"
    return "key"


def _key_tile(q, problem: Problem) -> Tile:
    sizes = attention_sizes(problem)
    widths = dict(row_width=sizes["D_PAD"], key_width=sizes["D_PAD"] + sizes["DV_PAD"])
    return choose_tile("forward_key", target_of(q), q.element_size(), block=problem.block_size, **widths)


def query_major(q, k, v, ids, out, lse, problem: Problem, geometry: BlockGeometry) -> None:
    """Fills out and lse by tiles of adjacent queries, each walking the union of their blocks."""
    sizes = attention_sizes(problem)
    tile = choose_tile(
        "forward_query", target_of(q), q.element_size(), block=problem.block_size, row_width=sizes["D_PAD"],
        key_width=sizes["D_PAD"] + sizes["DV_PAD"],
    )  # fmt: skip
    walk = QueryWalk(ids, tile, problem, geometry)
    launch(
        forward_query_kernel, walk.programs, q, k, v, *walk.arguments, out, lse, q.stride(), k.stride(), v.stride(),
        problem.tokens, problem.index_heads, problem.scale, problem.scale * LOG2_E, BN=tile.keys, **sizes,
        **walk.constants, **tile.options,
    )  # fmt: skip


def key_major(q, k, v, ids, out, lse, problem: Problem, geometry: BlockGeometry) -> None:
    """Fills out and lse by key blocks: a partial result for every (query, slot), then the slots of a query combined.

    Queries are processed in ranges whose partial results fit WORKING_BYTES, or half the bytes of q if that is more, so
    that memory stays O(N) and few ranges read the same keys again.
    """
    sizes, share, slots = attention_sizes(problem), problem.heads_per_index, ids.shape[2]
    tile = _key_tile(q, problem)
    merge = choose_tile("combine", target_of(q), 4, block=1, row_width=sizes["DV_PAD"], key_width=0)
    split, merge_split = tile.split(share), merge.split(share)
    chunks, merge_chunks = triton.cdiv(share, split["BH"]), triton.cdiv(share, merge_split["BH"])
    block_start, _, _ = place(geometry, q.device)
    row_bytes = problem.batch * problem.heads * slots * (problem.value_width * q.element_size() + 8)
    for start, stop in ranges(problem.tokens, row_bytes, q.nbytes // 2):
        part = ids[:, start:stop]
        work = reverse_tasks(part, geometry.blocks)
        rows = (*part.shape, share)
        partial = q.new_empty(*rows, problem.value_width)
        largest = q.new_full(rows, -torch.inf, dtype=torch.float32)  # with a total of 0: a slot that is not used
        total = q.new_zeros(rows, dtype=torch.float32)
        launch(
            forward_key_kernel, work.tasks.shape[1] * chunks * len(ids), q, k, v, work.edges, work.tasks, block_start,
            partial, largest, total, q.stride(), k.stride(), v.stride(), problem.tokens, problem.index_heads, start,
            work.edge_count, work.tasks.shape[1], problem.scale * LOG2_E, SLOTS=slots, CHUNKS=chunks, **sizes,
            **split, **tile.options,
        )  # fmt: skip
        launch(
            combine_kernel, triton.cdiv(part.shape[1], merge_split["BQ"]) * merge_chunks * len(ids), partial, largest,
            total, out, lse, problem.tokens, part.shape[1], start, problem.scale, problem.scale * LOG2_E, SLOTS=slots,
            R=share, DV=sizes["DV"], DV_PAD=sizes["DV_PAD"], CHUNKS=merge_chunks, **merge_split, **merge.options,
        )  # fmt: skip


@triton.jit(do_not_specialize=LENGTHS)
def forward_query_kernel(
    q, k, v, ids, unions, union_size, block_start, block_of, first_block, out, lse, q_strides, k_strides, v_strides,
    N, Hidx, scale, scale_log2,
    R: tl.constexpr, KV_SHARE: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, DV: tl.constexpr,
    DV_PAD: tl.constexpr, BLOCK: tl.constexpr, SLOTS: tl.constexpr, SLOTS_PAD: tl.constexpr, BQ: tl.constexpr,
    BH: tl.constexpr, BN: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Out and LSE of BQ queries times BH heads: one pass over the key blocks that any of the queries needs."""
    tile, chunk, pair = query_program(N, BQ, CHUNKS)
    batch, index_head = pair // Hidx, pair % Hidx
    query, head, valid = row_tile(tile, chunk, N, R, BQ, BH)
    first = document_block(query, valid, first_block)
    q_row = batch * q_strides[0] + (index_head * R + head) * q_strides[1] + query * q_strides[2]
    q_tile = load_rows(q, q_row, valid, q_strides[3], D, D_PAD)  # [BQ * BH, D]
    k += batch * k_strides[0] + index_head // KV_SHARE * k_strides[1]
    v += batch * v_strides[0] + index_head // KV_SHARE * v_strides[1]
    listed, union = ids, unions
    if ids is not None:
        listed = load_ids(ids, pair, query, valid, N, SLOTS, SLOTS_PAD)  # [rows, SLOTS]
        union += (pair * tl.cdiv(N, BQ) + tile) * union_size

    mixed = tl.zeros((BQ * BH, DV_PAD), tl.float32)
    largest = tl.full((BQ * BH,), float("-inf"), tl.float32)
    total = tl.zeros((BQ * BH,), tl.float32)
    begin, end = walk(tile, union, block_of, first_block, N, BLOCK, BQ)
    for step in range(begin * (BLOCK // BN), end * (BLOCK // BN)):
        block = block_at(step // (BLOCK // BN), union)
        start, stop = block_bounds(block, block_start, N, BLOCK)
        column = step % (BLOCK // BN) * BN + tl.arange(0, BN).to(tl.int64)
        key, inside = start + column, start + column < stop
        k_tile = load_rows(k, key * k_strides[2], inside, k_strides[3], D, D_PAD)  # [BN, D]
        v_tile = load_rows(v, key * v_strides[2], inside, v_strides[3], DV, DV_PAD)  # [BN, DV]
        seen = visible_keys(query, first, valid, listed, block, start, stop)
        logits = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee")  # [BQ * BH, BN]
        logits = tl.where(column.to(tl.int32)[None, :] < seen[:, None], logits, float("-inf"))
        now, shift = online_softmax(logits, largest)
        weights = tl.exp2((logits - shift[:, None]) * scale_log2)
        rescale = tl.exp2((largest - shift) * scale_log2)
        total = total * rescale + tl.sum(weights, 1)
        mixed = tl.dot(weights.to(v_tile.dtype), v_tile, mixed * rescale[:, None], input_precision="ieee")
        largest = now

    row = (pair * R + head) * N + query
    total = tl.where(total == 0, 1.0, total)  # an empty row: out 0, lse -inf
    store_rows(out, row * DV, valid, mixed / total[:, None], DV, DV_PAD)
    tl.store(lse + row, largest * scale + tl.log2(total) * LN_2, mask=valid)


@triton.jit(do_not_specialize=LENGTHS)
def forward_key_kernel(
    q, k, v, edges, tasks, block_start, partial, partial_largest, partial_total, q_strides, k_strides, v_strides, N,
    Hidx, first_query, edge_count, task_count, scale_log2,
    R: tl.constexpr, KV_SHARE: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, DV: tl.constexpr,
    DV_PAD: tl.constexpr, BLOCK: tl.constexpr, SLOTS: tl.constexpr, BQ: tl.constexpr, BH: tl.constexpr,
    CHUNKS: tl.constexpr,
):  # fmt: skip
    """Softmax over one key block for the queries of a task, BQ of them times BH heads at a time."""
    _, task, chunk, pair = task_program(task_count, CHUNKS, 1)
    batch, index_head = pair // Hidx, pair % Hidx
    block, begin, end = load_task(tasks, edges, pair, task, task_count)
    start, stop = block_bounds(block, block_start, N, BLOCK)
    key = start + tl.arange(0, BLOCK).to(tl.int64)
    q += batch * q_strides[0] + index_head * R * q_strides[1]
    k += batch * k_strides[0] + index_head // KV_SHARE * k_strides[1]
    v += batch * v_strides[0] + index_head // KV_SHARE * v_strides[1]
    k_tile = load_rows(k, key * k_strides[2], key < stop, k_strides[3], D, D_PAD)  # [BLOCK, D]
    v_tile = load_rows(v, key * v_strides[2], key < stop, v_strides[3], DV, DV_PAD)  # [BLOCK, DV]
    for at in range(begin, end, BQ):
        edge, query, head, valid = edge_tile(at, end, chunk, edges, pair * edge_count, SLOTS, R, BQ, BH)
        query += first_query
        q_tile = load_rows(q, head * q_strides[1] + query * q_strides[2], valid, q_strides[3], D, D_PAD)
        seen = visible_keys(query, block, valid, None, block, start, stop)
        logits = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee")  # [BQ * BH, BLOCK]
        logits = tl.where(tl.arange(0, BLOCK)[None, :] < seen[:, None], logits, float("-inf"))
        largest, shift = online_softmax(logits, float("-inf"))
        weights = tl.exp2((logits - shift[:, None]) * scale_log2)
        total = tl.sum(weights, 1)
        mixed = tl.dot(weights.to(v_tile.dtype), v_tile, input_precision="ieee")  # [BQ * BH, DV]
        row = (pair * edge_count + edge) * R + head
        store_rows(partial, row * DV, valid, mixed / tl.where(valid, total, 1.0)[:, None], DV, DV_PAD)
        tl.store(partial_largest + row, largest, mask=valid)
        tl.store(partial_total + row, total, mask=valid)


@triton.jit(do_not_specialize=LENGTHS)
def combine_kernel(
    partial, partial_largest, partial_total, out, lse, N, queries, first_query, scale, scale_log2,
    SLOTS: tl.constexpr, R: tl.constexpr, DV: tl.constexpr, DV_PAD: tl.constexpr, CHUNKS: tl.constexpr,
    BQ: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    """Merges the slots of BQ queries times BH heads, in the order of the slots."""
    tile, chunk, pair = query_program(queries, BQ, CHUNKS)
    query, head, valid = row_tile(tile, chunk, queries, R, BQ, BH)
    first = (pair * queries + query) * SLOTS * R + head  # of slot 0; that of the next slot is R further

    largest = tl.full((BQ * BH,), float("-inf"), tl.float32)
    for slot in range(SLOTS):
        one = tl.load(partial_largest + first + slot * R, mask=valid, other=float("-inf"))
        largest = tl.maximum(largest, one)
    shift = tl.where(largest == float("-inf"), 0.0, largest)
    mixed = tl.zeros((BQ * BH, DV_PAD), tl.float32)
    total = tl.zeros((BQ * BH,), tl.float32)
    for slot in range(SLOTS):
        row = first + slot * R
        one = tl.load(partial_largest + row, mask=valid, other=float("-inf"))
        weight = tl.load(partial_total + row, mask=valid, other=0.0) * tl.exp2((one - shift) * scale_log2)
        value = load_rows(partial, row * DV, valid & (weight != 0), 1, DV, DV_PAD)  # [BQ * BH, DV]
        mixed += weight[:, None] * value.to(tl.float32)
        total += weight

    row = (pair * R + head) * N + first_query + query
    total = tl.where(total == 0, 1.0, total)  # an empty row: out 0, lse -inf
    store_rows(out, row * DV, valid, mixed / total[:, None], DV, DV_PAD)
    tl.store(lse + row, largest * scale + tl.log2(total) * LN_2, mask=valid)
