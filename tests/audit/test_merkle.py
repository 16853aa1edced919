"""Merkle trees: known roots, the RFC's example, and hypothesis against the RFC's own recursion."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvvault.audit import merkle

# The test tree of RFC 6962's reference implementation, and its roots at each size.
LEAVES = [
    bytes.fromhex(text)
    for text in (
        "",
        "00",
        "10",
        "2021",
        "3031",
        "40414243",
        "5051525354555657",
        "606162636465666768696a6b6c6d6e6f",
    )
]
ROOTS = [
    "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
    "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d",
    "fac54203e7cc696cf0dfcb42c92a1d9dbaf70ad9e621f4bd8d98662f00e3c125",
    "aeb6bcfe274b70a14fb067a5e5578264db0fa9b51af5e0ba159158f329e06e77",
    "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
    "4e3bbb1f7b478dcfe71fb631631519a3bca12c9aefca1612bfce4c13a86264d4",
    "76e67dadbcdf1e10e1b74ddc608abd2f98dfb16fbce75277b5232a127f2087ef",
    "ddb89be403809e325750d3d263cd78929c2942b7942a34b77e122c9594a74c8c",
    "5dc9da79a70659a9ad559cb701ded9a2ab9d823aad2f4960cfe370eff4604328",
]
HASHES = [merkle.leaf_hash(leaf) for leaf in LEAVES]

sizes = st.integers(min_value=0, max_value=70)


def leaves(count: int) -> list[bytes]:
    return [merkle.leaf_hash(str(n).encode()) for n in range(count)]


# -- RFC 9162, 2.1, word for word ------------------------------------------------------------------


def mth(d: Sequence[bytes]) -> bytes:
    if not d:
        return hashlib.sha256(b"").digest()
    if len(d) == 1:
        return d[0]
    k = split(len(d))
    return hashlib.sha256(b"\x01" + mth(d[:k]) + mth(d[k:])).digest()


def split(n: int) -> int:
    k = 1
    while k * 2 < n:
        k *= 2
    return k


def path(m: int, d: Sequence[bytes]) -> list[bytes]:
    if len(d) == 1:
        return []
    k = split(len(d))
    return [*path(m, d[:k]), mth(d[k:])] if m < k else [*path(m - k, d[k:]), mth(d[:k])]


def subproof(m: int, d: Sequence[bytes], whole: bool) -> list[bytes]:
    if m == len(d):
        return [] if whole else [mth(d)]
    k = split(len(d))
    if m <= k:
        return [*subproof(m, d[:k], whole), mth(d[k:])]
    return [*subproof(m - k, d[k:], False), mth(d[:k])]


# -- known answers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("size", range(9))
def test_roots_are_the_known_ones(size: int) -> None:
    assert merkle.root(HASHES[:size]).hex() == ROOTS[size]


def test_the_example_of_the_rfc() -> None:
    """RFC 9162, 2.1.5: a tree of seven leaves, its audit paths and consistency proofs."""
    d = leaves(7)
    a, b, c, e, f, j = d[0], d[1], d[2], d[3], d[4], d[6]
    g = merkle.node_hash(a, b)
    h = merkle.node_hash(c, e)
    i = merkle.node_hash(f, d[5])
    k = merkle.node_hash(g, h)
    last = merkle.node_hash(i, j)
    assert merkle.inclusion_proof(d, 0) == [b, h, last]
    assert merkle.inclusion_proof(d, 3) == [c, g, last]
    assert merkle.inclusion_proof(d, 4) == [d[5], j, k]
    assert merkle.inclusion_proof(d, 6) == [i, k]
    assert merkle.consistency_proof(d, 3) == [c, e, g, last]
    assert merkle.consistency_proof(d, 4) == [last]
    assert merkle.consistency_proof(d, 6) == [i, j, k]


def test_leaves_are_no_nodes() -> None:
    left, right = leaves(2)
    assert merkle.leaf_hash(left + right) != merkle.node_hash(left, right)


# -- against the recursion -------------------------------------------------------------------------


@given(sizes)
def test_roots(size: int) -> None:
    assert merkle.root(leaves(size)) == mth(leaves(size))


@given(sizes.filter(bool), st.data())
def test_inclusion(size: int, data: st.DataObject) -> None:
    index = data.draw(st.integers(0, size - 1))
    d = leaves(size)
    proof = merkle.inclusion_proof(d, index)
    assert proof == path(index, d)
    assert merkle.is_included(d[index], index, size, proof, mth(d))


@given(sizes.filter(bool), st.data())
def test_consistency(size: int, data: st.DataObject) -> None:
    old = data.draw(st.integers(0, size))
    d = leaves(size)
    proof = merkle.consistency_proof(d, old)
    assert proof == ([] if old in (0, size) else subproof(old, d, True))
    assert merkle.is_consistent(old, size, mth(d[:old]), mth(d), proof)


# -- what is no proof ------------------------------------------------------------------------------


@given(sizes.filter(bool), st.data())
def test_no_other_leaf_place_size_or_path_is_included(size: int, data: st.DataObject) -> None:
    index = data.draw(st.integers(0, size - 1))
    d = leaves(size)
    root, proof = mth(d), merkle.inclusion_proof(d, index)
    other = data.draw(st.integers(0, size + 3).filter(lambda n: n != index))
    assert not merkle.is_included(d[index], other, size, proof, root)
    assert not merkle.is_included(merkle.leaf_hash(b"other"), index, size, proof, root)
    assert not merkle.is_included(d[index], index, size, [*proof, root], root)
    assert not merkle.is_included(d[index], index, size, proof, merkle.leaf_hash(b"root"))
    if proof:
        at = data.draw(st.integers(0, len(proof) - 1))
        assert not merkle.is_included(d[index], index, size, proof[:at], root)
        changed = [*proof[:at], merkle.leaf_hash(b"x"), *proof[at + 1 :]]
        assert not merkle.is_included(d[index], index, size, changed, root)


@given(st.integers(2, 70), st.data())
def test_a_log_that_was_changed_is_consistent_with_nothing(size: int, data: st.DataObject) -> None:
    old = data.draw(st.integers(1, size - 1))
    d = leaves(size)
    before, root, proof = mth(d[:old]), mth(d), merkle.consistency_proof(d, old)
    altered = list(d)
    altered[data.draw(st.integers(0, old - 1))] = merkle.leaf_hash(b"other")
    forged = merkle.consistency_proof(altered, old)
    assert not merkle.is_consistent(old, size, before, mth(altered), forged)
    assert not merkle.is_consistent(old, size, mth(altered[:old]), root, proof)
    assert not merkle.is_consistent(old, size, before, root, proof[:-1])
    assert not merkle.is_consistent(old, size, before, root, [*proof, root])
    assert not merkle.is_consistent(size, old, root, before, proof)


def test_the_empty_tree() -> None:
    root = mth(leaves(3))
    assert merkle.is_consistent(0, 3, merkle.EMPTY_ROOT, root, [])
    assert not merkle.is_consistent(0, 3, root, root, [])
    assert not merkle.is_consistent(0, 3, merkle.EMPTY_ROOT, root, [root])
    assert not merkle.is_included(root, 0, 0, [], merkle.EMPTY_ROOT)
    with pytest.raises(ValueError, match="leaf"):
        merkle.inclusion_proof([], 0)
    with pytest.raises(ValueError, match="older"):
        merkle.consistency_proof(leaves(2), 3)
