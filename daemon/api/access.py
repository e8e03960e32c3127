"""Access: an Authorization header against a set of keys. Without keys everybody is let in: see daemon/admission.py."""

from aiohttp import web

from daemon.admission import Keys
from daemon.api.errors import ApiError


class Access:
    """`check` raises ApiError (401) for a request without a valid key."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys

    def check(self, request: web.Request) -> None:
        if self._keys and not self._keys.allows(request.headers.get("Authorization")):
            raise ApiError(401, "a valid API key is needed: Authorization: Bearer …", code="invalid_api_key")


class AdminAccess:
    """For control routes on a TCP port: without admin keys nobody is let in; the unix socket is the other way."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys

    def check(self, request: web.Request) -> None:
        if not self._keys:
            raise ApiError(403, "no admin key is set: use the control socket", code="no_admin_key")
        if not self._keys.allows(request.headers.get("Authorization")):
            raise ApiError(401, "a valid admin key is needed: Authorization: Bearer …", code="invalid_admin_key")
