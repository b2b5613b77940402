"""Sends the number of remaining responses, from the input down to 0, one per execution."""

import time

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        time.sleep(0.002)
        for request in requests:
            inputs = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
            left = (inputs["IN"] if inputs["START"].item() else inputs["LEFT"]) - 1
            response = pb_utils.InferenceResponse(
                [pb_utils.Tensor("OUT", left), pb_utils.Tensor("LEFT_NEXT", left)]
            )
            sender = request.get_response_sender()
            if left.item() > 0:
                request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
                sender.send(response)
            else:
                sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
