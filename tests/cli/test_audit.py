"""``verify``, ``dump`` and ``index migrate``: damage is found wherever it is, and named."""

import json
import shutil
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest

from firn_node.demo.process import BrokerProcess
from support.firn_cli.calls import Ended, Run, Running, call
from support.firn_cli.flips import flip_everywhere

SPEC = [
    f"--set=compaction.{field}"
    for field in ("deleteRetention=0s", "minDirtyRatio=0.001", "maxSegmentAge=100ms")
]


@pytest.fixture
def bare() -> Run:
    """``firn`` in a fresh interpreter: RocksDB's threads do not survive a fork."""

    def run(*arguments: str, code: int | None = 0) -> Ended:
        with Running(*arguments) as running:
            found = running.end()
        assert code is None or found.returncode == code, found
        return found

    return run


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with everything in it: two log segments, clean segments with a mask, a dirty part, a mirrored index."""
    data = tmp_path_factory.mktemp("written") / "data"
    broker = BrokerProcess(
        data, "--index", "mirrored", "--log-segment-bytes", "64Ki", "--min-dead-ratio", "0.9"
    )
    broker.start()
    try:
        _write(data, broker.address)
        assert broker.stop() == 0
    finally:
        broker.kill()
    return data


def _write(data: Path, where: str) -> None:
    call("topics", "create", "t", "--partitions", "2", *SPEC, address=where)
    for first in (0, 300):
        records = b"".join(
            b"key-%d\tvalue %d %s\n" % (i % 400, i, b"x" * 60) for i in range(first, first + 400)
        )
        call("produce", "t", address=where, input=records)
        call("compact", "t", "--force", "--wait", address=where)
    few = b"key-1\t\n" + b"".join(b"key-%d\tnewer\n" % i for i in range(2, 12))
    call("produce", "t", "--tombstone-on-empty", address=where, input=few)
    until = time.monotonic() + 40
    while not list(data.glob("compacted/*/*/*.mask")):  # the broker compacts by itself, and masks few rows
        assert time.monotonic() < until, "no compaction came"
        time.sleep(0.1)
    call("produce", "t", address=where, input=b"dirty\t1\ndirty-2\t2\n")


@pytest.fixture
def copy(written: Path, tmp_path: Path) -> Path:
    shutil.copytree(written, tmp_path / "data")
    return tmp_path / "data"


def files_of(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.is_file() and p.name != "LOCK" and p.stat().st_size)


def test_a_sound_folder_is_said_to_be_sound_and_is_not_changed(bare: Run, copy: Path) -> None:
    before = {path: path.read_bytes() for path in files_of(copy)}
    found = json.loads(bare("verify", "--data", str(copy), "-o", "json").stdout)
    assert found["damaged"] == []
    assert found["partitions_compared"] == 2
    assert found["keys_compared"] > 400
    assert b"no damage" in bare("verify", "--data", str(copy)).stdout
    assert {path: path.read_bytes() for path in files_of(copy)} == before


def test_a_flipped_bit_anywhere_in_any_file_is_found_and_its_file_is_named(copy: Path) -> None:
    # In a process of its own: RocksDB's threads do not survive a fork, and `call` forks this process.
    with ProcessPoolExecutor(1, mp_context=get_context("forkserver")) as pool:
        looked_at, missed = pool.submit(flip_everywhere, copy).result(timeout=120)
    assert missed == []
    assert {".log", ".segment", ".mask", ".summary", "MANIFEST", "identity"} <= looked_at


def test_a_damaged_file_is_named_with_place_and_exit_code_1(bare: Run, copy: Path) -> None:
    path = next(iter(sorted(copy.glob("compacted/*/*/*.segment"))))
    whole = bytearray(path.read_bytes())
    whole[40] ^= 1
    path.write_bytes(whole)
    found = bare("verify", "--data", str(copy), code=1)
    assert path.name in found.stderr.decode()
    assert f"damaged: {path} at byte 0" in found.stdout.decode()
    document = json.loads(bare("verify", "--data", str(copy), "-o", "json", code=1).stdout)
    assert document["damaged"][0]["file"] == str(path)
    dumped = bare("dump", str(path), code=1)
    assert str(path) in dumped.stderr.decode()


def test_a_missing_file_that_the_manifest_names_is_damage(bare: Run, copy: Path) -> None:
    path = next(iter(sorted(copy.glob("compacted/*/*/*.segment"))))
    path.unlink()
    assert path.name in bare("verify", "--data", str(copy), code=1).stderr.decode()


def test_an_index_that_does_not_fit_the_log_is_named(bare: Run, copy: Path) -> None:
    whole = {path: path.read_bytes() for path in files_of(copy / "index" / "files")}
    found = 0
    for path, raw in whole.items():
        changed = bytearray(raw)
        changed[len(raw) // 2] ^= 1
        path.write_bytes(changed)
        ended = bare("verify", "--data", str(copy), code=None)
        found += ended.returncode == 1 and b"index" in ended.stderr
        path.write_bytes(raw)
    assert found == len(whole)


def test_verify_refuses_a_running_broker_and_what_is_no_data_folder(
    bare: Run, broker: BrokerProcess, tmp_path: Path
) -> None:
    assert b"a broker runs" in bare("verify", "--data", str(broker.data), code=1).stderr
    assert b"not the data folder" in bare("verify", "--data", str(tmp_path), code=1).stderr
    assert b"no such folder" in bare("verify", "--data", str(tmp_path / "none"), code=1).stderr


def test_every_file_can_be_dumped_for_people_and_as_json(bare: Run, written: Path) -> None:
    paths = [str(path) for path in files_of(written) if "index" not in path.parts]
    text = bare("dump", *paths, "--records").stdout.decode()
    documents = json.loads(bare("dump", *paths, "-o", "json").stdout)
    assert [document["file"] for document in documents] == paths
    kinds = {document["kind"] for document in documents}
    assert kinds >= {
        "commit log segment",
        "segment summary",
        "manifest",
        "compacted segment",
        "mask",
        "identity",
    }
    assert "key-17" in text
    secret = (written / "identity").read_bytes()[-16:]
    assert secret.hex() not in text


def test_an_index_is_migrated_there_and_back_and_the_records_are_the_same(bare: Run, copy: Path) -> None:
    for kind in ("rocksdb", "files", "mirrored"):
        assert kind in bare("index", "migrate", "--data", str(copy), "--to", kind).stdout.decode()
        assert b"already" in bare("index", "migrate", "--data", str(copy), "--to", kind).stdout
        bare("verify", "--data", str(copy))
    assert b"rocksdb" in bare("index", "migrate", "--data", str(copy), "--to", "paper", code=2).stderr
