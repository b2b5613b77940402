"""Where models come from: folders in repositories, on this machine or in a bucket."""

from neso.server.repository.names import stays_inside

__all__ = ["stays_inside"]
