"""One validated description of a call, shared by every implementation.

`describe` checks kinds, dtypes, shapes, head counts and options without reading a tensor's values, so it also runs
under `torch.compile`; `BlockGeometry` checks the values of `cu_seqlens` and says where blocks and documents lie.
Both raise before any work is done, naming the argument and the numbers.
"""

from __future__ import annotations

import numbers
import sys
from dataclasses import dataclass
from functools import cached_property

import torch

FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
KERNEL_BLOCK_SIZES = (16, 32, 64, 128)
_ABSENT = object()  # tells a tensor that a call does not take from a None that was passed for one


@dataclass(frozen=True)
class Problem:
    """Sizes, head mapping and options of one call; a size that the call has no tensor for is 0.

    Head mapping: query head h reads KV head h // group; index head p serves the query heads
    [p * heads_per_index, (p + 1) * heads_per_index) and scores with index key head p // index_group.
    """

    batch: int
    tokens: int
    heads: int
    kv_heads: int
    index_heads: int
    index_key_heads: int
    width: int
    value_width: int
    index_width: int
    block_size: int
    topk: int | None
    local_blocks: int
    init_blocks: int
    scale: float
    index_scale: float
    dtype: torch.dtype
    device: torch.device

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.heads // self.kv_heads

    @property
    def heads_per_index(self) -> int:
        """Query heads per index head."""
        return self.heads // self.index_heads

    @property
    def index_group(self) -> int:
        """Index query heads per index key head."""
        return self.index_heads // self.index_key_heads

    @property
    def index_heads_per_kv(self) -> int:
        """Index heads per KV head; index head p belongs to KV head p // index_heads_per_kv."""
        return self.index_heads // self.kv_heads

    @property
    def accumulator(self) -> torch.dtype:
        """The dtype of sums, scores and LSE."""
        return accumulator_of(self.dtype)


