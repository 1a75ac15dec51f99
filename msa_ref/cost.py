"""What attention costs: FLOPs, bytes, arithmetic intensity and energy, in exact integers where there are any.

The defaults are the sizes of the paper's model. A FLOP is one addition or one multiplication, so a product of an
[m, k] and a [k, n] matrix is 2·m·k·n of them; exponentials and maxima are not counted, as in the paper. Unless a
function says otherwise, the costs are those of the forward pass of one layer on one sequence.

Sources: P = the MiniMax Sparse Attention paper (arXiv 2606.13392); CSO = Central Statistics Office, Ireland, Data
Centres Metered Electricity Consumption.
"""

from __future__ import annotations

import calendar
import math
import numbers
from typing import NamedTuple

from msa_ref.problem import check_integer
from msa_ref.roofline import GPU, GPUS, Bound, bounds  # noqa: F401  (bounds on time belong to the costs)

IRISH_DATA_CENTRES_GWH = {2024: 6973, 2025: 7663}  # CSO: metered electricity of all data centres in Ireland
IRISH_DATA_CENTRES_SHARE_2025 = 0.23  # CSO: of all metered electricity in Ireland
JOULES_PER_KWH = 3_600_000


class Traffic(NamedTuple):
    """Work and HBM traffic of one query token in one KV group.

    Attributes:
        flops: FLOPs. bytes: bytes read from and written to HBM.
    """

    flops: float
    bytes: float

    @property
    def intensity(self) -> float:
        """Arithmetic intensity in FLOPs per byte."""
        return self.flops / self.bytes


def dense_flops(N: int, H: int = 64, D: int = 128) -> int:
    """FLOPs of dense causal attention over N tokens, 2·H·D·N² (P eq. 12): two products over half of the N² pairs.

    Raises:
        TypeError, ValueError: a size that is not an int >= 1; so do all functions below.
    """
    _check_sizes(N=N, H=H, D=D)
    return 2 * H * D * N**2


def index_flops(N: int, Hidx: int = 4, Di: int = 128) -> int:
    """FLOPs of scoring every visible token with the index heads, Hidx·Di·N² (P eq. 12, first term)."""
    _check_sizes(N=N, Hidx=Hidx, Di=Di)
    return Hidx * Di * N**2


def sparse_flops(N: int, H: int = 64, D: int = 128, topk: int = 16, block_size: int = 128) -> int:
    """FLOPs of attention over topk whole blocks a query, 4·H·D·N·topk·block_size (P eq. 12, second term)."""
    _check_sizes(N=N, H=H, D=D, topk=topk, block_size=block_size)
    return 4 * H * D * N * topk * block_size


def msa_flops(
    N: int, H: int = 64, D: int = 128, Hidx: int = 4, Di: int = 128, topk: int = 16, block_size: int = 128
) -> int:
    """FLOPs of MSA over N tokens: `index_flops` + `sparse_flops` (P eq. 12)."""
    return index_flops(N, Hidx, Di) + sparse_flops(N, H, D, topk, block_size)


def flop_ratio(
    N: int, H: int = 64, D: int = 128, Hidx: int = 4, Di: int = 128, topk: int = 16, block_size: int = 128
) -> float:
    """How many times more FLOPs dense attention takes than MSA at N tokens (P eq. 12): 28.4 at 2^20."""
    return dense_flops(N, H, D) / msa_flops(N, H, D, Hidx, Di, topk, block_size)


def flop_ratio_limit(H: int = 64, D: int = 128, Hidx: int = 4, Di: int = 128) -> float:
    """What `flop_ratio` tends to as N grows, 2·H·D / (Hidx·Di): then only the index's N² term is left (P eq. 12)."""
    _check_sizes(H=H, D=D, Hidx=Hidx, Di=Di)
    return 2 * H * D / (Hidx * Di)


def crossover(H: int = 64, D: int = 128, Hidx: int = 4, Di: int = 128, topk: int = 16, block_size: int = 128) -> float:
    """The length in tokens above which MSA takes fewer FLOPs than dense attention (P eq. 12).

    2·H·D·N² = Hidx·Di·N² + 4·H·D·N·topk·block_size, solved for N; infinite when the index costs as much as dense
    attention, 2·H·D <= Hidx·Di.
    """
    _check_sizes(H=H, D=D, Hidx=Hidx, Di=Di, topk=topk, block_size=block_size)
    saved = 2 * H * D - Hidx * Di
    return 4 * H * D * topk * block_size / saved if saved > 0 else math.inf


def index_dominates(
    H: int = 64, D: int = 128, Hidx: int = 4, Di: int = 128, topk: int = 16, block_size: int = 128
) -> float:
    """The length in tokens at which the index costs as much as the sparse attention it serves (P eq. 12)."""
    _check_sizes(H=H, D=D, Hidx=Hidx, Di=Di, topk=topk, block_size=block_size)
    return 4 * H * D * topk * block_size / (Hidx * Di)


