"""What the demo measured, whether it is what was promised, and its JSON document."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from typing import Final

from kvvault import __version__
from kvvault.demo.client import Answer
from kvvault.demo.prompts import Conversation
from kvvault.demo.search import SearchReport

__all__ = ["Exchange", "PlaintextSearch", "Report", "Stranger"]

_MIN_CACHED_RATIO: Final = 0.95


@dataclass(frozen=True, slots=True)
class Exchange:
    """One prompt, answered three times."""

    conversation: Conversation
    computed: Answer
    """The first time: its private part was computed."""
    memory: Answer
    """Right after that, from vLLM's own memory: what the answer is without kvvault."""
    disk: Answer
    """After the restart, from the vault."""

    @property
    def identical(self) -> bool:
        """Whether vLLM gave the same answer from disk as from memory: text, tokens and log
        probabilities, to the last bit.

        Those of the computed answer may differ in the last digits: the sums are the same, but the
        matrices of a whole prompt have another shape than those of its end, and are added up in
        another order.
        """
        return self.memory.same_words(self.disk) and self.memory.logprobs == self.disk.logprobs


@dataclass(frozen=True, slots=True)
class Stranger:
    """A tenant's request that begins with what another tenant sent before."""

    what: str
    answer: Answer
    own_tokens: int
    """Cached tokens that the tenant had computed itself before, under the same salt."""

    @property
    def hits(self) -> int:
        """Prompt tokens that came from the other tenant's cache."""
        return max(0, self.answer.cached_tokens - self.own_tokens)


