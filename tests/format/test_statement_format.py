"""Statements about offsets: the golden file pins their bytes, round trips hold for any offsets, damage is refused."""

import random
import re
from pathlib import Path

import numpy as np
import pytest

from firn.errors import Invalid
from firn.statement import BLOCK_OFFSETS, Statement, Subject, encode, parse, reader_of

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests/format/golden/plan-statement.bin"
SUBJECT = Subject(plan=f"{0x3F:016x}", topic_id=4096, partition=2, slice=0, slices=1, plan_end=70_000)


def encoded(seen: list[int], dead: list[int], subject: Subject = SUBJECT) -> bytes:
    return b"".join(encode(subject, np.array(seen, np.int64), np.array(dead, np.int64)))


def parsed(data: bytes) -> Statement:
    return parse(reader_of(data), len(data))


def offsets(statement: Statement) -> tuple[list[int], list[int]]:
    seen: list[int] = []
    dead: list[int] = []
    for block in statement.blocks():
        for found, bits in ((seen, block.seen), (dead, block.dead)):
            found += (
                np.flatnonzero(np.unpackbits(bits, bitorder="little")) + block.number * BLOCK_OFFSETS
            ).tolist()
    return seen, dead


def test_a_statement_is_written_with_the_bytes_of_the_golden_file_and_of_the_documentation() -> None:
    data = encoded([5, 7, 65537], [5])
    assert data == GOLDEN.read_bytes()
    example = (ROOT / "docs/formats-plans.md").read_text().split("## Worked example")[1].split("```")[1]
    digits = "".join(re.split(r"\s{3,}", line)[0] for line in example.strip().splitlines())
    assert bytes.fromhex(re.sub(r"[^0-9a-f]", "", digits)) == data
    assert offsets(parsed(data)) == ([5, 7, 65537], [5])
    assert parsed(data).subject == SUBJECT


@pytest.mark.parametrize("share", [0, 0.001, 0.1, 0.2, 1])
def test_any_offsets_come_back(share: float) -> None:
    seeded = random.Random(share)
    end = 3 * BLOCK_OFFSETS + 5
    subject = Subject(plan="f" * 16, topic_id=1 << 63, partition=9, slice=3, slices=4, plan_end=end)
    seen = [o for o in range(end) if seeded.random() < share]
    for dead in ([], [o for o in seen if seeded.random() < 0.7], seen):
        statement = parsed(encoded(seen, dead, subject))
        assert offsets(statement) == (seen, dead)
        assert (statement.seen, statement.dead, statement.subject) == (len(seen), len(dead), subject)


def test_every_flipped_bit_is_noticed() -> None:
    for good in (encoded([5, 7, 65537], [5]), encoded(list(range(0, 60_000, 2)), list(range(0, 60_000, 4)))):
        for at in (*range(min(len(good), 160)), len(good) // 2, len(good) - 1):
            for bit in (0, 3, 7):
                damaged = bytearray(good)
                damaged[at] ^= 1 << bit
                with pytest.raises(Invalid, match="statement: at byte"):
                    offsets(parsed(bytes(damaged)))


@pytest.mark.parametrize(
    ("seen", "dead"),
    [([70_000], []), ([5], [7]), ([65536 + 4464], [])],
    ids=["at the plan's end", "dead and not seen", "in the last block at the plan's end"],
)
def test_what_cannot_be_is_refused_though_its_checksums_are_right(seen: list[int], dead: list[int]) -> None:
    with pytest.raises(Invalid, match="statement: at byte"):
        offsets(parsed(encoded(seen, dead)))


@pytest.mark.parametrize("size", [0, 79, 80, 100, 111, 200])
def test_a_statement_that_is_cut_off_or_goes_on_is_refused(size: int) -> None:
    good = encoded([5, 7, 65537], [5])
    with pytest.raises(Invalid, match="statement: at byte"):
        offsets(parsed((good + bytes(200))[:size]))
