"""Whether a URL answers within ten seconds in all: exit 0 if so. Used by the Makefile; stdlib only."""

import sys
import threading
import urllib.request


def answers(url: str, timeout_s: float) -> bool:
    """True if a HEAD request gets any 2xx in time. Name resolution knows no timeout, hence the thread."""
    got: list[int] = []

    def ask() -> None:
        try:
            with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=timeout_s) as reply:
                got.append(reply.status)
        except OSError as reason:  # URLError, timeouts and TLS errors are OSErrors
            print(f"{url} cannot be reached: {getattr(reason, 'reason', reason)}", file=sys.stderr)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(timeout_s)
    return bool(got) and 200 <= got[0] < 300


if __name__ == "__main__":
    sys.exit(not answers(sys.argv[1], timeout_s=10.0))
