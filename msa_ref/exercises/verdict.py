"""What a check says of an answer, and how it finds out what differs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch


class Difference(Exception):
    """An answer is not right; the message says what differs."""


@dataclass(frozen=True)
class Verdict:
    """What a check found; a notebook shows its message, and it is true only for a right answer."""

    right: bool
    message: str

    def __bool__(self) -> bool:
        return self.right

    def __repr__(self) -> str:
        return f"{'Right' if self.right else 'Not yet'}: {self.message}"


def check(function: Callable[..., str]) -> Callable[..., Verdict]:
    """Makes a check of a function that raises `Difference` for a wrong answer and returns a sentence for a right one.

    An answer that is still `...` or None, that returns `...` or None, or that raises, is a wrong answer too: the check
    says so and never raises itself.
    """

    @functools.wraps(function)
    def checked(*answers) -> Verdict:
        if any(answer is ... or answer is None for answer in answers):
            return Verdict(False, "there is no answer yet: replace the dots.")
        try:
            return Verdict(True, function(*answers))
        except Difference as difference:
            return Verdict(False, str(difference))
        except NotImplementedError:
            return Verdict(False, "there is no answer yet: replace the line that raises NotImplementedError.")
        except Exception as error:
            return Verdict(False, f"your answer stopped with {type(error).__name__}: {error}")

    return checked


def require(condition, message: str) -> None:
    """Raises `Difference` with the message unless the condition holds."""
    if not bool(condition):
        raise Difference(message)


def compare(
    what: str, found, expected, *, tolerance: float = 1e-5, mistakes: Mapping[str, object] | None = None
) -> None:
    """Raises `Difference` unless an answer's tensor or number is the expected one, and says how it differs.

    Args:
        what: the name of the thing in the message, such as "dq".
        found, expected: tensors, arrays, numbers or nested lists.
        tolerance: largest difference allowed, as a share of the largest expected magnitude.
        mistakes: what typical wrong answers give, by the sentence that explains each.
    """
    require(found is not None and found is not ..., f"{what}: there is no answer yet.")
    try:
        found = torch.as_tensor(found)
    except (TypeError, ValueError, RuntimeError):
        raise Difference(f"{what} must be a tensor or a number, got {type(found).__name__}.") from None
    expected = torch.as_tensor(expected)
    require(found.shape == expected.shape, f"{what} must have shape {_shape(expected)}, got {_shape(found)}.")
    if _close(found, expected, tolerance):
        return
    for sentence, wrong in (mistakes or {}).items():
        wrong = torch.as_tensor(wrong)
        if wrong.shape == found.shape and _close(found, wrong, tolerance):
            raise Difference(f"{what}: {sentence}")
    raise Difference(f"{what}: {_describe(found, expected, tolerance)}")


def _close(found, expected, tolerance: float) -> bool:
    found, expected = found.double(), expected.double()
    return torch.allclose(found, expected, rtol=0, atol=_slack(expected, tolerance), equal_nan=True)


def _slack(expected, tolerance: float) -> float:
    finite = expected[expected.isfinite()].abs()
    return tolerance * float(finite.max()) if finite.numel() else 0.0


def _describe(found, expected, tolerance: float) -> str:
    found, expected = found.double(), expected.double()
    if (found.isnan() & ~expected.isnan()).any():
        return f"{int(found.isnan().sum())} of {found.numel()} values are NaN."
    scale = (found * expected).nansum() / expected.square().nansum()
    if scale.isfinite() and abs(float(scale)) > 1e-9 and _close(found / scale, expected, 10 * tolerance):
        return f"off by a factor of {float(scale):.4g}."
    apart = (found - expected).nan_to_num(posinf=float("inf"), neginf=float("inf")).abs()
    if not found.ndim:
        return f"expected {float(expected):.6g}, got {float(found):.6g}."
    wrong = apart > _slack(expected, tolerance)
    place = tuple(wrong.nonzero()[0].tolist()) if wrong.any() else (0,) * found.ndim
    at = ", ".join(map(str, place))
    return (
        f"{int(wrong.sum())} of {found.numel()} values differ; the first at [{at}]: expected"
        f" {float(expected[place]):.6g}, got {float(found[place]):.6g}."
    )


def _shape(tensor) -> str:
    return f"[{', '.join(map(str, tensor.shape))}]" if tensor.ndim else "of a single number"
