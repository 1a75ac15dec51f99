"""Inputs in hostile memory, and memory that shows what was never written."""

from contextlib import contextmanager

import torch
from compare import INPUTS, run


def inside(tensor, rest=float("nan"), margin=(0, 1, 5, 2)):
    """The tensor as a slice of a larger one: `margin` more elements on each side of each axis, all of them `rest`."""
    shape = [size + 2 * more for size, more in zip(tensor.shape, margin, strict=True)]
    base = torch.full(shape, rest, dtype=tensor.dtype)
    part = base[tuple(slice(more, more + size) for size, more in zip(tensor.shape, margin, strict=True))]
    part.copy_(tensor)
    return part


def all_inside(inputs, rest=float("nan")):
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


def forward(implementation, inputs, options, block_indices=None):
    """out, lse, ids and per-row kl, without gradients."""
    return {name: run(implementation, inputs, {**options, "reduction": "none"}, block_indices=block_indices)[name]
            for name in ("out", "lse", "kl", "ids")}
