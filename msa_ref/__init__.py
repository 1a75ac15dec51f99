"""Reference implementations of MiniMax Sparse Attention in NumPy and PyTorch."""

from msa_ref.compose import MSAOutput
from msa_ref.problem import BlockGeometry, Problem, describe, validate_block_indices

__all__ = ["BlockGeometry", "MSAOutput", "Problem", "describe", "validate_block_indices"]
