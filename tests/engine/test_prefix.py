"""PrefixCache: what a name depends on, what is found, and what was nearly found."""

import subprocess
import sys
from pathlib import Path

from engine.kv.prefix import NoPrefixCache, PrefixCache

SIZE = 4


def digests(cache: PrefixCache, tokens: list[int], salt: str = "") -> list[bytes]:
    found: list[bytes] = []
    cache.extend(found, tokens, salt, len(tokens) // SIZE)
    return found


def filled(tokens: list[int], salt: str = "") -> tuple[PrefixCache, list[bytes]]:
    """A cache in which block i holds block i of these tokens."""
    cache = PrefixCache("model/float32", SIZE)
    names = digests(cache, tokens, salt)
    for index in range(len(names)):
        assert cache.register(index, names, index, tokens, salt)
    return cache, names


def test_the_longest_known_prefix_is_found_and_nothing_after_a_gap() -> None:
    tokens = list(range(12))
    cache, names = filled(tokens)
    assert cache.match(names) == [0, 1, 2]
    assert cache.match(digests(cache, [*tokens[:8], 99, 9, 10, 11])) == [0, 1]
    cache.forget(1)
    assert cache.match(names) == [0]


def test_a_block_is_known_by_everything_before_it() -> None:
    cache, _ = filled([1, 2, 3, 4, 5, 6, 7, 8])
    assert cache.match(digests(cache, [9, 9, 9, 9, 5, 6, 7, 8])) == []


def test_salt_root_and_block_size_separate() -> None:
    tokens = [1, 2, 3, 4]
    cache, names = filled(tokens)
    assert cache.match(digests(cache, tokens, "tenant")) == []
    assert digests(PrefixCache("other/float32", SIZE), tokens) != names
    assert digests(PrefixCache("model/bfloat16", SIZE), tokens) != names
    # "a" + "b/…" must not be the same name as "a/b" + "…"
    assert digests(PrefixCache("m", SIZE), tokens, "x") != digests(PrefixCache(f"m/{SIZE}/x", SIZE), tokens)


def test_another_process_finds_the_same_names() -> None:
    code = (
        "from engine.kv.prefix import PrefixCache; d = []; "
        "PrefixCache('model/float32', 4).extend(d, [1, 2, 3, 4, 70000, 6, 7, 8], 's', 2); print(d[-1].hex())"
    )
    there = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
        cwd=Path(__file__).parents[2],
        env={"PYTHONHASHSEED": "77"},
    )
    here: list[bytes] = []
    PrefixCache("model/float32", 4).extend(here, [1, 2, 3, 4, 70000, 6, 7, 8], "s", 2)
    assert there.stdout.strip() == here[-1].hex()


def test_the_first_to_compute_a_block_keeps_the_name() -> None:
    tokens = [1, 2, 3, 4]
    cache, names = filled(tokens)
    assert not cache.register(7, names, 0, tokens, "")
    assert cache.match(names) == [0]


def test_a_match_shorter_than_a_block_is_counted_as_such() -> None:
    cache, names = filled([1, 2, 3, 4, 5, 6, 7, 8])
    assert cache.too_short([], 0, [1, 2, 3, 99, 0], "") == 3
    assert cache.too_short([], 0, [9, 2, 3, 4], "") == 0
    assert cache.too_short(names, 1, [1, 2, 3, 4, 5, 6], "") == 2
    assert cache.too_short([], 0, [1, 2, 3, 99, 0], "tenant") == 0
    cache.forget(1)
    assert cache.too_short(names, 1, [1, 2, 3, 4, 5, 6], "") == 0


def test_the_twin_knows_nothing() -> None:
    cache = NoPrefixCache()
    names: list[bytes] = []
    cache.extend(names, [1, 2, 3, 4], "", 1)
    assert names == []
    assert not cache.register(0, names, 0, [1, 2, 3, 4], "")
    assert cache.match(names) == []
    assert cache.too_short(names, 0, [1, 2, 3, 4], "") == 0
