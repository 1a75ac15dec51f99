"""How fast the kernels of `msa_triton` could be: their work counted, over the peak rates of a GPU.

A kernel needs four things: matrix products on the tensor cores, exponentials on the special function units, bytes to
and from HBM, and bytes between L2 and the multiprocessors. Each alone takes its amount over its rate; done all at once
they take as long as the slowest, and no kernel that does this work takes less (the roofline). Additions, comparisons
and address arithmetic are not counted, nor are latencies, launches and the sorting that PyTorch does between kernels.

Sources: W = the architecture whitepapers of NVIDIA (A100; H100, whose table gives both boost clocks); S = the data
sheets of the A100 80 GB, H100, H200 and HGX B200, dense rates; C = CUDA programming guide, throughput of arithmetic
instructions; L = gpu-benches (github.com/te42kyfo/gpu-benches), gpu-l2-cache, read rates measured from data of 10 to
25 MB.
"""

from __future__ import annotations

import math
import numbers
from typing import NamedTuple

from msa_ref.problem import check_integer

EXPONENTIALS_PER_CLOCK = 16  # C: of a multiprocessor, base 2, compute capabilities 8.0, 9.0 and 10.0; logarithms too
TASK_EDGES = 2048  # most (query, slot) pairs of a key-major task
SMALLEST_DOT = 16  # of rows, columns and depth of a matrix product in Triton
# Rows (queries times heads) of a tile as `msa_triton.config` has them on Hopper at 2 bytes. On other targets key-major
# tiles may have fewer rows, which changes nothing but rounding, and beyond a topk of 32 so do those of the selection,
# which read index_k from L2 more often.
FORWARD_ROWS, DKDV_ROWS, INDEX_ROWS, INDEX_KEY_QUERIES, SELECT_ROWS = 128, 64, 256, 32, 128
SELECT_KEPT = 8192  # what the rows of a selection tile keep, together


class GPU(NamedTuple):
    """Peak rates of a GPU.

    Attributes:
        multiprocessors: how many.
        clock: highest boost clock in Hz. matrix_clock: the boost clock in Hz that the peak of the tensor cores assumes.
        matrix_flops_per_clock: bfloat16 FLOPs of the tensor cores of one multiprocessor, dense.
        hbm_rate, l2_rate: bytes per second. l2_capacity: bytes.
    """

    name: str
    multiprocessors: int
    clock: float
    matrix_clock: float
    matrix_flops_per_clock: int
    hbm_rate: float
    l2_rate: float
    l2_capacity: int

    @property
    def matrix_rate(self) -> float:
        """Dense bfloat16 FLOPs per second of all tensor cores."""
        return self.multiprocessors * self.matrix_flops_per_clock * self.matrix_clock

    @property
    def exponential_rate(self) -> float:
        """Exponentials per second of all special function units, at the highest clock."""
        return self.multiprocessors * EXPONENTIALS_PER_CLOCK * self.clock


GPUS = {
    gpu.name: gpu
    for gpu in (
        # W: clocks, multiprocessors, L2. S: 312 TFLOP/s, 2039 GB/s. L: 5.4 TB/s.
        GPU("A100", 108, 1.41e9, 1.41e9, 2048, 2.039e12, 5.4e12, 40 * 10**6),
        # W: clocks, multiprocessors, L2. S: 989 TFLOP/s, 3.35 TB/s. Assumed: the L2 of the H200, the same chip.
        GPU("H100", 132, 1.98e9, 1.83e9, 4096, 3.35e12, 9.7e12, 50 * 10**6),
        # As the H100. S: 989 TFLOP/s, 4.8 TB/s. L: 9.7 TB/s.
        GPU("H200", 132, 1.98e9, 1.83e9, 4096, 4.8e12, 9.7e12, 50 * 10**6),
        # S: 2250 TFLOP/s, which with twice the FLOPs a clock of an H100 means 1.856 GHz; 8 TB/s. Assumed, as no data
        # sheet has them: 148 multiprocessors, 1.965 GHz and 126 MB, as tools report, and as many bytes of L2 a clock
        # and multiprocessor as an H200 (37).
        GPU("B200", 148, 1.965e9, 1.856e9, 8192, 8.0e12, 10.8e12, 126 * 10**6),
    )
}


