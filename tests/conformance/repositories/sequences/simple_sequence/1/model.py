"""An accumulator with sums by slot: the position of a request in the batch identifies its sequence."""

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.sums = np.zeros(4, np.int32)

    def execute(self, requests):
        responses = []
        for slot, request in enumerate(requests):
            values = {tensor.name(): tensor.as_numpy().item() for tensor in request.inputs()}
            if values["READY"]:
                self.sums[slot] = values["INPUT"] + (0 if values["START"] else self.sums[slot])
            output = pb_utils.Tensor("OUTPUT", self.sums[slot].reshape(1, 1))
            responses.append(pb_utils.InferenceResponse([output]))
        return responses
