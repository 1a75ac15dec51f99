"""The Triton kernels in the interpreter, against float64: shapes, precision, tasks, working ranges, tiles of GPUs."""

import functools
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cases import (
    BLOCK,
    OPTIONS,
    RESULTS,
    TOKENS,
    all_inside,
    assert_close_runs,
    assert_equal_runs,
    lists,
    nan_in_new_memory,
    plain_attention,
    random_call,
    run_double,
    selected_tokens,
    upstream_gradients,
    usual_inputs,
)
from compare import (
    GRADIENTS,
    IMPLEMENTATIONS,
    assert_close,
    assert_error_budget,
    assert_same_run,
    random_inputs,
    run,
    run_reference,
    with_backend,
)

schedule = pytest.importorskip("msa_triton.schedule")
pytestmark = pytest.mark.skipif("triton" not in IMPLEMENTATIONS, reason="the kernels are compiled for a GPU here")

KERNELS = {name: with_backend("triton", schedule=name) for name in ("query", "key")}
LAUNCHERS = ("select", "forward", "backward", "index_loss", "normalizer")
every_schedule = pytest.mark.parametrize("forward", KERNELS)

# Sizes of `random_inputs`, options of `msa_attention`.
SHAPES = {
    "three heads a group": (dict(B=2, N=37, Dv=24, Di=8), dict(topk=2)),
    "one token": (dict(B=3, N=1, H=3, Hkv=1, Hidx=1, D=8, Dv=40), dict(topk=2)),
    "sixteen wide heads": (dict(B=1, N=33, H=16, Hkv=1, Hidx=1, D=128, Dv=80, Di=100), dict(topk=2, reduction="none")),
    "twenty heads": (dict(B=1, N=20, H=20, Hkv=1, Hidx=1, D=12), dict(topk=1)),
    "seven heads": (dict(B=1, N=77, H=14, Hkv=2, Hidx=2, D=48, Dv=8), dict(topk=3, index_scale=0.3)),
    "index heads of their own": (dict(B=1, N=40, H=4, Hkv=1, Hidx=4, Hik=2), dict(topk=2, scale=0.5)),
    "index head for each KV head": (dict(B=2, N=20, H=4, Hkv=4, Hidx=4, Hik=4), dict(topk=2, reduction="none")),
    "documents": (dict(B=1, N=77), dict(topk=2, cu_seqlens=[0, 0, 9, 40, 40, 77], reduction="none")),
    "documents and forced blocks": (
        dict(B=1, N=77, H=5, Hkv=1, Hidx=1), dict(topk=4, local_blocks=2, init_blocks=1, cu_seqlens=[0, 7, 77]),
    ),
    "nothing forced": (dict(B=1, N=80, H=2, Hkv=1, Hidx=1), dict(topk=3, local_blocks=0)),
    "blocks of 32": (dict(B=1, N=150, H=2, Hkv=1, Hidx=1), dict(topk=4, block_size=32, init_blocks=2)),
    "blocks of 64, more than there are": (dict(B=1, N=100, H=4, Hkv=2, Di=64), dict(topk=5, block_size=64)),
    "blocks of 128": (dict(B=1, N=300, H=2, Hkv=1, Hidx=1, D=20, Dv=33, Di=17), dict(topk=2, block_size=128)),
    "warm-up": (dict(B=2, N=40, Hidx=6, Hik=2, Dv=24), dict(topk=None)),
    "warm-up of documents": (
        dict(B=1, N=77, H=5, Hkv=1, Hidx=1), dict(topk=None, cu_seqlens=[0, 20, 20, 77], reduction="none"),
    ),
    "warm-up of blocks of 64": (dict(B=1, N=130, H=2, Hkv=1, Hidx=1, D=80), dict(topk=None, block_size=64)),
}  # fmt: skip
SPARSE = [name for name, (_, options) in SHAPES.items() if options["topk"] is not None]


@functools.cache
def expected_of(shape):
    """Inputs, options, upstream gradients, and the result in float64."""
    sizes, options = SHAPES[shape]
    inputs, options = random_inputs(0, **sizes), {"block_size": BLOCK, **options}
    dout, dkl = upstream_gradients(inputs, options)
    return inputs, options, dout, dkl, run_double(inputs, options, dout, dkl)


