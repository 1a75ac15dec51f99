"""What the tests of known kinds of fault share: default options, hostile memory, comparison bit for bit."""

import random
from contextlib import contextmanager

import pytest
import torch
from compare import (
    GRADIENTS,
    IMPLEMENTATIONS,
    INPUTS,
    REFERENCES,
    assert_close,
    assert_equal,
    random_inputs,
    random_like,
    run,
)

from msa_ref import dense

BLOCK, TOKENS = 16, 77
OPTIONS = {"topk": 2, "block_size": BLOCK}
RESULTS = ("out", "lse", "kl", "ids", *GRADIENTS)
# query heads, KV heads, index heads, index key heads
HEADS = [(6, 2, 2, 1), (6, 2, 6, 2), (4, 1, 1, 1), (4, 2, 4, 4)]

# One index head and three blocks: Triton's interpreter takes seconds for what the others do in milliseconds.
KERNEL_SIZES = {"B": 1, "N": 40, "H": 3, "Hkv": 1, "Hidx": 1}

DRAWN_HEADS = [
    (6, 2, 2, 1), (6, 2, 6, 1), (6, 2, 6, 2), (6, 6, 6, 1), (4, 1, 1, 1), (1, 1, 1, 1), (4, 2, 4, 4), (5, 1, 5, 1),
    (14, 2, 2, 2),
]  # fmt: skip
DRAWN_WIDTHS = (8, 16, 32, 64, 80, 100)

every_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
every_reference = pytest.mark.parametrize("implementation", REFERENCES)
every_autograd = pytest.mark.parametrize("implementation", [name for name in IMPLEMENTATIONS if name != "naive"])
every_topk = pytest.mark.parametrize("topk", [2, None])
every_heads = pytest.mark.parametrize(
    "implementation, heads",
    [(name, heads) for name in IMPLEMENTATIONS for heads in (HEADS[2:3] if name == "triton" else HEADS)],
    ids=str,
)


def usual_inputs(implementation, seed=0, **sizes) -> dict[str, torch.Tensor]:
    """`random_inputs` of the sizes given; the others are the usual ones, or those of KERNEL_SIZES for the kernels."""
    return random_inputs(seed, **(KERNEL_SIZES if implementation == "triton" else {}) | sizes)


def finest(implementation) -> tuple[torch.dtype, float]:
    """The widest dtype that an implementation takes, and the error that laws may show in it."""
    return (torch.float32, 3e-5) if implementation == "triton" else (torch.float64, 1e-12)


def block_of(implementation, size) -> int:
    """A block size for a few tokens: the size itself, or the least that the kernels take."""
    return max(size, BLOCK) if implementation == "triton" else size


def skip_float64(implementation, dtype) -> None:
    if implementation == "triton" and dtype == torch.float64:
        pytest.skip("the kernels take no float64")


def named_heads(heads) -> dict[str, int]:
    return dict(zip(("H", "Hkv", "Hidx", "Hik"), heads, strict=True))


def random_call(seed, block_sizes=(1, 3, 4, 8, 16), most_rows=3):
    """Random sizes and options: float32 inputs, keyword arguments, and upstream gradients of out and kl."""
    pick = random.Random(seed)
    heads = named_heads(DRAWN_HEADS[seed % len(DRAWN_HEADS)])
    widths = dict(zip(("D", "Dv", "Di"), pick.sample(DRAWN_WIDTHS, 3), strict=True))
    block_size = pick.choice(block_sizes)
    tokens = pick.randint(1, 5 * block_size)
    packed = seed % 3 == 0
    local, init = pick.choice(((1, 0), (1, 0), (2, 0), (1, 1), (0, 0), (0, 2), (2, 1)))
    options = {
        "topk": None if seed % 5 == 0 else max(1, local + init) + pick.randint(0, 3),
        "block_size": block_size, "local_blocks": local, "init_blocks": init,
        "scale": pick.choice((None, 0.05, 1.0)), "index_scale": pick.choice((None, 0.3)),
        "reduction": pick.choice(("mean", "none")),
    }  # fmt: skip
    if packed:  # repeated offsets are empty documents
        options["cu_seqlens"] = sorted([0, 0, tokens, *(pick.randint(0, tokens) for _ in range(3))])
    inputs = random_inputs(seed, B=1 if packed else pick.randint(1, most_rows), N=tokens, **heads, **widths)
    return inputs, options, *upstream_gradients(inputs, options, seed)


