"""Access control of the OpenAI API: API keys, rate limits, CORS, restricted routes, and request ids."""

from neso.frontends.openai.access.api_keys import ApiKeys
from neso.frontends.openai_options import AccessOptions, Quota

__all__ = ["AccessOptions", "ApiKeys", "Quota"]
