"""Laws that hold for any input (SPEC 9), on every implementation."""

import functools

import pytest
import torch
from cases import (
    TOKENS,
    assert_equal_runs,
    every_heads,
    every_implementation,
    every_reference,
    every_topk,
    finest,
    named_heads,
    skip_float64,
    usual_inputs,
)
from compare import (
    GRADIENTS,
    IMPLEMENTATIONS,
    assert_close,
    assert_equal,
    random_inputs,
    random_like,
    run,
)
from hypothesis import example, given, settings
from hypothesis import strategies as st

from msa_ref import blockwise, naive
from msa_ref.problem import BlockGeometry

few = functools.partial(settings, deadline=None, derandomize=True, database=None)
seeds = st.integers(0, 2**16)
block_sizes = st.integers(1, 6)
topks = st.integers(1, 4)


@st.composite
def documents(draw, longest=12):
    """Offsets of one to four documents, some of them empty."""
    offsets = [0]
    for length in draw(st.lists(st.integers(0, longest), min_size=1, max_size=4)):
        offsets.append(offsets[-1] + length)
    return offsets if offsets[-1] else [*offsets, offsets[-1] + 1]


def causal_attention(q, k, v, mask=None):
    """PyTorch's own, with the heads of k and v repeated; differentiable."""
    k, v = (tensor.repeat_interleave(q.shape[1] // tensor.shape[1], dim=1) for tensor in (k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None)


def assert_attends_like(result, inputs, dout, mask=None, label="", error=1e-12):
    leaves = [inputs[name].double().requires_grad_() for name in ("q", "k", "v")]
    out = causal_attention(*leaves, mask)
    gradients = torch.autograd.grad(out, leaves, dout.double())
    for name, expected in zip(("out", "dq", "dk", "dv"), (out, *gradients), strict=True):
        assert_close(result[name], expected, error, f"{label} {name}")


def all_visible(tokens, block_size, topk):
    """[N, topk] ids of all blocks of an unpacked row up to each query's own."""
    block = torch.arange(topk)
    return block.where(block <= torch.arange(tokens)[:, None] // block_size, -1)


@every_reference
@few(max_examples=8)
@given(seed=seeds, block_size=block_sizes, topk=topks, cu_seqlens=documents())
def test_1_zero_queries_average_the_selected_values(implementation, seed, block_size, topk, cu_seqlens):
    tokens, (dtype, error) = cu_seqlens[-1], finest(implementation)
    inputs = random_inputs(seed, B=1, N=tokens, D=4, Dv=1, Di=4, dtype=dtype)
    inputs["q"].zero_()
    inputs["v"].copy_(torch.arange(tokens)[:, None])
    place = {"block_size": block_size, "cu_seqlens": cu_seqlens}
    result = run(implementation, inputs, {"topk": topk, **place})
    geometry = BlockGeometry(tokens, **place)
    for head in range(6):
        for query in range(tokens):
            chosen = [
                token for token in range(query + 1)
                if geometry.block_of[token] in result["ids"][0, head // 3, query]
                and geometry.first_block[token] == geometry.first_block[query]
            ]  # fmt: skip
            mean, count = sum(chosen) / len(chosen), torch.tensor(len(chosen), dtype=torch.float64)
            assert float(result["out"][0, head, query, 0]) == pytest.approx(mean, rel=error, abs=error)
            assert float(result["lse"][0, head, query]) == pytest.approx(float(count.log()), abs=error)


@every_reference
@few(max_examples=6)
@given(seed=seeds, tokens=st.integers(1, 30), block_size=block_sizes, more=st.integers(0, 3))
def test_2_enough_blocks_equal_dense_causal_attention(implementation, seed, tokens, block_size, more):
    dtype, error = finest(implementation)
    inputs = usual_inputs(implementation, seed, N=tokens, D=5, Dv=3, Di=4, dtype=dtype)
    dout = random_like(inputs["q"][..., :3], seed)
    blocks = -(-tokens // block_size)
    for topk in (blocks + more, None):
        result = run(implementation, inputs, {"topk": topk, "block_size": block_size}, dout)
        assert_attends_like(result, inputs, dout, label=f"topk {topk}", error=error)
        if topk is not None:
            assert_equal(result["ids"], all_visible(tokens, block_size, topk).expand_as(result["ids"]), f"topk {topk}")


@every_reference
@few(max_examples=6)
@given(seed=seeds, block_size=block_sizes, topk=topks)
def test_2_rows_before_the_selection_is_full_are_dense_too(implementation, seed, block_size, topk):
    dense_rows = topk * block_size
    dtype, error = finest(implementation)
    inputs = usual_inputs(implementation, seed, N=dense_rows + 2 * block_size + 1, D=4, Di=4, dtype=dtype)
    result = run(implementation, inputs, {"topk": topk, "block_size": block_size})
    expected = causal_attention(inputs["q"], inputs["k"], inputs["v"])
    assert_close(result["out"][:, :, :dense_rows], expected[:, :, :dense_rows], error, "out")
    ids = all_visible(dense_rows, block_size, topk)
    assert_equal(result["ids"][:, :, :dense_rows], ids.expand(*result["ids"].shape[:2], -1, -1), "ids")


@every_reference
@few(max_examples=6)
@given(seed=seeds, tokens=st.integers(1, 30), block_size=block_sizes)
def test_3_one_block_is_block_diagonal_attention(implementation, seed, tokens, block_size):
    dtype, error = finest(implementation)
    inputs = usual_inputs(implementation, seed, N=tokens, D=5, Dv=3, Di=4, dtype=dtype)
    dout = random_like(inputs["q"][..., :3], seed)
    block = torch.arange(tokens) // block_size
    mask = (block == block[:, None]).tril()
    result = run(implementation, inputs, {"topk": 1, "block_size": block_size}, dout)
    assert_attends_like(result, inputs, dout, mask, error=error)
    assert_equal(result["ids"], block[:, None].expand_as(result["ids"]), "ids")


@every_implementation
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@every_topk
def test_4_a_student_equal_to_its_teacher_has_no_loss(topk, dtype, implementation):
    skip_float64(implementation, dtype)
    inputs = usual_inputs(implementation, H=6, Hkv=2, Hidx=6, Hik=2, dtype=dtype)
    inputs["index_q"], inputs["index_k"] = inputs["q"], inputs["k"]
    result = run(implementation, inputs, {"topk": topk, "block_size": 16})
    assert abs(float(result["kl"])) < (1e-7 if dtype == torch.float32 else 1e-15)
    assert max(float(result[name].abs().max()) for name in ("d_index_q", "d_index_k")) < 1e-7


@every_reference
@few(max_examples=8)
@given(seed=seeds, block_size=block_sizes, topk=st.one_of(topks, st.none()), cu_seqlens=documents())
def test_5_gradients_conserve_their_sums(implementation, seed, block_size, topk, cu_seqlens):
    dtype, error = finest(implementation)
    inputs = random_inputs(seed, B=1, N=cu_seqlens[-1], D=4, Dv=3, Di=4, dtype=dtype)
    inputs["index_k"][..., -1] = 1  # makes the last column of d index_q the sum of dS_idx over the keys
    dout, dkl = random_like(inputs["q"][..., :3], seed), random_like(inputs["index_q"][..., 0], seed + 1)
    options = {"topk": topk, "block_size": block_size, "cu_seqlens": cu_seqlens, "reduction": "none"}
    result = run(implementation, inputs, options, dout, dkl)
    assert_close(result["dv"].sum(2), dout.unflatten(1, (2, 3)).sum((2, 3)), error, "sum of dv against sum of dout")
    through_q, through_k = (inputs["q"] * result["dq"]).sum(), (inputs["k"] * result["dk"]).sum()
    assert_close(through_q, through_k, error, "<q, dq> against <k, dk>")
    column = result["d_index_q"][..., -1]
    assert_close(column, torch.zeros_like(column), error, "sum of dS_idx")


@every_reference
@few(max_examples=6)
@given(seed=seeds, block_size=block_sizes, topk=st.one_of(topks, st.none()))
def test_6_a_constant_added_to_all_keys_changes_nothing(implementation, seed, block_size, topk):
    dtype, error = finest(implementation)
    inputs = usual_inputs(implementation, seed, N=4 * block_size + 1, D=4, Dv=3, Di=4, dtype=dtype)
    constant = torch.tensor([1.0, -2.0, 3.0, 0.5], dtype=dtype)
    options = {"topk": topk, "block_size": block_size}
    before = run(implementation, inputs, options)
    shifted = run(implementation, inputs | {"k": inputs["k"] + constant}, options)
    assert_close(shifted["lse"], before["lse"] + inputs["q"] @ constant * 4**-0.5, error, "lse")
    index_shifted = run(implementation, inputs | {"index_k": inputs["index_k"] + constant}, options)
    assert_equal(index_shifted["lse"], before["lse"], "lse")
    for after, moved in ((shifted, "dq"), (index_shifted, "d_index_q")):
        assert_equal(after["ids"], before["ids"], "ids")
        for name in ("out", "kl", *GRADIENTS):
            assert_close(after[name], before[name], 10 * error, f"{name}, shifted with {moved}")


@every_heads
@pytest.mark.parametrize("topk, last", [(2, 0), (2, 14), (2, 16), (2, 75), (3, 40), (None, 0), (None, 16), (None, 40)])
def test_7_later_tokens_never_change_earlier_rows(topk, last, heads, implementation):
    options = {"topk": topk, "block_size": 16, "reduction": "none"}
    inputs, changed = (random_inputs(seed, B=1, N=77, Dv=8, **named_heads(heads)) for seed in (0, 1))
    for name in inputs:
        changed[name] *= 5
        changed[name][:, :, : last + 1] = inputs[name][:, :, : last + 1]
    before, after = (run(implementation, tensors, options) for tensors in (inputs, changed))
    assert_equal_runs(after, before, implementation, ("out", "lse", "kl", "ids"), slice(0, last + 1))
    assert not any(torch.equal(after[name], before[name]) for name in ("out", "lse", "kl"))


@every_reference
@few(max_examples=8)
@given(seed=seeds, block_size=block_sizes, topk=st.one_of(topks, st.none()), cu_seqlens=documents())
@example(seed=0, block_size=16, topk=2, cu_seqlens=[0, 10, 37, 77])
@example(seed=0, block_size=16, topk=2, cu_seqlens=[0, 1, 2, 3, 77])
@example(seed=0, block_size=16, topk=2, cu_seqlens=[0, 74, 75, 76, 77])
@example(seed=0, block_size=16, topk=2, cu_seqlens=[0, 0, 5, 5, 5, 77, 77])
@example(seed=0, block_size=16, topk=2, cu_seqlens=[0, 16, 32, 64, 77])
@example(seed=0, block_size=16, topk=None, cu_seqlens=[0, 60, 77])
def test_8_packed_documents_equal_separate_calls(implementation, seed, block_size, topk, cu_seqlens):
    dtype, error = finest(implementation)
    inputs = random_inputs(seed, B=1, N=cu_seqlens[-1], H=4, Hkv=1, Hidx=2, D=4, Dv=3, Di=4, dtype=dtype)
    dout, dkl = random_like(inputs["q"][..., :3], seed), random_like(inputs["index_q"][..., 0], seed + 1)
    options = {"topk": topk, "block_size": block_size, "reduction": "none"}
    packed = run(implementation, inputs, options | {"cu_seqlens": cu_seqlens}, dout, dkl)
    first_block = 0
    for start, end in zip(cu_seqlens, cu_seqlens[1:], strict=False):
        if start == end:
            continue
        alone = {name: tensor[:, :, start:end] for name, tensor in inputs.items()}
        separate = run(implementation, alone, options, dout[:, :, start:end], dkl[:, :, start:end])
        for name in ("out", "lse", "kl", *GRADIENTS):
            assert_close(packed[name][:, :, start:end], separate[name], error, f"{name} of tokens {start}..{end}")
        if topk is not None:
            ids = separate["ids"] + first_block * (separate["ids"] >= 0)
            assert_equal(packed["ids"][:, :, start:end], ids, f"ids of tokens {start}..{end}")
        first_block += -(-(end - start) // block_size)


@every_topk
@every_heads
def test_8_changing_one_document_changes_no_other(heads, topk, implementation):
    inputs = random_inputs(0, B=1, N=77, **named_heads(heads))
    options = {"topk": topk, "block_size": 16, "cu_seqlens": [0, 25, 60, 77], "reduction": "none"}
    dout, dkl = random_like(inputs["q"], 1), random_like(inputs["index_q"][..., 0], 2)
    before = run(implementation, inputs, options, dout, dkl)
    added = {name: tensor.clone() for name, tensor in inputs.items()}
    for seed, tensor in enumerate(added.values()):
        tensor[:, :, 25:60] += 10 * random_like(tensor[:, :, 25:60], seed)
    scaled = {name: tensor.clone() for name, tensor in inputs.items()}
    for tensor in scaled.values():
        tensor[:, :, 25:60] *= 100  # logits of 10 000 times the size, which may take another path
    for changed, label in ((added, "added to"), (scaled, "scaled")):
        after = run(implementation, changed, options, dout, dkl)
        for rows in (slice(0, 25), slice(60, None)):
            assert_equal_runs(after, before, f"{implementation}, {label}:", tokens=rows)
        assert (after["out"][:, :, 25:60] != before["out"][:, :, 25:60]).all()


@every_reference
@few(max_examples=8)
@given(seed=seeds, blocks=st.integers(1, 6), block_size=block_sizes, topk=topks)
def test_9_every_row_keeps_as_many_blocks_as_it_can(implementation, seed, blocks, block_size, topk):
    inputs = random_inputs(seed, N=blocks * block_size, Di=2)
    ids = IMPLEMENTATIONS[implementation].select_blocks(
        inputs["index_q"], inputs["index_k"], topk=topk, block_size=block_size
    )
    expected = sum(min(token // block_size + 1, topk) for token in range(blocks * block_size))
    assert ((ids >= 0).sum((-1, -2)) == expected).all()
    assert all(len(set(row)) == len(row) for row in (row[row >= 0].tolist() for row in ids.flatten(0, 2)))


@few(max_examples=12)
@given(seed=seeds, block_size=block_sizes, topk=topks, cu_seqlens=documents())
def test_9_reverse_index_is_the_transpose_of_the_selection(seed, block_size, topk, cu_seqlens):
    inputs = random_inputs(seed, B=1, N=cu_seqlens[-1], Hidx=2, Di=2)
    place = {"block_size": block_size, "cu_seqlens": cu_seqlens}
    for ids in naive.select_blocks(inputs["index_q"], inputs["index_k"], topk=topk, **place)[0]:
        queries, offsets = blockwise.reverse_index(ids, BlockGeometry(cu_seqlens[-1], **place))
        for block in range(len(offsets) - 1):
            expected = (ids == block).any(-1).nonzero().flatten()
            assert_equal(queries[offsets[block] : offsets[block + 1]], expected, f"queries of block {block}")
        assert len(queries) == (ids >= 0).sum() == offsets[-1]


LAWS = [
    (test_1_zero_queries_average_the_selected_values, {"topk": 2, "cu_seqlens": [0, 37, 40]}),
    (test_2_enough_blocks_equal_dense_causal_attention, {"tokens": 37, "more": 27}),
    (test_2_rows_before_the_selection_is_full_are_dense_too, {"topk": 2}),
    (test_3_one_block_is_block_diagonal_attention, {"tokens": 37}),
    (test_5_gradients_conserve_their_sums, {"topk": 2, "cu_seqlens": [0, 20, 20, 60]}),
    (test_5_gradients_conserve_their_sums, {"topk": None, "cu_seqlens": [0, 37]}),
    (test_6_a_constant_added_to_all_keys_changes_nothing, {"topk": 2}),
    (test_8_packed_documents_equal_separate_calls, {"topk": 2, "cu_seqlens": [0, 10, 37, TOKENS]}),
    (test_8_packed_documents_equal_separate_calls, {"topk": 2, "cu_seqlens": [0, 1, 2, 3, TOKENS]}),
    (test_8_packed_documents_equal_separate_calls, {"topk": 2, "cu_seqlens": [0, 74, 75, 76, TOKENS]}),
    (test_8_packed_documents_equal_separate_calls, {"topk": None, "cu_seqlens": [0, 0, 37, 37, 60]}),
    (test_9_every_row_keeps_as_many_blocks_as_it_can, {"blocks": 5, "topk": 3}),
]


@pytest.mark.skipif("triton" not in IMPLEMENTATIONS, reason="the kernels are compiled for a GPU here")
@pytest.mark.parametrize("law, numbers", LAWS, ids=lambda value: getattr(value, "__name__", str(value)))
def test_laws_hold_for_the_kernels(law, numbers):
    law.hypothesis.inner_test("triton", seed=0, block_size=16, **numbers)
