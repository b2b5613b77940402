import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Returns the name of the instance."""

    def initialize(self, args):
        kind, device = args["model_instance_kind"], args["model_instance_device_id"]
        self.device = "cuda:" + device if kind == "GPU" else "cpu"
        self.place = f"{args['model_instance_name']} {kind} {self.device}"

    def execute(self, requests):
        time.sleep(0.1)
        text = np.array([self.place], dtype=np.object_)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("PLACE", text)]) for _ in requests]
