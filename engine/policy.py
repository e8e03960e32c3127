"""Who goes first, who must yield, and how a step's tokens are shared. Pure functions of numbers.

It must not know sequences, pools or clocks. Time is counted in *granted tokens*, the engine's own measure of work done:
a bound in grants holds on any machine and under any load, and a static key ages by itself, because whoever arrives
later starts from a larger count. So the queue never has to be sorted again. Enter at any function.
"""

from collections.abc import Sequence

PRIORITY_TOKENS = 1 << 16  # one level of priority outweighs so many granted tokens of waiting
SHORT_SHARE = 2  # the last prefill slot is for prompts at most 1/so much of what any open one still needs

Rank = tuple[int, int]  # smaller is served first and preempted last; unique by its second part


def rank(granted_tokens: int, priority: int, order: int) -> Rank:
    """The standing of a request that arrived as number `order`, when `granted_tokens` had been granted in all:
    priority, then age."""
    return granted_tokens + priority * PRIORITY_TOKENS, order


def admission_key(standing: Rank, tokens: int) -> Rank:
    """The place in the queue of a request with `tokens` to compute: its standing, and its own length as a handicap.

    A prompt of n tokens can be overtaken only by requests that arrive within the next n granted tokens, and so can
    be delayed by about its own length, but a short one never waits behind a burst of long ones.
    """
    return standing[0] + tokens, standing[1]


def size_class(tokens: int) -> int:
    """Requests of one class (a power of two of tokens to compute) queue behind each other."""
    return tokens.bit_length()


def decode_budget(tokens: int, others: bool, step: int) -> int:
    """How many of a step's `tokens` may go to rows that need one token; `others`: somebody needs more than one.

    An eighth is kept for the others, so that neither side can starve the other whatever the budget; of a budget too
    small for that they get one token in every second step.
    """
    return tokens - (tokens // 8 or step & 1) if others else tokens


def prefill_budget(tokens: int, decoding: int, chunk: int, context: int, doubling: int) -> int:
    """How many of the `tokens` left may go to rows that need more than one: all, unless somebody waits for the step
    to decode. Then `chunk`, which shrinks with the longest `context` that a prompt has behind it, so that a step takes
    as long at its end as at its beginning: at `doubling` tokens a position costs twice what it cost at none."""
    return min(tokens, -(-chunk * doubling // (doubling + context))) if decoding else tokens


def floor_share(tokens: int, slots: int) -> int:
    """What every prompt that is partly computed gets at least: half of the tokens is split evenly over the slots."""
    return max(1, tokens // (2 * slots))


def may_open(pending: int, open_pending: Sequence[int], slots: int) -> bool:
    """Whether a prompt with `pending` tokens may become another partly computed one.

    The last slot is kept for a prompt that is much shorter than all open ones, so that short prompts never wait for
    the whole of a long one.
    """
    taken = len(open_pending)
    if taken == 0 or taken < slots - 1:
        return True
    return taken < slots and pending * SHORT_SHARE <= min(open_pending)


def share(tokens: int, pending: Sequence[int], slots: int) -> list[int]:
    """Split `tokens` over prompts that need `pending` each, given oldest first; sums to at most `tokens`.

    Each gets its floor; the rest goes to the one nearest its end first, which makes the mean wait shortest.
    """
    if tokens < len(pending):
        return [1] * tokens + [0] * (len(pending) - tokens)
    floor = min(floor_share(tokens, slots), tokens // len(pending)) if pending else 0
    grants = [min(floor, need) for need in pending]
    left = tokens - sum(grants)
    for index in sorted(range(len(pending)), key=pending.__getitem__):
        more = min(left, pending[index] - grants[index])
        grants[index] += more
        left -= more
    return grants


def headroom_blocks(running: int, preemptions: int) -> int:
    """Free blocks that must remain after an admission, so that the ones that run can grow for a while.

    It doubles with every preemption the newcomer has suffered: a sequence is resumed into more and more room, at last
    only into an empty engine, so it is preempted at most about log2(pool) times. Alone, it needs none.
    """
    return (1 + running // 4) << min(preemptions, 30) if running else 0
