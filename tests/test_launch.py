"""What the launchers ask for: grids, constants, tiles, addresses far apart; mostly recorded and not run."""

import os
import subprocess
import sys
from pathlib import Path

import compare
import pytest
import torch
from kernel_kinds import KERNELS

import msa_triton  # noqa: F401  before Triton: it chooses the interpreter where there is no GPU
from msa_triton import config, index_kl_loss, launch, select_blocks, sparse_attention
from msa_triton.config import CANDIDATES, SHARED_LIMIT, SMALLEST_LIMIT, Tile, choose_tile, padded

triton = pytest.importorskip("triton")
tl = triton.language

MOST = 2**31 - 1
OPTIONS = {"block_size": 16, "backend": "triton"}


def record(inputs, topk=2, schedules=("query", "key"), target="sm_90", **options):
    """The launches of selection, attention by each schedule, KL, and both backward passes."""
    q, k, v, index_q, index_k = (inputs[name].detach().requires_grad_() for name in compare.INPUTS)
    options = {**OPTIONS, **options}
    with launch.recording(target) as launches:
        ids = topk and select_blocks(index_q, index_k, topk=topk, **options)
        for schedule in schedules:
            out, lse = sparse_attention(q, k, v, ids, schedule=schedule, **options)
        kl = index_kl_loss(q, k, lse, index_q, index_k, ids, **options)
        torch.autograd.grad(out.sum() + kl, (q, k, v, index_q, index_k))
    return launches


def names_of(launches) -> set[str]:
    return {one.kernel.__name__ for one in launches}


def argument(one, name):
    """An argument of a launch by name, None if the kernel has none of this name."""
    named = dict(zip(one.kernel.arg_names, one.arguments, strict=False))
    return named.get(name)


# Grids


@pytest.mark.parametrize("batch, heads", [(70_000, 1), (1, 70_000)])
def test_grids_of_many_heads(batch, heads):
    count = dict(H=heads, Hkv=heads, Hidx=heads, Hik=heads)
    inputs = compare.random_inputs(0, B=batch, N=16, D=2, Dv=2, Di=2, dtype=torch.float16, **count)
    launches = record(inputs, topk=1)
    assert names_of(launches) == KERNELS
    assert all(0 < one.programs <= MOST for one in launches)
    assert max(one.programs for one in launches) >= 70_000  # more than the second and third axis of a grid can have


def test_grids_of_many_documents():
    inputs = compare.random_inputs(0, B=1, N=70_000, H=1, Hkv=1, Hidx=1, D=2, Dv=2, Di=2, dtype=torch.float16)
    offsets = list(range(70_001))
    launches = record(inputs, cu_seqlens=offsets) + record(inputs, None, ("auto",), cu_seqlens=offsets)
    assert names_of(launches) == KERNELS
    assert all(0 < one.programs <= MOST for one in launches)
    assert max(one.programs for one in launches) >= 70_000


class Grid:
    """Stands for a kernel and keeps the grid that it is launched on."""

    __name__ = "grid"

    def __getitem__(self, grid):
        self.grid = grid
        return lambda *arguments, **constants: None


def test_a_grid_has_one_axis_and_an_end():
    kernel = Grid()
    for programs in (5, MOST):
        launch.launch(kernel, programs, torch.zeros(1))
        assert kernel.grid == (programs,)
    for recorded in (False, True):
        with pytest.raises(ValueError, match="grid would need 2147483648 programs, a grid has at most 2147483647"):
            if recorded:
                with launch.recording("sm_90"):
                    launch.launch(kernel, MOST + 1, torch.zeros(1))
            launch.launch(kernel, MOST + 1, torch.zeros(1))


