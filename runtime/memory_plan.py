"""What fits into the device memory, what limits it, and what to change when it does not fit?

Pure arithmetic on byte counts of one device (one rank); no device is asked here.
"""

from __future__ import annotations

from dataclasses import dataclass

GIB = 1024**3
MIB = 1024**2
CONVERSATIONS_TOKENS = (8192, 32768)


class DoesNotFit(Exception):
    """The model, or one sequence of it, does not fit. The message names the flags that change that."""


@dataclass(frozen=True)
class MemoryNeeds:
    """What the plan is computed from. All bytes are per device.

    `temporary_bytes`: the largest temporary of any compiled program. `row_bytes`: one slot's rows and
    sampler. `memory_source`: in words, where `device_memory_bytes` comes from.
    """

    device_memory_bytes: int
    memory_source: str
    weights_bytes: int
    temporary_bytes: int
    row_bytes: int
    n_slots: int
    page_bytes: int
    page_tokens: int
    context_tokens: int
    max_model_tokens: int | None
    spare_rows_bytes: int = 0
    """Of rows that drafts leave their states in."""
    ranks: int = 1
    cache_parts: tuple[str, ...] = ()
    """Each kind of part that a page or a row has, in words."""

    @property
    def rows_bytes(self) -> int:
        return self.row_bytes * self.n_slots + self.spare_rows_bytes

    @property
    def fixed_bytes(self) -> int:
        return self.weights_bytes + self.temporary_bytes + self.rows_bytes


@dataclass(frozen=True)
class MemoryPlan:
    """`n_pages` includes the scratch page; `max_model_tokens` is the context that is served."""

    needs: MemoryNeeds
    n_pages: int
    max_model_tokens: int

    @property
    def arena_bytes(self) -> int:
        return self.n_pages * self.needs.page_bytes

    @property
    def arena_tokens(self) -> int:
        return (self.n_pages - 1) * self.needs.page_tokens

    def conversations(self, n_tokens: int) -> int:
        """How many conversations of n_tokens the arena holds at once."""
        return (self.n_pages - 1) // -(-n_tokens // self.needs.page_tokens)

    def describe(self) -> str:
        """The plan in plain words, one fact a line."""
        needs = self.needs
        n_running = needs.n_slots - 1
        each = " on each of the devices" if needs.ranks > 1 else ""
        rows = f"{n_running} sequences at once and a spare, {size_text(needs.row_bytes)} each"
        if needs.spare_rows_bytes:
            rows += f", and {size_text(needs.spare_rows_bytes)} for drafts"
        pages = f"{self.n_pages} pages of {needs.page_tokens} tokens, {size_text(needs.page_bytes)} each"
        lines = [
            f"Device memory: {size_text(needs.device_memory_bytes)}{each} ({needs.memory_source})",
            f"  weights                {size_text(needs.weights_bytes):>12}",
            f"  largest temporary      {size_text(needs.temporary_bytes):>12}",
            f"  active rows            {size_text(needs.rows_bytes):>12}  ({rows})",
            f"  arena                  {size_text(self.arena_bytes):>12}  ({pages})",
            f"What fits: {self.arena_tokens:,} tokens in all; a request may have {self.max_model_tokens:,}.",
        ]
        for n_tokens in CONVERSATIONS_TOKENS:
            if n_tokens <= self.max_model_tokens:
                lines.append(
                    f"  conversations of {n_tokens // 1024}K tokens: {self.conversations(n_tokens):,}"
                )
        if needs.cache_parts:
            lines.append(f"What the cache keeps of a sequence{each}:")
            lines.extend(f"  {part}" for part in needs.cache_parts)
        lines.append("What limits it: " + self._limit())
        return "\n".join(lines)

    def _limit(self) -> str:
        needs = self.needs
        if self.max_model_tokens < (needs.max_model_tokens or needs.context_tokens):
            return (
                f"the arena; the model could use {needs.context_tokens:,} tokens. "
                "A larger --device-memory or a smaller --max-concurrency allows longer requests."
            )
        longest = self.conversations(self.max_model_tokens)
        n_running = needs.n_slots - 1
        if longest < n_running:
            return (
                f"the arena holds {longest:,} requests of full length at once, of the {n_running} that may "
                "run; when it is full, the newest one is moved to host memory until there is room. "
                "A larger --device-memory gives more pages."
            )
        return (
            f"--max-concurrency {n_running}: all of them fit at full length, and the rest of the arena "
            "keeps prefixes."
        )


def plan_memory(needs: MemoryNeeds) -> MemoryPlan:
    """Everything that is not weights, temporary or rows becomes arena.

    Without a wanted `max_model_tokens` the context is the model's, cut to what the arena holds. Raises
    DoesNotFit where not even one sequence of that length (or of a single page) fits.
    """
    spare_bytes = needs.device_memory_bytes - needs.fixed_bytes
    n_pages = max(0, spare_bytes // needs.page_bytes)
    wanted_tokens = needs.max_model_tokens
    least_tokens = wanted_tokens if wanted_tokens is not None else needs.page_tokens
    least_pages = 1 + -(-least_tokens // needs.page_tokens)
    if n_pages < least_pages:
        raise DoesNotFit(_why_not(needs, least_tokens, least_pages))
    held_tokens = (n_pages - 1) * needs.page_tokens
    limit = needs.context_tokens if wanted_tokens is None else wanted_tokens
    return MemoryPlan(needs, n_pages, min(limit, held_tokens))


def _why_not(needs: MemoryNeeds, least_tokens: int, least_pages: int) -> str:
    pages_bytes = least_pages * needs.page_bytes
    missing_bytes = needs.fixed_bytes + pages_bytes - needs.device_memory_bytes
    text = (
        f"One sequence of {least_tokens:,} tokens does not fit: it needs {size_text(pages_bytes)} of pages "
        f"beside weights of {size_text(needs.weights_bytes)}, temporaries of {size_text(needs.temporary_bytes)} and "
        f"active rows of {size_text(needs.rows_bytes)}, and the device memory is "
        f"{size_text(needs.device_memory_bytes)} ({needs.memory_source}); {size_text(missing_bytes)} are missing. "
    )
    if needs.weights_bytes >= needs.device_memory_bytes:
        return text + (
            "The weights alone are larger: raise --device-memory, use --dtype bfloat16, or spread them over "
            f"more devices than {needs.ranks} with --mesh tpN."
        )
    changes = ["raise --device-memory"]
    if needs.max_model_tokens is not None:
        changes.append(f"lower --max-model-len from {needs.max_model_tokens}")
    if needs.n_slots > 2:
        changes.append(f"lower --max-concurrency from {needs.n_slots - 1}")
    changes.append("lower --prefill-tokens")
    return text + "To change that: " + ", or ".join(changes) + "."


def size_text(n_bytes: int) -> str:
    """A number of bytes as people read it."""
    if n_bytes >= GIB:
        return f"{n_bytes / GIB:.2f} GiB"
    if n_bytes >= MIB:
        return f"{n_bytes / MIB:.1f} MiB"
    return f"{n_bytes / 1024:.1f} KiB"
