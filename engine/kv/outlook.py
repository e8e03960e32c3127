"""What those who hold blocks are going to hold at most, all of them together, if nobody else is opened. Pure.

Not the sum of their ends: who began early gives its blocks back before who began late has taken its own. Each is
expected to end when it has what it is charged; until the first ends all grow, then the rest, and so on. The most lies
just before one of the ends. (The idea is that of 'past-future' schedulers: Gong et al., ASPLOS 2025.)
"""

from collections.abc import Iterable


def most_active(active: int, holders: Iterable[tuple[int, int]], block_size: int) -> float:
    """Blocks. `active` are now; `holders`: of each, how many tokens are to come and how many blocks it alone holds."""
    ends = sorted(holders)
    growing, kept, most = len(ends), active, float(active)
    for tokens, own in ends:
        most = max(most, kept + growing * tokens / block_size)
        kept -= own
        growing -= 1
    return most
