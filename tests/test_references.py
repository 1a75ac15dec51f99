"""The three reference implementations against each other and against float64, one row at a time."""

import functools

import numpy as np
import pytest
import torch
from cases import (
    every_implementation,
    every_reference,
    every_topk,
    plain_attention,
    random_call,
    selected_tokens,
    usual_inputs,
)
from compare import (
    GRADIENTS,
    INPUTS,
    assert_close,
    assert_equal,
    assert_error_budget,
    assert_same_run,
    random_inputs,
    random_like,
    run,
    run_reference,
)

from msa_ref import naive
from msa_ref.inputs import toy_problem

DRAWS = 64


@functools.cache
def draw(seed):
    """Random sizes and options; float32 numbers, their upstream gradients, and the float64 result."""
    inputs, options, dout, dkl = random_call(seed)
    return inputs, options, dout, dkl, run_reference(inputs, options, dout, dkl)


@every_reference
@pytest.mark.parametrize("seed", range(DRAWS))
def test_random_draws_agree_with_float64(seed, implementation):
    inputs, options, dout, dkl, reference = draw(seed)
    # naive in float64 is the reference.
    for dtype in (torch.float32,) if implementation == "naive" else (torch.float32, torch.float64):
        cast = {name: tensor.to(dtype) for name, tensor in inputs.items()}
        actual = run(implementation, cast, options, dout.to(dtype), dkl.to(dtype))
        assert_same_run(actual, reference, dtype, f"{implementation}, seed {seed}, {dtype}, {options}:")
        assert all(actual[name].dtype == dtype for name in ("out", "lse", "kl", *GRADIENTS))


def test_random_draws_cover_every_feature():
    options = [draw(seed)[1] for seed in range(DRAWS)]
    assert {option["topk"] is None for option in options} == {True, False}
    assert {option["reduction"] for option in options} == {"mean", "none"}
    assert {option["local_blocks"] for option in options} == {0, 1, 2}
    assert any(len(set(option.get("cu_seqlens", []))) < len(option.get("cu_seqlens", [])) for option in options)
    assert {draw(seed)[0]["q"].shape[0] for seed in range(DRAWS)} == {1, 2, 3}


@every_implementation
@every_topk
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_stays_within_the_error_of_a_plain_version(dtype, topk, implementation):
    inputs = usual_inputs(implementation, N=77, Dv=32, Di=8, dtype=dtype)
    options = {"topk": topk, "block_size": 16}
    dout = random_like(inputs["q"][..., :1].expand(-1, -1, -1, 32), 1)
    dkl = torch.tensor(float(inputs["index_q"][..., 0].numel()))
    reference = run_reference(inputs, options, dout, dkl)
    actual = run(implementation, inputs, options, dout, dkl)
    assert_same_run(actual, reference, dtype, f"{implementation}, {dtype}:")
    assert all(actual[name].dtype == dtype for name in ("out", *GRADIENTS))
    assert actual["lse"].dtype == actual["kl"].dtype == torch.float32

    leaves = [inputs[name].clone().requires_grad_() for name in ("q", "k", "v")]
    plain = plain_attention(*leaves, selected_tokens(actual["ids"], inputs["q"], 16))
    plain = (plain, *torch.autograd.grad(plain, leaves, dout))
    for name, value in zip(("out", "dq", "dk", "dv"), plain, strict=True):
        assert_error_budget(actual[name], value, reference[name], f"{implementation}, {dtype}: {name}")


@every_reference
def test_toy_numbers_of_the_specification(implementation):
    toy, options = toy_problem(), {"topk": 3, "block_size": 2}
    result = run(implementation, toy, options, toy["dout"])
    warm_up = run(implementation, toy, options | {"topk": None})
    expected = {
        "kl": 0.4113174924, "out": 211.1436374, "dq": 112.2923102, "dk": 120.7873174, "dv": 180.8853427,
        "d_index_q": 0.8876537102, "d_index_k": 0.8659704580,
    }  # fmt: skip
    assert {name: float(result[name].abs().sum()) for name in expected} == pytest.approx(expected, rel=1e-9, abs=0)
    assert float(warm_up["kl"]) == pytest.approx(0.4572479373, rel=1e-9)
    assert int((result["ids"] >= 0).sum()) == 60


