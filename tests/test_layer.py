"""`MSAttention`."""

import compare
import pytest
import torch

from msa_ref import dense
from msa_ref.recall import last_blocks
from msa_triton import MSAttention
from msa_triton.layer import MODES, rotate

BACKENDS = ("dense", "torch")
DOCUMENTS = [0, 5, 5, 29, 40]


def layer(backend="torch", seed=0, **options):
    torch.manual_seed(seed)
    sizes = dict(heads=4, kv_heads=2, head_width=8, value_width=6, index_width=4, block_size=4, topk=3)
    return MSAttention(24, **{**sizes, "backend": backend, **options})


def hidden_state(batch=1, tokens=40, seed=1):
    return torch.randn(batch, tokens, 24, generator=torch.Generator().manual_seed(seed))


def gradients(parameters):
    return [None if parameter.grad is None else parameter.grad.clone() for parameter in parameters]


@pytest.mark.parametrize("mode", ["warm-up", "sparse"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("options", [
    {}, {"qk_norm": False, "bias": True, "scale": 0.7, "index_scale": 0.2, "index_heads": 4, "index_key_heads": 2},
    {"rotary_width": 2, "local_blocks": 2, "init_blocks": 1}, {"rotary_width": 0},
], ids=["plain", "options", "blocks", "no rope"])  # fmt: skip
def test_forward_is_projections_attention_and_output(backend, mode, options):
    module, hidden = layer(backend, **options), hidden_state(batch=2)
    tensors = module.project(hidden)
    shapes = [tuple(tensor.shape) for tensor in tensors]
    index_heads, index_key_heads = options.get("index_heads", 2), options.get("index_key_heads", 1)
    assert shapes == [(2, 4, 40, 8), (2, 2, 40, 8), (2, 2, 40, 6), (2, index_heads, 40, 4), (2, index_key_heads, 40, 4)]
    blocks = {name: options.get(name, default) for name, default in (("local_blocks", 1), ("init_blocks", 0))}
    scales = {name: options.get(name) for name in ("scale", "index_scale")}
    topk = 3 if mode == "sparse" else None
    expected = dense.msa_attention(*tensors, topk=topk, block_size=4, **blocks, **scales)
    output, kl_loss = module(hidden, mode=mode)
    compare.assert_close(output, module.output(expected.out.transpose(1, 2).flatten(2)), 1e-5)
    compare.assert_close(kl_loss, expected.kl_loss, 1e-5)


@pytest.mark.parametrize("cu_seqlens", [None, DOCUMENTS])
def test_dense_mode_is_the_warm_up_without_the_index(cu_seqlens):
    module, hidden = layer(scale=0.9), hidden_state()
    output, kl_loss = module(hidden, mode="dense", cu_seqlens=cu_seqlens)
    warm_up, warm_up_loss = module(hidden, mode="warm-up", cu_seqlens=cu_seqlens)
    compare.assert_close(output, warm_up, 1e-5)
    assert kl_loss == 0 and not kl_loss.requires_grad and warm_up_loss > 0
    output.sum().backward()
    assert all(parameter.grad is None for parameter in module.index_parameters())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_packed_documents_equal_separate_calls(backend, mode):
    module, hidden = layer(backend), hidden_state()
    pieces = [(start, end) for start, end in zip(DOCUMENTS[:-1], DOCUMENTS[1:], strict=True) if start < end]
    parts = [module(hidden[:, start:end], mode=mode) for start, end in pieces]
    expected = torch.cat([output for output, _ in parts], 1)
    expected_loss = sum(kl * (end - start) for (_, kl), (start, end) in zip(parts, pieces, strict=True)) / 40
    for cu_seqlens in (DOCUMENTS, torch.tensor(DOCUMENTS, dtype=torch.int32)):
        output, kl_loss = module(hidden, mode=mode, cu_seqlens=cu_seqlens)
        compare.assert_close(output, expected, 1e-5)
        compare.assert_close(kl_loss, torch.as_tensor(expected_loss), 1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_padding_behind_a_document_changes_nothing_in_two_layers(backend):
    stack, hidden = [layer(backend, seed) for seed in (2, 3)], hidden_state()
    weights = [parameter for module in stack for parameter in module.parameters()]

    def run(rows, cu_seqlens):
        for parameter in weights:
            parameter.grad = None
        state = rows
        for module in stack:
            attended, _ = module(state, cu_seqlens=cu_seqlens)
            state = state + attended
        state[:, :35].square().sum().backward()
        return [state[:, :35], *(g for g in gradients(weights) if g is not None and g.any())]

    padded, alone = run(hidden, [0, 35, 40]), run(hidden[:, :35], None)
    for left, right in zip(padded, alone, strict=True):
        assert left.isfinite().all()
        compare.assert_close(left, right, 1e-5)


@pytest.mark.parametrize("mode", ["warm-up", "sparse"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_each_loss_trains_its_own_branch(backend, mode):
    module, hidden = layer(backend), hidden_state().requires_grad_()
    index = list(module.index_parameters())
    rest = [parameter for parameter in module.parameters() if not any(parameter is other for other in index)]
    assert len(index) == 4 and len(rest) == 6
    output, kl_loss = module(hidden, mode=mode)
    kl_loss.backward(retain_graph=True)
    assert all(parameter.grad.any() for parameter in index)
    assert all(parameter.grad is None or not parameter.grad.any() for parameter in (*rest, hidden))
    module.zero_grad(set_to_none=True)
    output.square().sum().backward()
    assert all(parameter.grad is None or not parameter.grad.any() for parameter in index)
    assert all(parameter.grad.any() for parameter in (*rest, hidden))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mode", MODES)
def test_autocast_keeps_the_gradients_in_the_dtype_of_the_parameters(backend, mode):
    module, hidden = layer(backend), hidden_state()
    expected, expected_loss = module(hidden, mode=mode)
    with torch.autocast("cpu", torch.bfloat16):
        output, kl_loss = module(hidden, mode=mode)
        assert {tensor.dtype for tensor in module.project(hidden)} == {torch.bfloat16}
    assert output.dtype == torch.bfloat16 and kl_loss.dtype == torch.float32
    (output.float().square().sum() + kl_loss).backward()
    found = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    assert len(found) == (6 if mode == "dense" else 10)
    assert all(gradient.dtype == torch.float32 and gradient.isfinite().all() for gradient in found)
    if mode != "sparse":  # rounding may turn a selection
        compare.assert_close(output, expected, 4e-2)
        compare.assert_close(kl_loss, expected_loss, 4e-2)


@pytest.mark.parametrize("backend", BACKENDS)
def test_half_precision_weights(backend):
    module = layer(backend).bfloat16()
    output, kl_loss = module(hidden_state().bfloat16())
    (output.sum() + kl_loss).backward()
    assert output.dtype == torch.bfloat16
    assert all(parameter.grad.dtype == torch.bfloat16 for parameter in module.parameters())


@pytest.mark.parametrize("backend", BACKENDS)
def test_another_selection_can_be_tried(backend):
    module, hidden = layer(backend), hidden_state()

    def last(index_q, index_k, *, topk, block_size, local_blocks, init_blocks, cu_seqlens):
        return last_blocks(index_q.shape[2], block_size, topk, index_heads=index_q.shape[1])

    tensors, ids = module.project(hidden), last_blocks(40, 4, 3, index_heads=2)
    out, lse = dense.sparse_attention(*tensors[:3], ids, block_size=4)
    expected = dense.index_kl_loss(*tensors[:2], lse, *tensors[3:], ids, block_size=4)
    output, kl_loss = module(hidden, select=last)
    compare.assert_close(output, module.output(out.transpose(1, 2).flatten(2)), 1e-5)
    compare.assert_close(kl_loss, expected, 1e-5)
    compare.assert_equal(module(hidden, mode="warm-up", select=last)[0], module(hidden, mode="warm-up")[0])
    with pytest.raises(ValueError, match="block 10, which is outside -1 .. 9"):
        module(hidden, select=lambda *index, **options: ids + 1)


def test_compiled_layer_equals_eager():
    torch._dynamo.reset()
    module, hidden, cu_seqlens = layer(), hidden_state(), torch.tensor(DOCUMENTS)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    found = []
    for call in (compiled, module):
        module.zero_grad()
        output, kl_loss = call(hidden, cu_seqlens=cu_seqlens)
        (output.square().sum() + kl_loss).backward()
        found.append([output, kl_loss, *gradients(module.parameters())])
    for left, right in zip(*found, strict=True):
        compare.assert_close(left, right, 1e-6)


def test_rope_depends_on_the_distance_alone():
    x, y = torch.randn(2, 1, 1, 1, 8, generator=torch.Generator().manual_seed(0)).double()

    def product(i, j, width=None):
        return (rotate(x, torch.tensor([i]), width) * rotate(y, torch.tensor([j]), width)).sum()

    compare.assert_close(product(13, 4), product(9, 0), 1e-5)
    assert abs(product(9, 0) - product(8, 0)) > 1e-3
    compare.assert_equal(rotate(x, torch.tensor([0])), x)
    compare.assert_close(rotate(x, torch.tensor([5])).norm(), x.norm(), 1e-6)
    compare.assert_equal(rotate(x, torch.tensor([5]), 4)[..., 4:], x[..., 4:])
    compare.assert_close(rotate(x, torch.tensor([5]), 4)[..., :4], rotate(x[..., :4], torch.tensor([5])), 1e-6)
    turned = rotate(torch.tensor([1.0, 0, 0, 0]).view(1, 1, 1, 4), torch.tensor([2]), theta=100.0)
    expected = torch.tensor([2.0]).cos(), torch.zeros(1), torch.tensor([2.0]).sin(), torch.zeros(1)
    compare.assert_close(turned.flatten(), torch.cat(expected), 1e-6)
    turned = rotate(torch.tensor([0, 1.0, 0, 0]).view(1, 1, 1, 4), torch.tensor([2]), theta=100.0)
    expected = torch.zeros(1), torch.tensor([0.2]).cos(), torch.zeros(1), torch.tensor([0.2]).sin()
    compare.assert_close(turned.flatten(), torch.cat(expected), 1e-6)


@pytest.mark.parametrize("width", [None, 2, 0])
def test_rope_turns_the_leading_channels_of_both_branches(width):
    module, hidden = layer(rotary_width=width), hidden_state(tokens=1).expand(1, 9, 24)
    for tensor in module.project(hidden):
        turned = 0 if tensor.shape[-1] == 6 else tensor.shape[-1] if width is None else width
        change = (tensor[:, :, 1:] - tensor[:, :, :1]).abs()
        assert (change[..., :turned] > 1e-6).all() and (change[..., turned:] < 1e-6).all()
    restarted = module.project(hidden, cu_seqlens=[0, 3, 9])[0][:, :, 3:]
    compare.assert_close(restarted, module.project(hidden)[0][:, :, :6], 1e-6)


def test_rope_theta():
    q = [layer(rope_theta=theta).project(hidden_state())[0] for theta in (10.0, 10.0, 1e4)]
    assert torch.equal(q[0], q[1]) and not torch.equal(q[0], q[2])


@pytest.mark.parametrize("options, error, message", [
    ({"heads": 3}, ValueError, "q has 3 heads"), ({"index_heads": 3}, ValueError, "Hidx"),
    ({"topk": 0}, ValueError, "topk must be at least 1"), ({"topk": 1.5}, TypeError, "topk must be an int"),
    ({"block_size": 0}, ValueError, "block_size"), ({"scale": -1.0}, ValueError, "scale must be finite"),
    ({"backend": "cuda"}, ValueError, "backend must be one of .*'dense'.* got 'cuda'"),
    ({"rotary_width": 3}, ValueError, "rotary_width must be even and within 0 .. 4, got 3"),
    ({"rotary_width": 6}, ValueError, "within 0 .. 4, got 6"), ({"index_width": 5}, ValueError, "even"),
    ({"value_width": 0}, ValueError, "v must not be empty"),
    ({"heads": 0}, ValueError, "heads must be at least 1, got 0"),
    ({"heads": 2.0}, TypeError, "heads must be an int, got float 2.0"),
])  # fmt: skip
def test_sizes_are_checked_when_the_layer_is_made(options, error, message):
    with pytest.raises(error, match=message):
        layer(**options)


def test_bad_calls_are_refused():
    module, hidden = layer(), hidden_state()
    with pytest.raises(ValueError, match="mode must be one of .* got 'warmup'"):
        module(hidden, mode="warmup")
    for mode in MODES:
        with pytest.raises(ValueError, match="cu_seqlens must end at N=40, got 39"):
            module(hidden, mode=mode, cu_seqlens=[0, 39])
        with pytest.raises(ValueError, match=r"hidden must have shape \[B, N, 24\], got \(1, 40, 23\)"):
            module(hidden[..., :23], mode=mode)
        with pytest.raises(ValueError, match="B must be 1, got B=2"):
            module(hidden_state(batch=2), mode=mode, cu_seqlens=[0, 40])
    with pytest.raises(ValueError, match="for the Triton kernels, got 4"):
        layer("triton")(hidden)