@pytest.mark.parametrize("shape", SHAPES)
def test_every_result_agrees_with_float64(shape):
    inputs, options, dout, dkl, reference = expected_of(shape)
    actual = run("triton", inputs, options, dout, dkl)
    assert_same_run(actual, reference, torch.float32, shape)
    floats = [actual[name] for name in RESULTS if name != "ids"]
    assert all(tensor.dtype == torch.float32 and tensor.is_contiguous() for tensor in floats)


@every_schedule
@pytest.mark.parametrize("shape", SPARSE)
def test_both_forward_schedules_agree_with_float64(shape, forward):
    inputs, options, _, _, reference = expected_of(shape)
    place = {name: options[name] for name in ("block_size", "scale", "cu_seqlens") if name in options}
    tensors = [inputs[name] for name in ("q", "k", "v")]
    out, lse = KERNELS[forward].sparse_attention(*tensors, reference["ids"], **place)
    assert_close(out, reference["out"], 1e-5, f"{shape}: out")
    assert_close(lse, reference["lse"], 1e-5, f"{shape}: lse")


@pytest.mark.parametrize("seed", [2, 8, 15, 22, 33, 40])
def test_random_draws_agree_with_the_naive_version(seed):
    inputs, options, dout, dkl = random_call(seed, block_sizes=(16, 32), most_rows=2)
    reference = run_reference(inputs, options, dout, dkl)
    assert_same_run(run("triton", inputs, options, dout, dkl), reference, torch.float32, f"seed {seed}, {options}:")


@pytest.mark.parametrize("seed", range(54))
def test_random_draws_of_one_row_agree_with_float64(seed):
    inputs, options, dout, dkl = random_call(seed, block_sizes=(16,), most_rows=1)
    reference = run_double(inputs, options, dout, dkl)
    assert_same_run(run("triton", inputs, options, dout, dkl), reference, torch.float32, f"seed {seed}, {options}:")


MIXED_LISTS = """
import msa_triton, torch
from cases import lists
from compare import assert_close, random_inputs
from msa_ref import dense
x = random_inputs(0, B=1, N=77, H=2, Hkv=1, Hidx=1)
q, k, v = (1e4 / 64) * x["q"], 4 * x["k"], x["v"]
rows = [([], [query // 16], [0, query // 16] if query > 15 else [0])[query % 3] for query in range(77)]
for schedule in ("query", "key"):
    ids = lists(*rows, heads=1)
    out, lse = msa_triton.sparse_attention(q, k, v, ids, block_size=16, backend="triton", schedule=schedule)
    exact, exact_lse = dense.sparse_attention(q.double(), k.double(), v.double(), ids, block_size=16)
    assert exact_lse[exact_lse.isfinite()].abs().max() > 1000
    assert_close(out, exact, 1e-3)  # a logit of 4000 is known to 2e-4 in float32
    assert_close(lse, exact_lse, 1e-5)
    assert out[:, :, ::3].eq(0).all()
"""


def test_empty_short_and_full_lists_in_one_call_end_in_time():
    """In a process of its own: a loop that waits for a tile that never comes would not end."""
    tests = Path(__file__).parent
    environment = os.environ | {"PYTHONPATH": f"{tests}:{tests.parent}"}
    subprocess.run([sys.executable, "-c", MIXED_LISTS], env=environment, timeout=60, check=True)


def plain_index_loss(q, k, index_q, index_k, mask):
    """[B, Hidx, N], every intermediate in the dtype of the inputs."""
    heads, index_heads = q.shape[1], index_q.shape[1]
    k = k.repeat_interleave(heads // k.shape[1], 1)
    index_k = index_k.repeat_interleave(index_heads // index_k.shape[1], 1)
    index_mask = mask.unflatten(1, (index_heads, -1))[:, :, 0]
    teacher = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~mask, -torch.inf).softmax(-1)
    teacher = teacher.unflatten(1, (index_heads, -1)).mean(2).detach()
    logit = (index_q @ index_k.mT * index_q.shape[-1] ** -0.5).masked_fill(~index_mask, -torch.inf)
    student = logit.log_softmax(-1).masked_fill(~index_mask, 0)
    return (torch.xlogy(teacher, teacher) - teacher * student).sum(-1)


@every_schedule
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_low_precision_errs_at_most_twice_as_much_as_a_plain_version(dtype, forward):
    inputs = random_inputs(0, B=1, N=TOKENS, H=5, Hkv=1, Hidx=1, D=64, Dv=48, Di=24, dtype=dtype)
    inputs["index_q"] /= 4
    options = OPTIONS | {"reduction": "none"}
    dout, dkl = upstream_gradients(inputs, options)
    reference = run_reference(inputs, options, dout, dkl)
    actual = run(KERNELS[forward], inputs, options, dout, dkl)
    assert_same_run(actual, reference, dtype)
    mask = selected_tokens(actual["ids"], inputs["q"], BLOCK)
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in inputs.items()}
    q, k, v, index_q, index_k = leaves.values()
    out, kl = plain_attention(q, k, v, mask), plain_index_loss(q, k, index_q, index_k, mask)
    plain = [out, kl, *torch.autograd.grad((out, kl), leaves.values(), (dout, dkl.to(dtype)))]
    for name, value in zip(("out", "kl", *GRADIENTS), plain, strict=True):
        assert_error_budget(actual[name], value, reference[name], f"{dtype}: {name}")


