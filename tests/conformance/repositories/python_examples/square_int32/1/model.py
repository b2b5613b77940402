import threading

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Responds IN times with IN."""

    def execute(self, requests):
        for request in requests:
            value = int(pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()[0])
            threading.Thread(target=self.respond, args=(request.get_response_sender(), value)).start()
        return None

    def respond(self, sender, value):
        for _ in range(value):
            out = pb_utils.Tensor("OUT", np.array([value], np.int32))
            sender.send(pb_utils.InferenceResponse(output_tensors=[out]))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
