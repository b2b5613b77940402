"""Ports that several servers share, and the maximum age of connections."""

from __future__ import annotations

import json
import time

import grpc
import pytest
import tritonclient.grpc as grpc_client
from free_port import free_port
from server_process import ServerProcess


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_two_servers_share_a_port(protocol):
    port = free_port()
    options = (f"--{protocol}-port={port}", f"--reuse-{protocol}-port=true", "--allow-openai=false")
    with ServerProcess("--id=left", *options) as left, ServerProcess("--id=right", *options) as right:
        assert left.ports[protocol] == right.ports[protocol] == port, right.output
        assert names(left, protocol) == {"left", "right"}
    with ServerProcess(*options) as left, ServerProcess(f"--{protocol}-port={port}") as other:
        assert left.ports
        assert other.process.wait(60) == 1 and "in use" in other.output


def names(server: ServerProcess, protocol: str) -> set[str]:
    """Return which servers respond, with a new connection each time."""
    found = set()
    for _ in range(60):
        if protocol == "http":
            found.add(json.loads(server.get("/v2")[1])["name"])
        else:
            # Channels of one process share connections by default.
            arguments = [("grpc.use_local_subchannel_pool", 1)]
            with grpc_client.InferenceServerClient(server.address("grpc"), channel_args=arguments) as client:
                found.add(client.get_server_metadata().name)
        if len(found) == 2:
            break
    return found


def test_connections_close_at_their_maximum_age():
    with ServerProcess(
        "--grpc-max-connection-age=300", "--grpc-max-connection-age-grace=60000", "--allow-openai=false"
    ) as server:
        states: list[grpc.ChannelConnectivity] = []
        with grpc.insecure_channel(server.address("grpc")) as channel:
            channel.subscribe(states.append)
            check = channel.unary_unary("/grpc.health.v1.Health/Check")
            deadline = time.monotonic() + 60
            while grpc.ChannelConnectivity.IDLE not in states[1:] and time.monotonic() < deadline:
                assert check(b"", timeout=60, wait_for_ready=True) == b"\x08\x01"
                time.sleep(0.1)
        assert grpc.ChannelConnectivity.IDLE in states[1:], states  # closed, and reopened by the next call
