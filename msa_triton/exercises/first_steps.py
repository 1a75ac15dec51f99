"""Checks of notebook 07: masks, addresses, the online softmax and the causal mask in a kernel."""

from __future__ import annotations

import torch

from msa_ref import dense
from msa_ref.exercises.verdict import check, compare, require
from msa_triton.exercises.running import guarded, require_inside, run

BEYOND = 100.0  # what lies around a matrix in memory


@check
def check_band_maximum(kernel) -> str:
    """A kernel (x_ptr, out_ptr, stride_x0, stride_x1, rows, columns, ROWS, COLUMNS): the maximum of every ROWS rows."""
    generator = torch.Generator().manual_seed(0)
    rows, columns = 7, 5
    for name in ("the maxima", "the maxima of a transposed matrix"):
        around = torch.full((16, 16), BEYOND)
        x = (around if name == "the maxima" else around.T)[:rows, :columns]
        x.copy_(-1 - torch.rand(rows, columns, generator=generator))
        out = guarded(2)
        run(kernel, 2, x, out, *x.stride(), rows, columns, ROWS=4, COLUMNS=8)
        require_inside("out", out)
        expected = [float(x[:4].max()), float(x[4:].max())]
        mistakes = {
            "lanes beyond the last column are loaded and win: they need a mask.": [BEYOND, BEYOND],
            "lanes beyond the last row are loaded and win: they need a mask.": [expected[0], BEYOND],
            "masked lanes hold 0 and win, as all x are negative: choose `other`.": [0.0, 0.0],
        }
        compare(name, out, expected, mistakes=mistakes)
    return "every band has its maximum, and no lane beyond the matrix takes part."


@check
def check_row_offsets(kernel) -> str:
    """A kernel (out_ptr, stride, rows, TILE) that stores the offset row * stride of each row, int64."""
    rows, tile = 10, 4
    for stride in (3, 2**29):
        out = guarded(rows, fill=-1, dtype=torch.int64)
        run(kernel, 3, out, stride, rows, TILE=tile)
        require_inside("out", out)
        exact = torch.arange(rows) * stride
        wrapped = {"the product wraps around at 2**31. Widen what is multiplied, not the product.": exact.int().long()}
        compare(f"the offsets of rows {stride:,} apart", out, exact, tolerance=0, mistakes=wrapped)
    return "every offset is right, also beyond 2**31."


@check
def check_row_lse(kernel) -> str:
    """A kernel (x_ptr, lse_ptr, stride_x0, stride_x1, rows, columns, scale, ROWS, COLUMNS): the LSE of each row."""
    x = torch.randn(5, 150, generator=torch.Generator().manual_seed(1)) + torch.linspace(0, 6, 150)
    for scale, shift in ((0.5, 0.0), (2.0, 300.0)):
        out = guarded(5)
        run(kernel, 2, x + shift, out, *x.stride(), *x.shape, scale, ROWS=4, COLUMNS=32)
        require_inside("lse", out)
        wrong = {
            "the old sum is not rescaled when the maximum grows.": lambda step, scale: torch.ones_like(step),
            "the old sum is multiplied by the inverse: it must shrink.": lambda step, scale: (-scale * step).exp(),
            "the rescale leaves out the factor scale · log2(e).": lambda step, scale: step.exp2(),
            "only the last tile is in the sum.": lambda step, scale: torch.zeros_like(step),
        }
        y = (x + shift).double()
        mistakes = {sentence: _lse_in_tiles(y, scale, rescale) for sentence, rescale in wrong.items()}
        compare(f"lse at scale {scale}", out, (scale * y).logsumexp(1), mistakes=mistakes)
    return "every row has its LSE, also where a plain exp overflows."


def _lse_in_tiles(x, scale, rescale):
    """The LSE of rows by tiles of 32 columns; rescale takes (old maximum - new maximum, scale)."""
    largest, total = torch.full((len(x),), -torch.inf, dtype=x.dtype), 0.0
    for tile in x.split(32, 1):
        now = torch.maximum(largest, tile.amax(1))
        old = rescale(largest - now, scale) * total if largest.isfinite().all() else 0.0
        total = old + (scale * (tile - now[:, None])).exp().sum(1)
        largest = now
    return largest * scale + total.log()


@check
def check_causal_attention(kernel) -> str:
    """A kernel (q_ptr, k_ptr, v_ptr, out_ptr, N, scale, ROWS, KEYS, WIDTH): causal attention of one head."""
    N, width, kept = 37, 16, 20
    q, k, v = torch.randn(3, N, width, generator=torch.Generator().manual_seed(2))

    def attention(k, v):
        out = guarded(N, width)
        run(kernel, 3, q, k, v, out, N, 0.25, ROWS=16, KEYS=16, WIDTH=width)
        require_inside("out", out)
        return out

    out, other = attention(k, v), attention(*(torch.cat([t[:kept], -t[kept:]]) for t in (k, v)))
    moved = ((out != other) & ~(out.isnan() & other.isnan())).any(1)[:kept]
    if moved.any():
        row = int(moved.nonzero()[0])
        require(False, f"a future token leaks: query {row} changes when only tokens from {kept} on do.")
    logits = 0.25 * q.double() @ k.double().T
    strict = logits.masked_fill(torch.ones(N, N, dtype=torch.bool).triu(), -torch.inf).softmax(1) @ v.double()
    expected, _ = dense.sparse_attention(*(t.double()[None, None] for t in (q, k, v)), None, scale=0.25)
    mistakes = {"a query must see its own token too.": strict}
    compare("out", out, expected[0, 0], mistakes=mistakes)
    return "every query sees its own and all earlier tokens, and no later one."
