"""Do the parts of the cache core keep what they promise, each alone?"""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_tiers import arena as arena_module
from cache_tiers.arena import ROWS, BrokenLaw, PageArena, law_distinct, page_pool, slot_pool
from cache_tiers.checkpoints import Wanted, wanted_checkpoints
from cache_tiers.costs import CostModel
from cache_tiers.identity import tenant_salt
from cache_tiers.index import DEVICE, Checkpoint, Node
from cache_tiers.policy import POLICIES, Recency, make_policy

# ---- arena


@given(st.lists(st.tuples(st.sampled_from("asrcnd"), st.integers(0, 9)), max_size=60))
@settings(max_examples=100, deadline=None)
def test_arena_conserves_whatever_is_done(operations: list[tuple[str, int]]) -> None:
    """Allocate, share, release, complete steps, adopt as a node and drop as one."""
    arena = PageArena(11)
    sequences: list[list[int]] = []
    nodes: list[list[int]] = []
    step = 0
    for kind, n in operations:
        if kind == "a":
            free = arena.n_free
            ids = arena.allocate(n, ROWS)
            assert (ids is None) == (n > free)
            sequences += [ids] if ids else []
        elif kind == "s" and sequences + nodes:
            ids = (sequences + nodes)[n % len(sequences + nodes)]
            arena.share(ids)
            sequences.append(list(ids))
        elif kind == "r" and sequences:
            arena.release(sequences.pop(n % len(sequences)), step - n % 3)
        elif kind == "c":
            arena.complete(step)
            step += 1
        elif kind == "n" and sequences:
            ids = sequences[n % len(sequences)]
            arena.adopt(ids)
            nodes.append(list(ids))
        elif kind == "d" and nodes:
            arena.drop(nodes.pop(n % len(nodes)))
        law_distinct(arena)
        held = {page_id for ids in sequences + nodes for page_id in ids}
        assert arena.n_held == len(held) == arena.pages_by_use()["rows"]
        assert arena.n_evictable == len(held - {page_id for ids in sequences for page_id in ids})
    for ids in sequences:
        arena.release(ids, step)
    for ids in nodes:
        arena.drop(ids)
    arena.complete(step)
    arena_module.law_idle(arena)
    assert arena.n_free == arena.capacity


def test_a_page_dropped_while_a_step_may_touch_it_is_fenced() -> None:
    arena = page_pool(4)
    ids = arena.allocate(3)
    assert ids is not None and 0 not in ids
    arena.adopt(ids)
    arena.release(ids, last_step=5)
    assert arena.n_fenced == 0 and arena.n_evictable == 3  # the node still holds them
    arena.drop(ids)
    assert arena.n_fenced == 3 and arena.allocate(1) is None and arena.shortage_pages(3, ROWS) == 0
    arena.complete(4)
    assert arena.n_free == 0
    arena.complete(5)
    assert arena.n_free == 3


def test_misuse_of_the_arena_is_a_broken_law() -> None:
    arena = page_pool(4)
    for misuse in (arena.release, arena.share, arena.adopt, arena.drop):
        with pytest.raises(BrokenLaw):
            misuse([1])
    arena.allocate(1)
    with pytest.raises(BrokenLaw):
        arena_module.law_idle(arena)
    slots = slot_pool(3)
    assert slots.allocate(3) is None and sorted(slots.allocate(2) or []) == [0, 1]


# ---- checkpoints


@given(
    n_tokens=st.integers(1, 20_000),
    grid=st.sampled_from([64, 128, 256, 512]),
    ends=st.lists(st.integers(0, 25_000), max_size=300).map(sorted),
    junction=st.one_of(st.none(), st.integers(0, 70).map(lambda n: n * 512)),
)
@settings(max_examples=200, deadline=None)
def test_checkpoints_are_few_legal_and_contain_the_last(
    n_tokens: int, grid: int, ends: list, junction: int
) -> None:
    wanted = wanted_checkpoints(n_tokens, grid, message_ends_tokens=ends, junction_tokens=junction)
    positions = [w.end_tokens for w in wanted]
    last = (n_tokens - 1) // grid * grid
    assert len(wanted) <= 4 and positions == sorted(set(positions))
    assert all(0 < position <= last and position % grid == 0 for position in positions)
    assert not last or positions[-1] == last
    spares = [w.end_tokens for w in wanted if w.kind == "spare"]
    assert all(spare % 2048 == 0 and last - spare <= 2048 for spare in spares)


def test_checkpoints_of_a_chat() -> None:
    wanted = wanted_checkpoints(5000, 64, message_ends_tokens=[100, 3000, 4500, 5000], junction_tokens=640)
    assert wanted == (
        Wanted(640, "junction"),
        Wanted(4096, "spare"),
        Wanted(4480, "message"),
        Wanted(4992, "last"),
    )
    dense = wanted_checkpoints(300, 64, message_ends_tokens=[100, 300], has_rows=False)
    assert [w.end_tokens for w in dense] == [64, 128, 192, 256]


# ---- costs


def test_prefill_costs_are_learnt_with_their_quadratic_part() -> None:
    costs = CostModel()
    truth = CostModel(prefill_s_per_token=3e-5, prefill_s_per_pair=2e-9)
    for n in range(60):
        start = 256 * (n % 7)
        end = start + 500 * (n % 5 + 1)
        costs.observe_prefill(start, end, truth.prefill_s(start, end))
    for start, end in [(0, 1000), (0, 30_000), (8000, 9000)]:
        assert costs.prefill_s(start, end) == pytest.approx(truth.prefill_s(start, end), rel=0.02)


