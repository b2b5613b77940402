"""Limits on the requests in flight: per request, per client and in total."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from neso.server.admission import CLIENT, RESERVATION, Admission, AdmissionLimits, Reservation
from neso.server.errors import InvalidArgument, Overloaded

LIMITS = AdmissionLimits(request_sequences=4, client_sequences=10, sequences=15, input_bytes=1000)


def test_sequences_of_one_request_are_limited() -> None:
    admission = Admission(LIMITS)
    with pytest.raises(InvalidArgument, match="5 sequences, at most 4"):
        admission.admit("a", 5, 0)
    ticket = admission.admit("a", 1, 0)
    ticket.grow(3)
    with pytest.raises(InvalidArgument):
        ticket.grow(1)
    assert admission.sequences == 4


def test_ended_requests_do_not_grow() -> None:
    admission = Admission(LIMITS)
    ticket = admission.admit("a", 1, 10)
    ticket.release()
    ticket.grow(2)
    assert (admission.sequences, admission.input_bytes, admission.num_clients) == (0, 0, 0)
    ticket.release()
    assert admission.sequences == 0


def test_sequences_of_one_client_are_limited() -> None:
    admission = Admission(LIMITS)
    tickets = [admission.admit("a", 2, 0) for _ in range(5)]
    with pytest.raises(Overloaded, match="this client has 10 sequences"):
        admission.admit("a", 1, 0)
    admission.admit("b", 1, 0)
    tickets[0].release()
    ticket = admission.admit("a", 1, 0)
    with pytest.raises(Overloaded):
        ticket.grow(2)


def test_sequences_of_all_clients_are_limited() -> None:
    admission = Admission(LIMITS)
    for client in "abc":
        admission.admit(client, 4, 0)
    with pytest.raises(Overloaded, match="the server is overloaded"):
        admission.admit("d", 4, 0)
    admission.admit("d", 3, 0)


def test_input_bytes_are_limited() -> None:
    admission = Admission(LIMITS)
    large = admission.admit("a", 1, 5000)  # a single request is always accepted
    with pytest.raises(Overloaded, match="inputs of 5000 bytes"):
        admission.admit("b", 1, 1)
    large.release()
    admission.admit("a", 1, 400)
    with pytest.raises(Overloaded, match="this client has inputs of 400 bytes"):
        admission.admit("a", 1, 101)
    admission.admit("b", 1, 500)
    with pytest.raises(Overloaded, match="the server is overloaded"):
        admission.admit("c", 1, 101)


def test_released_requests_leave_nothing_behind() -> None:
    admission = Admission(LIMITS)
    tickets = [admission.admit(client, 3, 10) for client in "abc"]
    assert admission.num_clients == 3
    for ticket in tickets:
        ticket.release()
        ticket.release()
    assert (admission.sequences, admission.input_bytes, admission.num_clients) == (0, 0, 0)


@pytest.fixture
def reservation() -> Iterator[Reservation]:
    """Reservation of a request of the client "a"."""
    found = Reservation()
    client, reserved = CLIENT.set("a"), RESERVATION.set(found)
    yield found
    RESERVATION.reset(reserved)
    CLIENT.reset(client)


def test_requests_in_parts_are_counted_as_a_whole(reservation: Reservation) -> None:
    admission = Admission(LIMITS)
    tickets = [admission.admit("a", 4, 0) for _ in range(2)]
    with pytest.raises(Overloaded):
        admission.reserve(3)
    with pytest.raises(InvalidArgument):
        admission.reserve(5)
    assert admission.sequences == 8
    admission.reserve(2)
    assert admission.sequences == 10
    with pytest.raises(Overloaded):
        admission.admit("a", 1, 0)
    for number in range(2):
        reservation.take(1)
        tickets.append(admission.admit("a", 1, 0))
        assert admission.sequences == 10, number
    reservation.take(1)
    with pytest.raises(Overloaded):
        admission.admit("a", 1, 0)
    for ticket in tickets:
        ticket.release()
    reservation.release()
    assert (admission.sequences, admission.num_clients) == (0, 0)


def test_reserved_sequences_that_no_part_took_are_released(reservation: Reservation) -> None:
    admission = Admission(LIMITS)
    admission.reserve(4)
    reservation.take(1)
    assert admission.sequences == 3
    for _ in range(2):
        reservation.release()
    assert (admission.sequences, admission.num_clients) == (0, 0)


def test_refused_requests_leave_nothing_behind() -> None:
    admission = Admission(LIMITS)
    for client in "abcd":
        with pytest.raises(InvalidArgument):
            admission.admit(client, 5, 0)
    assert admission.num_clients == 0


def test_requests_of_busy_clients_are_delayed() -> None:
    admission = Admission(AdmissionLimits())
    for _ in range(64):
        assert admission.admit("busy", 1, 0).queue_delay == 0
    admission.admit("busy", 200, 0)
    assert admission.admit("busy", 1, 0).queue_delay == pytest.approx(10)
    assert admission.admit("other", 1, 0).queue_delay == 0


def test_contradicting_limits_are_rejected() -> None:
    with pytest.raises(InvalidArgument, match="--max-client-sequences"):
        AdmissionLimits(request_sequences=100, client_sequences=10)
