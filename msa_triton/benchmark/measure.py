"""What `gpu` measures in one go, on any device: an MSA step, an SDPA step, a matrix product, the overlap of selections.

Nothing here imports Triton at the top, so that the command can say that it is missing.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from msa_ref import cost
from msa_ref.problem import BlockGeometry, describe
from msa_ref.roofline import FORWARD_ROWS, GPUS, INDEX_ROWS, SMALLEST_DOT
from msa_triton.benchmark.step import Inputs, Shape, dense_step, head_major, msa_step, normal_inputs
from msa_triton.benchmark.timing import Laps, medians, repeated

REPEATS = 10
SECONDS = 3.0  # as many of the repeats as fit this
ANCHOR_TOKENS = 64
UNION_QUERIES = 8
MATRIX_SIZE = 8192
SHORT_TOKENS = 16384
BACKENDS = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION)
PHASE_KERNELS = {
    "select": ("select",),
    "align": ("normalizer", "index_query"),
    "backward": (
        "normalizer", "delta", "dq", "dkdv", "sum_tasks", "normalizer", "index_key", "index_sum_tasks",
    ),
}  # fmt: skip
FORWARD_KERNELS = {"query": ("forward_query",), "key": ("forward_key", "combine")}


def overlapping_inputs(shape: Shape, seed: int, device: torch.device | str) -> Inputs:
    """`normal_inputs` with an index_q that changes slowly, so that neighbouring queries choose mostly the same blocks.

    It goes straight from one random point to the next in `ANCHOR_TOKENS` tokens. At 32 768 tokens the 8 queries of a
    tile then choose about 19 different blocks, those of `normal_inputs` about 72.
    """
    inputs = normal_inputs(shape, seed, device)
    generator = torch.Generator(device).manual_seed(seed + 1)
    points = shape.tokens // ANCHOR_TOKENS + 2
    anchors = torch.randn(shape.index_heads, shape.index_width, points, generator=generator, device=device)
    slow = F.interpolate(anchors, size=shape.tokens, mode="linear", align_corners=True).transpose(1, 2)
    inputs.index_q.copy_(slow)
    return inputs


SELECTIONS = {"random": normal_inputs, "overlapping": overlapping_inputs, "warm-up": normal_inputs}


def time_msa(inputs: Inputs, shape: Shape, warm_up: bool = False) -> tuple[dict[str, float], int]:
    """(median milliseconds of each phase of the kernels, runs); see `step.msa_step`."""
    runs = repeated(lambda: msa_step(inputs, shape, warm_up=warm_up, backend="triton").milliseconds, REPEATS, SECONDS)
    return medians(runs), len(runs)


class FastestSDPA:
    """Dense attention by the fastest backend of SDPA, which is found for each shape at a short length.

    Args:
        backends: those to try.
    """

    def __init__(self, backends, device: torch.device, seed: int):
        self._backends, self._device, self._seed = backends, device, seed
        self._order = {}

    def time(self, name: str, shape: Shape) -> tuple[dict[str, float], int, str]:
        """(median milliseconds, runs, name of the backend) of the fastest backend that takes the shape of this name.

        Raises:
            RuntimeError: none of the backends does.
        """
        if name not in self._order:
            short, found = replace(shape, tokens=min(shape.tokens, SHORT_TOKENS)), {}
            inputs = head_major(normal_inputs(short, self._seed, self._device))
            for backend in self._backends:
                with suppress(RuntimeError):
                    found[backend] = medians(_sdpa_runs(inputs, backend))["total"]
            self._order[name] = sorted(found, key=found.get)
        inputs, refusals = head_major(normal_inputs(shape, self._seed, self._device)), []
        for backend in self._order[name]:
            try:
                runs = _sdpa_runs(inputs, backend)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                refusals.append(f"{backend.name}: {str(error).splitlines()[0]}")
            else:
                return medians(runs), len(runs), backend.name
        raise RuntimeError(f"no backend of SDPA takes the shape: {'; '.join(refusals)}")


def _sdpa_runs(inputs: Inputs, backend: SDPBackend) -> list[dict[str, float]]:
    with sdpa_kernel(backend):
        return repeated(lambda: dense_step(inputs), REPEATS, SECONDS)


def matrix_rate(dtype: torch.dtype, device: torch.device, size: int = MATRIX_SIZE) -> float:
    """FLOP per second of a product of two square matrices of normal numbers."""
    left, right = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))

    def run() -> dict[str, float]:
        laps = Laps(device)
        left @ right
        laps.mark("total")
        return laps.milliseconds()

    return 2e3 * size**3 / medians(repeated(run, 20, SECONDS))["total"]


def union(block_indices: Tensor, queries: int, block_size: int) -> float:
    """Mean number of different blocks that tiles of adjacent queries chose, over all tiles and index heads."""
    from msa_triton.schedule import tile_unions, visible_ids

    geometry = BlockGeometry(block_indices.shape[2], block_size)
    return float(tile_unions(visible_ids(block_indices, geometry), queries, geometry.blocks)[:, :, 0].double().mean())


def known_gpu(name: str) -> str | None:
    """The name in `msa_ref.roofline.GPUS` of a device; None for variants with other rates than those listed."""
    if re.search(r"PCIe|NVL|40GB", name):
        return None
    return next((gpu for gpu in GPUS if re.search(rf"\b{gpu}\b", name)), None)


def bound_milliseconds(gpu: str, shape: Shape, inputs: Inputs, block_indices: Tensor) -> dict[str, float]:
    """The least time of the kernels of each phase, by counting (`msa_ref.cost.bounds`), and in total; bfloat16."""
    from msa_triton.forward import choose_schedule

    geometry = BlockGeometry(shape.tokens, shape.block_size)
    problem = describe(q=inputs.q, k=inputs.k, v=inputs.v, block_indices=block_indices, block_size=shape.block_size)
    schedule = choose_schedule(inputs.q, problem, geometry, block_indices)
    heads = 1 << (shape.share - 1).bit_length()
    queries, index_queries = max(1, FORWARD_ROWS // heads), INDEX_ROWS // min(heads, INDEX_ROWS // SMALLEST_DOT)
    found = cost.bounds(
        shape.tokens, gpu, H=shape.heads, Hkv=shape.kv_heads, Hidx=shape.index_heads, Hik=shape.index_key_heads,
        D=shape.width, Di=shape.index_width, topk=shape.topk, block_size=shape.block_size,
        union=union(block_indices, queries, shape.block_size),
        index_union=union(block_indices, index_queries, shape.block_size),
    )  # fmt: skip
    phases = {**PHASE_KERNELS, "attend": FORWARD_KERNELS[schedule]}
    phases = {phase: sum(1e3 * found[kernel].seconds for kernel in kernels) for phase, kernels in phases.items()}
    return {**phases, "total": sum(phases.values())}
