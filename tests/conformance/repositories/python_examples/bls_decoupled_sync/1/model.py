import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Returns the sum of the responses of the decoupled model square_int32."""

    def execute(self, requests):
        responses = []
        for request in requests:
            inference_request = pb_utils.InferenceRequest(
                model_name="square_int32",
                inputs=[pb_utils.get_input_tensor_by_name(request, "IN")],
                requested_output_names=["OUT"],
            )
            total = np.zeros(1, np.int32)
            for response in inference_request.exec(decoupled=True):
                if response.has_error():
                    raise pb_utils.TritonModelException(response.error().message())
                # The last response has no tensors.
                if len(response.output_tensors()) > 0:
                    total += pb_utils.get_output_tensor_by_name(response, "OUT").as_numpy()
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("SUM", total)]))
        return responses