def causal_pairs(N: int) -> int:
    """Visible (query, key token) pairs of dense causal attention, N·(N+1)/2, exactly."""
    _check_sizes(N=N)
    return N * (N + 1) // 2


def gathered_pairs(N: int, topk: int = 16, block_size: int = 128) -> int:
    """Visible (query, key token) pairs of one head under MSA, exactly, without a loop over the queries.

    Query i lies in block b(i) = i // block_size. Its own block gives it (i mod block_size) + 1 visible tokens, each of
    the min(b(i), topk - 1) other kept blocks block_size: E = sum_i [min(b(i), topk-1)·block_size + (i mod block_size)
    + 1] (SPEC 10). The closed form sums one arithmetic series over the blocks and one inside a block. One document.
    """
    _check_sizes(N=N, topk=topk, block_size=block_size)
    full, rest = divmod(N, block_size)
    own = full * causal_pairs(block_size) + rest * (rest + 1) // 2
    return own + block_size * (block_edges(N, topk, block_size) - N)


def block_edges(N: int, topk: int = 16, block_size: int = 128) -> int:
    """(query, kept block) pairs of one index head, sum_i min(b(i) + 1, topk): edges of the reverse index (SPEC 9)."""
    _check_sizes(N=N, topk=topk, block_size=block_size)
    full, rest = divmod(N, block_size)
    rising = min(full, topk)  # the blocks b = 0 .. rising - 1 see b + 1 <= topk blocks
    edges = rising * (rising + 1) // 2 + (full - rising) * topk
    return block_size * edges + rest * min(full + 1, topk)


def exact_dense_flops(N: int, H: int = 64, D: int = 128, Dv: int | None = None) -> int:
    """FLOPs of dense causal attention counted pair by pair, (2·D + 2·Dv)·H·`causal_pairs`; Dv defaults to D."""
    Dv = D if Dv is None else Dv
    _check_sizes(N=N, H=H, D=D, Dv=Dv)
    return 2 * (D + Dv) * H * causal_pairs(N)


def exact_msa_flops(
    N: int, H: int = 64, D: int = 128, Hidx: int = 4, Di: int = 128, topk: int = 16, block_size: int = 128,
    Dv: int | None = None,
) -> int:  # fmt: skip
    """FLOPs of MSA counted pair by pair: 2·Di·Hidx for each causal pair, (2·D + 2·Dv)·H for each gathered pair.

    Eq. 12 counts topk whole blocks for every query, so it is above this count, the more so the shorter the sequence.
    """
    Dv = D if Dv is None else Dv
    _check_sizes(N=N, H=H, D=D, Hidx=Hidx, Di=Di, Dv=Dv)
    return 2 * Di * Hidx * causal_pairs(N) + 2 * (D + Dv) * H * gathered_pairs(N, topk, block_size)


def query_outer_traffic(
    G: int = 16, D: int = 128, topk: int = 16, block_size: int = 128, bytes_per_element: int = 2
) -> Traffic:
    """Work and HBM bytes of one query token in one KV group when the outer loop is over queries (P 4.2).

    The G heads of the group share the gathered keys and values; nothing is shared between queries.
    FLOPs: 4·G·D for each of the topk·block_size keys. Elements: Q in and O out, 2·G·D; K and V of the kept blocks,
    2·topk·block_size·D. With E = topk·block_size and s bytes an element the intensity is (2/s)·G·E / (G + E): just
    under G at 2 bytes, since E is much larger than G.
    """
    _check_sizes(G=G, D=D, topk=topk, block_size=block_size, bytes_per_element=bytes_per_element)
    gathered = topk * block_size
    return Traffic(4 * G * D * gathered, bytes_per_element * (2 * G * D + 2 * gathered * D))


def kv_outer_traffic(
    G: int = 16, D: int = 128, topk: int = 16, block_size: int = 128, bytes_per_element: int = 2
) -> Traffic:
    """Work and HBM bytes of one query token in one KV group when the outer loop is over key blocks (P 4.2).

    FLOPs as in `query_outer_traffic`. For each of its topk blocks a query is read (G·D elements), and its partial
    output written (G·D) and read again by the merge (G·D); the merge writes the output once (G·D). K and V of a block,
    2·block_size·D, are read once for all its queries, topk·block_size of them on average (N queries with topk edges
    each over N / block_size blocks), which makes 2·D / topk elements an edge and 2·D a query. Partial outputs count
    bytes_per_element like everything else; the log-sum-exp of a partial (one number beside D) is left out.
    Elements: 3·topk·G·D + G·D + 2·D; at 2 bytes the intensity is 2·G·topk·block_size / (3·G·topk + G + 2), just under
    2/3 of block_size.
    """
    _check_sizes(G=G, D=D, topk=topk, block_size=block_size, bytes_per_element=bytes_per_element)
    flops = 4 * G * D * topk * block_size
    return Traffic(flops, bytes_per_element * (3 * topk * G * D + G * D + 2 * D))


