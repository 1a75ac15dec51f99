"""The operators of `msa_triton`: numbers, autograd, `torch.compile`, layouts, and what they refuse."""

from functools import partial

import compare
import pytest
import torch
from compare import assert_all_equal, gradients_of

import msa_triton
from msa_ref import blockwise
from msa_ref.inputs import toy_problem
from msa_triton import attention, index_kl_loss, msa_attention, select_blocks, sparse_attention

BLOCKS = {"topk": 2, "block_size": 16}
DOCUMENTS = [0, 5, 5, 40, 77]
CASES = {
    "plain": (2, BLOCKS),
    "documents": (1, {**BLOCKS, "cu_seqlens": DOCUMENTS}),
    "documents as a tensor": (1, {**BLOCKS, "cu_seqlens": torch.tensor(DOCUMENTS, dtype=torch.int32)}),
    "warm-up": (2, {**BLOCKS, "topk": None}),
    "scales": (1, {**BLOCKS, "scale": 0.5, "index_scale": 0.1, "init_blocks": 1}),
}


def leaves(batch=2, seed=0, **sizes):
    return [tensor.requires_grad_() for tensor in compare.random_inputs(seed, B=batch, **sizes).values()]


@pytest.mark.parametrize("name", CASES)
def test_matches_the_dense_reference_and_composes(name):
    batch, options = CASES[name]
    inputs = compare.random_inputs(1, B=batch, Dv=12, Di=8)
    reference = compare.run("dense", {name: tensor.double() for name, tensor in inputs.items()}, options)
    parts, result = compare.run(msa_triton, inputs, options), msa_attention(**inputs, **options)
    compare.assert_same_run(parts, reference, torch.float32, name)
    assert isinstance(result, msa_triton.MSAOutput)
    for part, value in zip(("out", "kl", "ids", "lse"), result, strict=True):
        compare.assert_equal(value, parts[part], part)


def test_loss_per_row():
    options = {**BLOCKS, "reduction": "none"}
    inputs = compare.random_inputs(2)
    dkl = compare.random_like(torch.empty(2, 2, 77), 3, torch.float32)
    parts, reference = (compare.run(module, inputs, options, dkl=dkl) for module in (msa_triton, "dense"))
    compare.assert_same_run(parts, reference, torch.float32)


def test_toy_numbers():
    toy = toy_problem()
    result = compare.run(msa_triton, toy, {"topk": 3, "block_size": 2}, toy["dout"])
    expected = {
        "kl": 0.4113174924, "out": 211.1436374, "dq": 112.2923102, "dk": 120.7873174, "dv": 180.8853427,
        "d_index_q": 0.8876537102, "d_index_k": 0.8659704580,
    }  # fmt: skip
    assert {name: float(result[name].abs().sum()) for name in expected} == pytest.approx(expected, rel=1e-8)


def test_finite_differences():
    tensors = leaves(1, N=9, H=2, Hkv=1, Hidx=1, D=3, Dv=2, Di=2, dtype=torch.float64)
    q, k, v, index_q, index_k = tensors
    options = {"block_size": 2, "cu_seqlens": [0, 4, 9]}
    ids = select_blocks(index_q, index_k, topk=2, **options)
    lse = sparse_attention(q, k, v, ids, **options)[1]
    assert torch.autograd.gradcheck(lambda *qkv: sparse_attention(*qkv, ids, **options)[0], (q, k, v))
    loss = lambda *index: index_kl_loss(q, k, lse, *index, ids, reduction="none", **options)  # noqa: E731
    assert torch.autograd.gradcheck(loss, (index_q, index_k))


def transposed(inputs):
    return {name: tensor.transpose(1, 2).contiguous().transpose(1, 2) for name, tensor in inputs.items()}


