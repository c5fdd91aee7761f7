"""Which prefixes are known, where do their pages and rows live, and why is one gone? The trie of grid steps.

Owned by `PrefixCache`, engine thread only. It knows nothing of policies or memory: tiers hang residency on
the nodes, and a node that is resident nowhere is removed and leaves a ghost, which later explains a miss.
"""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

DIGEST_BYTES = 16
DEVICE, HOST, DISK = 0, 1, 2
TIERS = ("device", "host", "disk")


def step_digest(parent_digest: bytes, tokens: bytes) -> bytes:
    """The digest of a node: of its parent's and of its G token ids (int32, little endian)."""
    digest = hashlib.blake2b(parent_digest, digest_size=DIGEST_BYTES)
    digest.update(tokens)
    return digest.digest()


class Checkpoint:
    """A saved row at a node's end: where its bytes are and what eviction needs to know of it."""

    __slots__ = ("decoded", "junction", "kind", "last_use_s", "n_uses", "publisher", "rows", "superseded")

    def __init__(self, kind: str, publisher: str, now_s: float, decoded: bool):
        self.kind = kind
        self.publisher = publisher  # id of the request that made it
        self.last_use_s = now_s
        self.n_uses = 1
        self.superseded = False
        self.junction = False
        self.decoded = decoded
        self.rows: list[Any] = [None, None, None]  # by tier: page ids, a handle; () where a model has no rows


class Node:
    """One grid step of one prefix."""

    __slots__ = (
        "checkpoint",
        "children",
        "compacted",
        "decoded",
        "digest",
        "end_tokens",
        "n_children_in",
        "pages",
        "parent",
        "root",
        "tokens",
    )

    def __init__(self, digest: bytes, parent: Node | None, tokens: bytes, end_tokens: int):
        self.digest = digest
        self.parent = parent
        self.root: Node = self if parent is None else parent.root
        self.tokens = tokens
        self.end_tokens = end_tokens
        self.children: dict[bytes, Node] = {}
        self.pages: list[Any] = [None, None, None]  # by tier: page ids, a handle
        self.n_children_in = [0, 0, 0]  # children whose pages are resident, by tier
        self.checkpoint: Checkpoint | None = None
        self.decoded = False  # the pages of this node, or of an ancestor, were made by decode steps
        self.compacted = False  # it had a row before

    def row_in(self, tier: int) -> Any:
        """Where its saved row lies in this tier; None where there is none."""
        return self.checkpoint.rows[tier] if self.checkpoint is not None else None

    @property
    def is_resident(self) -> bool:
        """Whether any tier holds its pages or its row."""
        checkpoint = self.checkpoint
        return any(p is not None for p in self.pages) or (
            checkpoint is not None and any(r is not None for r in checkpoint.rows)
        )


class Ghost(NamedTuple):
    """What is remembered of something that is gone."""

    at_s: float
    tier: str
    cause: str  # which pressure: entries, rows; or flush


@dataclass
class Path:
    """The grid steps of one token sequence under one root: all digests, and the nodes known from the
    front.
    """

    root_digest: bytes
    data: bytes
    digests: list[bytes]
    nodes: list[Node]

    def tokens(self, step: int, step_bytes: int) -> bytes:
        return self.data[step * step_bytes : (step + 1) * step_bytes]


class Index:
    """All nodes of all roots."""

    def __init__(
        self,
        grid_tokens: int,
        *,
        max_ghosts: int = 65536,
        digest: Callable[[bytes, bytes], bytes] = step_digest,
    ):
        self.grid_tokens = grid_tokens
        self.step_bytes = 4 * grid_tokens
        self.nodes: dict[bytes, Node] = {}
        self.roots: dict[bytes, Node] = {}
        self.pending: Counter[bytes] = Counter()  # steps that some sequence is computing
        self.ghosts: OrderedDict[bytes, Ghost] = OrderedDict()
        self.max_ghosts = max_ghosts
        self._digest = digest
        self._first_steps: dict[bytes, set[bytes]] = {}  # tokens of a first step -> roots that know it

    def path(self, root_digest: bytes, tokens: np.ndarray | Sequence[int], n_steps: int) -> Path:
        """Digests of the first n_steps grid steps, and the leading nodes that exist with these very
        tokens.
        """
        data = np.ascontiguousarray(tokens, dtype="<i4")[: n_steps * self.grid_tokens].tobytes()
        digests: list[bytes] = []
        nodes: list[Node] = []
        parent: Node | None = self.roots.get(root_digest)
        digest, make, size = root_digest, self._digest, self.step_bytes
        for start in range(0, n_steps * size, size):
            chunk = data[start : start + size]
            digest = make(digest, chunk)
            digests.append(digest)
            if parent is not None:
                parent = parent.children.get(digest)
                if parent is not None and parent.tokens == chunk:
                    nodes.append(parent)
                else:
                    parent = None
        return Path(root_digest, data, digests, nodes)

    def extend(self, path: Path, n_steps: int) -> bool:
        """Makes the nodes of the first n_steps exist and `path.nodes` list them. False on a digest
        collision.
        """
        nodes = path.nodes
        while nodes and self.nodes.get(nodes[-1].digest) is not nodes[-1]:
            nodes.pop()  # evicted since; a parent never goes before its child
        if nodes:
            parent = nodes[-1]
        else:
            parent = self.root(path.root_digest)
        for step in range(len(nodes), n_steps):
            digest, chunk = path.digests[step], path.tokens(step, self.step_bytes)
            node = self.nodes.get(digest)
            if node is None:
                node = self.add(parent, digest, chunk)
            elif node.parent is not parent or node.tokens != chunk:
                return False
            nodes.append(node)
            parent = node
        return True

    def root(self, root_digest: bytes) -> Node:
        """The root with this digest, made where it is new."""
        if root_digest not in self.roots:
            self.roots[root_digest] = Node(root_digest, None, b"", 0)
        return self.roots[root_digest]

    def add(self, parent: Node, digest: bytes, tokens: bytes) -> Node:
        """A new node for one more grid step."""
        node = Node(digest, parent, tokens, parent.end_tokens + self.grid_tokens)
        self.nodes[digest] = parent.children[digest] = node
        if parent.parent is None:
            self._first_steps.setdefault(tokens, set()).add(parent.digest)
        return node

    def remove(self, node: Node) -> None:
        """Forgets a node that is resident nowhere and has no children, and its root with the last one."""
        assert node.parent is not None and not node.children and not node.is_resident
        del self.nodes[node.digest], node.parent.children[node.digest]
        root = node.root
        if node.parent is root:
            known = self._first_steps[node.tokens]
            known.discard(root.digest)
            if not known:
                del self._first_steps[node.tokens]
            if not root.children:
                del self.roots[root.digest]

    def remember(self, node: Node, ghost: Ghost) -> None:
        """Why this node's pages or row are gone."""
        self.ghosts[node.digest] = ghost
        self.ghosts.move_to_end(node.digest)
        if len(self.ghosts) > self.max_ghosts:
            self.ghosts.popitem(last=False)

    def known_elsewhere(self, path: Path) -> bool:
        """Whether another identity or salt has the first grid step."""
        known = self._first_steps.get(path.tokens(0, self.step_bytes), set())
        return bool(known - {path.root_digest})
