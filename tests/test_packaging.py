"""What the project promises about installing, importing and shipping, each test named after the fault it keeps out."""

import ast
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import version
from pathlib import Path

import nbformat
import pytest
import yaml
from packaging.requirements import Requirement

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10; pytest brings tomli there
    import tomli as tomllib

ROOT = Path(__file__).parent.parent
PACKAGES = ("msa_ref", "msa_triton")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NOTEBOOKS = sorted(p for p in (ROOT / "notebooks").rglob("*.ipynb") if ".ipynb_checkpoints" not in p.parts)
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
EXTRAS = PROJECT["optional-dependencies"]
REQUIREMENTS = [
    requirement
    for text in PROJECT["dependencies"] + EXTRAS["lab"] + EXTRAS["test"]
    if (requirement := Requirement(text)).name != PROJECT["name"]
]


def requirement(name):
    return next(r for r in REQUIREMENTS if r.name == name)


def run(*command, cwd=ROOT, **environment):
    """Runs a command and returns what it prints; fails with its messages if it fails. None unsets a variable."""
    env = {name: value for name, value in (os.environ | environment).items() if value is not None}
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def python(code, **environment):
    return run(sys.executable, "-c", code, **environment)


def code_of(path):
    """The Python text of a module or of a notebook's code cells."""
    if path.suffix == ".py":
        return path.read_text()
    cells = nbformat.read(path, as_version=4).cells
    return "\n".join(cell.source for cell in cells if cell.cell_type == "code")


def conda_names():
    """environment.yml as (channels, {PyPI spelling of the name: requirement})."""
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    conda = [entry for entry in environment["dependencies"] if isinstance(entry, str)]
    pip = [entry for group in environment["dependencies"] if isinstance(group, dict) for entry in group["pip"]]
    found = {r.name: r for r in map(Requirement, conda + [entry for entry in pip if entry != "-e ."])}
    found["torch"] = found.pop("pytorch")
    return environment["channels"], found


# A conda environment that cannot be solved


def test_environment_uses_conda_forge_only():
    channels, _ = conda_names()
    assert set(channels) <= {"conda-forge", "nodefaults"}


def test_environment_and_pyproject_ask_for_the_same_packages():
    _, found = conda_names()
    assert str(found.pop("python").specifier) == PROJECT["requires-python"]
    found.pop("pip")
    assert {name: r.specifier for name, r in found.items()} == {r.name: r.specifier for r in REQUIREMENTS}


# An install that replaces torch, or a triton that contradicts it


@pytest.fixture(scope="module")
def source_copy(tmp_path_factory):
    """A copy of what a build reads, so that building leaves nothing behind in the checkout."""
    copy = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for package in PACKAGES:
        shutil.copytree(ROOT / package, copy / package, ignore=shutil.ignore_patterns("__pycache__"))
    return copy


def test_install_leaves_the_installed_torch_alone(source_copy):
    assert requirement("torch").specifier.contains(version("torch"), prereleases=True)
    pip = (sys.executable, "-m", "pip", "install", "--dry-run", "--no-index", "--no-build-isolation")
    would = re.search("Would install (.*)", run(*pip, ".", cwd=source_copy)).group(1)
    assert would == f"msa-from-scratch-{PROJECT['version']}"


def test_readme_has_a_cpu_only_route():
    assert 'TORCH="torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu"' in (ROOT / "README.md").read_text()


def test_triton_is_required_on_linux_only_and_not_pinned():
    triton = requirement("triton")
    for system, wanted in {"Linux": True, "Windows": False, "Darwin": False}.items():
        assert triton.marker.evaluate({"platform_system": system}) is wanted
    assert {clause.operator for clause in triton.specifier} == {">="}
    assert not re.search("^(torch|triton)=", (ROOT / "constraints.txt").read_text(), re.MULTILINE)


def test_tested_versions_cover_every_other_requirement():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    tested = {r.name: r for r in map(Requirement, (line for line in lines if not line.startswith("#")))}
    assert tested.keys() == {r.name for r in REQUIREMENTS} - {"torch", "triton"}
    for name, pin in tested.items():
        (clause,) = pin.specifier
        assert clause.operator == "==" and requirement(name).specifier.contains(clause.version)


