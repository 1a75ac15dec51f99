"""Which implementation runs a call: blockwise PyTorch, or the Triton kernels on a GPU or in Triton's interpreter."""

from __future__ import annotations

import importlib
import importlib.util
import os
import platform
import warnings
from functools import cache
from types import ModuleType

import numpy
import torch

from msa_ref import blockwise

BACKENDS = ("auto", "triton", "torch")
OLDEST_TRITON = (3, 6)
NUMPY = tuple(int(part) for part in numpy.__version__.split(".")[:2])


def interpret_without_gpu() -> None:
    """Chooses Triton's interpreter where there is no GPU, unless TRITON_INTERPRET says otherwise.

    Triton reads the variable when a kernel is decorated, and its own library when it is imported: it has to be set
    before either. Counting devices does not start CUDA.
    """
    gpus = torch.cuda.device_count() + (torch.xpu.device_count() if hasattr(torch, "xpu") else 0)
    if gpus == 0:
        os.environ.setdefault("TRITON_INTERPRET", "1")


def choose(backend: str, tensor) -> str:
    """"torch" or "triton" for a backend by name and a tensor of the call.

    Raises:
        ValueError: a backend that does not exist.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {BACKENDS}, got {backend!r}")
    if backend != "auto":
        return backend
    on_gpu = isinstance(tensor, torch.Tensor) and tensor.device.type in ("cuda", "xpu")
    return "triton" if on_gpu and importlib.util.find_spec("triton") else "torch"


def module_of(backend: str, device: torch.device) -> ModuleType:
    """The module with the five functions that the operators call.

    Raises:
        RuntimeError: Triton is missing or too old. ValueError: CPU tensors, and Triton compiles for a GPU.
    """
    if backend == "torch":
        return blockwise
    if backend != "triton":
        raise ValueError(f'an operator runs "torch" or "triton", got backend {backend!r}')
    kernels, interpreted = _kernels()
    if device.type == "cpu" and not interpreted:
        raise ValueError(
            'backend="triton" cannot take tensors on the CPU here: Triton compiles for a GPU. Set TRITON_INTERPRET=1 in'
            ' the environment before triton is first imported to run the kernels in its interpreter, or use "torch"'
        )
    if device.type != "cpu" and interpreted:
        warnings.warn(
            "TRITON_INTERPRET is set: kernels for tensors on a GPU run in Triton's interpreter, which is slow",
            stacklevel=2,
        )
    return kernels


@cache
def _kernels() -> tuple[ModuleType, bool]:
    """The kernels, imported when they are first needed, and whether they run in the interpreter."""
    try:
        import triton
        import triton.language as tl
    except ImportError as error:
        raise RuntimeError(
            f'backend="triton" needs Triton, which is not installed ({platform.system()}, Python'
            f' {platform.python_version()}); there are packages for Linux. backend="torch" works without it'
        ) from error
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    if version < OLDEST_TRITON:
        raise RuntimeError(f"the kernels need Triton 3.6 or newer, found {triton.__version__}")
    if not isinstance(tl.sum, triton.JITFunction) and version < (3, 7) and NUMPY >= (2, 4):
        raise RuntimeError(
            f"the interpreter of Triton {triton.__version__} fails with NumPy {numpy.__version__}: it needs NumPy"
            " before 2.4, or Triton 3.7"
        )
    kernels = importlib.import_module("msa_triton.kernels")
    interpreted = [not isinstance(fn, triton.JITFunction) for fn in (tl.sum, kernels.select_kernel)]
    if interpreted[0] != interpreted[1]:
        raise RuntimeError(
            "TRITON_INTERPRET changed after triton was imported: set it before the first import of triton, or import"
            " msa_triton first"
        )
    return kernels, all(interpreted)
