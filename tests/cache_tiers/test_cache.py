"""Does the cache as a whole keep, find, explain and give up what it should?"""

from __future__ import annotations

import random
from typing import Any

import pytest

from cache_tiers.arena import BrokenLaw
from cache_tiers.laws import check
from tests.cache_tiers.fake_engine import FakeEngine, prompt
from tests.cache_tiers.test_cases import G, chat, engine

# ---- why a request reused no more


def missed(e: FakeEngine, tokens: list[int], **lookup: Any) -> dict[str, Any] | None:
    running = e.admit(tokens, **lookup)
    assert running is not None
    e.cache.commit_restore(running.plan)
    e.cache.finish(running.plan, running.plan.page_ids)
    return running.plan.missed_because


def test_each_cause_of_a_miss_is_told() -> None:
    e = engine(40)
    tokens = prompt(1, 600)
    assert missed(e, tokens[:64]) == {"cause": "below_grid", "min_reusable_tokens": G + 1}
    assert missed(e, tokens) == {"cause": "never_stored"}
    computing = e.admit(tokens)
    assert missed(e, tokens) == {"cause": "pending", "end_tokens": 576}
    e.commit(computing)
    while e.prefill_step(computing):
        e.publish(computing)
    e.finish(computing)
    assert missed(e, tokens) is None
    assert missed(e, tokens + prompt(2, 100)) == {"cause": "never_stored"}
    assert missed(e, tokens, salt="other") == {"cause": "other_identity_or_salt"}
    e.clock.now_s += 60
    e.run(prompt(3, 2200))
    cause = missed(e, tokens)
    assert cause is not None and cause["cause"] == "evicted" and cause["pressure"] in ("entries", "rows")
    assert cause["tier"] == "device" and 0 <= cause["ago_s"] < 60
    e.run(tokens)
    e.cache.flush()
    assert (missed(e, tokens) or {})["pressure"] == "flush"
    causes = e.cache.counters.lookup_causes
    assert {"below_grid", "never_stored", "pending", "none", "other_identity_or_salt", "evicted"} <= set(
        causes
    )
    e.idle()


def test_no_receipt_tells_of_other_tenants_where_keys_are_isolated() -> None:
    e = engine(explain_foreign=False)
    e.run(prompt(1, 600), salt="a")
    assert missed(e, prompt(1, 600), salt="b") == {"cause": "never_stored"}
    assert e.cache.counters.lookup_causes["other_identity_or_salt"] == 1


def test_what_is_remembered_of_evictions_is_bounded() -> None:
    e = engine(40, check_laws=False)
    e.cache.index.max_ghosts = 50
    for seed in range(60):
        e.run(prompt(seed, 600))
    assert len(e.cache.index.ghosts) == 50


def test_a_receipt_has_all_its_keys_and_one_position() -> None:
    e = engine()
    tokens = chat(e, 1, 4)
    plan = e.run([*tokens, *prompt(2, 300)])
    receipt = plan.receipt()
    assert set(receipt) == {
        *(
            "credited_tokens",
            "prompt_tokens",
            "tier",
            "origin",
            "candidates",
            "chosen",
            "restore_s",
            "prefill_s",
        ),
        *("published", "missed_because"),
    }
    assert receipt["credited_tokens"] == receipt["chosen"] == plan.restored_tokens == 768
    assert receipt["tier"] == "device" and receipt["origin"] == "prefilled"
    assert [c["end_tokens"] for c in receipt["candidates"]] == sorted(
        c["end_tokens"] for c in receipt["candidates"]
    )
    assert receipt["published"][-1] == (len(tokens) + 299) // G * G
    cold = e.run(prompt(3, 300)).receipt()
    assert cold["tier"] is None and cold["origin"] is None and cold["credited_tokens"] == 0


def test_the_tree_shows_where_each_part_lies() -> None:
    e = engine()
    tokens = chat(e, 1, 3)
    nodes = e.cache.tree(tokens)
    assert [node["end_tokens"] for node in nodes] == list(range(G, 577, G))
    assert all(node["pages_in"] == ["device"] for node in nodes)
    assert nodes[-1]["row"]["kind"] == "last" and not nodes[-1]["row"]["superseded"]
    assert e.cache.tree(tokens, salt="x") == []
    assert e.cache.summary()["checkpoints"] == sum(node["row"] is not None for node in nodes)


# ---- superseding


def marks(e: FakeEngine) -> dict[int, tuple[bool, bool]]:
    """Position -> superseded, junction; of a cache that holds one conversation."""
    nodes = e.cache.index.nodes.values()
    return {n.end_tokens: (n.checkpoint.superseded, n.checkpoint.junction) for n in nodes if n.checkpoint}


