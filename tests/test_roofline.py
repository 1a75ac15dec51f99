"""Lower time bounds: counts against the formulas of the costs, the clocks of a tile, how they scale, bad input."""

import pytest

from msa_ref import cost
from msa_ref.cost import GPU, GPUS, Bound, bounds
from msa_ref.roofline import EXPONENTIALS_PER_CLOCK

H200 = GPUS["H200"]
LENGTHS = (16_384, 131_072, 1_048_576)
ONE_TILE = dict(N=8, H=16, Hkv=1, Hidx=1, topk=1)  # 8 queries x 16 heads against one block of 128 keys


def clocks(bound: Bound) -> tuple[float, float]:
    """Of matrix work and of exponentials, on one multiprocessor."""
    return bound.matrix_flops / bound.gpu.matrix_flops_per_clock, bound.exponentials / EXPONENTIALS_PER_CLOCK


def hbm_bytes_per_clock(gpu: GPU) -> float:
    return gpu.hbm_rate / gpu.multiprocessors / gpu.clock


@pytest.mark.parametrize(
    ("name", "peak"), [("A100", 312e12), ("H100", 989.4e12), ("H200", 989.4e12), ("B200", 2250e12)]
)
def test_peaks_are_those_of_the_data_sheets(name, peak):
    assert GPUS[name].matrix_rate == pytest.approx(peak, rel=1e-3)
    assert GPUS[name].exponential_rate == GPUS[name].multiprocessors * 16 * GPUS[name].clock
    assert GPUS[name].l2_rate > GPUS[name].hbm_rate


def test_forward_tile_takes_2048_clocks_of_matrix_work_and_1024_of_exponentials():
    assert H200.matrix_flops_per_clock == 4096
    assert round(hbm_bytes_per_clock(H200)) == 18
    tile = bounds(**ONE_TILE)
    assert clocks(tile["forward_query"]) == clocks(tile["forward_key"]) == (2048, 1024)


def test_products_of_each_kernel():
    tile = bounds(**ONE_TILE)
    product = 2 * 128 * 128 * 128
    flops = {name: bound.matrix_flops / product for name, bound in tile.items() if bound.matrix_flops}
    # The index kernels have tiles of 16 queries, and 32 queries of one head at a time.
    assert flops == {
        "select": 1, "forward_query": 2, "forward_key": 2, "dq": 3, "dkdv": 4,
        "index_query": 2 + 3 / 8, "index_key": (16 + 2) / 4,
    }  # fmt: skip


def test_exponentials_of_each_kernel():
    tile = bounds(**ONE_TILE)
    logits = 128 * 128
    count = {name: bound.exponentials / logits for name, bound in tile.items() if bound.exponentials}
    assert count == {
        "forward_query": 1, "forward_key": 1, "dq": 1, "dkdv": 1, "combine": 1 / 128,
        "index_query": 2 + 3 / 8, "index_key": (16 + 1) / 4,
    }  # fmt: skip


