"""The attention of MiniMax-M3 in transformers, run eagerly on a CPU, against the three references.

Both get the same projections. The layer's own modules say what they are: hooks on its norms and its value projection
give q, k, v, index_q and index_k before RoPE, its indexer returns the chosen blocks, and its output projection receives
the attention output.
"""

import pytest
import torch
from cases import every_reference
from compare import REFERENCES, assert_close, assert_equal

pytest.importorskip("transformers", minversion="5.12")
m3 = pytest.importorskip("transformers.models.minimax_m3_vl.modeling_minimax_m3_vl")
from transformers.models.minimax_m3_vl import MiniMaxM3VLTextConfig  # noqa: E402

BLOCK, HIDDEN = 8, 24
LENGTHS = [1, BLOCK - 1, BLOCK, 3 * BLOCK, 5 * BLOCK - 3, 8 * BLOCK + 1]
# query heads, KV heads, index heads
HEADS = [(6, 2, 2), (4, 4, 4), (4, 1, 1), (6, 2, 6)]


def configuration(heads=HEADS[0], topk=3, local_blocks=1):
    query_heads, kv_heads, index_heads = heads
    return MiniMaxM3VLTextConfig(
        vocab_size=50, hidden_size=HIDDEN, num_hidden_layers=1, num_attention_heads=query_heads,
        num_key_value_heads=kv_heads, head_dim=16, index_n_heads=index_heads, index_head_dim=12,
        index_block_size=BLOCK, index_topk_blocks=topk, index_local_blocks=local_blocks, intermediate_size=16,
        dense_intermediate_size=16, layer_types=["minimax_m3_sparse"], mlp_layer_types=["dense"], pad_token_id=None,
        bos_token_id=None, eos_token_id=None, attn_implementation="eager",
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    )  # fmt: skip


def layer_of(config):
    torch.manual_seed(0)
    layer = m3.MiniMaxM3VLAttention(config, 0).eval()
    for name, parameter in layer.named_parameters():
        torch.nn.init.normal_(parameter, std=0.5 if "norm" in name else HIDDEN**-0.5)
    return layer


def observe(layer, position_embeddings, call):
    """Runs call(); returns the five projections after RoPE, the chosen ids, and the attention output of the layer."""
    seen = {}
    modules = {
        "q": layer.q_norm, "k": layer.k_norm, "v": layer.v_proj, "index_q": layer.indexer.q_norm,
        "index_k": layer.indexer.k_norm, "ids": layer.indexer,
    }  # fmt: skip
    hooks = [
        module.register_forward_hook(lambda _, __, output, name=name: seen.__setitem__(name, output))
        for name, module in modules.items()
    ]
    hooks.append(layer.o_proj.register_forward_pre_hook(lambda _, inputs: seen.__setitem__("out", inputs[0])))
    try:
        call()
    finally:
        for hook in hooks:
            hook.remove()
    cos, sin = position_embeddings
    width = layer.head_dim
    tensors = {
        # The norms see [B, N, heads, width] and what attention sees is [B, heads, N, width].
        name: seen[name].transpose(1, 2) if name != "v" else seen[name].unflatten(-1, (-1, width)).transpose(1, 2)
        for name in ("q", "k", "v", "index_q", "index_k")
    }
    tensors["q"], tensors["k"] = m3.apply_rotary_pos_emb(tensors["q"], tensors["k"], cos, sin)
    tensors["index_q"], tensors["index_k"] = m3.apply_rotary_pos_emb(tensors["index_q"], tensors["index_k"], cos, sin)
    return tensors, seen["ids"], seen["out"].unflatten(-1, (-1, width)).transpose(1, 2)


def hidden_states(tokens, batch=2):
    return torch.randn(batch, tokens, HIDDEN, generator=torch.Generator().manual_seed(1))


def run_layer(config, tokens=None, hidden=None, causal_mask=False):
    layer = layer_of(config)
    hidden = hidden_states(tokens) if hidden is None else hidden
    batch, tokens, _ = hidden.shape
    positions = torch.arange(tokens).expand(batch, -1)
    rope = m3.MiniMaxM3VLRotaryEmbedding(config=config)(hidden, position_ids=positions)
    mask = torch.ones(tokens, tokens, dtype=torch.bool).tril().expand(batch, 1, -1, -1) if causal_mask else None
    with torch.set_grad_enabled(hidden.requires_grad):
        return observe(layer, rope, lambda: layer(hidden, rope, mask, position_ids=positions))


