"""HTTP calls to one server, by the standard library alone: each with a deadline for the whole."""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import socket
import ssl
import threading
import urllib.parse
from typing import Any, Final

import attrs
import msgspec

from parallelkit.errors import (
    EngineError,
    EngineTokenError,
    PeerLostError,
    ProtocolError,
    UnguardedEngineError,
    UpdateTimeoutError,
)

#: Longest answer that is read.
MAX_ANSWER: Final = 256 * 1024


@attrs.frozen
class Address:
    """Where a server is: only places to which a secret may be sent.

    Attributes:
        url: without a slash at its end, for reports.
        prefix: of every path, such as `/engine-3` behind a proxy; often empty.
    """

    url: str
    secure: bool
    host: str
    port: int
    prefix: str

    @classmethod
    def of(cls, url: str) -> Address:
        """Take a URL apart.

        Raises:
            EngineError: it is none of http or https, or has a user, query or fragment.
            UnguardedEngineError: plain HTTP to another host; tickets and tokens are secrets.
        """
        shown = repr(url if len(url) <= 200 else url[:200] + "...")
        try:
            parts = urllib.parse.urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise EngineError(f"attach({shown}): not a URL: {error}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise EngineError(f"attach({shown}): give http://127.0.0.1:<port> or https://<host>")
        if "@" in parts.netloc:
            raise EngineError("attach(url): no user or password in a URL; give token=")
        clean = url.isascii() and url.isprintable() and " " not in url
        if parts.query or parts.fragment or not clean:
            raise EngineError(f"attach({shown}): a base URL has no query, fragment or blanks")
        secure = parts.scheme == "https"
        if not secure and not is_loopback(parts.hostname):
            raise UnguardedEngineError(
                f"attach({shown}): a ticket and the token would cross the network in the clear. "
                "Give an https URL, or a tunnel's address on 127.0.0.1"
            )
        prefix = parts.path.rstrip("/")
        base = f"{parts.scheme}://{parts.netloc}{prefix}"
        return cls(base, secure, parts.hostname, port or (443 if secure else 80), prefix)


def is_loopback(host: str) -> bool:
    """Whether a name or address means this host by itself; nothing is looked up."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class Server:
    """Makes requests, one connection each. May be used from several threads."""

    def __init__(self, address: Address, *, token: str | None, name: str) -> None:
        """
        Args:
            token: sent with every request, to this server only; redirects are not followed.
            name: of the engine, for errors.

        Raises:
            EngineTokenError: the token cannot be in a header.
        """
        if token is not None and not (token.isascii() and token.isprintable() and token):
            raise EngineTokenError("attach(token=...): printable ASCII characters only")
        self.address = address
        self.name = name
        self._token = token
        self._tls = ssl.create_default_context() if address.secure else None

    def request(
        self, method: str, path: str, body: Any = None, *, timeout: float
    ) -> tuple[int, bytes]:
        """Make one request.

        Args:
            body: a struct or plain values, sent as JSON; None: no body.
            timeout: seconds for all of it, names looked up and every byte read.

        Returns:
            The status and the whole body.

        Raises:
            UpdateTimeoutError: no whole answer in time.
            PeerLostError: nobody listens there, or the connection broke.
            EngineError: its certificate is not trusted.
            ProtocolError: what came is not HTTP, or too long.
        """
        data = None if body is None else msgspec.json.encode(body)
        exchange = _Exchange(self._connection(timeout), method, self.address.prefix + path, data)
        exchange.headers = {"Connection": "close", "Accept": "application/json"}
        if data is not None:
            exchange.headers["Content-Type"] = "application/json"
        if self._token is not None:
            exchange.headers["Authorization"] = f"Bearer {self._token}"
        what = f"{self.name}: {method} {self.address.url}{path}"
        if not exchange.run(timeout):
            raise UpdateTimeoutError(f"{what}: no answer within {timeout:g} s", missing=[self.name])
        error = exchange.error
        if error is None:
            if len(exchange.data) > MAX_ANSWER:
                raise ProtocolError(f"{what}: an answer of more than {MAX_ANSWER} bytes")
            return exchange.status, exchange.data
        if isinstance(error, TimeoutError):
            raise UpdateTimeoutError(
                f"{what}: no answer within {timeout:g} s", missing=[self.name]
            ) from error
        if isinstance(error, ssl.SSLError):
            raise EngineError(
                f"{what}: {error}. The certificate has to be trusted by this host (SSL_CERT_FILE)"
            ) from error
        if isinstance(error, OSError | http.client.RemoteDisconnected | http.client.IncompleteRead):
            raise PeerLostError(
                f"{what}: {error}; the server is gone, or not reached", peers=[self.name]
            ) from error
        raise ProtocolError(f"{what}: not an HTTP answer: {error!r:.200}") from error

    def _connection(self, timeout: float) -> http.client.HTTPConnection:
        host, port = self.address.host, self.address.port
        if self._tls is not None:
            return http.client.HTTPSConnection(host, port, timeout=timeout, context=self._tls)
        return http.client.HTTPConnection(host, port, timeout=timeout)


class _Exchange:
    """One request in a thread, since no timeout of a socket bounds the whole of it."""

    def __init__(
        self, connection: http.client.HTTPConnection, method: str, path: str, data: bytes | None
    ) -> None:
        self.headers: dict[str, str] = {}
        self.status = 0
        self.data = b""
        self.error: Exception | None = None
        self._connection = connection
        self._request = (method, path, data)
        self._done = threading.Event()
        self._late = False

    def run(self, timeout: float) -> bool:
        """Whether it ended in time, by an answer or an error; else it is cut off."""
        threading.Thread(target=self._talk, name="parallelkit-http", daemon=True).start()
        if self._done.wait(timeout):
            return True
        self._late = True
        sock = self._connection.sock
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        return False

    def _talk(self) -> None:
        try:
            method, path, data = self._request
            self._connection.connect()
            if self._late:  # nobody waits any more, so it must not be asked for either
                return
            self._connection.request(method, path, body=data, headers=self.headers)
            response = self._connection.getresponse()
            self.status = response.status
            self.data = response.read(MAX_ANSWER + 1)
            if response.length and len(self.data) <= MAX_ANSWER:
                raise http.client.IncompleteRead(self.data, response.length)
        except Exception as error:
            self.error = error
        finally:
            self._connection.close()
            self._done.set()
