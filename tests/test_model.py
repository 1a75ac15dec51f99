"""`SmallLM`: losses, phases of training, checkpoints, generation."""

import compare
import pytest
import torch
from torch.nn import functional

from msa_triton import SmallLM, SmallLMConfig
from msa_triton.layer import MODES

TINY = dict(layers=2, hidden_size=32, ffn_width=48, context=40, heads=2, kv_heads=2, head_width=8, index_width=4,
            block_size=4, topk=3, qk_norm=True)  # fmt: skip


def model(seed=0, **options):
    torch.manual_seed(seed)
    return SmallLM(SmallLMConfig(**{**TINY, **options}))


def text(batch=2, tokens=41, seed=0):
    """[batch, tokens] bytes of a period of 5, so that there is something to learn."""
    start = torch.randint(5, (batch, 1), generator=torch.Generator().manual_seed(seed))
    return ((start + torch.arange(tokens)) % 5 + 97).to(torch.uint8)


def test_default_sizes():
    default = SmallLM()
    config, width = default.config, default.config.hidden_size
    assert (config.layers, width, config.heads, config.kv_heads, config.head_width) == (4, 128, 4, 2, 16)
    assert (config.index_width, config.context, config.vocabulary, config.block_size) == (32, 512, 256, 8)
    assert len(default.layers) == 4 and not config.qk_norm and not config.tied
    # q, k, v, output, index_q and index_k; three FFN matrices; two norms
    layer = width * (64 + 32 + 32 + 64 + 64 + 32) + 3 * width * config.ffn_width + 2 * width
    assert sum(parameter.numel() for parameter in default.parameters()) == 2 * 256 * width + 4 * layer + width


@pytest.mark.parametrize("options", [{}, {"tied": True}, {"qk_norm": False, "rotary_width": 2, "backend": "torch"}])
@pytest.mark.parametrize("mode", MODES)
def test_losses(mode, options):
    lm, tokens = model(**options), text()
    logits, lm_loss, kl_loss = lm(tokens[:, :-1], tokens[:, 1:], mode=mode)
    assert logits.shape == (2, 40, 256) and lm_loss.dtype == kl_loss.dtype == torch.float32
    expected = functional.cross_entropy(logits.mT, tokens[:, 1:].long())
    compare.assert_close(lm_loss, expected, 1e-6)
    assert 4 < lm_loss < 8
    assert (kl_loss == 0) == (mode == "dense")
    assert lm(tokens[:, :-1].long(), mode=mode).lm_loss is None
    compare.assert_equal(lm(tokens[:, :-1].int(), mode=mode).logits, logits)


def test_kl_loss_is_the_sum_over_the_layers():
    lm, tokens = model(), text()
    hidden, total = lm.embedding(tokens.long()), 0
    for layer in lm.layers:
        total = total + layer.attention(layer.attention_norm(hidden))[1]
        hidden, _ = layer(hidden)
    assert total > 0
    compare.assert_close(lm(tokens).kl_loss, total, 1e-6)


def test_targets_to_be_left_out():
    lm, tokens = model(), text()
    targets = tokens[:, 1:].long()
    targets[:, 20:] = -100
    logits, lm_loss, _ = lm(tokens[:, :-1], targets)
    compare.assert_close(lm_loss, functional.cross_entropy(logits[:, :20].mT, targets[:, :20]), 1e-6)


def test_later_tokens_do_not_change_earlier_logits():
    lm, tokens = model(), text()
    changed = tokens.clone()
    changed[:, 30:] = 7
    for mode in MODES:
        compare.assert_close(lm(tokens, mode=mode).logits[:, :30], lm(changed, mode=mode).logits[:, :30], 1e-6)


@pytest.mark.parametrize("backend", ["dense", "torch"])
@pytest.mark.parametrize("mode", ["warm-up", "sparse"])
def test_backbone_gradients_are_the_same_bits_with_and_without_the_kl_loss(mode, backend):
    lm, tokens = model(backend=backend), text()

    def gradients(weight):
        lm.zero_grad(set_to_none=True)
        result = lm(tokens[:, :-1], tokens[:, 1:], mode=mode)
        (result.lm_loss + weight * result.kl_loss if weight else result.lm_loss).backward()
        return [parameter.grad.clone() for parameter in lm.backbone_parameters()]

    alone = gradients(0)
    assert all(not (parameter.grad is not None and parameter.grad.any()) for parameter in lm.index_parameters())
    for left, right in zip(gradients(10.0), alone, strict=True):
        compare.assert_equal(left, right)
    assert all(parameter.grad.any() for parameter in lm.index_parameters())


def test_index_and_backbone_parameters_are_a_partition():
    lm = model()
    index, backbone = (set(map(id, group)) for group in (lm.index_parameters(), lm.backbone_parameters()))
    assert not index & backbone and index | backbone == set(map(id, lm.parameters()))
    names = {name for name, parameter in lm.named_parameters() if id(parameter) in index}
    layers = ("layers.0.attention", "layers.1.attention")
    parts = ("index_q", "index_k", "index_q_norm", "index_k_norm")
    assert names == {f"{layer}.{part}.weight" for layer in layers for part in parts}