def test_a_later_request_supersedes_older_rows_but_no_junction() -> None:
    e = engine()
    e.run(prompt(1, 1000), message_ends=[500, 1000])
    assert marks(e) == {448: (False, False), 960: (False, False)}  # one request's never supersede each other
    e.run(prompt(1, 1000) + prompt(2, 500), message_ends=[500, 1000, 1500])
    assert marks(e) == {448: (True, False), 960: (True, False), 1472: (False, False)}
    e.run(prompt(1, 500) + prompt(3, 500))  # a branch at 448: used, so it is a junction from now on
    assert marks(e)[448] == (False, True)
    e.run(prompt(1, 500) + prompt(3, 900))
    assert marks(e)[448] == (False, True)


def test_a_spare_is_born_superseded() -> None:
    e = engine()
    e.run(prompt(1, 5000))
    assert marks(e) == {4096: (True, False), 4992: (False, False)}


def test_a_settled_reply_does_not_supersede_its_prompt() -> None:
    e = engine()
    tokens = prompt(1, 1000)
    running = e.admit(tokens, request_id="one")
    e.commit(running)
    while e.prefill_step(running):
        e.publish(running)
    e.finish(running)
    reply = [*tokens, *prompt(5, 280)]
    settle = e.admit(reply, settle=True, request_id="one")
    assert settle is not None and settle.plan.restored_tokens == 960
    assert [w.end_tokens for w in settle.plan.wanted] == [1280]  # exactly its end: the next prompt goes on
    e.commit(settle)
    while e.prefill_step(settle):
        e.publish(settle)
    e.finish(settle)
    assert marks(e) == {960: (False, False), 1280: (False, False)}
    assert e.admit(reply, settle=True, request_id="one") is None
    assert e.cache.counters.n_lookups == 1 and e.cache.counters.publishes["terminal"] == 1
    assert e.run([*reply, *prompt(6, 200)]).restored_tokens == 1280
    e.idle()


# ---- decoded state


def test_decoded_state_is_neither_published_nor_matched_by_default() -> None:
    e = engine()
    running = e.admit(prompt(1, 200))
    e.commit(running)
    e.prefill_step(running)
    assert e.publish(running, decoded=True) == [(192, "decoded")]
    e.finish(running)
    assert e.reused(prompt(1, 300)) == 0
    e.idle()


def test_with_reuse_generated_decoded_nodes_hit_say_so_and_are_replaced_by_prefill() -> None:
    e = engine(reuse_generated=True)
    tokens, reply = prompt(1, 200), prompt(2, 200)
    running = e.admit(tokens)
    e.commit(running)
    e.prefill_step(running)
    e.publish(running)
    running.tokens = tokens + reply
    running.names = e._prefix_names(running.tokens, None)
    e.cache.extend(running.plan, running.tokens)
    running.computed_tokens = 200
    e.prefill_step(running)  # stands for the decode steps up to token 400
    row_ids = e.cache.reserve_row()
    for piece, page_id in enumerate(row_ids):
        e.stamps[page_id] = e._row(running, 384, piece)
    assert e.cache.publish(running.plan, 384, running.page_ids, row_ids, decoded=True) == "published"
    check(e.cache)
    e.finish(running)
    e.idle()
    plan = e.run(tokens + reply + prompt(3, 200))
    assert plan.restored_tokens == 384 and plan.receipt()["origin"] == "decoded"
    e.cache.costs.bytes_per_s["device"] = 1.0  # now computing is the faster way
    assert e.run(tokens + reply + [1]).restored_tokens == 0
    e.cache.costs.bytes_per_s["device"] = 1e12
    plan = e.run(tokens + reply + prompt(4, 100))
    assert plan.restored_tokens == 384 and plan.receipt()["origin"] == "prefilled"
    e.idle()


# ---- keeping