def test_hbm_and_l2_bytes_of_a_token():
    of, (q, index_q, k, index_k) = bounds(131_072), (64 * 256, 4 * 256, 4 * 256, 256)
    ids, task = 4 * 4 * 16, 4 * 128 * 128 / 128  # sums of one task of a block of 128, a token, for each width of 128
    slots, tiles = 16, 128 * 16 / 8  # of a tile of 8 queries: keys a token and index head
    expected = {
        "select": (index_q + index_k + ids, index_q + ids + 4 * (1024 * 1025 / 2 * 128) * 256 / 131_072),
        "forward_query": (2 * q + 2 * k + 4 * 64 + ids, 2 * q + 4 * 64 + ids + tiles * 2 * k),
        "normalizer": (12 * 64, 12 * 64),
        "delta": (2 * q + 4 * 64, 2 * q + 4 * 64),
        "dq": (3 * q + 2 * k + 12 * 64 + ids, 3 * q + 12 * 64 + ids + tiles * 2 * k),
        "forward_key": (
            slots * (2 * q + 8 * 64) + 2 * k + ids, slots * (2 * q + 8 * 64) + ids + 2 * 2 * k
        ),
        "combine": (slots * (q + 8 * 64) + q + 4 * 64, slots * (q + 12 * 64) + q + 4 * 64),
        "dkdv": (
            slots * (2 * q + 12 * 64) + 2 * k + ids + 2 * 2 * 4 * task,
            slots * (2 * q + 12 * 64) + 2 * 2 * k + ids + 2 * 2 * 4 * task,
        ),
        "sum_tasks": (2 * 4 * task + 2 * k,) * 2,
        "index_query": (
            q + 8 * 64 + 2 * index_q + 12 * 4 + k + index_k + ids,
            q + 8 * 64 + 2 * index_q + 12 * 4 + ids + tiles / 2 * 4 * 3 * 256,
        ),
        "index_key": (
            slots * (q + 8 * 64 + index_q + 12 * 4) + k + index_k + ids + 2 * 4 * task,
            slots * (q + 8 * 64 + index_q + 12 * 4) + 2 * 2 * k + ids + 2 * 4 * task,
        ),
        "index_sum_tasks": (4 * task + 2 * index_k,) * 2,
    }  # fmt: skip
    assert {name: (bound.hbm_bytes / 131_072, bound.l2_bytes / 131_072) for name, bound in of.items()} == expected


def test_key_major_moves_96_kb_a_tile():
    N, tiles = 131_072, 131_072 * 16 * 4 // 8
    of = bounds(N)
    once = N * 4 * 256 * 2 + 4 * N * 16 * 4 + N * 64 * (128 * 2 + 4)  # K and V, edges; out and LSE
    moved = (of["forward_key"].hbm_bytes + of["combine"].hbm_bytes - once) / tiles
    assert moved == 96 * 1024 + 128 * 2 * 8  # and twice 8 bytes a row, for its maximum and total
    assert 96 * 1024 / hbm_bytes_per_clock(H200) == pytest.approx(5200, rel=0.05)
    assert 2048 / (96 * 1024 / hbm_bytes_per_clock(H200)) == pytest.approx(0.4, abs=0.03)


@pytest.mark.parametrize("N", LENGTHS)
def test_query_major_wins_below_a_union_of_40(N):
    def query_major_wins(union):
        of = bounds(N, union=union)
        return of["forward_query"].seconds < of["forward_key"].seconds + of["combine"].seconds

    assert all(query_major_wins(union) for union in range(16, 39))
    assert not any(query_major_wins(union) for union in range(42, 129))


@pytest.mark.parametrize("N", LENGTHS)
def test_work_is_equation_12(N):
    of = bounds(N)
    assert of["forward_query"].matrix_flops == of["forward_key"].matrix_flops == cost.sparse_flops(N)
    diagonal = 4 * 128 * N * 128  # half of each diagonal block is masked
    assert of["select"].matrix_flops + of["forward_query"].matrix_flops == cost.msa_flops(N) + diagonal
    sizes = dict(H=8, D=64, topk=4, block_size=32)
    other = bounds(N, Hkv=2, Hidx=2, Di=32, **sizes)
    assert other["forward_query"].matrix_flops == other["forward_key"].matrix_flops == cost.sparse_flops(N, **sizes)
    assert other["select"].matrix_flops >= cost.index_flops(N, Hidx=2, Di=32)


@pytest.mark.parametrize("N", LENGTHS)
def test_traffic_is_that_of_both_traversals(N):
    of = bounds(N, tile_queries=1)
    lse, ids = 4 * N * 64, 4 * N * 4 * 16
    assert of["forward_query"].l2_bytes - lse - ids == N * 4 * cost.query_outer_traffic().bytes
    small = N * 64 * 16 * 16  # maximum and total of each partial result, written and read
    key_major = of["forward_key"].hbm_bytes + of["combine"].hbm_bytes - lse - ids - small
    assert key_major == N * 4 * cost.kv_outer_traffic().bytes


