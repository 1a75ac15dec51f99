"""Figures of the course: each function takes tensors or numbers and returns a matplotlib Figure.

A figure is closed before it is returned, so a notebook shows it once, as the value of a cell's last expression.
`title` replaces a figure's own title, which states its message. Colours: Okabe and Ito's palette and viridis, which
readers with any common colour-vision deficiency can tell apart.

Tensors may be on any device. Where a function shows one head it takes a 2-D or 3-D tensor: index with [batch, head].
"""

from __future__ import annotations

import numpy as np
import torch
from matplotlib import pyplot as plt
from matplotlib.colors import LinearSegmentedColormap, ListedColormap, LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator

from msa_ref import cost
from msa_ref.problem import BlockGeometry
from msa_ref.selection import listed_blocks

BLACK, ORANGE, SKY, GREEN, YELLOW, BLUE, VERMILION, PURPLE = (
    "#000000", "#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7",
)  # fmt: skip
COLOURS = (BLUE, VERMILION, GREEN, ORANGE, PURPLE, SKY, BLACK)
LIGHT_GREY = "#E3E3E3"
GREYS = LinearSegmentedColormap.from_list("greys", [LIGHT_GREY, "#303030"])
MARKERS = "osD^vPX"
STYLE = {"axes.grid": True, "grid.alpha": 0.3, "axes.spines.top": False, "axes.spines.right": False, "font.size": 10}


def plot_attention(probabilities, block_indices=None, *, block_size=128, cu_seqlens=None, title=None) -> Figure:
    """Attention matrix of one head on a logarithmic scale; what lies outside the kept blocks is grey.

    Args:
        probabilities: [N, N], each row a query's probabilities over the keys.
        block_indices: [N, topk] ids, -1 for an unused slot, or None.
        block_size, cu_seqlens: where the blocks lie, as in `sparse_attention`.

    Raises:
        ValueError: another shape, or an id out of range.
    """
    image = _array("probabilities", probabilities, 2)
    figure, axes = _figure(7.5, 5.8)
    floor = 1e-4
    shown = np.where(image > 0, np.maximum(image, floor), np.nan)
    kept, message = np.ones_like(image, dtype=bool), "Attention of one head: each row is a query's probabilities"
    if block_indices is not None:
        geometry = BlockGeometry(len(image), block_size, cu_seqlens)
        kept = _kept(block_indices, geometry.blocks)[:, geometry.block_of]
        message = f"The kept blocks hold {(image * kept).sum(-1).mean():.0%} of the attention"
    _kept_in_colour(figure, axes, shown, kept, LogNorm(floor, 1), f"attention probability ({floor:g} stands for less)")
    _finish(axes, title or message, "key token", "query token")
    return figure


def plot_selection(block_indices, *, block_size=128, cu_seqlens=None, title=None) -> Figure:
    """Which key blocks each query keeps, one panel for each index head.

    Args:
        block_indices: [N, topk] or [Hidx, N, topk] ids, -1 for an unused slot.
        block_size, cu_seqlens: where the blocks lie, as in `sparse_attention`.

    Raises:
        ValueError: another shape, or an id out of range.
    """
    heads = _array("block_indices", block_indices, 2, 3)
    heads = heads[None] if heads.ndim == 2 else heads
    tokens = heads.shape[1]
    geometry = BlockGeometry(tokens, block_size, cu_seqlens)
    visible, own = geometry.visible_blocks().numpy(), geometry.forced_blocks(local_blocks=1, init_blocks=0).numpy()
    figure, all_axes = _figure(8.0, 4.4 if len(heads) > 1 else 5.0, columns=len(heads))
    kept = np.stack([_kept(ids, geometry.blocks) for ids in heads])
    colours = ListedColormap(["white", LIGHT_GREY, BLUE, ORANGE])
    for head, axes in enumerate(np.atleast_1d(all_axes)):
        axes.imshow(visible * (1 + kept[head] * (1 + own)), cmap=colours, vmin=-0.5, vmax=3.5, aspect="auto",
                    interpolation="nearest")  # fmt: skip
        _finish(axes, f"index head {head}" if len(heads) > 1 else "", f"key block ({block_size} tokens)",
                "" if head else "query token")  # fmt: skip
        axes.grid(False)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=10))
    names = {ORANGE: "own block", BLUE: "chosen", LIGHT_GREY: "visible, not kept"}
    figure.legend(handles=[Patch(color=c, label=n) for c, n in names.items()], loc="outside lower center", ncols=3)
    share = (kept & visible).sum() / (visible.sum() * len(heads))
    figure.suptitle(title or f"Each query keeps at most {heads.shape[2]} blocks: {share:.0%} of the visible ones")
    return figure