def assert_same_attention(implementation, observed, topk, local_blocks=1):
    tensors, their_ids, their_out = observed
    options = {"topk": topk, "block_size": BLOCK, "local_blocks": local_blocks}
    out, _, ids, _ = REFERENCES[implementation].msa_attention(**tensors, **options)
    assert_equal(ids, ascending(their_ids, topk), f"{implementation}: block ids")
    assert_close(out, their_out, 1e-5, f"{implementation}: out")


def ascending(ids, topk):
    """Their ids, ordered by score and at most one slot for each block, in the order and width of ours."""
    unused = torch.iinfo(torch.int32).max
    ids = ids.masked_fill(ids < 0, unused).sort(-1).values
    ids = torch.nn.functional.pad(ids, (0, topk - ids.shape[-1]), value=unused)
    return ids.masked_fill(ids == unused, -1).int()


@every_reference
@pytest.mark.parametrize("tokens", LENGTHS)
def test_same_blocks_and_output_at_any_length(tokens, implementation):
    assert_same_attention(implementation, run_layer(configuration(), tokens), topk=3)


@every_reference
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_same_blocks_and_output_for_any_head_counts(heads, implementation):
    assert_same_attention(implementation, run_layer(configuration(heads), 5 * BLOCK - 3), topk=3)


@every_reference
@pytest.mark.parametrize("topk, local_blocks", [(1, 1), (2, 2), (4, 2), (3, 0), (4, 3), (50, 1)])
def test_same_blocks_and_output_for_any_number_of_forced_blocks(topk, local_blocks, implementation):
    observed = run_layer(configuration(topk=topk, local_blocks=local_blocks), 6 * BLOCK + 5)
    assert_same_attention(implementation, observed, topk, local_blocks)


@every_reference
def test_same_output_when_their_layer_is_given_a_causal_mask(implementation):
    assert_same_attention(implementation, run_layer(configuration(), 5 * BLOCK - 3, causal_mask=True), topk=3)


@every_reference
def test_same_blocks_and_output_inside_the_whole_text_model(implementation):
    config = configuration()
    torch.manual_seed(0)
    model = m3.MiniMaxM3VLTextModel(config).eval()
    layer = model.layers[0].self_attn
    layer.load_state_dict(layer_of(config).state_dict())
    tokens = torch.randint(0, 50, (2, 5 * BLOCK - 3), generator=torch.Generator().manual_seed(2))
    rope = model.rotary_emb(model.embed_tokens(tokens), position_ids=torch.arange(tokens.shape[1])[None])
    with torch.no_grad():
        observed = observe(layer, rope, lambda: model(input_ids=tokens, use_cache=False))
    assert_same_attention(implementation, observed, topk=3)


@pytest.mark.parametrize("implementation", ["dense", "blockwise"])
def test_same_gradient_of_the_hidden_states(implementation):
    hidden = hidden_states(5 * BLOCK - 3).requires_grad_()
    tensors, _, their_out = run_layer(configuration(), hidden=hidden)
    out = REFERENCES[implementation].msa_attention(**tensors, topk=3, block_size=BLOCK).out
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(3))
    ours, theirs = (torch.autograd.grad(value, hidden, dout, retain_graph=True)[0] for value in (out, their_out))
    assert_close(ours, theirs, 1e-4, f"{implementation}: gradient")


def test_selection_matters_in_these_comparisons():
    tensors, ids, their_out = run_layer(configuration(), 6 * BLOCK + 5)
    implementation = REFERENCES["blockwise"]
    dense = implementation.msa_attention(**tensors, topk=None, block_size=BLOCK).out
    swapped = implementation.sparse_attention(
        tensors["q"], tensors["k"], tensors["v"], ascending(ids, 3).flip(1), block_size=BLOCK
    )[0]
    assert (dense - their_out).abs().max() > 0.1 and (swapped - their_out).abs().max() > 0.1
    assert not torch.equal(ids[:, 0], ids[:, 1])
