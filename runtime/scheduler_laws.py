"""What must always be true of the scheduler's books? One function per law; `BrokenLaw` says what is wrong.

Read-only, on the engine thread: after every step in tests, and by the engine when it becomes idle.
"""

from __future__ import annotations

from cache_tiers.arena import BrokenLaw, law_conserved, law_idle
from runtime.scheduler import Scheduler


def law_books(scheduler: Scheduler) -> None:
    """Pools conserve; every admitted sequence holds a slot of its own and pages over all it computed;
    nobody else holds anything; the swap account is the sum of the images."""
    law_conserved(scheduler.pages)
    law_conserved(scheduler.slots)
    held_pages: dict[int, int] = {}
    slots = set()
    for sequence in scheduler.admitted:
        if sequence.slot is None or sequence.slot in slots or not sequence.admitted:
            raise BrokenLaw(f"{sequence.request_id}: slot {sequence.slot}, phase {sequence.phase}")
        slots.add(sequence.slot)
        for page_id in sequence.page_ids:
            held_pages[page_id] = held_pages.get(page_id, 0) + 1
        if len(sequence.page_ids) * scheduler.config.page_tokens < sequence.computed_tokens:
            raise BrokenLaw(f"{sequence.request_id}: its pages do not cover what it computed")
    if len(slots) != scheduler.slots.n_pinned:
        raise BrokenLaw(f"{scheduler.slots.n_pinned} slots held, {len(slots)} in use")
    if any(scheduler.pages.references(page_id) != n for page_id, n in held_pages.items()):
        raise BrokenLaw("a page's references are not its holders")
    n_held = len(held_pages) + len(scheduler.cache.unpublished_row_ids)
    if n_held != scheduler.pages.n_pinned:
        raise BrokenLaw(f"{scheduler.pages.n_pinned} pages pinned, {n_held} in use")
    for sequence in scheduler.queue:
        if sequence.slot is not None or sequence.page_ids or sequence.admitted:
            raise BrokenLaw(f"{sequence.request_id} waits but holds something")
    images = sum(sequence.swap_image_bytes for sequence in scheduler.queue)
    if images != scheduler.swap_used_bytes or images > max(0, scheduler.config.swap_capacity_bytes):
        raise BrokenLaw(f"swap images of {images} bytes, account {scheduler.swap_used_bytes}")


def law_at_idle(scheduler: Scheduler) -> None:
    """With no work left no sequence holds anything, nothing is fenced or imaged, and no plan is open."""
    law_books(scheduler)
    law_idle(scheduler.pages)
    law_idle(scheduler.slots)
    if scheduler.has_work or scheduler.swap_used_bytes or scheduler.cache.plans:
        raise BrokenLaw("idle with work in the queue, open plans, or bytes in swap images")
