"""The OpenAPI document behind /docs, made when it is read."""

from neso.frontends.openai.description.document import openapi_document

__all__ = ["openapi_document"]
