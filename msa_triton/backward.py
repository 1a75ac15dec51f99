"""The backward pass of sparse attention: delta, dq query-major, dk and dv key-major; no atomic additions.

With p of the forward pass: dp = dout . v, ds = p (dp - delta); dq = scale sum ds k, dk = scale sum ds q, and
dv = sum p dout.
"""

import torch
import triton
import triton.language as tl

from msa_ref.problem import BlockGeometry, Problem
from msa_triton.config import choose_tile, padded
from msa_triton.launch import computable, launch, place, target_of
from msa_triton.normalizer import normalizer
from msa_triton.schedule import QueryWalk, attention_sizes, key_tasks, ranges, slot_count, visible_ids
from msa_triton.tiles import (
    LENGTHS,
    LOG2_E,
    block_at,
    block_bounds,
    document_block,
    edge_tile,
    load_ids,
    load_rows,
    load_task,
    query_program,
    row_tile,
    store_rows,
    task_program,
    visible_keys,
    walk,
)  # fmt: skip


def attention_backward(dout, q, k, v, out, lse, block_indices, problem: Problem, geometry: BlockGeometry):
    """(dq, dk, dv) of validated tensors (SPEC 7)."""
    dout, q, k, v, out = computable(dout, q, k, v, out)
    ids = visible_ids(block_indices, geometry)
    shift, log_total = normalizer(q, k, lse, ids, problem, geometry)
    rows = (shift, log_total, row_delta(dout, out, problem))
    dq = query_gradient(dout, q, k, v, rows, ids, problem, geometry)
    dk, dv = key_gradients(dout, q, k, v, rows, ids, problem, geometry)
    return dq.to(problem.dtype), dk.to(problem.dtype), dv.to(problem.dtype)


def row_delta(dout, out, problem: Problem) -> torch.Tensor:
    """float32 [B, H, N]: delta = sum over the width of out * dout."""
    sizes, count = attention_sizes(problem), problem.batch * problem.heads * problem.tokens
    tile = choose_tile("delta", target_of(out), 4, block=1, row_width=sizes["DV_PAD"], key_width=0)
    delta = torch.empty(out.shape[:3], dtype=torch.float32, device=out.device)
    launch(
        delta_kernel, triton.cdiv(count, tile.rows), dout, out, delta, dout.stride(), out.stride(), count,
        problem.tokens, problem.heads, DV=sizes["DV"], DV_PAD=sizes["DV_PAD"], ROWS=tile.rows, **tile.options,
    )  # fmt: skip
    return delta


def query_gradient(dout, q, k, v, rows, ids, problem: Problem, geometry: BlockGeometry) -> torch.Tensor:
    """dq [B, H, N, D]."""
    sizes = attention_sizes(problem)
    width = sizes["D_PAD"] + sizes["DV_PAD"]
    tile = choose_tile(
        "dq", target_of(q), q.element_size(), block=problem.block_size, row_width=width, key_width=width
    )
    walk = QueryWalk(ids, tile, problem, geometry)
    dq = q.new_empty(q.shape)
    launch(
        dq_kernel, walk.programs, q, k, v, dout, *rows, *walk.arguments, dq, q.stride(), k.stride(), v.stride(),
        dout.stride(), problem.tokens, problem.index_heads, problem.scale, problem.scale * LOG2_E, BN=tile.keys,
        **sizes, **walk.constants, **tile.options,
    )  # fmt: skip
    return dq


