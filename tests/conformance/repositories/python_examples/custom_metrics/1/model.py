import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Counts requests in custom metrics."""

    def initialize(self, args):
        self.counter_family = pb_utils.MetricFamily(
            name="example_units_total",
            description="Units that were asked for",
            kind=pb_utils.MetricFamily.COUNTER,
        )
        self.sizes_family = pb_utils.MetricFamily(
            name="example_unit_sizes", description="Their sizes", kind=pb_utils.MetricFamily.HISTOGRAM
        )
        self.counter = self.counter_family.Metric(labels={"model": args["model_name"], "version": "1"})
        self.sizes = self.sizes_family.Metric(labels={}, buckets=[1.0, 10.0])

    def execute(self, requests):
        responses = []
        for request in requests:
            by = pb_utils.get_input_tensor_by_name(request, "BY").as_numpy()[0]
            self.counter.increment(by)
            self.sizes.observe(by)
            pb_utils.Logger.log_info(f"counted {by}")
            total = pb_utils.Tensor("TOTAL", np.array([self.counter.value()], np.float64))
            responses.append(pb_utils.InferenceResponse(output_tensors=[total]))
        return responses
