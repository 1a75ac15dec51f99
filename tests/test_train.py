"""Training of the small language model: schedule, batches, forks and controls."""

import json

import pytest
import torch

import msa_triton.train
from msa_ref import dense
from msa_ref.problem import validate_block_indices
from msa_triton.model import SmallLMConfig
from msa_triton.train import Recipe, Trainer, evaluate, layer_recall, select_last, select_random, windows

TINY = SmallLMConfig(layers=2, hidden_size=16, ffn_width=16, context=40, heads=2, kv_heads=1, head_width=8, topk=3)
TEXT = torch.randint(32, 127, (2000,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def weights(trainer, index):
    parameters = trainer.model.index_parameters() if index else trainer.model.backbone_parameters()
    return [parameter.detach().clone() for parameter in parameters]


def same(left, right):
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def test_windows_depend_on_the_seed_alone():
    first = windows(TEXT, 3, 40, seed=1)
    assert first.shape == (3, 41) and first.dtype == torch.int64
    assert torch.equal(first, windows(TEXT, 3, 40, seed=1))
    assert not torch.equal(first, windows(TEXT, 3, 40, seed=2))
    joined = bytes(TEXT.tolist())
    assert all(bytes(window.tolist()) in joined for window in first)


def test_the_learning_rate_rises_then_falls_and_is_never_negative():
    trainer = Trainer(TINY, Recipe(steps=8, ramp=4), TEXT)
    rates = []
    for trainer.step in range(8):
        trainer._set_learning_rates()
        rates.append([group["lr"] for group in trainer.optimizer.param_groups])
    backbone, index = zip(*rates, strict=True)
    assert backbone == pytest.approx([1e-3, 2e-3, 3e-3, 4e-3, 4e-3, 3e-3, 2e-3, 1e-3])
    assert index == pytest.approx([2.5 * rate for rate in backbone])
    Trainer(TINY, Recipe(steps=1), TEXT).run(1, "dense")


def test_the_warm_up_trains_the_index_and_leaves_the_backbone_bit_for_bit_as_dense_training_does():
    start = Trainer(TINY, Recipe(steps=10, ramp=2), TEXT)
    start.run(2, "dense")
    warm, plain = start.fork(), start.fork()
    warm.run(4, "warm-up")
    plain.run(4, "dense")
    assert same(weights(warm, index=False), weights(plain, index=False))
    assert same(weights(plain, index=True), weights(start, index=True))
    assert not same(weights(warm, index=True), weights(start, index=True))
    assert [record["lm_loss"] for record in warm.history] == [record["lm_loss"] for record in plain.history]
    assert all(record["kl_loss"] > 0 for record in warm.history[2:])


def test_a_fork_goes_its_own_way_and_shares_the_text():
    start = Trainer(TINY, Recipe(steps=10, ramp=2), TEXT)
    fork, before = start.fork(), weights(start, index=False)
    fork.run(3, "sparse")
    assert fork.text is start.text and (fork.step, start.step) == (3, 0) and start.history == []
    assert same(weights(start, index=False), before) and not same(weights(fork, index=False), before)


def test_training_lowers_the_loss_of_a_text_that_repeats():
    text = torch.arange(2000, dtype=torch.uint8) % 7
    trainer = Trainer(TINY, Recipe(steps=60, ramp=5), text)
    before = evaluate(trainer.model, text, mode="dense", count=4)
    trainer.run(60, "sparse")
    assert evaluate(trainer.model, text, count=4) < before / 2


def test_evaluation_covers_every_window_once():
    trainer = Trainer(TINY, Recipe(), TEXT)
    tokens = windows(TEXT, 11, 40, seed=5)
    expected = trainer.model(tokens[:, :-1], tokens[:, 1:]).lm_loss.detach()
    assert evaluate(trainer.model, TEXT, count=11, seed=5) == pytest.approx(float(expected), rel=1e-5)


def test_there_is_a_recall_for_every_layer():
    trainer = Trainer(TINY, Recipe(), TEXT)
    for exclude_own in (False, True):
        recalls = layer_recall(trainer.model, TEXT, exclude_own=exclude_own, count=2)
        assert len(recalls) == 2 and all(0 < recall <= 1 for recall in recalls)


@pytest.mark.parametrize("select", [select_last, select_random])
@pytest.mark.parametrize("cu_seqlens", [None, [0, 5, 5, 21, 40]])
def test_controls_take_the_arguments_of_select_blocks(select, cu_seqlens):
    index_q, index_k = torch.zeros(1, 2, 40, 4), torch.zeros(1, 1, 40, 4)
    options = {"topk": 3, "block_size": 4, "local_blocks": 1, "init_blocks": 1, "cu_seqlens": cu_seqlens}
    ids = select(index_q, index_k, **options)
    validate_block_indices(ids, block_size=4, cu_seqlens=cu_seqlens)
    expected = dense.select_blocks(index_q, index_k, **options)
    assert ids.shape == expected.shape and ids.dtype == torch.int32
    assert torch.equal((ids >= 0).sum(-1), (expected >= 0).sum(-1))


def test_the_command_writes_the_three_curves(tmp_path, monkeypatch):
    monkeypatch.setattr(msa_triton.train, "standard_library_text", lambda split: TEXT)
    monkeypatch.setattr(msa_triton.train, "SmallLMConfig", lambda topk: TINY)
    monkeypatch.setattr(msa_triton.train, "evaluate", lambda *arguments, **options: 1.5)
    file = tmp_path / "curves.json"
    msa_triton.train.main(["--steps", "8", "--warm-up", "1", "--every", "3", "--json", str(file)])
    stored = json.loads(file.read_text())
    steps = {name: [point["step"] for point in curve] for name, curve in stored["curves"].items()}
    assert steps == {"dense": [7, 8], "index": [8], "last": [7, 8]}
    assert stored["settings"] == {"steps": 8, "warm_up": 1, "topk": 4, "seed": 0}