def test_installed_packages_agree():
    run(sys.executable, "-m", "pip", "check")


def test_versions_reports_the_torch_and_triton_pair():
    import torch

    import msa_triton

    report = msa_triton.versions()
    assert report.keys() == {"python", "torch", "triton", "numpy", "platform"}
    assert report["torch"] == torch.__version__
    assert report["numpy"] == version("numpy")
    try:
        import triton
    except ImportError:
        assert report["triton"] is None
    else:
        assert report["triton"] == triton.__version__


# An import that needs a GPU, Triton or the notebook packages

BLOCK = "import sys; sys.modules.update(dict.fromkeys({names}));"
SMALL_CALL = """
import torch, msa_triton
q = torch.randn(1, 2, 40, 8)
out, kl_loss, *_ = msa_triton.msa_attention(q, q, q, q, q, topk=2, block_size=16)
assert out.shape == q.shape and kl_loss.isfinite()
"""


@pytest.mark.parametrize("interpret, after", [(None, "1"), ("0", "0"), ("1", "1")])
def test_import_without_a_gpu_chooses_the_interpreter_and_leaves_triton_alone(interpret, after):
    code = (
        "import os, sys, torch; before = 'triton' in sys.modules\n"
        "import msa_ref, msa_triton; from msa_triton import layer, model\n"
        "assert ('triton' in sys.modules) == before and not torch.cuda.is_initialized()\n"
        "print(os.environ['TRITON_INTERPRET'])"
    )
    assert python(code, CUDA_VISIBLE_DEVICES="", TRITON_INTERPRET=interpret).strip() == after


def test_everything_on_the_cpu_works_without_triton():
    code = BLOCK.format(names=["triton"]) + SMALL_CALL
    python(code + "assert msa_triton.versions()['triton'] is None")


KERNEL_CALLS = """
import torch, msa_triton
q, options = torch.randn(1, 1, 20, 8), dict(block_size=16, backend="triton")
calls = [
    lambda: msa_triton.select_blocks(q, q, topk=2, **options),
    lambda: msa_triton.sparse_attention(q, q, q, None, **options),
    lambda: msa_triton.index_kl_loss(q, q, q[..., 0], q, q, None, **options),
    lambda: msa_triton.msa_attention(q, q, q, q, q, topk=2, **options),
    lambda: msa_triton.MSAttention(8, heads=1, kv_heads=1, topk=2, **options)(q[0]),
]
for call in calls:
    try:
        call()
        print("works")
    except Exception as error:
        print(type(error).__name__, error)
"""


def kernel_calls(before="", **environment):
    """What each function and the layer does with backend="triton" without a GPU: "works", or its error."""
    lines = python(before + KERNEL_CALLS, CUDA_VISIBLE_DEVICES="", **environment).splitlines()
    assert len(lines) == 5
    return lines


@pytest.mark.parametrize("first, interpret", [("msa_triton", None), ("triton", "1")])
def test_kernels_run_in_the_interpreter_without_a_gpu(first, interpret):
    assert kernel_calls(f"import {first};", TRITON_INTERPRET=interpret) == ["works"] * 5


def test_kernels_without_triton_name_triton_and_the_platform():
    for line in kernel_calls(BLOCK.format(names=["triton"])):
        assert re.match(f'RuntimeError backend="triton" needs Triton, .* not installed .{platform.system()}, ', line)
        assert 'backend="torch" works without it' in line


def test_interpreter_that_is_switched_on_too_late_says_when():
    for line in kernel_calls("import triton;", TRITON_INTERPRET=None):
        assert line.startswith("RuntimeError TRITON_INTERPRET changed after triton was imported")
        assert "set it before the first import of triton, or import msa_triton first" in line


def test_cpu_tensors_with_the_interpreter_switched_off_name_the_variable():
    for line in kernel_calls(TRITON_INTERPRET="0"):
        assert line.startswith("ValueError")
        assert "Set TRITON_INTERPRET=1 in the environment before triton is first imported" in line


