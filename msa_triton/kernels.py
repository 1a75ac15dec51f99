"""The functions behind the operators, as Triton kernels: the counterpart of `msa_ref.blockwise`."""

from msa_triton.backward import attention_backward
from msa_triton.forward import attention_forward
from msa_triton.index_loss import index_loss_backward, index_loss_forward
from msa_triton.select import select_forward, select_kernel

__all__ = [
    "attention_backward", "attention_forward", "index_loss_backward", "index_loss_forward", "select_forward",
    "select_kernel",
]  # fmt: skip
