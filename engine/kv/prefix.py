"""PrefixCache: which block holds the KV of which prefix.

A prefix is named by a chain of digests, one a full block: each hashes the digest before it and the block's tokens; the
first hashes the root (model, dtype, block size, and the request's salt, so that tenants who salt cannot probe each
other). The digests depend on nothing else, so another process finds the same ones. It must not know who holds a block
or when one is evicted (engine/kv/pool.py). Enter at `extend` (digests of a sequence), `match` and `register`.
"""

from collections.abc import Sequence
from hashlib import sha256
from struct import Struct
from typing import Protocol

_DIGEST_BYTES = 16


class Prefixes(Protocol):
    """What the scheduler needs of a prefix cache; `PrefixCache` and its twin `NoPrefixCache`."""

    def extend(self, digests: list[bytes], tokens: list[int], salt: str, blocks: int) -> None:
        """Append the digests of full blocks until there are `blocks` of them."""

    def match(self, digests: Sequence[bytes]) -> list[int]:
        """The blocks that hold the longest known prefix, in order."""

    def too_short(self, digests: Sequence[bytes], matched: int, tokens: list[int], salt: str) -> int:
        """Tokens after the `matched` blocks that agree with a known block, but not with all of it."""

    def register(self, block: int, digests: Sequence[bytes], index: int, tokens: list[int], salt: str) -> bool:
        """`block` holds block `index` of these tokens. False if it need not be kept: another block does already."""

    def forget(self, block: int) -> None:
        """The block's content is no longer what it was registered for."""

    def __len__(self) -> int: ...


class PrefixCache:
    """`root` names everything but the tokens that a block's content depends on: model digest, dtype, block size."""

    def __init__(self, root: str, block_size: int) -> None:
        self._root = f"{root}/{block_size}/".encode()
        self._block_size = block_size
        self._packed = Struct(f"={block_size}I").pack
        self._blocks: dict[bytes, int] = {}  # digest → block
        self._entries: dict[int, tuple[bytes, bytes, list[int]]] = {}  # block → digest, parent, tokens
        self._child: dict[bytes, int] = {}  # digest → the block last registered as its continuation

    def __len__(self) -> int:
        return len(self._entries)

    def extend(self, digests: list[bytes], tokens: list[int], salt: str, blocks: int) -> None:
        size, packed = self._block_size, self._packed
        parent = digests[-1] if digests else self._parent(digests, 0, salt)
        for start in range(len(digests) * size, blocks * size, size):
            parent = sha256(parent + packed(*tokens[start : start + size])).digest()[:_DIGEST_BYTES]
            digests.append(parent)

    def match(self, digests: Sequence[bytes]) -> list[int]:
        found = []
        for digest in digests:
            block = self._blocks.get(digest)
            if block is None:
                break
            found.append(block)
        return found

    def too_short(self, digests: Sequence[bytes], matched: int, tokens: list[int], salt: str) -> int:
        """A lower bound: of several continuations of the same prefix only the last registered is compared."""
        child = self._child.get(self._parent(digests, matched, salt))
        if child is None:
            return 0
        known = self._entries[child][2]
        start = matched * self._block_size
        agreed = 0
        for have, want in zip(known, tokens[start : start + self._block_size], strict=False):
            if have != want:
                break
            agreed += 1
        return agreed

    def register(self, block: int, digests: Sequence[bytes], index: int, tokens: list[int], salt: str) -> bool:
        digest = digests[index]
        if digest in self._blocks:
            return False
        parent = self._parent(digests, index, salt)
        start = index * self._block_size
        self._blocks[digest] = block
        self._entries[block] = (digest, parent, tokens[start : start + self._block_size])
        self._child[parent] = block
        return True

    def forget(self, block: int) -> None:
        digest, parent, _ = self._entries.pop(block)
        del self._blocks[digest]
        if self._child.get(parent) == block:
            del self._child[parent]

    def _parent(self, digests: Sequence[bytes], index: int, salt: str) -> bytes:
        """The digest before block `index`."""
        if index:
            return digests[index - 1]
        return sha256(self._root + salt.encode()).digest()[:_DIGEST_BYTES]


class NoPrefixCache:
    """The plain twin: knows nothing, so every prompt is computed."""

    def __len__(self) -> int:
        return 0

    def extend(self, digests: list[bytes], tokens: list[int], salt: str, blocks: int) -> None:
        """No digests."""

    def match(self, digests: Sequence[bytes]) -> list[int]:
        return []

    def too_short(self, digests: Sequence[bytes], matched: int, tokens: list[int], salt: str) -> int:
        return 0

    def register(self, block: int, digests: Sequence[bytes], index: int, tokens: list[int], salt: str) -> bool:
        return False

    def forget(self, block: int) -> None:
        raise KeyError(block)