def train(lm, modes):
    optimizer = torch.optim.AdamW([
        {"params": list(lm.backbone_parameters()), "lr": 3e-3}, {"params": list(lm.index_parameters()), "lr": 1e-2},
    ])  # fmt: skip
    losses = []
    for step, mode in enumerate(modes):
        tokens = text(seed=step)
        result = lm(tokens[:, :-1], tokens[:, 1:], mode=mode)
        optimizer.zero_grad()
        (result.lm_loss + result.kl_loss).backward()
        torch.nn.utils.clip_grad_norm_(list(lm.backbone_parameters()), 1.0)
        optimizer.step()
        losses.append((result.lm_loss.item(), result.kl_loss.item()))
    return losses


def test_warm_up_does_not_disturb_the_language_model():
    dense, warm_up = train(model(), ["dense"] * 10), train(model(), ["warm-up"] * 10)
    assert [lm_loss for lm_loss, _ in warm_up] == pytest.approx([lm_loss for lm_loss, _ in dense], abs=1e-4)


def test_dense_then_warm_up_then_sparse_learns():
    losses = train(model(), ["dense"] * 30 + ["warm-up"] * 20 + ["sparse"] * 20)
    assert losses[29][0] < 0.5 * losses[0][0]
    assert losses[49][1] < 0.5 * losses[30][1]
    assert losses[-1][0] < losses[29][0]


def test_packed_documents_equal_separate_calls():
    lm, tokens = model(), text(1, 40)
    for mode in MODES:
        parts = [lm(tokens[:, start:end], mode=mode).logits for start, end in ((0, 13), (13, 40))]
        packed = lm(tokens, mode=mode, cu_seqlens=[0, 13, 40]).logits
        compare.assert_close(packed, torch.cat(parts, 1), 1e-5)


def test_projections_and_another_selection():
    lm, tokens, seen = model(), text(1, 40), []

    def own_block(index_q, index_k, *, topk, block_size, **_):
        seen.append((index_q, index_k))
        own = torch.arange(index_q.shape[2])[:, None] // block_size
        return own.int().expand(*index_q.shape[:3], 1)

    lm(tokens, select=own_block)
    layers = lm.projections(tokens)
    assert len(seen) == len(layers) == 2
    assert [tuple(tensor.shape) for tensor in layers[1]] == [(1, 2, 40, 8)] * 3 + [(1, 2, 40, 4), (1, 1, 40, 4)]
    for left, right in zip(seen[0], layers[0][3:], strict=True):
        compare.assert_equal(left, right)
    assert not torch.equal(lm(tokens, select=own_block).logits, lm(tokens).logits)


@pytest.mark.parametrize("tied", [False, True])
def test_checkpoint(tmp_path, tied):
    lm, tokens = model(tied=tied, init_blocks=1), text()
    logits = lm(tokens).logits
    lm.save(tmp_path / "full.pt")
    lm.save(tmp_path / "half.pt", dtype=torch.float16)
    full, half = SmallLM.load(tmp_path / "full.pt"), SmallLM.load(tmp_path / "half.pt")
    assert full.config == half.config == lm.config
    compare.assert_equal(full(tokens).logits, logits)
    assert {parameter.dtype for parameter in half.parameters()} == {torch.float32}
    for left, right in zip(half.parameters(), lm.parameters(), strict=True):
        compare.assert_close(left, right, 1e-3)
    assert (tmp_path / "half.pt").stat().st_size < 0.75 * (tmp_path / "full.pt").stat().st_size


def test_load_runs_no_code(tmp_path):
    class Payload:
        def __reduce__(self):
            return print, ("run",)

    torch.save({"config": {}, "weights": Payload()}, tmp_path / "bad.pt")
    with pytest.raises(Exception, match="[Ww]eights.only"):
        SmallLM.load(tmp_path / "bad.pt")


def test_generate():
    lm = model()
    train(lm, ["dense"] * 30 + ["warm-up"] * 20 + ["sparse"] * 10)
    prompt = bytes(text(1, 20)[0].tolist())
    seen = []
    watch = lm.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0].shape[1]))
    written = lm.generate(prompt, 50)
    watch.remove()
    assert seen == [min(length, 40) for length in range(20, 70)]
    expected = bytes((prompt[-1] - 97 + step) % 5 + 97 for step in range(1, 51))
    assert written == expected
    drawn = [lm.generate(prompt, 8, temperature=5.0, generator=torch.Generator().manual_seed(s)) for s in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2] and len(drawn[0]) == 8
    assert lm.generate(prompt, 0) == b""
    with pytest.raises(ValueError, match="prompt must not be empty"):
        lm.generate(b"", 1)


def test_unknown_mode():
    with pytest.raises(ValueError, match="mode must be one of"):
        model()(text(), mode="full")