def test_old_triton_is_refused():
    old = "import os; os.environ['TRITON_INTERPRET'] = '1'; import triton; triton.__version__ = '3.5.1';"
    for line in kernel_calls(old):
        assert line == "RuntimeError the kernels need Triton 3.6 or newer, found 3.5.1"
    (least,) = requirement("triton").specifier
    assert least.version == "3.6"


def test_references_never_import_triton():
    python("import sys, msa_ref.naive, msa_ref.dense, msa_ref.blockwise; assert 'triton' not in sys.modules")
    for path in (ROOT / "msa_ref").rglob("*.py"):
        assert not re.search(r"^\s*(import|from) triton", path.read_text(), re.MULTILINE), path


def test_import_works_without_the_notebook_packages():
    names = ["matplotlib", "ipywidgets", "IPython", "tqdm", "psutil"]
    python(BLOCK.format(names=names) + SMALL_CALL + "import msa_ref.naive, msa_ref.dense")


# Private names of Triton, and notebooks that reinstall what a hosted service has


@pytest.mark.parametrize("path", SOURCES + NOTEBOOKS, ids=lambda path: path.name)
def test_no_private_triton_names_and_no_reinstall(path):
    code = code_of(path)
    assert not re.search(r"triton\.runtime\.interpreter|triton\._(?!_)|from triton\S* import .*\b_", code)
    assert not re.search(r"pip install.*\b(torch|triton)\b", code)


# Kernels whose source cannot be read


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_kernels_are_at_module_level_and_nothing_is_executed_from_text(path):
    tree = ast.parse(path.read_text())
    calls = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    assert not calls & {"exec", "eval"}
    kernels = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and any("triton.jit" in ast.unparse(d) for d in node.decorator_list)
    ]
    assert all(kernel in tree.body for kernel in kernels)


def test_wheel_holds_every_module_and_nothing_else(source_copy, tmp_path):
    pip = (sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-index", "--no-build-isolation")
    run(*pip, "--wheel-dir", str(tmp_path), ".", cwd=source_copy)
    (wheel,) = tmp_path.glob("*.whl")
    shipped = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert shipped == {path.relative_to(ROOT).as_posix() for path in SOURCES}


# CUDA touched at import


def test_import_does_not_initialise_cuda_not_even_in_a_forked_child():
    python(
        "import multiprocessing, torch, msa_ref, msa_triton\n"
        "assert not torch.cuda.is_initialized()\n"
        "with multiprocessing.get_context('fork').Pool(1) as pool:\n"
        "    assert pool.apply(torch.cuda.is_initialized) is False"
    )


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_no_argument_defaults_to_a_cuda_device(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.arguments):
            defaults = [d for d in node.defaults + node.kw_defaults if d is not None]
            assert not [d for d in defaults if "cuda" in ast.unparse(d)], ast.unparse(node)


# Notebooks that only open on their author's machine


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_notebook_opens_on_any_machine(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec.name == "python3"
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert not [o for o in outputs if o.output_type == "error" or o.get("name") == "stderr"]
    for output in outputs:
        for picture in ("image/png", "image/jpeg"):
            output.get("data", {}).pop(picture, None)
    found = re.search(r"/home/|/Users/|/root/|/site-packages/|[A-Z]:\\+Users", json.dumps(notebook))
    assert not found, f"a path of one machine: {found}"
    assert f"{ROOT}/" not in json.dumps(notebook)


# The README


def test_readme_example_runs():
    example = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL).group(1)
    assert "(1, 4, 256, 16)" in python(example)


def test_readme_is_right_about_torch_compile():
    import torch

    import msa_triton

    def loss(*tensors):
        out, kl_loss, *_ = msa_triton.msa_attention(*tensors, topk=2, block_size=16)
        return out.square().mean() + kl_loss

    torch.manual_seed(0)
    tensors = [torch.randn(1, heads, 75, 8, requires_grad=True) for heads in (4, 2, 2, 2, 1)]
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for eager, traced in zip(*(torch.autograd.grad(f(*tensors), tensors) for f in (loss, compiled)), strict=True):
        assert torch.equal(eager, traced)