@pytest.mark.parametrize(
    "inputs, cu_seqlens, wants",
    [
        (compare.random_inputs(3, N=37, Dv=12), None, compare.INPUTS),
        (transposed(compare.random_inputs(3, N=37, Dv=12)), None, ("k", "index_q")),
        (compare.random_inputs(4, N=37, B=1), torch.tensor([0, 5, 5, 37]), ()),
    ],
    ids=["contiguous", "transposed", "ragged"],
)
def test_opcheck(inputs, cu_seqlens, wants):
    q, k, v, index_q, index_k = (inputs[name].detach().requires_grad_(name in wants) for name in compare.INPUTS)
    attend, align, gradients = (16, 0.25, "torch"), (16, 0.25, 0.2, "torch"), bool(wants)
    check = torch.library.opcheck
    check(attention._select_op, (index_q, index_k, cu_seqlens, 2, 16, 1, 0, "torch"))
    ids = select_blocks(index_q, index_k, topk=2, block_size=16, cu_seqlens=cu_seqlens)
    with torch.no_grad():
        out, lse = attention._attention_op(q, k, v, ids, cu_seqlens, *attend, "auto")
    check(attention._attention_op, (q, k, v, ids, cu_seqlens, *attend, "auto"))
    check(attention._index_loss_op, (q, k, lse, index_q, index_k, ids, cu_seqlens, *align, gradients))
    # The backward operators cannot be differentiated, so they are checked as autograd calls them: without gradients.
    check = partial(torch.library.opcheck, test_utils=("test_schema", "test_faketensor"))
    plain = [tensor.detach() for tensor in (q, k, v, index_q, index_k)]
    dout, dkl = compare.random_like(out, 5).mT.contiguous().mT, lse.new_ones(()).expand(index_q.shape[:3])
    check(attention._attention_backward_op, (dout, *plain[:3], out, lse, ids, cu_seqlens, *attend))
    saved = attention._index_loss_op(*plain[:2], lse, *plain[3:], ids, cu_seqlens, *align, gradients)[1:]
    check(attention._index_loss_backward_op, (dkl, *saved, *plain[:2], lse, *plain[3:], ids, cu_seqlens, *align))


@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_outputs_lie_in_one_piece_and_have_the_documented_dtype(layout, dtype):
    inputs = compare.random_inputs(5, N=37, dtype=dtype)
    inputs = transposed(inputs) if layout == "transposed" else inputs
    result = compare.run(msa_triton, inputs, BLOCKS)
    token_major = ("out", "dq")  # so that the heads of a token are one row for the projection that follows
    for name, tensor in result.items():
        assert (tensor.transpose(1, 2) if name in token_major else tensor).is_contiguous(), name
    expected = dict.fromkeys(("out", *compare.GRADIENTS), dtype)
    expected |= {"lse": torch.float32, "kl": torch.float32, "ids": torch.int32}
    assert {name: tensor.dtype for name, tensor in result.items()} == expected


@pytest.mark.parametrize("name", ["plain", "documents", "documents as a tensor", "warm-up"])
def test_compiled_equals_eager(name):
    batch, options = CASES[name]
    compiled = torch.compile(msa_attention, fullgraph=True, backend="aot_eager")
    torch._dynamo.reset()
    tensors = leaves(batch, N=77, Dv=12)
    assert_all_equal(gradients_of(compiled, tensors, **options), gradients_of(msa_attention, tensors, **options), name)


def test_compiled_with_other_lengths_and_documents():
    torch._dynamo.reset()
    compiled = torch.compile(msa_attention, fullgraph=True, backend="aot_eager")
    for offsets in ([0, 4, 37], [0, 9, 50], [0, 9, 9, 64]):
        tensors, options = leaves(1, N=offsets[-1]), {**BLOCKS, "cu_seqlens": torch.tensor(offsets)}
        with torch.no_grad():
            actual, expected = compiled(*tensors, **options), msa_attention(*tensors, **options)
        for left, right in zip(actual, expected, strict=True):
            compare.assert_equal(left, right, str(offsets))


def test_compiled_operations_that_take_ids():
    def operations(q, k, v, index_q, index_k, ids):
        out, lse = sparse_attention(q, k, v, ids, block_size=16)
        return out, index_kl_loss(q, k, lse, index_q, index_k, ids, block_size=16, reduction="none"), lse

    torch._dynamo.reset()
    tensors = leaves()
    ids = select_blocks(*tensors[3:], **BLOCKS)
    compiled = torch.compile(operations, fullgraph=True, backend="aot_eager")
    for left, right in zip(compiled(*tensors, ids), operations(*tensors, ids), strict=True):
        compare.assert_equal(left, right)


