"""Text about an image, with a vision-language model of transformers. The text is sent as it is generated."""

import base64
import binascii
import contextlib
import io
import json

import numpy as np
import torch
import triton_python_backend_utils as pb_utils
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor, StoppingCriteria, TextStreamer

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class ResponseStreamer(TextStreamer):
    """Sends each finished word to the client."""

    def __init__(self, tokenizer, sender):
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.sender = sender

    def on_finalized_text(self, text, stream_end=False):
        if text:
            output = pb_utils.Tensor("text_output", np.array([text.encode()], np.object_))
            self.sender.send(pb_utils.InferenceResponse([output]))


class Cancelled(StoppingCriteria):
    """Ends the generation of a cancelled request."""

    def __init__(self, request):
        self.request = request

    def __call__(self, input_ids, scores, **options):
        return torch.full((len(input_ids),), self.request.is_cancelled(), device=input_ids.device)


class TritonPythonModel:
    def initialize(self, args):
        parameters = json.loads(args["model_config"])["parameters"]
        checkpoint, max_tokens, max_pixels = (
            parameters[name]["string_value"] for name in ("checkpoint", "max_tokens", "max_pixels")
        )
        self.max_tokens, self.max_pixels = int(max_tokens), int(max_pixels)
        self.device = "cpu"
        if args["model_instance_kind"] == "GPU":
            self.device = f"cuda:{args['model_instance_device_id']}"
        self.processor = AutoProcessor.from_pretrained(checkpoint)
        self.model = AutoModelForImageTextToText.from_pretrained(checkpoint, dtype="auto").to(self.device)

    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            try:
                self.answer(request, sender)
            except ValueError as error:
                send_error(sender, str(error), pb_utils.TritonError.INVALID_ARG)
            except Exception as error:
                send_error(sender, f"{type(error).__name__}: {error}", pb_utils.TritonError.INTERNAL)
            else:
                if request.is_cancelled():
                    send_error(sender, "the request was cancelled", pb_utils.TritonError.CANCELLED)
                else:
                    sender.send(flags=FINAL)

    def answer(self, request, sender):
        """Generate and send the text. Raises `ValueError` for invalid inputs."""
        max_tokens = value(request, "max_tokens", 128)
        if not 1 <= max_tokens <= self.max_tokens:
            raise ValueError(f"max_tokens must be from 1 to {self.max_tokens}, got {max_tokens}")
        temperature = value(request, "temperature", 0.0)
        if not 0 <= temperature < np.inf:
            raise ValueError(f"temperature must be 0 or larger, got {temperature}")
        sampling = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
        content = [{"type": "image"}, {"type": "text", "text": value(request, "text_input", b"").decode()}]
        prompt = self.processor.apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True
        )
        image = read_image(value(request, "image", b""), self.max_pixels)
        inputs = self.processor(images=image, text=prompt, return_tensors="pt").to(
            self.device, self.model.dtype
        )
        seed = value(request, "seed", None)
        if seed is not None:
            torch.manual_seed(seed)
        self.model.generate(
            **inputs,
            **sampling,
            max_new_tokens=max_tokens,
            streamer=ResponseStreamer(self.processor.tokenizer, sender),
            stopping_criteria=[Cancelled(request)],
        )


def value(request, name, default):
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    return default if tensor is None else tensor.as_numpy().ravel().tolist()[0]


def read_image(data, max_pixels):
    """Decode an image file, or its base64. Raises `ValueError`."""
    with contextlib.suppress(binascii.Error):  # a file: image formats have bytes that are not in base64
        data = base64.b64decode(data, validate=True)
    try:
        image = Image.open(io.BytesIO(data))
        if image.width * image.height > max_pixels:
            raise ValueError(f"the image has {image.width} x {image.height} pixels, more than {max_pixels}")
        return image.convert("RGB")
    except OSError as error:
        raise ValueError(f"cannot read the image: {error}") from None


def send_error(sender, message, code):
    sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError(message, code)), flags=FINAL)
