"""Runs the exercise notebooks: what their checks say of the stubs as they stand and of the solutions."""

import ast
import importlib.util
import itertools
import sys
from pathlib import Path

import nbformat

NOTEBOOKS = Path(__file__).parent.parent / "notebooks"
EXERCISES = sorted((NOTEBOOKS / "exercises").glob("[0-9][0-9]_*.ipynb"))
_modules = itertools.count()


def read(kind, name):
    """A notebook of the folder `exercises` or `solutions`."""
    return nbformat.read(NOTEBOOKS / kind / name, as_version=4)


def verdicts(notebook, folder):
    """[(name of the check, its verdict)], in order, of a notebook run as a module written to a folder.

    A module and not `exec`, because Triton reads the source of a kernel from its file.
    """
    body = [ast.parse("verdicts = []").body[0]]
    for cell in notebook.cells:
        if cell.cell_type == "code":
            body += [_recorded(statement) for statement in ast.parse(cell.source).body]
    name = f"exercise_{next(_modules)}"
    path = Path(folder) / f"{name}.py"
    path.write_text("\n".join(ast.unparse(statement) for statement in body))
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[name]
    return module.verdicts


def checks(notebook):
    """The names of the checks that a notebook calls, in order."""
    statements = [s for c in notebook.cells if c.cell_type == "code" for s in ast.parse(c.source).body]
    return [s.value.func.id for s in statements if _is_check(s)]


def _recorded(statement):
    if not _is_check(statement):
        return statement
    return ast.parse(f"verdicts.append(({statement.value.func.id!r}, {ast.unparse(statement)}))").body[0]


def _is_check(statement):
    if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Call):
        return False
    function = statement.value.func
    return isinstance(function, ast.Name) and function.id.startswith("check_")
