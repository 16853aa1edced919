"""Who uses which blocks: what the catalog says of prompts in a few bytes, multiplied out.

A block belongs to the prompt that had it stored (its *owner*), and to every prompt that a chain of
links leads from to the owner, up to the least token on that way. What is asked here is answered
without making a list of all pairs of prompt and block, of which there may be ten million:

- *How much has each prompt?* Along its links; where these are a single line, as after most
  requests, what the next one has is reused (`figures`).
- *What has nobody else?* Of each owner, the two users that reach farthest say it all.
- *What may go with these prompts?* Blocks that survivors reach only from farther away than the
  targets do (`erasure`).

There may be two copies of one block, stored by two processes at once. So what nobody else has, and
what may go, is also compared by the blocks' ids.

Pure: arrays in, arrays out. A damaged catalog gives wrong answers here, but ends: links that lead
in circles are followed once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

NONE: Final = -1
FAR: Final = (1 << 32) - 1
"""Beyond every token."""

_CHUNK = 4096
"""Prompts whose links are multiplied out at the same time."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """Live blocks, all arrays of one length."""

    owner: I64
    """Number of the prompt that had it stored; 0: none."""
    end: I64
    """Token at which it ends."""
    segment: I64
    """Index into `Segments`."""

    def __len__(self) -> int:
        return len(self.owner)


@dataclass(frozen=True, slots=True)
class Segments:
    """What is asked of segments, all arrays of one length."""

    block_bytes: I64
    deadline: F64
    """Seconds since the epoch; infinite: none."""


@dataclass(frozen=True, slots=True)
class Links:
    """All arrays of one length: prompt, through which, up to which token."""

    user: I64
    via: I64
    upto: I64


@dataclass(frozen=True, slots=True)
class Pairs:
    """Whose blocks prompts have: of each pair, all that end at `depth` or before. All arrays of one
    length; prompts by their position in `Sharing.numbers`."""

    user: I64
    owner: I64
    depth: I64


@dataclass(frozen=True, slots=True)
class Figures:
    """Of each prompt, in the order of `Sharing.numbers`. Figures of prompts that are gone mean
    nothing."""

    blocks: I64
    bytes: I64
    alone_blocks: I64
    """Blocks of which no other prompt has any copy."""
    alone_bytes: I64
    tokens: I64
    """Token at which its last live block ends."""
    first_deadline: F64
    """When the first of its blocks is destroyed; infinite: never, or there is none."""
    last_deadline: F64
    """When the last is; minus infinite: there is none."""


@dataclass(frozen=True, slots=True)
class Erasure:
    """What becomes of blocks when prompts are erased: two masks over the blocks, in the order in
    which they were given."""

    private: Mask
    """Used by the erased prompts and by nobody else, or copies of such blocks: these go."""
    shared: Mask
    """Used by others, too."""


class Sharing:
    """Prompts, links and live blocks of one moment."""

    def __init__(
        self,
        prompts: I64,
        gone: Mask,
        links: Links,
        blocks: Blocks,
        segments: Segments,
    ) -> None:
        """`prompts`: their numbers, each once; `gone`: which of them stand only for links."""
        # Blocks of one prompt mostly stand together: a tenth as much to sort.
        begins = np.flatnonzero(np.diff(blocks.owner, prepend=-1))
        owners = blocks.owner[begins]
        self.numbers: I64 = np.unique(
            np.concatenate([prompts, links.user, links.via, owners[owners > 0]])
        )
        """All that are spoken of, ascending: also what has no row any more, which counts as
        gone."""
        self.alive: Mask = np.zeros(len(self.numbers), np.bool_)
        self.alive[self.position(prompts)] = ~gone
        self._segments = segments
        self._load_links(links)
        runs = np.diff(begins, append=len(blocks))
        self._load_blocks(blocks, np.repeat(self.position(owners), runs))
        self._count = len(blocks)

    def position(self, numbers: I64) -> I64:
        """Where prompts stand in `numbers`; they must be there."""
        return np.searchsorted(self.numbers, numbers).astype(np.int64)

    def _load_links(self, links: Links) -> None:
        user, via = self.position(links.user), self.position(links.via)
        real = user != via
        user, via, upto = user[real], via[real], links.upto[real]
        order = np.argsort(user, kind="stable")
        self._user, self._via, self._upto = user[order], via[order], upto[order]
        nodes = np.arange(len(self.numbers))
        self._from = np.searchsorted(self._user, nodes, "left").astype(np.int64)
        self._to = np.searchsorted(self._user, nodes, "right").astype(np.int64)

    def _load_blocks(self, blocks: Blocks, position: I64) -> None:
        own = np.flatnonzero(blocks.owner > 0)
        key = (position[own] << 32) | blocks.end[own]
        order = np.argsort(key, kind="stable")
        self._row = own[order]
        self._key = key[order]
        self._start = np.searchsorted(self._key, np.arange(len(self.numbers)) << 32).astype(
            np.int64
        )
        self._block_segment = blocks.segment
        segment = blocks.segment[self._row]
        sizes = self._segments.block_bytes[segment]
        self._sum = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes, dtype=np.int64)])
        owner = self._key >> 32
        ranks, of_segment = np.unique(self._segments.deadline, return_inverse=True)
        rank = of_segment.reshape(-1)[segment]
        # The least and the greatest so far of each owner's blocks: as ranks, raised owner by owner,
        # so that one pass over all of them never carries anything from one owner to the next.
        step = len(ranks) + 1
        self._ranks = np.concatenate([ranks, np.array([np.inf])])
        self._latest = np.maximum.accumulate(rank + owner * step) - owner * step
        self._earliest = (step - 1) - (
            np.maximum.accumulate((step - 1 - rank) + owner * step) - owner * step
        )

    # -- whose blocks -----------------------------------------------------------------------------

    def pairs_of(self, users: I64) -> Pairs:
        """Whose blocks these prompts (positions) have, themselves included, each pair once."""
        if not len(users):
            empty = np.zeros(0, np.int64)
            return Pairs(empty, empty, empty)
        parts = [self._pairs(users[i : i + _CHUNK]) for i in range(0, len(users), _CHUNK)]
        return Pairs(
            np.concatenate([part.user for part in parts]),
            np.concatenate([part.owner for part in parts]),
            np.concatenate([part.depth for part in parts]),
        )

    def _pairs(self, users: I64) -> Pairs:
        keys = np.unique((users << 32) | users)
        depths = np.full(len(keys), FAR, np.int64)
        new, far = keys, depths
        while len(new):
            user, owner = new >> 32, new & 0xFFFFFFFF
            which, link = self._links_from(owner)
            user, owner = user[which], self._via[link]
            far = np.minimum(far[which], self._upto[link])
            new, far = _greatest((user << 32) | owner, far)
            # Only what is new, or farther than before: so circles end.
            at = np.minimum(np.searchsorted(keys, new), len(keys) - 1)
            better = (keys[at] != new) | (depths[at] < far)
            new, far = new[better], far[better]
            keys, depths = _greatest(np.concatenate([keys, new]), np.concatenate([depths, far]))
        return Pairs(keys >> 32, keys & 0xFFFFFFFF, depths)

    def _links_from(self, nodes: I64) -> tuple[I64, I64]:
        """The links of nodes, one behind the other: index into `nodes`, index of the link."""
        counts = self._to[nodes] - self._from[nodes]
        which = np.repeat(np.arange(len(nodes)), counts)
        offset = np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts)
        return which, self._from[nodes][which] + offset

    def _upto_position(self, owner: I64, depth: I64) -> I64:
        """Behind the last of the owners' blocks that end at these depths or before."""
        wanted = (owner << 32) | np.minimum(depth, FAR)
        found: I64 = np.searchsorted(self._key, wanted, "right").astype(np.int64)
        return found

    def rows(self, pairs: Pairs) -> tuple[I64, I64]:
        """The blocks of pairs: index into the pairs, index of the block as it was given."""
        stop = self._upto_position(pairs.owner, pairs.depth)
        counts = stop - self._start[pairs.owner]
        which = np.repeat(np.arange(len(counts)), counts)
        offset = np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts)
        return which, self._row[self._start[pairs.owner][which] + offset]

    # -- how much ---------------------------------------------------------------------------------

    def figures(self, ids: npt.NDArray[np.uint64] | None = None) -> Figures:
        """What every prompt has. `ids`: n x 2, of all blocks in the order in which they were given;
        without them copies of a block count as different ones."""
        nodes = np.arange(len(self.numbers))
        made = _Sums.none(len(nodes))
        simple = self._along_single_links(made)
        made.add(self._sums(nodes[simple], np.full(int(simple.sum()), FAR)), nodes[simple])
        rest = nodes[~simple & self.alive]
        for i in range(0, len(rest), _CHUNK):
            pairs = self._pairs(rest[i : i + _CHUNK])
            made.add(self._sums(pairs.owner, pairs.depth), pairs.user)
        alone_blocks, alone_bytes = self._alone(ids)
        return Figures(
            made.blocks,
            made.bytes,
            alone_blocks,
            alone_bytes,
            made.tokens,
            self._ranks[made.earliest],
            np.where(made.latest < 0, -np.inf, self._ranks[made.latest]),
        )

    def _along_single_links(self, made: _Sums) -> Mask:
        """Enter what prompts have through links, where these are a single line, each of them
        reaching as far as the next one or farther; which prompts that are."""
        nodes = np.arange(len(self.numbers))
        count = self._to - self._from
        done: Mask = count == 0
        single = np.flatnonzero(count == 1)
        via = np.full(len(nodes), NONE, np.int64)
        upto = np.full(len(nodes), NONE, np.int64)
        via[single], upto[single] = self._via[self._from[single]], self._upto[self._from[single]]
        fits = single[upto[single] >= upto[via[single]]]
        fits = fits[np.argsort(via[fits], kind="stable")]
        from_via = via[fits]
        level = np.flatnonzero(done)
        while len(level):
            left = np.searchsorted(from_via, level, "left")
            counts = np.searchsorted(from_via, level, "right") - left
            offset = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
            level = fits[np.repeat(left, counts) + offset]
            made.take_over(level, via[level])
            made.add(self._sums(via[level], upto[level]), level)
            done[level] = True
        return done

    def _sums(self, owner: I64, depth: I64) -> _Sums:
        start, stop = self._start[owner], self._upto_position(owner, depth)
        some = stop > start
        last = np.maximum(stop - 1, 0)
        if not len(self._key):
            return _Sums.none(len(owner), most=len(self._ranks) - 1)
        return _Sums(
            stop - start,
            self._sum[stop] - self._sum[start],
            np.where(some, self._key[last] & 0xFFFFFFFF, 0),
            np.where(some, self._earliest[last], len(self._ranks) - 1),
            np.where(some, self._latest[last], NONE),
        )

    def _alone(self, ids: npt.NDArray[np.uint64] | None) -> tuple[I64, I64]:
        blocks = np.zeros(len(self.numbers), np.int64)
        size = np.zeros(len(self.numbers), np.int64)
        nodes = np.arange(len(self.numbers))
        first, first_depth, second_depth = self._two_farthest()
        # Who lives has its own blocks to the end; another user's reach ends its being alone.
        owner = np.where(self.alive, nodes, first)
        top = np.where(self.alive, FAR, first_depth)
        shared = np.where(self.alive, first_depth, second_depth)
        known = owner >= 0
        low = np.where(shared < 0, self._start, self._upto_position(nodes, np.maximum(shared, 0)))
        high = np.where(top < 0, self._start, self._upto_position(nodes, np.maximum(top, 0)))
        np.add.at(blocks, owner[known], (high - low)[known])
        np.add.at(size, owner[known], (self._sum[high] - self._sum[low])[known])
        if ids is not None and len(ids) == self._count:
            not_alone = self._with_others_copies(ids, first, first_depth, second_depth)
            np.subtract.at(blocks, not_alone[0], 1)
            np.subtract.at(size, not_alone[0], not_alone[1])
        return blocks, size

    def _with_others_copies(
        self, ids: npt.NDArray[np.uint64], first: I64, first_depth: I64, second_depth: I64
    ) -> tuple[I64, I64]:
        """Blocks that one prompt alone has, while another one has a copy: whose, and how large."""
        twice = occurring_twice(ids)
        if not twice.any():
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        at = np.flatnonzero(twice[self._row])
        row, owner, end = self._row[at], self._key[at] >> 32, self._key[at] & 0xFFFFFFFF
        # The only one that has this copy; -1: nobody has, -2: several have.
        by_owner = np.where(first_depth[owner] >= end, -2, owner)
        by_others = np.where(first_depth[owner] < end, NONE, first[owner])
        by_others = np.where(second_depth[owner] >= end, -2, by_others)
        only = np.where(self.alive[owner], by_owner, by_others)
        _, name = np.unique(ids[row], axis=0, return_inverse=True)
        name = name.reshape(-1)
        used = only != NONE
        least = np.full(len(at), FAR, np.int64)
        most = np.full(len(at), -2, np.int64)
        np.minimum.at(least, name[used], only[used])
        np.maximum.at(most, name[used], only[used])
        found = np.flatnonzero((only >= 0) & (least != most)[name])
        size = self._segments.block_bytes[self._block_segment[row[found]]]
        return only[found], size

    def _two_farthest(self) -> tuple[I64, I64, I64]:
        """Of each prompt, the other living prompt that has the most of its blocks; how far that
        reaches, and how far the next one does."""
        n = len(self.numbers)
        users = np.full((2, n), NONE, np.int64)
        depth = np.full((2, n), NONE, np.int64)
        changed = np.ones(n, np.bool_)
        while changed.any():
            link = np.flatnonzero(changed[self._user])
            to, via_user, upto = self._via[link], self._user[link], self._upto[link]
            living = self.alive[via_user]
            node = np.concatenate([to[living], to, to, np.tile(np.unique(to), 2)])
            affected = np.unique(to)
            user = np.concatenate(
                [via_user[living], users[0][via_user], users[1][via_user], *users[:, affected]]
            )
            far = np.concatenate(
                [
                    upto[living],
                    np.minimum(depth[0][via_user], upto),
                    np.minimum(depth[1][via_user], upto),
                    *depth[:, affected],
                ]
            )
            keep = (user >= 0) & (user != node)
            pair, far = _greatest((node[keep] << 32) | user[keep], far[keep])
            node, user = pair >> 32, pair & 0xFFFFFFFF
            order = np.lexsort((user, -far, node))
            node, user, far = node[order], user[order], far[order]
            is_first = np.concatenate([[True], node[1:] != node[:-1]]) if len(node) else node > 0
            is_second = np.concatenate([[False], is_first[:-1]]) & ~is_first
            before = users.copy(), depth.copy()
            for place, which in enumerate((is_first, is_second)):
                users[place][node[which]] = user[which]
                depth[place][node[which]] = far[which]
            changed = ((users != before[0]) | (depth != before[1])).any(axis=0)
        return users[0], depth[0], depth[1]

    # -- what may go ------------------------------------------------------------------------------

    def reach(self, sources: Mask) -> I64:
        """Of each prompt, up to which token any of `sources` (a mask over `numbers`) has its
        blocks; -1: none has any."""
        got = np.full(len(self.numbers), NONE, np.int64)
        got[sources] = FAR
        ahead = np.flatnonzero(sources)
        while len(ahead):
            which, link = self._links_from(ahead)
            far = np.minimum(got[ahead][which], self._upto[link])
            to, far = _greatest(self._via[link], far)
            better = far > got[to]
            ahead, far = to[better], far[better]
            got[ahead] = far
        return got

    def used_by(self, sources: Mask) -> Mask:
        """Which blocks, in the order in which they were given, any of these prompts (a mask over
        `numbers`) has."""
        found = np.zeros(self._count, np.bool_)
        reached = self.reach(sources)
        found[self._row] = (self._key & 0xFFFFFFFF) <= reached[self._key >> 32]
        return found

    def erasure(self, targets: I64, ids: npt.NDArray[np.uint64]) -> Erasure:
        """What becomes of the blocks when prompts of these numbers are erased. `ids`: n x 2, of all
        blocks in the order in which they were given."""
        private = np.zeros(self._count, np.bool_)
        shared = np.zeros(self._count, np.bool_)
        known = targets[np.isin(targets, self.numbers)]
        target = np.zeros(len(self.numbers), np.bool_)
        target[self.position(known)] = True
        survivors = self.reach(self.alive & ~target)
        reached = self.reach(target)
        owner, end = self._key >> 32, self._key & 0xFFFFFFFF
        private[self._row] = (end <= reached[owner]) & (end > survivors[owner])
        shared[self._row] = (end <= reached[owner]) & (end <= survivors[owner])
        stays = np.zeros(self._count, np.bool_)
        stays[self._row] = end <= survivors[owner]
        return self._by_id(private, shared, stays, ids)

    def _by_id(
        self, private: Mask, shared: Mask, stays: Mask, ids: npt.NDArray[np.uint64]
    ) -> Erasure:
        """Settle the fate of blocks that are there twice: with a copy that a survivor has all stay,
        without one all go."""
        candidates = np.flatnonzero(private)
        # Half of an id tells all but two in 2^64 apart; the few that agree are compared in full.
        wanted_halves = np.unique(ids[candidates, 0])
        if not len(wanted_halves):
            return Erasure(private, shared)
        at = np.searchsorted(wanted_halves, ids[:, 0]).clip(max=len(wanted_halves) - 1)
        halves = np.flatnonzero(wanted_halves[at] == ids[:, 0])
        _, name = np.unique(ids[halves], axis=0, return_inverse=True)
        name = name.reshape(-1)
        kept = np.zeros(len(halves) + 1, np.bool_)
        kept[name[stays[halves]]] = True
        wanted = np.zeros(len(halves) + 1, np.bool_)
        wanted[name[private[halves]]] = True
        goes = wanted[name] & ~kept[name]
        stay_too = wanted[name] & kept[name]
        private[halves] = goes
        shared[halves[stay_too]] = True
        return Erasure(private, shared)