def test_compiled_calls_refuse_bad_arguments():
    torch._dynamo.reset()
    compiled = torch.compile(msa_attention, backend="aot_eager")
    tensors = leaves(1)
    with pytest.raises(ValueError, match="topk must be at least 1, got 0"):
        compiled(*tensors, topk=0, block_size=16)
    with pytest.raises(ValueError, match="cu_seqlens must end at N=77, got 76"):
        compiled(*tensors, cu_seqlens=torch.tensor([0, 76]), **BLOCKS)


@pytest.mark.parametrize("output, wanted", [("out", 0), ("out", 2), ("kl_loss", 3), ("kl_loss", 4)])
def test_second_derivative_is_refused(output, wanted):
    tensors = leaves(1, N=20)
    loss = getattr(msa_attention(*tensors, **BLOCKS), output).sum()
    (first,) = torch.autograd.grad(loss, tensors[wanted], create_graph=True)
    with pytest.raises(RuntimeError, match="first derivatives only"):
        torch.autograd.grad((first * tensors[wanted]).sum(), tensors[wanted])


@pytest.mark.parametrize("wanted", [0, 2, 3])
def test_forward_mode_is_refused(wanted):
    def call(tensor):
        result = msa_attention(*tensors[:wanted], tensor, *tensors[wanted + 1 :], **BLOCKS)
        return result.out.sum() + result.kl_loss

    tensors = [tensor.detach() for tensor in leaves(1, N=20)]
    with pytest.raises(RuntimeError, match="forward-mode"):
        torch.func.jvp(call, (tensors[wanted],), (torch.ones_like(tensors[wanted]),))


def test_each_output_trains_its_own_branch():
    tensors = leaves()
    result = msa_attention(*tensors, **BLOCKS)
    assert result.out.requires_grad and result.kl_loss.requires_grad
    assert not result.lse.requires_grad and not result.block_indices.requires_grad
    found = torch.autograd.grad(result.out.sum(), tensors, retain_graph=True, allow_unused=True)
    assert [gradient is not None for gradient in found] == [True, True, True, False, False]
    found = torch.autograd.grad(result.kl_loss, tensors, allow_unused=True)
    assert [gradient is not None for gradient in found] == [False, False, False, True, True]
    with torch.no_grad():
        assert not msa_attention(*tensors, **BLOCKS).out.requires_grad


def test_lse_cannot_be_differentiated():
    tensors = leaves()
    with pytest.raises(RuntimeError, match="does not require grad"):
        msa_attention(*tensors, **BLOCKS).lse.sum().backward()
    with pytest.raises(RuntimeError, match="does not require grad"):
        select_blocks(*tensors[3:], **BLOCKS).sum().backward()


def test_gradient_that_never_arrives():
    class Silent(torch.autograd.Function):
        @staticmethod
        def forward(ctx, tensor):
            return tensor.clone()

        @staticmethod
        def backward(ctx, gradient):
            return None

    tensors = leaves()
    result = msa_attention(*tensors, **BLOCKS)
    (Silent.apply(result.out).sum() + Silent.apply(result.kl_loss) + 0 * tensors[0].sum()).backward()
    assert all(tensor.grad is None or not tensor.grad.any() for tensor in tensors)


def test_only_the_gradients_asked_for_are_returned():
    inputs = compare.random_inputs(6)
    tensors = [inputs[name].requires_grad_(name in ("v", "index_k")) for name in compare.INPUTS]
    result = msa_attention(*tensors, **BLOCKS)
    (result.out.sum() + result.kl_loss).backward()
    assert [tensor.grad is not None for tensor in tensors] == [False, False, True, False, True]
    tensors[0].requires_grad_(True)
    tensors[4].requires_grad_(False)
    assert not msa_attention(*tensors, **BLOCKS).kl_loss.requires_grad


def test_unused_output_costs_no_backward_pass(monkeypatch):
    def fail(*_):
        raise AssertionError("not needed")

    result = msa_attention(*leaves(), **BLOCKS)
    monkeypatch.setattr(blockwise, "attention_backward", fail)
    result.kl_loss.backward(retain_graph=True)
    monkeypatch.setattr(blockwise, "index_loss_backward", fail)
    monkeypatch.undo()
    monkeypatch.setattr(blockwise, "index_loss_backward", fail)
    result.out.sum().backward()


