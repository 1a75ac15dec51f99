"""The KL loss of the index branch: value and d index_q in one query-major walk, d index_k key-major.

The teacher is the mean over the heads of a selection of their probabilities, computed again from q, k and the LSE; the
student's normaliser is computed by a pass over the index keys. Gradients are sums of (student - teacher). As the
upstream gradient of a row is a factor of its d index_q, the forward pass can sum that before the factor is known: a
training step computes the teacher, which is nearly all of the work, twice.
"""

import torch
import triton
import triton.language as tl

from msa_ref.problem import BlockGeometry, Problem
from msa_triton.backward import sum_tasks
from msa_triton.config import SMALLEST_DOT, choose_tile, padded
from msa_triton.launch import computable, launch, place, target_of
from msa_triton.normalizer import normalizer
from msa_triton.schedule import QueryWalk, attention_sizes, key_tasks, ranges, slot_count, visible_ids
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

MANY = tl.constexpr(512)  # edges at a time where only their upstream gradients are read


def index_loss_forward(
    q, k, lse, index_q, index_k, block_indices, problem: Problem, geometry: BlockGeometry, gradients: bool
):
    """KL of validated tensors and, for the backward pass, what the walk over the teacher gives besides.

    Returns:
        kl: [B, Hidx, N] float32.
        row_sums: [B, Hidx, N, Di] in the dtype of the inputs, the sum over j of (student - teacher) index_k[j]. Without
            the upstream gradient, about 1 / (B Hidx N), and index_scale these are at most twice as large as index_k.
        student: [2, B, Hidx, N] float32, the student's (shift, log_total) as `normalizer` has them.
        The last two are empty unless `gradients`; the kernel then does nothing for them.
    """
    q, k, index_q, index_k = computable(q, k, index_q, index_k)
    ids = visible_ids(block_indices, geometry)
    rows = normalizer(q, k, lse, ids, problem, geometry)
    kl = torch.empty(index_q.shape[:3], dtype=torch.float32, device=q.device)
    row_sums, student = None, (None, None)
    if gradients:
        row_sums, student = index_q.new_empty(index_q.shape), kl.new_empty((2, *kl.shape))
    _query_major(q, k, index_q, index_k, rows, (kl, row_sums, *student), ids, problem, geometry)
    if not gradients:
        return kl, kl.new_empty(0), kl.new_empty(0)
    return kl, row_sums.to(problem.dtype), student


def index_loss_backward(
    dkl, saved, q, k, lse, index_q, index_k, block_indices, problem: Problem, geometry: BlockGeometry
):
    """(d index_q, d index_k) for the upstream gradient dkl [B, Hidx, N] (SPEC 7).

    saved: (row_sums, student) of `index_loss_forward`; if they are empty it runs again.
    """
    row_sums, student = saved
    if not row_sums.numel():
        inputs = q, k, lse, index_q, index_k, block_indices
        _, row_sums, student = index_loss_forward(*inputs, problem, geometry, gradients=True)
    dkl = dkl.float().contiguous()
    # The product is taken in float32, the wider of the two types; the sums were rounded when they were stored.
    factor = (dkl * problem.index_scale)[..., None]
    dindex_q = torch.mul(row_sums, factor, out=torch.empty_like(row_sums))
    q, k, index_q, index_k = computable(q, k, index_q, index_k)
    ids = visible_ids(block_indices, geometry)
    rows = normalizer(q, k, lse, ids, problem, geometry)
    dindex_k = _key_major(q, k, index_q, index_k, rows, (*student, dkl), ids, problem, geometry)
    return dindex_q, dindex_k.to(problem.dtype)


def _sizes(problem: Problem) -> dict[str, int]:
    sizes = {name: attention_sizes(problem)[name] for name in ("R", "KV_SHARE", "BLOCK", "D", "D_PAD")}
    return {**sizes, "KEY_SHARE": problem.index_group, "DI": problem.index_width, "DI_PAD": padded(problem.index_width)}


