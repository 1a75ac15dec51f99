"""Strides, views and aliases of inputs and upstream gradients; dtypes, autocast and very large numbers."""

import numpy as np
import pytest
import torch
from cases import (
    BLOCK,
    OPTIONS,
    TOKENS,
    assert_close_runs,
    assert_equal_runs,
    every_autograd,
    every_implementation,
    every_topk,
    lists,
    nan_in_new_memory,
    run_double,
    skip_float64,
    usual_inputs,
)
from compare import GRADIENTS, IMPLEMENTATIONS, INPUTS, assert_close, assert_equal, random_inputs, random_like, run

from msa_ref import naive


def every_other_head(tensor):
    return tensor.repeat_interleave(2, 1)[:, ::2]


def token_major(tensor):
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def every_other_column(tensor):
    return tensor.repeat_interleave(2, -1)[..., ::2]


def width_before_tokens(tensor):
    return tensor.transpose(2, 3).contiguous().transpose(2, 3)


def one_head_for_all(tensor):
    return tensor[:, :1].expand_as(tensor)


def one_token_for_all(tensor):
    return tensor[:, :, :1].expand_as(tensor)


LAYOUTS = (every_other_head, token_major, every_other_column, width_before_tokens, one_head_for_all, one_token_for_all)
every_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)


def upstream(inputs):
    return random_like(inputs["q"], 1), random_like(inputs["index_q"][..., 0], 2)


@every_implementation
@every_layout
def test_inputs_of_any_strides_equal_contiguous_ones(layout, implementation):
    inputs, options = random_inputs(0, B=1, N=40, Hik=2), OPTIONS | {"reduction": "none"}
    dout, dkl = upstream(inputs)
    for names in [INPUTS] if implementation == "triton" else [[name] for name in INPUTS]:
        strided = inputs | {name: layout(inputs[name]) for name in names}
        contiguous = {name: tensor.contiguous() for name, tensor in strided.items()}
        assert not any(strided[name].is_contiguous() for name in names)
        expected = run(implementation, contiguous, options, dout, dkl)
        assert_close_runs(run(implementation, strided, options, dout, dkl), expected, f"{implementation}, {names}:")


@every_implementation
@every_layout
def test_upstream_gradients_of_any_strides_equal_contiguous_ones(layout, implementation):
    inputs, options = usual_inputs(implementation), OPTIONS | {"reduction": "none"}
    dout, dkl = upstream(inputs)
    dout, dkl = layout(dout), layout(dkl[..., None])[..., 0]
    expected = run(implementation, inputs, options, dout.contiguous(), dkl.contiguous())
    assert_close_runs(run(implementation, inputs, options, dout, dkl), expected, implementation)


@every_implementation
def test_block_ids_and_lse_of_any_strides(implementation):
    module, inputs = IMPLEMENTATIONS[implementation], usual_inputs(implementation, H=6, Hkv=2, Hidx=2)
    q, k, v, index_q, index_k = inputs.values()
    ids = module.select_blocks(index_q, index_k, **OPTIONS)
    out, lse = module.sparse_attention(q, k, v, ids, block_size=BLOCK)
    kl = module.index_kl_loss(q, k, lse, index_q, index_k, ids, block_size=BLOCK, reduction="none")
    for layout in (token_major, every_other_column, width_before_tokens):
        strided, strided_lse = layout(ids), layout(lse[..., None])[..., 0]
        assert not strided.is_contiguous()
        assert_equal(module.sparse_attention(q, k, v, strided, block_size=BLOCK)[0], out, layout.__name__)
        call = q, k, strided_lse, index_q, index_k, strided.long()
        assert_equal(module.index_kl_loss(*call, block_size=BLOCK, reduction="none"), kl, layout.__name__)


@every_autograd
@every_topk
@pytest.mark.parametrize(
    "consume",
    [lambda out: out.transpose(1, 2), lambda out: out[..., ::2], lambda out: out.permute(3, 0, 2, 1),
     lambda out: out[:, :, :1], lambda out: out.sum(1, keepdim=True).expand_as(out)],
    ids=["transpose", "every other column", "permute", "first token", "expand"],
)  # fmt: skip
def test_the_output_may_be_consumed_through_a_view(consume, topk, implementation):
    inputs = usual_inputs(implementation)
    weights = random_like(consume(inputs["q"]), 1)
    bare = inputs["q"].clone().requires_grad_()
    (dout,) = torch.autograd.grad((consume(bare) * weights).sum(), bare)
    leaves = [inputs[name].clone().requires_grad_() for name in INPUTS]
    result = IMPLEMENTATIONS[implementation].msa_attention(*leaves, **OPTIONS | {"topk": topk})
    gradients = torch.autograd.grad((consume(result.out) * weights).sum(), leaves[:3])
    expected = run(implementation, inputs, OPTIONS | {"topk": topk}, dout.contiguous())
    for name, gradient in zip(("dq", "dk", "dv"), gradients, strict=True):
        assert_close(gradient, expected[name], 2e-6, name)


