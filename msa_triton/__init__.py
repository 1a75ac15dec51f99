"""MiniMax Sparse Attention for PyTorch: operators, an attention layer and a small language model."""

import importlib
import platform

from msa_ref.compose import MSAOutput
from msa_ref.problem import validate_block_indices
from msa_triton.attention import index_kl_loss, msa_attention, select_blocks, sparse_attention
from msa_triton.backend import interpret_without_gpu
from msa_triton.layer import MSAttention
from msa_triton.model import SmallLM, SmallLMConfig

__all__ = [
    "MSAOutput", "MSAttention", "SmallLM", "SmallLMConfig", "index_kl_loss", "msa_attention", "select_blocks",
    "sparse_attention", "validate_block_indices", "versions",
]  # fmt: skip

interpret_without_gpu()


def versions() -> dict[str, str | None]:
    """Versions to put into a bug report: python, torch, triton (None if it is missing), numpy, platform."""

    def version(name: str) -> str | None:
        try:
            return importlib.import_module(name).__version__
        except ImportError:
            return None

    return {
        "python": platform.python_version(),
        "torch": version("torch"),
        "triton": version("triton"),
        "numpy": version("numpy"),
        "platform": platform.platform(),
    }
