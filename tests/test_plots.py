"""Every figure renders without a warning, is closed, is labelled, and shows the numbers it was given."""

import math
import subprocess
import sys
import warnings
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import numpy as np
import pytest
import torch
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from msa_ref import cost, plots, recall

N, BLOCK, TOPK = 24, 4, 3
IDS = recall.random_blocks(N, BLOCK, TOPK, seed=0, index_heads=2)[0]
PACKED = recall.random_blocks(N, BLOCK, TOPK, seed=0, cu_seqlens=[0, 9, 24])[0, 0]
GENERATOR = torch.Generator().manual_seed(0)
LOGITS = torch.randn(N, N, generator=GENERATOR).masked_fill(torch.ones(N, N).triu(1).bool(), -math.inf)
PROBABILITIES = LOGITS.softmax(dim=-1)
SCORES = torch.randn(N, 6, generator=GENERATOR).masked_fill(
    torch.arange(6) > torch.arange(N)[:, None] // BLOCK, -math.inf
)
STEPS = torch.arange(0, 50, 10)
FIGURES = {
    "attention": lambda: plots.plot_attention(PROBABILITIES.bfloat16()),
    "attention, kept": lambda: plots.plot_attention(PROBABILITIES, IDS[0], block_size=BLOCK),
    "attention, packed": lambda: plots.plot_attention(PROBABILITIES, PACKED, block_size=BLOCK, cu_seqlens=[0, 9, 24]),
    "selection": lambda: plots.plot_selection(IDS[0], block_size=BLOCK),
    "selection, heads": lambda: plots.plot_selection(IDS, block_size=BLOCK),
    "block scores": lambda: plots.plot_block_scores(SCORES, IDS[0]),
    "block scores, all": lambda: plots.plot_block_scores(SCORES),
    "block load": lambda: plots.plot_block_load(IDS[0], block_size=BLOCK),
    "reverse index": lambda: plots.plot_reverse_index(IDS[0], block_size=BLOCK),
    "FLOPs": plots.plot_flops,
    "FLOP ratio": plots.plot_flop_ratio,
    "lines": lambda: plots.plot_lines({"a": (STEPS, STEPS + 1.0)}, title="t", xlabel="x", ylabel="y", hline=(2, "b")),
    "recall": lambda: plots.plot_recall_curves(STEPS, {"index": STEPS / 50, "last": STEPS / 100}),
    "time and memory": lambda: plots.plot_time_memory([1024, 2048], [1, math.nan], [2, 3], [10, math.nan], [5, 6]),
    "energy": lambda: plots.plot_energy(joules_per_flop=2e-12, layers=60),
}


@pytest.mark.parametrize("name", FIGURES)
def test_figure_renders_labelled_and_closed(name):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure = FIGURES[name]()
        figure.canvas.draw()
    assert isinstance(figure, Figure) and not plt.get_fignums()
    assert figure.get_figwidth() <= 8.0
    assert figure.get_suptitle() or figure.axes[0].get_title()
    assert all(axes.get_xlabel() or axes.get_ylabel() for axes in figure.axes)
    assert figure.axes[0].get_xlabel() and figure.axes[0].get_ylabel()


def images(figure):
    return [np.ma.filled(image.get_array().astype(float), np.nan) for image in figure.axes[0].get_images()]


@pytest.mark.parametrize("cu_seqlens", [None, [0, 9, 24]])
def test_selection_colours_follow_the_ids(cu_seqlens):
    ids = PACKED if cu_seqlens else IDS[0]
    shown = images(plots.plot_selection(ids, block_size=BLOCK, cu_seqlens=cu_seqlens))[0]
    starts = [0, 4, 8, 9, 13, 17, 21] if cu_seqlens else list(range(0, N, BLOCK))
    assert shown.shape == (N, len(starts))
    for query, block in np.ndindex(shown.shape):
        document = 9 if cu_seqlens and query >= 9 else 0
        visible = document <= starts[block] <= query
        own = visible and (block + 1 == len(starts) or starts[block + 1] > query)
        kept = block in ids[query].tolist()
        assert shown[query, block] == (3 if own else 2 if kept else 1 if visible else 0)


