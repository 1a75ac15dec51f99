"""Documents packed in one row, and rows stacked in a batch: each as if it were alone."""

import torch
from cases import (
    BLOCK,
    OPTIONS,
    TOKENS,
    assert_equal_runs,
    every_autograd,
    every_implementation,
    every_topk,
    usual_inputs,
)
from compare import GRADIENTS, IMPLEMENTATIONS, INPUTS, assert_close, assert_equal, random_inputs, random_like, run


def upstream(inputs):
    return random_like(inputs["q"][..., :1].expand_as(inputs["q"]), 1), random_like(inputs["index_q"][..., 0], 2)


@every_implementation
@every_topk
def test_the_first_token_of_a_document_sees_only_itself(topk, implementation):
    inputs = random_inputs(0, B=1, N=2 * BLOCK, H=2, Hkv=2)
    options = OPTIONS | {"topk": topk, "cu_seqlens": [0, BLOCK, 2 * BLOCK]}
    result = run(implementation, inputs, options)
    for row in (0, BLOCK):
        assert_equal(result["out"][:, :, row], inputs["v"][:, :, row], implementation)


@every_implementation
@every_topk
def test_a_loss_on_one_document_has_no_gradient_in_another(topk, implementation):
    inputs = usual_inputs(implementation, B=1, N=TOKENS)
    options = OPTIONS | {"topk": topk, "cu_seqlens": [0, 25, 60, TOKENS], "reduction": "none"}
    dout, dkl = upstream(inputs)
    outside = torch.ones(TOKENS, dtype=torch.bool)
    outside[25:60] = False
    dout[:, :, outside] = dkl[:, :, outside] = 0
    result = run(implementation, inputs, options, dout, dkl)
    for name in GRADIENTS:
        assert result[name][:, :, outside].eq(0).all() and result[name][:, :, 25:60].ne(0).any(), name


@every_implementation
@every_topk
def test_empty_documents_change_no_bit(topk, implementation):
    inputs, options = usual_inputs(implementation, B=1, N=TOKENS), OPTIONS | {"topk": topk}
    with_empty = run(implementation, inputs, options | {"cu_seqlens": [0, 0, 5, 5, 5, TOKENS, TOKENS]})
    without = run(implementation, inputs, options | {"cu_seqlens": [0, 5, TOKENS]})
    assert_equal_runs(with_empty, without, implementation)


@every_implementation
@every_topk
def test_documents_of_one_token_return_their_values(topk, implementation):
    tokens = 20 if implementation == "triton" else TOKENS
    inputs = random_inputs(0, B=1, N=tokens, H=2, Hkv=2)
    result = run(implementation, inputs, OPTIONS | {"topk": topk, "cu_seqlens": list(range(tokens + 1))})
    assert_equal(result["out"], inputs["v"], implementation)
    assert_close(result["lse"], (inputs["q"] * inputs["k"]).sum(-1) / 4, 1e-6, implementation)
    assert_close(result["kl"], torch.tensor(0.0), 1e-6, implementation, floor=1.0)
    assert_close(result["dv"], torch.ones_like(inputs["v"]), 1e-6, implementation)
    # dq and dk are differences of two sums of 16 products, which the kernels add up in different orders.
    floor = 1.0 if implementation == "triton" else 0.1
    for name in ("dq", "dk", "d_index_q", "d_index_k"):
        assert_close(result[name], torch.zeros_like(result[name]), 1e-5, f"{implementation} {name}", floor)
    if topk:
        assert_equal(result["ids"][0, 0], torch.stack([torch.arange(tokens), torch.full((tokens,), -1)], -1))


@every_implementation
@every_topk
def test_a_batch_equals_its_rows_alone_bit_for_bit(topk, implementation):
    inputs, options = usual_inputs(implementation, B=3), OPTIONS | {"topk": topk, "reduction": "none"}
    dout, dkl = upstream(inputs)
    together = run(implementation, inputs, options, dout, dkl)
    for row in range(3):
        one = slice(row, row + 1)
        own = {name: tensor[one] for name, tensor in inputs.items()}
        alone = run(implementation, own, options, dout[one], dkl[one])
        part = {name: value if value is None else value[one] for name, value in together.items()}
        assert_equal_runs(part, alone, f"{implementation}, row {row}:")


@every_implementation
def test_every_kind_of_document_offsets_gives_the_same_bits(implementation):
    inputs = usual_inputs(implementation, B=1)
    offsets = [0, 7, 7, 8, 30, inputs["q"].shape[2]]
    column = torch.full((len(offsets), 2), 3)
    column[:, 1] = torch.tensor(offsets)
    kinds = (tuple(offsets), torch.tensor(offsets), torch.tensor(offsets).int(), column[:, 1], column.int()[:, 1])
    assert not column[:, 1].is_contiguous()
    expected = run(implementation, inputs, OPTIONS | {"cu_seqlens": offsets})
    for cu_seqlens in kinds:
        assert_equal_runs(run(implementation, inputs, OPTIONS | {"cu_seqlens": cu_seqlens}), expected, implementation)


@every_autograd
def test_the_mean_divides_a_packed_row_by_all_its_tokens(implementation):
    inputs, offsets = usual_inputs(implementation, B=1, N=TOKENS), [0, 10, 37, TOKENS]
    function = IMPLEMENTATIONS[implementation].msa_attention
    packed = function(*(inputs[name] for name in INPUTS), **OPTIONS, cu_seqlens=offsets).kl_loss
    shares = [
        (stop - start) / TOKENS * function(*(inputs[name][:, :, start:stop] for name in INPUTS), **OPTIONS).kl_loss
        for start, stop in zip(offsets[:-1], offsets[1:], strict=True)
    ]
    assert_close(packed, sum(shares), 1e-6, implementation)
