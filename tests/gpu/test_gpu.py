"""The compiled kernels on a GPU: numbers, repeatability, tiles, lengths, streams and devices.

`python -m pytest tests/gpu` spends most of its time compiling; with pytest-xdist, `-n 8` shares that out. The kernels
must not be interpreted: leave TRITON_INTERPRET unset or 0.
"""

import os
from collections import Counter
from functools import partial

import cases
import compare
import pytest
import torch

import msa_triton
from msa_triton import config, launch, msa_attention, sparse_attention
from msa_triton.config import Tile

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the kernels are interpreted"),
]

DEVICE = "cuda"
HALF, BFLOAT = torch.float16, torch.bfloat16
MANY = dict(H=32, Hkv=2, Hidx=2, Hik=1)  # 16 query heads share a selection, as in the paper
# sizes, options
CASES = {
    "float32": (dict(B=2, N=301, D=64, Dv=64, Di=64), dict(topk=3, block_size=32)),
    "float32 warm-up": (dict(B=2, N=301, D=64, Dv=64, Di=64), dict(topk=None, block_size=32)),
    "float16 documents": (
        dict(B=1, N=397, H=6, Hkv=2, Hidx=6, Hik=2, D=96, Dv=96, Di=32, dtype=HALF),
        dict(topk=2, block_size=64, cu_seqlens=[0, 77, 77, 200, 201, 397], init_blocks=1),
    ),
    "bfloat16": (dict(B=1, N=1101, D=128, Dv=128, Di=128, dtype=BFLOAT, **MANY), dict(topk=4, block_size=128)),
    "bfloat16 warm-up documents": (
        dict(B=1, N=601, D=128, Dv=128, Di=128, dtype=BFLOAT, **MANY),
        dict(topk=None, block_size=128, cu_seqlens=torch.tensor([0, 300, 601])),
    ),
}  # fmt: skip
RUNS = 20
LENGTHS = [*range(640, 1600, 96), *range(645, 1600, 96)]  # 20, of which half divide by 16
# Of one kernel: the value and the gradient of the KL, or the sums for gradients of several widths. Lengths and counts
# make none: Triton is told not to specialise on them.
MOST_VARIANTS = 4
FAR_SIZE = 2**31


def on_device(inputs):
    return {name: tensor.to(DEVICE) for name, tensor in inputs.items()}


def random_inputs(seed=0, **sizes):
    return on_device(compare.random_inputs(seed, **sizes))


def run(inputs, options, dout, schedule="auto"):
    return compare.run(compare.with_backend("triton", schedule=schedule), inputs, options, dout)


def upstream(inputs):
    q, v = inputs["q"], inputs["v"]
    return compare.random_like(torch.empty(*q.shape[:3], v.shape[3]), 1, q.dtype).to(DEVICE)


def schedules(options):
    return ("query", "key") if options["topk"] else ("query",)


def dense_in_float64(inputs, options, dout):
    return compare.run("dense", {name: tensor.double() for name, tensor in inputs.items()}, options, dout.double())


@pytest.mark.parametrize("name", CASES)
def test_matches_the_dense_reference(name):
    """Within 1e-5 and 1e-4 in float32, which a product in TF32 would miss by far; 2e-2 in half precision."""
    sizes, options = CASES[name]
    inputs = random_inputs(**sizes)
    dout = upstream(inputs)
    expected = dense_in_float64(inputs, options, dout)
    for schedule in schedules(options):
        actual = run(inputs, options, dout, schedule)
        compare.assert_same_run(actual, expected, inputs["q"].dtype, f"{name} {schedule}")


def test_nothing_reads_what_it_was_not_given():
    """NaN around the inputs in their storage and in all new memory changes no bit."""
    sizes, options = CASES["float32"]
    inputs = random_inputs(**sizes)
    dout = upstream(inputs)
    with torch.device(DEVICE):
        surrounded = {name: cases.inside(tensor, margin=(0, 1, 16, 16)) for name, tensor in inputs.items()}
    for schedule in schedules(options):
        expected = run(inputs, options, dout, schedule)
        with cases.nan_in_new_memory():
            actual = run(surrounded, options, dout, schedule)
        cases.assert_equal_runs(actual, expected, schedule)


@pytest.mark.parametrize("schedule", ["query", "key"])
def test_repeats_bit_for_bit_while_another_stream_is_busy(schedule):
    sizes, options = CASES["bfloat16"]
    inputs = random_inputs(**sizes)
    dout = upstream(inputs)
    expected = run(inputs, options, dout, schedule)
    stream, filler = torch.cuda.Stream(), torch.ones(2048, 2048, device=DEVICE)
    for repeat in range(RUNS):
        with torch.cuda.stream(stream):
            for _ in range(20 * (repeat % 2)):
                filler @ filler
        cases.assert_equal_runs(run(inputs, options, dout, schedule), expected, f"run {repeat}")


def test_runs_on_the_current_stream():
    """A call in a stream waits for what that stream does: the inputs are overwritten behind a long queue."""
    sizes, options = CASES["float32"]
    inputs = random_inputs(**sizes)
    dout, filler = upstream(inputs), torch.ones(4096, 4096, device=DEVICE)
    expected = run(inputs, options, dout)
    late = {name: torch.zeros_like(tensor) for name, tensor in inputs.items()}
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(50):
            filler @ filler
        for name in late:
            late[name].copy_(inputs[name])
        actual = run(late, options, dout)
        cases.assert_equal_runs(actual, expected)


