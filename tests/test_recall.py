"""Recall against loops and exhaustive search over sets of blocks; selections to compare with; packing; bad input."""

import itertools
import math

import pytest
import torch

from msa_ref import recall
from msa_ref.problem import BlockGeometry

PACKINGS = [None, [0, 5, 5, 14, 23]]
N, BLOCK, HEADS, KV_HEADS, INDEX_HEADS = 23, 3, 4, 2, 2


def tensors(N=N, B=1, seed=0, sharpness=3.0):
    generator = torch.Generator().manual_seed(seed)
    q = sharpness * torch.randn(B, HEADS, N, 8, generator=generator, dtype=torch.float64)
    return q, torch.randn(B, KV_HEADS, N, 8, generator=generator, dtype=torch.float64)


def teacher(cu_seqlens=None, **options):
    q, k = tensors(**options)
    return recall.teacher_block_mass(q, k, index_heads=INDEX_HEADS, block_size=BLOCK, cu_seqlens=cu_seqlens, chunk=4)


def row(selection, head, query):
    return [block for block in selection[0, head, query].tolist() if block >= 0]


@pytest.mark.parametrize("cu_seqlens", PACKINGS)
@pytest.mark.parametrize("index_heads", [1, 2, 4])
def test_teacher_mass_equals_loops(cu_seqlens, index_heads):
    q, k = tensors()
    mass = recall.teacher_block_mass(q, k, index_heads=index_heads, block_size=BLOCK, cu_seqlens=cu_seqlens, chunk=4)
    geometry = BlockGeometry(N, BLOCK, cu_seqlens)
    expected = torch.zeros(1, index_heads, N, geometry.blocks, dtype=torch.float64)
    for h, i in itertools.product(range(HEADS), range(N)):
        first = int(geometry.block_start[geometry.first_block[i]])
        logits = [float(q[0, h, i] @ k[0, h // 2, j]) / math.sqrt(8) for j in range(first, i + 1)]
        total = sum(map(math.exp, logits))
        for j, logit in enumerate(logits, first):
            share = math.exp(logit) / total / (HEADS // index_heads)
            expected[0, h * index_heads // HEADS, i, geometry.block_of[j]] += share
    torch.testing.assert_close(mass, expected, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(mass.sum(-1), torch.ones(1, index_heads, N, dtype=torch.float64))


def test_teacher_mass_does_not_depend_on_the_chunk_or_the_dtype():
    q, k = tensors(B=2)
    whole = recall.teacher_block_mass(q, k, index_heads=2, block_size=4, chunk=1000)
    for chunk in (1, 7):
        again = recall.teacher_block_mass(q, k, index_heads=2, block_size=4, chunk=chunk)
        torch.testing.assert_close(again, whole, rtol=1e-12, atol=1e-14)
    single = recall.teacher_block_mass(q.float(), k.float(), index_heads=2, block_size=4)
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), whole, rtol=1e-4, atol=1e-5)


def test_autocast_does_not_change_the_teacher_mass():
    q, k = (tensor.float() for tensor in tensors())
    expected = recall.teacher_block_mass(q, k, index_heads=2, block_size=BLOCK)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(recall.teacher_block_mass(q, k, index_heads=2, block_size=BLOCK), expected)


@pytest.mark.parametrize("cu_seqlens", PACKINGS)
@pytest.mark.parametrize("exclude_own", [False, True])
def test_recall_equals_exhaustive_search(cu_seqlens, exclude_own):
    topk, mass, geometry = 3, teacher(cu_seqlens), BlockGeometry(N, BLOCK, cu_seqlens)
    selection = recall.random_blocks(N, BLOCK, topk, seed=1, index_heads=INDEX_HEADS, cu_seqlens=cu_seqlens)
    best = recall.oracle_blocks(mass, topk=topk, block_size=BLOCK, cu_seqlens=cu_seqlens)
    options = {"block_size": BLOCK, "cu_seqlens": cu_seqlens, "reduction": "none"}
    scores = recall.score_recall(mass, selection, exclude_own=exclude_own, **options)
    captured = recall.captured_mass(mass, selection, **options)
    shares = recall.block_recall(selection, best, exclude_own=exclude_own, **options)
    for head, query in itertools.product(range(INDEX_HEADS), range(N)):
        own, first = int(geometry.block_of[query]), int(geometry.first_block[query])
        values = [scores[0, head, query], captured[0, head, query], shares[0, head, query]]
        if own - first + 1 <= topk:
            assert all(map(math.isnan, values))
            continue
        others = mass[0, head, query].tolist()
        best_set = max(itertools.combinations(range(first, own), topk - 1), key=lambda s: sum(others[b] for b in s))
        chosen = set(row(selection, head, query))
        assert own in chosen and len(chosen) == topk
        assert set(row(best, head, query)) == {own, *best_set}
        dropped = {own} if exclude_own else set()
        wanted = {own, *best_set} - dropped
        expected = sum(others[b] for b in chosen - dropped) / sum(others[b] for b in wanted)
        assert float(values[0]) == pytest.approx(expected, rel=1e-12)
        assert float(values[1]) == pytest.approx(sum(others[b] for b in chosen), rel=1e-12)
        assert float(values[2]) == pytest.approx(len(chosen & wanted) / len(wanted))


def test_means_are_over_the_rows_with_a_choice():
    topk, mass = 3, teacher()
    selection = recall.random_blocks(N, BLOCK, topk, seed=1, index_heads=INDEX_HEADS)
    every = recall.score_recall(mass, selection, block_size=BLOCK, all_rows=True, reduction="none")
    trivial = topk * BLOCK
    torch.testing.assert_close(every[..., :trivial], torch.ones_like(every[..., :trivial]))
    assert recall.score_recall(mass, selection, block_size=BLOCK) == pytest.approx(every[..., trivial:].mean().item())
    assert recall.score_recall(mass, selection, block_size=BLOCK, all_rows=True) == pytest.approx(every.mean().item())
    assert recall.score_recall(mass, recall.last_blocks(N, BLOCK, 8, index_heads=INDEX_HEADS), block_size=BLOCK).isnan()


@pytest.mark.parametrize("exclude_own", [False, True])
def test_no_selection_beats_the_oracle(exclude_own):
    mass = teacher(sharpness=1.0)
    options = {"block_size": BLOCK, "exclude_own": exclude_own}
    best = recall.oracle_blocks(mass, topk=3, block_size=BLOCK)
    assert recall.score_recall(mass, best, **options) == pytest.approx(1.0, abs=1e-12)
    assert recall.block_recall(best, best, **options) == 1.0
    for seed in range(5):
        other = recall.random_blocks(N, BLOCK, 3, seed=seed, index_heads=INDEX_HEADS, local_blocks=0)
        scores = recall.score_recall(mass, other, reduction="none", **options)
        assert (scores[..., 9:] < 1 + 1e-12).all() and scores[..., 9:].mean() < 0.95


def test_a_row_with_nothing_to_recall_is_left_out():
    mass = torch.zeros(1, 1, 4, 4, dtype=torch.float64)
    mass[0, 0].fill_diagonal_(1.0)
    selection = recall.last_blocks(4, 1, 2)
    assert recall.score_recall(mass, selection, block_size=1) == 1
    assert recall.score_recall(mass, selection, block_size=1, exclude_own=True).isnan()
    own_only = selection[..., :1].clone()
    own_only[0, 0, :, 0] = torch.arange(4)
    assert recall.score_recall(mass, own_only, block_size=1) == 1
    assert recall.block_recall(own_only, own_only, block_size=1, exclude_own=True).isnan()
    assert recall.score_recall(teacher()[:, :1, :4, :4], own_only, block_size=1, exclude_own=True).isnan()


def test_the_oracle_fills_up_with_visible_blocks_without_mass():
    mass = torch.zeros(1, 1, 6, 6)
    mass[0, 0].fill_diagonal_(1.0)
    best = recall.oracle_blocks(mass, topk=3, block_size=1, cu_seqlens=[0, 2, 6])
    assert best[0, 0].tolist() == [[0, -1, -1], [0, 1, -1], [2, -1, -1], [2, 3, -1], [2, 3, 4], [2, 3, 5]]


@pytest.mark.parametrize("cu_seqlens", PACKINGS)
def test_controls_follow_the_rules_of_selection(cu_seqlens):
    topk, geometry = 4, BlockGeometry(N, BLOCK, cu_seqlens)
    last = recall.last_blocks(N, BLOCK, topk, batch=1, index_heads=2, init_blocks=1, cu_seqlens=cu_seqlens)
    drawn = recall.random_blocks(
        N, BLOCK, topk, seed=3, index_heads=2, local_blocks=2, init_blocks=1, cu_seqlens=cu_seqlens
    )
    for head, query in itertools.product(range(2), range(N)):
        own, first = int(geometry.block_of[query]), int(geometry.first_block[query])
        visible = list(range(first, own + 1))
        newest = sorted({first, *visible[-(topk - 1) :]}) if len(visible) > topk else visible
        assert last[0, head, query].tolist() == newest + [-1] * (topk - len(newest))
        chosen = row(drawn, head, query)
        assert {first, *visible[-2:]} <= set(chosen) <= set(visible)
        assert len(chosen) == min(topk, len(visible)) and chosen == sorted(chosen)
    assert last.dtype == drawn.dtype == torch.int32
    again = recall.random_blocks(
        N, BLOCK, topk, seed=3, index_heads=2, local_blocks=2, init_blocks=1, cu_seqlens=cu_seqlens
    )
    assert torch.equal(drawn, again)


def test_random_blocks_are_uniform_over_the_visible_ones():
    drawn = recall.random_blocks(80, 8, 4, seed=0, batch=500)[:, 0, 79]
    counts = drawn.flatten().long().bincount(minlength=10)
    assert counts[9] == 500
    assert ((counts[:9] / 500 - 3 / 9).abs() < 0.1).all()
    assert not torch.equal(drawn, recall.random_blocks(80, 8, 4, seed=1, batch=500)[:, 0, 79])


def test_packed_documents_equal_separate_calls():
    offsets = PACKINGS[1]
    q, k = tensors()
    mass = teacher(offsets)
    best = recall.oracle_blocks(mass, topk=2, block_size=BLOCK, cu_seqlens=offsets)
    start_block = 0
    for start, end in zip(offsets[:-1], offsets[1:], strict=True):
        if start == end:
            continue
        part = (q[:, :, start:end], k[:, :, start:end])
        alone = recall.teacher_block_mass(*part, index_heads=INDEX_HEADS, block_size=BLOCK)
        blocks = alone.shape[-1]
        torch.testing.assert_close(mass[:, :, start:end, start_block : start_block + blocks], alone)
        ids = recall.oracle_blocks(alone, topk=2, block_size=BLOCK)
        assert torch.equal(best[:, :, start:end], torch.where(ids < 0, ids, ids + start_block))
        start_block += blocks


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda q, k, m, s: recall.teacher_block_mass(q, k, index_heads=3), ValueError, "index_heads"),
        (lambda q, k, m, s: recall.teacher_block_mass(q, k, index_heads=2, chunk=0), ValueError, "chunk must be at"),
        (lambda q, k, m, s: recall.teacher_block_mass(q, k.float(), index_heads=2), TypeError, "k float32"),
        (lambda q, k, m, s: recall.captured_mass(m, s, block_size=4), ValueError, "mass must have NB=6 .* got 8"),
        (lambda q, k, m, s: recall.captured_mass(m, s.clamp(min=1), block_size=3), ValueError, "in the future"),
        (lambda q, k, m, s: recall.captured_mass(m.int(), s, block_size=3), TypeError, "mass must be a floating"),
        (lambda q, k, m, s: recall.score_recall(m[:, :1], s, block_size=3), ValueError, r"share \[B, Hidx, N\]"),
        (lambda q, k, m, s: recall.score_recall(m, s, block_size=3, reduction="sum"), ValueError, "got 'sum'"),
        (lambda q, k, m, s: recall.block_recall(s, s[:, :1], block_size=3), ValueError, r"share \[B, Hidx, N\]"),
        (lambda q, k, m, s: recall.oracle_blocks(m, topk=0, block_size=3), ValueError, "topk must be at least 1"),
        (lambda q, k, m, s: recall.last_blocks(9, 3, 1, init_blocks=1), ValueError, r"topk must be .* = 1 \+ 1, got 1"),
        (lambda q, k, m, s: recall.last_blocks(9, 3, 1, cu_seqlens=[0, 8]), ValueError, "must end at N=9, got 8"),
        (lambda q, k, m, s: recall.random_blocks(9, 3, 1.5, seed=0), TypeError, "topk must be an int"),
    ],
)
def test_bad_input(call, error, message):
    q, k = tensors()
    selection = recall.last_blocks(N, BLOCK, 2, index_heads=INDEX_HEADS)
    with pytest.raises(error, match=message):
        call(q, k, teacher(), selection)
