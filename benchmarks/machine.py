"""The machine: what it is, how busy it is, and what it can do at best."""

import os
import platform
import random
import socket
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

CHUNK = 64 << 10


def describe() -> dict[str, Any]:
    """Names and sizes."""
    info = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(":")[2].strip() for line in info if line.startswith("model name")), "")
    total = int(Path("/proc/meminfo").read_text().split("MemTotal:")[1].split()[0]) * 1024
    return {
        "cpu": model or platform.machine(), "cores": os.cpu_count(), "memory_gb": round(total / 1e9, 1),
        "kernel": platform.release(), "python": platform.python_version(), "load": list(os.getloadavg()),
    }  # fmt: skip


def limits(folder: Path, *, megabytes: int = 512) -> dict[str, float]:
    """What the machine itself reaches: GB/s of memory, loopback and disk, ms of an fsync, us of a round trip."""
    return {
        "memory_copy_gb_s": round(_memory(megabytes), 2),
        "loopback_gb_s": round(_loopback(megabytes), 2),
        "loopback_round_trip_us": round(_round_trip(), 1),
        **{name: round(value, 3) for name, value in _disk(folder, megabytes).items()},
    }


def _memory(megabytes: int) -> float:
    source = np.ones(megabytes << 17, np.float64)
    target = np.empty_like(source)
    target[:] = source
    began = time.perf_counter()
    target[:] = source
    return source.nbytes / (time.perf_counter() - began) / 1e9


def _pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        left = socket.create_connection(server.getsockname())
        right, _ = server.accept()
    for end in (left, right):
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return left, right


def _loopback(megabytes: int) -> float:
    left, right = _pair()
    total = megabytes << 20
    data = bytes(CHUNK)

    def send() -> None:
        for _ in range(total // CHUNK):
            left.sendall(data)

    sender = threading.Thread(target=send)
    into, got = bytearray(CHUNK * 4), 0
    began = time.perf_counter()
    sender.start()
    while got < total:
        got += right.recv_into(into)
    seconds = time.perf_counter() - began
    sender.join()
    left.close()
    right.close()
    return total / seconds / 1e9


def _round_trip(count: int = 5000) -> float:
    left, right = _pair()

    def echo() -> None:
        while data := right.recv(256):
            right.sendall(data)

    thread = threading.Thread(target=echo)
    thread.start()
    found = []
    for _ in range(count):
        began = time.perf_counter_ns()
        left.sendall(b"x" * 100)
        left.recv(256)
        found.append(time.perf_counter_ns() - began)
    left.close()
    thread.join()
    right.close()
    return sorted(found)[count // 2] / 1e3


def _disk(folder: Path, megabytes: int) -> dict[str, float]:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "disk.probe"
    block = random.Random(1).randbytes(1 << 20)
    try:
        with path.open("wb", buffering=0) as file:
            began = time.perf_counter()
            for _ in range(megabytes):
                file.write(block)
            os.fdatasync(file.fileno())
            written = time.perf_counter() - began
            syncs = []
            for _ in range(100):
                file.write(block[:4096])
                began = time.perf_counter()
                os.fdatasync(file.fileno())
                syncs.append(time.perf_counter() - began)
    finally:
        path.unlink(missing_ok=True)
    return {"disk_write_gb_s": megabytes * (1 << 20) / written / 1e9, "fdatasync_ms": sorted(syncs)[50] * 1e3}