def test_every_operation_refuses_a_grid_that_is_too_large(monkeypatch):
    q, k, v, index_q, index_k = (t.requires_grad_() for t in compare.random_inputs(0, B=1, N=20, D=2, Dv=2).values())
    with launch.recording("sm_90"):
        ids = select_blocks(index_q, index_k, topk=2, **OPTIONS)
        out, lse = sparse_attention(q, k, v, ids, **OPTIONS)
        kl = index_kl_loss(q, k, lse, index_q, index_k, ids, **OPTIONS)
    monkeypatch.setattr(launch, "MOST_PROGRAMS", 1)
    for call in (
        lambda: select_blocks(index_q, index_k, topk=2, **OPTIONS),
        lambda: sparse_attention(q, k, v, ids, schedule="query", **OPTIONS),
        lambda: sparse_attention(q, k, v, ids, schedule="key", **OPTIONS),
        lambda: index_kl_loss(q, k, lse, index_q, index_k, ids, **OPTIONS),
        out.sum().backward,
        kl.backward,
    ):
        with pytest.raises(ValueError, match=r"_kernel would need \d+ programs, a grid has at most 1"):
            call()


# Constants: each new value compiles a kernel again


def test_short_lengths_make_few_variants_of_the_selection():
    """Up to topk blocks the slots of a row are as many, rounded to a power of two."""
    seen = set()
    for tokens in range(1, 16 * 20, 7):
        inputs = compare.random_inputs(0, B=1, N=tokens, H=1, Hkv=1, Hidx=1, D=2, Dv=2, Di=2)
        with launch.recording("sm_90") as launches:
            select_blocks(inputs["index_q"], inputs["index_k"], topk=11, block_size=16, backend="triton")
        seen.add(tuple(sorted(launches[0].constants.items())))
    assert len(seen) == 5  # 1, 2, 4, 8 and 16


@pytest.mark.parametrize("topk, schedules", [(2, ("query", "key", "auto")), (None, ("auto",))])
@pytest.mark.parametrize("documents", [False, True])
def test_constants_hold_no_length(topk, schedules, documents):
    """The same constants for 20 lengths, of at least topk blocks; what differs is an argument."""
    seen = set()
    for tokens in range(97, 1998, 100):
        inputs = compare.random_inputs(0, B=1, N=tokens, D=2, Dv=2, Di=2)
        launches = record(inputs, topk, schedules, cu_seqlens=[0, 40, tokens] if documents else None)
        seen.add(tuple((one.kernel.__name__, *sorted(one.constants.items())) for one in launches))
        lengths = [length for one in launches if (length := argument(one, "N")) is not None]
        assert len(lengths) >= 5 and set(lengths) == {tokens}
    assert len(seen) == 1


def test_target_and_recording():
    tensor = torch.zeros(1)
    with launch.recording("gfx942") as outer:
        with launch.recording("sm_90") as inner:
            launch.launch(Grid(), 3, tensor, BQ=16)
            assert launch.target_of(tensor) == "sm_90"
        assert launch.target_of(tensor) == "gfx942" and not outer
    assert (inner[0].programs, inner[0].arguments, inner[0].constants) == (3, (tensor,), {"BQ": 16})
    assert launch.target_of(tensor) == "interpreter"
    assert launch.target_of(torch.zeros(1, device="meta")) == "meta"
    with pytest.raises(KeyError), launch.recording("sm_90"):
        raise KeyError
    assert launch.target_of(tensor) == "interpreter"


# Tiles


def widths(kernel, D):
    """(row_width, key_width) of a kernel for D = Dv = Di, as its launcher passes them."""
    row = 2 if kernel in ("dkdv", "dq", "index_key") else 1
    key = 1 if kernel in ("select", "normalizer") else 0 if kernel in ("combine", "delta", "sum_tasks") else 2
    return row * padded(D), key * padded(D)