def recorded(monkeypatch, name, *modules):
    """A list that fills with the results of a function of `schedule`, called by the modules."""
    function, results = getattr(schedule, name), []

    def call(*arguments):
        result = function(*arguments)
        results.append(list(result) if name == "ranges" else result)
        return results[-1]

    for module in modules:
        monkeypatch.setattr(importlib.import_module(f"msa_triton.{module}"), name, call)
    return results


@every_schedule
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_repeated_run_gives_the_same_bits(monkeypatch, dtype, forward):
    monkeypatch.setattr(schedule, "TASK_EDGES", 32)
    inputs = usual_inputs("triton", N=TOKENS, dtype=dtype)
    first, second = (run(KERNELS[forward], inputs, OPTIONS) for _ in range(2))
    assert_equal_runs(second, first)


@pytest.mark.parametrize("topk", [2, None])
def test_a_block_that_every_query_chose_is_shared_between_tasks(monkeypatch, topk):
    inputs = random_inputs(0, B=1, N=TOKENS, H=6, Hkv=2, Hidx=2, Dv=24)
    options = OPTIONS | {"topk": topk, "init_blocks": 1, "reduction": "none"}
    dout, dkl = upstream_gradients(inputs, options)
    whole = run("triton", inputs, options, dout, dkl)
    monkeypatch.setattr(schedule, "TASK_EDGES", 32)
    found = recorded(monkeypatch, "key_tasks", "backward", "index_loss")
    shared = run("triton", inputs, options, dout, dkl)
    assert [work.offsets[:, 1].unique().tolist() for work in found] == [[3], [3]]  # block 0: 77 queries, 32 a task
    assert_same_run(shared, run_double(inputs, options, dout, dkl), torch.float32)
    assert_close_runs(shared, whole, names=("out", "lse", "kl", "ids", "dq", "d_index_q"))


@every_schedule
def test_little_working_memory_gives_the_same_results(monkeypatch, forward):
    inputs = random_inputs(0, B=1, N=40, H=4, Hkv=2, Hidx=2, Hik=2)
    dout, dkl = upstream_gradients(inputs, OPTIONS)
    at_once = run(KERNELS[forward], inputs, OPTIONS, dout, dkl)
    monkeypatch.setattr(schedule, "WORKING_BYTES", 6000)
    found = recorded(monkeypatch, "ranges", "forward", "backward", "index_loss")
    in_ranges = run(KERNELS[forward], inputs, OPTIONS, dout, dkl)
    assert [len(part) for part in found] == ([4] if forward == "key" else []) + [2, 2]
    assert_close_runs(in_ranges, at_once)


@pytest.mark.parametrize("target, dtype, sizes, options", [
    ("sm_90", torch.float16, dict(N=140, H=16, D=128, Dv=128, Di=128), dict(block_size=128)),
    ("sm_90", torch.float32, dict(N=50, H=3, D=40), dict(block_size=16, init_blocks=1)),
    ("sm_120", torch.float32, dict(N=140, H=2, D=100, Di=64), dict(block_size=128)),
    ("gfx942", torch.float32, dict(N=40, H=40, D=16), dict(block_size=16)),
    ("sm_80", torch.bfloat16, dict(N=70, H=5, D=64), dict(block_size=64, topk=None)),
], ids=lambda value: str(value))  # fmt: skip
@every_schedule
def test_tiles_of_gpus_give_the_same_results(monkeypatch, forward, target, dtype, sizes, options):
    options = {"topk": 2, "reduction": "none", **options}
    if forward == "key" and options["topk"] is None:
        pytest.skip("the dense warm-up has one schedule")
    for name in LAUNCHERS:
        monkeypatch.setattr(importlib.import_module(f"msa_triton.{name}"), "target_of", lambda tensor: target)
    inputs = random_inputs(0, B=1, Hkv=1, Hidx=1, dtype=dtype, **sizes)
    dout, dkl = upstream_gradients(inputs, options)
    actual = run(KERNELS[forward], inputs, options, dout, dkl)
    assert_same_run(actual, run_double(inputs, options, dout, dkl), dtype, f"{target}:")