def plot_block_scores(scores, block_indices=None, *, title=None) -> Figure:
    """Block scores of one index head (the largest token score of each block); blocks not kept are grey.

    Args:
        scores: [N, NB] block scores; -inf (or NaN) where a block is not visible.
        block_indices: [N, topk] ids, -1 for an unused slot, or None.

    Raises:
        ValueError: another shape, or an id out of range.
    """
    image = _array("scores", scores, 2).astype(float)
    shown = np.where(np.isfinite(image), image, np.nan)
    figure, axes = _figure(7.5, 5.0)
    kept, message = np.ones_like(shown, dtype=bool), "The index scores every visible block"
    if block_indices is not None:
        kept, message = _kept(block_indices, image.shape[1]), message + " and keeps the best"
    _kept_in_colour(figure, axes, shown, kept, Normalize(np.nanmin(shown), np.nanmax(shown)), "block score (no unit)")
    _finish(axes, title or message, "key block", "query token")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure


def plot_block_load(block_indices, *, block_size=128, cu_seqlens=None, title=None) -> Figure:
    """How many queries keep each block, beside how many see it: the load of a key-major kernel.

    Args:
        block_indices: [N, topk] ids of one index head, -1 for an unused slot.
        block_size, cu_seqlens: where the blocks lie, as in `sparse_attention`.

    Raises:
        ValueError: another shape, or an id out of range.
    """
    ids = _array("block_indices", block_indices, 2)
    geometry = BlockGeometry(len(ids), block_size, cu_seqlens)
    load, blocks = _kept(ids, geometry.blocks).sum(0), np.arange(geometry.blocks)
    figure, axes = _figure(8.0, 3.6)
    axes.bar(blocks, geometry.visible_blocks().numpy().sum(0), width=1.0, color=LIGHT_GREY, label="queries that see it")
    axes.bar(blocks, load, width=0.8, color=BLUE, label="queries that keep it")
    axes.axhline(load.mean(), color=VERMILION, linestyle="--", label=f"mean, {load.mean():.0f}")
    axes.legend(loc="upper right")
    message = f"Block {load.argmax()} is kept by {load.max()} queries, {load.max() / load.mean():.1f} times the mean"
    _finish(axes, title or message, "key block", "queries")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.margins(x=0.01)
    return figure


def plot_reverse_index(block_indices, *, block_size=128, cu_seqlens=None, title=None) -> Figure:
    """The transpose of a selection as CSR: its queries, block after block, with the offsets below.

    Args:
        block_indices: [N, topk] ids of one index head, -1 for an unused slot.
        block_size, cu_seqlens: where the blocks lie, as in `sparse_attention`.

    Raises:
        ValueError: another shape, or an id out of range.
    """
    ids = _array("block_indices", block_indices, 2)
    kept = _kept(ids, BlockGeometry(len(ids), block_size, cu_seqlens).blocks)
    blocks, queries = np.nonzero(kept.T)
    offsets = np.concatenate([[0], kept.sum(0).cumsum()])
    figure, axes = _figure(8.0, 4.2)
    size = min(20.0, max(2.0, 2000 / max(len(queries), 1)))
    axes.scatter(np.arange(len(queries)), queries, s=size, c=np.array([BLUE, ORANGE])[blocks % 2], linewidths=0)
    axes.vlines(offsets - 0.5, 0, len(ids) - 1, color="#B0B0B0", linewidth=0.6, zorder=0)
    named, right = [], -np.inf  # a label for a block only where it does not run into the one before
    for block in range(len(offsets) - 1):
        if offsets[block] - right >= 0.06 * len(queries):
            named.append(block)
            right = offsets[block]
    axes.set_xticks(offsets[named] - 0.5, [f"{block}\n{offsets[block]}" for block in named])
    message = f"Reverse index: {len(queries)} (query, block) edges sorted by block, then by query"
    _finish(axes, title or message, "key block, and below it the offset of its first edge", "query token")
    axes.grid(False)
    axes.margins(x=0.01)
    return figure


def plot_flops(lengths=None, *, title=None, **model) -> Figure:
    """Forward FLOPs of one layer against length, dense and MSA, with the crossover (P eq. 12).

    Args:
        lengths: lengths N in tokens, ints; default the powers of 2 from 2^10 to 2^20.
        model: H, D, Hidx, Di, topk, block_size, as in `msa_ref.cost.msa_flops`; default the paper's.
    """
    lengths = [2**n for n in range(10, 21)] if lengths is None else list(lengths)
    dense = [cost.dense_flops(N, **_only(model, "H", "D")) for N in lengths]
    msa = [cost.msa_flops(N, **model) for N in lengths]
    crossover = cost.crossover(**model)
    figure, axes = _figure(8.0, 4.6)
    for values, name, colour, style in ((dense, "dense", BLUE, "-"), (msa, "MSA, both terms", VERMILION, "-")):
        axes.plot(lengths, values, style, color=colour, label=name, linewidth=2)
    index = [cost.index_flops(N, **_only(model, "Hidx", "Di")) for N in lengths]
    axes.plot(lengths, index, ":", color=GREEN, label="MSA, index term only", linewidth=2)
    _mark_crossover(axes, crossover)
    _logarithmic(axes, y=True)
    axes.legend()
    message = f"MSA takes {dense[-1] / msa[-1]:.1f} times fewer FLOPs at {lengths[-1]:,} tokens"
    _finish(axes, title or message, "length N (tokens)", "forward FLOPs per layer")
    return figure


