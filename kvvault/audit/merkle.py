"""Merkle trees of logs (RFC 9162, section 2.1; the same as RFC 6962's): roots, and proofs.

Pure functions of bytes. A hash is SHA-256, 32 bytes; a leaf is hashed with 0x00 before it and a
node with 0x01, so no leaf passes for a node. Trees of any number of leaves; the root of none is the
hash of nothing.

Proofs are checked as sections 2.1.3.2 and 2.1.4.2 say, without any tree.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Final

__all__ = [
    "EMPTY_ROOT",
    "HASH_BYTES",
    "Frontier",
    "consistency_proof",
    "inclusion_proof",
    "is_consistent",
    "is_included",
    "leaf_hash",
    "node_hash",
    "root",
]

HASH_BYTES: Final = 32
EMPTY_ROOT: Final = hashlib.sha256(b"").digest()


def leaf_hash(entry: bytes) -> bytes:
    """The hash of a leaf."""
    return hashlib.sha256(b"\x00" + entry).digest()


def node_hash(left: bytes, right: bytes) -> bytes:
    """The hash of a node, of those of its children."""
    return hashlib.sha256(b"\x01" + left + right).digest()


class Frontier:
    """A tree that grows, in logarithmic memory: the roots of its whole subtrees, largest first."""

    __slots__ = ("_roots", "size")

    def __init__(self, leaves: Iterable[bytes] = ()) -> None:
        self._roots: list[bytes] = []
        self.size = 0
        """How many leaves it has."""
        for leaf in leaves:
            self.push(leaf)

    def push(self, leaf: bytes) -> None:
        """Add a leaf, by its hash."""
        self._roots.append(leaf)
        # One subtree for each set bit of the size; carrying joins equal ones.
        size = self.size
        while size & 1:
            right = self._roots.pop()
            self._roots.append(node_hash(self._roots.pop(), right))
            size >>= 1
        self.size += 1

    def root(self) -> bytes:
        """The root of what was added so far."""
        if not self._roots:
            return EMPTY_ROOT
        result = self._roots[-1]
        for left in reversed(self._roots[:-1]):
            result = node_hash(left, result)
        return result


def root(leaves: Sequence[bytes]) -> bytes:
    """The root of a tree of these leaves, given as hashes."""
    return Frontier(leaves).root()


def inclusion_proof(leaves: Sequence[bytes], index: int) -> list[bytes]:
    """What shows that leaf `index` is in the tree of all `leaves`: siblings, lowest first. Hashes
    every leaf once.

    Raises:
        ValueError: there is no such leaf.
    """
    if not 0 <= index < len(leaves):
        raise ValueError("there is no such leaf")
    proof = []
    start, end = 0, len(leaves)
    while end - start > 1:
        middle = start + _split(end - start)
        if index < middle:
            proof.append(root(leaves[middle:end]))
            end = middle
        else:
            proof.append(root(leaves[start:middle]))
            start = middle
    return proof[::-1]


def consistency_proof(leaves: Sequence[bytes], old_size: int) -> list[bytes]:
    """What shows that the tree of the first `old_size` leaves became that of all by adding only.

    Raises:
        ValueError: not 0 <= `old_size` <= number of leaves.
    """
    if not 0 <= old_size <= len(leaves):
        raise ValueError("an older tree is no larger than a newer one")
    if old_size in (0, len(leaves)):
        return []
    proof = []
    start, end, whole = 0, len(leaves), True  # whole: this subtree is the old tree itself
    while old_size != end:
        middle = start + _split(end - start)
        if old_size <= middle:
            proof.append(root(leaves[middle:end]))
            end = middle
        else:
            proof.append(root(leaves[start:middle]))
            start, whole = middle, False
    if not whole:
        proof.append(root(leaves[start:end]))
    return proof[::-1]


def is_included(
    leaf: bytes, index: int, size: int, proof: Sequence[bytes], tree_root: bytes
) -> bool:
    """Whether `proof` shows that a leaf (its hash) is number `index` of `size` (2.1.3.2)."""
    if not 0 <= index < size:
        return False
    first, second = index, size - 1
    result = leaf
    for sibling in proof:
        if second == 0:
            return False
        if first & 1 or first == second:
            result = node_hash(sibling, result)
            while not first & 1 and first:
                first >>= 1
                second >>= 1
        else:
            result = node_hash(result, sibling)
        first >>= 1
        second >>= 1
    return second == 0 and result == tree_root


def is_consistent(
    old_size: int, size: int, old_root: bytes, new_root: bytes, proof: Sequence[bytes]
) -> bool:
    """Whether `proof` shows that the older tree became the newer by adding leaves only (2.1.4.2).
    The empty tree is consistent with all, without proof."""
    if not 0 <= old_size <= size:
        return False
    if old_size == size:
        return not proof and old_root == new_root
    if old_size == 0:
        return not proof and old_root == EMPTY_ROOT
    path = list(proof)
    if old_size & (old_size - 1) == 0:
        path.insert(0, old_root)
    if not path:
        return False
    first, second = old_size - 1, size - 1
    while first & 1:
        first >>= 1
        second >>= 1
    old, new = path[0], path[0]
    for sibling in path[1:]:
        if second == 0:
            return False
        if first & 1 or first == second:
            old, new = node_hash(sibling, old), node_hash(sibling, new)
            while not first & 1 and first:
                first >>= 1
                second >>= 1
        else:
            new = node_hash(new, sibling)
        first >>= 1
        second >>= 1
    return second == 0 and old == old_root and new == new_root


def _split(size: int) -> int:
    """The largest power of two that is smaller than `size`, which is two or more."""
    return 1 << ((size - 1).bit_length() - 1)
