"""The audit log by itself: bounded in lines a second and in bytes, and never in the way."""

import json
import os
from pathlib import Path

from security_kit import SetClock

from firn_node.security.audit import LINES_PER_SECOND, AuditLog


def deny(log: AuditLog, principal: str | None = None) -> None:
    log.note(
        principal=principal, address="10.0.0.7", action="GET /v1/topics", target=None, outcome="unauthorized"
    )


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_flood_of_denials_costs_a_bounded_number_of_lines_and_tells_how_many_it_left_out(
    tmp_path: Path,
) -> None:
    clock, path = SetClock(), tmp_path / "audit.log"
    log = AuditLog(str(path), clock)
    for _ in range(LINES_PER_SECOND + 50):
        deny(log)
    assert len(lines(path)) == LINES_PER_SECOND
    log.note(
        principal="ops", address="10.0.0.8", action="DELETE /v1/topics/{topic}", target="t", outcome="done"
    )
    clock.advance(seconds=1)
    deny(log)
    found = lines(path)[LINES_PER_SECOND:]
    assert [(line["outcome"], line.get("left_out_before")) for line in found] == [
        ("done", 50),
        ("unauthorized", None),
    ]
    log.close()


def test_a_full_file_makes_room_for_a_new_one_and_keeps_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / "audit.log"
    log = AuditLog(str(path), SetClock(), bytes_max=1000)
    for number in range(20):
        deny(log, f"user-{number}")
    log.close()
    kept = [line["principal"] for line in lines(tmp_path / "audit.log.1") + lines(path)]
    assert kept == [f"user-{number}" for number in range(20)][-len(kept) :]
    assert max(os.path.getsize(tmp_path / name) for name in os.listdir(tmp_path)) <= 1000
    assert len(os.listdir(tmp_path)) == 2
    log = AuditLog(str(path), SetClock(), bytes_max=1000)  # what is there counts
    for number in range(20, 24):
        deny(log, f"user-{number}")
    log.close()
    assert path.stat().st_size <= 1000


def test_text_of_others_stays_on_its_line_and_short(tmp_path: Path) -> None:
    path = tmp_path / "audit.log"
    log = AuditLog(str(path), SetClock())
    deny(log, 'x\n{"outcome":"done"}' + "y" * 10_000)
    log.close()
    (line,) = lines(path)
    assert line["outcome"] == "unauthorized"
    assert len(str(line["principal"])) < 300
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_log_that_cannot_be_written_is_counted_and_stops_nothing(tmp_path: Path) -> None:
    log = AuditLog("/dev/full", SetClock())
    deny(log)
    deny(log)
    assert log.failures == 2
    log.close()
