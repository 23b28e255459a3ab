"""What is seen of a shop from outside while a test does something to it: its pods that are away, its Lease that moves."""

import contextlib
import threading
from datetime import UTC, datetime
from types import TracebackType
from typing import Self

from cluster.api import ApiError, Json
from shop_kit import Shop


class _Watch:
    """A thread that looks again and again, for the time of a ``with``."""

    step_seconds = 0.05

    def __init__(self, shop: Shop) -> None:
        self.shop = shop
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name=type(self).__name__)

    def __enter__(self) -> Self:
        self.look()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(self.step_seconds):
            with contextlib.suppress(ApiError, OSError):
                self.look()

    def look(self) -> None:
        raise NotImplementedError


class AwayWatch(_Watch):
    """How many of the pods that were there at the beginning were stopped, or not back yet, at once."""

    def __init__(self, shop: Shop) -> None:
        super().__init__(shop)
        self.most_away = 0
        self._names = {str(pod["metadata"]["name"]) for pod in self._there()}

    def look(self) -> None:
        there = {str(pod["metadata"]["name"]) for pod in self._there()}
        self.most_away = max(self.most_away, len(self._names - there))

    def _there(self) -> list[Json]:
        return [pod for pod in self.shop.pods() if "deletionTimestamp" not in pod["metadata"]]


class LeaseWatch(_Watch):
    """When the master that is lost had renewed last, and when the next one was elected: by the Lease's own times.

    These are told by the brokers' clocks, in seconds as of `wall_seconds`: on this machine it is one clock.
    """

    step_seconds = 0.02

    def __init__(self, shop: Shop) -> None:
        super().__init__(shop)
        self.renewed = 0.0
        self.master = ""
        self.elected = 0.0
        self._epoch = shop.epoch()

    def look(self) -> None:
        lease = self.shop.lease()
        record = self.shop.record_in(lease)
        if record["epoch"] == self._epoch:
            self.renewed = _time(lease["spec"]["renewTime"])
        elif record.get("master") and not self.master:
            self.elected = _time(lease["spec"]["acquireTime"])
            self.master = record["members"][record["master"]["log_id"]]["node"]


def wall_seconds() -> float:
    """Now, by the clock that the Lease's times are of."""
    return datetime.now(UTC).timestamp()


def _time(text: str) -> float:
    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()
