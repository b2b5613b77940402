"""The requests for embeddings (OpenAI's) and for scores (vLLM's, Jina's and Cohere's, who have the same)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from neso.frontends.openai.requests.schemas import Integer, TokenIds


class PoolingFields(BaseModel):
    """What all of them have in common. A field that is null is as one left out."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    model: str
    user: str | None = Field(None, description="Accepted, not used.")
    truncate_prompt_tokens: Integer | None = Field(
        None, description="Extension: keep so many tokens; -1: as many as the model takes."
    )
    priority: Integer | None = Field(None, description="Extension: lower is served first.")


class EmbeddingRequest(PoolingFields):
    """The body of `POST /v1/embeddings`."""

    input: Annotated[
        str | TokenIds | list[str] | list[TokenIds],
        Field(union_mode="left_to_right", description="One text or several, as text or as token ids."),
    ]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Integer | None = Field(
        None, description="Only the first so many, for models trained for that."
    )
    normalize: bool | None = Field(
        None, description="Extension: to length 1; what the model says unless given."
    )
    add_special_tokens: bool | None = Field(None, description="Extension: those of the tokenizer.")


class ScoreRequest(PoolingFields):
    """The body of `POST /v1/score`: one text against one or several, or pairs of two lists of one length."""

    text_1: str | list[str]
    text_2: str | list[str]
    activation: bool | None = Field(None, description="Extension: false gives logits of a cross-encoder.")


class Document(BaseModel):
    """A document as Jina's and Cohere's clients may write it."""

    model_config = ConfigDict(extra="allow")

    text: str


class RerankRequest(PoolingFields):
    """The body of `POST /v1/rerank`."""

    query: str
    documents: list[str | Document] = Field(min_length=1)
    top_n: Annotated[Integer, Field(ge=0)] | None = Field(None, description="The best so many; 0 is all.")
    return_documents: bool | None = Field(None, description="True unless given.")

    @property
    def texts(self) -> list[str]:
        """The documents as texts."""
        return [document if isinstance(document, str) else document.text for document in self.documents]


def as_document(text: str) -> dict[str, Any]:
    """A document as answers give it back."""
    return {"text": text}
