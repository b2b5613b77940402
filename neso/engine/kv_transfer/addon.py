"""KV transfer as an add-on of the engine core."""

from __future__ import annotations

from neso.engine.core.addon import Addon, RequestError
from neso.engine.core.sequence import Sequence

DISABLED = "this engine transfers no KV-cache blocks"


class KvTransfer(Addon):
    """Exports and imports of blocks."""

    def admit(self, sequence: Sequence) -> None:
        for field in ("kv_export", "kv_import", "output_token_ids"):
            if getattr(sequence.request, field):
                raise RequestError(DISABLED, field)

    def extend_lease(self, transfer_id: str, seconds: float) -> None:
        """Keep the blocks of an export for `seconds` from now on; ignored if the lease has ended."""

    def release_lease(self, transfer_id: str) -> None:
        """Free the blocks of an export; ignored if the lease has ended."""
