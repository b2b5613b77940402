import numpy as np
import triton_python_backend_utils as pb_utils
from normalization import normalize


class TritonPythonModel:
    """Converts images to normalized channels-first arrays."""

    def execute(self, requests):
        responses = []
        for request in requests:
            image = pb_utils.get_input_tensor_by_name(request, "IMAGE").as_numpy()
            label = pb_utils.get_input_tensor_by_name(request, "LABEL").as_numpy()
            pixels = normalize(image).transpose(0, 3, 1, 2)
            labels = np.array([text.decode("utf-8").upper() for text in label.flat], dtype=np.object_)
            responses.append(
                pb_utils.InferenceResponse(
                    output_tensors=[
                        pb_utils.Tensor("PIXELS", pixels),
                        pb_utils.Tensor("LABEL", labels.reshape(label.shape)),
                    ]
                )
            )
        return responses
