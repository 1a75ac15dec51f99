"""Synthetic inputs put attention where they say; the toy tensors are the contract's; the text is split by file."""

import math
import zlib

import pytest
import torch

from msa_ref import inputs, recall

N, LATE = 256, slice(64, None)
DISTANCE = torch.arange(N)[:, None] - torch.arange(N)


def attention(q, k):
    """Dense causal probabilities, [B, H, N, N]."""
    logits = q @ k.repeat_interleave(q.shape[1] // k.shape[1], dim=1).transpose(-1, -2) / q.shape[-1] ** 0.5
    return logits.masked_fill(DISTANCE < 0, -math.inf).softmax(dim=-1)


def masses(probabilities):
    """Mass on the tokens of each pattern, averaged over late queries, of each head: name -> [H]."""
    column = torch.arange(N)
    masks = {
        "local": (DISTANCE >= 0) & (DISTANCE < 8),
        "sink": (column == 0) & (DISTANCE >= 0),
        "periodic": (DISTANCE >= 0) & ((DISTANCE + 4) % 32 <= 8),
        "needle": (column == 32) & (DISTANCE > 0),
    }
    return {name: (probabilities[0] * mask).sum(-1)[:, LATE].mean(-1) for name, mask in masks.items()}


@pytest.mark.parametrize("pattern", ["local", "sink", "periodic", "needle"])
@pytest.mark.parametrize("share", [0.6, 0.9])
def test_a_pattern_holds_its_share(pattern, share):
    made = inputs.synthetic_attention(pattern, share=share)
    held = masses(attention(made.q, made.k))
    assert (held[pattern] > share - 0.01).all()
    assert held[pattern][0] < (share + 1) / 2
    for other in {"local", "sink", "needle"} - {pattern}:
        assert (held[other] < (0.25 if pattern == "periodic" else 1 - share)).all()


def test_the_needle_dominates_every_later_query():
    made = inputs.synthetic_attention("needle", needle=40, N=N)
    probabilities = attention(made.q, made.k)[0]
    assert (probabilities[:, 41:, 40] > 0.89).all()
    assert (probabilities[:, 100:].argmax(dim=-1) == 40).all()
    assert probabilities[:, 39].max() < 0.03  # uniform before the needle


def test_a_mixture_shares_attention_between_its_parts():
    made = inputs.synthetic_attention("local+sink+needle")
    held = masses(attention(made.q, made.k))
    for name in ("local", "sink", "needle"):
        assert (held[name] > 0.2).all() and (held[name] < 0.45).all()
    held = masses(attention(*inputs.synthetic_attention("local+periodic")[:2]))
    assert (held["local"] > 0.5).all() and (held["periodic"] - held["local"] > 0.2).all()


def test_a_list_gives_each_kv_head_its_own_pattern():
    made = inputs.synthetic_attention(["local", "sink"], H=8, Hkv=2, Hidx=4)
    held = masses(attention(made.q, made.k))
    assert (held["local"][:4] > 0.9).all() and (held["local"][4:] < 0.1).all()
    assert (held["sink"][4:] > 0.89).all() and (held["sink"][:4] < 0.1).all()
    student = masses(attention(made.index_q, made.index_k))
    assert (student["local"][:2] > 0.89).all() and (student["sink"][2:] > 0.89).all()


def index_blocks(made, topk=4, block_size=16):
    scores = made.index_q @ made.index_k.repeat_interleave(made.index_q.shape[1] // made.index_k.shape[1], dim=1).mT
    scores = scores.masked_fill(DISTANCE < 0, -math.inf).unflatten(-1, (-1, block_size)).amax(dim=-1)
    own = torch.arange(N) // block_size
    scores[..., torch.arange(N), own] = math.inf
    kept = scores.argsort(dim=-1, descending=True, stable=True)[..., :topk]
    return torch.where(kept > own[:, None], -1, kept)


@pytest.mark.parametrize("pattern", ["local", "sink", "periodic", "needle", "random", "local+sink+needle+random"])
def test_the_index_is_aligned_until_noise_is_added(pattern):
    recalls = []
    for noise in (0.0, 0.5, 4.0):
        made = inputs.synthetic_attention(pattern, noise=noise)
        mass = recall.teacher_block_mass(made.q, made.k, index_heads=2, block_size=16)
        recalls.append(recall.score_recall(mass, index_blocks(made), block_size=16, exclude_own=True).item())
    assert recalls[0] > 0.97
    assert recalls[0] > recalls[2] + 0.1 and recalls[1] > recalls[2]


def test_shapes_dtypes_and_seeds():
    sizes = {"B": 2, "N": 20, "H": 8, "Hkv": 2, "Hidx": 4, "Hik": 2, "D": 12, "Dv": 5, "Di": 10}
    made = inputs.synthetic_attention("local+sink", dtype=torch.float64, noise=0.1, **sizes)
    shapes = [tuple(tensor.shape) for tensor in made]
    assert shapes == [(2, 8, 20, 12), (2, 2, 20, 12), (2, 2, 20, 5), (2, 4, 20, 10), (2, 2, 20, 10)]
    assert all(tensor.dtype == torch.float64 and tensor.isfinite().all() for tensor in made)
    again = inputs.synthetic_attention("local+sink", dtype=torch.float64, noise=0.1, **sizes)
    other = inputs.synthetic_attention("local+sink", dtype=torch.float64, noise=0.1, seed=1, **sizes)
    assert all(map(torch.equal, made, again)) and not any(map(torch.equal, made, other))
    assert not torch.equal(made.k[0], made.k[1])


@pytest.mark.parametrize("tokens", [1, 2, 7])
def test_short_rows(tokens):
    for pattern in inputs.PATTERNS:
        made = inputs.synthetic_attention(pattern, N=tokens, sinks=3)
        assert all(tensor.isfinite().all() for tensor in made)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"pattern": "locale"}, ValueError, "got 'locale'"),
        ({"pattern": 3}, TypeError, "pattern must be a string"),
        ({"N": 0}, ValueError, "N must be at least 1, got 0"),
        ({"H": 6, "Hkv": 4}, ValueError, "q has 6 heads"),
        ({"needle": 256}, ValueError, "needle must be below N=256, got 256"),
        ({"share": 1.0}, ValueError, "share must be between 0 and 1, got 1.0"),
        ({"noise": -1.0}, ValueError, "noise must be finite and >= 0, got -1.0"),
        ({"D": 3}, ValueError, "D and Di leave 3 dimensions"),
        ({"dtype": torch.int32}, TypeError, "dtype must be floating-point"),
    ],
)
def test_bad_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        inputs.synthetic_attention(**arguments)