def test_toy_kl_with_heads_averaged_before_normalising_is_another_number():
    inputs = toy_problem()
    ids = naive.select_blocks(inputs["index_q"], inputs["index_k"], topk=3, block_size=2)
    mask = selected_tokens(ids, inputs["index_q"], 2)
    causal = torch.ones(12, 12, dtype=torch.bool).tril()
    dense_p = plain_attention(inputs["q"], inputs["k"], torch.eye(12).double().expand(1, 2, -1, -1), causal)
    teacher = dense_p.unflatten(1, (2, 2)).mean(2) * mask
    teacher = teacher / teacher.sum(-1, keepdim=True)
    student = (inputs["index_q"] @ inputs["index_k"].mT * 8**-0.5).masked_fill(~mask, -torch.inf).softmax(-1)
    wrong = (torch.xlogy(teacher, teacher) - torch.xlogy(teacher, student)).sum(-1).mean()
    assert float(wrong) == pytest.approx(0.4158273043, rel=1e-9)


def test_naive_gradients_are_the_slopes_of_its_forward_pass():
    inputs = random_inputs(3, B=1, N=7, H=4, Hkv=2, Hidx=2, Hik=1, D=3, Dv=2, Di=3, dtype=torch.float64)
    inputs["index_q"], inputs["index_k"] = inputs["index_q"] / 3, inputs["index_k"] / 3
    place = {"block_size": 2, "cu_seqlens": [0, 2, 7]}
    options = {"topk": 2, "scale": 0.7, "index_scale": 0.9, "reduction": "none", **place}
    ids = naive.select_blocks(inputs["index_q"], inputs["index_k"], topk=2, **place).flip(-1)
    ids[0, 0, 3] = -1  # an empty row
    ids[0, 1, 4, 0] = 0  # a block of the earlier document
    dout, dkl = random_like(inputs["q"][..., :2], 4), random_like(inputs["index_q"][..., 0], 5)
    result = run(naive, inputs, options, dout, dkl, ids)

    def loss(name, tensor):
        changed = inputs | {name: tensor}
        if name in ("q", "k", "v"):
            out, _ = naive.sparse_attention(changed["q"], changed["k"], changed["v"], ids, scale=0.7, **place)
            return (out * dout).sum()
        teacher = inputs["q"], inputs["k"], result["lse"]
        kl = naive.index_kl_loss(
            *teacher, changed["index_q"], changed["index_k"], ids, scale=0.7, index_scale=0.9, reduction="none", **place
        )
        return (kl * dkl).sum()

    for name in INPUTS:
        slopes, step = torch.zeros_like(inputs[name]), 1e-5
        for element in np.ndindex(*slopes.shape):
            nudge = torch.zeros_like(slopes)
            nudge[element] = step
            slopes[element] = (loss(name, inputs[name] + nudge) - loss(name, inputs[name] - nudge)) / (2 * step)
        gradient = result[f"d_{name}" if "_" in name else f"d{name}"]
        assert slopes.abs().max() > 0.1
        assert_close(gradient, slopes, 1e-8, f"d{name}")


def test_naive_gives_back_the_kind_it_was_given():
    inputs = random_inputs(0, B=1, N=20, dtype=torch.float64)
    options = {"topk": 2, "block_size": 8}
    arrays = {name: tensor.flip(2).numpy()[:, :, ::-1] for name, tensor in inputs.items()}  # negative strides
    expected = naive.msa_attention(*inputs.values(), **options)
    actual = naive.msa_attention(*arrays.values(), cu_seqlens=np.array([0, 20]), **options)
    for name, array, tensor in zip(actual._fields, actual, expected, strict=True):
        assert isinstance(array, np.ndarray) and isinstance(tensor, torch.Tensor)
        assert_equal(torch.as_tensor(array), tensor, name)
    scores = naive.block_scores(arrays["index_q"], arrays["index_k"], block_size=8)
    assert scores.shape == (1, 2, 20, 3) and scores.dtype == np.float64
    gradients = naive.sparse_attention_backward(
        *(arrays[name] for name in ("q", "k", "v")), actual.block_indices, actual.out, block_size=8
    )
    assert all(isinstance(gradient, np.ndarray) for gradient in gradients)
    with pytest.raises(ValueError, match="dout must have shape"):
        naive.sparse_attention_backward(*(inputs[name] for name in ("q", "k", "v")), None, inputs["q"][:, :, :1])
    with pytest.raises(TypeError, match="mix|dtype|torch.Tensor"):
        naive.msa_attention(inputs["q"].tolist(), *list(inputs.values())[1:], **options)


def test_naive_block_scores_are_the_largest_visible_token_scores():
    index_q, index_k = torch.ones(1, 1, 5, 1), torch.tensor([3.0, 1.0, -2.0, torch.nan, torch.nan]).view(1, 1, 5, 1)
    actual = naive.block_scores(index_q, index_k, block_size=2, cu_seqlens=[0, 4, 5])
    no, nan = -torch.inf, torch.nan
    expected = [[3, no, no], [3, no, no], [3, -2, no], [3, -2, no], [no, no, nan]]
    assert_equal(actual, torch.tensor(expected).view(1, 1, 5, 3))