def plot_flop_ratio(lengths=None, *, title=None, **model) -> Figure:
    """Dense over MSA FLOPs against length, with the crossover and the limit (P eq. 12); arguments of `plot_flops`."""
    lengths = [2**n for n in range(10, 23)] if lengths is None else list(lengths)
    ratios = [cost.flop_ratio(N, **model) for N in lengths]
    limit = cost.flop_ratio_limit(**_only(model, "H", "D", "Hidx", "Di"))
    figure, axes = _figure(8.0, 4.2)
    axes.plot(lengths, ratios, color=BLUE, linewidth=2, marker="o", markersize=4, label="dense FLOPs / MSA FLOPs")
    axes.axhline(limit, color=GREEN, linestyle=":", label=f"limit, {limit:g}")
    axes.axhline(1, color=BLACK, linewidth=0.8)
    crossover = cost.crossover(**model)
    _mark_crossover(axes, crossover)
    _logarithmic(axes, y=False)
    axes.legend(loc="center right")
    message = f"MSA saves FLOPs above {crossover:,.0f} tokens, up to {limit:g} times"
    _finish(axes, title or message, "length N (tokens)", "dense FLOPs / MSA FLOPs")
    return figure


def plot_lines(curves, *, title, xlabel, ylabel, logx=False, logy=False, hline=None, markers=None) -> Figure:
    """Named curves over one axis: losses, KL, recall, timings.

    Args:
        curves: name -> (x, y), two equally long sequences or 1-D tensors.
        xlabel, ylabel: with their units.
        hline: None, or (y, name) of a level to compare with.
        markers: draw a mark at each point; default where a curve has at most 30.

    Raises:
        ValueError: no curve, or an x and a y of different lengths.
    """
    if not curves:
        raise ValueError("curves must hold at least one curve, got none")
    figure, axes = _figure(8.0, 4.4)
    for number, (name, (x, y)) in enumerate(curves.items()):
        x, y = _array(f"x of {name!r}", x, 1), _array(f"y of {name!r}", y, 1)
        if len(x) != len(y):
            raise ValueError(f"curve {name!r} must have as many x as y, got {len(x)} and {len(y)}")
        marked = len(x) <= 30 if markers is None else markers
        axes.plot(x, y, label=name, color=COLOURS[number % len(COLOURS)], markersize=5, linewidth=1.8,
                  marker=MARKERS[number % len(MARKERS)] if marked else None,
                  linestyle="-" if number < len(COLOURS) else "--")  # fmt: skip
    if hline is not None:
        axes.axhline(hline[0], color=BLACK, linestyle=":", linewidth=1.5, label=hline[1])
    axes.set(xscale="log" if logx else "linear", yscale="log" if logy else "linear")
    if len(curves) > 1 or hline is not None:
        axes.legend()
    _finish(axes, title, xlabel, ylabel)
    return figure


def plot_recall_curves(steps, recalls, *, title=None, xlabel="training step", ylabel="score recall") -> Figure:
    """Recall against training steps, or against any setting, one curve for each selection.

    Args:
        steps: x values, shared by all curves.
        recalls: name -> y values, between 0 and 1; include the controls (last blocks, random blocks).
    """
    last = {name: float(values[-1]) for name, values in recalls.items()}
    best = max(last, key=last.get, default="")
    message = f"Highest recall at the end: {best}, {last[best]:.2f}" if last else ""
    curves = {name: (steps, values) for name, values in recalls.items()}
    figure = plot_lines(curves, title=title or message, xlabel=xlabel, ylabel=ylabel)
    figure.axes[0].set_ylim(0, 1.02)
    return figure