def _query_major(q, k, index_q, index_k, rows, results, ids, problem: Problem, geometry: BlockGeometry) -> None:
    """Fills the results: kl, and row_sums, shift and log_total unless they are None."""
    sizes = _sizes(problem)
    width = sizes["D_PAD"] + sizes["DI_PAD"]
    tile = choose_tile(
        "index_query", target_of(q), q.element_size(), block=problem.block_size, row_width=sizes["D_PAD"],
        key_width=width,
    )  # fmt: skip
    walk = QueryWalk(ids, tile, problem, geometry, least_queries=SMALLEST_DOT)
    launch(
        index_query_kernel, walk.tiles * problem.index_heads * problem.batch, q, k, index_q, index_k, *rows,
        *results, *walk.arguments, q.stride(), k.stride(), index_q.stride(), index_k.stride(), problem.tokens,
        problem.index_heads, problem.scale * LOG2_E, problem.index_scale * LOG2_E, BN=tile.keys, **sizes,
        **walk.constants, **tile.options,
    )  # fmt: skip


def _key_major(q, k, index_q, index_k, rows, student, ids, problem: Problem, geometry: BlockGeometry) -> torch.Tensor:
    """d index_k [B, Hik, N, Di]; student: its shift and log_total, and the upstream gradient."""
    sizes, block = _sizes(problem), problem.block_size
    width = sizes["D_PAD"] + sizes["DI_PAD"]
    tile = choose_tile("index_key", target_of(q), q.element_size(), block=block, row_width=width, key_width=width)
    work, (block_start, _, _) = key_tasks(ids, geometry, q.device), place(geometry, q.device)
    task_count, share = work.tasks.shape[1], problem.index_group
    dindex_k = index_k.new_empty(index_k.shape)
    task_bytes = 4 * block * problem.index_width
    for start, stop in ranges(problem.batch * problem.index_key_heads, share * task_count * task_bytes):
        partials = (stop - start) * share * task_count
        part = q.new_empty(partials, block, problem.index_width, dtype=torch.float32)
        launch(
            index_key_kernel, partials * (block // tile.keys), q, k, index_q, index_k, *rows, *student, work.edges,
            work.tasks, block_start, part, q.stride(), k.stride(), index_q.stride(), index_k.stride(), problem.tokens,
            problem.index_heads, start * share, work.edge_count, task_count, problem.scale * LOG2_E,
            problem.index_scale * LOG2_E, SLOTS=slot_count(ids), BQ=tile.rows, BN=tile.keys, **sizes, **tile.options,
        )  # fmt: skip
        sum_tasks(part, work, dindex_k, start, stop, share, 1, problem.index_scale, block_start, geometry)
    return dindex_k


@triton.jit
def teacher(
    q, k_tile, shift, log_total, pair, tile, q_strides, N, Hidx, scale_log2,
    R: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, BQ: tl.constexpr, BH: tl.constexpr, BN: tl.constexpr,
    CHUNKS: tl.constexpr,
):  # fmt: skip
    """[BQ, BN]: the mean over the R heads of their probabilities, not masked."""
    mean = tl.zeros((BQ, BN), tl.float32)
    for chunk in tl.static_range(CHUNKS):
        query, head, valid = row_tile(tile, chunk, N, R, BQ, BH)
        q_row = pair // Hidx * q_strides[0] + (pair % Hidx * R + head) * q_strides[1] + query * q_strides[2]
        q_tile = load_rows(q, q_row, valid, q_strides[3], D, D_PAD)  # [BQ * BH, D]
        row = (pair * R + head) * N + query
        row_shift = tl.load(shift + row, mask=valid, other=0.0)
        row_log_total = tl.load(log_total + row, mask=valid, other=0.0)
        logits = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee")  # [BQ * BH, BN]
        p = tl.exp2((logits - row_shift[:, None]) * scale_log2 - row_log_total[:, None])
        p = tl.where(valid[:, None], p, 0.0)
        mean += tl.sum(tl.reshape(p, (BQ, BH, BN)), 1)
    return mean / R


@triton.jit(do_not_specialize=LENGTHS)
def index_query_kernel(
    q, k, index_q, index_k, shift, log_total, kl, row_sums, index_shift, index_log_total, ids, unions, union_size,
    block_start, block_of, first_block, q_strides, k_strides, index_q_strides, index_k_strides, N, Hidx, scale_log2,
    index_scale_log2,
    R: tl.constexpr, KV_SHARE: tl.constexpr, KEY_SHARE: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr,
    D_PAD: tl.constexpr, DI: tl.constexpr, DI_PAD: tl.constexpr, SLOTS: tl.constexpr, SLOTS_PAD: tl.constexpr,
    BQ: tl.constexpr, BH: tl.constexpr, BN: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """KL of BQ queries of one index head and, unless row_sums is None, all of d index_q but its factors.

    The first walk finds the student's normaliser. The second has the teacher and the student at hand.
    """
    tile, _, pair = query_program(N, BQ, 1)
    batch, index_head = pair // Hidx, pair % Hidx
    query, _, valid = row_tile(tile, 0, N, 1, BQ, 1)
    first = document_block(query, valid, first_block)
    index_row = batch * index_q_strides[0] + index_head * index_q_strides[1] + query * index_q_strides[2]
    index_tile = load_rows(index_q, index_row, valid, index_q_strides[3], DI, DI_PAD)  # [BQ, DI]
    k += batch * k_strides[0] + index_head // KV_SHARE * k_strides[1]
    index_k += batch * index_k_strides[0] + index_head // KEY_SHARE * index_k_strides[1]
    listed, union = ids, unions
    if ids is not None:
        listed = load_ids(ids, pair, query, valid, N, SLOTS, SLOTS_PAD)  # [rows, SLOTS]
        union += (pair * tl.cdiv(N, BQ) + tile) * union_size
    begin, end = walk(tile, union, block_of, first_block, N, BLOCK, BQ)

    largest = tl.full((BQ,), float("-inf"), tl.float32)
    total = tl.zeros((BQ,), tl.float32)
    for step in range(begin * (BLOCK // BN), end * (BLOCK // BN)):
        block = block_at(step // (BLOCK // BN), union)
        start, stop = block_bounds(block, block_start, N, BLOCK)
        column = step % (BLOCK // BN) * BN + tl.arange(0, BN).to(tl.int64)
        key = start + column
        index_k_tile = load_rows(index_k, key * index_k_strides[2], key < stop, index_k_strides[3], DI, DI_PAD)
        seen = visible_keys(query, first, valid, listed, block, start, stop)
        logits = tl.dot(index_tile, tl.trans(index_k_tile), input_precision="ieee")  # [BQ, BN]
        logits = tl.where(column.to(tl.int32)[None, :] < seen[:, None], logits, float("-inf"))
        now, base = online_softmax(logits, largest)
        total *= tl.exp2((largest - base) * index_scale_log2)
        total += tl.sum(tl.exp2((logits - base[:, None]) * index_scale_log2), 1)
        largest = now
    largest = tl.where(total == 0, 0.0, largest)
    log_sum = tl.log2(tl.where(total == 0, 1.0, total))

    loss = tl.zeros((BQ,), tl.float32)
    gradient = tl.zeros((BQ, DI_PAD), tl.float32)
    for step in range(begin * (BLOCK // BN), end * (BLOCK // BN)):
        block = block_at(step // (BLOCK // BN), union)
        start, stop = block_bounds(block, block_start, N, BLOCK)
        column = step % (BLOCK // BN) * BN + tl.arange(0, BN).to(tl.int64)
        key, inside = start + column, start + column < stop
        k_tile = load_rows(k, key * k_strides[2], inside, k_strides[3], D, D_PAD)  # [BN, D]
        index_k_tile = load_rows(index_k, key * index_k_strides[2], inside, index_k_strides[3], DI, DI_PAD)
        seen = visible_keys(query, first, valid, listed, block, start, stop)
        keep = column.to(tl.int32)[None, :] < seen[:, None]
        p_bar = teacher(
            q, k_tile, shift, log_total, pair, tile, q_strides, N, Hidx, scale_log2, R, D, D_PAD, BQ, BH, BN, CHUNKS
        )
        logits = tl.dot(index_tile, tl.trans(index_k_tile), input_precision="ieee")  # [BQ, BN]
        student = (logits - largest[:, None]) * index_scale_log2 - log_sum[:, None]  # log2 of its probability
        ratio = tl.log2(tl.where(keep & (p_bar > 0), p_bar, 1.0)) - tl.where(keep, student, 0.0)
        loss += tl.sum(tl.where(keep, p_bar, 0.0) * ratio, 1)
        if row_sums is not None:
            ds = tl.where(keep, tl.exp2(student) - p_bar, 0.0)
            gradient = tl.dot(ds.to(index_k_tile.dtype), index_k_tile, gradient, input_precision="ieee")

    row = pair * N + query
    tl.store(kl + row, loss * LN_2, mask=valid)
    if row_sums is not None:
        store_rows(row_sums, row * DI, valid, gradient, DI, DI_PAD)
        tl.store(index_shift + row, largest, mask=valid)
        tl.store(index_log_total + row, log_sum, mask=valid)


@triton.jit(do_not_specialize=LENGTHS)
def index_key_kernel(
    q, k, index_q, index_k, shift, log_total, index_shift, index_log_total, upstream, edges, tasks, block_start, part,
    q_strides, k_strides, index_q_strides, index_k_strides, N, Hidx, first_pair, edge_count, task_count, scale_log2,
    index_scale_log2,
    R: tl.constexpr, KV_SHARE: tl.constexpr, KEY_SHARE: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr,
    D_PAD: tl.constexpr, DI: tl.constexpr, DI_PAD: tl.constexpr, SLOTS: tl.constexpr, BQ: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    """What a task adds to d index_k (without the scale) of BN keys of its block: BQ queries at a time, head by head.

    The teacher is subtracted from the student where that stands: a tile of its own would not fit the registers.
    Upstream gradients, about 1 / (B * Hidx * N) each, would vanish in float16: the largest of the task divides them.
    """
    piece, task, _, pair = task_program(task_count, 1, BLOCK // BN)
    pair += first_pair
    batch, index_head = pair // Hidx, pair % Hidx
    block, begin, end = load_task(tasks, edges, pair, task, task_count)
    start, stop = block_bounds(block, block_start, N, BLOCK)
    start += piece * BN
    key = start + tl.arange(0, BN).to(tl.int64)
    q += batch * q_strides[0]
    k += batch * k_strides[0] + index_head // KV_SHARE * k_strides[1]
    index_q += batch * index_q_strides[0] + index_head * index_q_strides[1]
    index_k += batch * index_k_strides[0] + index_head // KEY_SHARE * index_k_strides[1]
    k_tile = load_rows(k, key * k_strides[2], key < stop, k_strides[3], D, D_PAD)  # [BN, D]
    index_k_tile = load_rows(index_k, key * index_k_strides[2], key < stop, index_k_strides[3], DI, DI_PAD)

    largest = tl.zeros((MANY,), tl.float32)
    for at in range(begin, end, MANY):
        edge, query, no_head, valid = edge_tile(at, end, 0, edges, pair * edge_count, SLOTS, 1, MANY, 1)
        largest = tl.maximum(largest, tl.abs(tl.load(upstream + pair * N + query, mask=valid, other=0.0)))
    peak = tl.max(largest, 0)
    unit = 1.0 / tl.where(peak > 0, peak, 1.0)

    gradient = tl.zeros((BN, DI_PAD), tl.float32)
    for at in tl.range(begin, end, BQ, num_stages=1):
        edge, query, no_head, valid = edge_tile(at, end, 0, edges, pair * edge_count, SLOTS, 1, BQ, 1)
        index_row = query * index_q_strides[2]
        index_tile = load_rows(index_q, index_row, valid, index_q_strides[3], DI, DI_PAD)  # [BQ, DI]
        row = pair * N + query
        row_shift = tl.load(index_shift + row, mask=valid, other=0.0)
        row_log_total = tl.load(index_log_total + row, mask=valid, other=0.0)
        logits = tl.dot(index_k_tile, tl.trans(index_tile), input_precision="ieee")  # [BN, BQ]
        ds = tl.exp2((logits - row_shift[None, :]) * index_scale_log2 - row_log_total[None, :])  # the student
        for head in range(R):
            q_row = (index_head * R + head) * q_strides[1] + query * q_strides[2]
            q_tile = load_rows(q, q_row, valid, q_strides[3], D, D_PAD)  # [BQ, D]
            row = (pair * R + head) * N + query
            row_shift = tl.load(shift + row, mask=valid, other=0.0)
            row_log_total = tl.load(log_total + row, mask=valid, other=0.0)
            logits = tl.dot(k_tile, tl.trans(q_tile), input_precision="ieee")  # [BN, BQ]
            ds -= tl.exp2((logits - row_shift[None, :]) * scale_log2 - row_log_total[None, :]) * (1 / R)
        seen = visible_keys(query, block, valid, None, block, start, stop)
        ds = tl.where(tl.arange(0, BN)[:, None] < seen[None, :], ds, 0.0)
        ds *= (tl.load(upstream + pair * N + query, mask=valid, other=0.0) * unit)[None, :]
        gradient = tl.dot(ds.to(index_tile.dtype), index_tile, gradient, input_precision="ieee")
    row = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN).to(tl.int64)
    store_rows(part, row * DI, key < stop, gradient * peak, DI, DI_PAD)
