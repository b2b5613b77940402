import asyncio

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Calls the model named by MODEL_NAME twice concurrently, once for each output."""

    async def execute(self, requests):
        responses = []
        for request in requests:
            name = pb_utils.get_input_tensor_by_name(request, "MODEL_NAME").as_numpy()[0].decode()
            calls = [
                pb_utils.InferenceRequest(
                    model_name=name,
                    requested_output_names=[output],
                    inputs=[pb_utils.get_input_tensor_by_name(request, f"INPUT{i}") for i in range(2)],
                ).async_exec()
                for output in ("OUTPUT0", "OUTPUT1")
            ]
            answers = await asyncio.gather(*calls)
            for response in answers:
                if response.has_error():
                    raise pb_utils.TritonModelException(response.error().message())
            tensors = [
                pb_utils.get_output_tensor_by_name(response, f"OUTPUT{i}")
                for i, response in enumerate(answers)
            ]
            responses.append(pb_utils.InferenceResponse(output_tensors=tensors))
        return responses
