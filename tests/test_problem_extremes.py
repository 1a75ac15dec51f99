"""Arguments far out of the ordinary: the same rules hold."""

import pytest
import torch
from compare import REFERENCES, assert_equal, random_inputs, run

import msa_triton
from msa_ref import describe, validate_block_indices


@pytest.mark.parametrize("block_size", [61, 62, 2**24, 2**62])
def test_a_block_may_hold_more_than_all_tokens(block_size):
    inputs = random_inputs(0, B=1, N=61)
    for name in REFERENCES:
        found = run(name, inputs, {"topk": 2, "block_size": block_size})
        expected = run(name, inputs, {"topk": 2, "block_size": 61})
        for key, tensor in expected.items():
            assert_equal(found[key], tensor, f"{name} {key}")


@pytest.mark.parametrize("offsets, error, message", [
    (torch.tensor([0, 20], device="meta"), ValueError, "cu_seqlens must hold data, got device meta"),
    ([0, 2**70, 20], ValueError, f"at most 63 bits, got {2**70}"),
])  # fmt: skip
def test_offsets_that_cannot_be_read_are_refused_by_every_implementation(offsets, error, message):
    index_q, index_k = torch.zeros(1, 2, 20, 4), torch.zeros(1, 1, 20, 4)
    for module in (*REFERENCES.values(), msa_triton):
        with pytest.raises(error, match=message):
            module.select_blocks(index_q, index_k, topk=2, block_size=4, cu_seqlens=offsets)


def test_unusual_tensors_and_scales_are_refused():
    dense = torch.zeros(1, 2, 4, 4)
    with pytest.raises(TypeError, match="q sparse_coo"):
        describe(q=dense.to_sparse(), k=dense)
    with pytest.raises(ValueError, match="scale must be finite"):
        describe(q=dense, k=dense, scale=10**400)
    with pytest.raises(ValueError, match="block_indices meta"):
        validate_block_indices(torch.zeros(1, 1, 4, 1, dtype=torch.int32, device="meta"), block_size=4)