@pytest.mark.parametrize("consume", [
    lambda out: out.transpose(1, 2).sum(), lambda out: out[..., ::2].sum(), lambda out: out.permute(3, 0, 2, 1).sum(),
    lambda out: out.sum(), lambda out: out.mean((0, 1)).sum(),
])  # fmt: skip
def test_layout_of_the_upstream_gradient_does_not_matter(consume):
    tensors = leaves()
    out = msa_attention(*tensors, **BLOCKS).out
    (upstream,) = torch.autograd.grad(consume(out), out, retain_graph=True)
    direct = torch.autograd.grad(consume(out), tensors[:3], retain_graph=True)
    for left, right in zip(direct, torch.autograd.grad(out, tensors[:3], upstream.contiguous()), strict=True):
        compare.assert_equal(left, right)


def test_expanded_gradient_of_the_loss_per_row():
    q, k, v, index_q, index_k = leaves()
    ids = select_blocks(index_q, index_k, **BLOCKS)
    _, lse = sparse_attention(q, k, v, ids, block_size=16)
    kl = index_kl_loss(q, k, lse, index_q, index_k, ids, block_size=16, reduction="none")
    expanded = torch.autograd.grad(kl.sum(), (index_q, index_k), retain_graph=True)
    for left, right in zip(expanded, torch.autograd.grad((kl * 1).sum(), (index_q, index_k)), strict=True):
        compare.assert_equal(left, right)


@pytest.mark.parametrize("view", [
    lambda t: t.repeat_interleave(2, 2)[:, :, ::2], lambda t: t.repeat_interleave(2, 3)[..., ::2],
    lambda t: t.flip(2).contiguous().flip(2), lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    lambda t: t[:, :1].expand_as(t), lambda t: torch.cat([t, t * torch.nan], 2)[:, :, : t.shape[2]],
])  # fmt: skip
def test_strides_of_the_inputs_do_not_matter(view):
    inputs = compare.random_inputs(7)
    viewed = {name: view(tensor) for name, tensor in inputs.items()}
    plain = {name: tensor.contiguous() for name, tensor in viewed.items()}
    assert_all_equal(
        *([r[n] for n in ("out", "kl", *compare.GRADIENTS)] for r in (
            compare.run(msa_triton, viewed, BLOCKS), compare.run(msa_triton, plain, BLOCKS)))
    )  # fmt: skip


def test_packed_projection_gets_the_gradients_of_its_parts():
    packed = torch.randn(2, 40, 3, 2, 16, generator=torch.Generator().manual_seed(0)).requires_grad_()
    index = [tensor.detach() for tensor in leaves(N=40)[3:]]
    views = [part.transpose(1, 2) for part in packed.unbind(2)]
    parts = [view.detach().contiguous().requires_grad_() for view in views]
    for tensors in (views, parts):
        out = msa_attention(*tensors, *index, **BLOCKS).out
        (out * compare.random_like(out, 2)).sum().backward()
    compare.assert_equal(packed.grad, torch.stack([part.grad.transpose(1, 2) for part in parts], 2))


