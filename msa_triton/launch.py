"""Launches kernels: on the device of the tensors, in the interpreter, or into a list that says what would run."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from msa_ref.problem import BlockGeometry

MOST_PROGRAMS = 2**31 - 1  # on the first axis of a grid; the other two end at 65 535 and are not used


@dataclass(frozen=True)
class Launch:
    """One launch: kernel, programs, positional arguments, and constants (tile sizes, num_warps and num_stages too)."""

    kernel: Any
    programs: int
    arguments: tuple
    constants: dict


_interpreter = threading.Lock()  # it changes triton.language while it runs
_recorded: list[Launch] | None = None
_recorded_target: str | None = None


def launch(kernel, programs: int, *arguments, **constants) -> None:
    """Runs `programs` programs of a kernel on a one-dimensional grid.

    Raises:
        ValueError: more programs than a grid can have.
    """
    if programs > MOST_PROGRAMS:
        raise ValueError(f"{kernel.__name__} would need {programs} programs, a grid has at most {MOST_PROGRAMS}")
    if _recorded is not None:
        _recorded.append(Launch(kernel, programs, arguments, constants))
        return
    device = next(argument.device for argument in arguments if isinstance(argument, torch.Tensor))
    with torch.cuda.device(device) if device.type == "cuda" else _interpreter:
        kernel[(programs,)](*arguments, **constants)


@contextmanager
def recording(target: str):
    """Launches in this context run nothing: they are appended to the list it yields, configured for `target`."""
    global _recorded, _recorded_target
    before = _recorded, _recorded_target
    _recorded, _recorded_target = [], target
    try:
        yield _recorded
    finally:
        _recorded, _recorded_target = before


def target_of(tensor: torch.Tensor) -> str:
    """What the kernels will run on: "sm_90", "gfx942", ..., or "interpreter" for CPU tensors."""
    if _recorded_target is not None:
        return _recorded_target
    if tensor.device.type == "cpu":
        return "interpreter"
    if tensor.device.type != "cuda":
        return tensor.device.type
    if torch.version.hip:
        return torch.cuda.get_device_properties(tensor.device).gcnArchName.split(":")[0]
    return "sm_{}{}".format(*torch.cuda.get_device_capability(tensor.device))


def place(geometry: BlockGeometry, device):
    """(block_start, block_of, first_block) on a device where documents are packed; else None each: arithmetic does."""
    return (None, None, None) if len(geometry.document_start) == 2 else geometry.on(device)


def computable(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors as kernels can read them: Triton's interpreter takes the bits of a bfloat16 for an integer."""
    return tuple(
        tensor.float() if target_of(tensor) == "interpreter" and tensor.dtype == torch.bfloat16 else tensor
        for tensor in tensors
    )