def test_prefill_costs_of_equal_lengths_alone_stay_finite_and_positive() -> None:
    costs = CostModel()
    for _ in range(100):
        costs.observe_prefill(0, 512, 0.05)
    assert costs.prefill_s(0, 512) == pytest.approx(0.05, rel=0.1)
    assert 0 < costs.prefill_s(0, 100_000) < 100


def test_restore_costs_follow_the_measured_rate() -> None:
    costs = CostModel(restore_latency_s=2e-3)
    for _ in range(50):
        costs.observe_restore("disk", 50_000_000, 1.0)
        costs.observe_restore("disk", 5_000_000, 0.1)
    assert costs.restore_s({"disk": 100_000_000}) == pytest.approx(2.002, rel=0.01)
    assert costs.restore_s({}) == 0.0


def test_slow_small_restores_say_nothing_of_the_rate() -> None:
    costs = CostModel()
    for _ in range(50):
        costs.observe_restore("host", 10_000, 0.005)
    assert costs.restore_s({"host": 10_000}) == pytest.approx(0.005, rel=0.01)
    assert costs.restore_s({"host": 500_000_000}) == pytest.approx(0.105, rel=0.01)  # the prior's 5 GB/s


def test_what_was_learnt_serves_the_next_start() -> None:
    costs, later = CostModel(), CostModel()
    for n in range(20):
        costs.observe_prefill(0, 100 * n + 100, 0.3 * (n + 1))
        costs.observe_restore("host", 10**6 * (n + 1), 0.01 * (n + 1))
    later.start_from(json.loads(json.dumps(costs.rates())))
    assert later.rates() == costs.rates()
    for wrong in ({}, {"prefill_s_per_token": -1.0}, costs.rates() | {"bytes_per_s": {"host": 0.0}}):
        with pytest.raises((KeyError, ValueError)):
            later.start_from(wrong)
    assert later.rates() == costs.rates()


# ---- salts


def test_no_two_pairs_of_salt_and_key_make_one_salt() -> None:
    pairs = [
        (None, None),
        ("a", None),
        (None, "a"),
        ("a", "a"),
        ("", None),
        ("a", ""),
        ('{"key": "a"}', None),
    ]
    assert len({tenant_salt(*pair) for pair in pairs}) == len(pairs)
    assert tenant_salt(None, None) is None
    assert "secret-key" not in (tenant_salt("x", "secret-key") or "")


# ---- policies


def node(last_use_s: float, *, superseded: bool = False, n_steps: int = 1) -> Node:
    root = Node(b"root", None, b"", 0)
    made = root
    for step in range(n_steps):
        made = Node(bytes([step]), made, b"t", 64 * (step + 1))
    made.checkpoint = Checkpoint("last", "r", last_use_s, decoded=False)
    made.checkpoint.superseded = superseded
    made.checkpoint.rows[DEVICE] = (1,)
    return made


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("lru", ["old", "old superseded", "middle", "new superseded", "new"]),
        ("strict", ["old superseded", "new superseded", "old", "middle", "new"]),
        ("recency", ["old superseded", "old", "middle", "new superseded", "new"]),
    ],
)
def test_order_of_victims(policy: str, expected: list[str]) -> None:
    nodes = {
        "old": node(0.0),
        "old superseded": node(10.0, superseded=True),
        "middle": node(500.0),
        "new superseded": node(990.0, superseded=True),  # as old as 320 s
        "new": node(995.0),
    }
    made = make_policy(policy, DEVICE, 3, 1)
    for each in nodes.values():
        made.update(each)
    order = []
    while (victim := made.choose(1000.0, lambda _: True)) is not None:
        order.append(next(name for name, each in nodes.items() if each is victim))
        made.remove(victim)
    assert order == expected


@pytest.mark.parametrize("name", POLICIES)
def test_policies_keep_to_the_eligible_and_to_the_last_update(name: str) -> None:
    made = make_policy(name, DEVICE, 3, 1)
    nodes = [node(float(n), superseded=n % 2 == 0) for n in range(20)]
    for each in nodes:
        made.update(each)
    for each in nodes:
        assert each.checkpoint is not None
        each.checkpoint.last_use_s += 100
        each.checkpoint.superseded = not each.checkpoint.superseded
        made.update(each)
    assert made.choose(200.0, lambda each: each is nodes[13]) is nodes[13]
    assert made.choose(200.0, lambda _: False) is None
    for each in nodes:
        made.remove(each)
        made.remove(each)
    assert made.choose(200.0, lambda _: True) is None


def test_the_cost_aware_policy_drops_what_saves_least_a_byte() -> None:
    made = make_policy("greedy-dual", DEVICE, 3, 1)
    cheap, dear = node(0.0, n_steps=1), node(0.0, n_steps=50)
    made.update(dear)
    made.update(cheap)
    assert made.choose(1.0, lambda _: True) is cheap


def test_an_unknown_policy_is_named() -> None:
    with pytest.raises(ValueError, match="nonesuch.*recency"):
        make_policy("nonesuch", DEVICE, 3, 1)


def test_many_updates_of_one_node_take_no_memory() -> None:
    made = Recency()
    one = node(0.0)
    for n in range(5000):
        assert one.checkpoint is not None
        one.checkpoint.last_use_s = float(n)
        made.update(one)
    assert len(made._live._heap) < 200
