"""Typical wrong answers to the exercises of notebooks 07 to 11: solutions in which one line is wrong."""

import ast
import os
from importlib.util import find_spec

import nbformat
import pytest
from exercises import checks, read, verdicts

import msa_triton  # noqa: F401  (turns the interpreter on where there is no GPU)

WRONG = {}  # (notebook, check): [(text of the solution, text of a wrong answer, part of the verdict)]

FIRST_STEPS = "07_first_steps_in_triton.ipynb"
WRONG[FIRST_STEPS, "check_band_maximum"] = [
    ("mask=(i < rows) & (j < columns), ", "mask=i < rows, ", "lanes beyond the last column"),
    ("mask=(i < rows) & (j < columns), ", "mask=(j < columns) & (i >= 0), ", "lanes beyond the last row"),
    ('other=-float("inf")', "other=0.0", "masked lanes hold 0"),
    ("* stride_x0", "* 16", "of a transposed matrix"),
]
WRONG[FIRST_STEPS, "check_row_offsets"] = [
    ("tl.program_id(0).to(tl.int64) *", "tl.program_id(0) *", "Widen what is multiplied"),
    ("tl.program_id(0).to(tl.int64) * TILE", "tl.program_id(0).to(tl.int64)", "the offsets of rows 3 apart"),
    ("mask=row < rows", "mask=row >= 0", "behind the end of out"),
]
WRONG[FIRST_STEPS, "check_row_lse"] = [
    ("tl.exp2((largest - now) * factor)", "tl.full([ROWS], 1.0, tl.float32)", "not rescaled when the maximum grows"),
    ("(largest - now) * factor)", "(now - largest) * factor)", "NaN"),
    ("(largest - now) * factor)", "(largest - now))", "leaves out the factor"),
    ("tl.exp2((largest - now) * factor)", "0 * now", "only the last tile"),
]
WRONG[FIRST_STEPS, "check_causal_attention"] = [
    ("j[None, :] <= query[:, None]", "(j < N)[None, :]", "a future token leaks"),
    ("j[None, :] <= query[:, None]", "j[None, :] <= query[:, None] + 1", "a future token leaks"),
    ("j[None, :] <= query[:, None]", "j[None, :] < query[:, None]", "a query must see its own token"),
    ("mixed = mixed * rescale[:, None] +", "mixed = mixed +", "values differ"),
]

CASES = [(*key, *case) for key, cases in WRONG.items() for case in cases]
interpreted = pytest.mark.skipif(
    not find_spec("triton") or os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton's interpreter"
)


def answered(notebook, check, right, wrong):
    """The notebook's imports, the answer to a check with one text replaced, and the check."""
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    number = next(i for i, cell in enumerate(code) if check in checks(nbformat.v4.new_notebook(cells=[cell])))
    answer = nbformat.v4.new_code_cell(code[number - 1].source.replace(right, wrong))
    assert answer.source != code[number - 1].source
    ast.parse(answer.source)
    return nbformat.v4.new_notebook(cells=[code[0], answer, code[number]])


@interpreted
@pytest.mark.parametrize("name, check, right, wrong, message", CASES)
def test_a_wrong_answer_is_refused_and_named(name, check, right, wrong, message, tmp_path):
    ((_, verdict),) = verdicts(answered(read("solutions", name), check, right, wrong), tmp_path)
    assert not verdict
    assert message in verdict.message


def test_every_check_has_two_wrong_answers():
    used = {(name, check) for name, _ in WRONG for check in checks(read("exercises", name))}
    assert used == set(WRONG)
    assert min(map(len, WRONG.values())) >= 2


@interpreted
@pytest.mark.parametrize("name, check", WRONG)
def test_an_answer_that_is_no_kernel_is_refused(name, check, tmp_path):
    notebook = answered(read("solutions", name), check, "@triton.jit\n", "")
    ((_, verdict),) = verdicts(notebook, tmp_path)
    assert not verdict and "under @triton.jit" in verdict.message
