"""What random numbers do not reach: ties and NaN in the selection, and rows without tokens."""

import pytest
import torch
from cases import block_of, every_implementation, every_reference, every_topk, usual_inputs
from compare import (
    GRADIENTS,
    IMPLEMENTATIONS,
    assert_close,
    assert_equal,
    random_inputs,
    random_like,
    run,
    run_reference,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from msa_ref import naive

NAN, INF = torch.nan, torch.inf
OPTIONS = {"topk": 2, "block_size": 16}


def select(implementation, scores, dtype=torch.float32, *, block_size, **options):
    """The ids of the last query, for keys of the given scores; each key is repeated to fill blocks for the kernels."""
    repeat = block_of(implementation, block_size) // block_size
    if "cu_seqlens" in options:
        options["cu_seqlens"] = [repeat * offset for offset in options["cu_seqlens"]]
    index_k = torch.tensor(scores, dtype=dtype).repeat_interleave(repeat).view(1, 1, -1, 1)
    ids = IMPLEMENTATIONS[implementation].select_blocks(
        torch.ones_like(index_k), index_k, block_size=repeat * block_size, **options
    )
    assert ids.dtype == torch.int32 and ids.shape == (1, 1, repeat * len(scores), options["topk"])
    return ids[0, 0, -1].tolist()


@every_implementation
@pytest.mark.parametrize(
    ("scores", "options", "expected"),
    [
        # Blocks of two tokens; the last query sees all of them.
        ([1, 5, 4, 9, 2, 2, 0, 0], {"topk": 2}, [1, 3]),
        ([1, 5, 4, 9, 2, 2, 0, 0], {"topk": 2, "local_blocks": 0}, [0, 1]),
        ([1, 5, 4, 9, 2, 2, 0, 0], {"topk": 2, "local_blocks": 2}, [2, 3]),
        ([1, 5, 4, 9, 6, 6, 0, 0], {"topk": 3, "init_blocks": 1}, [0, 1, 3]),
        ([1, 5, 4, 9, 6, 6, 0, 0], {"topk": 2, "init_blocks": 1}, [0, 3]),
        ([1, 5, 4, 9, 6, 6, 0, 0], {"topk": 6}, [0, 1, 2, 3, -1, -1]),
        ([3, 0], {"topk": 4, "local_blocks": 2, "init_blocks": 2}, [0, -1, -1, -1]),
        # A tie keeps the lower id, and so does a tie in which every score is equal.
        ([0, 7, 1, 1, 7, 0, 7, 7, 0, 0], {"topk": 3}, [0, 2, 4]),
        ([0] * 12, {"topk": 4}, [0, 1, 2, 5]),
        # NaN: ignored beside a number, below every number on its own, still above nothing.
        ([NAN, 5, 4, 4, 6, NAN, 0, 0], {"topk": 3}, [0, 2, 3]),
        ([NAN, NAN, -8, -9, -7, -9, 0, 0], {"topk": 3}, [1, 2, 3]),
        ([NAN, NAN, -INF, -INF, -INF, -INF, 0, 0], {"topk": 3}, [1, 2, 3]),
        ([NAN, NAN, -INF, -INF, NAN, NAN, 0, 0], {"topk": 3}, [0, 1, 3]),
        ([NAN] * 8, {"topk": 3, "local_blocks": 0}, [0, 1, 2]),
        # Infinite scores, and the last query's own block whatever it scores.
        ([-INF, -INF, INF, 0, INF, -3, -INF, -INF], {"topk": 2}, [1, 3]),
        ([9, 9, -INF, -INF, 8, 8, NAN, NAN], {"topk": 2, "local_blocks": 0}, [0, 2]),
        # The last query of the second document; its blocks are 2, 3 and 4.
        ([99, 99, 99, 5, 5, 7, 7, 1], {"topk": 2, "cu_seqlens": [0, 3, 8]}, [3, 4]),
        ([99, 99, 99, 5, 5, 7, 7, 1], {"topk": 2, "cu_seqlens": [0, 3, 8], "init_blocks": 1}, [2, 4]),
        ([99, 99, 99, 5, 5, 7, 7, 1], {"topk": 5, "cu_seqlens": [0, 3, 3, 8]}, [2, 3, 4, -1, -1]),
    ],
)
def test_selection_rules(scores, options, expected, implementation):
    dtypes = (torch.float32, torch.bfloat16, torch.float64)
    for dtype in dtypes[:2] if implementation == "triton" else dtypes:
        assert select(implementation, scores, dtype, block_size=2, **options) == expected


@every_implementation
def test_scores_are_compared_as_accumulated(implementation):
    # 256 and 257 are one bfloat16 and one float16 number apart or none at all; in float32 they differ.
    size = block_of(implementation, 2)
    index_k = torch.tensor([[255.0, 1], [255, 2], [0, 0]]).repeat_interleave(size, 0).expand(1, 1, -1, -1)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        ids = IMPLEMENTATIONS[implementation].select_blocks(
            torch.ones_like(index_k, dtype=dtype), index_k.to(dtype), topk=2, block_size=size
        )
        assert ids[0, 0, -1].tolist() == [1, 2]


@every_reference
def test_float64_scores_are_compared_in_float64(implementation):
    assert select(implementation, [1.0, 1 + 1e-12, 0.0], torch.float64, topk=2, block_size=1) == [1, 2]


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(
    scores=st.lists(st.sampled_from([-INF, -1.0, 0.0, 1.0, INF, NAN]), min_size=1, max_size=12),
    topk=st.integers(2, 5), local_blocks=st.integers(0, 1), init_blocks=st.integers(0, 1),
    block_size=st.integers(1, 3),
)  # fmt: skip
def test_selections_agree_on_odd_scores(scores, block_size, **options):
    for name, implementation in IMPLEMENTATIONS.items():
        size, repeat = (16, 8) if name == "triton" else (block_size, 1)
        index_k = torch.tensor(scores).repeat_interleave(repeat).view(1, 1, -1, 1)
        call = {"block_size": size, **options}
        expected = naive.select_blocks(torch.ones_like(index_k), index_k, **call)
        assert_equal(implementation.select_blocks(torch.ones_like(index_k), index_k, **call), expected, name)


@every_implementation
def test_ids_in_any_order_with_empty_rows_and_earlier_documents(implementation):
    size = block_of(implementation, 8)
    stretch = size // 8
    inputs = random_inputs(0, B=1, N=40 * stretch, Dv=8)
    # Blocks start at 0, 8, 13, 21, 29 and 37 times the stretch.
    place = {"block_size": size, "cu_seqlens": [0, 13 * stretch, 40 * stretch]}
    options = {"topk": 3, "reduction": "none", **place}
    ids = naive.select_blocks(inputs["index_q"], inputs["index_k"], topk=3, **place).flip(-1)
    empty, foreign, mixed, reverse = (row * stretch for row in (5, 30, 31, 33))
    ids[0, 0, empty] = -1
    ids[0, 1, foreign] = torch.tensor([0, -1, 1])  # only blocks of the earlier document
    ids[0, 1, mixed] = torch.tensor([0, -1, 4])
    ids[0, 0, reverse] = torch.tensor([4, 2, -1])
    dout, dkl = random_like(inputs["q"][..., :8], 1), random_like(inputs["index_q"][..., 0], 2)
    actual = run(implementation, inputs, options, dout, dkl, ids)
    reference = run_reference(inputs, options, dout, dkl, ids)
    for name in ("out", "lse", "kl", *GRADIENTS):
        assert_close(actual[name], reference[name], 1e-5, name)
    for head, row in ((0, empty), (1, foreign)):
        heads = slice(3 * head, 3 * head + 3)
        assert (actual["lse"][0, heads, row] == -INF).all() and actual["kl"][0, head, row] == 0
        for name in ("out", "dq"):
            assert not actual[name][0, heads, row].any()
        assert not actual["d_index_q"][0, head, row].any()
    with pytest.raises(ValueError, match="block 5, which is in the future"):
        run(implementation, inputs, options, dout, dkl, ids.masked_fill(ids == 4, 5))


@every_implementation
@every_topk
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_nan_in_one_query_stays_in_its_row(topk, implementation):
    inputs = usual_inputs(implementation, B=2, N=77)
    inputs["index_q"][..., 0] += 0.25
    options = OPTIONS | {"topk": topk, "reduction": "none"}
    before = run(implementation, inputs, options)
    changed = {name: tensor.clone() for name, tensor in inputs.items()}
    changed["q"][0, 1, 5, 3] = NAN
    changed["index_q"][1, 0, 50, 2] = NAN
    after = run(implementation, changed, options)
    assert after["out"][0, 1, 5].isnan().all() and after["lse"][0, 1, 5].isnan()
    assert after["kl"][0, 0, 5].isnan() and after["kl"][1, 0, 50].isnan()
    for name, rows in (("out", [(0, 1, 5)]), ("lse", [(0, 1, 5)]), ("kl", [(0, 0, 5), (1, 0, 50)])):
        for row in rows:
            after[name][row] = before[name][row]
        if name != "kl" and topk is not None:  # the NaN index query chose other blocks
            after[name][1, :3, 50] = before[name][1, :3, 50]
        assert_equal(after[name], before[name], name)
    if topk is not None:
        after["ids"][1, 0, 50] = before["ids"][1, 0, 50]
    assert_equal(after["ids"], before["ids"], "ids")


@every_implementation
@every_topk
def test_the_same_call_gives_the_same_bits(topk, implementation):
    inputs = usual_inputs(implementation, B=1)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        first, second = (run(implementation, inputs, OPTIONS | {"topk": topk}) for _ in range(2))
    finally:
        torch.set_num_threads(threads)
    for name in ("out", "lse", "kl", "ids", *GRADIENTS):
        assert_equal(second[name], first[name], name)
