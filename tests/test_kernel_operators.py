"""The operators and the layer with backend="triton": autograd, `torch.compile`, autocast, and what they refuse."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import compare
import pytest
import torch
from compare import assert_all_equal, gradients_of

import msa_triton
from msa_triton import MSAttention, attention, index_kl_loss, msa_attention, select_blocks, sparse_attention
from msa_triton.launch import recording

pytest.importorskip("triton")

SMALL = dict(B=1, N=20, H=2, Hkv=1, Hidx=1, D=8, Dv=4, Di=8)
TWO_HEADS = SMALL | dict(Hkv=2, Hidx=2, Hik=2)  # where one head is all, its stride says nothing
OPTIONS = {"topk": 2, "block_size": 16, "backend": "triton"}


def leaves(seed=0, **sizes):
    return [tensor.requires_grad_() for tensor in compare.random_inputs(seed, **{**SMALL, **sizes}).values()]


# Operators


def transposed(inputs):
    return {name: tensor.transpose(1, 2).contiguous().transpose(1, 2) for name, tensor in inputs.items()}


LAYOUTS = {
    "contiguous": (compare.random_inputs(3, **SMALL, dtype=torch.float16), None, compare.INPUTS),
    "transposed": (transposed(compare.random_inputs(3, **TWO_HEADS)), None, ("k", "index_q")),
    "documents": (
        compare.random_inputs(4, **SMALL, dtype=torch.bfloat16),
        torch.tensor([0, 3, 3, 20]),
        ("v", "index_k"),
    ),
    "no gradients": (compare.random_inputs(5, **SMALL), None, ()),
}


@pytest.mark.parametrize("layout, schedule", [
    ("contiguous", "query"), ("transposed", "key"), ("transposed", "dense"), ("documents", "query"),
    ("no gradients", "dense"),
])  # fmt: skip
def test_opcheck(layout, schedule):
    inputs, cu_seqlens, wants = LAYOUTS[layout]
    tensors = [inputs[name].detach().requires_grad_(name in wants) for name in compare.INPUTS]
    q, k, v, index_q, index_k = tensors
    ids, chosen = None, "auto"
    if schedule != "dense":
        chosen = schedule
        torch.library.opcheck(attention._select_op, (index_q, index_k, cu_seqlens, 2, 16, 1, 0, "triton"))
        ids = select_blocks(index_q, index_k, cu_seqlens=cu_seqlens, **OPTIONS)
    attend, align = (ids, cu_seqlens, 16, 0.25, "triton"), (ids, cu_seqlens, 16, 0.25, 0.2, "triton")
    torch.library.opcheck(attention._attention_op, (q, k, v, *attend, chosen))
    with torch.no_grad():
        out, lse = attention._attention_op(q, k, v, *attend, chosen)
    if schedule != "key":  # the rest is the same with either schedule
        for gradients in (True, False):
            torch.library.opcheck(attention._index_loss_op, (q, k, lse, index_q, index_k, *align, gradients))
        # The backward operators cannot be differentiated, so they are checked as autograd calls them.
        check = partial(torch.library.opcheck, test_utils=("test_schema", "test_faketensor"))
        q, k, v, index_q, index_k = (tensor.detach() for tensor in tensors)
        dout, dkl = compare.random_like(out, 5).mT.contiguous().mT, lse.new_ones(()).expand(index_q.shape[:3])
        check(attention._attention_backward_op, (dout, q, k, v, out, lse, *attend))
        for gradients in (True, False):
            _, *saved = attention._index_loss_op(q, k, lse, index_q, index_k, *align, gradients)
            check(attention._index_loss_backward_op, (dkl, *saved, q, k, lse, index_q, index_k, *align))


@pytest.mark.parametrize("topk", [2, None])
def test_the_teacher_is_computed_once_forward_and_once_backward(topk):
    q, k, _, index_q, index_k = leaves(**TWO_HEADS)
    lse, shared = torch.zeros(q.shape[:3]), {"block_size": 16, "backend": "triton"}
    with recording("sm_90") as launches:
        ids = topk and select_blocks(index_q, index_k, topk=topk, **shared)
        kl = index_kl_loss(q, k, lse, index_q, index_k, ids, **shared)
        forward = [one.kernel.__name__ for one in launches[topk is not None :]]
        kl.backward()
        backward = [one.kernel.__name__ for one in launches[(topk is not None) + len(forward) :]]
    assert forward == ["normalizer_kernel", "index_query_kernel"]
    assert backward == ["normalizer_kernel", "index_key_kernel", "sum_tasks_kernel"]


@pytest.mark.parametrize("topk", [2, None])
def test_without_gradients_the_value_is_the_same_and_nothing_else_is_computed(topk):
    tensors = leaves(**TWO_HEADS)
    _, kl, ids, lse = msa_attention(*tensors, **OPTIONS | {"topk": topk})
    q, k, _, index_q, index_k = tensors
    inputs, shared = (q, k, lse, index_q, index_k, ids), {"block_size": 16, "backend": "triton"}
    with torch.no_grad():
        value = index_kl_loss(*inputs, **shared)
        with recording("sm_90") as launches:
            index_kl_loss(*inputs, **shared)
    compare.assert_equal(value, kl)
    kernel, arguments = launches[-1].kernel, launches[-1].arguments
    names = [name for name, value in zip(kernel.arg_names, arguments, strict=False) if value is None]
    assert {"row_sums", "index_shift", "index_log_total"} <= set(names) and "kl" not in names
    _, *saved = attention._index_loss_op(*inputs, None, 16, 0.3, 0.3, "triton", False)
    assert [tensor.numel() for tensor in saved] == [0, 0]


@pytest.mark.parametrize("topk, dtype, index_scale", [
    (2, torch.float32, 0.3), (None, torch.float32, 0.3), (2, torch.bfloat16, 0.3), (2, torch.float16, 0.3),
    (2, torch.float16, 1e6), (2, torch.float16, 1e-6),
])  # fmt: skip
def test_backward_of_the_loss_with_and_without_what_the_forward_pass_saves(topk, dtype, index_scale):
    """Upstream gradients that differ by row; in float16 only their product with index_scale is in its range."""
    inputs = compare.random_inputs(7, **TWO_HEADS, dtype=dtype)
    options = {"topk": topk, "block_size": 16, "index_scale": index_scale, "scale": 0.25, "reduction": "none"}
    dkl = compare.random_like(inputs["index_q"][..., 0], 3, torch.float32) / index_scale
    dkl[:, :, ::5] = 0
    reference = compare.run_reference(inputs, options, dkl=dkl)
    q, k, v, index_q, index_k = inputs.values()
    place = (reference["ids"], None, 16, 0.25)
    _, lse = attention._attention_op(q, k, v, *place, "triton", "auto")
    call, found = (q, k, lse, index_q, index_k, *place, index_scale, "triton"), []
    for gradients in (True, False):
        _, *saved = attention._index_loss_op(*call, gradients)
        found.append(attention._index_loss_backward_op(dkl, *saved, *call))
        for gradient in attention._index_loss_backward_op(0 * dkl, *saved, *call):
            assert gradient.eq(0).all()
    assert all(map(torch.equal, *found))
    for name, gradient in zip(("d_index_q", "d_index_k"), found[0], strict=True):
        assert gradient.dtype == dtype
        compare.assert_close(gradient, reference[name], compare.GRADIENT_TOLERANCE[dtype], name)
    assert found[0][0][:, :, ::5].eq(0).all() and found[0][0].ne(0).any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_outputs_are_contiguous_and_of_the_documented_dtype(dtype):
    inputs = transposed(compare.random_inputs(5, **TWO_HEADS, dtype=dtype))
    for schedule in ("query", "key"):
        result = compare.run(compare.with_backend("triton", schedule=schedule), inputs, {"topk": 2, "block_size": 16})
        assert all(tensor.is_contiguous() for tensor in result.values())
        expected = dict.fromkeys(("out", *compare.GRADIENTS), dtype)
        expected |= {"lse": torch.float32, "kl": torch.float32, "ids": torch.int32}
        assert {name: tensor.dtype for name, tensor in result.items()} == expected


@pytest.mark.parametrize("topk, cu_seqlens", [(2, None), (2, torch.tensor([0, 5, 20])), (None, None)])
def test_compiled_equals_eager(topk, cu_seqlens):
    options = {**OPTIONS, "topk": topk, "cu_seqlens": cu_seqlens}
    torch._dynamo.reset()
    compiled = torch.compile(msa_attention, fullgraph=True, backend="aot_eager")
    assert_all_equal(gradients_of(compiled, leaves(), **options), gradients_of(msa_attention, leaves(), **options))


@pytest.mark.parametrize("schedule", ["query", "key"])
def test_compiled_operations_that_take_ids(schedule):
    def operations(q, k, v, index_q, index_k, ids):
        shared = {"block_size": 16, "backend": "triton"}
        out, lse = sparse_attention(q, k, v, ids, schedule=schedule, **shared)
        return out, index_kl_loss(q, k, lse, index_q, index_k, ids, reduction="none", **shared), lse

    torch._dynamo.reset()
    tensors = leaves()
    ids = select_blocks(*tensors[3:], **OPTIONS)
    compiled = torch.compile(operations, fullgraph=True, backend="aot_eager")
    for left, right in zip(compiled(*tensors, ids), operations(*tensors, ids), strict=True):
        compare.assert_equal(left, right)


@pytest.mark.parametrize("output, wanted", [("out", 0), ("out", 2), ("kl_loss", 3), ("kl_loss", 4)])
def test_second_derivative_is_refused(output, wanted):
    tensors = leaves()
    loss = getattr(msa_attention(*tensors, **OPTIONS), output).sum()
    (first,) = torch.autograd.grad(loss, tensors[wanted], create_graph=True)
    with pytest.raises(RuntimeError, match="first derivatives only"):
        torch.autograd.grad((first * tensors[wanted]).sum(), tensors[wanted])


def test_each_output_trains_its_own_branch():
    tensors = leaves()
    result = msa_attention(*tensors, **OPTIONS)
    assert not result.lse.requires_grad and not result.block_indices.requires_grad
    found = torch.autograd.grad(result.out.sum(), tensors, retain_graph=True, allow_unused=True)
    assert [gradient is not None for gradient in found] == [True, True, True, False, False]
    found = torch.autograd.grad(result.kl_loss, tensors, allow_unused=True)
    assert [gradient is not None for gradient in found] == [False, False, False, True, True]


def test_autocast_does_not_reach_into_the_operators():
    expected = gradients_of(msa_attention, leaves(), **OPTIONS)
    with torch.autocast("cpu", torch.bfloat16):
        assert_all_equal(gradients_of(msa_attention, leaves(), **OPTIONS), expected)


# The layer


def train(module, hidden, mode, cu_seqlens=None):
    """Output, KL, and the gradients of the hidden state and of every parameter, by name."""
    hidden = hidden.clone().requires_grad_()
    module.zero_grad()
    out, kl_loss = module(hidden, mode=mode, cu_seqlens=cu_seqlens)
    ((out * compare.random_like(out, 1)).sum() + kl_loss).backward()
    parameters = {name: parameter.grad for name, parameter in module.named_parameters()}
    return {"out": out, "kl": kl_loss, "hidden": hidden.grad, **parameters}


def layer(backend):
    torch.manual_seed(0)
    sizes = dict(heads=4, kv_heads=2, index_heads=2, head_width=6, value_width=5, index_width=4)
    return MSAttention(24, **sizes, block_size=16, topk=2, backend=backend)


@pytest.mark.parametrize("mode", ["sparse", "warm-up"])
@pytest.mark.parametrize("cu_seqlens", [None, [0, 5, 37]])
def test_layer_equals_the_blockwise_layer(mode, cu_seqlens):
    hidden = torch.randn(1, 37, 24, generator=torch.Generator().manual_seed(1))
    actual, expected = (train(layer(backend), hidden, mode, cu_seqlens) for backend in ("triton", "torch"))
    assert actual.keys() == expected.keys() and all(value is not None for value in expected.values())
    for name in expected:
        compare.assert_close(actual[name], expected[name], 1e-4, name)
    assert float(expected["kl"].detach()) > 1e-3


def test_layer_under_autocast():
    hidden = torch.randn(1, 37, 24, generator=torch.Generator().manual_seed(1))
    expected = train(layer("torch"), hidden, "sparse")
    with torch.autocast("cpu", torch.bfloat16):
        actual = train(layer("triton"), hidden, "sparse")
    assert actual["out"].dtype == torch.bfloat16 and actual["kl"].dtype == torch.float32
    for name, parameter in layer("triton").named_parameters():
        assert actual[name].dtype == parameter.dtype
    # The selection may differ where scores are close, so only the size of the output is compared.
    compare.assert_close(actual["out"].float().norm(), expected["out"].norm(), 0.2)


def test_layer_with_another_selection():
    hidden = torch.randn(1, 37, 24, generator=torch.Generator().manual_seed(1))
    module = layer("triton")
    own, by_hand = (module(hidden, select=select)[0] for select in (None, partial(select_blocks, backend="torch")))
    compare.assert_close(by_hand, own, 1e-5)


# Bad input


def refusals():
    """error, message, call"""
    q, k, v, index_q, index_k = inputs = leaves()
    double = [tensor.detach().double() for tensor in inputs]
    listed = "q float64, k float64, v float64"
    yield (
        TypeError,
        rf"must be one of float16, bfloat16, float32, got {listed}",
        sparse_attention,
        (*double[:3], None),
        {},
    )
    yield TypeError, "must be one of .* got index_q float64, index_k float64", select_blocks, double[3:], {"topk": 2}
    yield TypeError, "must be one of .* got index_q float64", msa_attention, double, {"topk": 2}
    for block_size in (24, 256, 8, 1):
        message = rf"block_size must be one of \(16, 32, 64, 128\) for the Triton kernels, got {block_size}"
        for call, tensors in ((msa_attention, inputs), (select_blocks, inputs[3:])):
            yield ValueError, message, call, tensors, {"topk": 2, "block_size": block_size}
    meta = [tensor.to("meta") for tensor in inputs]
    mixed = [q, meta[1], v, index_q, index_k]
    yield ValueError, "one device, got q cpu, k meta, v cpu", sparse_attention, (*mixed[:3], None), {}
    yield ValueError, "one device, got index_q cpu, index_k meta", select_blocks, (index_q, meta[4]), {"topk": 2}
    yield ValueError, "one device, got q cpu, k meta", msa_attention, mixed, {"topk": None}
    yield ValueError, "must hold data, got q meta, k meta, v meta", sparse_attention, (*meta[:3], None), {}
    yield TypeError, "share one dtype, got q float32, k float16", sparse_attention, (q, k.half(), v, None), {}
    kinds = r"schedule must be one of \('auto', 'query', 'key'\), got 'keys'"
    yield ValueError, kinds, sparse_attention, (q, k, v, None), {"schedule": "keys"}
    yield ValueError, 'schedule="key" needs block_indices', sparse_attention, (q, k, v, None), {"schedule": "key"}
    torch_only = {"schedule": "query", "backend": "torch"}
    yield ValueError, "schedule='query' is for the kernels", sparse_attention, (q, k, v, None), torch_only
    yield ValueError, "topk must be at least 1, got 0", select_blocks, (index_q, index_k), {"topk": 0}


@pytest.mark.parametrize("error, message, call, tensors, options", list(refusals()), ids=lambda value: str(value)[:24])
def test_bad_arguments_are_refused_before_any_work(monkeypatch, error, message, call, tensors, options):
    kernels = msa_triton.backend.module_of("triton", torch.device("cpu"))
    for name in ("select_forward", "attention_forward", "index_loss_forward"):
        monkeypatch.setattr(kernels, name, None)
    with pytest.raises(error, match=message):
        call(*tensors, **{"block_size": 16, "backend": "triton", **options})


def test_ids_of_the_user_are_checked():
    q, k, v, index_q, index_k = leaves()
    ids = select_blocks(index_q, index_k, **OPTIONS)
    ids[0, 0, 3, 1] = 1
    lse = q.detach().sum(-1)
    for call in (partial(sparse_attention, q, k, v), partial(index_kl_loss, q, k, lse, index_q, index_k)):
        with pytest.raises(ValueError, match=r"block_indices\[0, 0, 3\] names block 1, which is in the future"):
            call(ids, block_size=16, backend="triton")


def test_upstream_gradients_of_a_wrong_shape_are_refused():
    """Autograd never does this; a direct call of an operator must not read or write out of bounds."""
    inputs = compare.random_inputs(0, B=1, N=20, H=2, Hkv=1, Hidx=1)
    q, k, v, index_q, index_k = inputs.values()
    lse = torch.zeros(1, 2, 20)
    for dkl in (torch.ones(1, 1, 1), torch.ones(1, 1, 20, dtype=torch.float64)):
        with pytest.raises(ValueError, match=r"dkl must be torch.float32 \(1, 1, 20\)"):
            torch.ops.msa.index_kl_loss_backward(
                dkl, dkl[:0], dkl[:0], q, k, lse, index_q, index_k, None, None, 16, 1.0, 1.0, "triton"
            )  # fmt: skip
    with pytest.raises(ValueError, match=r"dout must be torch.float32 \(1, 2, 20, 16\), got .*\(1, 2, 20, 8\)"):
        torch.ops.msa.sparse_attention_backward(q[..., :8], q, k, v, q, lse, None, None, 16, 1.0, "triton")
    with pytest.raises(ValueError, match="schedule must be one of"):
        torch.ops.msa.sparse_attention(q, k, v, None, None, 16, 1.0, "triton", "other")
    with pytest.raises(ValueError, match='an operator runs "torch" or "triton", got backend .auto'):
        torch.ops.msa.sparse_attention(q, k, v, None, None, 16, 1.0, "auto", "auto")


@pytest.mark.parametrize("scale", [1e-31, 1e31])
def test_scales_that_float32_cannot_hold_are_refused(scale):
    q = torch.randn(1, 1, 4, 16)
    with pytest.raises(ValueError, match=f"scale must be from 1e-30 to 1e30 .* got {scale}".replace("+", r"\+")):
        msa_attention(q, q, q, q, q, topk=1, block_size=16, scale=scale, backend="triton")


def test_two_threads_may_call_at_once():
    """The interpreter changes triton.language while a kernel runs: one launch at a time."""
    inputs = compare.random_inputs(0, B=1, N=20, H=2, Hkv=1, Hidx=1)
    with ThreadPoolExecutor(2) as pool:
        runs = list(pool.map(lambda _: compare.run("triton", inputs, {"topk": 1, "block_size": 16}), range(4)))
    for one in runs[1:]:
        for name, tensor in one.items():
            compare.assert_equal(tensor, runs[0][name], name)