def dense_decode_bytes(N: int, Hkv: int = 4, D: int = 128, Dv: int | None = None, bytes_per_element: int = 2) -> int:
    """Cache bytes one layer reads to decode one token after N tokens with dense attention: all keys and values."""
    Dv = D if Dv is None else Dv
    _check_sizes(N=N, Hkv=Hkv, D=D, Dv=Dv, bytes_per_element=bytes_per_element)
    return N * Hkv * (D + Dv) * bytes_per_element


def msa_decode_bytes(
    N: int, Hkv: int = 4, D: int = 128, Hik: int = 1, Di: int = 128, topk: int = 16, block_size: int = 128,
    Dv: int | None = None, bytes_per_element: int = 2,
) -> int:  # fmt: skip
    """Cache bytes one layer reads to decode one token after N tokens with MSA (SPEC 10).

    All N index keys of the Hik index key heads, then the keys and values of topk blocks for each KV head (at most N
    tokens). With the defaults, N·Di against 2·Hkv·N·D for dense attention, so that dense / MSA is 8 / (1 + 16384 / N).
    """
    _check_sizes(Hik=Hik, Di=Di, topk=topk, block_size=block_size)
    gathered = dense_decode_bytes(min(N, topk * block_size), Hkv, D, Dv, bytes_per_element)
    return N * Hik * Di * bytes_per_element + gathered


def decode_ratio(
    N: int, Hkv: int = 4, D: int = 128, Hik: int = 1, Di: int = 128, topk: int = 16, block_size: int = 128,
    Dv: int | None = None,
) -> float:  # fmt: skip
    """How many times more cache bytes dense attention reads than MSA to decode one token after N tokens."""
    return dense_decode_bytes(N, Hkv, D, Dv) / msa_decode_bytes(N, Hkv, D, Hik, Di, topk, block_size, Dv)


def joules_per_flop(watts: float, peak_flops_per_second: float, utilisation: float) -> float:
    """Energy of one useful FLOP in joules on an accelerator that draws `watts` and reaches `utilisation` of its peak.

    An H200 at 700 W with a bfloat16 peak of 989e12 FLOP/s, 40 % used, takes 1.8e-12 J. Cooling and the host are extra.

    Raises:
        TypeError, ValueError: an argument that is not a finite number > 0, or utilisation above 1.
    """
    _check_positive(watts=watts, peak_flops_per_second=peak_flops_per_second, utilisation=utilisation)
    if utilisation > 1:
        raise ValueError(f"utilisation must be at most 1, got {utilisation}")
    return watts / (peak_flops_per_second * utilisation)


def training_kwh(forward_flops: float, joules_per_flop: float, passes: float = 3.0) -> float:
    """Energy in kWh of training on work that takes `forward_flops` in the forward pass.

    Args:
        forward_flops: FLOPs of the forward pass of everything counted: layers, sequences, steps.
        joules_per_flop: an assumption about the machine, in joules; see `joules_per_flop`.
        passes: FLOPs of forward and backward together over those of the forward: 3, as each product of the forward has
            two in the backward; 3.5 for attention whose backward computes the logits again.

    Raises:
        TypeError, ValueError: an argument that is not a finite number > 0.
    """
    _check_positive(forward_flops=forward_flops, joules_per_flop=joules_per_flop, passes=passes)
    return forward_flops * passes * joules_per_flop / JOULES_PER_KWH


def irish_data_centre_seconds(kwh: float, year: int = 2025) -> float:
    """For how many seconds an energy in kWh runs all data centres in Ireland, at that year's mean power (CSO).

    Raises:
        ValueError: a year that `IRISH_DATA_CENTRES_GWH` does not hold, or kwh not finite and > 0.
    """
    _check_positive(kwh=kwh)
    if year not in IRISH_DATA_CENTRES_GWH:
        raise ValueError(f"year must be one of {sorted(IRISH_DATA_CENTRES_GWH)}, got {year}")
    seconds = (366 if calendar.isleap(year) else 365) * 86_400
    return kwh / (IRISH_DATA_CENTRES_GWH[year] * 1e6) * seconds


def _check_sizes(**sizes) -> None:
    for name, size in sizes.items():
        check_integer(name, size, 1)


def _check_positive(**values) -> None:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise TypeError(f"{name} must be a number, got {type(value).__name__} {value!r}")
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"{name} must be finite and > 0, got {value}")
