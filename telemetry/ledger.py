"""The ledger: who owns which bytes on which device, because the owner said so.

What a process held before anybody booked is its `runtime`: it is handed in once, and frozen by the first booking. The
ledger must not measure anything: what is measured and not booked is for the probe to show. Enter at `Ledger`.
"""

import threading


class Ledger:
    """Booked bytes by (device, owner). Thread-safe."""

    def __init__(self) -> None:
        self._booked: dict[tuple[str, str], int] = {}
        self._lock = threading.Lock()

    def freeze(self, device: str, runtime_bytes: int) -> None:
        """What was there before the first booking. Raises ValueError after it, or if it was said before."""
        with self._lock:
            if any(where == device for where, _ in self._booked):
                raise ValueError(f"what {device} held before the first booking cannot be told after it")
            self._booked[device, "runtime"] = runtime_bytes

    def book(self, device: str, owner: str, amount_bytes: int) -> None:
        """`owner` holds so many bytes more. Raises ValueError for a negative amount."""
        if amount_bytes < 0:
            raise ValueError(f"cannot book {amount_bytes} bytes for {owner}: release them")
        with self._lock:
            key = (device, owner)
            self._booked[key] = self._booked.get(key, 0) + amount_bytes

    def release(self, device: str, owner: str, amount_bytes: int) -> None:
        """`owner` gave so many bytes back. Raises ValueError if it never booked that many."""
        with self._lock:
            held = self._booked.get((device, owner), 0)
            if not 0 <= amount_bytes <= held:
                raise ValueError(f"{owner} releases {amount_bytes} bytes on {device}, but booked {held}")
            if held == amount_bytes:
                self._booked.pop((device, owner), None)
            else:
                self._booked[device, owner] = held - amount_bytes

    def owners(self, device: str) -> dict[str, int]:
        """Booked bytes by owner; a copy."""
        with self._lock:
            return {owner: amount for (where, owner), amount in self._booked.items() if where == device}

    def devices(self) -> list[str]:
        with self._lock:
            return sorted({device for device, _ in self._booked})
