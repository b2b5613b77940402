"""What the server writes to standard error."""

from __future__ import annotations

import logging


def configure_logging(*, verbose: bool) -> None:
    """One line an event, with the time to the millisecond."""
    logging.basicConfig(
        level=logging.DEBUG if verbose else logging.INFO,
        format="%(asctime)s.%(msecs)03d %(levelname)-7s %(name)s  %(message)s",
        datefmt="%H:%M:%S",
    )
    for name in ("asyncio", "grpc", "filelock", "urllib3", "httpcore", "httpx"):
        logging.getLogger(name).setLevel(logging.WARNING)
