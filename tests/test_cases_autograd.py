"""Who gets a gradient and who gets none; second derivatives; unused outputs; value and gradient of the KL loss."""

import math

import pytest
import torch
from cases import (
    BLOCK,
    OPTIONS,
    TOKENS,
    assert_equal_runs,
    block_of,
    every_autograd,
    every_implementation,
    every_topk,
    lists,
    run_double,
    usual_inputs,
)
from compare import GRADIENTS, IMPLEMENTATIONS, INPUTS, assert_close, assert_equal, random_like, run

ATTENTION, INDEX = INPUTS[:3], INPUTS[3:]


def attend(implementation, inputs, topk=2, needed=INPUTS):
    """The leaves by name, and the result."""
    leaves = {name: inputs[name].clone().requires_grad_(name in needed) for name in INPUTS}
    return leaves, IMPLEMENTATIONS[implementation].msa_attention(**leaves, topk=topk, block_size=BLOCK)


def nothing(gradient):
    return gradient is None or bool(gradient.eq(0).all())


@every_autograd
@every_topk
def test_attention_does_not_train_the_index_and_the_loss_trains_only_it(topk, implementation):
    inputs = usual_inputs(implementation)
    leaves, result = attend(implementation, inputs, topk)
    (result.out * random_like(result.out, 1)).sum().backward()
    assert all(nothing(leaves[name].grad) for name in INDEX)
    assert all(leaves[name].grad.ne(0).any() for name in ATTENTION)
    leaves, result = attend(implementation, inputs, topk)
    result.kl_loss.backward()
    assert all(nothing(leaves[name].grad) for name in ATTENTION)
    assert all(leaves[name].grad.ne(0).any() for name in INDEX)


@every_autograd
@every_topk
def test_ids_and_lse_are_not_differentiable(topk, implementation):
    leaves, result = attend(implementation, usual_inputs(implementation), topk)
    assert not result.lse.requires_grad and result.out.requires_grad and result.kl_loss.requires_grad
    assert topk is None or not result.block_indices.requires_grad
    # The teacher that a caller did not detach gets no gradient either.
    module, lse = IMPLEMENTATIONS[implementation], result.lse.clone().requires_grad_()
    kl = module.index_kl_loss(
        leaves["q"], leaves["k"], lse, leaves["index_q"], leaves["index_k"], result.block_indices, block_size=BLOCK
    )
    kl.backward()
    assert nothing(lse.grad) and all(nothing(leaves[name].grad) for name in ATTENTION)


@every_autograd
@every_topk
@pytest.mark.parametrize("loss", ["out", "kl", "out and lse", "out and kl"])
def test_outputs_that_are_not_used(loss, topk, implementation):
    inputs = usual_inputs(implementation)
    expected = run(implementation, inputs, OPTIONS | {"topk": topk})
    leaves, result = attend(implementation, inputs, topk)
    terms = {"out": result.out.sum(), "kl": result.kl_loss, "lse": result.lse.sum()}
    sum(terms[name] for name in loss.split(" and ")).backward()
    for name, gradient in zip(INPUTS, GRADIENTS, strict=True):
        used = ("out" if name in ATTENTION else "kl") in loss
        if used:
            assert_equal(leaves[name].grad, expected[gradient], gradient)
        else:
            assert nothing(leaves[name].grad)


@every_autograd
@every_topk
def test_lse_alone_has_no_graph(topk, implementation):
    _, result = attend(implementation, usual_inputs(implementation), topk)
    with pytest.raises(RuntimeError):
        result.lse.sum().backward()


@every_autograd
@every_topk
@pytest.mark.parametrize("needed", [("q",), ("k",), ("v",), ("index_q",), ("index_k",), ("k", "index_q")], ids=str)
def test_inputs_that_need_no_gradient(needed, topk, implementation):
    inputs = usual_inputs(implementation)
    expected = run(implementation, inputs, OPTIONS | {"topk": topk})
    leaves, result = attend(implementation, inputs, topk, needed)
    (result.out.sum() + result.kl_loss).backward()
    for name, gradient in zip(INPUTS, GRADIENTS, strict=True):
        assert_equal(leaves[name].grad, expected[gradient] if name in needed else None, gradient)


@every_autograd
@every_topk
def test_without_gradients_the_results_are_the_same(topk, implementation):
    inputs = usual_inputs(implementation)
    _, with_graph = attend(implementation, inputs, topk)
    with torch.no_grad():
        _, without = attend(implementation, inputs, topk)
    with torch.inference_mode():
        _, inference = attend(implementation, inputs, topk, ())
    for result in (without, inference):
        assert not result.out.requires_grad and not result.kl_loss.requires_grad
        for one, other in zip(result, with_graph, strict=True):
            assert_equal(one, other)