def test_key_major_forward_of_hostile_lists():
    """Empty rows, unused slots first, blocks of another document, NaN around the inputs and in new memory."""
    inputs = usual_inputs("triton", N=TOKENS)
    own = [query // BLOCK if query < 40 else 3 + (query - 40) // BLOCK for query in range(TOKENS)]
    rows = [[] if query % 7 == 3 else [-1, 0, block] if block > 2 else [block, -1] for query, block in enumerate(own)]
    rows[50], rows[60] = [0, 1], [-1, 4, 3]
    options = OPTIONS | {"cu_seqlens": [0, 40, TOKENS], "reduction": "none"}
    table = lists(*rows, heads=1)
    clean = run(KERNELS["key"], inputs, options, block_indices=table)
    assert_same_run(clean, run_double(inputs, options, block_indices=table), torch.float32)
    assert clean["out"][:, :, 50].eq(0).all() and clean["lse"][:, :, 50].eq(-torch.inf).all()
    with nan_in_new_memory():
        assert_equal_runs(run(KERNELS["key"], all_inside(inputs), options, block_indices=table), clean)


@pytest.mark.parametrize("last", [0, 14, 16, 75])
def test_key_major_forward_never_looks_ahead(last):
    place = {"block_size": BLOCK}
    inputs, changed = (usual_inputs("triton", seed, N=TOKENS) for seed in (0, 1))
    for name in inputs:
        changed[name][:, :, : last + 1] = inputs[name][:, :, : last + 1]
    results = []
    for tensors in (inputs, changed):
        q, k, v, index_q, index_k = tensors.values()
        ids = KERNELS["key"].select_blocks(index_q, index_k, topk=2, **place)
        results.append(dict(zip(("out", "lse"), KERNELS["key"].sparse_attention(q, k, v, ids, **place), strict=True)))
    assert_equal_runs(*results, names=("out", "lse"), tokens=slice(0, last + 1))




@every_schedule
@pytest.mark.parametrize("topk", [1, 2])
def test_a_query_that_is_nan_stays_so_and_alone(forward, topk):
    """Also where the mask leaves a block no number: the maximum skips NaN."""
    inputs = usual_inputs("triton", N=37)
    options = OPTIONS | {"topk": topk, "reduction": "none"}
    clean = run(KERNELS[forward], inputs, options)
    inputs["q"][:, :, [5, 17, 31]] = torch.nan
    result = run(KERNELS[forward], inputs, options, block_indices=clean["ids"])
    others = [token for token in range(37) if token not in (5, 17, 31)]
    for name in ("out", "lse", "kl"):
        assert result[name][:, :, [5, 17, 31]].isnan().all(), name
        assert torch.equal(result[name][:, :, others], clean[name][:, :, others]), name


@pytest.mark.parametrize("large", [torch.nan, torch.inf, 1e6])
def test_upstream_gradients_of_one_document_do_not_change_another(large):
    """In float16 products they are taken relative to the largest of a task, and a task has one block."""
    inputs = usual_inputs("triton", N=40, dtype=torch.float16)
    options = OPTIONS | {"cu_seqlens": [0, 11, 40], "reduction": "none"}
    dkl = torch.full(inputs["index_q"].shape[:3], 1e-3)
    usual = run("triton", inputs, options, dkl=dkl)
    dkl[:, :, 20] = large
    result = run("triton", inputs, options, dkl=dkl)
    for name in ("d_index_q", "d_index_k"):
        assert torch.equal(result[name][:, :, :11], usual[name][:, :, :11]), name
        assert not torch.equal(result[name][:, :, 11:], usual[name][:, :, 11:]), name