def test_attention_is_in_colour_where_it_is_kept():
    figure = plots.plot_attention(PROBABILITIES, IDS[0], block_size=BLOCK)
    grey, colour = images(figure)
    for query, key in np.ndindex(N, N):
        visible, kept = key <= query, key // BLOCK in IDS[0][query].tolist()
        assert np.isfinite(colour[query, key]) == (visible and kept)
        assert np.isfinite(grey[query, key]) == (visible and not kept)
    mass = PROBABILITIES.reshape(N, 6, BLOCK).sum(-1).gather(1, IDS[0].long().clamp(min=0)) * (IDS[0] >= 0)
    assert figure.axes[0].get_title() == f"The kept blocks hold {mass.sum(1).mean():.0%} of the attention"


def test_block_load_counts_queries():
    bars = [patch.get_height() for patch in plots.plot_block_load(IDS[0], block_size=BLOCK).axes[0].patches]
    assert bars[:6] == [24, 20, 16, 12, 8, 4]
    assert bars[6:] == [(IDS[0] == block).sum().item() for block in range(6)]
    packed = plots.plot_block_load(PACKED, block_size=BLOCK, cu_seqlens=[0, 9, 24]).axes[0].patches
    assert [patch.get_height() for patch in packed[:7]] == [9, 5, 1, 15, 11, 7, 3]
    assert [patch.get_height() for patch in packed[7:]] == [(PACKED == block).sum().item() for block in range(7)]


def test_reverse_index_lists_queries_block_after_block():
    figure = plots.plot_reverse_index(IDS[0], block_size=BLOCK)
    points = figure.axes[0].collections[0].get_offsets()
    expected = [query for block in range(6) for query in range(N) if block in IDS[0][query].tolist()]
    assert points[:, 1].tolist() == expected and len(expected) == cost.block_edges(N, TOPK, BLOCK)
    assert str(len(expected)) in figure.axes[0].get_title()


def test_flop_figures_show_the_counts():
    lengths, toy = [64, 256], {"H": 4, "D": 8, "Hidx": 2, "Di": 4, "topk": 2, "block_size": 8}
    lines = plots.plot_flops(lengths, **toy).axes[0].lines
    assert lines[0].get_ydata().tolist() == [cost.dense_flops(N, 4, 8) for N in lengths]
    assert lines[1].get_ydata().tolist() == [cost.msa_flops(N, **toy) for N in lengths]
    ratio = plots.plot_flop_ratio(lengths, **toy).axes[0]
    assert ratio.lines[0].get_ydata().tolist() == [cost.flop_ratio(N, **toy) for N in lengths]
    assert ratio.lines[-1].get_xdata()[0] == cost.crossover(**toy)
    assert "28.4 times" in plots.plot_flops().axes[0].get_title()


def test_energy_of_a_run():
    axes = plots.plot_energy([4096], joules_per_flop=2e-12, layers=3, tokens=10**9).axes[0]
    expected = 3 * cost.dense_flops(4096) * 3 * (10**9 / 4096) * 2e-12 / 3.6e12
    assert axes.lines[0].get_ydata()[0] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: plots.plot_attention(torch.rand(2, 4, 4)), r"probabilities must have 2 dimensions, got shape \(2, 4"),
        (lambda: plots.plot_selection(IDS[None], block_size=BLOCK), "block_indices must have 2 or 3 dimensions"),
        (lambda: plots.plot_selection(IDS[0], block_size=8), "block_indices must be below 3 blocks, got 5"),
        (lambda: plots.plot_lines({}, title="", xlabel="", ylabel=""), "curves must hold at least one"),
        (lambda: plots.plot_lines({"a": ([1, 2], [1])}, title="", xlabel="", ylabel=""), "got 2 and 1"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_importing_the_package_does_not_import_matplotlib():
    code = "import sys, msa_ref, msa_ref.cost, msa_ref.recall, msa_ref.inputs; assert 'matplotlib' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(plots.__file__).parents[1])
