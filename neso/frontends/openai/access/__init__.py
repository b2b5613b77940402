"""Who may ask, how much, and from where: API keys, rate limits, origins, and the ids of requests."""

from neso.frontends.openai.access.api_keys import ApiKeys
from neso.frontends.openai_options import AccessOptions, Quota

__all__ = ["AccessOptions", "ApiKeys", "Quota"]
