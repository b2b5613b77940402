"""Images from prompts, with a text-to-image pipeline of diffusers.

Each row of a request is a prompt. Requests of a batch with equal settings are computed together. A decoupled model also
sends the number of each finished step.
"""

import base64
import io
import json
from typing import NamedTuple

import numpy as np
import torch
import triton_python_backend_utils as pb_utils
from diffusers import AutoPipelineForText2Image
from PIL import Image

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class Settings(NamedTuple):
    """Settings of a request, equal for all its rows. `height`, `width`: in pixels; None: those of the checkpoint."""

    steps: int
    guidance_scale: float
    height: int | None
    width: int | None


class Job(NamedTuple):
    """A request: one prompt, negative prompt and generator for each of its rows."""

    request: object
    sender: object
    prompts: list[str]
    negative_prompts: list[str]
    generators: list[torch.Generator]


class AllCancelled(Exception):
    """Ends a pipeline whose requests are all cancelled."""


class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        parameters = {name: value["string_value"] for name, value in config["parameters"].items()}
        self.decoupled = pb_utils.using_decoupled_model_transaction_policy(config)
        self.max_steps = int(parameters["max_steps"])
        self.max_pixels = int(parameters["max_pixels"])
        on_gpu = args["model_instance_kind"] == "GPU"
        self.pipeline = AutoPipelineForText2Image.from_pretrained(
            parameters["checkpoint"], dtype=torch.float16 if on_gpu else torch.float32
        ).to(f"cuda:{args['model_instance_device_id']}" if on_gpu else "cpu")
        self.pipeline.set_progress_bar_config(disable=True)

    def execute(self, requests):
        groups = {}
        for request in requests:
            sender = request.get_response_sender()
            try:
                settings, job = self.settings(request), self.job(request, sender)
            except ValueError as error:
                send_error(sender, str(error), pb_utils.TritonError.INVALID_ARG)
                continue
            groups.setdefault(settings, []).append(job)
        for settings, jobs in groups.items():
            try:
                self.generate(settings, jobs)
            except AllCancelled:
                for job in jobs:
                    send_error(job.sender, "the request was cancelled", pb_utils.TritonError.CANCELLED)
            except Exception as error:
                for job in jobs:
                    send_error(job.sender, f"{type(error).__name__}: {error}", pb_utils.TritonError.INTERNAL)

    def settings(self, request):
        """Read the settings. Raises `ValueError`."""
        settings = Settings(
            steps=one_value(request, "steps", 30),
            guidance_scale=one_value(request, "guidance_scale", 7.5),
            height=one_value(request, "height", None),
            width=one_value(request, "width", None),
        )
        if not 1 <= settings.steps <= self.max_steps:
            raise ValueError(f"steps must be from 1 to {self.max_steps}, got {settings.steps}")
        if (settings.height is None) != (settings.width is None):
            raise ValueError("height and width must be set together")
        if settings.height is not None:
            height, width = settings.height, settings.width
            if height < 8 or width < 8 or height % 8 or width % 8 or height * width > self.max_pixels:
                raise ValueError(
                    f"height and width must be multiples of 8, with at most {self.max_pixels} pixels, "
                    f"got {height} x {width}"
                )
        return settings

    def job(self, request, sender):
        prompts = texts(request, "prompt")
        seeds = pb_utils.get_input_tensor_by_name(request, "seed")
        generators = [torch.Generator() for _ in prompts]  # on the CPU: the same noise on every device
        for row, generator in enumerate(generators):
            if seeds is None:
                generator.seed()
            else:
                generator.manual_seed(int(seeds.as_numpy()[row, 0]))
        return Job(
            request, sender, prompts, texts(request, "negative_prompt") or [""] * len(prompts), generators
        )

    def generate(self, settings, jobs):
        """Run the pipeline for all rows of the requests, and send their images."""

        def after_step(pipeline, step, timestep, tensors):
            if all(job.request.is_cancelled() for job in jobs):
                raise AllCancelled
            if self.decoupled:
                for job in jobs:
                    steps = np.full((len(job.prompts), 1), step + 1, np.int32)
                    job.sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("step", steps)]))
            return tensors

        images = self.pipeline(
            prompt=[prompt for job in jobs for prompt in job.prompts],
            negative_prompt=[prompt for job in jobs for prompt in job.negative_prompts],
            generator=[generator for job in jobs for generator in job.generators],
            num_inference_steps=settings.steps,
            guidance_scale=settings.guidance_scale,
            height=settings.height,
            width=settings.width,
            output_type="np",
            callback_on_step_end=after_step,
        ).images
        start = 0
        for job in jobs:
            rows = images[start : start + len(job.prompts)]
            start += len(job.prompts)
            encoded = np.array([[base64_png(image)] for image in rows], np.object_)
            job.sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("image", encoded)]), flags=FINAL)


def one_value(request, name, default):
    """Return a setting of a request. Raises `ValueError` if its rows differ."""
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    if tensor is None:
        return default
    first, *others = tensor.as_numpy().ravel().tolist()
    if any(other != first for other in others):
        raise ValueError(f"{name} must be equal for all prompts of a request")
    return first


def texts(request, name):
    """Return a text for each row; an empty list without the input."""
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    return [] if tensor is None else [text.decode() for text in tensor.as_numpy().ravel()]


def base64_png(image):
    """Encode an image of shape [height, width, 3] with values from 0 to 1."""
    file = io.BytesIO()
    Image.fromarray((image * 255).round().astype(np.uint8)).save(file, "PNG")
    return base64.b64encode(file.getvalue())


def send_error(sender, message, code):
    sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError(message, code)), flags=FINAL)
