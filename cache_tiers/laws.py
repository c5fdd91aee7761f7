"""What must always be true of the cache? One function per law of DESIGN 5.9.

Each raises `BrokenLaw` with what is wrong. Called after every operation in tests, and by the engine when
idle, on the engine thread; they only read, and take time in proportion to all pages and nodes.
"""

from __future__ import annotations

from cache_tiers import arena
from cache_tiers.arena import ROWS, BrokenLaw, law_distinct
from cache_tiers.index import DEVICE
from cache_tiers.planning import OPEN
from cache_tiers.prefix_cache import PrefixCache


def check(cache: PrefixCache) -> None:
    """All laws that hold at any moment between two calls."""
    for law in LAWS:
        law(cache)


def law_pages_conserved(cache: PrefixCache) -> None:
    """free + held + fenced = capacity, and the nodes' references are exactly those the arena counts."""
    law_distinct(cache.arena)
    counted = [0] * (cache.arena.capacity + 1)
    n_row_pages = 0
    for node in cache.index.nodes.values():
        row = node.row_in(DEVICE)
        for page_id in (*(node.pages[DEVICE] or ()), *(row or ())):
            counted[page_id] += 1
        n_row_pages += len(row or ())
    if counted != cache.arena._nodes:
        raise BrokenLaw("nodes refer to other pages than the arena counts")
    if n_row_pages > cache.arena.n_row_pages:
        raise BrokenLaw(f"{n_row_pages} pages of published rows, {cache.arena.n_row_pages} held as rows")


def law_restored_is_credited(cache: PrefixCache) -> None:
    """The restored position is on the grid, at most N-1 for a prompt, and its pages and row are pinned."""
    config = cache.config
    for plan in cache.plans.values():
        limit = plan.n_tokens - (plan.purpose == "prompt")
        if not 0 <= plan.restored_tokens <= limit or plan.restored_tokens % config.grid_tokens:
            raise BrokenLaw(f"{plan.request_id}: {plan.restored_tokens} of {plan.n_tokens} tokens restored")
        if plan.state is not OPEN:
            continue
        n_row_pages = config.row_pages if plan.restored_tokens else 0
        if plan.sources:
            continue  # its pages are elsewhere yet
        if (
            len(plan.page_ids) * config.page_tokens != plan.restored_tokens
            or len(plan.row_page_ids) != n_row_pages
        ):
            raise BrokenLaw(f"{plan.request_id}: its pages do not cover [0, {plan.restored_tokens})")


def law_rows_at_ends(cache: PrefixCache) -> None:
    """A row is a node's, at its end; its pages and all its ancestors' cover exactly [0, end)."""
    config = cache.config
    for node in cache.index.nodes.values():
        parent = node.parent
        if parent is None or parent.children.get(node.digest) is not node:
            raise BrokenLaw(f"node at {node.end_tokens} is not its parent's child")
        if node.end_tokens != parent.end_tokens + config.grid_tokens:
            raise BrokenLaw(f"node at {node.end_tokens} follows one at {parent.end_tokens}")
        pages = node.pages[DEVICE]
        if pages is not None and len(pages) * config.page_tokens != config.grid_tokens:
            raise BrokenLaw(f"node at {node.end_tokens} has {len(pages)} pages")
        row = node.row_in(DEVICE)
        if row is not None and len(row) != config.row_pages:
            raise BrokenLaw(f"row at {node.end_tokens} has {len(row)} pages")
        if row is not None and pages is None:
            raise BrokenLaw(f"row at {node.end_tokens} without its node's pages")


def law_pinned_is_no_victim(cache: PrefixCache) -> None:
    """What open and running plans, and unpublished rows, refer to is held."""
    pinned = {page_id for plan in cache.plans.values() if plan.state is OPEN for page_id in plan.page_ids}
    pinned.update(page_id for plan in cache.plans.values() for page_id in plan.row_page_ids)
    pinned |= cache.unpublished_row_ids
    for page_id in pinned:
        if not cache.arena.is_pinned(page_id):
            raise BrokenLaw(f"page {page_id} is in use and not pinned")


def law_nothing_unfinished_is_matched(cache: PrefixCache) -> None:
    """No node refers to a row that was not published, and rows and entries never share a page."""
    for node in cache.index.nodes.values():
        row = node.row_in(DEVICE) or ()
        for page_id in (*(node.pages[DEVICE] or ()), *row):
            if page_id in cache.unpublished_row_ids:
                raise BrokenLaw(f"page {page_id} of an unfinished row can be matched")
        if any(cache.arena._use[page_id] != ROWS for page_id in row):
            raise BrokenLaw(f"the row at {node.end_tokens} lies in pages of entries")
        if any(cache.arena._use[page_id] == ROWS for page_id in node.pages[DEVICE] or ()):
            raise BrokenLaw(f"the entries at {node.end_tokens} lie in pages of rows")


