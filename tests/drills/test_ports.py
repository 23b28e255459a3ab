"""Ports that brokers keep over many lives."""

import socket
from pathlib import Path

import pytest

from firn_node.ports import free_ports


def test_no_outgoing_connection_takes_the_port_of_a_broker_that_is_down() -> None:
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = free_ports("127.0.0.1", 40)
    assert len(set(ports)) == 40
    assert max(ports) < lowest


def test_a_port_that_a_server_has_is_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    [taken, free] = free_ports("127.0.0.1", 2)
    monkeypatch.setattr("firn_node.ports._candidates", lambda count: [taken, free])
    with socket.create_server(("127.0.0.1", taken)):
        assert free_ports("127.0.0.1", 1) == [free]
