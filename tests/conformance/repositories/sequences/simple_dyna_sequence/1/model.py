"""An accumulator with sums by correlation id, which adds the id to the last sum."""

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.sums = {}

    def execute(self, requests):
        responses = []
        for request in requests:
            values = {tensor.name(): tensor.as_numpy().item() for tensor in request.inputs()}
            key = values["CORRID"]
            total = values["INPUT"] + (0 if values["START"] else self.sums[key])
            self.sums[key] = total
            if values["END"]:
                del self.sums[key]
                total += key % 1000
            responses.append(
                pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", np.array([[total]], np.int32))])
            )
        return responses
