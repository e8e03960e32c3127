"""Bounds of the sampling parameters: numbers in, checked numbers out, or an ApiError that names the parameter.

It must not know bodies' shapes (daemon/api/schema.py) or what the engine does with the values.
"""

from typing import Any, Final, TypeVar

from daemon.api.errors import invalid

MAX_STOP_STRINGS: Final = 16
MAX_STOP_CHARS: Final = 1024
MAX_BIASES: Final = 1024

_RANGES: Final[dict[str, tuple[float, float]]] = {
    "temperature": (0.0, 2.0),
    "top_p": (0.0, 1.0),
    "top_k": (-1, 2**31 - 1),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.0, 10.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "min_tokens": (0, 2**31 - 1),
}
_ABOVE_ZERO: Final = ("top_p", "repetition_penalty")

N = TypeVar("N", int, float)


def within(name: str, value: N, low: float, high: float) -> N:
    """`value`, if low ≤ value ≤ high; NaN never is. The value itself is not echoed: it may have a million digits."""
    if not low <= value <= high:
        raise invalid(f"{name} must be between {low} and {high}", name)
    return value


def check_bounds(body: Any) -> dict[str, Any]:
    """Those of the sampling parameters that `body` has, as arguments of SamplingParams."""
    found: dict[str, Any] = {}
    for name, (low, high) in _RANGES.items():
        value = getattr(body, name)
        if value is None:
            continue
        within(name, value, low, high)
        if value == 0 and name in _ABOVE_ZERO:
            raise invalid(f"{name} must be more than 0", name)
        found[name] = value
    if found.get("top_k") == -1:  # another spelling of 'off'
        found["top_k"] = 0
    return found


def check_stop(stop: str | list[str] | None) -> tuple[str, ...]:
    """Stop strings: not empty, not too many, not too long (each keystroke of output is compared with them)."""
    strings = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(strings) > MAX_STOP_STRINGS:
        raise invalid(f"more than {MAX_STOP_STRINGS} stop strings", "stop")
    for string in strings:
        if not string or len(string) > MAX_STOP_CHARS:
            raise invalid(f"a stop string must have 1 to {MAX_STOP_CHARS} characters", "stop")
    return strings


def logit_bias(bias: dict[str, float] | None) -> tuple[tuple[int, float], ...]:
    """{"token id": bias} as pairs."""
    if not bias:
        return ()
    if len(bias) > MAX_BIASES:
        raise invalid(f"more than {MAX_BIASES} entries", "logit_bias")
    pairs = []
    for key, value in bias.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise invalid("keys must be token ids", "logit_bias")
        pairs.append((int(key), within("logit_bias", value, -100.0, 100.0)))
    return tuple(pairs)