def test_toy_is_the_contracts_formula():
    tensor = inputs.toy((2, 3, 4), 5)
    assert tensor.shape == (2, 3, 4) and tensor.dtype == torch.float64
    for a, b, c in [(0, 0, 0), (0, 2, 3), (1, 1, 2)]:
        t = (a * 3 + b) * 4 + c
        expected = math.sin(1.7 * t + 5) + math.cos(0.37 * t**2 + 2.3 * 5)
        assert float(tensor[a, b, c]) == pytest.approx(expected, abs=1e-12)


def test_toy_problem():
    problem = inputs.toy_problem()
    assert (problem["topk"], problem["block_size"]) == (3, 2)
    for seed, (name, heads) in enumerate({"q": 4, "k": 2, "v": 2, "index_q": 2, "index_k": 1, "dout": 4}.items(), 1):
        assert torch.equal(problem[name], inputs.toy((1, heads, 12, 8), seed))


def test_standard_library_text():
    train, validation = (inputs.standard_library_text(split) for split in ("train", "validation"))
    assert train.dtype == torch.uint8 and train.ndim == 1
    assert len(train) > 4_000_000 and 0.05 < len(validation) / len(train) < 0.25
    assert torch.equal(validation, inputs.standard_library_text("validation"))
    assert not (validation == ord("\r")).any()
    assert b"import" in bytes(validation.tolist())


def test_text_is_sorted_split_by_file_and_skips_what_is_no_code(tmp_path):
    names = [f"{folder}{letter}.py" for folder in ("", "b/", "b/c/") for letter in "abcdefghijklmnop"]
    for name in [*names, "test/a.py", "b/tests/a.py", "site-packages/a.py", "__pycache__/a.py", "notes.txt"]:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(f"# {name}\r\n".encode())
    expected = {"train": [], "validation": []}
    for name in sorted(names):
        expected["train" if zlib.crc32(name.encode()) % 10 else "validation"].append(f"# {name}\n")
    assert all(expected.values())
    for split, parts in expected.items():
        assert bytes(inputs.standard_library_text(split, tmp_path).tolist()).decode() == "".join(parts)


def test_text_says_what_is_wrong(tmp_path):
    with pytest.raises(ValueError, match="got 'test'"):
        inputs.standard_library_text("test")
    with pytest.raises(FileNotFoundError, match=r"no Python source file for split 'train' .*\(0 files in all\)"):
        inputs.standard_library_text("train", tmp_path)
