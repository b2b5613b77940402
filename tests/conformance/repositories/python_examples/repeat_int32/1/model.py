import json
import threading
import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Sends a response for each element of IN, DELAY milliseconds apart, from separate threads."""

    def initialize(self, args):
        config = json.loads(args["model_config"])
        if not pb_utils.using_decoupled_model_transaction_policy(config):
            raise pb_utils.TritonModelException(f"model `{args['model_name']}` must be decoupled")
        self.inflight = 0
        self.lock = threading.Lock()

    def execute(self, requests):
        for request in requests:
            inputs = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
            arguments = (request.get_response_sender(), inputs["IN"], inputs["DELAY"])
            thread = threading.Thread(target=self.respond, args=arguments)
            thread.daemon = True
            with self.lock:
                self.inflight += 1
            thread.start()
            time.sleep(inputs["WAIT"].flat[0] / 1000)
        return None

    def respond(self, sender, values, delays):
        for index, (value, delay) in enumerate(zip(values.flat, delays.flat, strict=True)):
            time.sleep(delay / 1000)
            out = pb_utils.Tensor("OUT", np.array([[value]], np.int32))
            place = pb_utils.Tensor("IDX", np.array([[index]], np.uint32))
            sender.send(pb_utils.InferenceResponse(output_tensors=[place, out]))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        with self.lock:
            self.inflight -= 1

    def finalize(self):
        while self.inflight:
            time.sleep(0.01)
