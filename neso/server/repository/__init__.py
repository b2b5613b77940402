"""Where models come from: folders in repositories, on this machine or in a bucket."""

from neso.server.repository.names import check_model_name, stays_inside
from neso.server.repository.versions import choose_versions, find_versions

__all__ = ["check_model_name", "choose_versions", "find_versions", "stays_inside"]