def test_a_conversation_survives_prompts_of_many_speaker_changes() -> None:
    """The retention probe: 9K tokens, two prompts of 240 messages, then the conversation and a turn more."""
    conversation, turn = prompt(1, 9000), prompt(9, 300)
    n_pages = 9000 // 64 + 2 * (14_000 // 64) + 3 * 4 * 3 + 40
    e = engine(n_pages)
    e.run(conversation, message_ends=[200, 8800, 9000])
    for seed in (2, 3):
        e.run(prompt(seed, 14_000), message_ends=[(n + 1) * 14_000 // 240 for n in range(240)])
    plan = e.run(conversation + turn, message_ends=[200, 8800, 9000, 9300])
    assert plan.restored_tokens >= 9000 - G
    e.idle()


@pytest.mark.parametrize("row_pages", [0, 1, 3, 40])
@pytest.mark.parametrize("mix", ["2000 short", "3 very long", "both"])
def test_no_page_is_stranded_at_the_first_eviction(mix: str, row_pages: int) -> None:
    """There is no reserve: all but what one step of prefill or one row asks for is in use."""
    e = engine(3000, row_pages=row_pages, check_laws=False)
    rng = random.Random(0)
    used_at_first = None
    evict = e.cache.device.evict

    def watch(*arguments: Any) -> None:
        nonlocal used_at_first
        if used_at_first is None:
            used_at_first = e.arena.n_held / e.arena.capacity
        evict(*arguments)

    e.cache.device.evict = watch  # type: ignore[method-assign]
    for seed in range(2000):
        long = mix == "3 very long" or (mix == "both" and seed % 50 == 0)
        e.run(prompt(seed, rng.randrange(60_000, 90_000) if long else rng.randrange(70, 600)))
        if used_at_first is not None:
            break
    assert used_at_first is not None and used_at_first >= 0.98
    e.idle()


def test_evicted_rows_of_a_path_are_refilled() -> None:
    e = engine()
    tokens = chat(e, 1, 4)
    node = next(n for n in e.cache.index.nodes.values() if n.end_tokens == 384 and n.checkpoint)
    e.cache.device.evict(node, "rows", 0.0)
    assert e.cache.counters.compactions == 1 and node.pages[0] is not None
    plan = e.run(tokens[:390])
    assert plan.restored_tokens < 384 and 384 in plan.published
    assert e.cache.counters.refills == 1 and e.reused(tokens[:390]) == 384
    assert e.reused(tokens) == 768  # its descendants never noticed


def test_dense_models_lose_the_deepest_pages_first() -> None:
    e = engine(50, row_pages=0)
    e.run(prompt(1, 2000))
    for seed in (2, 3):
        e.clock.now_s += 10
        e.run(prompt(seed, 900))
    left = e.reused(prompt(1, 2000))
    assert 0 < left < 1984  # the front of it is still there
    assert e.reused(prompt(3, 900)) == 896
    e.idle()


def test_dense_models_consider_two_candidates_however_long_the_prompt() -> None:
    e = engine(row_pages=0, check_laws=False)
    e.run(prompt(1, 20_000))
    plan = e.run(prompt(1, 20_100))
    assert [c.end_tokens for c in plan.candidates] == [0, 19_968]
    assert [w.end_tokens for w in plan.wanted] == [20_032, 20_096]


def test_a_cache_that_is_off_only_accounts_pages() -> None:
    e = engine(enabled=False)
    for _ in range(2):
        plan = e.run(prompt(1, 600))
        assert plan.restored_tokens == 0 and plan.wanted == () and plan.missed_because == {"cause": "off"}
    e.idle()
    assert e.arena.n_free == e.arena.capacity


def test_a_position_off_the_grid_or_uncovered_is_refused() -> None:
    e = engine()
    running = e.admit(prompt(1, 600))
    e.commit(running)
    e.prefill_step(running)
    row_ids = e.cache.reserve_row()
    for end, pages in [
        (100, running.page_ids),
        (0, running.page_ids),
        (640, [1] * 99),
        (256, running.page_ids[:3]),
    ]:
        with pytest.raises(ValueError, match=str(end)):
            e.cache.publish(running.plan, end, pages, row_ids)
    e.cache.release(row_ids)
    e.finish(running)
    e.idle()


# ---- laws have teeth


def test_broken_books_are_found() -> None:
    def broken(spoil: Any) -> None:
        e = engine(200, check_laws=False)
        chat(e, 1, 3)
        e.admit(prompt(1, 600))
        check(e.cache)
        spoil(e, next(n for n in e.cache.index.nodes.values() if n.end_tokens == 576))
        with pytest.raises(BrokenLaw):
            check(e.cache)

    def lose_page(e: FakeEngine, node: Any) -> None:
        e.arena._free.pop()

    def double_book(e: FakeEngine, node: Any) -> None:
        node.pages[0] = node.parent.pages[0]

    def lose_parent(e: FakeEngine, node: Any) -> None:
        e.arena.drop(node.parent.pages[0])
        node.parent.pages[0] = None

    def unpin(e: FakeEngine, node: Any) -> None:
        e.arena.release(next(iter(e.cache.plans.values())).row_page_ids)

    def uncount(e: FakeEngine, node: Any) -> None:
        e.cache.counters.n_lookups += 1

    def publish_unfinished(e: FakeEngine, node: Any) -> None:
        e.cache.unpublished_row_ids.update(node.checkpoint.rows[0])

    def move_row(e: FakeEngine, node: Any) -> None:
        node.end_tokens += 64

    for spoil in (lose_page, double_book, lose_parent, unpin, uncount, publish_unfinished, move_row):
        broken(spoil)
