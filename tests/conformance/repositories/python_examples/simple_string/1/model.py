import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Returns sums and differences of numbers, all as text."""

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        first, second = (
            pb_utils.get_input_tensor_by_name(request, name).as_numpy().astype(np.int64)
            for name in ("INPUT0", "INPUT1")
        )
        outputs = (first + second, first - second)
        return pb_utils.InferenceResponse(
            [pb_utils.Tensor(f"OUTPUT{i}", array.astype(np.object_)) for i, array in enumerate(outputs)]
        )