class Bound(NamedTuple):
    """The work of a kernel, and the least time it takes on a GPU.

    Attributes:
        matrix_flops: FLOPs of matrix products. exponentials: of base 2, and logarithms of elements.
        hbm_bytes: read from and written to HBM. l2_bytes: loaded and stored by the multiprocessors; what HBM would
            carry if L2 kept nothing.
    """

    matrix_flops: float
    exponentials: float
    hbm_bytes: float
    l2_bytes: float
    gpu: GPU

    @property
    def resources(self) -> dict[str, float]:
        """Seconds that each resource is busy."""
        return {
            "matrix": self.matrix_flops / self.gpu.matrix_rate,
            "exponentials": self.exponentials / self.gpu.exponential_rate,
            "HBM": self.hbm_bytes / self.gpu.hbm_rate,
            "L2": self.l2_bytes / self.gpu.l2_rate,
        }

    @property
    def seconds(self) -> float:
        """The lower bound: the time of the busiest resource."""
        return max(self.resources.values())

    @property
    def binds(self) -> str:
        """The name of the busiest resource."""
        return max(self.resources, key=self.resources.get)

    def __str__(self) -> str:
        return f"{1e3 * self.seconds:.3g} ms ({self.binds})"


class _Sizes(NamedTuple):
    """A call; `element` in bytes, the rest as in `bounds`."""

    N: int
    H: int
    Hkv: int
    Hidx: int
    Hik: int
    D: int
    Dv: int
    Di: int
    topk: int
    block_size: int
    element: int

    @property
    def share(self) -> int:
        """Query heads with one selection."""
        return self.H // self.Hidx

    @property
    def blocks(self) -> int:
        return _ceil(self.N, self.block_size)

    @property
    def padded(self) -> tuple[int, int, int]:
        """D, Dv and Di as the matrix products have them."""
        return tuple(_padded(width) for width in (self.D, self.Dv, self.Di))

    def split(self, rows: int, most_heads: int | None = None) -> tuple[int, int, int]:
        """(queries, heads, chunks): a tile of `rows` as queries times heads, and in how many chunks the heads come."""
        heads = min(_padded(self.share, 1), most_heads or rows)
        return rows // heads, heads, _ceil(self.share, heads)


