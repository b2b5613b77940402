"""Limits that several processes share, by counts in shared memory."""

from __future__ import annotations

import pytest

from neso.frontends.transport.tcp import ConnectionLimits
from neso.server.admission import Admission, AdmissionLimits
from neso.server.errors import Overloaded
from neso.server.shared_counts import SharedCounts


def rows(number: int = 2) -> list[SharedCounts]:
    """Return the counts as the processes see them."""
    first = SharedCounts.create(number)
    return [first, *(SharedCounts(first.descriptor, number, index) for index in range(1, number))]


def test_counts_of_the_other_processes():
    one, two, three = rows(3)
    one.add("a", 2)
    two.add("a", 3)
    two.add("", 1)
    assert (three.elsewhere("a"), three.elsewhere()) == (5, 6)
    assert (one.elsewhere("a"), one.elsewhere()) == (3, 4)
    three.clear(1)
    assert (three.elsewhere("a"), one.elsewhere()) == (2, 0)


def test_sequences_of_all_processes_are_limited():
    limits = AdmissionLimits(request_sequences=4, client_sequences=6, sequences=8)
    processes = [Admission(limits, pair) for pair in zip(rows(), rows(), strict=True)]
    one, two = processes
    first = one.admit("client", 4, 10)
    two.admit("client", 2, 10)
    for process in processes:
        with pytest.raises(Overloaded, match="this client has 6 sequences"):
            process.admit("client", 1, 0)
    one.admit("other", 2, 0)
    with pytest.raises(Overloaded, match="8 sequences are in flight"):
        two.admit("third", 1, 0)
    first.release()
    two.admit("client", 4, 0)


def test_connections_of_all_processes_are_limited():
    one, two = (ConnectionLimits(3, 2, shared=counts) for counts in rows())
    address = Transport("10.0.0.1")
    first = one.admit(address)
    assert first is not None and two.admit(address) is not None
    assert one.admit(address) is None and two.admit(address) is None
    assert two.admit(Transport("10.0.0.2")) is not None
    assert one.admit(Transport("10.0.0.3")) is None  # the limit in all
    first.release()
    assert two.admit(address) is not None


class Transport:
    """A transport with a peer."""

    def __init__(self, address: str) -> None:
        self._address = address

    def get_extra_info(self, name: str):
        return (self._address, 1) if name == "peername" else None