@dataclass(frozen=True, slots=True)
class PlaintextSearch:
    """Looking for what the engine's memory held, in the vault's files."""

    windows_total: int
    """All windows of the memory."""
    windows_constant: int
    """Windows of equal bytes, which were not searched for: nearly all of them never used memory."""
    windows_searched: int
    """Distinct windows that were searched for."""
    reports: tuple[SearchReport, ...]
    """While the server ran, and after it was stopped."""
    control_planted: int
    """Windows put into random bytes, at odd offsets, to see whether the search finds anything."""
    control_found: int

    @property
    def hits(self) -> int:
        return sum(report.hits for report in self.reports)


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that was measured. Seconds and bytes."""

    vllm_version: str
    model: str
    engine_block_tokens: int
    exchanges: tuple[Exchange, ...]
    strangers: tuple[Stranger, ...]
    blocks: int
    block_bytes: int
    bytes_on_disk: int
    search: PlaintextSearch
    server_start_s: tuple[float, ...]
    stopped_cleanly: bool
    elapsed_s: float

    @property
    def prompt_tokens(self) -> int:
        return sum(x.computed.prompt_tokens for x in self.exchanges)

    @property
    def full_block_tokens(self) -> int:
        """Prompt tokens in full engine blocks: what could have come from disk."""
        size = self.engine_block_tokens
        return sum(x.computed.prompt_tokens // size * size for x in self.exchanges)

    @property
    def restart_cached_tokens(self) -> int:
        return sum(x.disk.cached_tokens for x in self.exchanges)

    @property
    def restart_cached_ratio(self) -> float:
        return self.restart_cached_tokens / self.full_block_tokens

    @property
    def output_identical(self) -> bool:
        return all(x.identical for x in self.exchanges)

    @property
    def same_as_computed(self) -> bool:
        """Whether the computed answers, too, consist of the same tokens."""
        return all(x.computed.same_words(x.disk) for x in self.exchanges)

    @property
    def logprob_difference(self) -> float:
        """Largest difference between the log probabilities of computed answers and those from
        disk."""
        return max(x.computed.logprob_difference(x.disk) for x in self.exchanges)

    @property
    def cross_tenant_hits(self) -> int:
        """Prompt tokens that a tenant got out of another's cache."""
        return sum(stranger.hits for stranger in self.strangers)

    @property
    def ttft_recompute_s(self) -> float:
        return statistics.median(x.computed.first_token_s for x in self.exchanges)

    @property
    def ttft_memory_s(self) -> float:
        return statistics.median(x.memory.first_token_s for x in self.exchanges)

    @property
    def ttft_disk_s(self) -> float:
        return statistics.median(x.disk.first_token_s for x in self.exchanges)

    def problems(self) -> list[str]:
        """Promises that were not kept, a sentence each."""
        search = self.search
        checks = (
            (self.blocks > 0, "nothing was stored"),
            (
                self.restart_cached_ratio >= _MIN_CACHED_RATIO,
                f"only {self.restart_cached_ratio:.0%} of the full blocks came from disk",
            ),
            (self.output_identical, "an answer from disk differed from the one from memory"),
            (self.cross_tenant_hits == 0, "a tenant was served another's cache"),
            (search.hits == 0, f"plaintext was found in the vault, {search.hits} times"),
            (search.windows_searched > 0, "the engine's memory was empty: nothing to search for"),
            (
                search.control_found == search.control_planted,
                "the search overlooked plaintext that was planted",
            ),
        )
        return [text for kept, text in checks if not kept]

    def summary(self) -> list[str]:
        """The result, for people."""
        problems = self.problems()
        computed, disk, memory = self.ttft_recompute_s, self.ttft_disk_s, self.ttft_memory_s
        same = "the same" if self.output_identical else "NOT the same"
        facts = {
            "first token": f"{computed:.2f} s computed, {memory:.2f} s from memory, {disk:.2f} s "
            f"from disk (medians): {computed / disk:.1f} times as fast as computing",
            "from disk": f"{self.restart_cached_tokens} of {self.full_block_tokens} tokens in full "
            f"blocks ({self.restart_cached_ratio:.1%})",
            "answers": f"{same} from disk as from memory, log probabilities to the last bit",
            "tenants": f"got {self.cross_tenant_hits} tokens out of each other's cache",
            "on disk": f"{self.blocks} blocks, {self.bytes_on_disk / 1e6:.0f} MB; of "
            f"{self.search.windows_searched} pieces of plaintext, {self.search.hits} found",
        }
        end = "every promise was kept" if not problems else "NOT as promised"
        return [
            "",
            *(f"{name:<12} {text}" for name, text in facts.items()),
            *(f"FAILED       {problem}" for problem in problems),
            f"{'in all':<12} {end}, in {self.elapsed_s:.0f} s",
        ]

    def document(self) -> dict[str, object]:
        """The JSON document; docs/demo.md explains the fields."""
        problems = self.problems()
        search = self.search
        return {
            "ok": not problems,
            "problems": problems,
            "kvvault_version": __version__,
            "vllm_version": self.vllm_version,
            "model": self.model,
            "tenants": sorted({x.conversation.tenant for x in self.exchanges}),
            "requests": len(self.exchanges),
            "prompt_tokens": self.prompt_tokens,
            "restart_cached_tokens": self.restart_cached_tokens,
            "restart_full_block_tokens": self.full_block_tokens,
            "restart_cached_ratio": round(self.restart_cached_ratio, 4),
            "output_identical": self.output_identical,
            "output_same_as_computed": self.same_as_computed,
            "logprob_max_difference": self.logprob_difference,
            "cross_tenant_requests": len(self.strangers),
            "cross_tenant_prompt_tokens": sum(x.answer.prompt_tokens for x in self.strangers),
            "cross_tenant_hits": self.cross_tenant_hits,
            "ttft_recompute_s": round(self.ttft_recompute_s, 4),
            "ttft_memory_s": round(self.ttft_memory_s, 4),
            "ttft_disk_s": round(self.ttft_disk_s, 4),
            "blocks": self.blocks,
            "block_bytes": self.block_bytes,
            "bytes_on_disk": self.bytes_on_disk,
            "plaintext_hits": search.hits,
            "windows_total": search.windows_total,
            "windows_searched": search.windows_searched,
            "windows_constant": search.windows_constant,
            "searches": [asdict(report) for report in search.reports],
            "control_windows_planted": search.control_planted,
            "control_windows_found": search.control_found,
            "server_start_s": [round(seconds, 2) for seconds in self.server_start_s],
            "server_stopped_cleanly": self.stopped_cleanly,
            "answers": [
                {
                    "tenant": x.conversation.tenant,
                    "title": x.conversation.title,
                    "prompt_tokens": x.computed.prompt_tokens,
                    "identical": x.identical,
                    **{
                        source: {
                            "cached_tokens": answer.cached_tokens,
                            "ttft_s": round(answer.first_token_s, 4),
                        }
                        for source, answer in (
                            ("computed", x.computed),
                            ("memory", x.memory),
                            ("disk", x.disk),
                        )
                    },
                }
                for x in self.exchanges
            ],
            "strangers": [
                {
                    "what": x.what,
                    "prompt_tokens": x.answer.prompt_tokens,
                    "cached_tokens": x.answer.cached_tokens,
                    "own_tokens": x.own_tokens,
                    "hits": x.hits,
                }
                for x in self.strangers
            ],
            "elapsed_s": round(self.elapsed_s, 2),
        }
