"""What the tests share: inputs, one way to run any implementation, one way to compare results."""

import inspect
import math
import os
from functools import partial
from importlib.util import find_spec
from types import ModuleType

import torch

import msa_triton
from msa_ref import blockwise, dense, naive

_OPERATIONS = ("select_blocks", "sparse_attention", "index_kl_loss")


def with_backend(backend: str, **options) -> ModuleType:
    """The public functions with a backend, and more options of `sparse_attention`, as an implementation."""
    module = ModuleType(backend)
    for name in (*_OPERATIONS, "msa_attention"):
        chosen = options if name == "sparse_attention" else {}
        setattr(module, name, partial(getattr(msa_triton, name), backend=backend, **chosen))
    return module


REFERENCES = {"naive": naive, "dense": dense, "blockwise": blockwise}
IMPLEMENTATIONS = dict(REFERENCES)
# The kernels, where CPU tensors go through Triton's interpreter: msa_triton sets the variable if there is no GPU.
if find_spec("triton") and os.environ.get("TRITON_INTERPRET") == "1":
    IMPLEMENTATIONS["triton"] = with_backend("triton")

INPUTS = ("q", "k", "v", "index_q", "index_k")
GRADIENTS = ("dq", "dk", "dv", "d_index_q", "d_index_k")

FORWARD_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 2e-2, torch.bfloat16: 2e-2}
GRADIENT_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 2e-2}


def random_inputs(
    seed, *, B=2, N=77, H=6, Hkv=2, Hidx=2, Hik=1, D=16, Dv=16, Di=16, dtype=torch.float32
) -> dict[str, torch.Tensor]:
    """q, k, v of normal numbers; index_q, index_k of small integers, whose products are exact in every dtype."""
    generator = torch.Generator().manual_seed(seed)

    def normal(heads, width):
        return torch.randn(B, heads, N, width, generator=generator, dtype=torch.float64).to(dtype)

    def integers(heads, width):
        return torch.randint(-2, 3, (B, heads, N, width), generator=generator).to(dtype)

    return {
        "q": normal(H, D), "k": normal(Hkv, D), "v": normal(Hkv, Dv),
        "index_q": integers(Hidx, Di), "index_k": integers(Hik, Di),
    }  # fmt: skip


