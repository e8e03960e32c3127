"""Fetching a file over HTTP: resumable, verified, and there at once or not at all.

Owns the partial file, retries and the check of the digest. Standard library only: it honours the environment's proxies
and certificates. It must not know what the file is. Enter at `Fetcher`.
"""

import base64
import hashlib
import shutil
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from http.client import HTTPException
from pathlib import Path
from typing import Any

from engine.errors import HashMismatch, ModelError

Report = Callable[[str, float], None]  # what is going on, and the share of it that is done

_TIMEOUT_S = 30.0
_ATTEMPTS = 4
_PIECE_BYTES = 1 << 18
_SPARE_BYTES = 64 << 20  # of disk, left alone


class Fetcher:
    """`certificates`: a bundle that replaces the system's, as pip's `cert` setting does."""

    def __init__(self, certificates: str | None = None) -> None:
        context = ssl.create_default_context(cafile=certificates)
        self._opener = urllib.request.build_opener(urllib.request.HTTPSHandler(context=context))

    def open(self, url: str, headers: dict[str, str]) -> Any:
        """The response. Credentials in the URL go into a header. Raises OSError, HTTPException, ValueError."""
        bare, authorization = _apart(url)
        request = urllib.request.Request(bare, headers={"User-Agent": "inferd", **headers, **authorization})
        return self._opener.open(request, timeout=_TIMEOUT_S)

    def fetch(self, url: str, target: Path, sha256: str, report: Report) -> None:
        """`url` as `target`. An interrupted download goes on from `target`.part. Raises HashMismatch, ModelError."""
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(target.name + ".part")
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                self._more(url, part, report)
                break
            except (OSError, HTTPException) as error:
                if attempt == _ATTEMPTS or not _worth_a_retry(error):
                    raise ModelError(
                        f"cannot download {shown(url)}: {reason(error)}",
                        "what came so far is kept, and the next try goes on from there",
                    ) from error
                time.sleep(0.5 * attempt)
        found = digest_of(part)
        if found != sha256:
            part.unlink()
            raise HashMismatch(f"{shown(url)} has sha256 {found}, expected {sha256}", "try again, or check the index")
        part.replace(target)

    def _more(self, url: str, part: Path, report: Report) -> None:
        have = part.stat().st_size if part.exists() else 0
        try:
            response = self.open(url, {"Range": f"bytes={have}-"} if have else {})
        except urllib.error.HTTPError as error:
            if error.code == 416:  # nothing is left to send, or the part is of something else: the digest will say
                return
            raise
        with response:
            resumed = getattr(response, "status", None) == 206
            have = have if resumed else 0
            length = response.headers.get("Content-Length")
            total = have + int(length) if length else 0
            _check_room(part, total - have)
            size = f" ({total / 1e6:.1f} MB)" if total else ""
            with part.open("ab" if resumed else "wb") as file:
                while piece := response.read(_PIECE_BYTES):
                    file.write(piece)
                    have += len(piece)
                    report(f"download {target_name(url)}{size}", have / total if total else 0.0)
        if have < total:
            raise ConnectionError(f"the connection ended after {have} of {total} bytes")


def digest_of(path: Path) -> str:
    """The sha256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def target_name(url: str) -> str:
    """The file's name at the end of a URL."""
    return urllib.parse.unquote(urllib.parse.urlsplit(url).path.rpartition("/")[2])


def shown(url: str) -> str:
    """A URL for people: without credentials, query or fragment."""
    parts = urllib.parse.urlsplit(url)
    return urllib.parse.urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def reason(error: Exception) -> str:
    """Why a transfer failed, in few words."""
    if isinstance(error, urllib.error.HTTPError):
        return f"HTTP {error.code} {error.reason}"
    cause = getattr(error, "reason", None) or error
    return getattr(cause, "strerror", None) or str(cause) or type(cause).__name__


def _worth_a_retry(error: Exception) -> bool:
    if isinstance(error, urllib.error.HTTPError):
        return error.code in (408, 425, 429) or error.code >= 500
    # URLError: nobody is there (no name, refused, no route): more of the same would only delay the message.
    return not isinstance(error, urllib.error.URLError | FileNotFoundError | PermissionError) and not _disk_full(error)


def _disk_full(error: Exception) -> bool:
    return isinstance(error, OSError) and error.errno in (28, 122)  # ENOSPC, EDQUOT


def _check_room(path: Path, needed: int) -> None:
    free = shutil.disk_usage(path.parent).free
    if needed > 0 and needed + _SPARE_BYTES > free:
        raise ModelError(
            f"{path.parent} has {free >> 20} MiB free, {needed >> 20} MiB are needed",
            "free some, or set XDG_CACHE_HOME to a place with more",
        )


def _apart(url: str) -> tuple[str, dict[str, str]]:
    parts = urllib.parse.urlsplit(url)
    user, at, host = parts.netloc.rpartition("@")
    if not at:
        return url, {}
    token = base64.b64encode(urllib.parse.unquote(user).encode()).decode()
    return urllib.parse.urlunsplit(parts._replace(netloc=host)), {"Authorization": f"Basic {token}"}