def plot_time_memory(lengths, dense_times, msa_times, dense_memory, msa_memory, *, title=None) -> Figure:
    """Measured time and peak memory of dense attention and MSA against length, both axes logarithmic.

    Args:
        lengths: N, in tokens. dense_times, msa_times: in seconds. dense_memory, msa_memory: in MiB.
            A NaN leaves a point out, such as a length that dense attention has no memory for.
    """
    figure, (left, right) = _figure(8.0, 3.9, columns=2)
    for axes, dense, msa in ((left, dense_times, msa_times), (right, dense_memory, msa_memory)):
        for values, name, colour, marker in ((dense, "dense", BLUE, "o"), (msa, "MSA", VERMILION, "s")):
            axes.plot(lengths, values, marker=marker, color=colour, label=name, linewidth=1.8, markersize=5)
        _logarithmic(axes, y=True)
        axes.set_xticks(list(lengths))
    _finish(left, "time", "length N (tokens)", "time (s)")
    _finish(right, "peak memory", "length N (tokens)", "peak memory (MiB)")
    left.legend()
    message = "Time and memory of attention"
    for N, dense, msa in zip(lengths, dense_times, msa_times, strict=True):
        if dense == dense and msa == msa:  # neither is NaN
            how = f"{dense / msa:.1f} times faster" if dense >= msa else f"{msa / dense:.1f} times slower"
            message = f"At {N:,} tokens MSA is {how} than dense attention"
    figure.suptitle(title or message)
    return figure


def plot_energy(lengths=None, *, joules_per_flop, layers=1, tokens=10**12, title=None, **model) -> Figure:
    """Electricity of the attention of a training run against the length it trains at, dense and MSA.

    Args:
        lengths: N in tokens, ints; default the powers of 2 from 2^12 to 2^20.
        joules_per_flop: the assumption that turns FLOPs into energy, in J; see `msa_ref.cost.joules_per_flop`.
        layers: attention layers of the model. tokens: tokens of the run, so tokens / N sequences.
        model: as in `plot_flops`. Forward and backward together count 3 times the forward FLOPs.
    """
    lengths = [2**n for n in range(12, 21)] if lengths is None else list(lengths)
    per_token = {
        "dense": [cost.dense_flops(N, **_only(model, "H", "D")) / N for N in lengths],
        "MSA": [cost.msa_flops(N, **model) / N for N in lengths],
    }
    figure, axes = _figure(8.0, 4.4)
    ends = []
    for (name, flops), colour, marker in zip(per_token.items(), (BLUE, VERMILION), "os", strict=True):
        energy = [cost.training_kwh(f * layers * tokens, joules_per_flop) / 1e6 for f in flops]
        ends.append(energy[-1])
        axes.plot(lengths, energy, marker=marker, color=colour, label=name, linewidth=2, markersize=5)
    _logarithmic(axes, y=True)
    axes.legend(title=f"{joules_per_flop:.2g} J per FLOP, {layers} layers, {tokens:.0e} tokens")
    message = f"At {lengths[-1]:,} tokens, attention takes {ends[0]:.3g} GWh dense and {ends[1]:.3g} GWh with MSA"
    _finish(axes, title or message, "training length N (tokens)", "energy of attention (GWh)")
    return figure


def _figure(width, height, columns=1):
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(1, columns, figsize=(width, height), layout="constrained", dpi=100)
    plt.close(figure)
    return figure, axes


def _finish(axes, title, xlabel, ylabel):
    axes.set(title=title, xlabel=xlabel, ylabel=ylabel)


def _array(name, values, *ranks) -> np.ndarray:
    if torch.is_tensor(values):
        values = values.detach().cpu()
        values = values.float() if values.dtype == torch.bfloat16 else values
    array = np.asarray(values)
    if array.ndim not in ranks or array.size == 0:
        raise ValueError(f"{name} must have {' or '.join(map(str, ranks))} dimensions, got shape {array.shape}")
    return array


def _kept(block_indices, blocks) -> np.ndarray:
    """[N, topk] ids to a mask [N, blocks]."""
    ids = _array("block_indices", block_indices, 2)
    if ids.max() >= blocks:
        raise ValueError(f"block_indices must be below {blocks} blocks, got {ids.max()}; is block_size right?")
    return listed_blocks(torch.from_numpy(ids.copy()), blocks).numpy()


def _kept_in_colour(figure, axes, image, kept, norm, label):
    place = {"norm": norm, "aspect": "auto", "interpolation": "nearest"}
    axes.imshow(np.where(kept, np.nan, image), cmap=GREYS, **place)
    picture = axes.imshow(np.where(kept, image, np.nan), cmap="viridis", **place)
    figure.colorbar(picture, label=label + (", kept blocks" if not kept.all() else ""))
    if not kept.all():
        axes.legend(handles=[Patch(color=LIGHT_GREY, label="not kept (darker: higher)")], loc="upper right")
    axes.grid(False)


def _only(model, *names) -> dict:
    return {name: model[name] for name in names if name in model}


def _mark_crossover(axes, crossover):
    if np.isfinite(crossover):
        axes.axvline(crossover, color=BLACK, linestyle="--", linewidth=1, label=f"crossover, {crossover:,.0f} tokens")


def _logarithmic(axes, y):
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda N, _: f"{N / 1024:g}K" if N < 2**20 else f"{N / 2**20:g}M"))
    if y:
        axes.set_yscale("log")
