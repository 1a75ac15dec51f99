"""What the differentiable implementations share: a backward pass that is itself not differentiable."""

import torch


class OnlyOnce(torch.autograd.Function):
    """Runs a backward pass; its results raise when differentiated, even for a constant upstream gradient (SPEC 7)."""

    @staticmethod
    def forward(ctx, backward, *arguments):
        return backward(*arguments)

    @staticmethod
    def backward(ctx, *_):
        raise RuntimeError("second derivatives of MSA are not defined")