@every_autograd
def test_a_graph_that_is_kept_can_be_used_twice(implementation):
    leaves, result = attend(implementation, usual_inputs(implementation))
    loss = result.out.square().sum() + result.kl_loss
    first = torch.autograd.grad(loss, list(leaves.values()), retain_graph=True)
    second = torch.autograd.grad(loss, list(leaves.values()))
    for one, other in zip(first, second, strict=True):
        assert_equal(one, other)


LOSSES = {
    "sum of out": (lambda result: result.out.sum(), "q"),
    "square of out": (lambda result: result.out.square().sum(), "v"),
    "kl": (lambda result: result.kl_loss, "index_q"),
    "square of kl": (lambda result: result.kl_loss.square(), "index_k"),
}


@every_autograd
@every_topk
@pytest.mark.parametrize("loss, name", LOSSES.values(), ids=LOSSES)
def test_a_second_derivative_is_an_error(loss, name, topk, implementation):
    leaves, result = attend(implementation, usual_inputs(implementation), topk)
    first = loss(result)
    (gradient,) = torch.autograd.grad(first, leaves[name], create_graph=True)
    penalty = gradient.square().sum()
    with pytest.raises(RuntimeError, match="first derivatives only"):
        torch.autograd.grad(penalty, leaves[name], retain_graph=True)
    with pytest.raises(RuntimeError, match="first derivatives only"):
        penalty.backward(retain_graph=True)
    # A gradient penalty beside the loss itself: the penalty must not be dropped without a word.
    with pytest.raises(RuntimeError, match="first derivatives only"):
        (first + penalty).backward()


@every_autograd
def test_the_first_derivative_survives_a_request_for_a_graph(implementation):
    inputs = usual_inputs(implementation)
    expected = run(implementation, inputs, OPTIONS)
    leaves, result = attend(implementation, inputs)
    gradients = torch.autograd.grad(result.out.sum() + result.kl_loss, list(leaves.values()), create_graph=True)
    for name, gradient in zip(GRADIENTS, gradients, strict=True):
        assert_equal(gradient.detach(), expected[name], name)


@every_implementation
@every_topk
def test_the_loss_of_two_known_distributions(topk, implementation):
    """Teacher (1/2, 1/2), student (9/10, 1/10) in the second of two rows; the first has one token and no loss."""
    inputs = {name: torch.zeros(1, 1, 2, 1) for name in INPUTS}
    inputs["index_q"][0, 0, 1] = 1
    inputs["index_k"][0, 0, 0] = math.log(9)
    options = {"topk": topk, "block_size": block_of(implementation, 1), "index_scale": 1.0}
    rows = run(implementation, inputs, options | {"reduction": "none"})
    expected = 0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(0.5 / 0.1)
    assert expected == pytest.approx(0.5108, abs=5e-5)
    assert_close(rows["kl"], torch.tensor([[[0, expected]]]), 1e-6)
    # d index_q = sum_j (student - teacher) index_k[j]; d index_k[j] = (student - teacher) index_q.
    assert_close(rows["d_index_q"].flatten(), torch.tensor([0, 0.4 * math.log(9)]), 1e-6)
    assert_close(rows["d_index_k"].flatten(), torch.tensor([0.4, -0.4]), 1e-6)
    assert_close(run(implementation, inputs, options)["kl"], torch.tensor(expected / 2), 1e-6)


@every_implementation
@every_topk
def test_a_student_that_gives_a_token_almost_nothing_still_has_a_finite_loss(topk, implementation):
    inputs = {name: torch.zeros(1, 1, 2, 1) for name in INPUTS}
    inputs["index_q"][0, 0, 1], inputs["index_k"][0, 0, 0] = 1, 1000
    options = {"topk": topk, "block_size": block_of(implementation, 1), "index_scale": 1.0, "reduction": "none"}
    result = run(implementation, inputs, options)
    assert_close(result["kl"], torch.tensor([[[0, 500 + math.log(0.5)]]]), 1e-6)
    assert_close(result["d_index_k"].flatten(), torch.tensor([0.5, -0.5]), 1e-6)
    # The other way round the teacher gives it nothing, and 0 · ln 0 = 0.
    inputs = {name: inputs[name] for name in INPUTS} | {"q": inputs["index_q"], "k": inputs["index_k"]}
    inputs |= {"index_q": torch.zeros(1, 1, 2, 1), "index_k": torch.zeros(1, 1, 2, 1)}
    kl = run(implementation, inputs, options | {"scale": 1.0})["kl"]
    assert_close(kl, torch.tensor([[[0, math.log(2)]]]), 1e-6)


@every_implementation
@every_topk
def test_the_mean_divides_by_batch_index_heads_and_tokens(topk, implementation):
    inputs = usual_inputs(implementation)
    rows = run(implementation, inputs, OPTIONS | {"topk": topk, "reduction": "none"})
    mean = run(implementation, inputs, OPTIONS | {"topk": topk})
    count = inputs["index_q"][..., 0].numel()
    assert rows["kl"].shape == inputs["index_q"].shape[:3] and mean["kl"].shape == ()
    assert_close(mean["kl"], rows["kl"].double().sum() / count, 1e-6)
    for name in ("d_index_q", "d_index_k"):
        assert_close(mean[name] * count, rows[name], 1e-5, name)


