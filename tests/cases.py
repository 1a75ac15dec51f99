"""What the tests of known kinds of fault share: default options, hostile memory, comparison bit for bit."""

from contextlib import contextmanager

import pytest
import torch
from compare import GRADIENTS, IMPLEMENTATIONS, INPUTS, assert_equal, run

from msa_ref import dense

BLOCK, TOKENS = 16, 77
OPTIONS = {"topk": 2, "block_size": BLOCK}
RESULTS = ("out", "lse", "kl", "ids", *GRADIENTS)
# query heads, KV heads, index heads, index key heads
HEADS = [(6, 2, 2, 1), (6, 2, 6, 2), (4, 1, 1, 1), (4, 2, 4, 4)]

every_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
every_autograd = pytest.mark.parametrize("implementation", [name for name in IMPLEMENTATIONS if name != "naive"])
every_topk = pytest.mark.parametrize("topk", [2, None])
every_heads = pytest.mark.parametrize("heads", HEADS, ids=str)


def named_heads(heads) -> dict[str, int]:
    return dict(zip(("H", "Hkv", "Hidx", "Hik"), heads, strict=True))


def run_double(inputs, options, dout=None, dkl=None, block_indices=None) -> dict[str, torch.Tensor]:
    """`run` of the dense implementation on the same numbers in float64: what to expect, sooner than `run_reference`."""
    double = {name: tensor.double() for name, tensor in inputs.items()}
    dout, dkl = (None if upstream is None else upstream.double() for upstream in (dout, dkl))
    return run(dense, double, options, dout, dkl, block_indices)


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
        one, other = (run[name] if run[name] is None or run[name].ndim == 0 else run[name][:, :, tokens]
                      for run in (actual, expected))  # fmt: skip
        assert_equal(one, other, f"{label} {name}")
