"""Sockets between ranks: Unix sockets of this user, and the token of plans."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest

from neso.engine.parallel.control import Stream, close_listener, connect, listen
from neso.engine.parallel.plan_channel import PlanReceiver, PlanSender


def test_directory_of_a_socket_is_created_for_this_user(tmp_path: Path) -> None:
    path = tmp_path / "ranks" / "control"
    listener = listen(str(path))
    assert path.parent.stat().st_mode & 0o777 == 0o700
    close_listener(listener)
    assert not path.exists()


def test_directory_that_others_can_write_to_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(PermissionError, match="not a directory of this user"):
        listen(str(tmp_path / "control"))
    with pytest.raises(PermissionError, match="not a directory of this user"):
        connect(str(tmp_path / "control"), 10)


def test_link_to_another_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(PermissionError, match="not a directory of this user"):
        listen(str(tmp_path / "link" / "control"))


def test_socket_of_an_ended_process_is_replaced(tmp_path: Path) -> None:
    path = str(tmp_path / "control")
    old = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    old.bind(path)
    old.close()
    listener = listen(path)
    connect(path, 10).close()
    close_listener(listener)


def test_socket_in_use_is_not_replaced(tmp_path: Path) -> None:
    path = str(tmp_path / "control")
    listener = listen(path)
    with pytest.raises(OSError, match="in use"):
        listen(path)
    connect(path, 10).close()
    close_listener(listener)


def test_plans_are_sent_only_to_ranks_with_the_token(tmp_path: Path) -> None:
    address = str(tmp_path / "plans")
    sender = PlanSender(address)
    stranger = Stream(connect(address, 10))
    stranger.send(b"another token")
    receivers: list[PlanReceiver] = []
    thread = threading.Thread(target=lambda: receivers.append(PlanReceiver(address, "token", 10)))
    thread.start()
    sender.accept(1, "token", 30)
    thread.join(30)
    sender.send(b"plan")
    assert receivers[0].receive() == b"plan"
    with pytest.raises(OSError):
        stranger.receive()
    for end in (sender, receivers[0], stranger):
        end.close()
