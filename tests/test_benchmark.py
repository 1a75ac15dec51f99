"""`python -m msa_triton.benchmark`: options, counts, checks and reports. No time is compared with another."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend

from msa_ref import cost
from msa_triton import config, launch, select_blocks
from msa_triton.benchmark import cases, cpu, flops, gpu, measure, timing, tune
from msa_triton.benchmark.__main__ import main
from msa_triton.benchmark.checks import LIMITS, CheckFailed, check_blocks, check_rows, chosen_rows
from msa_triton.benchmark.step import Shape, msa_step, normal_inputs
from msa_triton.config import Tile

ROOT = Path(__file__).parent.parent
CPU = torch.device("cpu")
TINY = Shape(64, heads=2, width=16, index_width=16, block_size=16, topk=2)
GROUPED = Shape(
    200, heads=8, kv_heads=2, index_heads=4, index_key_heads=2, width=16, index_width=8, block_size=16, topk=3
)
PAPER = dict(heads=64, kv_heads=4, index_heads=4, index_key_heads=1, width=128, index_width=128)
SMALL = "--heads 2 --width 16 --index-width 16 --block-size 16 --topk 2 --threads 1".split()
PHASES = {"select", "attend", "align", "forward", "backward", "total"}
interpreter = pytest.mark.skipif(
    not find_spec("triton") or os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton's interpreter"
)


def benchmark(*arguments, code="", expected=0, **environment):
    """The finished process of a command; code: what to run before it."""
    start = f"{code}\nimport sys; from msa_triton.benchmark.__main__ import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, *(["-c", start] if code else ["-m", "msa_triton.benchmark"]), *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == expected, done.stdout + done.stderr
    return done


def grouped_step(dtype="float32", **options):
    shape = replace(GROUPED, dtype=dtype)
    inputs = normal_inputs(shape, 0)
    return inputs, msa_step(inputs, shape, **options), shape


# cpu and million


def test_cpu_reports_every_length(tmp_path):
    file = tmp_path / "cpu.json"
    done = benchmark("cpu", "--tokens", 64, 128, "--repeats", 2, *SMALL, "--json", file)
    report = json.loads(file.read_text())
    assert report["command"] == "cpu" and report["threads"] == 1 and report["versions"]["torch"] == torch.__version__
    rows = report["rows"]
    assert [(row["tokens"], row["runs"]) for row in rows] == [(64, 2), (128, 1)]
    for row in rows:
        assert row.keys() == cpu.Row.__dataclass_fields__.keys()
        assert row["msa"].keys() == PHASES and min(row["msa"].values()) > 0
        assert row["sdpa"].keys() == {"forward", "backward", "total"} and min(row["sdpa"].values()) > 0
        assert row["ratio"] == row["sdpa"]["total"] / row["msa"]["total"]
        assert row["eq12_ratio"] == cost.flop_ratio(row["tokens"], 2, 16, 1, 16, 2, 16)
        assert row["share"] == row["ratio"] / row["eq12_ratio"]
        assert 0 < row["idle_bytes"] <= row["peak_bytes"]
        assert row["errors"].keys() == LIMITS["float32"].keys()
        assert row["gflops"] > 0
    assert "SDPA/MSA" in done.stdout and f"{rows[0]['eq12_ratio']:.3f}" in done.stdout


def test_cpu_ratio_is_that_of_medians_of_totals(monkeypatch):
    step = msa_step(normal_inputs(TINY, 0), TINY)
    msa, sdpa = iter([1, 10, 30, 20]), iter([7, 100, 300, 500])  # the first of each warms up
    named = ("select", "attend", "align", "backward", "total")
    monkeypatch.setattr(cpu, "msa_step", lambda *_: step._replace(milliseconds=dict.fromkeys(named, next(msa))))
    monkeypatch.setattr(cpu, "dense_step", lambda _: {"total": next(sdpa)})
    monkeypatch.setattr(cpu, "peak_of_a_process", lambda *_: (1, 2))
    with cpu.Progress(8) as progress:
        row = cpu.measure(TINY, 3, 1, 0, True, progress)
    assert (row.msa["total"], row.sdpa["total"], row.ratio) == (20, 300, 15)
    assert row.gflops == flops.step_flops(TINY)["total"] / 20e6


def test_cpu_stops_at_a_wrong_result(monkeypatch):
    def wrong(inputs, shape):
        step = msa_step(inputs, shape)
        return step._replace(out=step.out + 1e-3)

    monkeypatch.setattr(cpu, "msa_step", wrong)
    monkeypatch.setattr(cpu, "peak_of_a_process", lambda *_: (1, 2))
    with pytest.raises(CheckFailed, match="out of query 0"):
        main(["cpu", "--tokens", "64", *SMALL])


def test_million_reports_every_phase_without_triton(tmp_path):
    file = tmp_path / "million.json"
    code = "import sys; sys.modules['triton'] = None"
    options = ("--tokens", 300, "--rows", 9, "--threads", 1, "--json", file)
    done = benchmark("million", *options, code=code)
    report = json.loads(file.read_text())
    seconds = {phase["name"]: phase["seconds"] for phase in report["phases"]}
    assert list(seconds) == ["inputs", "select", "attend", "align", "backward", "check"] and min(seconds.values()) > 0
    step = sum(seconds[name] for name in ("select", "attend", "align", "backward"))
    assert report["step_seconds"] == pytest.approx(step)
    assert report["peak_bytes"] == max(phase["peak_bytes"] for phase in report["phases"]) > 0
    assert len(report["checked_rows"]) <= 9 and {0, 299} <= set(report["checked_rows"])
    assert report["errors"].keys() == LIMITS["float32"].keys() and report["kl"] > 0
    assert report["shape"]["heads"] == 4 and report["shape"]["tokens"] == 300
    assert "rows agree with float64" in done.stdout


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_peak_memory_is_that_of_the_child_and_of_the_phase():
    kept = torch.ones(3 * 10**8)  # 1.2 GB
    idle, peak = cpu.peak_of_a_process(TINY, 0, 1)
    assert 0 < idle <= peak < kept.nbytes
    before = timing.peak_memory()
    assert before > kept.nbytes
    del kept
    timing.restart_peak_memory()
    assert timing.peak_memory() < before - 10**9


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("warm_up", [False, True])
def test_row_check_passes_what_is_right(dtype, warm_up):
    inputs, step, shape = grouped_step(dtype, warm_up=warm_up)
    errors = check_rows(inputs, step, shape, list(range(shape.tokens)))
    assert all(0 < errors[name] <= limit for name, limit in LIMITS[dtype].items())


@pytest.mark.parametrize("name", LIMITS["float32"])
@pytest.mark.parametrize("value", [1.01, float("nan")])
def test_row_check_finds_one_wrong_element(name, value):
    inputs, step, shape = grouped_step()
    head = 2
    row = getattr(step, name)[0, head, 150]
    row[int(row.abs().argmax())] *= value
    with pytest.raises(CheckFailed, match=f"{name} of query 150, index head {head if name == 'd_index_q' else 1}: "):
        check_rows(inputs, step, shape, [0, 20, 150])
    check_rows(inputs, step, shape, [0, 20, 149])


def test_row_check_finds_wrong_blocks():
    inputs, step, shape = grouped_step()
    right = step.block_indices[0, 3, 150].tolist()
    dropped = next(block for block in range(9) if block not in right)
    wrong = [sorted([dropped, *right[1:]]), [*right[:2], 8], [right[1], *right[1:]], [*right[1:], -1], right[::-1]]
    assert right[-1] == 9 and check_blocks(inputs, step.block_indices, shape, 150, 3).tolist() == right
    for ids in wrong:
        step.block_indices[0, 3, 150] = torch.tensor(ids)
        with pytest.raises(CheckFailed, match="query 150, index head 3: blocks"):
            check_blocks(inputs, step.block_indices, shape, 150, 3)
        with pytest.raises(CheckFailed, match="query 150, index head 3: blocks"):
            check_rows(inputs, step, shape, [150])


def test_checked_rows_hold_the_ends_and_an_early_one():
    shape = Shape(10**6)
    rows = chosen_rows(shape, 64, 0)
    assert len(rows) <= 64 and rows == sorted(set(rows)) and rows[0] == 0 and rows[-1] == 10**6 - 1
    assert sum(0 < row < shape.topk * shape.block_size for row in rows) >= 10
    assert sum(row > 10**5 for row in rows) >= 30


@pytest.mark.parametrize(
    "tokens, ratio",
    [(4096, 0.970), (8192, 1.882), (32768, 6.400), (131072, 16.000), (524288, 25.600), (1048576, 28.444)],
)
def test_eq12_column_has_the_numbers_of_the_paper(tokens, ratio):
    assert flops.eq12_ratio(Shape(tokens, **PAPER)) == pytest.approx(ratio, abs=5e-4)


@pytest.mark.parametrize("tokens, edges", [(16384, 30_547_968), (32768, 63_062_016), (1048576, 2_078_932_992)])
def test_useful_flops_count_gathered_pairs(tokens, edges):
    phases = flops.step_flops(Shape(tokens, heads=6, kv_heads=3, index_heads=3, width=5, index_width=7))
    causal = tokens * (tokens + 1) // 2
    assert phases == {
        "select": 2 * 7 * 3 * causal, "attend": 4 * 5 * 6 * edges, "align": (2 * 5 * 6 + 2 * 7 * 3) * edges,
        "forward": 2 * 7 * 3 * causal + (6 * 5 * 6 + 2 * 7 * 3) * edges, "backward": (10 * 5 * 6 + 4 * 7 * 3) * edges,
        "total": 2 * 7 * 3 * causal + (16 * 5 * 6 + 6 * 7 * 3) * edges,
    }  # fmt: skip
    assert flops.dense_flops(Shape(tokens, heads=6, width=5))["total"] == 14 * 5 * 6 * causal


def test_repeats_warm_up_once_and_fit_their_seconds():
    def runs(*times, most=3, seconds=1.0):
        left = iter(times)
        return [run["total"] for run in timing.repeated(lambda: {"total": next(left)}, most, seconds)]

    assert runs(10, 1, 2, 3, 4) == [1, 2, 3]
    assert runs(400, 1, 2, 3) == [1, 2]
    assert runs(1001, 1) == [1001]
    assert timing.medians([{"a": 1}, {"a": 9}, {"a": 2}]) == {"a": 2}


def test_progress_is_lines_without_tqdm(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    with cpu.Progress(2) as progress:
        progress.begin("one")
        progress.begin("two")
    assert capsys.readouterr().err == "1/2 one\n2/2 two\n"


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("cpu --tokens 0", "--tokens: must be at least 1, got 0"),
        ("cpu --tokens 1.5", "--tokens: must be a whole number, got '1.5'"),
        ("cpu --heads 16 --kv-heads 3", "16 heads (H), which is not a multiple of the 3 heads"),
        ("cpu --block-size 48", "block_size must be one of (16, 32, 64, 128), got 48"),
        ("cpu --repeats -1", "--repeats: must be at least 1, got -1"),
        ("cpu --threads 0", "--threads: must be at least 1, got 0"),
        ("cpu --json /no/such/folder/cpu.json", "a folder that exists, got /no/such/folder/cpu.json"),
        ("million --rows 3", "--rows: must be at least 4, got 3"),
        ("million --seed -1", "--seed: must be at least 0, got -1"),
        ("gpu --budget 0", "--budget: must be finite and above 0 seconds, got 0"),
        ("gpu --shapes a,c", "--shapes: must be of a, b, with commas between them, got 'a,c'"),
        ("gpu --tune --kernels combine", "invalid choice: 'combine'"),
    ],
)
def test_bad_options_are_refused_before_any_work(arguments, message, monkeypatch, capsys):
    for module in (cpu, sys.modules["msa_triton.benchmark.million"], measure):
        monkeypatch.setattr(module, "normal_inputs", lambda *_: pytest.fail("work was begun"))
    with pytest.raises(SystemExit) as stopped:
        main(arguments.split())
    assert stopped.value.code == 2 and message in capsys.readouterr().err


# gpu, without one


def test_no_gpu_is_said_in_a_line():
    done = benchmark("gpu", expected=2, CUDA_VISIBLE_DEVICES="", HIP_VISIBLE_DEVICES="")
    assert done.stdout == "" and done.stderr.count("\n") == 1
    assert "needs a CUDA or ROCm device" in done.stderr and "benchmark cpu` needs none" in done.stderr


def run_cases(tmp_path, *shapes, budget=600.0):
    """(exit status, report) of the gpu benchmark on CPU tensors, each part run once after its check."""
    file = tmp_path / "gpu.json"
    backends = (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION)
    status = gpu.run_cases([("tiny", shape) for shape in shapes], CPU, budget, 0, file, backends, size=64)
    return status, json.loads(file.read_text())


@pytest.fixture
def once(monkeypatch):
    """Each measurement is its warm-up."""
    monkeypatch.setattr(measure, "SECONDS", 0.0)
    monkeypatch.setattr(tune, "SECONDS", 0.0)


@interpreter
def test_gpu_case_in_the_interpreter(tmp_path, once, capsys):
    status, report = run_cases(tmp_path, TINY)
    rows = {row["part"]: row for row in report["rows"]}
    assert status == 0 and list(rows) == ["random", "overlapping", "SDPA", "warm-up"]
    assert report["gpu"] == "cpu" and report["matrix_tflops"] > 0 and report["shapes"]["tiny"]["heads"] == 2
    total = {part: row["milliseconds"]["total"] for part, row in rows.items()}
    for part, row in rows.items():
        assert row["status"] == "measured" and row["runs"] == 1 and row["bound"] is None, row
        useful = flops.dense_flops(TINY) if part == "SDPA" else flops.step_flops(TINY, part == "warm-up")
        assert row["tflops"] == pytest.approx(useful["total"] / total[part] / 1e9)
        assert row["share"] == pytest.approx(row["tflops"] / report["matrix_tflops"])
        assert (row["errors"] is None) == (part == "SDPA")
        assert row["speedup"] == (None if part == "SDPA" else total["SDPA"] / total[part])
    assert rows["random"]["milliseconds"].keys() == PHASES
    assert rows["warm-up"]["milliseconds"].keys() == PHASES - {"select"}
    assert rows["random"]["eq12_ratio"] == flops.eq12_ratio(TINY) and 1 <= rows["random"]["union"] <= 4
    assert rows["SDPA"]["backend"] in ("MATH", "FLASH_ATTENTION")
    assert rows["SDPA"]["backend"] in capsys.readouterr().out


@interpreter
def test_failed_check_is_recorded_and_makes_the_exit_status_1(tmp_path, once, monkeypatch):
    def wrong(inputs, shape, warm_up, **options):
        step = msa_step(inputs, shape, warm_up=warm_up)
        step.dq[0, :, 0] += 0 if warm_up else 1
        return step

    monkeypatch.setattr(cases, "msa_step", wrong)
    monkeypatch.setattr(gpu, "PARTS", (("random", "warm-up"),))
    status, report = run_cases(tmp_path, TINY)
    assert status == 1
    assert [row["status"] for row in report["rows"]] == ["failed", "measured"]
    assert report["rows"][0]["note"].startswith("CheckFailed: dq of query 0") and not report["rows"][0]["milliseconds"]


def test_out_of_memory_is_recorded_and_no_failure(tmp_path, once, monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 16.00 GiB")

    monkeypatch.setattr(cases, "_measure_msa", full)
    status, report = run_cases(tmp_path, TINY)
    assert status == 0
    assert [row["status"] for row in report["rows"]] == ["out of memory"] * 2 + ["measured", "out of memory"]
    assert report["rows"][0]["note"] == "CUDA out of memory. Tried to allocate 16.00 GiB"


def test_rows_are_written_as_they_come(tmp_path, once, monkeypatch):
    def stopped(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(gpu, "PARTS", (("SDPA",), ("random",)))
    monkeypatch.setattr(cases, "_measure_msa", stopped)
    with pytest.raises(KeyboardInterrupt):
        run_cases(tmp_path, TINY)
    assert [row["part"] for row in json.loads((tmp_path / "gpu.json").read_text())["rows"]] == ["SDPA"]


def test_what_the_budget_does_not_allow_is_skipped(tmp_path, once, monkeypatch, capsys):
    monkeypatch.setattr(gpu, "PARTS", (("SDPA",),))
    long = replace(TINY, tokens=2**30)
    status, report = run_cases(tmp_path, TINY, long)
    assert status == 0 and [row["status"] for row in report["rows"]] == ["measured", "skipped"]
    assert "s left" in report["rows"][1]["note"]
    assert f"skipped tiny N={2**30} SDPA: estimated" in capsys.readouterr().out
    assert all(row["status"] == "skipped" for row in run_cases(tmp_path, TINY, budget=1.0)[1]["rows"])


def test_estimates_follow_the_last_case_of_the_kind():
    estimates = cases.Estimates(1e12)
    assert estimates.seconds(("a", "SDPA"), 10**12) == cases.OVERHEAD + 10  # a tenth of the rate, one run
    assert estimates.seconds(("a", "random"), 10**12) == cases.OVERHEAD + 20  # and a check
    estimates.record(("a", "random"), 10**12, 500.0)
    assert estimates.seconds(("a", "random"), 10**13) == cases.OVERHEAD + 10
    assert estimates.seconds(("b", "random"), 10**12) == cases.OVERHEAD + 20


@pytest.mark.parametrize(
    "device, known",
    [
        ("NVIDIA H200", "H200"), ("NVIDIA H100 80GB HBM3", "H100"), ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA B200", "B200"), ("NVIDIA GH200 480GB", None), ("NVIDIA H100 PCIe", None),
        ("NVIDIA A100-SXM4-40GB", None), ("NVIDIA GeForce RTX 4090", None),
    ],
)  # fmt: skip
def test_only_gpus_with_known_rates_have_bounds(device, known):
    assert measure.known_gpu(device) == known


@interpreter
@pytest.mark.parametrize("heads, forward", [(4, ("forward_key", "combine")), (16, ("forward_query",))])
def test_bound_is_the_sum_over_the_kernels_of_the_step(heads, forward):
    shape = Shape(1024, heads=heads, kv_heads=1, width=32, index_width=32, block_size=16, topk=8, dtype="bfloat16")
    inputs = normal_inputs(shape, 0)
    ids = select_blocks(inputs.index_q, inputs.index_k, topk=8, block_size=16)
    queries, index_queries = 128 // heads, 256 // heads
    kernels = cost.bounds(
        1024, "H200", H=heads, Hkv=1, Hidx=1, D=32, Di=32, topk=8, block_size=16,
        union=measure.union(ids, queries, 16), index_union=measure.union(ids, index_queries, 16),
    )  # fmt: skip
    found = measure.bound_milliseconds("H200", shape, inputs, ids)
    assert found["select"] == 1e3 * kernels["select"].seconds
    assert found["attend"] == pytest.approx(1e3 * sum(kernels[name].seconds for name in forward))
    used = set(forward) | set(kernels) - {"forward_query", "forward_key", "combine"}
    twice = 2 * kernels["normalizer"].seconds  # the normalizer runs three times
    assert found["total"] == pytest.approx(1e3 * (sum(kernels[name].seconds for name in used) + twice))
    assert found["total"] == pytest.approx(sum(found[phase] for phase in ("select", "attend", "align", "backward")))


@interpreter
def test_overlapping_selection_has_smaller_unions():
    shape = Shape(4096, heads=1, width=1, index_heads=1, index_width=64, block_size=16, topk=8)

    def union_of(make):
        inputs = make(shape, 0, CPU)
        ids = select_blocks(inputs.index_q, inputs.index_k, topk=8, block_size=16)
        return measure.union(ids, 8, 16)

    assert union_of(measure.overlapping_inputs) < 14 < 35 < union_of(measure.normal_inputs)
    ids = torch.tensor([[0, -1], [0, 1], [0, 2], [1, 2]]).repeat_interleave(16, 0)[None, None]
    assert measure.union(ids, 32, 16) == 2.5  # {0, 1} and {0, 1, 2}


def test_forced_tile_is_used_while_it_is_forced():
    sizes = dict(block=128, row_width=128, key_width=128)
    before = config.choose_tile("dq", "sm_90", 2, **sizes)
    with config.forced("dq", Tile(32, 32, 4, 1)):
        assert config.choose_tile("dq", "sm_90", 2, **sizes) == Tile(32, 32, 4, 1)
        assert config.choose_tile("dq", "interpreter", 2, **sizes) == Tile(32, 32, 4, 1)
        assert config.choose_tile("dkdv", "sm_90", 2, **sizes) == config.CANDIDATES["dkdv"][0]
    with pytest.raises(ValueError, match="no tile of the dq kernel fits"), config.forced("dq", Tile(4096, 128, 8, 2)):
        config.choose_tile("dq", "sm_90", 2, **sizes)
    assert config.choose_tile("dq", "sm_90", 2, **sizes) == before != Tile(32, 32, 4, 1)


@interpreter
def test_tune_in_the_interpreter(tmp_path, once, monkeypatch, capsys):
    fits, too_large = Tile(32, 16, 4, 1), Tile(4096, 16, 8, 2)
    monkeypatch.setitem(config.CANDIDATES, "dq", (fits, too_large))
    launched = []
    original = launch.launch
    monkeypatch.setattr(
        launch, "launch", lambda kernel, programs, *rest, **constants: (
            launched.append((kernel.fn.__name__, constants.get("num_warps"))),
            original(kernel, programs, *rest, **constants),
        )
    )  # fmt: skip
    file = tmp_path / "tune.json"
    assert tune.run([("tiny", TINY), ("tiny", replace(TINY, tokens=128))], ["dq"], CPU, 600.0, 0, file) == 0
    report = json.loads(file.read_text())
    assert report["target"] == "interpreter"
    rows = {(row["rows"], row["warps"], row["stages"], row["listed"]): row for row in report["rows"]}
    assert list(rows) == [(32, 4, 1, True), (4096, 8, 2, True), (32, 8, 1, False), (32, 4, 2, False)]
    assert all(row["tokens"] == 64 and row["kernel"] == "dq" for row in report["rows"])
    assert rows[32, 4, 1, True]["milliseconds"] > 0 and rows[32, 4, 1, True]["error"] is None
    assert rows[4096, 8, 2, True]["milliseconds"] is None
    assert "no tile of the dq kernel fits" in rows[4096, 8, 2, True]["error"]
    (best,) = report["best"]
    assert best["milliseconds"] == min(row["milliseconds"] for row in report["rows"] if row["milliseconds"])
    assert {warps for name, warps in launched if name == "dq_kernel"} == {4, 8}
    assert '"dq": Tile(' in capsys.readouterr().out


@interpreter
@pytest.mark.parametrize("kernel", tune.KERNELS)
def test_every_kernel_with_a_choice_can_be_timed(kernel, once):
    inputs = normal_inputs(TINY, 0)
    call = tune._calls(inputs, msa_step(inputs, TINY), TINY)[kernel]
    with config.forced(kernel, config.CANDIDATES[kernel][0]):
        assert tune.kernel_milliseconds(kernel, call, "interpreter", CPU) > 0


def test_tune_without_time_left_skips(tmp_path, monkeypatch):
    monkeypatch.setattr(tune, "msa_step", lambda *_, **__: msa_step(normal_inputs(TINY, 0), TINY))
    monkeypatch.setattr(tune, "_calls", lambda *_: {"dq": lambda: pytest.fail("work was begun")})
    tune.run([("tiny", TINY)], ["dq"], CPU, 1.0, 0, tmp_path / "tune.json")
    rows = json.loads((tmp_path / "tune.json").read_text())["rows"]
    assert rows and all(row["error"].startswith("skipped") for row in rows)