def bounds(
    N: int, gpu: str | GPU = "H200", H: int = 64, Hkv: int = 4, Hidx: int = 4, D: int = 128, Dv: int | None = None,
    Di: int = 128, topk: int = 16, block_size: int = 128, union: float | None = None, tile_queries: int | None = None,
    bytes_per_element: int = 2, Hik: int = 1, index_union: float | None = None,
) -> dict[str, Bound]:  # fmt: skip
    """The least time each kernel takes for one sequence, from what it counts up to and the rates of the GPU.

    The kernels: select; forward_query, or forward_key and combine; normalizer, delta, dq, dkdv, sum_tasks (of dk and
    dv); index_query (KL and the sums of d index_q), index_key, index_sum_tasks.

    What is counted, in the symbols of SPEC 1, with G = H / Hidx heads a selection and s bytes an element:

    * Query-major kernels work on tiles of `tile_queries` queries times G heads, each with the `union` blocks that its
      queries chose: 2·block_size FLOPs a row, block and unit of width, by D + Dv (forward), 2·D + Dv (dq) and G·D +
      3·Di (index_query, by query). A row uses topk of the union: the rest is waste. Union = topk gives the sparse term
      of P eq. 12.
    * Key-major kernels do it for each of the N·topk (query, slot) pairs of an index head: by D + Dv (forward_key),
      2·D + 2·Dv (dkdv), G·D + 2·Di (index_key). Each key block is one task or several of at most 2048 pairs,
      whose sums of dk and dv, or d index_k, are written in float32 and added up by sum_tasks; so are the empty
      ones of as many tasks as are launched, blocks + N·topk // 2048.
    * select scores all blocks up to that of each tile: the index term of P eq. 12, with the diagonal block whole.
    * Exponentials: one an element of the logits, masked or not. Those of a row (rescaling, LSE) are left out.
    * A partial result of forward_key is Dv elements and 8 bytes (its maximum and total) for each query, slot and head.

    What is assumed:

    * As in P eq. 12 every query has topk blocks. The first topk·block_size queries have fewer: 6 % at 16 384 tokens.
    * Key blocks are chosen equally often, and key-major partial results fit one range of queries. More ranges read
      K and V again, each the blocks it needs.
    * HBM: K, V and index_k are read once, as L2 holds what neighbouring tiles and tasks share. The rows that a
      key-major kernel gathers come from HBM once if L2 holds those of an index head, else again for each of the topk
      slots. Partial results and gradients pass through HBM.
    * L2: every load and store of a tile. A row tile is loaded once, also where the source has the load in a loop.

    Args:
        N: tokens. gpu: a name in `GPUS`, or a GPU of one's own.
        union: mean number of different blocks that the queries of a tile chose, from topk (all the same; the default)
            to tile_queries·topk; early tiles may bring a measured mean below topk.
        tile_queries: queries of a query-major tile; by default 128 rows over the heads of a selection, 8.
        bytes_per_element: of inputs and outputs; the matrix rate is that of bfloat16 whatever it says.
        index_union: `union` for the tiles of index_query, which have 16 queries rather than 8; by default the least
            that `union` allows, which is the same number.

    Returns:
        {kernel: `Bound`}. A measured time below a bound means that an assumption does not hold.

    Raises:
        TypeError, ValueError: an argument of the wrong type or out of range, named.
    """
    Dv = D if Dv is None else Dv
    sizes = dict(N=N, H=H, Hkv=Hkv, Hidx=Hidx, Hik=Hik, D=D, Dv=Dv, Di=Di, topk=topk, block_size=block_size)
    for name, size in dict(sizes, bytes_per_element=bytes_per_element).items():
        check_integer(name, size, 1)
    for name, over, count, among in (("H", "Hidx", H, Hidx), ("Hidx", "Hkv", Hidx, Hkv), ("Hidx", "Hik", Hidx, Hik)):
        if count % among:
            raise ValueError(f"{name} must be a multiple of {over} = {among}, got {count}")
    call = _Sizes(**sizes, element=bytes_per_element)
    if tile_queries is None:
        tile_queries = call.split(FORWARD_ROWS)[0]
    check_integer("tile_queries", tile_queries, 1)
    index_queries = call.split(INDEX_ROWS, INDEX_ROWS // SMALLEST_DOT)[0]
    union = _union("union", topk if union is None else union, tile_queries * topk)
    if index_union is None:  # a larger tile has no smaller union, and a part of a tile at least its share
        index_union = max(min(union, topk), union * min(1, index_queries / tile_queries))
    index_union = _union("index_union", index_union, index_queries * topk)
    gpu = _gpu(gpu)
    counts = {
        "select": _select(call),
        **_attention_query_major(call, tile_queries, union),
        **_attention_key_major(call, gpu.l2_capacity),
        **_index_query_major(call, index_queries, index_union),
        **_index_key_major(call, gpu.l2_capacity),
    }
    return {kernel: Bound(*count, gpu) for kernel, count in counts.items()}


def _select(call: _Sizes):
    rows = max(SMALLEST_DOT, min(SELECT_ROWS, SELECT_KEPT // _padded(min(call.topk, call.blocks), 1)))
    # The last query of a tile sees ceil(stop / block_size) blocks.
    steps = call.Hidx * sum(_ceil(min(stop, call.N), call.block_size) for stop in range(rows, call.N + rows, rows))
    queries = call.N * call.Hidx * (call.Di * call.element + 4 * call.topk)
    key = call.Di * call.element
    flops = 2 * steps * rows * call.block_size * call.padded[2]
    return flops, 0, queries + call.N * call.Hik * key, queries + steps * call.block_size * key


def _attention_query_major(call: _Sizes, queries: int, union: float):
    N, H, D, Dv, element = call.N, call.H, call.D, call.Dv, call.element
    _, heads, chunks = call.split(FORWARD_ROWS)
    steps = _ceil(N, queries) * call.Hidx * chunks * union
    logits = steps * queries * heads * call.block_size
    d, dv, _ = call.padded
    key = (D + Dv) * element
    hbm, l2 = N * call.Hkv * key, steps * call.block_size * key

    def walk(width, row):
        rows = N * H * row + 4 * N * call.Hidx * call.topk
        return 2 * logits * width, logits, rows + hbm, rows + l2

    return {
        "forward_query": walk(d + dv, (D + Dv) * element + 4),  # q; out, LSE
        "normalizer": _stream(N * H * 12),  # LSE; shift, log_total
        "delta": _stream(N * H * (2 * Dv * element + 4)),
        "dq": walk(2 * d + dv, (2 * D + Dv) * element + 12),  # q, dout, shift, log_total, delta; dq
    }


def _attention_key_major(call: _Sizes, l2_capacity: int):
    N, H, D, Dv, element = call.N, call.H, call.D, call.Dv, call.element
    d, dv, _ = call.padded
    key, partial, pairs = (D + Dv) * element, Dv * element + 8, N * H * call.topk
    used, launched = _tasks(call)

    def tasks(rows, width, row, written):
        """rows: of a tile. row: bytes gathered for a row. written: bytes for each chunk of heads."""
        queries, heads, chunks = call.split(rows)
        logits = call.Hidx * chunks * _task_rows(call, queries) * heads * call.block_size
        rest = 4 * N * call.topk * call.Hidx + chunks * written
        l2 = pairs * row + rest + call.Hidx * chunks * launched * call.block_size * key
        return 2 * logits * width, logits, _gathered(call, row, l2_capacity) + rest + N * call.Hkv * key, l2

    queries, heads, chunks = call.split(DKDV_ROWS)
    sums = 4 * call.Hidx * call.block_size * (D + Dv)  # bytes of one task of each index head
    forward = tasks(FORWARD_ROWS, d + dv, D * element, 0)
    forward = (*forward[:2], *(count + pairs * partial for count in forward[2:]))
    out = N * H * (Dv * element + 4)
    return {
        "forward_key": forward,
        "combine": (0, pairs, pairs * partial + out, pairs * (partial + 4) + out),  # each maximum is loaded twice
        "dkdv": tasks(DKDV_ROWS, 2 * (d + dv), key + 12, sums * launched),  # q, dout, shift, log_total, delta
        "sum_tasks": _stream(sums * used * chunks + N * call.Hkv * key),
    }


def _index_query_major(call: _Sizes, queries: int, union: float):
    N, Hidx, D, Di, element = call.N, call.Hidx, call.D, call.Di, call.element
    _, heads, chunks = call.split(INDEX_ROWS, INDEX_ROWS // SMALLEST_DOT)
    steps = _ceil(N, queries) * Hidx * union
    student = steps * queries * call.block_size
    teacher = student * heads * chunks
    d, _, di = call.padded
    rows = N * call.H * (D * element + 8) + N * Hidx * (Di * element + 4 * call.topk)
    hbm = rows + N * (call.Hkv * D + call.Hik * Di) * element
    l2 = rows + steps * call.block_size * (D + 2 * Di) * element  # index_k in both passes

    written = N * Hidx * (Di * element + 12)  # the sums; KL, shift, log_total
    # Of the student's logits: exponentials for its normaliser and its probabilities, logarithms of the teacher's.
    flops, exponentials = 2 * (teacher * d + 3 * student * di), teacher + 3 * student
    return {"index_query": (flops, exponentials, hbm + written, l2 + written)}


def _index_key_major(call: _Sizes, l2_capacity: int):
    N, Hidx, D, Di, element = call.N, call.Hidx, call.D, call.Di, call.element
    d, _, di = call.padded
    logits = Hidx * _task_rows(call, INDEX_KEY_QUERIES) * call.block_size
    used, launched = _tasks(call)
    sums = 4 * Hidx * call.block_size * Di
    row = D * element + 8 + (Di * element + 12) / call.share  # q, shift, log_total; index_q, its two, the upstream
    rest = 4 * N * call.topk * Hidx + sums * launched
    hbm = _gathered(call, row, l2_capacity) + rest + N * (call.Hkv * D + call.Hik * Di) * element
    l2 = N * call.H * call.topk * row + rest + Hidx * launched * call.block_size * (D + Di) * element
    return {
        "index_key": (2 * logits * (call.share * d + 2 * di), logits * (call.share + 1), hbm, l2),
        "index_sum_tasks": _stream(sums * used + 4 * N * call.Hik * Di),
    }


def _stream(count: int):
    """A kernel that only reads and writes, each byte once."""
    return 0, 0, count, count


def _gathered(call: _Sizes, row: float, l2_capacity: int) -> float:
    """HBM bytes of the rows that a key-major kernel gathers, `row` bytes for each query and head."""
    once = call.N * call.H * row
    return once if once / call.Hidx <= l2_capacity else call.topk * once


def _pairs_of_block(call: _Sizes) -> int:
    """(query, slot) pairs of one key block and index head."""
    return _ceil(call.N * call.topk, call.blocks)


def _tasks(call: _Sizes) -> tuple[int, int]:
    """(used, launched): tasks of one index head."""
    return call.blocks * _ceil(_pairs_of_block(call), TASK_EDGES), call.blocks + call.N * call.topk // TASK_EDGES


def _task_rows(call: _Sizes, queries: int) -> int:
    """(query, slot) pairs that one index head computes in whole tiles of `queries`."""
    full, rest = divmod(_pairs_of_block(call), TASK_EDGES)
    return call.blocks * queries * (full * _ceil(TASK_EDGES, queries) + _ceil(rest, queries))


def _ceil(count: int, size: int) -> int:
    return -(-count // size)


def _padded(width: int, least: int = SMALLEST_DOT) -> int:
    """The power of two that a tile of `width` columns takes."""
    return max(least, 1 << (width - 1).bit_length())


def _gpu(gpu) -> GPU:
    if isinstance(gpu, GPU):
        return gpu
    if not isinstance(gpu, str):
        raise TypeError(f"gpu must be a name or a GPU, got {type(gpu).__name__} {gpu!r}")
    if gpu not in GPUS:
        raise ValueError(f"gpu must be one of {list(GPUS)}, got {gpu!r}")
    return GPUS[gpu]


def _union(name: str, value, most: int) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number, got {type(value).__name__} {value!r}")
    if not (math.isfinite(value) and 1 <= value <= most):
        raise ValueError(f"{name} must be from 1 to {most}, the slots of a tile, got {value}")
    return value
