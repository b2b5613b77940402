import asyncio

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Returns half the sum of the responses to two requests to the decoupled model square_int32."""

    async def execute(self, requests):
        responses = []
        for request in requests:
            calls = [
                pb_utils.InferenceRequest(
                    model_name="square_int32",
                    inputs=[pb_utils.get_input_tensor_by_name(request, "IN")],
                    requested_output_names=["OUT"],
                ).async_exec(decoupled=True)
                for _ in range(2)
            ]
            total = np.zeros(1, np.int32)
            for answers in await asyncio.gather(*calls):
                async for response in answers:
                    if response.has_error():
                        raise pb_utils.TritonModelException(response.error().message())
                    if len(response.output_tensors()) > 0:
                        total += pb_utils.get_output_tensor_by_name(response, "OUT").as_numpy()
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("SUM", total // 2)]))
        return responses
