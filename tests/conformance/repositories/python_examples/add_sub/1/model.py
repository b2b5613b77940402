import json

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """OUTPUT0 is the sum of the inputs, OUTPUT1 their difference."""

    def initialize(self, args):
        config = json.loads(args["model_config"])
        self.dtypes = [
            pb_utils.triton_string_to_numpy(pb_utils.get_output_config_by_name(config, name)["data_type"])
            for name in ("OUTPUT0", "OUTPUT1")
        ]

    def execute(self, requests):
        responses = []
        for request in requests:
            first = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
            second = pb_utils.get_input_tensor_by_name(request, "INPUT1").as_numpy()
            results = (first + second, first - second)
            tensors = [
                pb_utils.Tensor(f"OUTPUT{i}", result.astype(self.dtypes[i]))
                for i, result in enumerate(results)
            ]
            responses.append(pb_utils.InferenceResponse(output_tensors=tensors))
        return responses

    def finalize(self):
        print("Cleaning up...")
