"""Bad input raises before any work and names the argument and the numbers; block geometry; head mapping."""

import inspect
import re
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from compare import REFERENCES
from hypothesis import given, settings
from hypothesis import strategies as st

from msa_ref import BlockGeometry, describe, validate_block_indices
from msa_ref.problem import check_ids_on_cpu

B, N, BLOCK = 2, 20, 4
OPERATIONS = ("select_blocks", "sparse_attention", "index_kl_loss", "msa_attention")
CALLS = [(name, operation) for name in REFERENCES for operation in OPERATIONS]

every_call = pytest.mark.parametrize("implementation, operation", CALLS, ids=["-".join(call) for call in CALLS])


def arguments(batch=B, dtype=torch.float32) -> dict:
    """Every argument of the four functions, all good."""
    own = (torch.arange(N) // BLOCK)[:, None]
    return {
        "q": torch.ones(batch, 6, N, 8, dtype=dtype), "k": torch.ones(batch, 2, N, 8, dtype=dtype),
        "v": torch.ones(batch, 2, N, 5, dtype=dtype), "lse": torch.zeros(batch, 6, N),
        "index_q": torch.ones(batch, 2, N, 3, dtype=dtype), "index_k": torch.ones(batch, 1, N, 3, dtype=dtype),
        "block_indices": torch.cat([own - own, torch.where(own > 0, own, -1)], 1).expand(batch, 2, N, 2),
        "topk": 2, "block_size": BLOCK, "local_blocks": 1, "init_blocks": 0, "scale": None, "index_scale": None,
        "cu_seqlens": None, "reduction": "mean",
    }  # fmt: skip


def takes(function, given) -> bool:
    return set(given) <= set(inspect.signature(function).parameters)


def call(function, given):
    """Calls with those of the given arguments that the function has; tensors by position."""
    return function(**{name: given[name] for name in inspect.signature(function).parameters})


@contextmanager
def raises(error, *says):
    """The error is exactly of this type, and its message has every one of the words and numbers."""
    with pytest.raises(error) as caught:
        yield
    assert caught.type is error
    message = str(caught.value).replace("torch.", "")
    for words in says:
        assert re.search(rf"(?<![\w.]){re.escape(str(words))}(?!\w)", message), f"{words!r} is not in {message!r}"


def ids(*rows):
    """A selection of B=2, Hidx=2 whose row for query i of batch 1, head 1 is replaced by rows[i]."""
    table = arguments()["block_indices"].clone()
    for query, row in dict(rows).items():
        table[1, 1, query] = torch.tensor(row)
    return table


META = torch.ones(B, 6, N, 8, device="meta")
TYPE_ERRORS = {
    "tensor is a list": ({"q": [[1.0]]}, "q", "list"),
    "k is None": ({"k": None}, "k", "NoneType"),
    "q is None": ({"q": None}, "q", "NoneType"),
    "v is None": ({"v": None}, "v", "NoneType"),
    "lse is None": ({"lse": None}, "lse", "NoneType"),
    "index_q is None": ({"index_q": None}, "index_q", "NoneType"),
    "index_k is None": ({"index_k": None}, "index_k", "NoneType"),
    "integer q": ({"q": torch.ones(B, 6, N, 8, dtype=torch.int32)}, "q", "int32"),
    "integer index_k": ({"index_k": torch.ones(B, 1, N, 3, dtype=torch.int64)}, "index_k", "int64"),
    "bool v": ({"v": torch.ones(B, 2, N, 5, dtype=torch.bool)}, "v", "bool"),
    "complex k": ({"k": torch.ones(B, 2, N, 8, dtype=torch.complex64)}, "k", "complex64"),
    "k of another dtype": ({"k": torch.ones(B, 2, N, 8).half()}, "q float32", "k float16"),
    "v of another dtype": ({"v": torch.ones(B, 2, N, 5).double()}, "q float32", "k float32", "v float64"),
    "index_q of another dtype": ({"index_q": torch.ones(B, 2, N, 3).bfloat16()}, "index_q bfloat16", "index_k float32"),
    "lse in half precision": ({"lse": torch.zeros(B, 6, N).half()}, "lse", "float32", "float16"),
    "lse in float64": ({"lse": torch.zeros(B, 6, N).double()}, "lse", "float32", "float64"),
    "block_indices of floats": ({"block_indices": ids().float()}, "block_indices", "float32"),
    "block_indices of bytes": ({"block_indices": ids().to(torch.int8)}, "block_indices", "int8"),
    "block_indices is a list": ({"block_indices": [0]}, "block_indices", "list"),
    "float topk": ({"topk": 2.0}, "topk", "float", "2.0"),
    "bool topk": ({"topk": True}, "topk", "bool"),
    "str topk": ({"topk": "2"}, "topk", "str"),
    "float block_size": ({"block_size": 16.0}, "block_size", "float"),
    "bool block_size": ({"block_size": True}, "block_size", "bool"),
    "block_size is None": ({"block_size": None}, "block_size", "NoneType"),
    "float local_blocks": ({"local_blocks": 1.0}, "local_blocks", "float"),
    "bool init_blocks": ({"init_blocks": False}, "init_blocks", "bool"),
    "str scale": ({"scale": "0.5"}, "scale", "str", "0.5"),
    "tensor scale": ({"scale": torch.tensor(0.5)}, "scale", "Tensor"),
    "bool scale": ({"scale": True}, "scale", "bool"),
    "complex index_scale": ({"index_scale": 1j}, "index_scale", "complex"),
}  # fmt: skip
VALUE_ERRORS = {
    "q of rank 3": ({"q": torch.ones(6, N, 8)}, "q", "4 dimensions", "(6, 20, 8)"),
    "v of rank 5": ({"v": torch.ones(B, 2, N, 5, 1)}, "v", "(2, 2, 20, 5, 1)"),
    "index_k of rank 3": ({"index_k": torch.ones(B, N, 3)}, "index_k", "(2, 20, 3)"),
    "no tokens in q": ({"q": torch.ones(B, 6, 0, 8)}, "q", "(2, 6, 0, 8)"),
    "no heads in k": ({"k": torch.ones(B, 0, N, 8)}, "k", "(2, 0, 20, 8)"),
    "no width in index_q": ({"index_q": torch.ones(B, 2, N, 0)}, "index_q", "(2, 2, 20, 0)"),
    "q shorter than k": ({"q": torch.ones(B, 6, N - 4, 8)}, "q 16", "k 20"),
    "v longer than q": ({"v": torch.ones(B, 2, N + 1, 5)}, "q 20", "v 21"),
    "index_k shorter than index_q": ({"index_k": torch.ones(B, 1, 7, 3)}, "index_q 20", "index_k 7"),
    "block_indices too short": ({"block_indices": ids()[:, :, 1:]}, "block_indices 19", "q 20"),
    "batch of k": ({"k": torch.ones(1, 2, N, 8)}, "q 2", "k 1"),
    "batch of block_indices": ({"block_indices": ids()[:1]}, "block_indices 1", "q 2"),
    "batch of index_k": ({"index_k": torch.ones(3, 1, N, 3)}, "index_q 2", "index_k 3"),
    "width of k": ({"k": torch.ones(B, 2, N, 7)}, "q 8", "k 7"),
    "width of index_k": ({"index_k": torch.ones(B, 1, N, 4)}, "index_q 3", "index_k 4"),
    "heads of v": ({"v": torch.ones(B, 1, N, 5)}, "k 2", "v 1"),
    "H not a multiple of Hkv": ({"k": torch.ones(B, 4, N, 8), "v": torch.ones(B, 4, N, 5)}, "H", 6, "Hkv", 4),
    "H not a multiple of Hkv, no v": ({"k": torch.ones(B, 4, N, 8), "lse": torch.zeros(B, 6, N)}, "H", 6, "Hkv", 4),
    "H not a multiple of Hidx": ({"block_indices": ids().repeat(1, 2, 1, 1), "v": arguments()["v"]}, "Hidx", 6, 4),
    "Hidx not a multiple of Hkv": ({"q": torch.ones(B, 6, N, 8), "index_q": torch.ones(B, 3, N, 3),
        "block_indices": torch.zeros(B, 3, N, 1).int()}, "Hidx", 3, "Hkv", 2),
    "Hidx not a multiple of Hik": ({"index_k": torch.ones(B, 3, N, 3)}, "Hidx", 2, "Hik", 3),
    "more KV heads than query heads": ({"k": torch.ones(B, 12, N, 8), "v": torch.ones(B, 12, N, 5)}, 6, 12),
    "heads of block_indices, index_q": ({"block_indices": ids().repeat(1, 3, 1, 1), "index_q": torch.ones(B, 2, N, 3)},
        "index_q 2", "block_indices 6"),
    "shape of lse": ({"lse": torch.zeros(B, 2, N)}, "lse", "(2, 6, 20)", "(2, 2, 20)"),
    "block_indices of rank 3": ({"block_indices": ids()[0]}, "block_indices", "(2, 20, 2)"),
    "block_indices without slots": ({"block_indices": ids()[..., :0]}, "block_indices", "(2, 2, 20, 0)"),
    "id too large": ({"block_indices": ids((7, (0, 5)))}, "block_indices[1, 1, 7]", 5, "-1 .. 4"),
    "id below -1": ({"block_indices": ids((7, (-2, 1)))}, "block_indices[1, 1, 7]", "-2", "-1 .. 4"),
    "id repeated": ({"block_indices": ids((9, (2, 2)))}, "block_indices[1, 1, 9]", 2, "more than once"),
    "id in the future": ({"block_indices": ids((3, (0, 1)))}, "block_indices[1, 1, 3]", 1, "future"),
    "topk 0": ({"topk": 0}, "topk", 1, 0),
    "negative topk": ({"topk": -3}, "topk", 1, "-3"),
    "topk below local_blocks": ({"topk": 2, "local_blocks": 3}, "topk", "local_blocks", 3, 2),
    "topk below local and init": ({"topk": 2, "local_blocks": 1, "init_blocks": 2}, "topk", "init_blocks", 1, 2),
    "block_size 0": ({"block_size": 0}, "block_size", 1, 0),
    "negative block_size": ({"block_size": -16}, "block_size", "-16"),
    "negative local_blocks": ({"local_blocks": -1}, "local_blocks", "-1"),
    "negative init_blocks": ({"init_blocks": -2}, "init_blocks", "-2"),
    "scale 0": ({"scale": 0.0}, "scale", "0.0"),
    "negative scale": ({"scale": -0.5}, "scale", "-0.5"),
    "scale inf": ({"scale": float("inf")}, "scale", "inf"),
    "scale NaN": ({"scale": float("nan")}, "scale", "nan"),
    "index_scale 0": ({"index_scale": 0}, "index_scale", 0),
    "negative index_scale": ({"index_scale": -1.0}, "index_scale", "-1.0"),
    "index_scale -inf": ({"index_scale": float("-inf")}, "index_scale", "-inf"),
    "index_scale NaN": ({"index_scale": float("nan")}, "index_scale", "nan"),
    "reduction": ({"reduction": "sum"}, "reduction", "sum"),
    "q on another device": ({"q": META}, "q meta", "k cpu"),
    "index_k on another device": ({"index_k": META[:, :1, :, :3]}, "index_q cpu", "index_k meta"),
    "block_indices on another device": ({"block_indices": ids().to("meta")}, "block_indices meta", "q cpu"),
    "lse on another device": ({"lse": META[..., 0]}, "lse meta", "q cpu"),
    "no data": ({"index_q": META[:, :2, :, :3], "index_k": META[:, :1, :, :3]}, "index_q meta", "index_k meta"),
}  # fmt: skip
CU_TYPE_ERRORS = {
    "a number": (N, "cu_seqlens", "int"),
    "a string": ("0,20", "cu_seqlens", "str"),
    "floats": ([0, 4.0, N], "cu_seqlens", "float", "4.0"),
    "bools": ([False, N], "cu_seqlens", "bool"),
    "a float tensor": (torch.tensor([0.0, N]), "cu_seqlens", "float32"),
    "an int16 tensor": (torch.tensor([0, N], dtype=torch.int16), "cu_seqlens", "int16"),
    "a bool tensor": (torch.tensor([False, True]), "cu_seqlens", "bool"),
}
CU_VALUE_ERRORS = {
    "starts late": ([3, N], "cu_seqlens", "start at 0", 3),
    "starts below 0": ([-1, N], "cu_seqlens", "start at 0", "-1"),
    "decreases": ([0, 9, 4, N], "cu_seqlens", "decrease", 9, 4),
    "decreases, tensor": (torch.tensor([0, 9, 4, N]), "cu_seqlens", "decrease", 9, 4),
    "ends early": ([0, 4, N - 1], "cu_seqlens", N, N - 1),
    "ends late": (torch.tensor([0, 4, N + 2], dtype=torch.int32), "cu_seqlens", N, N + 2),
    "one offset": ([N], "cu_seqlens", 2, 1),
    "no offset": ([], "cu_seqlens", 2, 0),
    "two dimensions": (torch.tensor([[0, N]]), "cu_seqlens", 1, "(1, 2)"),
}


@pytest.mark.parametrize(
    "error, changes, says",
    [(error, changes, says) for error, table in ((TypeError, TYPE_ERRORS), (ValueError, VALUE_ERRORS))
     for changes, *says in table.values()],
    ids=[*TYPE_ERRORS, *VALUE_ERRORS],
)  # fmt: skip
def test_bad_arguments_are_named_by_every_function_that_takes_them(error, changes, says):
    tried = 0
    for name, operation in CALLS:
        function = getattr(REFERENCES[name], operation)
        if takes(function, changes):
            tried += 1
            with raises(error, *says):
                call(function, arguments() | changes)
    assert tried >= len(REFERENCES)


@pytest.mark.parametrize(
    "error, cu_seqlens, says",
    [(error, value, says) for error, table in ((TypeError, CU_TYPE_ERRORS), (ValueError, CU_VALUE_ERRORS))
     for value, *says in table.values()],
    ids=[*CU_TYPE_ERRORS, *CU_VALUE_ERRORS],
)  # fmt: skip
def test_bad_document_offsets_are_named_by_every_function(error, cu_seqlens, says):
    for name, operation in CALLS:
        with raises(error, *says):
            call(getattr(REFERENCES[name], operation), arguments(batch=1) | {"cu_seqlens": cu_seqlens})
    with raises(error, *says):
        validate_block_indices(ids()[:1], block_size=BLOCK, cu_seqlens=cu_seqlens)


def test_a_batch_of_packed_rows_is_refused():
    for name, operation in CALLS:
        with raises(ValueError, "cu_seqlens", "B must be 1", "B=2"):
            call(getattr(REFERENCES[name], operation), arguments() | {"cu_seqlens": [0, 4, N]})
    with raises(ValueError, "cu_seqlens", "B must be 1", "B=2"):
        validate_block_indices(ids(), block_size=BLOCK, cu_seqlens=[0, 4, N])


@every_call
def test_good_arguments_pass(implementation, operation):
    function = getattr(REFERENCES[implementation], operation)
    call(function, arguments())
    call(function, arguments(batch=1) | {"cu_seqlens": [0, 4, N], "scale": 2, "index_scale": np.float64(0.1)})
    call(function, arguments() | {"topk": np.int64(3), "local_blocks": 0, "init_blocks": 3})


@every_call
def test_more_slots_than_blocks_are_fine(implementation, operation):
    wide = torch.nn.functional.pad(ids(), (3, 5), value=-1)
    call(getattr(REFERENCES[implementation], operation), arguments() | {"topk": 50, "block_indices": wide.long()})


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@every_call
def test_every_floating_dtype_passes(implementation, operation, dtype):
    given = arguments(dtype=dtype)
    if dtype == torch.float64:
        given["lse"] = given["lse"].double()
    call(getattr(REFERENCES[implementation], operation), given)


@pytest.mark.parametrize("name", REFERENCES)
@pytest.mark.parametrize(
    "change", [{"index_scale": 0.0}, {"scale": float("nan")}, {"v": torch.ones(B, 1, N, 5)}, {"topk": 0}], ids=str
)
def test_the_composed_call_raises_before_any_work(name, change, monkeypatch):
    implementation = REFERENCES[name]

    def work(*args, **kwargs):
        raise AssertionError("work before the arguments were checked")

    for operation in OPERATIONS[:3]:
        monkeypatch.setattr(implementation, operation, work)
    with pytest.raises(ValueError):
        call(implementation.msa_attention, arguments() | change)


@pytest.mark.parametrize("block_size", [1, 8, 24, 100, 256])
def test_kernels_take_powers_of_two_from_16_to_128(block_size):
    given = {name: arguments()[name] for name in ("index_q", "index_k")}
    assert describe(**given, topk=1, block_size=block_size).block_size == block_size
    with raises(ValueError, "block_size", block_size, 16, 128):
        describe(**given, topk=1, block_size=block_size, kernel=True)


def test_kernels_refuse_float64():
    given = {name: arguments(dtype=torch.float64)[name] for name in ("index_q", "index_k")}
    assert describe(**given, topk=1).accumulator == torch.float64
    with raises(TypeError, "index_q float64", "index_k float64"):
        describe(**given, topk=1, kernel=True)


def test_the_ids_of_an_earlier_document_are_legal_and_those_of_a_later_one_are_not():
    table = torch.full((1, 1, N, 3), -1)
    table[0, 0, 8] = torch.tensor([0, 3, 1])
    validate_block_indices(table, block_size=BLOCK, cu_seqlens=[0, 5, 7, N])
    with raises(ValueError, "block_indices[0, 0, 8]", "block 3", "future"):
        validate_block_indices(table, block_size=BLOCK, cu_seqlens=[0, 8, 9, N])


def test_validation_counts_the_bad_entries():
    table = torch.zeros(1, 2, N, 2, dtype=torch.int32)
    with raises(ValueError, "block_indices[0, 0, 0]", "block 0", "40 such entries"):
        validate_block_indices(table, block_size=BLOCK)
    for bad, error in (([0], TypeError), (table.float(), TypeError), (table[0], ValueError)):
        with raises(error, "block_indices"):
            validate_block_indices(bad, block_size=BLOCK)
    with raises(ValueError, "block_size", 0):
        validate_block_indices(table, block_size=0)


def test_only_ids_on_the_cpu_are_checked():
    table = ids((3, (0, 1)))
    with raises(ValueError, "block_indices[1, 1, 3]", "future"):
        check_ids_on_cpu(table, BLOCK, None)
    for unread in (None, table.to("meta")):
        check_ids_on_cpu(unread, BLOCK, None)


@pytest.mark.parametrize(
    "heads, group, heads_per_index, index_group, index_heads_per_kv",
    [((6, 2, 2, 1), 3, 3, 2, 1), ((6, 2, 6, 1), 3, 1, 6, 3), ((6, 2, 6, 2), 3, 1, 3, 3), ((6, 6, 6, 1), 1, 1, 6, 1),
     ((4, 1, 1, 1), 4, 4, 1, 1), ((8, 2, 4, 4), 4, 2, 1, 2), ((64, 4, 4, 1), 16, 16, 4, 1)],
    ids=str,
)  # fmt: skip
def test_head_mapping(heads, group, heads_per_index, index_group, index_heads_per_kv):
    q, k, index_q, index_k = (torch.ones(1, count, 1, 1) for count in heads)
    problem = describe(q=q, k=k, v=k, index_q=index_q, index_k=index_k)
    assert (problem.heads, problem.kv_heads, problem.index_heads, problem.index_key_heads) == heads
    assert problem.group == group and problem.heads_per_index == heads_per_index
    assert problem.index_group == index_group and problem.index_heads_per_kv == index_heads_per_kv


@pytest.mark.parametrize("name", REFERENCES)
@pytest.mark.parametrize(
    "heads, named",
    [((6, 2, 1, 1), ("Hidx", 1, "Hkv", 2)), ((6, 3, 2, 1), ("Hidx", 2, "Hkv", 3)), ((6, 2, 4, 1), ("H", 6, "Hidx", 4)),
     ((4, 8, 4, 1), ("H", 4, "Hkv", 8)), ((6, 2, 2, 3), ("Hidx", 2, "Hik", 3))],
    ids=str,
)  # fmt: skip
def test_head_counts_that_do_not_divide_are_named(name, heads, named):
    q, k, index_q, index_k = (torch.ones(1, count, 4, 2) for count in heads)
    with raises(ValueError, *named):
        REFERENCES[name].msa_attention(q, k, k, index_q, index_k, topk=1, block_size=2)


def test_the_description_of_a_call():
    given = {name: arguments()[name] for name in ("q", "k", "v", "index_q", "index_k")}
    problem = describe(**given, topk=3, block_size=BLOCK, index_scale=2, local_blocks=2, init_blocks=1)
    assert (problem.batch, problem.tokens, problem.width, problem.value_width, problem.index_width) == (B, N, 8, 5, 3)
    assert (problem.topk, problem.block_size, problem.local_blocks, problem.init_blocks) == (3, BLOCK, 2, 1)
    assert problem.scale == 8**-0.5 and problem.index_scale == 2.0
    assert describe(**given).index_scale == 3**-0.5
    assert problem.dtype == problem.accumulator == torch.float32 and problem.device.type == "cpu"
    half = {name: tensor.half() for name, tensor in given.items()}
    assert describe(**half).accumulator == torch.float32


def geometry_by_hand(lengths, block_size):
    """block_start, block_of, first_block, documents, one token at a time."""
    block_start, block_of, first_block, documents, at = [], [], [], [], 0
    for length in lengths:
        if length:
            documents.append((at, at + length, len(block_start)))
        for token in range(length):
            if token % block_size == 0:
                block_start.append(at + token)
            block_of.append(len(block_start) - 1)
            first_block.append(documents[-1][2])
        at += length
    return [*block_start, at], block_of, first_block, documents


def assert_geometry(geometry, lengths, block_size):
    block_start, block_of, first_block, documents = geometry_by_hand(lengths, block_size)
    assert geometry.block_start.tolist() == block_start and geometry.blocks == len(block_start) - 1
    assert geometry.block_of.tolist() == block_of and geometry.first_block.tolist() == first_block
    assert list(geometry.documents()) == documents
    assert geometry.document_start.tolist() == [start for start, _, _ in documents] + [sum(lengths)]
    seen = [[first <= block <= own for block in range(geometry.blocks)]
            for own, first in zip(block_of, first_block, strict=True)]  # fmt: skip
    kept = [[sees and (block > own - 2 or block == first) for block, sees in enumerate(row)]
            for row, own, first in zip(seen, block_of, first_block, strict=True)]  # fmt: skip
    assert geometry.visible_blocks().tolist() == seen and geometry.forced_blocks(2, 1).tolist() == kept
    arrays = (geometry.block_start, geometry.block_of, geometry.first_block, geometry.document_start)
    assert all(array.dtype == torch.int64 and array.device.type == "cpu" for array in arrays)


@pytest.mark.parametrize("block_size", [1, 4, 16, 100])
@pytest.mark.parametrize("tokens", [1, 3, 4, 15, 16, 17, 64, 77])
def test_geometry_of_one_document(tokens, block_size):
    assert_geometry(BlockGeometry(tokens, block_size), [tokens], block_size)
    assert_geometry(BlockGeometry(tokens, block_size, [0, tokens]), [tokens], block_size)


@pytest.mark.parametrize(
    "lengths",
    [(9, 27, 41), (0, 5, 0, 0, 72, 0), (1,) * 20, (1, 1, 1, 74), (74, 1, 1, 1), (16, 16), (17, 1, 15)],
    ids=str,
)
@pytest.mark.parametrize("kind", ["list", "tuple", "int32", "int64", "column", "reversed storage"])
def test_geometry_of_documents(lengths, kind):
    offsets = [0, *np.cumsum(lengths).tolist()]
    column = torch.full((len(offsets), 2), 7)
    column[:, 1] = torch.tensor(offsets)
    cu_seqlens = {
        "list": offsets, "tuple": tuple(offsets), "int32": torch.tensor(offsets, dtype=torch.int32),
        "int64": torch.tensor(offsets), "column": column[:, 1], "reversed storage": column.flatten()[1::2],
    }[kind]  # fmt: skip
    assert_geometry(BlockGeometry(sum(lengths), 16, cu_seqlens), lengths, 16)


@settings(max_examples=100, deadline=None)
@given(lengths=st.lists(st.integers(0, 40), min_size=1, max_size=8).filter(any), block_size=st.integers(1, 20))
def test_geometry_of_random_documents(lengths, block_size):
    offsets = [0, *np.cumsum(lengths).tolist()]
    assert_geometry(BlockGeometry(sum(lengths), block_size, offsets), lengths, block_size)
