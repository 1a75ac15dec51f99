"""Rows and tiles with nothing visible, and memory past the valid end."""

import pytest
import torch
from cases import (
    BLOCK,
    OPTIONS,
    TOKENS,
    all_inside,
    assert_close_runs,
    assert_equal_runs,
    every_autograd,
    every_implementation,
    every_topk,
    inside,
    lists,
    nan_in_new_memory,
    run_double,
    usual_inputs,
)  # fmt: skip
from compare import (
    IMPLEMENTATIONS,
    assert_close,
    assert_equal,
    assert_same_run,
    random_inputs,
    random_like,
    run,
)

from msa_ref import naive

OWN = [query // BLOCK for query in range(TOKENS)]
# Documents of 40 and 37 tokens hold the blocks 0 to 2 and 3 to 5.
DOCUMENTS = [0, 40, TOKENS]
OWN_PACKED = [query // BLOCK if query < 40 else 3 + (query - 40) // BLOCK for query in range(TOKENS)]


@every_implementation
@pytest.mark.parametrize(
    "order", [lambda own: [-1, -1, own], lambda own: [own, -1, -1], lambda own: [-1, own, -1, -1]],
    ids=["first", "last", "around"],
)  # fmt: skip
def test_unused_slots_before_a_valid_block(order, implementation):
    inputs = usual_inputs(implementation, N=TOKENS)
    batch, heads = inputs["index_q"].shape[:2]
    alone = run_double(inputs, OPTIONS, block_indices=lists(*([own] for own in OWN), batch=batch, heads=heads))
    table = lists(*(order(own) for own in OWN), batch=batch, heads=heads)
    result = run(implementation, inputs, OPTIONS, block_indices=table)
    assert_same_run(result, {**alone, "ids": table}, torch.float32, implementation)


@every_implementation
@pytest.mark.parametrize(
    "order", [lambda own: [0, 2, own], lambda own: [own, 2, 0], lambda own: [-1, 1, own, 0]],
    ids=["first", "last", "around"],
)  # fmt: skip
def test_blocks_of_an_earlier_document_before_a_valid_block(order, implementation):
    inputs, options = usual_inputs(implementation, B=1, N=TOKENS), OPTIONS | {"cu_seqlens": DOCUMENTS}
    heads = inputs["index_q"].shape[1]
    alone = run_double(inputs, options, block_indices=lists(*([own] for own in OWN_PACKED), heads=heads))
    table = lists(*(order(own) if own > 2 else [own] for own in OWN_PACKED), heads=heads)
    result = run(implementation, inputs, options, block_indices=table)
    assert_same_run(result, {**alone, "ids": table}, torch.float32, implementation)


@every_implementation
@pytest.mark.parametrize("earlier", [[], [0, 1]], ids=["empty list", "only another document"])
def test_a_row_with_nothing_visible_is_zero_and_disturbs_no_other(earlier, implementation):
    inputs = usual_inputs(implementation, B=1, N=TOKENS)
    options, heads = OPTIONS | {"cu_seqlens": DOCUMENTS, "reduction": "none"}, inputs["index_q"].shape[1]
    full = [[0, own] if 0 < own <= 2 else [own] for own in OWN_PACKED]
    row = 58
    dout, dkl = random_like(inputs["q"], 1), random_like(inputs["index_q"][..., 0], 2)
    table = lists(*full[:row], earlier, *full[row + 1 :], heads=heads)
    result = run(implementation, inputs, options, dout, dkl, table)
    assert all(result[name][:, :, row].eq(0).all() for name in ("out", "kl", "dq", "d_index_q"))
    assert result["lse"][:, :, row].eq(-torch.inf).all()
    assert_same_run(result, run_double(inputs, options, dout, dkl, table), torch.float32, implementation)
    before = run(implementation, inputs, options, dout, dkl, lists(*full, heads=heads))
    for rows in (slice(0, row), slice(row + 1, None)):
        names = ("out", "lse", "kl", "dq", "d_index_q")
        assert_close_runs(result, before, implementation, names, rows)
    # The mean still divides by every row.
    mean = run(implementation, inputs, options | {"reduction": "mean"}, block_indices=table)["kl"]
    assert_close(mean, result["kl"].double().sum() / (heads * TOKENS), 1e-6)


@every_implementation
@pytest.mark.parametrize("poison", [False, True], ids=["plain", "poisoned"])
def test_no_row_with_anything_visible(poison, implementation):
    inputs = usual_inputs(implementation)
    batch, heads, tokens, _ = inputs["index_q"].shape
    with nan_in_new_memory():
        result = run(implementation, all_inside(inputs) if poison else inputs, OPTIONS,
                     block_indices=lists(*[[]] * tokens, batch=batch, heads=heads))  # fmt: skip
    assert result.pop("lse").eq(-torch.inf).all() and result.pop("ids").eq(-1).all()
    assert all(value.eq(0).all() for value in result.values())


@every_implementation
def test_lists_of_length_0_1_and_k_with_logits_up_to_10000(implementation):
    generator = torch.Generator().manual_seed(0)
    inputs = usual_inputs(implementation, B=1, N=TOKENS)
    # Integers, so that logits up to 16 · 25² are exact in float32.
    for name in ("q", "k", "index_q", "index_k"):
        inputs[name] = torch.randint(-25, 26, inputs[name].shape, generator=generator).float()
    inputs["q"][:, :, 10] = inputs["k"][:, :1, 10] = 25
    table = lists(*([] if query % 3 == 0 else [own] if query % 3 == 1 else range(own + 1)
                    for query, own in enumerate(OWN)), heads=inputs["index_q"].shape[1])  # fmt: skip
    options = OPTIONS | {"scale": 1.0, "index_scale": 1.0, "reduction": "none"}
    reference = run_double(inputs, options, block_indices=table)
    assert reference["lse"].max() >= 1e4
    result = run(implementation, inputs, options, block_indices=table)
    assert result["out"][:, :, ::3].eq(0).all() and result["lse"][:, :, ::3].eq(-torch.inf).all()
    assert_same_run(result, reference, torch.float32, implementation)


class Layer(torch.nn.Module):
    """Five projections from one matrix, MSA of one reference, an output projection; rows of padding choose nothing."""

    def __init__(self, implementation, width=12, heads=(4, 2, 2, 2, 1), size=4):
        super().__init__()
        self.implementation, self.sizes = IMPLEMENTATIONS.get(implementation), [count * size for count in heads]
        self.project = torch.nn.Linear(width, sum(self.sizes))
        self.mix = torch.nn.Linear(heads[0] * size, width)

    def forward(self, hidden, padding=None, cu_seqlens=None):
        q, k, v, index_q, index_k = (
            part.unflatten(-1, (-1, 4)).transpose(1, 2) for part in self.project(hidden).split(self.sizes, dim=-1)
        )
        place = {"block_size": BLOCK, "cu_seqlens": cu_seqlens}
        ids = self.implementation.select_blocks(index_q, index_k, topk=2, **place)
        if padding is not None:
            ids = ids.masked_fill(padding[:, None, :, None], -1)
        out, lse = self.implementation.sparse_attention(q, k, v, ids, **place)
        kl = self.implementation.index_kl_loss(q, k, lse, index_q, index_k, ids, reduction="none", **place)
        return hidden + self.mix(out.transpose(1, 2).flatten(2)), kl


def two_layers(implementation, hidden, valid, **place):
    """Gradients of every parameter of two stacked layers for a loss on the first `valid` tokens."""
    torch.manual_seed(0)
    layers = [Layer(implementation).to(hidden.dtype) for _ in range(2)]
    loss = hidden.new_zeros(())
    for layer in layers:
        hidden, kl = layer(hidden, **place)
        loss = loss + kl[:, :, :valid].sum()
    loss = loss + hidden[:, :valid].square().sum()
    return torch.autograd.grad(loss, [parameter for layer in layers for parameter in layer.parameters()])


@every_autograd
@pytest.mark.parametrize("kind", ["document", "empty lists", "nothing told"])
def test_padding_rows_do_not_poison_two_stacked_layers(kind, implementation):
    hidden = torch.randn(1, TOKENS, 12, generator=torch.Generator().manual_seed(0))
    hidden[:, -5:] = 1e3
    padding = (torch.arange(TOKENS) >= TOKENS - 5)[None]
    place = {"document": {"cu_seqlens": [0, TOKENS - 5, TOKENS]}, "empty lists": {"padding": padding}}.get(kind, {})
    padded = two_layers(implementation, hidden, TOKENS - 5, **place)
    expected = two_layers("dense", hidden[:, :-5].double(), TOKENS - 5)
    for gradient, reference in zip(padded, expected, strict=True):
        assert_close(gradient, reference, 1e-4, implementation)


@every_autograd
def test_padding_rows_of_one_sample_do_not_poison_shared_weights(implementation):
    hidden = torch.randn(2, TOKENS, 12, generator=torch.Generator().manual_seed(0))
    valid = [TOKENS, TOKENS - 3]
    padding = torch.arange(TOKENS) >= torch.tensor(valid)[:, None]

    def weight_gradient(implementation, hidden, padding, counts):
        torch.manual_seed(0)
        layer = Layer(implementation).to(hidden.dtype)
        out, kl = layer(hidden, padding)
        loss = sum(out[row, :count].square().sum() + kl[row, :, :count].sum() for row, count in enumerate(counts))
        return torch.autograd.grad(loss, layer.project.weight)[0]

    actual = weight_gradient(implementation, hidden, padding, valid)
    expected = sum(
        weight_gradient("dense", hidden[row : row + 1, :count].double(), None, [count])
        for row, count in enumerate(valid)
    )
    assert_close(actual, expected, 1e-4, implementation)


@every_implementation
@pytest.mark.parametrize("rest", [float("nan"), float("inf"), 1e4])
@pytest.mark.parametrize("topk, tokens", [(2, 2 * BLOCK + 5), (None, 2 * BLOCK + 5), (2, BLOCK + 3)])
def test_memory_around_the_inputs_is_never_used(topk, tokens, rest, implementation):
    inputs, options = usual_inputs(implementation, N=tokens, Dv=8), OPTIONS | {"topk": topk, "reduction": "none"}
    dout, dkl = random_like(inputs["q"][..., :8], 1), random_like(inputs["index_q"][..., 0], 2)
    clean = run(implementation, inputs, options, dout, dkl)
    assert_same_run(clean, run_double(inputs, options, dout, dkl), torch.float32, implementation)
    with nan_in_new_memory():
        upstream = inside(dout, rest), inside(dkl, rest, (0, 1, 5))
        result = run(implementation, all_inside(inputs, rest), options, *upstream)
    assert_close_runs(result, clean, implementation)


@every_implementation
@pytest.mark.parametrize("cu_seqlens", [None, [0, 3, 3, 20, TOKENS]], ids=["one document", "documents"])
def test_garbage_behind_the_inputs_changes_no_bit_between_runs(cu_seqlens, implementation):
    inputs, options = usual_inputs(implementation, B=1, N=TOKENS), OPTIONS | {"cu_seqlens": cu_seqlens}
    results = []
    for seed in (1, 2):
        garbage = 1e6 * torch.randn(1, generator=torch.Generator().manual_seed(seed)).item()
        ids = naive.select_blocks(inputs["index_q"], inputs["index_k"], **OPTIONS, cu_seqlens=cu_seqlens)
        ids = inside(ids, int(garbage))
        results.append(run(implementation, all_inside(inputs, garbage), options, block_indices=ids))
        results.append(run(implementation, all_inside(inputs, garbage), options))
    for result in results[1:]:
        assert_equal_runs(result, results[0], implementation)


@every_autograd
@every_topk
def test_the_gradient_of_memory_around_the_inputs_is_zero(topk, implementation):
    inputs = usual_inputs(implementation, N=2 * BLOCK + 5)
    bases = [inside(tensor)._base.requires_grad_() for tensor in inputs.values()]
    parts = [base[:, 1:-1, 5:-5, 2:-2] for base in bases]
    result = IMPLEMENTATIONS[implementation].msa_attention(*parts, topk=topk, block_size=BLOCK)
    gradients = torch.autograd.grad(result.out.sum() + result.kl_loss, bases)
    expected = run(implementation, inputs, OPTIONS | {"topk": topk})
    for gradient, name in zip(gradients, ("dq", "dk", "dv", "d_index_q", "d_index_k"), strict=True):
        assert_equal(gradient[:, 1:-1, 5:-5, 2:-2], expected[name], name)
        gradient[:, 1:-1, 5:-5, 2:-2] = 0
        assert gradient.eq(0).all(), name


@every_implementation
@pytest.mark.parametrize("tokens, width", [(507, 16), (507, 128), (508, 16), (3 * BLOCK + 27, 128)])
def test_a_last_block_that_is_not_full(tokens, width, implementation):
    inputs = random_inputs(0, B=1, N=tokens, H=2, Hkv=1, Hidx=1, D=width, Dv=width)
    dout = random_like(inputs["q"], 1)
    dkl = torch.tensor(float(tokens))
    options = OPTIONS | ({"block_size": 128} if implementation == "triton" else {})
    with nan_in_new_memory():
        result = run(implementation, all_inside(inputs), options, inside(dout), dkl)
    assert_same_run(result, run_double(inputs, options, dout, dkl), torch.float32, implementation)


@every_implementation
@pytest.mark.parametrize("packed", [False, True], ids=["one document", "documents"])
@pytest.mark.parametrize("scale", [None, 0.7])
@pytest.mark.parametrize("tokens", [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 1])
def test_lengths_around_the_block_size(tokens, scale, packed, implementation):
    index_heads = 1 if implementation == "triton" else 2
    inputs = random_inputs(tokens, B=1, N=tokens, H=2, Hkv=1, Hidx=index_heads)
    options = OPTIONS | {"scale": scale, "cu_seqlens": [0, 2 * tokens // 5, tokens] if packed else None}
    dout, dkl = random_like(inputs["q"], 1), torch.tensor(float(index_heads * tokens))
    for topk in (2, None):
        result = run(implementation, inputs, options | {"topk": topk}, dout, dkl)
        expected = run_double(inputs, options | {"topk": topk}, dout, dkl)
        assert_same_run(result, expected, torch.float32, implementation)


@every_implementation
@pytest.mark.parametrize("rest", [1e30, 0.0, float("nan")])
def test_the_score_of_a_last_block_counts_only_its_tokens(rest, implementation):
    tokens, last = 2 * BLOCK + 3, 2
    index_q = torch.ones(1, 1, tokens, 2)
    index_k = torch.full((1, 1, tokens, 2), -3.0)
    index_k[:, :, BLOCK : 2 * BLOCK] = -2
    options = {"topk": 1, "block_size": BLOCK, "local_blocks": 0}
    # Every score is negative: zeros behind the end would win. The last block is best only in the rows that see a -1.
    index_k[:, :, tokens - 2] = -1
    scores = naive.block_scores(inside(index_q, rest), inside(index_k, rest), block_size=BLOCK)
    assert scores[0, 0, :, last].tolist() == [-torch.inf] * (2 * BLOCK) + [-6, -2, -2]
    ids = IMPLEMENTATIONS[implementation].select_blocks(inside(index_q, rest), inside(index_k, rest), **options)
    assert ids.flatten().tolist() == [0] * BLOCK + [1] * (BLOCK + 1) + [last] * 2