@dataclass(slots=True)
class _Sums:
    """What is summed up of prompts; deadlines as ranks."""

    blocks: I64
    bytes: I64
    tokens: I64
    earliest: I64
    latest: I64

    @classmethod
    def none(cls, count: int, most: int = NONE) -> _Sums:
        """Nothing yet. `most`: the rank that stands for no deadline (-1: the last one)."""
        return cls(
            np.zeros(count, np.int64),
            np.zeros(count, np.int64),
            np.zeros(count, np.int64),
            np.full(count, most, np.int64),
            np.full(count, NONE, np.int64),
        )

    def take_over(self, to: I64, source: I64) -> None:
        """What one prompt has, another has too, so far."""
        for name in ("blocks", "bytes", "tokens", "earliest", "latest"):
            values = getattr(self, name)
            values[to] = values[source]

    def add(self, more: _Sums, to: I64) -> None:
        """Add `more[i]` to prompt `to[i]`."""
        np.add.at(self.blocks, to, more.blocks)
        np.add.at(self.bytes, to, more.bytes)
        np.maximum.at(self.tokens, to, more.tokens)
        # -1 is "no deadline" here, and the greatest of all: compared without its sign.
        np.minimum.at(self.earliest.view(np.uint64), to, more.earliest.view(np.uint64))
        np.maximum.at(self.latest, to, more.latest)


