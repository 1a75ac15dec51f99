"""Tasks, unions and ranges of `msa_triton.schedule` against what they stand for, element by element."""

import pytest
import torch
from compare import assert_equal
from hypothesis import given, settings
from hypothesis import strategies as st

from msa_ref import naive
from msa_ref.problem import BlockGeometry

schedule = pytest.importorskip("msa_triton.schedule")

TASK_EDGES = 8


@st.composite
def selections(draw):
    """(ids [1, pairs, N, slots] in any order, with unused slots and empty rows; the geometry of several documents)."""
    block_size, slots, pairs = draw(st.integers(1, 6)), draw(st.integers(1, 4)), draw(st.integers(1, 3))
    lengths = draw(st.lists(st.integers(0, 15), min_size=1, max_size=4))
    offsets = [0, *torch.tensor([*lengths, 1]).cumsum(0).tolist()]
    geometry = BlockGeometry(offsets[-1], block_size, offsets)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    index = torch.randint(-2, 3, (1, pairs + 1, offsets[-1], 2), generator=generator).float()
    ids = naive.select_blocks(index[:, 1:], index[:, :1], topk=slots, block_size=block_size, cu_seqlens=offsets)
    ids = ids[..., torch.randperm(slots, generator=generator)]
    ids[torch.rand(ids.shape, generator=generator) < draw(st.sampled_from((0.0, 0.4)))] = -1
    return ids, geometry


exhaustive = settings(max_examples=30, deadline=None, derandomize=True, database=None)


def tasks_of(work, pair, block):
    """(first edge, end edge) of the tasks of a block."""
    begin, end = work.offsets[pair, block : block + 2].tolist()
    assert all(task[0] == block for task in work.tasks[pair, begin:end].tolist())
    return [tuple(task[1:]) for task in work.tasks[pair, begin:end].tolist()]


@exhaustive
@given(selection=selections())
def test_the_tasks_of_a_block_are_the_queries_that_chose_it(selection):
    ids, geometry = selection
    ids = schedule.visible_ids(ids, geometry)
    work = schedule.reverse_tasks(ids, geometry.blocks, TASK_EDGES)
    assert work.edges.shape == (len(ids), ids[0].numel())
    for pair, chosen in enumerate(ids.flatten(1)):
        for block in range(geometry.blocks):
            tasks = tasks_of(work, pair, block)
            edges = [work.edges[pair, begin:end] for begin, end in tasks]
            assert all(len(part) == TASK_EDGES for part in edges[:-1]) and all(0 < len(part) for part in edges)
            found = [edge for part in edges for edge in part.tolist()]
            assert found == (chosen == block).nonzero().flatten().tolist()
        # Tasks that no block has are empty.
        assert (work.tasks[pair, work.offsets[pair, -1] :, 1] == work.tasks[pair, work.offsets[pair, -1] :, 2]).all()
        assert sum(int(end - begin) for _, begin, end in work.tasks[pair]) == (chosen >= 0).sum()


@pytest.mark.parametrize("blocks, block_size, topk", [(5, 16, 2), (4, 4, 4), (3, 8, 9), (6, 2, 1)])
def test_full_blocks_have_the_number_of_edges_of_the_closed_form(blocks, block_size, topk):
    tokens = blocks * block_size
    index = torch.randint(-2, 3, (2, 1, tokens, 2), generator=torch.Generator().manual_seed(0)).float()
    ids = naive.select_blocks(index, index, topk=topk, block_size=block_size)
    geometry = BlockGeometry(tokens, block_size, None)
    work = schedule.reverse_tasks(schedule.visible_ids(ids, geometry), blocks, TASK_EDGES)
    expected = sum(min(token // block_size + 1, topk) for token in range(tokens))
    assert (work.tasks[..., 2] - work.tasks[..., 1]).sum(1).tolist() == [expected, expected]


@exhaustive
@given(selection=selections())
def test_ids_that_a_query_does_not_see_are_unused(selection):
    ids, geometry = selection
    tokens = ids.shape[2]
    everywhere = torch.arange(geometry.blocks).expand(1, 1, tokens, -1)
    seen = schedule.visible_ids(everywhere, geometry)
    for query in range(tokens):
        first, own = int(geometry.first_block[query]), int(geometry.block_of[query])
        expected = [block if first <= block <= own else -1 for block in range(geometry.blocks)]
        assert seen[0, query].tolist() == expected
    assert_equal(schedule.visible_ids(ids, geometry), ids.flatten(0, 1))
    assert schedule.visible_ids(None, geometry) is None


@exhaustive
@given(selection=selections())
def test_dense_tasks_are_all_later_queries_of_the_document(selection):
    _, geometry = selection
    work = schedule.dense_tasks(geometry, "cpu", TASK_EDGES)
    assert work.edges is None and len(work.tasks) == len(work.offsets) == 1
    for block in range(geometry.blocks):
        document = geometry.first_block == geometry.first_block[geometry.block_of == block][0]
        expected = [query for query in document.nonzero().flatten().tolist() if geometry.block_of[query] >= block]
        found = [range(begin, end) for begin, end in tasks_of(work, 0, block)]
        assert [query for part in found for query in part] == expected
        assert all(len(part) == TASK_EDGES for part in found[:-1])


@exhaustive
@given(selection=selections(), tile_queries=st.sampled_from((1, 2, 8, 64)))
def test_the_union_of_a_tile_holds_every_block_of_its_queries_once(selection, tile_queries):
    ids, geometry = selection
    ids = schedule.visible_ids(ids, geometry)
    unions = schedule.tile_unions(ids, tile_queries, geometry.blocks)
    for pair, rows in enumerate(ids):
        for tile, part in enumerate(rows.split(tile_queries)):
            size, *blocks = unions[pair, tile].tolist()
            assert blocks[:size] == sorted(set(part[part >= 0].tolist()))
    assert unions.shape[1] == -(-ids.shape[1] // tile_queries)
    assert schedule.tile_unions(None, tile_queries, geometry.blocks) is None


@pytest.mark.parametrize("count, bytes_each", [(1, 1), (7, 10), (7, 35), (7, 1000), (100, 3)])
def test_ranges_cover_everything_and_fit_the_working_memory(monkeypatch, count, bytes_each):
    monkeypatch.setattr(schedule, "WORKING_BYTES", 100)
    found = list(schedule.ranges(count, bytes_each))
    assert [thing for start, stop in found for thing in range(start, stop)] == list(range(count))
    assert all(stop - start == 1 or (stop - start) * bytes_each <= 100 for start, stop in found)