@pytest.mark.parametrize("warps, stages", [(1, 1), (4, 2), (8, 3)])
def test_warps_and_stages_change_no_result(monkeypatch, warps, stages):
    """A missing barrier, or a tile overwritten while it is read, shows with some numbers of warps or stages only."""
    tiles = {name: (Tile(64, 32, warps, stages),) for name in config.CANDIDATES}
    monkeypatch.setattr(config, "CANDIDATES", tiles)
    monkeypatch.setattr(config, "FIRST", {})
    monkeypatch.setattr(config, "FLOAT32", {})
    options = dict(topk=3, block_size=32)
    inputs = random_inputs(B=1, N=157, D=32, Dv=32, Di=32)
    dout = upstream(inputs)
    expected = dense_in_float64(inputs, options, dout)
    for schedule in schedules(options):
        compare.assert_same_run(run(inputs, options, dout, schedule), expected, torch.float32, f"{schedule}")


def test_lengths_do_not_compile_kernels_again(monkeypatch):
    """20 lengths leave at most MOST_VARIANTS variants of a kernel."""
    import triton

    compiled = Counter()
    hook = lambda **call: compiled.update([call["fn"].name.split(".")[-1]])  # noqa: E731
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", hook)
    options = dict(topk=2, block_size=16)
    for length in LENGTHS:
        inputs = random_inputs(B=1, N=length, H=2, Hkv=1, Hidx=1)
        for schedule in schedules(options):
            run(inputs, options, upstream(inputs), schedule)
    assert compiled and max(compiled.values()) <= MOST_VARIANTS, compiled


@pytest.mark.parametrize("axis", [0, 1, 2, 3])
def test_rows_more_than_2_to_the_31_elements_apart(axis):
    """Inputs spread over 4 GiB give what their compact copies give."""
    sizes = dict(B=3, N=20, H=3, Hkv=3, Hidx=3, Hik=3)
    near = random_inputs(dtype=HALF, **sizes)
    near["dout"] = upstream(near)
    stride = FAR_SIZE // (near["q"].shape[axis] - 1) + 64
    storage, far, used = torch.empty(FAR_SIZE + 10**6, dtype=HALF, device=DEVICE), {}, 0
    for name, tensor in near.items():
        strides = list(tensor.transpose(axis, 0).contiguous().transpose(axis, 0).stride())
        strides[axis] = stride
        far[name] = storage.as_strided(tensor.shape, strides, used).copy_(tensor)
        used += tensor.numel()
    assert far["q"].stride(axis) * (far["q"].shape[axis] - 1) >= FAR_SIZE
    options = dict(topk=2, block_size=16)
    expected = dense_in_float64(near, options, near["dout"])
    for schedule in schedules(options):
        compare.assert_same_run(run(far, options, far["dout"], schedule), expected, HALF, f"axis {axis} {schedule}")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_second_device_while_the_first_is_current():
    sizes, options = CASES["float32"]
    inputs = random_inputs(**sizes)
    dout = upstream(inputs)
    expected = run(inputs, options, dout)
    elsewhere = {name: tensor.to("cuda:1") for name, tensor in inputs.items()}
    assert torch.cuda.current_device() == 0
    actual = run(elsewhere, options, dout.to("cuda:1"))
    assert all(tensor.device == torch.device("cuda:1") for tensor in actual.values())
    cases.assert_equal_runs(actual, expected)


def test_auto_takes_the_kernels_and_compiles():
    sizes, options = CASES["float32"]
    inputs = [tensor.requires_grad_() for tensor in random_inputs(**sizes).values()]
    torch._dynamo.reset()
    compiled = torch.compile(msa_attention, fullgraph=True, backend="aot_eager")
    results = []
    for call in (partial(msa_attention, backend="triton"), msa_attention, compiled):
        result = call(*inputs, **options)
        results.append([*result, *torch.autograd.grad(result.out.sum() + result.kl_loss, inputs)])
    for other in results[1:]:
        for left, right in zip(other, results[0], strict=True):
            compare.assert_equal(left, right)
    assert launch.target_of(inputs[0]) != "interpreter"


def test_layer_trains_under_autocast():
    torch.manual_seed(0)
    layer = msa_triton.MSAttention(256, heads=4, kv_heads=2, topk=2, block_size=32).to(DEVICE)
    hidden = torch.randn(2, 200, 256, device=DEVICE, requires_grad=True)
    with torch.autocast(DEVICE, BFLOAT):
        out, kl_loss = layer(hidden)
    (out.float().square().mean() + kl_loss).backward()
    assert out.dtype == BFLOAT and hidden.grad.isfinite().all()
    for name, parameter in layer.named_parameters():
        assert parameter.grad.dtype == torch.float32 and parameter.grad.isfinite().all(), name


def test_tensors_on_two_devices_are_refused():
    q, k, v = (random_inputs(N=20)[name] for name in ("q", "k", "v"))
    with pytest.raises(ValueError, match="one device, got q cuda:0, k cpu, v cuda:0"):
        sparse_attention(q, k.cpu(), v, None, block_size=16)