@pytest.mark.parametrize("target", [*SHARED_LIMIT, "sm_75", "gfx1100"])
@pytest.mark.parametrize("size, D", [(2, 16), (2, 96), (2, 128), (2, 256), (4, 64), (4, 128), (4, 256)])
def test_tile_fits(target, size, D):
    """Heads up to 256 wide have a tile that fits, in half precision and in float32, on known and unknown targets.

    The key-major forward kernel, which holds a whole key block, is refused where that alone does not fit.
    """
    limit = SHARED_LIMIT.get(target, SMALLEST_LIMIT)
    for kernel in CANDIDATES:
        for block in (16, 32, 64, 128):
            row_width, key_width = widths(kernel, D)
            place = dict(block=block, row_width=row_width, key_width=key_width)
            least = config.shared_bytes(kernel, target, size, Tile(16, block, 4, 1), row_width, key_width)
            if kernel == "forward_key" and least > limit:
                with pytest.raises(ValueError, match=f"{limit} bytes of shared memory .* on {target}"):
                    choose_tile(kernel, target, size, **place)
                continue
            tile = choose_tile(kernel, target, size, **place)
            assert config.shared_bytes(kernel, target, size, tile, row_width, key_width) <= limit, (kernel, block, tile)
            assert tile.keys == block or kernel != "forward_key"
            assert tile.rows >= 16 and (key_width == 0 or 16 <= tile.keys <= block), (kernel, block, tile)


def test_tiles_differ_where_memory_does(monkeypatch):
    """A target with less shared memory gets smaller tiles or fewer stages, and the target's name decides."""
    wide = dict(block=128, row_width=128, key_width=256)
    assert choose_tile("forward_query", "sm_90", 2, **wide) != choose_tile("forward_query", "sm_86", 2, **wide)
    unknown = choose_tile("forward_query", "sm_999", 2, **wide)
    monkeypatch.setitem(config.SHARED_LIMIT, "sm_999", SMALLEST_LIMIT)
    assert choose_tile("forward_query", "sm_999", 2, **wide) == unknown


@pytest.mark.parametrize("target, rows", [("sm_90", (128, 128, 64, 32)), ("sm_100", (128, 64, 32, 16))])
def test_selections_of_many_blocks_have_tiles_of_fewer_rows(target, rows):
    """A row keeps its topk best in registers, and targets differ in how many they have."""
    index = torch.zeros(1, 1, 4096, 16, dtype=torch.float16)
    with launch.recording(target) as launches:
        for topk in (32, 64, 128, 256):
            select_blocks(index, index, topk=topk, block_size=16, backend="triton")
    assert tuple(one.constants["BQ"] for one in launches) == rows
    assert [one.programs for one in launches] == [4096 // count for count in rows]


def test_key_major_is_left_where_a_key_block_does_not_fit():
    """Few heads share a selection of many blocks: key-major, but not in float32 with 99 KiB of shared memory."""
    q, ids = torch.zeros(1, 2, 2048, 128), torch.full((1, 2, 2048, 2), -1, dtype=torch.int32)
    chosen = {}
    for target in ("sm_90", "sm_120"):
        with launch.recording(target) as launches:
            sparse_attention(q, q, q, ids, backend="triton")
        chosen[target] = launches[0].kernel.__name__
    assert chosen == {"sm_90": "forward_key_kernel", "sm_120": "forward_query_kernel"}
    with launch.recording("sm_120"), pytest.raises(ValueError, match="forward_key kernel .*101376 bytes"):
        sparse_attention(q, q, q, ids, backend="triton", schedule="key")


# Triton's interpreter


@triton.jit
def add_kernel(x, y, total, product, N, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    left, right = tl.load(x + at, mask=at < N, other=0), tl.load(y + at, mask=at < N, other=0)
    tl.store(total + at, left + right, mask=at < N)
    tl.store(product + at, left * right, mask=at < N)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int32, torch.int64])
def test_triton_adds_four_numbers(dtype):
    """This version of Triton computes what NumPy computes: first thing to look at if all other tests fail."""
    x, y = torch.tensor([1, -2, 3, 40]).to(dtype), torch.tensor([5, 6, -7, 100]).to(dtype)
    total, product = torch.zeros(2, 4, dtype=dtype)
    launch.launch(add_kernel, 1, x, y, total, product, 3, SIZE=4)
    expected = x.numpy() + y.numpy(), x.numpy() * y.numpy()
    for actual, numbers in zip((total, product), expected, strict=True):
        assert actual.tolist() == [*numbers[:3].tolist(), 0]