def accumulator_of(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums, scores and LSE for inputs of a dtype: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class BlockGeometry:
    """Where the key blocks and documents of a row of tokens lie (its attributes are int64 tensors on the CPU).

    Blocks start afresh at each document's first token and are numbered consecutively over the row, so that the
    visible blocks of token i are exactly `first_block[i] .. block_of[i]`.

    Args:
        tokens: N, the length of the row.
        block_size: tokens in a full block.
        cu_seqlens: None, or the document offsets 0 = c0 <= c1 <= ... = N, a list of ints or a 1-D integer tensor.

    Attributes:
        document_start: [documents + 1], offsets of the documents that hold a token, then N.
        block_start: [NB + 1]; block b holds the tokens block_start[b] .. block_start[b + 1] - 1.
        block_of: [N], the block of each token. first_block: [N], the first block of each token's document.

    Raises:
        ValueError: offsets that do not start at 0, decrease, or do not end at N.
    """

    def __init__(self, tokens: int, block_size: int, cu_seqlens=None):
        block_size = min(block_size, tokens)
        self.tokens, self.block_size = tokens, block_size
        self._copies = {}
        self.document_start = _document_start(tokens, cu_seqlens)
        lengths = self.document_start.diff()
        blocks = (lengths + block_size - 1) // block_size
        self._document_block = torch.cat([blocks.new_zeros(1), blocks.cumsum(0)])
        within = torch.arange(int(self._document_block[-1])) - self._document_block[:-1].repeat_interleave(blocks)
        start = self.document_start[:-1].repeat_interleave(blocks) + within * block_size
        self.block_start = torch.cat([start, torch.tensor([tokens])])

    @property
    def blocks(self) -> int:
        """NB, the number of key blocks."""
        return len(self.block_start) - 1

    @cached_property
    def block_of(self) -> torch.Tensor:
        return torch.arange(self.blocks).repeat_interleave(self.block_start.diff())

    @cached_property
    def first_block(self) -> torch.Tensor:
        return self._document_block[:-1].repeat_interleave(self.document_start.diff())

    def on(self, device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """block_start, block_of and first_block on a device; copied there once."""
        if device not in self._copies:
            self._copies[device] = tuple(at.to(device) for at in (self.block_start, self.block_of, self.first_block))
        return self._copies[device]

    def visible_blocks(self, device=None) -> torch.Tensor:
        """[N, NB] bool: query i (row) sees a token of block b (column)."""
        block, own, first = self._places(device)
        return (first <= block) & (block <= own)

    def forced_blocks(self, local_blocks: int, init_blocks: int, device=None) -> torch.Tensor:
        """[N, NB] bool: the visible blocks that are kept whatever they score (SPEC 3)."""
        block, own, first = self._places(device)
        forced = (block > own - local_blocks) | (block < first + init_blocks)
        return forced & self.visible_blocks(device)

    def _places(self, device):
        """Every block [NB]; the own block and the first block of the document of every query [N, 1]."""
        places = (torch.arange(self.blocks), self.block_of[:, None], self.first_block[:, None])
        return tuple(place.to(device) for place in places)

    def documents(self):
        """Yields (first token, end token, first block) of each document that holds a token."""
        start = self.document_start.tolist()
        yield from zip(start[:-1], start[1:], self._document_block[:-1].tolist(), strict=True)


def describe(
    *, q=_ABSENT, k=_ABSENT, v=_ABSENT, lse=_ABSENT, index_q=_ABSENT, index_k=_ABSENT, block_indices=None,
    block_size=128, topk=None, local_blocks=1, init_blocks=0, scale=None, index_scale=None, cu_seqlens=None,
    reduction="mean", kernel=False,
) -> Problem:  # fmt: skip
    """Checks the arguments of a call (SPEC 8) and describes it.

    Args:
        q, k, v, index_q, index_k: [B, heads, N, width] floating-point tensors of one dtype; those the call has.
        lse: [B, H, N], float32 (float64 for float64 inputs).
        block_indices: [B, Hidx, N, slots], int32 or int64.
        topk: None only where there is a q: then attention is dense.
        kernel: True for the Triton kernels, which take neither float64 nor every block size.

    Raises:
        TypeError: a wrong kind or dtype. ValueError: a wrong value, shape, head count or device.
    """
    call = {"q": q, "k": k, "v": v, "index_q": index_q, "index_k": index_k, "lse": lse}
    call = {name: tensor for name, tensor in call.items() if tensor is not _ABSENT}
    tensors = {name: tensor for name, tensor in call.items() if name != "lse"}
    _check_tensors(call if block_indices is None else {**call, "block_indices": block_indices}, tensors, kernel)
    q, k, v, lse, index_q, index_k = (call.get(name) for name in ("q", "k", "v", "lse", "index_q", "index_k"))
    batch, _, tokens, _ = next(iter(tensors.values())).shape
    _check_lengths(tensors, lse, block_indices)

    heads, kv_heads = _size(q, 1), _size(k, 1)
    index_heads = _size(index_q if index_q is not None else block_indices, 1) or kv_heads
    index_key_heads = _size(index_k, 1)
    index_name = "index_q" if index_q is not None else "block_indices"
    check_multiple("q", "H", heads, "k", "Hkv", kv_heads)
    check_multiple("q", "H", heads, index_name, "Hidx", index_heads)
    check_multiple(index_name, "Hidx", index_heads, "k", "Hkv", kv_heads)
    check_multiple("index_q", "Hidx", index_heads, "index_k", "Hik", index_key_heads)

    check_integer("block_size", block_size, 1)
    if kernel and block_size not in KERNEL_BLOCK_SIZES:
        raise ValueError(f"block_size must be one of {KERNEL_BLOCK_SIZES} for the Triton kernels, got {block_size}")
    if topk is None and q is not None:
        check_forced_blocks(local_blocks, init_blocks)
    else:
        check_selection(topk, local_blocks, init_blocks)
    if reduction not in ("mean", "none"):
        raise ValueError(f"reduction must be 'mean' or 'none', got {reduction!r}")
    check_cu_seqlens(cu_seqlens, batch)
    width, index_width = _size(q, 3), _size(index_q, 3)
    first = next(iter(tensors.values()))
    return Problem(
        batch=batch, tokens=tokens, heads=heads, kv_heads=kv_heads, index_heads=index_heads,
        index_key_heads=index_key_heads, width=width, value_width=_size(v, 3), index_width=index_width,
        block_size=block_size, topk=topk, local_blocks=local_blocks, init_blocks=init_blocks,
        scale=_check_scale("scale", scale, width), index_scale=_check_scale("index_scale", index_scale, index_width),
        dtype=first.dtype, device=first.device,
    )  # fmt: skip


def validate_block_indices(block_indices: torch.Tensor, *, block_size=128, cu_seqlens=None) -> None:
    """Checks the values of block_indices; reads them, so on a GPU it waits for the device.

    Args:
        block_indices: [B, Hidx, N, slots], int32 or int64; ids in any order, -1 for an unused slot.
        block_size, cu_seqlens: as in `sparse_attention`.

    Raises:
        TypeError: block_indices that is no int32 or int64 tensor; block_size or cu_seqlens of a wrong kind or dtype.
        ValueError: a wrong shape, block_size or cu_seqlens; an id outside -1 .. NB - 1, listed twice in one row, or of
            a block that starts after its query. An earlier document's block is legal and holds no visible token.
    """
    _check_tensors({"block_indices": block_indices}, {}, kernel=False)
    _check_block_indices(block_indices)
    check_integer("block_size", block_size, 1)
    check_cu_seqlens(cu_seqlens, block_indices.shape[0])
    geometry = BlockGeometry(block_indices.shape[2], block_size, cu_seqlens)
    ids = block_indices.detach().cpu().long()
    _raise_at((ids < -1) | (ids >= geometry.blocks), ids, f"outside -1 .. {geometry.blocks - 1}")
    _raise_at(ids > geometry.block_of[:, None], ids, "in the future of its query")
    ordered = ids.sort(dim=-1).values
    repeated = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)
    _raise_at(repeated, ordered[..., 1:], "listed more than once in its row")


def check_ids_on_cpu(block_indices: torch.Tensor | None, block_size: int, cu_seqlens) -> None:
    """`validate_block_indices` of ids on the CPU; those on a GPU are not read, as that would wait for the device."""
    if block_indices is not None and block_indices.device.type == "cpu":
        validate_block_indices(block_indices, block_size=block_size, cu_seqlens=cu_seqlens)


def _raise_at(bad: torch.Tensor, ids: torch.Tensor, what: str) -> None:
    if bad.any():
        batch, head, query, slot = bad.nonzero()[0].tolist()
        block = int(ids[batch, head, query, slot])
        raise ValueError(
            f"block_indices[{batch}, {head}, {query}] names block {block}, which is {what}"
            f" ({int(bad.sum())} such entries)"
        )


def _size(tensor, axis: int) -> int:
    return 0 if tensor is None else tensor.shape[axis]


def _check_tensors(arguments: dict, floating: dict, kernel: bool) -> None:
    for name, tensor in arguments.items():
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
    dtypes = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in floating.items()}
    allowed = FLOAT_DTYPES[:3] if kernel else FLOAT_DTYPES
    if any(tensor.dtype not in allowed for tensor in floating.values()):
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
        raise TypeError(f"tensors must be one of {names}, got {_listed(dtypes)}")
    if len(set(dtypes.values())) > 1:
        raise TypeError(f"tensors must share one dtype, got {_listed(dtypes)}")
    devices = {name: tensor.device for name, tensor in arguments.items()}
    if len(set(devices.values())) > 1:
        raise ValueError(f"tensors must be on one device, got {_listed(devices)}")
    if any(device.type == "meta" for device in devices.values()):
        raise ValueError(f"tensors must hold data, got {_listed(devices)}")
    layouts = {name: str(tensor.layout).removeprefix("torch.") for name, tensor in arguments.items()}
    if any(tensor.layout != torch.strided for tensor in arguments.values()):
        raise TypeError(f"tensors must be dense, got {_listed(layouts)}")
    for name, tensor in floating.items():
        if tensor.ndim != 4:
            raise ValueError(f"{name} must have 4 dimensions [B, heads, N, width], got shape {tuple(tensor.shape)}")
        if 0 in tensor.shape:
            raise ValueError(f"{name} must not be empty, got shape {tuple(tensor.shape)}")


