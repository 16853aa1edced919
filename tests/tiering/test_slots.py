"""The slot table beside a model: what is referenced stays, what is used least goes first."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvvault.tiering.slots import Entry, Residence, SlotTable

SLOTS = 4
KEYS = st.integers(0, 8).map(lambda n: b"%d" % n)


def test_least_recently_used_goes_first() -> None:
    table = SlotTable(2)
    entries = {}
    for key in (b"a", b"b"):
        entry = table.reserve(key)
        assert entry is not None
        table.publish(entry)
        table.release(entry)
        entries[key] = entry
    table.hold(entries[b"a"])  # use
    table.release(entries[b"a"])
    table.reserve(b"c")
    assert table.find(b"b") is None
    assert table.find(b"a") is entries[b"a"]
    assert (table.evicted, table.lost) == (1, 1)


def test_what_the_vault_has_is_evicted_but_not_lost() -> None:
    table = SlotTable(1)
    entry = table.reserve(b"a")
    assert entry is not None
    table.publish(entry)
    entry.stored = True
    table.release(entry)
    assert table.reserve(b"b") is not None
    assert (table.evicted, table.lost) == (1, 0)


def test_a_slot_that_is_filled_for_somebody_gone_is_not_published() -> None:
    table = SlotTable(1)
    entry = table.reserve(b"a")
    assert entry is not None
    table.discard(entry)
    table.publish(entry)
    assert entry.residence is Residence.GONE
    assert table.find(b"a") is None
    assert table.reserve(b"a") is None  # its slot is still written to
    table.release(entry)
    assert table.reserve(b"a") is not None


class SlotMachine(RuleBasedStateMachine):
    """References are held in `held`, once per reference; `used` lists findable entries by use."""

    def __init__(self) -> None:
        super().__init__()
        self.table = SlotTable(SLOTS)
        self.held: list[Entry] = []
        self.used: list[Entry] = []

    @rule(key=KEYS)
    def reserve(self, key: bytes) -> None:
        if self.table.find(key) is not None:
            return
        taken = {entry.slot for entry in [*self.held, *self.used]}
        idle = [entry for entry in self.used if entry not in self.held]
        entry = self.table.reserve(key)
        if len(taken) < SLOTS:
            assert entry is not None
            assert entry.slot not in taken
        elif idle:
            assert entry is not None
            assert entry.slot == idle[0].slot
            assert idle[0].residence is Residence.GONE
            self.used.remove(idle[0])
        else:
            assert entry is None
            return
        self.held.append(entry)
        self.used.append(entry)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), good=st.booleans())
    def release(self, data: st.DataObject, good: bool) -> None:
        entry = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        if entry.residence is Residence.FILLING:
            if good:
                self.table.publish(entry)
            else:
                self.discard(entry)
        self.table.release(entry)
        if entry in self.used and entry not in self.held:
            self.used.remove(entry)
            self.used.append(entry)

    @precondition(lambda self: self.used)
    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        entry = data.draw(st.sampled_from(self.used))
        self.table.hold(entry)
        self.held.append(entry)

    @precondition(lambda self: self.used)
    @rule(data=st.data())
    def discard_one(self, data: st.DataObject) -> None:
        self.discard(data.draw(st.sampled_from(self.used)))

    @rule()
    def drop_idle(self) -> None:
        self.table.drop_idle()
        self.used = [entry for entry in self.used if entry in self.held]

    def discard(self, entry: Entry) -> None:
        self.table.discard(entry)
        self.table.discard(entry)  # twice does no harm
        self.used.remove(entry)
        assert entry.residence is Residence.GONE

    @invariant()
    def agree(self) -> None:
        assert len(self.table) == len(self.used)
        assert all(self.table.find(entry.key) is entry for entry in self.used)
        owners = {entry.slot: entry for entry in [*self.held, *self.used]}
        assert len(owners) == len({*self.held, *self.used}) <= SLOTS  # no slot has two owners
        assert self.table.in_use == len(set(self.held))
        assert all(entry.refs == self.held.count(entry) for entry in owners.values())


SlotMachine.TestCase.settings = settings(
    max_examples=max(25, settings().max_examples // 3), stateful_step_count=50
)
TestSlotMachine = SlotMachine.TestCase