def key_gradients(dout, q, k, v, rows, ids, problem: Problem, geometry: BlockGeometry):
    """(dk [B, Hkv, N, D], dv [B, Hkv, N, Dv])."""
    sizes, share, block = attention_sizes(problem), problem.heads_per_index, problem.block_size
    width = sizes["D_PAD"] + sizes["DV_PAD"]
    tile = choose_tile("dkdv", target_of(q), q.element_size(), block=block, row_width=width, key_width=width)
    split = tile.split(share)
    chunks = triton.cdiv(share, split["BH"])
    work, (block_start, _, _) = key_tasks(ids, geometry, q.device), place(geometry, q.device)
    task_count, kv_share = work.tasks.shape[1], problem.index_heads_per_kv
    dk, dv = k.new_empty(k.shape), v.new_empty(v.shape)
    task_bytes = 4 * block * (problem.width + problem.value_width)
    for start, stop in ranges(problem.batch * problem.kv_heads, kv_share * chunks * task_count * task_bytes):
        partials = (stop - start) * kv_share * chunks * task_count
        dk_part = q.new_empty(partials, block, problem.width, dtype=torch.float32)
        dv_part = q.new_empty(partials, block, problem.value_width, dtype=torch.float32)
        launch(
            dkdv_kernel, partials * (block // tile.keys), q, k, v, dout, *rows, work.edges, work.tasks, block_start,
            dk_part, dv_part, q.stride(), k.stride(), v.stride(), dout.stride(), problem.tokens, problem.index_heads,
            start * kv_share, work.edge_count, task_count, problem.scale * LOG2_E, SLOTS=slot_count(ids), CHUNKS=chunks,
            BN=tile.keys, **sizes, **split, **tile.options,
        )  # fmt: skip
        for part, gradient, factor in ((dk_part, dk, problem.scale), (dv_part, dv, 1.0)):
            sum_tasks(part, work, gradient, start, stop, kv_share, chunks, factor, block_start, geometry)
    return dk, dv


def sum_tasks(part, work, gradient, start, stop, pairs, chunks, factor, block_start, geometry: BlockGeometry) -> None:
    """Adds up what the tasks of each block found for the heads [start, stop) of a gradient, in the order of the tasks.

    Args:
        part: [heads * pairs * chunks * tasks, BLOCK, width] float32; pairs: index heads that share one head.
        gradient: [B, heads, N, width], contiguous. factor: of the sum.
    """
    _, block, width = part.shape
    pad = padded(width)
    tile = choose_tile("sum_tasks", target_of(gradient), 4, block=1, row_width=pad, key_width=0)
    rows = min(tile.rows, block)
    launch(
        sum_tasks_kernel, (stop - start) * geometry.blocks * (block // rows), part, work.offsets, block_start, gradient,
        gradient.shape[2], geometry.blocks, start, work.tasks.shape[1], factor, PAIRS=pairs, CHUNKS=chunks,
        DENSE=work.edges is None, WIDTH=width, PAD=pad, BLOCK=block, ROWS=rows, **tile.options,
    )  # fmt: skip


@triton.jit(do_not_specialize=LENGTHS)
def delta_kernel(
    dout, out, delta, dout_strides, out_strides, count, N, H,
    DV: tl.constexpr, DV_PAD: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """ROWS rows of all B * H * N."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS).to(tl.int64)
    valid, batch, head, query = row < count, row // N // H, row // N % H, row % N
    at = batch * dout_strides[0] + head * dout_strides[1] + query * dout_strides[2]
    dout_tile = load_rows(dout, at, valid, dout_strides[3], DV, DV_PAD).to(tl.float32)
    at = batch * out_strides[0] + head * out_strides[1] + query * out_strides[2]
    out_tile = load_rows(out, at, valid, out_strides[3], DV, DV_PAD).to(tl.float32)
    tl.store(delta + row, tl.sum(dout_tile * out_tile, 1), mask=valid)


@triton.jit(do_not_specialize=LENGTHS)
def dq_kernel(
    q, k, v, dout, shift, log_total, delta, ids, unions, union_size, block_start, block_of, first_block, dq, q_strides,
    k_strides, v_strides, dout_strides, N, Hidx, scale, scale_log2,
    R: tl.constexpr, KV_SHARE: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, DV: tl.constexpr,
    DV_PAD: tl.constexpr, BLOCK: tl.constexpr, SLOTS: tl.constexpr, SLOTS_PAD: tl.constexpr, BQ: tl.constexpr,
    BH: tl.constexpr, BN: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """dq of BQ queries times BH heads, walking the key blocks as the forward pass does."""
    tile, chunk, pair = query_program(N, BQ, CHUNKS)
    batch, index_head = pair // Hidx, pair % Hidx
    query, head, valid = row_tile(tile, chunk, N, R, BQ, BH)
    first = document_block(query, valid, first_block)
    q_row = batch * q_strides[0] + (index_head * R + head) * q_strides[1] + query * q_strides[2]
    q_tile = load_rows(q, q_row, valid, q_strides[3], D, D_PAD)  # [BQ * BH, D]
    dout_row = batch * dout_strides[0] + (index_head * R + head) * dout_strides[1] + query * dout_strides[2]
    dout_tile = load_rows(dout, dout_row, valid, dout_strides[3], DV, DV_PAD)  # [BQ * BH, DV]
    row = (pair * R + head) * N + query
    row_shift = tl.load(shift + row, mask=valid, other=0.0)
    row_log_total = tl.load(log_total + row, mask=valid, other=0.0)
    row_delta = tl.load(delta + row, mask=valid, other=0.0)
    k += batch * k_strides[0] + index_head // KV_SHARE * k_strides[1]
    v += batch * v_strides[0] + index_head // KV_SHARE * v_strides[1]
    listed, union = ids, unions
    if ids is not None:
        listed = load_ids(ids, pair, query, valid, N, SLOTS, SLOTS_PAD)  # [rows, SLOTS]
        union += (pair * tl.cdiv(N, BQ) + tile) * union_size

    dq_tile = tl.zeros((BQ * BH, D_PAD), tl.float32)
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
        p = tl.exp2((logits - row_shift[:, None]) * scale_log2 - row_log_total[:, None])
        dp = tl.dot(dout_tile, tl.trans(v_tile), input_precision="ieee")
        ds = tl.where(column.to(tl.int32)[None, :] < seen[:, None], p * (dp - row_delta[:, None]), 0.0)
        dq_tile = tl.dot(ds.to(k_tile.dtype), k_tile, dq_tile, input_precision="ieee")
    store_rows(dq, row * D, valid, dq_tile * scale, D, D_PAD)


@triton.jit(do_not_specialize=LENGTHS)
def dkdv_kernel(
    q, k, v, dout, shift, log_total, delta, edges, tasks, block_start, dk_part, dv_part, q_strides, k_strides,
    v_strides, dout_strides, N, Hidx, first_pair, edge_count, task_count, scale_log2,
    R: tl.constexpr, KV_SHARE: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, DV: tl.constexpr,
    DV_PAD: tl.constexpr, BLOCK: tl.constexpr, SLOTS: tl.constexpr, BQ: tl.constexpr, BH: tl.constexpr,
    BN: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """What a task adds to dk (without the scale) and dv of BN keys of its block: BQ queries times BH heads at a time.

    The mask has a branch of its own, and delta is loaded where it is used, because registers are short: the two sums
    alone take 128 of a thread's 255 where BN, D and Dv are 128.
    """
    piece, task, chunk, pair = task_program(task_count, CHUNKS, BLOCK // BN)
    pair += first_pair
    batch, index_head = pair // Hidx, pair % Hidx
    block, begin, end = load_task(tasks, edges, pair, task, task_count)
    start, stop = block_bounds(block, block_start, N, BLOCK)
    start += piece * BN
    key = start + tl.arange(0, BN).to(tl.int64)
    q += batch * q_strides[0] + index_head * R * q_strides[1]
    dout += batch * dout_strides[0] + index_head * R * dout_strides[1]
    k += batch * k_strides[0] + index_head // KV_SHARE * k_strides[1]
    v += batch * v_strides[0] + index_head // KV_SHARE * v_strides[1]
    k_tile = load_rows(k, key * k_strides[2], key < stop, k_strides[3], D, D_PAD)  # [BN, D]
    v_tile = load_rows(v, key * v_strides[2], key < stop, v_strides[3], DV, DV_PAD)  # [BN, DV]

    dk_tile = tl.zeros((BN, D_PAD), tl.float32)
    dv_tile = tl.zeros((BN, DV_PAD), tl.float32)
    for at in range(begin, end, BQ):
        edge, query, head, valid = edge_tile(at, end, chunk, edges, pair * edge_count, SLOTS, R, BQ, BH)
        q_tile = load_rows(q, head * q_strides[1] + query * q_strides[2], valid, q_strides[3], D, D_PAD)
        dout_row = head * dout_strides[1] + query * dout_strides[2]
        dout_tile = load_rows(dout, dout_row, valid, dout_strides[3], DV, DV_PAD)  # [BQ * BH, DV]
        row = (pair * R + head) * N + query
        row_shift = tl.load(shift + row, mask=valid, other=0.0)
        row_log_total = tl.load(log_total + row, mask=valid, other=0.0)
        seen = visible_keys(query, block, valid, None, block, start, stop)
        logits = tl.dot(k_tile, tl.trans(q_tile), input_precision="ieee")  # [BN, BQ * BH]
        p = tl.exp2((logits - row_shift[None, :]) * scale_log2 - row_log_total[None, :])
        if tl.min(seen, 0) < BN:
            p = tl.where(tl.arange(0, BN)[:, None] < seen[None, :], p, 0.0)
        dv_tile = tl.dot(p.to(dout_tile.dtype), dout_tile, dv_tile, input_precision="ieee")
        row_delta = tl.load(delta + row, mask=valid, other=0.0)
        dp = tl.dot(v_tile, tl.trans(dout_tile), input_precision="ieee")  # [BN, BQ * BH]
        ds = p * (dp - row_delta[None, :])
        dk_tile = tl.dot(ds.to(q_tile.dtype), q_tile, dk_tile, input_precision="ieee")

    row = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN).to(tl.int64)
    store_rows(dk_part, row * D, key < stop, dk_tile, D, D_PAD)
    store_rows(dv_part, row * DV, key < stop, dv_tile, DV, DV_PAD)


@triton.jit(do_not_specialize=LENGTHS)
def sum_tasks_kernel(
    part, offsets, block_start, gradient, N, blocks, first_head, task_count, factor,
    PAIRS: tl.constexpr, CHUNKS: tl.constexpr, DENSE: tl.constexpr, WIDTH: tl.constexpr, PAD: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """ROWS rows of one key block of one head: the sum over the index heads that share it and their tasks."""
    program = tl.program_id(0).to(tl.int64)
    piece, block = program % (BLOCK // ROWS), program // (BLOCK // ROWS) % blocks
    head = program // (BLOCK // ROWS) // blocks  # counted from first_head
    start, stop = block_bounds(block, block_start, N, BLOCK)
    column = piece * ROWS + tl.arange(0, ROWS).to(tl.int64)
    inside = start + column < stop
    total = tl.zeros((ROWS, PAD), tl.float32)
    for share in range(PAIRS):
        pair = head * PAIRS + share
        counted = offsets
        if not DENSE:
            counted += ((first_head + head) * PAIRS + share) * (blocks + 1)
        begin, end = tl.load(counted + block).to(tl.int64), tl.load(counted + block + 1).to(tl.int64)
        for chunk in range(CHUNKS):
            for task in range(begin, end):
                row = ((pair * CHUNKS + chunk) * task_count + task) * BLOCK + column
                total += load_rows(part, row * WIDTH, inside, 1, WIDTH, PAD)  # [ROWS, WIDTH]
    store_rows(gradient, ((first_head + head) * N + start + column) * WIDTH, inside, total * factor, WIDTH, PAD)
