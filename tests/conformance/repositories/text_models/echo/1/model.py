import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Returns its input."""

    def execute(self, requests):
        responses = []
        for request in requests:
            text = pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy()
            output = pb_utils.Tensor("text_output", np.array(text, np.object_))
            responses.append(pb_utils.InferenceResponse([output]))
        return responses
