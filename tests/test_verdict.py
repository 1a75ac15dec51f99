"""What a check says of right, wrong, missing and broken answers."""

import numpy as np
import pytest
import torch

from msa_ref.exercises.verdict import Difference, check, compare, require


@check
def check_double(answer):
    compare("the result", answer(torch.tensor([1.0, 2.0])), [2.0, 4.0], mistakes={"you squared it.": [1.0, 4.0]})
    return "every value is doubled."


@pytest.mark.parametrize(
    "answer, message",
    [
        (None, "no answer yet"),
        (..., "no answer yet"),
        (lambda x: ..., "no answer yet"),
        (lambda x: None, "no answer yet"),
        (lambda x: 1 / 0, "your answer stopped with ZeroDivisionError"),
        (lambda x: x**2, "the result: you squared it."),
        (lambda x: x, "the result: off by a factor of 0.5."),
        (lambda x: x * torch.nan, "the result: 2 of 2 values are NaN."),
        (lambda x: x[:1], "the result must have shape [2], got [1]."),
        (lambda x: x[0], "the result must have shape [2], got of a single number."),
        (lambda x: "two", "the result must be a tensor or a number, got str."),
        (lambda x: x + 1, "1 of 2 values differ; the first at [1]: expected 4, got 3."),
        (lambda x: torch.tensor([2.0, torch.inf]), "1 of 2 values differ; the first at [1]: expected 4, got inf."),
        (lambda x: torch.zeros(2), "2 of 2 values differ; the first at [0]: expected 2, got 0."),
    ],
)
def test_a_wrong_answer_is_told_what_differs(answer, message):
    verdict = check_double(answer)
    assert not verdict and message in repr(verdict) and repr(verdict).startswith("Not yet: ")


RIGHT = [lambda x: 2 * x, lambda x: (2 * x).numpy(), lambda x: [2, 4], lambda x: np.array([2, 4])]


@pytest.mark.parametrize("answer", RIGHT)
def test_a_right_answer_is_told_so(answer):
    verdict = check_double(answer)
    assert verdict and repr(verdict) == "Right: every value is doubled."


def test_a_hole_that_raises_is_no_answer():
    def hole(x):
        raise NotImplementedError

    assert "replace the line" in check_double(hole).message


def test_infinities_and_nan_are_compared_where_they_are_expected():
    compare("lse", [-np.inf, 1.0], [-np.inf, 1.0])
    compare("row", [np.nan, 1.0], [np.nan, 1.0])
    with pytest.raises(Difference, match=r"first at \[0\]: expected -inf, got 0"):
        compare("lse", [0.0, 1.0], [-np.inf, 1.0])


def test_a_number_that_differs_is_shown_with_the_expected_one():
    with pytest.raises(Difference, match="cost: off by a factor of 2"):
        compare("cost", 4.0, 2.0)
    with pytest.raises(Difference, match="cost: expected 0, got 4"):
        compare("cost", 4.0, 0.0)


def test_require():
    require(True, "never")
    with pytest.raises(Difference, match="a reason"):
        require(torch.tensor(False), "a reason")
