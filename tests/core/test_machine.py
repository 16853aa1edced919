"""A vault against a dictionary: any calls in any order, two handles, reopening, crashes."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvvault.errors import UsageError
from kvvault.model import Outcome, PutReport
from kvvault.vault import Scope, Vault
from tests.core.support import (
    ZERO,
    Home,
    content,
    get,
    key,
    namespace,
    segment_of,
)

SHM = Path("/dev/shm")
TENANTS = ("alice", "bob")
MODELS = ("one", "two")
PICKS = st.lists(st.integers(0, 11), min_size=1, max_size=7)
SCOPES = st.tuples(st.sampled_from(TENANTS), st.sampled_from(MODELS))
HANDLES = st.sampled_from((0, 1))

Name = tuple[str, str, int]


class VaultMachine(RuleBasedStateMachine):
    """`blocks` says what is stored: which copy of a block lies in which segment.

    A block can have several copies, one from each handle; the index keeps the newest. So a hit
    needs some living copy, and the only copy must be a hit.
    """

    def __init__(self) -> None:
        super().__init__()
        base = tempfile.mkdtemp(prefix="kvvault-machine-", dir=SHM if SHM.is_dir() else None)
        self.base = Path(base)
        self.home = Home(self.base / "vault")
        self.handles: list[Vault] = []
        self.blocks: dict[Name, set[bytes]] = {}
        self.generation = dict.fromkeys(TENANTS, 0)
        self.copies = 0

    @initialize()
    def create(self) -> None:
        self.handles = [self.home.create(), self.home.open()]

    def teardown(self) -> None:
        for vault in self.handles:
            vault.close()
        shutil.rmtree(self.base)

    # Helpers.

    def owner(self, tenant: str, model: str) -> str:
        """A forgotten tenant that comes again stores other content."""
        return f"{tenant}/{model}/{self.generation[tenant]}"

    def scope(self, handle: int, of: tuple[str, str]) -> Scope:
        return self.handles[handle].scope(of[0], namespace(model=of[1]))

    # What is done.

    @rule(handle=HANDLES, of=SCOPES, picks=PICKS)
    def put(self, handle: int, of: tuple[str, str], picks: list[int]) -> None:
        vault, scope = self.handles[handle], self.scope(handle, of)
        new = {pick for pick in picks if not vault.contains(scope, [key(pick)])[0]}
        owner = self.owner(*of)
        report = vault.put(scope, [key(p) for p in picks], [content(owner, key(p)) for p in picks])
        # `put` looks at the catalog first, so what was new to `contains` may be there by now.
        assert report.refused == 0
        assert report.stored <= len(new)
        assert report.stored + report.present == len(picks)
        for pick in set(picks):
            segment = segment_of(vault, scope, key(pick))
            assert segment is not None
            self.blocks.setdefault((*of, pick), set()).add(segment)

    @rule(handle=HANDLES, of=SCOPES, picks=PICKS, look=st.booleans())
    def get(self, handle: int, of: tuple[str, str], picks: list[int], look: bool) -> None:
        vault, scope = self.handles[handle], self.scope(handle, of)
        if look:
            vault.refresh()
        outcomes, found = get(vault, scope, [key(p) for p in picks])
        owner = self.owner(*of)
        for pick, outcome, data in zip(picks, outcomes, found, strict=True):
            copies = self.blocks.get((*of, pick), set())
            assert outcome in (Outcome.HIT, Outcome.MISS)
            assert data == (content(owner, key(pick)) if outcome is Outcome.HIT else ZERO)
            if outcome is Outcome.HIT:
                assert copies
            elif look:
                assert len(copies) != 1

    @rule(handle=HANDLES, of=SCOPES, picks=PICKS)
    def contains(self, handle: int, of: tuple[str, str], picks: list[int]) -> None:
        vault, scope = self.handles[handle], self.scope(handle, of)
        vault.refresh()
        said = vault.contains(scope, [key(p) for p in picks])
        for pick, here in zip(picks, said, strict=True):
            copies = self.blocks.get((*of, pick), set())
            assert not here or copies
            assert here or len(copies) != 1

    @rule(handle=HANDLES, choice=st.integers(0, 1000), count=st.integers(1, 3))
    def delete_segments(self, handle: int, choice: int, count: int) -> None:
        vault = self.handles[handle]
        live = sorted(s.segment_id for s in vault.segments() if s.state.live)
        doomed = [live[(choice + n) % len(live)] for n in range(count)] if live else []
        assert vault.delete_segments(doomed) == len(set(doomed))
        for name in list(self.blocks):
            self.blocks[name] -= set(doomed)
            if not self.blocks[name]:
                del self.blocks[name]

    @rule(handle=HANDLES, tenant=st.sampled_from(TENANTS))
    def forget(self, handle: int, tenant: str) -> None:
        stale = [self.scope(h, (tenant, "one")) for h in (0, 1)]
        self.handles[handle].forget(tenant)
        self.blocks = {name: s for name, s in self.blocks.items() if name[0] != tenant}
        self.generation[tenant] += 1
        for number, scope in enumerate(stale):
            # The old scopes are of no use any more, in neither handle.
            vault = self.handles[number]
            assert vault.put(scope, [key(0)], [ZERO]).stored == 0
            assert get(vault, scope, [key(0)]) == ([Outcome.MISS], [ZERO])

    @rule(handle=HANDLES)
    def reopen(self, handle: int) -> None:
        self.handles[handle].close()
        self.handles[handle] = self.home.open()

    @rule()
    def reopen_both(self) -> None:
        for vault in self.handles:
            vault.close()
        self.handles = [self.home.open(), self.home.open()]
        assert self.handles[0].recovery.clean
        assert self.handles[1].recovery.clean

    @rule()
    @precondition(lambda self: self.copies < 3)
    def crash(self) -> None:
        """Go on with what would lie on the disk had both processes been killed now."""
        self.copies += 1
        copy = self.base / f"copy {self.copies}"
        shutil.copytree(self.home.path, copy)
        for vault in self.handles:
            vault.close()
        self.home.path = copy
        self.handles = [self.home.open(), self.home.open()]
        report = self.handles[0].recovery
        assert (report.lost_blocks, report.lost_segments) == (0, 0)
        assert self.handles[1].recovery == type(report)()

    @rule(handle=HANDLES, name=st.sampled_from(("", "a\nb", "x" * 300)))
    def misuse(self, handle: int, name: str) -> None:
        vault, scope = self.handles[handle], self.scope(handle, ("alice", "one"))
        with pytest.raises(UsageError):
            vault.scope(name, namespace())
        with pytest.raises(ValueError, match="bytes"):
            vault.put(scope, [key(1)], [b"short"])
        assert vault.put(scope, [], []) == PutReport()

    @rule(handle=HANDLES)
    def verify(self, handle: int) -> None:
        report = self.handles[handle].verify()
        assert report.ok
        assert report.blocks == self.handles[handle].stats().blocks

    # What always holds.

    @invariant()
    def the_disk_holds_what_the_catalog_says(self) -> None:
        if not self.handles:
            return
        live = {
            s.segment_id.hex() + ".seg": s.data_bytes
            for s in self.handles[0].segments()
            if s.state.live
        }
        files = {path.name: path.stat().st_size for path in self.home.segment_files()}
        for name, size in live.items():
            assert files[name] == size
        # A file that has no row is one that a handle has just made and not used yet.
        assert all(files[name] == 0 for name in files.keys() - live.keys())


VaultMachine.TestCase.settings = settings(max_examples=5, stateful_step_count=20, deadline=None)
TestVault = VaultMachine.TestCase


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_for_longer() -> None:
    run_state_machine_as_test(
        VaultMachine, settings=settings(max_examples=25, stateful_step_count=50, deadline=None)
    )
