import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Calls another model and returns the prompt and its output; the prompt cannot be excluded."""

    def initialize(self, args):
        import json

        self.model = json.loads(args["model_config"])["parameters"]["tensorrt_llm_model_name"]["string_value"]

    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            prompt = pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy()
            inner = pb_utils.InferenceRequest(
                model_name=self.model, inputs=list(request.inputs()), requested_output_names=["text_output"]
            )
            first = True
            for response in inner.exec(decoupled=True):
                if response.has_error():
                    sender.send(pb_utils.InferenceResponse(error=response.error()))
                    break
                if not response.output_tensors():
                    continue
                text = response.output_tensors()[0].as_numpy()
                text = prompt + text if first else text
                first = False
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("text_output", text)]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
