"""Which blocks are kept, by which heads they are read, and at which widths."""

import pytest
import torch
from cases import (
    BLOCK,
    OPTIONS,
    RESULTS,
    TOKENS,
    assert_equal_runs,
    block_of,
    every_implementation,
    named_heads,
    run_double,
    usual_inputs,
)
from compare import (
    IMPLEMENTATIONS,
    assert_close,
    assert_equal,
    assert_same_run,
    random_inputs,
    random_like,
    run,
)

OWN = torch.arange(TOKENS) // BLOCK
BLOCKS = int(OWN[-1]) + 1


def select(implementation, index_q, index_k, **options):
    return IMPLEMENTATIONS[implementation].select_blocks(index_q, index_k, **options)


def kept_by_definition(scores, own, topk, local_blocks=1, init_blocks=0):
    """One row of SPEC 3; scores of all blocks up to the query's own."""
    forced = {block for block in range(own + 1) if block > own - local_blocks or block < init_blocks}
    others = sorted(set(range(own + 1)) - forced, key=lambda block: (-scores[block], block))
    kept = sorted([*forced, *others[: topk - len(forced)]])
    return kept + [-1] * (topk - len(kept))


def attended_positions(ids, query_heads, tokens=TOKENS, block_size=BLOCK):
    """[B, H, N] mean position of the visible tokens of the listed blocks, in float64."""
    token = torch.arange(tokens)
    mask = (ids[..., None, :] == (token // block_size)[:, None]).any(-1) & (token <= token[:, None])
    mask = mask.repeat_interleave(query_heads // ids.shape[1], dim=1).double()
    return mask @ token.double() / mask.sum(-1)


@every_implementation
def test_index_heads_choose_for_themselves_and_their_query_heads_follow(implementation):
    inputs = usual_inputs(implementation, N=TOKENS, H=6, Hkv=2, Hidx=2)
    for name in ("q", "index_q", "index_k"):
        inputs[name].zero_()
    inputs["index_q"][:, 0, :, 0] = inputs["index_q"][:, 1, :, 1] = 1
    inputs["index_k"][:, 0, 3, 0] = inputs["index_k"][:, 0, BLOCK + 3, 1] = 1  # one-hot keys in blocks 0 and 1
    inputs["v"][:] = torch.arange(TOKENS)[:, None]
    result = run(implementation, inputs, OPTIONS)
    late = slice(2 * BLOCK, None)
    for head in (0, 1):
        expected = torch.stack([torch.full_like(OWN, head), OWN], -1)[late]
        assert_equal(result["ids"][:, head, late], expected.expand(len(inputs["q"]), -1, -1), f"index head {head}")
    assert_close(result["out"][..., 0], attended_positions(result["ids"], 6), 1e-6)
    assert (result["out"][:, 0, late] != result["out"][:, 5, late]).all()


@every_implementation
@pytest.mark.parametrize(
    "heads", [(6, 2, 2, 1), (6, 2, 6, 1), (6, 2, 6, 2), (6, 6, 6, 1), (4, 1, 1, 1), (4, 1, 4, 2), (8, 2, 4, 4)], ids=str
)
def test_query_heads_read_their_own_kv_head_and_their_own_selection(heads, implementation):
    query_heads, kv_heads, index_heads, index_key_heads = heads
    inputs = random_inputs(3, B=1, **named_heads(heads))
    inputs["q"].zero_()
    inputs["v"][:] = torch.arange(TOKENS)[:, None] + 1000.0 * torch.arange(kv_heads)[:, None, None]
    # Index head p prefers block p % 3 by its own index key head; by every other one that block is the worst.
    inputs["index_q"].zero_()
    inputs["index_k"].zero_()
    for head in range(index_heads):
        key_head = head // (index_heads // index_key_heads)
        inputs["index_q"][:, head, :, head] = 1
        inputs["index_k"][:, :, head % 3 * BLOCK, head] = -1
        inputs["index_k"][:, key_head, head % 3 * BLOCK, head] = 1
    dout, dkl = random_like(inputs["q"], 1), torch.tensor(float(index_heads * TOKENS))
    result = run(implementation, inputs, OPTIONS, dout, dkl)
    assert_same_run(result, run_double(inputs, OPTIONS, dout, dkl), torch.float32, implementation)
    preferred = torch.arange(index_heads) % 3
    assert_equal(result["ids"][0, :, -1], torch.stack([preferred, torch.full_like(preferred, BLOCKS - 1)], -1))
    reads = 1000.0 * (torch.arange(query_heads) // (query_heads // kv_heads))[:, None]
    assert_close(result["out"][..., 0], attended_positions(result["ids"], query_heads) + reads, 1e-6)


@every_implementation
@pytest.mark.parametrize("topk, local, init", [(3, 1, 0), (3, 0, 0), (4, 2, 1), (4, 3, 0), (3, 1, 2), (2, 0, 2)])
def test_equal_scores_keep_the_lowest_ids(topk, local, init, implementation):
    inputs = random_inputs(0)
    ids = select(implementation, torch.zeros_like(inputs["index_q"]), inputs["index_k"], topk=topk, block_size=BLOCK,
                 local_blocks=local, init_blocks=init)  # fmt: skip
    expected = [kept_by_definition([0] * BLOCKS, own, topk, local, init) for own in OWN.tolist()]
    assert_equal(ids, torch.tensor(expected).expand(2, 2, -1, -1))


def tied_inputs(seed, tokens=TOKENS):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(-1, 2, (1, heads, tokens, 2), generator=generator).float() for heads in (2, 1)]


@every_implementation
@pytest.mark.parametrize(
    "topk, local, init", [(1, 1, 0), (2, 1, 0), (5, 1, 0), (4, 2, 1), (3, 0, 0), (6, 2, 2), (40, 1, 0)]
)
def test_ties_never_change_how_many_blocks_are_kept(topk, local, init, implementation):
    size = block_of(implementation, 4)
    tokens = TOKENS * size // 4
    index_q, index_k = tied_inputs(0, tokens)
    options = {"topk": topk, "block_size": size, "local_blocks": local, "init_blocks": init}
    ids = select(implementation, index_q, index_k, **options)
    token = torch.arange(tokens)
    scores = (index_q @ index_k.mT).masked_fill(token > token[:, None], -torch.inf)
    scores = torch.nn.functional.pad(scores, (0, -tokens % size), value=-torch.inf).unflatten(-1, (-1, size)).amax(-1)
    assert scores.unique().numel() < 8
    expected = [[kept_by_definition(row, query // size, topk, local, init) for query, row in enumerate(head)]
                for head in scores[0].tolist()]  # fmt: skip
    assert_equal(ids[0], torch.tensor(expected))
    assert_equal((ids >= 0).sum(-1), (token // size + 1).clamp(max=topk).expand(1, 2, -1))


@every_implementation
def test_ten_runs_with_ties_give_the_same_bits(implementation):
    inputs = usual_inputs(implementation, B=1)
    inputs["index_q"], inputs["index_k"] = (tensor.clamp(-1, 1) for tensor in (inputs["index_q"], inputs["index_k"]))
    first = run(implementation, inputs, OPTIONS | {"topk": 3})
    for _ in range(9):
        assert_equal_runs(run(implementation, inputs, OPTIONS | {"topk": 3}), first, implementation)


@every_implementation
@pytest.mark.parametrize("index_heads", [1, 2, 3, 5, 6])
@pytest.mark.parametrize("share", [1, 3, 5, 7])
def test_head_counts_that_are_no_powers_of_two(share, index_heads, implementation):
    shared_keys = ((1, index_heads), (index_heads, 1))
    if implementation == "triton":  # one of the two, by turns
        shared_keys = shared_keys[share // 2 % 2 :][:1]
    for kv_heads, index_key_heads in shared_keys:
        heads = (share * index_heads, kv_heads, index_heads, index_key_heads)
        inputs = random_inputs(0, B=1, N=18, D=4, Dv=4, Di=4, **named_heads(heads))
        dout, dkl = random_like(inputs["q"], 1), torch.tensor(18.0 * index_heads)
        options = OPTIONS | {"block_size": block_of(implementation, 4)}
        result = run(implementation, inputs, options, dout, dkl)
        assert_same_run(result, run_double(inputs, options, dout, dkl), torch.float32, f"{implementation} {heads}")


@every_implementation
def test_gradients_of_shared_keys_are_summed_over_their_group(implementation):
    inputs = usual_inputs(implementation, B=1, H=6, Hkv=2, Hidx=2)
    dout = random_like(inputs["q"], 1)
    grouped = run(implementation, inputs, OPTIONS, dout)
    repeated = inputs | {name: inputs[name].repeat_interleave(3, 1) for name in ("k", "v", "index_q")}
    alone = run(implementation, repeated, OPTIONS, dout)
    assert_close(alone["out"], grouped["out"], 1e-6)
    assert_close(alone["dq"], grouped["dq"], 1e-6)
    for name in ("dk", "dv"):
        assert grouped[name].shape[1] == 2
        assert_close(grouped[name], alone[name].unflatten(1, (2, 3)).sum(2), 1e-6, name)


@every_implementation
@pytest.mark.parametrize("width", [1, 3, 8, 16, 48, 64, 80, 96, 100, 128])
def test_the_last_column_of_any_width_counts(width, implementation):
    inputs = usual_inputs(implementation, B=1, N=40, D=width, Dv=width, Di=width)
    size = block_of(implementation, 4)
    for tensor in inputs.values():
        tensor[..., :-1] = 0
    inputs["index_q"][..., -1] = 1
    inputs["index_k"][..., -1] = torch.arange(40).remainder(7)  # exact, and different in every block
    options = {"topk": 2, "block_size": size, "scale": 1.0, "index_scale": 0.3}
    dout, dkl = random_like(inputs["q"], 1), torch.tensor(float(inputs["index_q"][..., 0].numel()))
    narrow = {name: tensor[..., -1:] for name, tensor in inputs.items()}
    result, expected = run(implementation, inputs, options, dout, dkl), run_double(narrow, options, dout[..., -1:], dkl)
    for name in RESULTS:
        if result[name].ndim == 4 and name != "ids":
            assert width == 1 or name == "dv" or result[name][..., :-1].eq(0).all(), name
            result[name] = result[name][..., -1:]
    assert_same_run(result, expected, torch.float32, implementation)

    inputs["q"].zero_()
    inputs["v"][..., -1] = torch.arange(40)
    result = run(implementation, inputs, options)
    assert_close(result["out"][..., -1], attended_positions(result["ids"], inputs["q"].shape[1], 40, size), 1e-6)


@every_implementation
@pytest.mark.parametrize("width", [8, 16])
@pytest.mark.parametrize("group", [1, 2, 3])
def test_narrow_heads_and_small_groups(group, width, implementation):
    inputs = random_inputs(0, B=1, N=37, H=2 * group, D=width, Dv=width, Di=width)
    dout, dkl = random_like(inputs["q"], 1), torch.tensor(74.0)
    result = run(implementation, inputs, OPTIONS, dout, dkl)
    assert_same_run(result, run_double(inputs, OPTIONS, dout, dkl), torch.float32, implementation)


@every_implementation
def test_a_nan_score_ranks_below_every_number(implementation):
    size = block_of(implementation, 4)
    index_q, blocks = torch.ones(1, 1, 6 * size, 1), torch.full((6, size), -5.0)
    index_k = blocks.view(1, 1, -1, 1)
    blocks[1] = torch.nan
    blocks[2, 1], blocks[2, 2] = torch.nan, 3  # one NaN among numbers
    blocks[3] = -torch.inf  # the lowest of all numbers
    options = {"block_size": size, "local_blocks": 1}
    last = [select(implementation, index_q, index_k, topk=topk, **options)[0, 0, -1].tolist() for topk in (2, 3, 4, 5)]
    assert last == [[2, 5], [0, 2, 5], [0, 2, 4, 5], [0, 2, 3, 4, 5]]
    index_q[0, 0, -1] = torch.nan
    assert select(implementation, index_q, index_k, topk=3, **options)[0, 0, -1].tolist() == [0, 1, 5]


@every_implementation
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_scores_are_never_rounded_to_the_dtype_of_the_inputs(dtype, implementation):
    size = block_of(implementation, 4)
    index_q = torch.ones(1, 1, 4 * size, 2, dtype=dtype)
    index_k = torch.zeros(1, 1, 4 * size, 2, dtype=dtype)
    # 4096 and 4097 are one number in float16 and bfloat16.
    index_k[0, 0, 0], index_k[0, 0, size] = torch.tensor([4096.0, 0]), torch.tensor([4096.0, 1])
    ids = select(implementation, index_q, index_k, topk=2, block_size=size)
    assert ids[0, 0, -1].tolist() == [1, 3]
