"""Every exercise: an untouched stub fails its check, the solution passes, and two wrong answers of each check fail."""

import importlib
import pkgutil
import re

import nbformat
import pytest
from exercises import EXERCISES, NOTEBOOKS, checks, read, verdicts

import msa_ref.exercises
import msa_triton.exercises

NAMES = [path.name for path in EXERCISES]
PACKAGES = (msa_ref.exercises, msa_triton.exercises)


def module_names():
    return [
        module.name
        for package in PACKAGES
        for module in pkgutil.iter_modules(package.__path__, package.__name__ + ".")
        if not module.name.endswith(".verdict")
    ]


def headings(notebook):
    return re.findall(r"^## .*$", "\n".join(cell.source for cell in notebook.cells), re.MULTILINE)


def test_every_exercise_notebook_has_its_solutions_and_its_teaching_notebook():
    assert NAMES == sorted(path.name for path in (NOTEBOOKS / "solutions").glob("*.ipynb"))
    assert set(NAMES) <= {path.name for path in NOTEBOOKS.glob("*.ipynb")}


@pytest.mark.parametrize("name", NAMES)
def test_stubs_fail_and_solutions_pass(name, tmp_path):
    stubs, solved = verdicts(read("exercises", name), tmp_path), verdicts(read("solutions", name), tmp_path)
    assert [check for check, _ in stubs] == [check for check, _ in solved] and solved
    assert not [found for found in stubs if found[1]]
    assert not [found for found in solved if not found[1]]


@pytest.mark.parametrize("name", NAMES)
def test_stored_outputs_show_the_same(name):
    for kind, begins in (("exercises", "Not yet: "), ("solutions", "Right: ")):
        notebook = read(kind, name)
        shown = [c for c in notebook.cells if c.cell_type == "code" and checks(nbformat.v4.new_notebook(cells=[c]))]
        assert shown
        for cell in shown:
            (output,) = [o for o in cell.outputs if o.output_type == "execute_result"]
            assert output.data["text/plain"].startswith(begins)


@pytest.mark.parametrize("name", NAMES)
def test_a_solution_differs_from_its_exercise_in_code_only_where_the_hole_is(name):
    exercise, solution = read("exercises", name), read("solutions", name)
    assert headings(exercise) == headings(solution)
    assert len(exercise.cells) == len(solution.cells)
    changed = [
        (stub.source, full.source)
        for stub, full in zip(exercise.cells, solution.cells, strict=True)
        if stub.cell_type == "code" and stub.source != full.source
    ]
    assert len(changed) == len(checks(exercise))


def test_every_check_is_used_by_an_exercise():
    used = {check for name in NAMES for check in checks(read("exercises", name))}
    defined = {
        name
        for module in map(importlib.import_module, module_names())
        for name, value in vars(module).items()
        if name.startswith("check_") and getattr(value, "__module__", None) == module.__name__
    }
    assert used == defined
