"""The file of bearer tokens: hashes alone, so that who reads it cannot use it.

::

    tokens:
      - principal: shop
        sha256: 9f86d081...          # of the token's bytes, 64 hex digits
        roles: [admin]               # may be left out
        expires: 2027-01-01T00:00:00Z  # may be left out

A token is 256 random bits (``new_token``), so one round of SHA-256 is as good as any slow hash: there is nothing
to guess. A hash is looked up by its own bytes and compared in constant time.
"""

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import yaml

from firn.access import check_principal
from firn.errors import Invalid
from firn_node.clock import Randomness
from firn_node.security.decision import Principal

ROLE_ADMIN = "admin"
PREFIX = "firn_"  # lets scanners for leaked secrets know one
_RANDOM_BYTES = 32
_KNOWN = ("principal", "sha256", "roles", "expires")


@dataclass(frozen=True, slots=True)
class Token:
    digest: bytes
    principal: Principal
    expires_ms: int | None = None


class TokenTable:
    """The tokens of a file, by digest."""

    def __init__(self, tokens: Mapping[bytes, Token] | None = None) -> None:
        self._tokens = dict(tokens or {})

    def __len__(self) -> int:
        return len(self._tokens)

    def find(self, digest: bytes) -> Token | None:
        found = self._tokens.get(digest)
        return found if found is not None and hmac.compare_digest(found.digest, digest) else None


def digest_of(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


def new_token(randomness: Randomness) -> str:
    """A token that nobody has seen yet."""
    return PREFIX + randomness.bytes(_RANDOM_BYTES).hex()


def entry_of(token: str, principal: str, *, is_admin: bool, expires: str | None) -> str:
    """The entry of a token in the file, as YAML."""
    entry: dict[str, Any] = {"principal": principal, "sha256": digest_of(token).hex()}
    if is_admin:
        entry["roles"] = [ROLE_ADMIN]
    if expires is not None:
        entry["expires"] = expires
    return yaml.safe_dump([entry], sort_keys=False)


def parse_tokens(text: str, *, source: str) -> TokenTable:
    """The tokens of a file.

    Errors: Invalid, naming the file, the entry and the field; no value of the file is repeated in it.
    """
    try:
        document = yaml.safe_load(text)
    except yaml.YAMLError:
        raise Invalid(f"{source}: not YAML") from None
    if document is None:
        return TokenTable()
    entries = document.get("tokens") if isinstance(document, Mapping) else None
    if not isinstance(entries, list) or len(document) != 1:
        raise Invalid(f"{source}: expected a mapping with a list of tokens under 'tokens' and nothing else")
    found: dict[bytes, Token] = {}
    for at, entry in enumerate(entries):
        token = _parse_entry(entry, f"{source}: tokens[{at}]")
        if token.digest in found:
            raise Invalid(f"{source}: tokens[{at}]: the same token is given twice")
        found[token.digest] = token
    return TokenTable(found)


def _parse_entry(entry: Any, field: str) -> Token:
    if not isinstance(entry, Mapping):
        raise Invalid(f"{field}: expected a mapping of {', '.join(_KNOWN)}")
    for name in entry:
        if name not in _KNOWN:
            raise Invalid(f"{field}: unknown field; known ones are {', '.join(_KNOWN)}")
    name = check_principal(entry.get("principal"), f"{field}.principal")
    if "*" in name:
        raise Invalid(f"{field}.principal: a name, not a pattern")
    roles = entry.get("roles", [])
    if not isinstance(roles, list) or any(role != ROLE_ADMIN for role in roles):
        raise Invalid(f"{field}.roles: expected a list of roles; the one there is: {ROLE_ADMIN}")
    return Token(
        _parse_digest(entry.get("sha256"), field),
        Principal(name, is_admin=ROLE_ADMIN in roles),
        _parse_expiry(entry.get("expires"), field),
    )


def _parse_digest(value: Any, field: str) -> bytes:
    try:
        digest = bytes.fromhex(value) if isinstance(value, str) else b""
    except ValueError:
        digest = b""
    if len(digest) != hashlib.sha256().digest_size:
        raise Invalid(f"{field}.sha256: expected 64 hex digits, as `firn token` prints them")
    return digest


def _parse_expiry(value: Any, field: str) -> int | None:
    if value is None:
        return None
    if isinstance(value, str):
        try:
            value = datetime.fromisoformat(value)
        except ValueError:
            value = None
    if not isinstance(value, datetime):
        raise Invalid(f"{field}.expires: expected a time as 2027-01-01T00:00:00Z")
    if value.tzinfo is None:
        value = value.replace(tzinfo=UTC)
    return int(value.timestamp() * 1000)