@pytest.mark.parametrize("N", [1, 15, 16, 17, 128, 129, 1000])
def test_select_loads_every_block_up_to_that_of_its_tile(N):
    tiles = -(-N // 128)
    steps = sum(-(-min(128 * (tile + 1), N) // 32) for tile in range(tiles))
    select = bounds(N, H=1, Hkv=1, Hidx=1, Di=16, topk=2, block_size=32, bytes_per_element=1)["select"]
    assert select.matrix_flops == 2 * steps * 128 * 32 * 16 >= 2 * 16 * cost.causal_pairs(N)
    assert select.l2_bytes == steps * 32 * 16 + N * (16 + 4 * 2)
    assert select.hbm_bytes == N * (2 * 16 + 4 * 2)


def test_partial_sums_of_tasks():
    of = bounds(131_072)
    blocks, task = 1024, 4 * 128 * 256  # bytes
    assert of["sum_tasks"].hbm_bytes == 4 * blocks * task + 131_072 * 4 * 256 * 2
    rows = of["dkdv"].hbm_bytes - 131_072 * (16 * 64 * (256 * 2 + 12) + 4 * 256 * 2 + 4 * 4 * 16)
    assert rows == 4 * 2 * blocks * task  # as many empty tasks as used ones
    # Twice as many slots make two tasks of a block.
    assert bounds(131_072, topk=32)["sum_tasks"].hbm_bytes - 131_072 * 4 * 256 * 2 == 4 * 2 * blocks * task


def test_gathered_rows_are_read_once_where_l2_holds_them():
    def gathered(N, gpu):  # times that forward_key reads a row of q from HBM
        partial, once = N * 64 * 16 * (256 + 8), 4 * N * 16 * 4 + N * 4 * 512
        return (bounds(N, gpu)["forward_key"].hbm_bytes - partial - once) / (N * 64 * 256)

    assert [gathered(N, "H200") for N in (12_160, 12_288)] == [1, 16]  # 4 KiB a token and index head, 50 MB
    assert [gathered(N, "B200") for N in (12_288, 30_720, 30_848)] == [1, 1, 16]  # 126 MB


@pytest.mark.parametrize("gpu", ["A100", "H100", "H200"])
def test_all_is_linear_in_the_tokens_but_select(gpu):
    one, four = bounds(65_536, gpu), bounds(4 * 65_536, gpu)
    for name in one:
        counts = zip(one[name][:4], four[name][:4], strict=True)
        if name == "select":
            assert 15.9 < four[name].seconds / one[name].seconds < 16
        else:
            assert all(large == pytest.approx(4 * small, rel=1e-12) for small, large in counts)
            assert four[name].seconds == pytest.approx(4 * one[name].seconds)


def test_more_blocks_in_a_union_cost_query_major_kernels_more():
    query_major = {"forward_query", "dq", "index_query"}
    before = bounds(16_384)
    assert before == bounds(16_384, union=16, tile_queries=8, index_union=16)
    for union in (16.5, 24, 40, 128):
        after = bounds(16_384, union=union)
        assert {name for name in after if after[name].seconds > before[name].seconds} == query_major
        assert all(after[name] == before[name] for name in after.keys() - query_major)
        before = after
    assert before["forward_query"].matrix_flops == 8 * cost.sparse_flops(16_384)  # nothing is shared
    only = bounds(16_384, index_union=32)
    assert only["dq"] == bounds(16_384)["dq"]
    assert only["index_query"].seconds > bounds(16_384)["index_query"].seconds


def test_what_binds():
    expected = {
        "select": "matrix", "forward_query": "matrix", "dq": "matrix", "dkdv": "matrix",
        "forward_key": "HBM", "combine": "HBM", "normalizer": "HBM", "delta": "HBM", "sum_tasks": "HBM",
        "index_query": "L2", "index_key": "HBM", "index_sum_tasks": "HBM",
    }  # fmt: skip
    for N in LENGTHS:
        of = bounds(N)
        assert {name: bound.binds for name, bound in of.items()} == expected
        for bound in of.values():
            assert bound.seconds == bound.resources[bound.binds] == max(bound.resources.values())
    assert [str(bounds(N)["select"]) for N in LENGTHS] == ["0.14 ms (matrix)", "8.9 ms (matrix)", "569 ms (matrix)"]
    assert str(bounds(1_048_576)["forward_key"]) == "117 ms (HBM)"
    # Twice the matrix rate and no more exponentials: attention with narrow heads waits for them.
    assert bounds(16_384, "B200", D=32, Di=32)["forward_query"].binds == "exponentials"


def test_a_gpu_of_ones_own():
    slow = H200._replace(name="slow memory", hbm_rate=1e11)
    assert bounds(16_384, slow)["forward_query"].binds == "HBM"
    assert bounds(16_384, slow)["forward_query"][:4] == bounds(16_384)["forward_query"][:4]


def test_widths_count_padded_in_products_and_plain_in_bytes():
    plain, wide = bounds(4096, D=128, Dv=64, Di=64), bounds(4096, D=80, Dv=48, Di=40)
    for name in plain:
        assert plain[name].matrix_flops == wide[name].matrix_flops
        assert plain[name].hbm_bytes >= wide[name].hbm_bytes
    assert bounds(4096, H=48)["forward_query"].matrix_flops == cost.sparse_flops(4096)  # 12 heads in tiles for 16


def test_tiles_are_those_of_the_launchers():
    pytest.importorskip("triton")
    from msa_ref import roofline
    from msa_triton import config, schedule, select

    assert roofline.TASK_EDGES == schedule.TASK_EDGES and roofline.SELECT_KEPT == select.MOST_KEPT_ON["sm_90"]
    rows = {
        "select": (roofline.SELECT_ROWS, 128, 128), "forward_query": (roofline.FORWARD_ROWS, 128, 256),
        "forward_key": (roofline.FORWARD_ROWS, 128, 256), "dq": (roofline.FORWARD_ROWS, 256, 256),
        "dkdv": (roofline.DKDV_ROWS, 256, 256), "index_query": (roofline.INDEX_ROWS, 128, 256),
        "index_key": (roofline.INDEX_KEY_QUERIES, 256, 256),
    }  # fmt: skip
    for kernel, (expected, row_width, key_width) in rows.items():
        tile = config.choose_tile(kernel, "sm_90", 2, block=128, row_width=row_width, key_width=key_width)
        assert tile.rows == expected, kernel


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (dict(N=0), ValueError, "N must be at least 1, got 0"),
        (dict(N=4096.0), TypeError, "N must be an int"),
        (dict(topk=0), ValueError, "topk must be at least 1"),
        (dict(Dv=-1), ValueError, "Dv must be at least 1"),
        (dict(bytes_per_element=0), ValueError, "bytes_per_element must be at least 1"),
        (dict(tile_queries=True), TypeError, "tile_queries must be an int"),
        (dict(tile_queries=0), ValueError, "tile_queries must be at least 1"),
        (dict(H=62), ValueError, "H must be a multiple of Hidx = 4, got 62"),
        (dict(Hidx=2), ValueError, "Hidx must be a multiple of Hkv = 4, got 2"),
        (dict(Hik=3), ValueError, "Hidx must be a multiple of Hik = 3, got 4"),
        (dict(gpu="H800"), ValueError, "gpu must be one of .*'H200'.* got 'H800'"),
        (dict(gpu=90), TypeError, "gpu must be a name or a GPU, got int 90"),
        (dict(union=0.5), ValueError, "union must be from 1 to 128"),
        (dict(union=129), ValueError, "union must be from 1 to 128"),
        (dict(union=float("nan")), ValueError, "union must be from 1 to 128"),
        (dict(union="16"), TypeError, "union must be a number, got str"),
        (dict(index_union=257), ValueError, "index_union must be from 1 to 256"),
    ],
)
def test_bad_input(arguments, error, message):
    with pytest.raises(error, match=message):
        bounds(**{"N": 4096, **arguments})
