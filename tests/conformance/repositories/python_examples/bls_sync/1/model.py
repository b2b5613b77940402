import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Calls the model named by MODEL_NAME."""

    def execute(self, requests):
        responses = []
        for request in requests:
            name = pb_utils.get_input_tensor_by_name(request, "MODEL_NAME").as_numpy()[0].decode()
            if not pb_utils.is_model_ready(model_name=name):
                message = f"model {name} is not ready"
                error = pb_utils.TritonError(message, pb_utils.TritonError.UNAVAILABLE)
                responses.append(pb_utils.InferenceResponse(error=error))
                continue
            inference_request = pb_utils.InferenceRequest(
                model_name=name,
                requested_output_names=["OUTPUT0", "OUTPUT1"],
                inputs=[pb_utils.get_input_tensor_by_name(request, f"INPUT{i}") for i in range(2)],
            )
            response = inference_request.exec()
            if response.has_error():
                raise pb_utils.TritonModelException(response.error().message())
            responses.append(pb_utils.InferenceResponse(output_tensors=response.output_tensors()))
        return responses
