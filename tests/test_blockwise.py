"""How the blockwise implementation works inside: tiles, shifts of the softmax, and the loss's unit gradients."""

import pytest
import torch
from compare import assert_close, assert_equal, assert_same_run, random_inputs, random_like, run, run_reference

from msa_ref import BlockGeometry, blockwise
from msa_ref.blockwise import attention, index_loss
from msa_ref.blockwise.tiles import CUT, TileProducts

NARROW = dict(B=1, N=77, H=6, Hkv=2, Hidx=2, Hik=1, D=5, Dv=3, Di=4)


@pytest.mark.parametrize("rows, pieces", [(3, 1), (12, 2), (48, 3)])
@pytest.mark.parametrize("options", [{"topk": 4}, {"topk": None}, {"topk": 2, "cu_seqlens": [0, 9, 60, 77]}])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_the_result_does_not_depend_on_the_size_of_the_tiles(monkeypatch, rows, pieces, options, reduction):
    monkeypatch.setattr(attention, "TILE_ROWS", rows)
    monkeypatch.setattr(index_loss, "PIECES", pieces)
    inputs, options = random_inputs(0, **NARROW), {"block_size": 16, "reduction": reduction} | options
    dout = random_like(inputs["q"][..., :3], 1)
    dkl = random_like(inputs["index_q"][..., 0] if reduction == "none" else torch.ones(()), 2)
    reference = run_reference(inputs, options, dout, dkl)
    assert_same_run(run(blockwise, inputs, options, dout, dkl), reference, torch.float32)


@pytest.mark.parametrize("growth", [0.5, 4.0, 60.0, 1000.0])
def test_logits_may_grow_from_block_to_block(growth):
    """Growth of the largest logit from block to block: less than a row's slack, more, and beyond the range of exp."""
    inputs = random_inputs(0, **NARROW, dtype=torch.float64)
    inputs["q"][..., 0], inputs["index_q"][..., 0] = 1, 1
    for name in ("k", "index_k"):
        inputs[name][..., 0] = torch.arange(77) // 16 * growth
    options = {"topk": 3, "block_size": 16, "init_blocks": 1, "scale": 1.0, "index_scale": 1.0}
    for dtype in (torch.float64, torch.float32)[: 1 if growth > 100 else 2]:  # 4000 steps by 2e-4 in float32
        cast = {name: tensor.to(dtype) for name, tensor in inputs.items()}
        assert_same_run(run(blockwise, cast, options), run_reference(cast, options), dtype)


@pytest.mark.parametrize("spread", [0.1, 1.0, 10.0, 100.0])
def test_logits_are_cut_off_only_where_exp_would_underflow(spread):
    inputs = random_inputs(0, **NARROW)
    rows, keys = (inputs["q"][0] * spread).transpose(0, 1).contiguous(), inputs["k"][0, 0]
    steep = TileProducts(rows, keys, tile=8, longest=16).steep
    logits = rows @ keys.T
    deepest = (logits - logits.logsumexp(-1, keepdim=True)).min()
    assert steep == (spread >= 10)
    assert steep or deepest > -CUT
    logits = torch.tensor([[[0.0, -70.0, -90.0, -1e30]]])
    exponentials = attention.exp_(logits.clone(), torch.tensor([[[False, False, False, True]]]), steep=True)
    assert_close(exponentials, logits.exp(), 1e-34, floor=1.0)
    assert exponentials[0, 0, 3] == 0


def test_equal_upstream_gradients_need_no_second_walk(monkeypatch):
    inputs = random_inputs(0, **NARROW)
    options = {"topk": 3, "block_size": 16, "reduction": "none"}
    walks, walk = [], index_loss._walk
    monkeypatch.setattr(index_loss, "_walk", lambda *arguments: walks.append(1) or walk(*arguments))
    dkl = random_like(inputs["index_q"][..., 0], 3)
    for upstream, expected in ((torch.full_like(dkl, 0.7), 2), (dkl, 4)):
        walks.clear()
        result = run(blockwise, inputs, options, dkl=upstream)
        assert len(walks) == expected  # two index heads
        assert_same_run(result, run_reference(inputs, options, dkl=upstream), torch.float32)


def test_without_gradients_the_loss_computes_none(monkeypatch):
    monkeypatch.setattr(index_loss, "_zeros", None)
    inputs = random_inputs(0, **NARROW)
    with torch.no_grad():
        blockwise.msa_attention(*(tensor.requires_grad_() for tensor in inputs.values()), topk=2, block_size=16)
    blockwise.msa_attention(*(tensor.detach() for tensor in inputs.values()), topk=2, block_size=16)


def test_a_large_logit_in_the_future_is_not_the_shift_of_a_row():
    inputs = random_inputs(0, **NARROW)
    for name in ("q", "index_q"):
        inputs[name][..., 0] = 1
    for name in ("k", "index_k"):
        inputs[name][:, :, 15::16, 0] = 300
    options = {"topk": 1, "block_size": 16, "scale": 1.0, "index_scale": 1.0}
    assert_same_run(run(blockwise, inputs, options), run_reference(inputs, options), torch.float32)


@pytest.mark.parametrize("number", [torch.inf, torch.nan, 1e38])
@pytest.mark.parametrize("topk", [2, None])
def test_earlier_rows_do_not_see_a_later_key_that_is_not_finite(number, topk):
    inputs, options = random_inputs(0, **NARROW), {"topk": topk, "block_size": 16, "reduction": "none"}
    changed = {name: tensor.clone() for name, tensor in inputs.items()}
    for name in ("k", "index_k"):
        changed[name][:, :, 70:] = number
    before, after = (run(blockwise, tensors, options) for tensors in (inputs, changed))
    for name in ("out", "lse", "kl"):
        assert_equal(after[name][:, :, :70], before[name][:, :, :70], name)


@pytest.mark.parametrize("topk", [2, None])
def test_large_keys_of_one_document_change_no_bit_of_another(topk):
    """They take away the bound on the logits of their own document alone."""
    inputs = random_inputs(0, **NARROW)
    options = {"topk": topk, "block_size": 16, "cu_seqlens": [0, 30, 77], "reduction": "none"}
    changed = {name: tensor.clone() for name, tensor in inputs.items()}
    for name in ("k", "index_k"):
        changed[name][:, :, :30] *= 1000
    before, after = (run(blockwise, tensors, options) for tensors in (inputs, changed))
    for name in ("out", "lse", "kl"):
        assert_equal(after[name][:, :, 30:], before[name][:, :, 30:], name)


def test_no_logit_exceeds_its_bound():
    inputs, geometry = random_inputs(0, **NARROW), BlockGeometry(77, 16, [0, 30, 77])
    rows, keys = inputs["q"][0].transpose(0, 1).contiguous(), inputs["k"][0, 0]
    bounds = TileProducts(rows, keys, tile=8, longest=16).bounds(geometry)
    visible = torch.ones(77, 77, dtype=torch.bool).tril()
    visible[30:, :30] = False
    largest = (rows @ keys.T).abs().masked_fill(~visible[:, None], 0).amax(-1)
    assert bounds.shape == (77, 6)
    assert (largest <= bounds * (1 + 1e-6)).all()
    assert (largest > 0.3 * bounds).any()
