"""Runs the kernels of answers in Triton's interpreter, and sees what the interpreter hides: strays and races."""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Callable

import torch

from msa_ref.exercises.verdict import require

GUARD = 64  # elements behind a tensor that no kernel may write
STRAY = -12345.0  # what they hold


def run(kernel, programs: int, *arguments, **constants) -> None:
    """Runs a kernel on a one-dimensional grid; an error in it is raised as it was, not as the interpreter wraps it.

    Raises:
        Difference: the answer is no kernel, or still has dots where its lines should be.
    """
    require(hasattr(kernel, "fn"), "the answer must be a kernel, a function under @triton.jit.")
    unfinished = re.search(r"=\s*\.\.\.", inspect.getsource(kernel.fn))
    require(not unfinished, "there is no answer yet: replace the dots in the kernel.")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # NumPy's, of infinities in lanes that are masked later
        try:
            kernel[(programs,)](*arguments, **constants)
        except Exception as error:
            while error.__cause__ is not None:
                error = error.__cause__
            raise error from None


def guarded(*shape: int, fill: float = torch.nan, dtype=torch.float32) -> torch.Tensor:
    """A tensor of one value, with `GUARD` more elements behind it that hold `STRAY`."""
    count = torch.Size(shape).numel()
    buffer = torch.full((count + GUARD,), STRAY, dtype=dtype)
    buffer[:count] = fill
    return buffer[:count].view(shape)


def require_inside(name: str, tensor: torch.Tensor) -> None:
    """Raises `Difference` if somebody wrote behind a tensor of `guarded`."""
    behind = tensor.as_strided((GUARD,), (1,), tensor.numel())
    require((behind == STRAY).all(), f"the kernel writes behind the end of {name}: its store needs a mask.")


def require_one_writer(name: str, output: torch.Tensor, programs: int, start: Callable[[int], None]) -> None:
    """Raises `Difference` if two programs of one launch change the same element of an output.

    The interpreter runs programs in order, so that the wrong sums of a race never show. But `start(count)` runs the
    first `count` programs: what the next one adds to that is what it writes.

    Args:
        output: what `start` writes to; every run begins with the values that it has now.
    """
    clean = output.clone()
    before, owner = clean, torch.full(output.shape, -1)
    for program in range(programs):
        output.copy_(clean)
        start(program + 1)
        changed = ~torch.isclose(output, before, rtol=0, atol=0, equal_nan=True)
        twice = (changed & (owner >= 0)).nonzero()
        if len(twice):
            place = tuple(twice[0].tolist())
            require(
                False,
                f"a race: programs {int(owner[place])} and {program} both write {name}[{', '.join(map(str, place))}]."
                " The interpreter runs them one after another; a GPU does not.",
            )
        owner[changed], before = program, output.clone()