@every_autograd
@every_topk
def test_an_expanded_upstream_gradient_equals_ones(topk, implementation):
    inputs = usual_inputs(implementation)
    expected = run(implementation, inputs, OPTIONS | {"topk": topk, "reduction": "none"})
    leaves = [inputs[name].clone().requires_grad_() for name in INPUTS]
    module = IMPLEMENTATIONS[implementation]
    ids = expected["ids"]
    out, lse = module.sparse_attention(*leaves[:3], ids, block_size=BLOCK)
    kl = module.index_kl_loss(*leaves[:2], lse, *leaves[3:], ids, block_size=BLOCK, reduction="none")
    (out.sum() + kl.sum()).backward()
    for name, leaf in zip(GRADIENTS, leaves, strict=True):
        assert_close(leaf.grad, expected[name], 2e-6, name)


@every_autograd
def test_gradients_of_views_of_one_packed_tensor(implementation):
    batch, tokens, heads = (1, 40, 2) if implementation == "triton" else (2, TOKENS, 4)
    packed = torch.randn(batch, tokens, 5, heads, 8, generator=torch.Generator().manual_seed(0))
    module = IMPLEMENTATIONS[implementation]

    def loss(q, k, v, index_q, index_k):
        result = module.msa_attention(q, k, v, index_q, index_k, **OPTIONS)
        return (result.out * random_like(result.out, 1)).sum() + 10 * result.kl_loss

    one = packed.clone().requires_grad_()
    loss(*(part.transpose(1, 2) for part in one.unbind(2))).backward()
    leaves = [part.transpose(1, 2).contiguous().requires_grad_() for part in packed.unbind(2)]
    loss(*leaves).backward()
    assert_close(one.grad, torch.stack([leaf.grad.transpose(1, 2) for leaf in leaves], 2), 2e-6, implementation)
    # q contiguous, k and v views.
    mixed = [leaves[0].detach().clone(), *(part.transpose(1, 2) for part in packed.unbind(2)[1:])]
    mixed = [tensor.requires_grad_() for tensor in mixed]
    for gradient, leaf in zip(torch.autograd.grad(loss(*mixed), mixed), leaves, strict=True):
        assert_close(gradient, leaf.grad, 2e-6, implementation)


@every_autograd
def test_one_tensor_may_be_several_arguments(implementation):
    x = torch.randn(1, 2, 40, 8, generator=torch.Generator().manual_seed(0))
    module = IMPLEMENTATIONS[implementation]
    shared = x.clone().requires_grad_()
    result = module.msa_attention(shared, shared, shared, shared, shared, **OPTIONS)
    (gradient,) = torch.autograd.grad(result.out.square().sum() + result.kl_loss, shared)
    separate = [x.clone().requires_grad_() for _ in range(5)]
    result = module.msa_attention(*separate, **OPTIONS)
    parts = torch.autograd.grad(result.out.square().sum() + result.kl_loss, separate)
    assert_close(gradient, sum(parts), 1e-6, implementation)


@every_implementation
@every_topk
def test_arguments_are_never_written_to(topk, implementation):
    inputs = usual_inputs(implementation)
    before = {name: tensor.clone() for name, tensor in inputs.items()}
    dout, dkl = upstream(inputs)
    copies = dout.clone(), dkl.clone()
    first = run(implementation, inputs, OPTIONS | {"topk": topk, "reduction": "none"}, dout, dkl)
    kept = {name: value if value is None else value.clone() for name, value in first.items()}
    second = run(implementation, inputs, OPTIONS | {"topk": topk, "reduction": "none"}, dout, dkl, first["ids"])
    for name in INPUTS:
        assert_equal(inputs[name], before[name], name)
    assert_equal(dout, copies[0])
    assert_equal(dkl, copies[1])
    assert_equal_runs(first, kept, implementation)
    assert_equal_runs(second, first, implementation)


def test_numpy_arrays_of_any_strides():
    inputs = random_inputs(0, B=1, N=40)
    expected = naive.msa_attention(*inputs.values(), **OPTIONS)
    arrays = [tensor.numpy() for tensor in inputs.values()]
    flipped = [lambda a: a[:, :, ::-1].copy()[:, :, ::-1], lambda a: a[..., ::-1].copy()[..., ::-1]]
    for layout in (*flipped, np.asfortranarray, lambda a: np.repeat(a, 2, -1)[..., ::2]):
        result = naive.msa_attention(*map(layout, arrays), **OPTIONS)
        for array, tensor in zip(result, expected, strict=True):
            assert isinstance(array, (np.ndarray, np.generic))
            assert_equal(torch.as_tensor(array), tensor)


