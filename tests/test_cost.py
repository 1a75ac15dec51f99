"""Costs: the contract's printed numbers, closed forms against loops, identities, bad input."""

import math

import pytest

from msa_ref import cost


@pytest.mark.parametrize(
    ("N", "ratio"),
    [(4096, 0.970), (8192, 1.882), (32768, 6.400), (131072, 16.000), (524288, 25.600), (1048576, 28.444)],
)
def test_flop_ratio_is_the_papers(N, ratio):
    assert round(cost.flop_ratio(N), 3) == ratio


def test_flop_ratio_limit():
    assert cost.flop_ratio_limit() == 32
    assert cost.flop_ratio(2**60) == pytest.approx(32, rel=1e-9)


def test_crossover():
    N = cost.crossover()
    assert round(N) == 4228
    assert cost.flop_ratio(math.floor(N)) < 1 < cost.flop_ratio(math.ceil(N))
    assert cost.crossover(H=1, D=8, Hidx=2, Di=8) == math.inf


def test_index_and_sparse_terms_are_equal_at_131072():
    assert cost.index_dominates() == 131_072
    assert cost.index_flops(131_072) == cost.sparse_flops(131_072)


@pytest.mark.parametrize(("N", "pairs"), [(16_384, 30_547_968), (32_768, 63_062_016), (1_048_576, 2_078_932_992)])
def test_gathered_pairs_are_the_contracts(N, pairs):
    assert cost.gathered_pairs(N) == pairs


@pytest.mark.parametrize("block_size", [1, 2, 5, 16])
@pytest.mark.parametrize("topk", [1, 2, 3, 7])
def test_closed_forms_equal_loops(topk, block_size):
    for N in range(1, 70):
        edges = sum(min(i // block_size + 1, topk) for i in range(N))
        pairs = sum(min(i // block_size, topk - 1) * block_size + i % block_size + 1 for i in range(N))
        assert cost.block_edges(N, topk, block_size) == edges
        assert cost.gathered_pairs(N, topk, block_size) == pairs
        assert cost.causal_pairs(N) == sum(i + 1 for i in range(N))


def test_toy_has_60_edges():
    assert 2 * cost.block_edges(12, topk=3, block_size=2) == 60


def test_selecting_every_block_is_dense():
    assert cost.gathered_pairs(1000, topk=100, block_size=16) == cost.causal_pairs(1000)
    dense = cost.exact_dense_flops(1000, H=4, D=8, Dv=6)
    assert dense == 1000 * 1001 // 2 * 4 * (2 * 8 + 2 * 6)
    index = 2 * 2 * 4 * cost.causal_pairs(1000)
    assert cost.exact_msa_flops(1000, H=4, D=8, Hidx=2, Di=4, topk=100, block_size=16, Dv=6) == dense + index


def test_exact_counts_stay_below_equation_12_and_approach_it():
    for N in (2**12, 2**16, 2**20, 2**30):
        assert cost.exact_msa_flops(N) < cost.msa_flops(N) * (1 + 1 / N)
    assert cost.exact_dense_flops(2**30) == pytest.approx(cost.dense_flops(2**30), rel=1e-8)
    assert cost.exact_msa_flops(2**30) == pytest.approx(cost.msa_flops(2**30), rel=1e-4)


def test_arithmetic_intensity_of_both_traversals():
    query_outer, kv_outer = cost.query_outer_traffic(), cost.kv_outer_traffic()
    assert round(query_outer.intensity, 2) == 15.88
    assert round(kv_outer.intensity, 1) == 83.4
    assert query_outer.flops == kv_outer.flops == cost.sparse_flops(1, H=16, D=128)
    assert cost.query_outer_traffic(topk=10**6).intensity == pytest.approx(16, rel=1e-4)
    assert cost.kv_outer_traffic(G=10**6, topk=10**6).intensity == pytest.approx(2 / 3 * 128, rel=1e-4)


@pytest.mark.parametrize("N", [2048, 16_384, 131_072, 1_048_576])
def test_decode_ratio(N):
    assert cost.decode_ratio(N) == pytest.approx(8 / (1 + 16_384 / N), rel=1e-12)


def test_decode_bytes():
    assert round(cost.decode_ratio(1_048_576), 2) == 7.88
    assert cost.dense_decode_bytes(10, Hkv=2, D=4, Dv=6, bytes_per_element=1) == 200
    short = cost.msa_decode_bytes(10, Hkv=2, D=4, Hik=1, Di=8, topk=3, block_size=8, Dv=6, bytes_per_element=1)
    assert short == 200 + 80  # fewer tokens than topk blocks hold


def test_energy():
    joules = cost.joules_per_flop(700, 989e12, 0.4)
    assert joules == pytest.approx(1.77e-12, rel=1e-2)
    assert cost.training_kwh(3.6e6, 1.0) == pytest.approx(3.0)
    assert cost.training_kwh(3.6e6, 2.0, passes=3.5) == pytest.approx(7.0)
    assert cost.irish_data_centre_seconds(7663e6) == 365 * 86_400
    assert cost.irish_data_centre_seconds(6973e6, year=2024) == 366 * 86_400


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: cost.dense_flops(0), ValueError, "N must be at least 1, got 0"),
        (lambda: cost.dense_flops(4096.0), TypeError, "N must be an int"),
        (lambda: cost.flop_ratio(4096, topk=0), ValueError, "topk must be at least 1, got 0"),
        (lambda: cost.gathered_pairs(8, block_size=-1), ValueError, "block_size must be at least 1, got -1"),
        (lambda: cost.query_outer_traffic(G=True), TypeError, "G must be an int"),
        (lambda: cost.exact_dense_flops(8, Dv=0), ValueError, "Dv must be at least 1, got 0"),
        (lambda: cost.training_kwh(1e12, -1.0), ValueError, "joules_per_flop must be finite and > 0, got -1.0"),
        (lambda: cost.training_kwh("1e12", 1.0), TypeError, "forward_flops must be a number, got str"),
        (lambda: cost.joules_per_flop(700, 989e12, 40), ValueError, "utilisation must be at most 1, got 40"),
        (lambda: cost.irish_data_centre_seconds(1.0, year=1999), ValueError, r"year must be one of \[2024, 2025\]"),
    ],
)
def test_bad_input(call, error, message):
    with pytest.raises(error, match=message):
        call()