def _check_lengths(tensors: dict, lse, block_indices) -> None:
    shaped = dict(tensors)
    if block_indices is not None:
        _check_block_indices(block_indices)
        shaped["block_indices"] = block_indices
    for axis, what in ((0, "batch size B"), (2, "length N")):
        sizes = {name: tensor.shape[axis] for name, tensor in shaped.items()}
        first = next(iter(sizes.values()))
        if any(size != first for size in sizes.values()):
            raise ValueError(f"tensors must share one {what}, got {_listed(sizes)}")
    if "index_q" in shaped and block_indices is not None and block_indices.shape[1] != shaped["index_q"].shape[1]:
        counts = {name: shaped[name].shape[1] for name in ("index_q", "block_indices")}
        raise ValueError(f"index_q and block_indices must share one number of heads Hidx, got {_listed(counts)}")
    for left, right in (("q", "k"), ("index_q", "index_k")):
        if left in tensors and right in tensors and tensors[left].shape[3] != tensors[right].shape[3]:
            widths = {name: tensors[name].shape[3] for name in (left, right)}
            raise ValueError(f"{left} and {right} must share one width, got {_listed(widths)}")
    if "k" in tensors and "v" in tensors and tensors["k"].shape[1] != tensors["v"].shape[1]:
        counts = {name: tensors[name].shape[1] for name in ("k", "v")}
        raise ValueError(f"k and v must share one number of heads Hkv, got {_listed(counts)}")
    if lse is not None:
        q = tensors["q"]
        expected = accumulator_of(q.dtype)
        if lse.dtype != expected:
            raise TypeError(f"lse must be {expected} for {q.dtype} inputs, got {lse.dtype}")
        if lse.shape != q.shape[:3]:
            raise ValueError(f"lse must have shape [B, H, N] = {tuple(q.shape[:3])}, got {tuple(lse.shape)}")