@every_implementation
@every_topk
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_results_have_the_dtypes_of_the_contract(dtype, topk, implementation):
    skip_float64(implementation, dtype)
    inputs = random_inputs(0, B=1, N=20, dtype=dtype)
    result = run(implementation, inputs, OPTIONS | {"topk": topk})
    sums = torch.float64 if dtype == torch.float64 else torch.float32
    assert all(result[name].dtype == dtype for name in ("out", *GRADIENTS))
    assert result["lse"].dtype == result["kl"].dtype == sums
    assert topk is None or result["ids"].dtype == torch.int32


@every_autograd
@every_topk
def test_autocast_changes_no_bit(topk, implementation):
    inputs, options = usual_inputs(implementation), OPTIONS | {"topk": topk}
    with torch.autocast("cpu", torch.bfloat16):
        result = run(implementation, inputs, options)
    assert result["out"].dtype == torch.float32
    assert_equal_runs(result, run(implementation, inputs, options), implementation)


@every_implementation
@every_topk
@pytest.mark.parametrize("index", [1e4, 0.0])
def test_equal_keys_with_huge_logits(index, topk, implementation):
    """All logits are 4e8, where float32 steps by 32: no sum of exponentials can be told from one of them by its lse."""
    inputs = {name: torch.full_like(tensor, 1e4 if name in ("q", "k", "v") else index)
              for name, tensor in usual_inputs(implementation).items()}  # fmt: skip
    dout = random_like(inputs["q"], 1)
    result = run(implementation, inputs, OPTIONS | {"topk": topk}, dout)
    assert_close(result["out"], torch.full_like(result["out"], 1e4), 1e-6)
    assert_close(result["lse"], torch.full_like(result["lse"], 4e8), 1e-6)
    assert_close(result["kl"], torch.zeros(()), 1e-5)
    assert_close(result["dv"], run_double(inputs, OPTIONS | {"topk": topk}, dout)["dv"], 1e-5)
    # Each is 0 as a difference of equal numbers, of this size: scale times a key times v · dout, or a probability.
    for size, names in ((0.25e4 * 16 * 0.5e4, ("dq", "dk")), (0.25e4, ("d_index_q", "d_index_k"))):
        assert all(result[name].abs().max() <= 1e-5 * size for name in names)


@every_implementation
@every_topk
def test_one_key_with_a_logit_of_10000_takes_all(topk, implementation):
    inputs = usual_inputs(implementation, B=1)
    favourite, width, tokens = 5, inputs["q"].shape[-1], inputs["q"].shape[2]
    inputs["q"][:], inputs["k"][:] = 100.0, 0.0
    inputs["k"][:, :, favourite] = 1e4 / 100 / width
    rows = [[0, query // BLOCK] if query >= BLOCK else [0] for query in range(tokens)]
    table = None if topk is None else lists(*rows, heads=inputs["index_q"].shape[1])
    options = OPTIONS | {"topk": topk, "scale": 1.0}
    result = run(implementation, inputs, options, block_indices=table)
    double = run_double(inputs, options, block_indices=table)
    rows = slice(favourite, None)
    expected = inputs["v"][:, :, favourite].repeat_interleave(3, 1)[:, :, None].expand(-1, -1, tokens - favourite, -1)
    assert_equal(result["out"][:, :, rows], expected)
    assert_close(result["lse"][:, :, rows], torch.full((*inputs["q"].shape[:2], tokens - favourite), 1e4), 1e-6)
    assert_close(result["kl"], double["kl"], 1e-6)
    for name in GRADIENTS:
        assert_close(result[name], double[name], 1e-4, name, floor=100.0)


@every_implementation
@pytest.mark.parametrize("cu_seqlens", [None, [0, 0, 9, 10, 50, TOKENS]], ids=["one document", "documents"])
@every_topk
def test_every_element_of_every_result_is_written(topk, cu_seqlens, implementation):
    inputs = usual_inputs(implementation, B=1, N=TOKENS, Dv=5, Di=3)
    options = OPTIONS | {"topk": topk, "cu_seqlens": cu_seqlens, "reduction": "none"}
    expected = run(implementation, inputs, options)
    with nan_in_new_memory():
        assert_equal_runs(run(implementation, inputs, options), expected, implementation)
    assert all(expected[name].isfinite().all() for name in ("out", "lse", "kl", *GRADIENTS))