@every_implementation
@every_topk
def test_micro_batches_add_up_to_the_batch(topk, implementation):
    inputs, options = usual_inputs(implementation, B=4, N=40), OPTIONS | {"topk": topk}
    whole = run(implementation, inputs, options)
    quarter, count = torch.tensor(0.25), inputs["index_q"][..., 0].numel()
    parts = [run(implementation, {name: tensor[row : row + 1] for name, tensor in inputs.items()}, options, dkl=quarter)
             for row in range(4)]  # fmt: skip
    assert_close(sum(part["kl"] for part in parts) / 4, whole["kl"], 1e-6)
    for name in ("d_index_q", "d_index_k"):
        assert_close(torch.cat([part[name] for part in parts]) * count, whole[name] * count, 1e-5, name)


@every_implementation
@every_topk
def test_gradients_of_the_index_equal_their_closed_form(topk, implementation):
    inputs, options = usual_inputs(implementation), OPTIONS | {"topk": topk, "index_scale": 0.3, "reduction": "none"}
    dkl = random_like(inputs["index_q"][..., 0], 2)
    result = run(implementation, inputs, options, dkl=dkl)
    double = {name: tensor.double() for name, tensor in inputs.items()}
    token = torch.arange(inputs["q"].shape[2])
    mask = (token <= token[:, None]).expand(*inputs["index_q"].shape[:2], -1, -1)
    if topk is not None:
        mask = mask & (result["ids"][..., None, :] == (token // BLOCK)[:, None]).any(-1)

    def softmax(logit, mask):
        return logit.masked_fill(~mask, -torch.inf).softmax(-1)

    keys = double["k"].repeat_interleave(3, 1)
    teacher = softmax(double["q"] @ keys.mT / 4, mask.repeat_interleave(3, 1)).unflatten(1, (-1, 3)).mean(2)
    student = softmax(0.3 * double["index_q"] @ double["index_k"].mT, mask)
    dlogit = dkl.double()[..., None] * (student - teacher)
    assert_close(result["d_index_q"], 0.3 * dlogit @ double["index_k"], 1e-4)
    assert_close(result["d_index_k"], 0.3 * (dlogit.mT @ double["index_q"]).sum(1, keepdim=True), 1e-4)


@every_implementation
def test_a_block_that_nobody_chose_has_no_gradient_until_all_are_visible(implementation):
    inputs = usual_inputs(implementation, B=1, N=TOKENS)
    table = lists(*([0, own] if own not in (0, 2) else [0] for own in (torch.arange(TOKENS) // BLOCK).tolist()),
                  heads=inputs["index_q"].shape[1])  # fmt: skip
    chosen, unchosen = run(implementation, inputs, OPTIONS, block_indices=table), slice(2 * BLOCK, 3 * BLOCK)
    everything = run(implementation, inputs, OPTIONS | {"topk": None})
    for name in ("dk", "dv", "d_index_k"):
        assert chosen[name][:, :, unchosen].eq(0).all() and chosen[name][:, :, :BLOCK].ne(0).any(), name
        assert everything[name][:, :, unchosen].ne(0).any(), name


@every_implementation
@every_topk
def test_the_loss_is_real_before_any_backward(topk, implementation):
    inputs = usual_inputs(implementation)
    with torch.no_grad():
        result = IMPLEMENTATIONS[implementation].msa_attention(*inputs.values(), topk=topk, block_size=BLOCK)
    expected = run_double(inputs, OPTIONS | {"topk": topk})
    assert_close(result.kl_loss, expected["kl"], 1e-5)
    assert expected["kl"] > 0.1


@every_implementation
@every_topk
def test_the_composed_call_is_the_three_operations(topk, implementation):
    inputs, options = usual_inputs(implementation), OPTIONS | {"topk": topk, "scale": 0.3, "index_scale": 0.1}
    composed = IMPLEMENTATIONS[implementation].msa_attention(*inputs.values(), **options)
    separate = run(implementation, inputs, options)
    together = {"out": composed.out, "lse": composed.lse, "kl": composed.kl_loss, "ids": composed.block_indices}
    assert_equal_runs(together, separate, implementation, together)


@every_autograd
def test_the_two_losses_may_be_sent_back_one_after_the_other(implementation):
    inputs = usual_inputs(implementation)
    leaves = [tensor.requires_grad_() for tensor in inputs.values()]
    result = IMPLEMENTATIONS[implementation].msa_attention(*leaves, topk=2, block_size=16)
    result.out.sum().backward()
    assert all(leaf.grad is not None for leaf in leaves[:3]) and all(leaf.grad is None for leaf in leaves[3:])
    result.kl_loss.backward()
    assert all(leaf.grad.abs().sum() > 0 for leaf in leaves[3:])
