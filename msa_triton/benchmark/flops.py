"""Useful FLOPs of a step: the matrix products of the (query, key) pairs that attention needs, and no others.

A pair is a query and a visible token of a kept block, counted exactly (`msa_ref.cost.gathered_pairs`, SPEC 10); in
dense attention every visible token. What an implementation computes for masked tokens is not useful. Of each pair:

* select: 2 Di for each index head, but of all causal pairs;
* attend: 4 D for each query head: the logit, and the value;
* align: 2 D for each query head, whose probability is computed again from the LSE, and 2 Di for each index head;
* backward: 10 D for each query head (the logit again, dP, dv, dk, dq) and 4 Di for each index head (d index_q,
  d index_k; an implementation may do these in align, or compute the teacher once more).

Exponentials, maxima and sums are not counted, as in the paper.
"""

from __future__ import annotations

from msa_ref import cost
from msa_triton.benchmark.step import Shape


def step_flops(shape: Shape, warm_up: bool = False) -> dict[str, int]:
    """FLOPs of each phase of MSA, of the forward pass and in total; warm_up: every visible token, nothing selected."""
    causal = cost.causal_pairs(shape.tokens)
    pairs = causal if warm_up else cost.gathered_pairs(shape.tokens, shape.topk, shape.block_size)
    attention, index = pairs * shape.heads * shape.width, pairs * shape.index_heads * shape.index_width
    phases = {} if warm_up else {"select": 2 * causal * shape.index_heads * shape.index_width}
    phases |= {"attend": 4 * attention, "align": 2 * attention + 2 * index}
    forward, backward = sum(phases.values()), 10 * attention + 4 * index
    return {**phases, "forward": forward, "backward": backward, "total": forward + backward}


def dense_flops(shape: Shape) -> dict[str, int]:
    """FLOPs of dense causal attention: forward, backward and total."""
    attention = cost.causal_pairs(shape.tokens) * shape.heads * shape.width
    return {"forward": 4 * attention, "backward": 10 * attention, "total": 14 * attention}


def eq12_ratio(shape: Shape) -> float:
    """FLOPs of dense attention over those of MSA, forward (P eq. 12)."""
    return cost.flop_ratio(
        shape.tokens, shape.heads, shape.width, shape.index_heads, shape.index_width, shape.topk, shape.block_size
    )
