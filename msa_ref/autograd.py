"""What the differentiable implementations share: a backward pass that is itself not differentiable."""

import torch


def refuse_second_derivative(*_):
    """The backward of a backward pass (SPEC 7)."""
    raise RuntimeError("MSA has first derivatives only: the gradient of a gradient is not defined (SPEC 7)")


class OnlyOnce(torch.autograd.Function):
    """Runs a backward pass; its results raise when differentiated, even for a constant upstream gradient (SPEC 7)."""

    @staticmethod
    def forward(ctx, backward, *arguments):
        return backward(*arguments)

    backward = staticmethod(refuse_second_derivative)
