"""Memory: what clients may share, and tritonserver's pools."""

from __future__ import annotations

from neso.cli.options.kinds import BOOLEAN, integer, number
from neso.cli.options.option import Option, Topic

_NO_POOLS = "the server has no pools of memory, engines manage their own"

MEMORY = Topic(
    "Memory and devices",
    (
        Option(
            "allow-client-shm",
            "Let clients have tensors read from and written to shared memory.",
            BOOLEAN,
            False,
        ),
        Option("pinned-memory-pool-byte-size", "Pool of pinned memory.", integer(0), ignored=_NO_POOLS),
        Option(
            "cuda-memory-pool-byte-size",
            "Pool of a GPU's memory.",
            repeated=True,
            metavar="GPU:BYTES",
            ignored=_NO_POOLS,
        ),
        Option(
            "cuda-virtual-address-size",
            "Address space of implicit states on a GPU.",
            repeated=True,
            metavar="GPU:BYTES",
            ignored="implicit states are in the memory of the host",
        ),
        Option(
            "min-supported-compute-capability",
            "Oldest GPUs that tritonserver uses.",
            number(),
            ignored="each backend chooses its devices",
        ),
        Option(
            "buffer-manager-thread-count",
            "Threads that tritonserver copies tensors with.",
            integer(0),
            ignored="tensors are not gathered into buffers of the server",
        ),
        Option(
            "host-policy",
            "NUMA node and cores of instances.",
            repeated=True,
            metavar="POLICY,KEY=VALUE",
            ignored="the system places threads and processes, as numactl or taskset tell it",
        ),
        Option(
            "model-load-gpu-limit",
            "Share of a GPU's memory beyond which tritonserver loads no model.",
            repeated=True,
            metavar="GPU:FRACTION",
            ignored="engines take the memory that their own settings allow",
        ),
        Option(
            "enable-peer-access",
            "Direct access between GPUs.",
            BOOLEAN,
            ignored="the server itself copies nothing between GPUs",
        ),
    ),
)