def random_like(tensor, seed, dtype=None) -> torch.Tensor:
    """Normal numbers in the shape of a tensor: an upstream gradient."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tensor.shape, generator=generator, dtype=torch.float64).to(dtype or tensor.dtype)


def run(implementation, inputs, options, dout=None, dkl=None, block_indices=None) -> dict[str, torch.Tensor]:
    """Selects, attends, aligns, and differentiates with the upstream gradients dout and dkl.

    Args:
        implementation: a module, or its name in IMPLEMENTATIONS.
        inputs: the tensors of `random_inputs`; not changed.
        options: keyword arguments of `msa_attention`, all optional but topk (None: dense warm-up), and `reduction`.
        dout, dkl: upstream gradients of out and kl; None for ones.
        block_indices: ids to use instead of selecting.

    Returns:
        out, lse, kl, ids (None in the warm-up) and GRADIENTS, detached.
    """
    implementation = IMPLEMENTATIONS.get(implementation, implementation)
    leaves = [inputs[name].detach().requires_grad_(implementation is not naive) for name in INPUTS]
    q, k, v, index_q, index_k = leaves
    call = {name: _accepted(getattr(implementation, name), options) for name in _OPERATIONS}
    ids = block_indices
    if ids is None and options["topk"] is not None:
        ids = implementation.select_blocks(index_q, index_k, **call["select_blocks"])
    out, lse = implementation.sparse_attention(q, k, v, ids, **call["sparse_attention"])
    kl = implementation.index_kl_loss(q, k, lse, index_q, index_k, ids, **call["index_kl_loss"])
    dout = torch.ones_like(out) if dout is None else dout
    dkl = torch.ones_like(kl) if dkl is None else dkl
    if implementation is naive:
        gradients = [
            *naive.sparse_attention_backward(q, k, v, ids, dout, **call["sparse_attention"]),
            *naive.index_kl_loss_backward(q, k, lse, index_q, index_k, ids, dkl, **call["index_kl_loss"]),
        ]
    else:
        gradients = torch.autograd.grad((out, kl), leaves, (dout, dkl))
    results = {"out": out.detach(), "lse": lse, "kl": kl.detach(), "ids": ids}
    return results | dict(zip(GRADIENTS, gradients, strict=True))


def gradients_of(function, tensors, **options) -> list[torch.Tensor]:
    """out, kl and the five gradients of one call of msa_attention or of a compiled version of it."""
    result = function(*tensors, **options)
    upstream = random_like(result.out, 9), random_like(result.kl_loss, 8)
    return [result.out, result.kl_loss, *torch.autograd.grad(result[:2], tensors, upstream)]


def run_reference(inputs, options, dout=None, dkl=None, block_indices=None) -> dict[str, torch.Tensor]:
    """`run` of the naive implementation on the same numbers in float64."""
    double = {name: tensor.double() for name, tensor in inputs.items()}
    dout, dkl = (None if upstream is None else upstream.double() for upstream in (dout, dkl))
    return run(naive, double, options, dout, dkl, block_indices)


def assert_same_run(actual, reference, dtype, label="") -> None:
    """Ids equal; everything else within the tolerance of dtype."""
    assert_equal(actual["ids"], reference["ids"], f"{label} ids")
    for name in ("out", "lse", "kl", *GRADIENTS):
        tolerance = (GRADIENT_TOLERANCE if name in GRADIENTS else FORWARD_TOLERANCE)[dtype]
        assert_close(actual[name], reference[name], tolerance, f"{label} {name}")


def assert_close(actual, reference, tolerance, label="", floor=0.1) -> None:
    """|actual - reference| <= tolerance · max(floor, max|reference|) everywhere; not finite in the same places."""
    actual, reference = actual.detach().cpu().double(), reference.detach().cpu().double()
    assert actual.shape == reference.shape, f"{label}: shape {tuple(actual.shape)}, expected {tuple(reference.shape)}"
    finite = reference.isfinite()
    assert_equal(actual.masked_fill(finite, 0), reference.masked_fill(finite, 0), f"{label} (not finite)")
    size = max(floor, float(reference[finite].abs().max()) if finite.any() else 0.0)
    error = (actual - reference).masked_fill(~finite, 0).abs().nan_to_num(math.inf)
    where, worst = _at_worst(error)
    assert worst <= tolerance * size, (
        f"{label} at {where}: {float(actual[where])!r}, expected {float(reference[where])!r}; error {worst:.3g}"
        f" > {tolerance:g} x {size:.3g}; {int((error > tolerance * size).sum())} of {error.numel()} elements"
    )


def assert_error_budget(actual, plain, reference, label="", factor=2.0) -> None:
    """The largest error is at most `factor` times that of a plain version that rounds the same inputs."""
    actual, plain, reference = (tensor.detach().cpu().double() for tensor in (actual, plain, reference))
    where, worst = _at_worst((actual - reference).abs().nan_to_num(math.inf))
    budget = factor * float((plain - reference).abs().max())
    assert worst <= budget, (
        f"{label} at {where}: {float(actual[where])!r}, expected {float(reference[where])!r}; error {worst:.3g}"
        f" > {factor} x {budget / factor:.3g}"
    )


def assert_equal(actual, reference, label="") -> None:
    """Bit for bit, NaN equal to NaN; None only equals None."""
    if actual is None or reference is None:
        assert actual is reference, f"{label}: {actual}, expected {reference}"
        return
    actual, reference = actual.detach().cpu(), reference.detach().cpu()
    assert actual.shape == reference.shape, f"{label}: shape {tuple(actual.shape)}, expected {tuple(reference.shape)}"
    differs = (actual != reference) & ~((actual != actual) & (reference != reference))
    where, worst = _at_worst(differs.double())
    assert worst == 0, (
        f"{label} at {where}: {actual[where].item()!r}, expected {reference[where].item()!r};"
        f" {int(differs.sum())} of {differs.numel()} elements differ"
    )


def assert_all_equal(actual, reference, label="") -> None:
    """Bit for bit, two results of `gradients_of`."""
    for name, left, right in zip(("out", "kl", *GRADIENTS), actual, reference, strict=True):
        assert_equal(left, right, f"{label} {name}")


def _accepted(operation, options) -> dict:
    """The options that an operation takes."""
    return {name: options[name] for name in inspect.signature(operation).parameters if name in options}


def _at_worst(error):
    """The place and the size of the largest error."""
    flat = int(error.argmax())
    return tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), error.shape)), float(error.flatten()[flat])
