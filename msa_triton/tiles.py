"""What the kernels share: where a block lies, what a row sees of it, loads and stores of row tiles.

Indices that enter an address are int64 from the start: 2**20 tokens of 64 heads of width 128 are 2**33 elements.
"""

import math

import triton
import triton.language as tl

# Triton would compile a kernel again for a length that is 1 or divides by 16.
LENGTHS = (
    "N", "Hidx", "H", "union_size", "edge_count", "task_count", "first_pair", "first_query", "first_head", "queries",
    "blocks", "count", "local_blocks", "init_blocks",
)  # fmt: skip
LOG2_E = math.log2(math.e)
LN_2 = tl.constexpr(math.log(2))


@triton.jit
def block_bounds(block, block_start, N, BLOCK: tl.constexpr):
    """[start, stop): the tokens of a key block; block_start is None unless documents are packed."""
    if block_start is None:
        start = block * BLOCK
        stop = tl.minimum(start + BLOCK, N)
    else:
        start = tl.load(block_start + block)
        stop = tl.load(block_start + block + 1)
    return start, stop


@triton.jit
def own_block(query, valid, block_of, BLOCK: tl.constexpr):
    """The block that holds each query."""
    block = query // BLOCK
    if block_of is not None:
        block = tl.load(block_of + query, mask=valid, other=0)
    return block


@triton.jit
def document_block(query, valid, first_block):
    """The first block of each query's document."""
    block = query * 0
    if first_block is not None:
        block = tl.load(first_block + query, mask=valid, other=0)
    return block


@triton.jit
def visible_keys(query, first, valid, listed, block, start, stop):
    """How many keys of a block each row attends to: always its first ones, as a row sees the tokens up to its own."""
    valid = valid & (block >= first)
    if listed is not None:
        valid = valid & (tl.max((listed == block.to(tl.int32)).to(tl.int32), 1) > 0)
    return tl.where(valid, tl.maximum(tl.minimum(query + 1, stop) - start, 0), 0).to(tl.int32)


@triton.jit
def query_program(N, BQ: tl.constexpr, CHUNKS: tl.constexpr):
    """(tile of queries, chunk of heads, (batch, index head) pair) of this program; the longest walks come first."""
    program = tl.program_id(0).to(tl.int64)
    tiles = tl.cdiv(N, BQ)
    return tiles - 1 - program % tiles, program // tiles % CHUNKS, program // tiles // CHUNKS


@triton.jit
def task_program(task_count, CHUNKS: tl.constexpr, PIECES: tl.constexpr):
    """(piece of the key block, task, chunk of heads, (batch, index head) pair) of this program."""
    program = tl.program_id(0).to(tl.int64)
    task = program // PIECES
    return program % PIECES, task % task_count, task // task_count % CHUNKS, task // task_count // CHUNKS


@triton.jit
def load_task(tasks, edges, pair, task, task_count):
    """(key block, first edge, end edge) of a task; without edges, the tasks of all pairs are the same."""
    at = task
    if edges is not None:
        at += pair * task_count
    block = tl.load(tasks + at * 3).to(tl.int64)
    return block, tl.load(tasks + at * 3 + 1), tl.load(tasks + at * 3 + 2)


@triton.jit
def edge_tile(at, end, chunk, edges, first_edge, SLOTS: tl.constexpr, R: tl.constexpr, BQ: tl.constexpr,
              BH: tl.constexpr):  # fmt: skip
    """(edge, query, head, valid) of BQ edges from the position `at` on times BH heads.

    edges: the edges query * slots + slot of all pairs, those of this pair from first_edge on; None where position and
    query are one.
    """
    row = tl.arange(0, BQ * BH)
    position, head = at + row // BH, chunk * BH + row % BH
    valid = (position < end) & (head < R)
    edge, query = position.to(tl.int64), position.to(tl.int64)
    if edges is not None:
        listed = tl.load(edges + first_edge + edge, mask=valid, other=0)
        edge, query = listed.to(tl.int64), (listed // SLOTS).to(tl.int64)
    return edge, query, head, valid


@triton.jit
def row_tile(tile, chunk, N, R: tl.constexpr, BQ: tl.constexpr, BH: tl.constexpr):
    """(query, head, valid) of the BQ * BH rows of a tile: BQ adjacent queries times BH heads of one selection."""
    row = tl.arange(0, BQ * BH).to(tl.int64)
    query = tile * BQ + row // BH
    head = chunk * BH + row % BH
    return query, head, (query < N) & (head < R)


@triton.jit
def load_rows(base, offset, valid, stride, WIDTH: tl.constexpr, PAD: tl.constexpr):
    """[rows, PAD]: the row at each offset, 0 beyond WIDTH and in rows that are not valid."""
    column = tl.arange(0, PAD).to(tl.int64)
    mask = valid[:, None] & (column < WIDTH)[None, :]
    return tl.load(base + offset[:, None] + column[None, :] * stride, mask=mask, other=0.0)


@triton.jit
def store_rows(base, offset, valid, value, WIDTH: tl.constexpr, PAD: tl.constexpr):
    """Stores [rows, PAD] to contiguous rows, each row at its offset, without the padding."""
    column = tl.arange(0, PAD).to(tl.int64)
    mask = valid[:, None] & (column < WIDTH)[None, :]
    tl.store(base + offset[:, None] + column[None, :], value.to(base.dtype.element_ty), mask=mask)


@triton.jit
def load_ids(ids, pair, query, valid, N, SLOTS: tl.constexpr, SLOTS_PAD: tl.constexpr):
    """[rows, SLOTS_PAD]: the block ids that each row lists, -1 where there is none."""
    slot = tl.arange(0, SLOTS_PAD).to(tl.int64)
    mask = valid[:, None] & (slot < SLOTS)[None, :]
    return tl.load(ids + (pair * N + query[:, None]) * SLOTS + slot[None, :], mask=mask, other=-1)


@triton.jit
def walk(tile, union, block_of, first_block, N, BLOCK: tl.constexpr, BQ: tl.constexpr):
    """[begin, end): positions in the walk of a query tile over key blocks.

    They are positions in the union of its queries' blocks (stored as its size and then the blocks); without a union,
    the ids of all visible blocks.
    """
    query = tile * BQ
    begin = document_block(query, True, first_block)
    end = own_block(tl.minimum(query + BQ, N) - 1, True, block_of, BLOCK) + 1
    if union is not None:
        begin = tile * 0
        end = tl.load(union).to(tl.int64)
    return begin, end


@triton.jit
def block_at(position, union):
    """The key block at a position of the walk."""
    block = position
    if union is not None:
        block = tl.load(union + 1 + position).to(tl.int64)
    return block


@triton.jit
def online_softmax(logits, largest):
    """(largest logit so far, what to subtract: the same, or 0 where a row has seen no key yet) of each row."""
    now = tl.maximum(largest, tl.max(logits, 1))
    return now, tl.where(now == float("-inf"), 0.0, now)
