"""Inputs to look at: attention of a known shape, the contract's toy problem, and real text.

`synthetic_attention` works backwards: it writes down the logits that a pattern needs as a product of a few query and
key features, and hides the features in q and k (and in index_q and index_k) behind random rotations, which leave every
dot product as it is.
"""

from __future__ import annotations

import math
import os
import sysconfig
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F

from msa_ref.problem import check_integer, check_multiple

PATTERNS = ("local", "sink", "periodic", "needle", "random")
SPLITS = ("train", "validation")
# Directories of the standard library that hold no ordinary code: tests, character tables, generated help, old fixers.
SKIPPED_DIRECTORIES = frozenset(
    "__pycache__ dist-packages encodings idle_test lib2to3 pydoc_data site-packages test tests".split()
)


class AttentionInputs(NamedTuple):
    """Inputs of `msa_attention`, in its order.

    Attributes:
        q: [B, H, N, D]. k: [B, Hkv, N, D]. v: [B, Hkv, N, Dv]. index_q: [B, Hidx, N, Di]. index_k: [B, Hik, N, Di].
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    index_q: torch.Tensor
    index_k: torch.Tensor


def synthetic_attention(
    pattern: str | Sequence[str] = "local+sink+needle", *, seed: int = 0, B: int = 1, N: int = 256, H: int = 4,
    Hkv: int = 2, Hidx: int = 2, Hik: int = 1, D: int = 32, Dv: int = 32, Di: int = 32, width: int = 8,
    period: int = 32, sinks: int = 1, needle: int | None = None, share: float = 0.9, noise: float = 0.0,
    dtype: torch.dtype = torch.float32,
) -> AttentionInputs:  # fmt: skip
    """Random inputs whose dense causal attention, with the default scale, has a known shape.

    * local: `share` of each query's attention falls on the `width` newest tokens, the rest on faint echoes;
    * sink: on the first `sinks` tokens;
    * periodic: on the tokens whose distance is within period // 8 of a multiple of `period`;
    * needle: on the one token `needle`, for every query after it; earlier queries look at everything alike;
    * random: logits without structure, of standard deviation about 2.

    A mixture is joined with "+": its parts share the attention about equally. A list gives one mixture to each KV head
    in turn. `share` holds for the last query of the first query head of each index head; its other heads are up to
    1.25 times as sharp. index_q and index_k carry the same logits (with the default index_scale), so that without
    noise the index finds what attention looks at.

    Args:
        pattern: names of `PATTERNS`, joined with "+", or a list of such strings.
        seed: the same seed gives the same tensors.
        B, N, H, Hkv, Hidx, Hik, D, Dv, Di: sizes (SPEC 1).
        width, period, sinks, needle: see above; in tokens. needle defaults to N // 8.
        share: in (0, 1).
        noise: standard deviation of Gaussian noise added to index_q and index_k, over their root mean square.
        dtype: of all tensors, floating.

    Raises:
        TypeError, ValueError: an unknown pattern; a size or head count out of range; more patterns than min(D, Di) has
            room for (sink and needle need 1 dimension each, local and periodic 2, random 1).
    """
    mixtures = _parse(pattern)
    sizes = {"B": B, "N": N, "H": H, "Hkv": Hkv, "Hidx": Hidx, "Hik": Hik, "D": D, "Dv": Dv, "Di": Di}
    for name, size in {**sizes, "width": width, "sinks": sinks}.items():
        check_integer(name, size, 1)
    check_integer("period", period, 2)
    needle = N // 8 if needle is None else needle
    check_integer("needle", needle, 0)
    check_multiple("q", "H", H, "k", "Hkv", Hkv)
    check_multiple("q", "H", H, "index_q", "Hidx", Hidx)
    check_multiple("index_q", "Hidx", Hidx, "k", "Hkv", Hkv)
    check_multiple("index_q", "Hidx", Hidx, "index_k", "Hik", Hik)
    if needle >= N:
        raise ValueError(f"needle must be below N={N}, got {needle}")
    if not dtype.is_floating_point:
        raise TypeError(f"dtype must be floating-point, got {dtype}")
    if not 0 < share < 1:
        raise ValueError(f"share must be between 0 and 1, got {share}")
    if not (math.isfinite(noise) and noise >= 0):
        raise ValueError(f"noise must be finite and >= 0, got {noise}")

    generator = torch.Generator().manual_seed(seed)
    features = _Features(N, min(D, Di), mixtures, width, period, sinks, needle, share)
    rows = []
    for _ in range(B):
        mixture_of = [mixtures[p * Hkv // Hidx % len(mixtures)] for p in range(Hidx)]
        queries, keys = features.draw(mixture_of, generator)  # [Hidx, N, dims], [N, dims]
        sharpness = torch.linspace(1.0, 1.25, H // Hidx, dtype=torch.float64)[:, None, None]
        heads = (queries[:, None] * sharpness).flatten(0, 1)
        q, k = _hide(heads, keys, Hkv, D, generator)
        index_q, index_k = _hide(queries, keys, Hik, Di, generator)
        v = torch.randn(Hkv, N, Dv, generator=generator, dtype=torch.float64)
        index_q, index_k = (_disturb(tensor, noise, generator) for tensor in (index_q, index_k))
        rows.append((q, k, v, index_q, index_k))
    return AttentionInputs(*(torch.stack(tensors).to(dtype) for tensors in zip(*rows, strict=True)))


def toy(shape: Sequence[int], seed: int) -> torch.Tensor:
    """The contract's toy tensor: flat element t is sin(1.7 t + seed) + cos(0.37 t² + 2.3 seed), row-major (SPEC 10).

    Returns:
        [*shape] float64.
    """
    t = torch.arange(math.prod(shape), dtype=torch.float64)
    return (torch.sin(1.7 * t + seed) + torch.cos(0.37 * t**2 + 2.3 * seed)).reshape(*shape)


def toy_problem() -> dict:
    """The contract's toy problem (SPEC 10), on which every implementation must give the printed numbers.

    Returns:
        q, dout [1, 4, 12, 8]; k, v, index_q [1, 2, 12, 8]; index_k [1, 1, 12, 8], all float64; topk 3; block_size 2.
    """
    heads = {"q": 4, "k": 2, "v": 2, "index_q": 2, "index_k": 1, "dout": 4}
    tensors = {name: toy((1, count, 12, 8), seed) for seed, (name, count) in enumerate(heads.items(), start=1)}
    return {**tensors, "topk": 3, "block_size": 2}


def standard_library_text(split: str, directory: str | os.PathLike | None = None) -> torch.Tensor:
    """The Python sources of the running interpreter's standard library as bytes, a corpus that needs no download.

    The files *.py outside `SKIPPED_DIRECTORIES`, joined in the order of their relative POSIX paths, line ends as "\\n".
    A file belongs to the validation split if the CRC-32 of its path is a multiple of 10. Another Python version has
    another text; 3.11 gives about 8.6 MB of training text and 1.0 MB of validation text.

    Args:
        split: "train" or "validation".
        directory: where to look; default the interpreter's standard library.

    Returns:
        [bytes] uint8.

    Raises:
        ValueError: an unknown split. FileNotFoundError: no source file of that split (a frozen or zipped library).
    """
    if split not in SPLITS:
        raise ValueError(f"split must be one of {SPLITS}, got {split!r}")
    root = Path(sysconfig.get_path("stdlib") if directory is None else directory)
    files = {}
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in SKIPPED_DIRECTORIES]
        paths = [Path(folder, name) for name in names if name.endswith(".py")]
        files.update({path.relative_to(root).as_posix(): path for path in paths})
    validation = split == "validation"
    chosen = [files[name] for name in sorted(files) if (zlib.crc32(name.encode()) % 10 == 0) == validation]
    text = b"".join(path.read_bytes().replace(b"\r\n", b"\n") for path in chosen)
    if not text:
        raise FileNotFoundError(f"no Python source file for split {split!r} under {root} ({len(files)} files in all)")
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def _parse(pattern: str | Sequence[str]) -> list[list[str]]:
    if not isinstance(pattern, (str, list, tuple)) or not pattern:
        raise TypeError(f"pattern must be a string or a list of strings, got {pattern!r}")
    mixtures = [mixture.split("+") for mixture in ([pattern] if isinstance(pattern, str) else pattern)]
    for name in (name for mixture in mixtures for name in mixture):
        if name not in PATTERNS:
            raise ValueError(f"pattern must be made of {', '.join(PATTERNS)}, got {name!r}")
    return mixtures


class _Features:
    """Query and key features whose dot product is the logit of a pattern; each pattern has dimensions of its own."""

    def __init__(self, N, dims, mixtures, width, period, sinks, needle, share):
        used = [name for name in PATTERNS if any(name in mixture for mixture in mixtures)]
        points = sum(name in ("sink", "needle") for name in used)
        room = (dims - points) // max(len(used) - points, 1)
        wanted = 2 if {"local", "periodic"} & set(used) else int("random" in used)
        if dims < points or room < wanted:
            raise ValueError(f"D and Di leave {dims} dimensions, too few for the patterns {', '.join(used)}")
        sizes = {name: 1 if name in ("sink", "needle") else room for name in used}
        self.span, start = {}, 0
        for name, size in sizes.items():
            self.span[name], start = slice(start, start + size), start + size
        self.N, self.dims, self.share = N, dims, share
        self.point_tokens = {"sink": range(min(sinks, N)), "needle": range(needle, needle + 1)}
        distance = torch.arange(N, dtype=torch.float64)
        longest, shortest = 2 * N, min(4 * width, 2 * N)
        count = min(room // 2, max(1, math.ceil(math.log2(longest / shortest)) + 1))
        lengths = torch.logspace(math.log2(longest), math.log2(shortest), max(count, 1), base=2, dtype=torch.float64)
        harmonics = torch.arange(1, max(1, min(room // 2, 4)) + 1, dtype=torch.float64)
        self.frequency = {"local": 2 * torch.pi / lengths, "periodic": 2 * torch.pi / period * harmonics}
        phase = (distance + period // 8) % period
        self.near = {"local": distance < width, "periodic": phase <= 2 * (period // 8)}

    def draw(self, mixture_of, generator):
        """Query features [Hidx, N, dims], one row of heads per mixture, and the key features [N, dims] they share."""
        keys = torch.zeros(self.N, self.dims, dtype=torch.float64)
        queries = torch.zeros(len(mixture_of), self.N, self.dims, dtype=torch.float64)
        for name, span in self.span.items():
            if name == "random":
                size = span.stop - span.start
                drawn = torch.randn(len(mixture_of) + 1, self.N, size, generator=generator, dtype=torch.float64)
                drawn *= 2**0.5 / size**0.25
                keys[:, span] = drawn[0]
                for p, mixture in enumerate(mixture_of):
                    queries[p, :, span] = drawn[p + 1] * (name in mixture)
            elif name in self.frequency:
                keys[:, span] = self._waves(name, span)
            else:
                keys[self.point_tokens[name], span] = 1.0
        for p, mixture in enumerate(mixture_of):
            kernel = self._kernels(mixture, keys, queries[p])
            self._points(mixture, kernel, queries[p])
        return queries, keys

    def _waves(self, name, span):
        """cos and sin of every frequency: <waves[i], waves[j]> = sum of cos(frequency·(i - j))."""
        angle = torch.arange(self.N, dtype=torch.float64)[:, None] * self.frequency[name]
        waves = torch.cat([angle.cos(), angle.sin()], dim=1)
        return F.pad(waves, (0, span.stop - span.start - waves.shape[1]))

    def _kernels(self, mixture, keys, queries):
        """Fills in periodic, then local; returns their logit as a function of distance, [N]."""
        kernel = torch.zeros(self.N, dtype=torch.float64)
        for name in ("periodic", "local"):
            if name in mixture:
                waves = keys[:, self.span[name]]
                shape = waves @ waves[0]
                target = 0.5 if name == "local" and "periodic" in mixture else self.share
                strength = _strength(kernel, shape, self.near[name], target)
                queries[:, self.span[name]] = strength * waves
                kernel = kernel + strength * shape
        return kernel

    def _points(self, mixture, kernel, queries):
        """Fills in sink and needle: from every query, each gets `ratio` times the weight of all that is not a point."""
        points = [name for name in self.point_tokens if name in mixture]
        ratio = 1.0 if {"local", "periodic"} & set(mixture) else self.share / (1 - self.share) / max(len(points), 1)
        total = kernel.logcumsumexp(dim=0)
        for name in points:
            tokens = torch.tensor(self.point_tokens[name])
            distance = torch.arange(self.N)[:, None] - tokens
            held = kernel[distance.clamp(min=0)].masked_fill(distance < 0, -torch.inf).logsumexp(dim=1)
            logit = (math.log(ratio) + total - held).masked_fill(held == -torch.inf, 0.0)
            queries[:, self.span[name]] = logit[:, None]


def _strength(base: torch.Tensor, shape: torch.Tensor, near: torch.Tensor, share: float) -> float:
    """The least factor (to 1 %) with which softmax(base + factor·shape) puts `share` of its mass on `near`, all [N]."""

    def reached(factor):
        return (base + factor * shape).softmax(dim=0)[near].sum() >= share

    low, high = 0.0, 0.25
    while not reached(high):
        low, high = high, 2 * high
    while high - low > 0.01 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if reached(middle) else (middle, high)
    return high


def _hide(queries: torch.Tensor, keys: torch.Tensor, key_heads: int, width: int, generator: torch.Generator):
    """Tensors [heads, N, width] and [key_heads, N, width] with <q, k> / sqrt(width) = <query feature, key feature>."""
    square = torch.randn(key_heads, width, width, generator=generator, dtype=torch.float64)
    rotation = torch.linalg.qr(square).Q * width**0.25
    queries, keys = (F.pad(tensor, (0, width - tensor.shape[-1])) for tensor in (queries, keys))
    grouped = queries.unflatten(0, (key_heads, -1))
    return (grouped @ rotation[:, None]).flatten(0, 1), keys @ rotation


def _disturb(tensor: torch.Tensor, noise: float, generator: torch.Generator) -> torch.Tensor:
    drawn = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
    return tensor + noise * tensor.square().mean().sqrt() * drawn