def upstream_gradients(inputs, options, seed=0):
    """Random dout, and dkl: random, or for a mean what makes its gradients as large as those of a sum."""
    dout = random_like(inputs["v"][:, :1].expand(-1, inputs["q"].shape[1], -1, -1), seed + 1000)
    dkl = random_like(inputs["index_q"][..., 0], seed + 2000, torch.promote_types(dout.dtype, torch.float32))
    return dout, dkl if options.get("reduction") == "none" else torch.tensor(float(dkl.numel()))


def run_double(inputs, options, dout=None, dkl=None, block_indices=None) -> dict[str, torch.Tensor]:
    """`run` of the dense implementation on the same numbers in float64: what to expect, sooner than `run_reference`."""
    double = {name: tensor.double() for name, tensor in inputs.items()}
    dout, dkl = (None if upstream is None else upstream.double() for upstream in (dout, dkl))
    return run(dense, double, options, dout, dkl, block_indices)


def selected_tokens(ids, q, block_size):
    """[B, H, N, N] mask of an unpacked call, from its definition."""
    token = torch.arange(q.shape[2])
    visible = token <= token[:, None]
    if ids is None:
        return visible.expand(*q.shape[:2], -1, -1)
    chosen = (token[:, None] // block_size == ids[..., None, :]).any(-1)
    return (chosen & visible).repeat_interleave(q.shape[1] // ids.shape[1], dim=1)


def plain_attention(q, k, v, mask):
    """Every intermediate in the dtype of the inputs."""
    k, v = (tensor.repeat_interleave(q.shape[1] // tensor.shape[1], dim=1) for tensor in (k, v))
    logit = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).masked_fill(~mask, -torch.inf)
    return torch.softmax(logit, -1) @ v


def lists(*rows, batch=1, heads=2) -> torch.Tensor:
    """Block ids [batch, heads, N, slots] that are the same for every head; one list of ids for each query."""
    slots = max(1, *map(len, rows))
    table = torch.tensor([[*row, *[-1] * (slots - len(row))] for row in rows], dtype=torch.int32)
    return table.expand(batch, heads, -1, -1).clone()


def inside(tensor, rest=float("nan"), margin=(0, 1, 5, 2)) -> torch.Tensor:
    """The tensor as a slice of a larger one: `margin` more elements on each side of each axis, all of them `rest`."""
    shape = [size + 2 * more for size, more in zip(tensor.shape, margin, strict=True)]
    base = torch.full(shape, rest, dtype=tensor.dtype)
    part = base[tuple(slice(more, more + size) for size, more in zip(tensor.shape, margin, strict=True))]
    return part.copy_(tensor)


def all_inside(inputs, rest=float("nan")) -> dict[str, torch.Tensor]:
    return {name: inside(inputs[name], rest) for name in INPUTS}


@contextmanager
def nan_in_new_memory():
    """torch.empty returns NaN, or the largest integer."""
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        assert torch.empty(3).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.utils.deterministic.fill_uninitialized_memory = before[1]


def assert_equal_runs(actual, expected, label="", names=RESULTS, tokens=slice(None)) -> None:
    """Bit for bit, in a slice of the tokens; a scalar as it is."""
    for name in names:
        assert_equal(_part(actual[name], tokens), _part(expected[name], tokens), f"{label} {name}")


def assert_close_runs(actual, expected, label="", names=RESULTS, tokens=slice(None)) -> None:
    """Ids bit for bit, the rest within some roundings, in a slice of the tokens.

    For the same rows in other places or with other strides: in many a BLAS the order of a sum depends on both.
    """
    for name in names:
        one, other = _part(actual[name], tokens), _part(expected[name], tokens)
        if one is None or not one.is_floating_point():
            assert_equal(one, other, f"{label} {name}")
        else:
            assert_close(one, other, 2e-6, f"{label} {name}", floor=1.0)


def _part(result, tokens):
    return result if result is None or result.ndim == 0 else result[:, :, tokens]