def law_ancestors_stay(cache: PrefixCache) -> None:
    """Compaction keeps descendants: a resident node's parent is resident; nothing unneeded stays."""
    for node in cache.index.nodes.values():
        parent = node.parent
        above_is_gone = parent is not None and parent.parent is not None and parent.pages[DEVICE] is None
        if above_is_gone and node.pages[DEVICE] is not None:
            raise BrokenLaw(f"node at {node.end_tokens} has lost its parent's pages")
        n_children = sum(1 for child in node.children.values() if child.pages[DEVICE] is not None)
        if node.n_children_in[DEVICE] != n_children:
            raise BrokenLaw(
                f"node at {node.end_tokens} counts {node.n_children_in[DEVICE]} children of {n_children}"
            )
        if node.pages[DEVICE] is not None and not n_children and node.row_in(DEVICE) is None:
            raise BrokenLaw(f"node at {node.end_tokens} stays on the device, but no row there needs it")
        if not node.children and node.checkpoint is None:
            raise BrokenLaw(f"node at {node.end_tokens} stays, but no saved row needs it")


def law_handles(cache: PrefixCache) -> None:
    """Behind the device: each node's part is whole, of the right size, and no handle is two parts; whatever else
    refers to a handle is a transfer.
    """
    config = cache.config
    for tier in (cache.host, cache.disk):
        references = tier.shelf.references()
        n_pinned = sum(references.values())
        seen: set[int] = set()
        for node in cache.index.nodes.values():
            row = node.row_in(tier.number)
            parts = ((node.pages[tier.number], config.node_part_bytes), (row or None, config.row_part_bytes))
            for place, part_bytes in parts:
                if place is None:
                    continue
                if place not in references or place in seen or tier.shelf.payload_bytes(place) != part_bytes:
                    raise BrokenLaw(f"{tier.name}: {place} is no whole part of the node at {node.end_tokens}")
                seen.add(place)
                n_pinned -= 1
        if (
            n_pinned
            and not cache.outbox.n_in_flight
            and not any(plan.sources for plan in cache.plans.values())
        ):
            raise BrokenLaw(f"{tier.name}: {n_pinned} references that no node and no transfer has")


def law_three_byte_counts(cache: PrefixCache) -> None:
    """Resident bytes are at most the reserved ones, and those at most the configured ones, in every tier."""
    cache.host.shelf.law_conserved()
    cache.disk.shelf.law_conserved()
    use = cache.arena.pages_by_use()
    if min(use.values()) < 0 or sum(use.values()) != cache.arena.capacity:
        raise BrokenLaw(f"pages by use {use} are not {cache.arena.capacity}")


def law_one_cause(cache: PrefixCache) -> None:
    """Each lookup, eviction, skip and retry has exactly one cause."""
    counters = cache.counters
    for name, total, causes in (
        ("lookups", counters.n_lookups, counters.lookups),
        ("lookups", counters.n_lookups, counters.lookup_causes),
        ("evictions", counters.n_evictions, counters.evictions),
        ("skips", counters.n_skips, counters.skips),
        ("retries", counters.n_retries, counters.retries),
    ):
        if total != sum(causes.values()) or any(count < 0 for count in causes.values()):
            raise BrokenLaw(f"{total} {name} with causes {dict(causes)}")


def law_idle(cache: PrefixCache) -> None:
    """At idle nothing is pinned, fenced, planned, pending or unpublished."""
    check(cache)
    arena.law_idle(cache.arena)
    outbox = cache.outbox
    if outbox.n_in_flight or outbox.in_flight_bytes or cache.restorer.plans or cache.demoter.retiring:
        raise BrokenLaw(
            f"at idle: {outbox.n_in_flight} transfers, {outbox.in_flight_bytes} bytes on their way"
        )
    if cache.plans or cache.index.pending or cache.unpublished_row_ids:
        raise BrokenLaw(
            f"at idle: {len(cache.plans)} plans, {len(cache.index.pending)} pending steps, "
            f"{len(cache.unpublished_row_ids)} pages of unpublished rows"
        )


LAWS = (
    law_pages_conserved,
    law_handles,
    law_restored_is_credited,
    law_rows_at_ends,
    law_pinned_is_no_victim,
    law_nothing_unfinished_is_matched,
    law_ancestors_stay,
    law_three_byte_counts,
    law_one_cause,
)
