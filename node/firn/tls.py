"""How a process proves who it is to a broker, and makes sure of the broker: TLS 1.3 and a bearer token.

Where each comes from: the argument, else the environment: ``$FIRN_TLS_CA``, ``$FIRN_TLS_CERT``, ``$FIRN_TLS_KEY``,
``$FIRN_TOKEN`` or, a file that holds it, ``$FIRN_TOKEN_FILE``. TLS is spoken as soon as a CA or a certificate is
given; the CA ``system`` stands for those that the machine trusts. A token leaves the machine over TLS alone. Files
that are replaced count from the next connection on.
"""

import ipaddress
import os
import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field

from firn.errors import FirnError, Invalid, Unauthorized

SYSTEM_CA = "system"
_ALERT = re.compile(r"\[SSL: \w+?_ALERT_(\w+)\]")
_REFUSALS = {  # the alerts of a broker that does not take a certificate
    "BAD_CERTIFICATE": "it is damaged, or not valid yet",
    "CERTIFICATE_EXPIRED": "it has expired",
    "CERTIFICATE_REQUIRED": "one is asked for",
    "CERTIFICATE_REVOKED": "it was revoked",
    "CERTIFICATE_UNKNOWN": "it cannot be checked",
    "UNKNOWN_CA": "the broker does not trust the CA that signed it",
    "UNSUPPORTED_CERTIFICATE": "it is not made for clients",
}


def is_loopback(host: str) -> bool:
    """Whether nobody beyond this machine is at this address. Of names only ``localhost`` is known to be that."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


@dataclass(frozen=True, slots=True)
class Credentials:
    """Paths of PEM files, and a token; all may be absent. The token does not show in ``repr``."""

    tls_ca: str | None = None  # who may have signed the broker's certificate; "system": the machine's own CAs
    tls_cert: str | None = None  # the own certificate, where brokers ask for one
    tls_key: str | None = None
    token: str | None = field(default=None, repr=False)
    token_file: str | None = None  # where ``token`` came from, if from a file

    @property
    def uses_tls(self) -> bool:
        return self.tls_ca is not None or self.tls_cert is not None

    @property
    def hint(self) -> str:
        """What else may be behind a connection that ended: the alert that says so may have been lost with it."""
        return "" if self.tls_cert is None else "; does the broker take this client's certificate?"

    def check_address(self, address: str) -> None:
        """Errors: Invalid when the token would leave the machine unencrypted."""
        host = address.rpartition(":")[0].strip("[]")
        if self.token is not None and not self.uses_tls and not is_loopback(host):
            raise Invalid(
                f"{address}: a token is not sent without TLS beyond this machine; give tls_ca (or $FIRN_TLS_CA)"
            )


def find_credentials(
    *,
    tls_ca: str | None = None,
    tls_cert: str | None = None,
    tls_key: str | None = None,
    token: str | None = None,
    token_file: str | None = None,
    environment: Mapping[str, str] | None = None,
) -> Credentials:
    """The credentials of the arguments, else of the environment.

    Errors: Invalid for a certificate without a key, or a token that is none; OSError for its file.
    """
    given = os.environ if environment is None else environment
    if token is None:
        token_file = token_file or (None if given.get("FIRN_TOKEN") else given.get("FIRN_TOKEN_FILE")) or None
        token = _read_token(token_file) if token_file else given.get("FIRN_TOKEN")
    found = Credentials(
        tls_ca or given.get("FIRN_TLS_CA") or None,
        tls_cert or given.get("FIRN_TLS_CERT") or None,
        tls_key or given.get("FIRN_TLS_KEY") or None,
        token or None,
        token_file,
    )
    if (found.tls_cert is None) != (found.tls_key is None):
        raise Invalid("a certificate and its key belong together: give both tls_cert and tls_key, or none")
    if found.token is not None and not _is_token(found.token):
        raise Invalid("the token holds characters that no token has; is its file the right one?")
    return found


def _is_token(text: str) -> bool:
    return bool(text) and text.isascii() and text.isprintable()


def _read_token(path: str) -> str:
    with open(path, encoding="ascii", errors="replace") as file:
        return file.read(4096).strip()


class ClientProof:
    """What new connections show, made anew when one of the files has changed.

    While files are half replaced it is what it was.
    """

    def __init__(self, credentials: Credentials) -> None:
        self.credentials = credentials
        self._stamps: tuple[object, ...] | None = None
        self._context: ssl.SSLContext | None = None
        self._token = credentials.token
        self._token_stamp = file_stamp(credentials.token_file)

    def context(self) -> ssl.SSLContext | None:
        """None without TLS. *Errors*: Invalid when there was no good one yet, naming the file."""
        given = self.credentials
        if not given.uses_tls:
            return None
        stamps = tuple(file_stamp(path) for path in (given.tls_ca, given.tls_cert, given.tls_key))
        if stamps != self._stamps:
            try:
                self._context = client_context(given)
                self._stamps = stamps
            except Invalid:
                if self._context is None:
                    raise
        return self._context

    def headers(self) -> dict[str, str]:
        path = self.credentials.token_file
        if path is not None and (stamp := file_stamp(path)) != self._token_stamp:
            try:
                found = _read_token(path)
            except OSError:
                found = ""
            if _is_token(found):
                self._token, self._token_stamp = found, stamp
        return {} if self._token is None else {"Authorization": f"Bearer {self._token}"}

    @property
    def may_change(self) -> bool:
        return self.credentials.uses_tls or self.credentials.token_file is not None

    def shown(self) -> tuple[object, object]:
        """Equal to an earlier one as long as nothing has changed. *Errors*: as ``context``."""
        return self.context(), self.headers()


def client_context(credentials: Credentials) -> ssl.SSLContext:
    """TLS 1.3, the broker's name and certificate checked. Errors: Invalid, naming the file."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    ca = credentials.tls_ca
    if ca is None or ca == SYSTEM_CA:
        context.load_default_certs()
    else:
        try:
            context.load_verify_locations(ca)
        except (OSError, ssl.SSLError) as error:
            raise Invalid(f"tls_ca {ca}: {_why(error)}") from error
    if credentials.tls_cert is not None:
        try:
            context.load_cert_chain(credentials.tls_cert, credentials.tls_key, password=_no_password)
        except (OSError, ssl.SSLError) as error:
            raise Invalid(
                f"tls_cert {credentials.tls_cert}, tls_key {credentials.tls_key}: {_why(error)}"
            ) from error
    return context


def refusal_of(error: BaseException | None, address: str) -> FirnError | None:
    """What a failed handshake means that asking again would not change; None when it may be anything.

    In TLS 1.3 a client learns what became of its certificate after its side of the handshake is over: by an alert in
    place of the first answer, which every layer wraps into an error of its own, with these words.
    """
    if isinstance(error, ssl.SSLCertVerificationError):
        return Invalid(
            f"{address}: the broker's certificate is not trusted: {error.verify_message}; is tls_ca right?"
        )
    alert = _ALERT.search(str(error))
    if alert is not None and alert[1] in _REFUSALS:
        return Unauthorized(f"{address}: the broker refuses this client's certificate: {_REFUSALS[alert[1]]}")
    return None


def file_stamp(path: str | None) -> object:
    """What changes when a file is replaced or written to; None when it is not there."""
    if path is None or path == SYSTEM_CA:
        return None
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def _no_password() -> str:
    """An encrypted key would otherwise be asked for at the terminal."""
    return ""


def _why(error: Exception) -> str:
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return f"{text or type(error).__name__}; expected PEM"