def _check_block_indices(block_indices: torch.Tensor) -> None:
    if block_indices.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"block_indices must be int32 or int64, got {block_indices.dtype}")
    if block_indices.ndim != 4 or 0 in block_indices.shape:
        raise ValueError(
            f"block_indices must have 4 dimensions [B, Hidx, N, slots], none empty, got shape"
            f" {tuple(block_indices.shape)}"
        )


def check_multiple(name: str, symbol: str, count: int, of: str, of_symbol: str, divisor: int) -> None:
    if count and divisor and count % divisor:
        raise ValueError(
            f"{name} has {count} heads ({symbol}), which is not a multiple of the {divisor} heads of {of} ({of_symbol})"
        )


def check_integer(name: str, value, minimum: int) -> None:
    if isinstance(value, bool) or not isinstance(value, (numbers.Integral, torch.SymInt)):
        raise TypeError(f"{name} must be an int, got {type(value).__name__} {value!r}")
    if value < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {value}")


def check_selection(topk, local_blocks, init_blocks) -> None:
    """The options of a selection: topk blocks, of which local_blocks + init_blocks are forced (SPEC 3)."""
    check_forced_blocks(local_blocks, init_blocks)
    check_integer("topk", topk, 1)
    if topk < local_blocks + init_blocks:
        raise ValueError(
            f"topk must be at least local_blocks + init_blocks = {local_blocks} + {init_blocks}, got {topk}"
        )


def check_forced_blocks(local_blocks, init_blocks) -> None:
    check_integer("local_blocks", local_blocks, 0)
    check_integer("init_blocks", init_blocks, 0)


def _check_scale(name: str, value, width: int) -> float:
    if value is None:
        return width**-0.5 if width else 1.0
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a float, got {type(value).__name__} {value!r}")
    if not 0 < value <= sys.float_info.max:
        raise ValueError(f"{name} must be finite and > 0, got {value}")
    return float(value)


def check_cu_seqlens(cu_seqlens, batch: int) -> None:
    if cu_seqlens is None:
        return
    if isinstance(cu_seqlens, torch.Tensor):
        if cu_seqlens.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"cu_seqlens must be int32 or int64, got {cu_seqlens.dtype}")
        if cu_seqlens.ndim != 1:
            raise ValueError(f"cu_seqlens must have 1 dimension, got shape {tuple(cu_seqlens.shape)}")
        if cu_seqlens.is_meta:
            raise ValueError("cu_seqlens must hold data, got device meta")
    elif isinstance(cu_seqlens, (list, tuple)):
        for offset in cu_seqlens:
            if isinstance(offset, bool) or not isinstance(offset, numbers.Integral):
                raise TypeError(f"cu_seqlens must hold ints, got {type(offset).__name__} {offset!r}")
            if abs(offset) >= 2**63:
                raise ValueError(f"cu_seqlens must hold offsets of at most 63 bits, got {offset}")
    else:
        raise TypeError(f"cu_seqlens must be a tensor or a list of ints, got {type(cu_seqlens).__name__}")
    if len(cu_seqlens) < 2:
        raise ValueError(f"cu_seqlens must hold at least 2 offsets, got {len(cu_seqlens)}")
    if batch != 1:
        raise ValueError(f"cu_seqlens packs documents into one row: B must be 1, got B={batch}")


def _document_start(tokens: int, cu_seqlens) -> torch.Tensor:
    if cu_seqlens is None:
        return torch.tensor([0, tokens])
    offsets = torch.as_tensor(cu_seqlens).detach().cpu().long()
    if offsets[0] != 0:
        raise ValueError(f"cu_seqlens must start at 0, got {int(offsets[0])}")
    drop = (offsets.diff() < 0).nonzero().flatten()
    if len(drop):
        at = int(drop[0])
        raise ValueError(
            f"cu_seqlens must not decrease, got {int(offsets[at])} then {int(offsets[at + 1])} at position {at + 1}"
        )
    if offsets[-1] != tokens:
        raise ValueError(f"cu_seqlens must end at N={tokens}, got {int(offsets[-1])}")
    return offsets.unique_consecutive()


def _listed(values: dict) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())
