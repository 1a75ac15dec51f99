"""The compile report: every kernel compiled for GPUs that are not here, in processes without the interpreter."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FIELDS = {
    "kernel", "target", "dtype", "num_warps", "num_stages", "registers", "stack_bytes", "spill_loads", "spill_stores",
    "shared_bytes", "shared_limit", "matrix_instruction", "matrix_count", "ok",
}  # fmt: skip
KERNELS = {
    "select", "forward_query", "forward_key", "combine", "normalizer", "delta", "dq", "dkdv", "sum_tasks",
    "index_query", "index_query_value", "index_key",
}  # fmt: skip
# These hold a key block, or its scores, and every product of theirs must be the fast instruction of the target.
FAST = {"select", "forward_key", "dkdv", "index_key"}
DENSE_TOO = KERNELS - {"select", "forward_key", "combine"}


def compile_report(tmp_path, *arguments, code=None, expected=0) -> list[dict]:
    """The rows of a report in a process of its own; code: what to run before it."""
    pytest.importorskip("triton")
    file = tmp_path / "report.json"
    start = ["-c", f"{code}; import sys; from msa_triton.compile_report import main; sys.exit(main(sys.argv[1:]))"]
    command = [sys.executable, *(start if code else ["-m", "msa_triton.compile_report"]), *arguments]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    result = subprocess.run(
        [*command, "--json", str(file)], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1200
    )
    assert result.returncode == expected, result.stdout + result.stderr
    return json.loads(file.read_text())


@pytest.fixture(scope="module")
def hopper(tmp_path_factory):
    return compile_report(tmp_path_factory.mktemp("report"), "--target", "sm_90")


def test_every_kernel_is_in_the_report_once_for_sparse_and_once_for_dense(hopper):
    named = [(row["kernel"], row["variant"]) for row in hopper]
    assert sorted(named) == sorted(
        [(name, "sparse") for name in KERNELS] + [(name, "dense") for name in DENSE_TOO - {"delta"}]
        + [("sum_tasks", "sparse"), ("sum_tasks", "dense")]
    )  # fmt: skip
    assert all(row.keys() >= FIELDS for row in hopper)


def test_hopper_spills_nothing_and_fits(hopper):
    for row in hopper:
        assert row["ok"] and row["error"] is None, row
        assert row["stack_bytes"] == row["spill_loads"] == row["spill_stores"] == 0, row
        assert 0 <= row["shared_bytes"] <= row["shared_limit"] == 227 * 1024, row
        assert 16 < row["registers"] <= 255, row


@pytest.mark.parametrize("topk", [64, 128])
def test_selections_of_many_blocks_spill_nothing_on_hopper(tmp_path, topk):
    sizes = f"dict(H=4, topk={topk}, N={128 * topk})"
    code = f"import msa_triton.compile_report as r; r.SHAPES['m3'].update({sizes})"
    rows = compile_report(tmp_path, "--target", "sm_90", "--kernel", "select", "--jobs", "1", code=code)
    assert len(rows) == 1 and rows[0]["ok"] and rows[0]["matrix_instruction"] == "HGMMA", rows
    assert rows[0]["stack_bytes"] == rows[0]["spill_loads"] == rows[0]["spill_stores"] == 0, rows


def test_products_of_hopper_are_warpgroup_instructions(hopper):
    for row in hopper:
        if row["kernel"] in FAST:
            assert row["matrix_instruction"] == "HGMMA" and row["matrix_count"] > 0, row
        elif row["kernel"] in ("combine", "delta", "sum_tasks"):
            assert row["matrix_instruction"] is None and row["matrix_count"] == 0, row
        else:
            assert "HGMMA" in row["matrix_instruction"], row


@pytest.mark.parametrize(("target", "instruction"), [("sm_100", "UTCHMMA"), ("sm_120", "HMMA"), ("gfx942", "v_mfma")])
def test_other_targets(tmp_path, target, instruction):
    rows = compile_report(tmp_path, "--target", target, "--kernel", "select", "dkdv")
    assert {row["kernel"] for row in rows} == {"select", "dkdv"}
    for row in rows:
        assert row["ok"] and row["matrix_instruction"] == instruction, row
        assert max(row["stack_bytes"], row["spill_loads"], row["spill_stores"]) <= 64, row


def test_float32_has_tiles_of_its_own(tmp_path):
    rows = compile_report(tmp_path, "--target", "sm_90", "--dtype", "float32", "--kernel", "select", "dq", "dkdv")
    for row in rows:
        assert row["ok"] and row["matrix_instruction"] is None, row  # TF32 would be one
        assert row["stack_bytes"] <= 64, row


def test_a_kernel_beyond_the_shared_memory_makes_the_report_fail(tmp_path):
    code = "import msa_triton.config as c; c.SHARED_LIMIT['sm_90'] = 1000; c.shared_bytes = lambda *_: 0"
    arguments = ("--target", "sm_90", "--kernel", "delta", "dq", "--jobs", "1")
    rows = compile_report(tmp_path, *arguments, code=code, expected=1)
    assert {row["kernel"]: row["ok"] for row in rows} == {"delta": True, "dq": False}


def test_a_kernel_that_does_not_compile_makes_the_report_fail(tmp_path):
    code = "import msa_triton.compile_report as r; r.Source.compile = lambda self: 1 / 0"
    rows = compile_report(tmp_path, "--target", "sm_90", "--kernel", "delta", "--jobs", "1", code=code, expected=1)
    assert not rows[0]["ok"] and "ZeroDivisionError" in rows[0]["error"]