@pytest.mark.parametrize("topk", [2, None])
def test_bfloat16(topk):
    """The interpreter takes the bits of a bfloat16 for an integer, so the launchers convert."""
    tensors = [torch.zeros(2, dtype=dtype) for dtype in (torch.bfloat16, torch.float16, torch.float32)]
    computable = launch.computable(*tensors)
    assert [t.dtype for t in computable] == [torch.float32, torch.float16, torch.float32]
    assert computable[1] is tensors[1] and computable[2] is tensors[2]
    with launch.recording("sm_90"):
        assert launch.computable(tensors[0])[0] is tensors[0]
    inputs = compare.random_inputs(0, B=1, N=20, H=2, Hkv=1, Hidx=1, dtype=torch.bfloat16)
    options = {"topk": topk, "block_size": 16}
    actual = compare.run("triton", inputs, options)
    compare.assert_same_run(actual, compare.run_reference(inputs, options), torch.bfloat16)
    kept = ("out", *compare.GRADIENTS)
    assert all(actual[name].dtype == (torch.bfloat16 if name in kept else torch.float32) for name in (*kept, "lse"))


# Addresses beyond 2**31 elements

FAR = """
import resource, sys
sys.path.insert(0, {tests!r})
import compare, torch

storage = torch.empty(2**31 + 10**6, dtype=torch.float16)
for axis, heads, topk, schedule in {cases}:
    sizes = dict(zip(("H", "Hkv", "Hidx", "Hik"), heads), B=3 if axis == 0 else 1, N=20, D=16, Dv=16, Di=16)
    near = compare.random_inputs(0, dtype=torch.float16, **sizes)
    near["dout"] = compare.random_like(near["q"], 1)
    stride = 2**31 // (near["q"].shape[axis] - 1) + 64
    far, used = {{}}, 0
    for name, tensor in near.items():
        strides = list(tensor.transpose(axis, 0).contiguous().transpose(axis, 0).stride())
        strides[axis] = stride
        far[name] = storage.as_strided(tensor.shape, strides, used).copy_(tensor)
        used += tensor.numel()
    assert used < 10**6 - 64 * 20 and far["q"].stride(axis) * (far["q"].shape[axis] - 1) >= 2**31
    backend, options = compare.with_backend("triton", schedule=schedule), dict(topk=topk, block_size=16)
    expected = compare.run(backend, near, options, near["dout"])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print("axis", axis, heads, topk, schedule, flush=True)
    actual = compare.run(backend, far, options, far["dout"])
    more = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert more < 400, f"{{more:.0f}} MiB more resident: the storage was read"
    for name in expected:
        compare.assert_equal(actual[name], expected[name], name)
print("equal", storage.nbytes // 2**30, more)
"""
FAR_CASES = [
    (1, (3, 3, 3, 3), 2, "query"), (1, (3, 1, 1, 1), 2, "key"), (1, (3, 1, 1, 1), None, "auto"),
    (0, (1, 1, 1, 1), 2, "key"), (2, (1, 1, 1, 1), 2, "query"), (3, (1, 1, 1, 1), 2, "key"),
]  # fmt: skip


@pytest.mark.skipif(sys.platform != "linux", reason="memory that is reserved but not touched")
def test_rows_more_than_2_to_the_31_elements_apart():
    """Inputs inside 4 GiB that are reserved and hardly touched give what their compact copies give.

    In turn the batch, the heads, the tokens and the columns lie far apart. An int32 product of an index and a stride
    would lie outside of the memory of the process, so it is one of its own.
    """
    code = FAR.format(tests=str(Path(__file__).parent), cases=FAR_CASES)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ, timeout=120)
    assert done.returncode == 0 and "equal 4" in done.stdout, f"{done.stdout}\n{done.stderr[-3000:]}"