def test_empty_rows_do_not_poison_shared_weights():
    linear = torch.nn.Linear(8, 3 * 2 * 16, bias=False)
    x = torch.randn(2, 40, 8, generator=torch.Generator().manual_seed(0))
    index_q, index_k = leaves(N=40)[3:]
    ids = select_blocks(index_q, index_k, **BLOCKS)
    ids[1, :, 37:] = -1

    def loss(rows, samples, ids):
        q, k, v = linear(rows).unflatten(2, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        out, lse = sparse_attention(q, k, v, ids, block_size=16)
        kl = index_kl_loss(q, k, lse, index_q[samples, :, : rows.shape[1]], index_k[samples, :, : rows.shape[1]], ids,
                           block_size=16, reduction="none")  # fmt: skip
        assert (kl[lse[:, :2].isneginf()] == 0).all()
        return out

    out = loss(x, slice(None), ids)
    assert not out[1, :, 37:].any()
    (out[0].sum() + out[1, :, :37].sum()).backward()
    padded, linear.weight.grad = linear.weight.grad, None
    (loss(x[:1], slice(0, 1), ids[:1]).sum() + loss(x[1:, :37], slice(1, 2), ids[1:, :, :37]).sum()).backward()
    compare.assert_close(padded, linear.weight.grad, 1e-5)


def test_same_call_gives_the_same_bits():
    first = gradients_of(msa_attention, leaves(seed=8), **BLOCKS)
    assert_all_equal(gradients_of(msa_attention, leaves(seed=8), **BLOCKS), first)


def test_autocast_does_not_reach_into_the_operators():
    expected = gradients_of(msa_attention, leaves(), **BLOCKS)
    with torch.autocast("cpu", torch.bfloat16):
        assert_all_equal(gradients_of(msa_attention, leaves(), **BLOCKS), expected)


def refusals():
    q, k, v, index_q, index_k = compare.random_inputs(0).values()
    yield TypeError, "share one dtype, got q float32, k bfloat16", (q, k.bfloat16(), v, index_q, index_k), {}
    yield TypeError, "got q int64, k int64", [tensor.long() for tensor in (q, k, v, index_q, index_k)], {}
    yield TypeError, "topk must be an int, got float", (q, k, v, index_q, index_k), {"topk": 2.0}
    yield ValueError, "q has 5 heads .H., which is not a multiple of the 2", (q[:, :5], k, v, index_q, index_k), {}
    yield ValueError, "q 76, k 77", (q[:, :, 1:], k, v, index_q, index_k), {}
    yield ValueError, "one device, got q meta, k cpu", (q.to("meta"), k, v, index_q, index_k), {}
    yield ValueError, "hold data, got q meta", [tensor.to("meta") for tensor in (q, k, v, index_q, index_k)], {}
    yield ValueError, "scale must be finite and > 0, got 0", (q, k, v, index_q, index_k), {"scale": 0}
    yield ValueError, "topk must be at least local_blocks", (q, k, v, index_q, index_k), {"init_blocks": 2}
    yield ValueError, "B must be 1, got B=2", (q, k, v, index_q, index_k), {"cu_seqlens": [0, 77]}
    one = [tensor[:1] for tensor in (q, k, v, index_q, index_k)]
    yield ValueError, "must end at N=77, got 70", one, {"cu_seqlens": [0, 70]}
    yield ValueError, "must not decrease, got 9 then 4", one, {"cu_seqlens": torch.tensor([0, 9, 4, 77])}
    yield ValueError, "backend must be one of .* got 'cuda'", one, {"backend": "cuda"}


@pytest.mark.parametrize("error, message, tensors, options", list(refusals()), ids=lambda value: str(value)[:24])
def test_bad_arguments_are_refused_before_any_work(monkeypatch, error, message, tensors, options):
    for name in ("select_forward", "attention_forward", "index_loss_forward"):
        monkeypatch.setattr(blockwise, name, None)
    with pytest.raises(error, match=message):
        msa_attention(*tensors, **{**BLOCKS, **options})


def test_every_function_checks_its_backend():
    q, k, v, index_q, index_k = leaves()
    lse = q.detach().sum(-1)
    calls = [
        partial(select_blocks, index_q, index_k, topk=2), partial(sparse_attention, q, k, v, None),
        partial(index_kl_loss, q, k, lse, index_q, index_k, None), partial(msa_attention, q, k, v, index_q, index_k),
    ]  # fmt: skip
    for call in calls:
        call(block_size=16, backend="torch")
        with pytest.raises(ValueError, match="backend must be one of"):
            call(block_size=16, backend="Torch")
        with pytest.raises(ValueError, match="for the Triton kernels, got 8"):
            call(block_size=8, backend="triton")


def test_ids_of_the_user_are_checked_and_own_ids_are_not(monkeypatch):
    q, k, v, index_q, index_k = leaves()
    lse = q.detach().sum(-1)
    ids = select_blocks(index_q, index_k, **BLOCKS)
    ids[1, 0, 3, 1] = 4
    for call in (partial(sparse_attention, q, k, v), partial(index_kl_loss, q, k, lse, index_q, index_k)):
        with pytest.raises(ValueError, match=r"block_indices\[1, 0, 3\] names block 4, which is in the future"):
            call(ids, block_size=16)
    monkeypatch.setattr(attention, "check_ids_on_cpu", None)
    msa_attention(q, k, v, index_q, index_k, **BLOCKS)