def occurring_twice(ids: npt.NDArray[np.uint64]) -> Mask:
    """Which of these blocks (n x 2) may be there more than once. Half of an id tells all but two in
    2^64 apart."""
    halves = np.sort(ids[:, 0])
    return _among(ids[:, 0], np.unique(halves[1:][halves[1:] == halves[:-1]]))


def copies_of(chosen: Mask, ids: npt.NDArray[np.uint64]) -> Mask:
    """These blocks and all copies of them."""
    candidates = np.flatnonzero(_among(ids[:, 0], np.unique(ids[chosen, 0])))
    _, name = np.unique(ids[candidates], axis=0, return_inverse=True)
    name = name.reshape(-1)
    wanted = np.zeros(len(candidates), np.bool_)
    wanted[name[chosen[candidates]]] = True
    found = chosen.copy()
    found[candidates] = wanted[name]
    return found


def _among(values: npt.NDArray[np.uint64], wanted: npt.NDArray[np.uint64]) -> Mask:
    """Which values are among these, which are ascending."""
    if not len(wanted):
        return np.zeros(len(values), np.bool_)
    found: Mask = wanted[np.searchsorted(wanted, values).clip(max=len(wanted) - 1)] == values
    return found


def _greatest(keys: I64, values: I64) -> tuple[I64, I64]:
    """Each key once, ascending, with its greatest value."""
    order = np.lexsort((-values, keys))
    keys, values = keys[order], values[order]
    first = np.ones(len(keys), np.bool_)
    first[1:] = keys[1:] != keys[:-1]
    return keys[first], values[first]
