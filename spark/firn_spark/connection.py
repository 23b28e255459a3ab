"""Where the brokers are and what is shown to them, small enough to travel to every task.

Held are the names of files, never what is in them: a plan, a pickled task and Spark's own pages show options to whoever
may look. What is left out comes from the environment of the process that connects (``firn.tls``).
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields

from firn.client.blocking import Client
from firn.errors import Invalid
from firn.tls import Credentials, find_credentials

TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """``bootstrap``: ``HOST:PORT[,...]``, else ``$FIRN_BROKER``; files are looked for on the machine that connects."""

    bootstrap: str | None = None
    tls_ca: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    token_file: str | None = None
    timeout: float = (
        TIMEOUT_S  # seconds for each request, retries included: a change of the master takes a few
    )

    def client(self) -> Client:
        """A client; use it as ``with``. Errors: Invalid for an address, a certificate or a token that is none."""
        return Client(
            **{field.name: getattr(self, field.name) for field in fields(self)[1:]}, brokers=self.bootstrap
        )

    def credentials(self) -> Credentials:
        """Errors: Invalid; OSError for a token's file that is not there."""
        return find_credentials(
            tls_ca=self.tls_ca, tls_cert=self.tls_cert, tls_key=self.tls_key, token_file=self.token_file
        )

    @classmethod
    def of_options(cls, options: Mapping[str, str]) -> "Connection":
        """What the options of a read or write say. Errors: Invalid, naming the option."""
        given = {name.lower(): text for name, text in options.items()}
        found: dict[str, str | float] = {
            field: given[option.lower()] for field, option in OPTIONS.items() if given.get(option.lower())
        }
        if "timeout" in found:
            try:
                found["timeout"] = float(found["timeout"])
            except ValueError:
                raise Invalid(f"option timeout: expected seconds, found {found['timeout']!r}") from None
        return cls(**found)  # type: ignore[arg-type]

    def options(self) -> dict[str, str]:
        """The same as options: ``spark.read.format("firn").options(**connection.options())``."""
        return {
            option: str(getattr(self, field))
            for field, option in OPTIONS.items()
            if getattr(self, field) is not None
        }


OPTIONS = {  # of a Connection's field the option's name
    "bootstrap": "bootstrap",
    "tls_ca": "tlsCa",
    "tls_cert": "tlsCert",
    "tls_key": "tlsKey",
    "token_file": "tokenFile",
    "timeout": "timeout",
}
