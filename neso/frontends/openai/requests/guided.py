"""What a request says about the form of its answer."""

from __future__ import annotations

from neso.frontends.openai.errors import to_api_error
from neso.frontends.openai.requests.schemas import GenerationFields
from neso.generation import GuidedDecoding, InvalidParameter
from neso.generation.guided_decoding import NAMES, read_guided_decoding


def wanted_form(request: GenerationFields) -> GuidedDecoding | None:
    """What `response_format`, `structured_outputs` and `guided_*` ask for. Raises `ApiError`."""
    fields = {name: value for name, value in (request.model_extra or {}).items() if name in NAMES}
    if request.response_format is not None:
        fields["response_format"] = request.response_format.model_dump(exclude_unset=True)
    try:
        return read_guided_decoding(fields)
    except InvalidParameter as error:
        raise to_api_error(error) from None
