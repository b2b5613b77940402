"""The classification extension with `tritonclient` over HTTP and gRPC, and with plain JSON."""

from __future__ import annotations

import numpy as np
import pytest
import tritonclient.grpc as grpc_client
import tritonclient.http as http_client
from server_process import ServerProcess
from test_doc_examples import IDENTITY, IDENTITY_CONFIG
from tritonclient.utils import InferenceServerException

VALUES = np.array([[0.25, 4.5, -1.0, 2.0], [9.0, 0.5, 3.0, 7.125]], np.float32)
EXPECTED = [["4.500000:1:dog", "2.000000:3"], ["9.000000:0:cat", "7.125000:3"]]
CONFIGS = {
    "labelled": IDENTITY_CONFIG.replace("dims: [-1] }]\n", 'dims: [-1], label_filename: "names.txt" }]\n', 2),
    "single": IDENTITY_CONFIG.replace("max_batch_size: 8", ""),
    "text": IDENTITY_CONFIG.replace("TYPE_FP32", "TYPE_STRING"),
}
CONFIGS["labelled"] = CONFIGS["labelled"].replace(', label_filename: "names.txt"', "", 1)  # of the input


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = tmp_path_factory.mktemp("repository")
    for name, config in CONFIGS.items():
        (folder / name / "1").mkdir(parents=True)
        (folder / name / "config.pbtxt").write_text(config)
        (folder / name / "1" / "model.py").write_text(IDENTITY)
    (folder / "labelled" / "names.txt").write_text("cat\ndog\nfox\n")
    with ServerProcess(f"--model-repository={folder}") as server:
        yield server


@pytest.fixture(scope="module", params=["http", "grpc"])
def triton(served, request):
    """The module and a connected client of each protocol."""
    module = {"http": http_client, "grpc": grpc_client}[request.param]
    with module.InferenceServerClient(served.address(request.param)) as connection:
        yield module, connection


def infer(triton, model, values, classes, datatype="FP32", **how):
    module, connection = triton
    tensor = module.InferInput("INPUT", list(values.shape), datatype)
    tensor.set_data_from_numpy(values)
    output = module.InferRequestedOutput("OUTPUT", class_count=classes, **how)
    return connection.infer(model, [tensor], outputs=[output]).as_numpy("OUTPUT")


def decoded(array) -> list:
    return np.vectorize(bytes.decode)(array.astype(np.object_)).tolist()


def test_batch_with_labels(triton):
    assert decoded(infer(triton, "labelled", VALUES, 2)) == EXPECTED


def test_without_batching_and_fewer_classes_than_requested(triton):
    assert decoded(infer(triton, "single", VALUES[0], 100)) == [
        "4.500000:1",
        "2.000000:3",
        "0.250000:0",
        "-1.000000:2",
    ]


def test_zero_classes_returns_the_raw_output(triton):
    np.testing.assert_array_equal(infer(triton, "labelled", VALUES, 0), VALUES)


def test_string_outputs_cannot_be_classified(triton):
    with pytest.raises(InferenceServerException, match="unsupported type 'BYTES'"):
        infer(triton, "text", np.array([[b"a"]], np.object_), 1, "BYTES")


def test_extension_is_advertised(triton):
    module, connection = triton
    metadata = connection.get_server_metadata()
    extensions = metadata["extensions"] if module is http_client else metadata.extensions
    assert "classification" in extensions


def test_plain_json(served):
    outputs = [{"name": "OUTPUT", "parameters": {"classification": 2}}]
    entry = {"name": "INPUT", "datatype": "FP32", "shape": VALUES.shape, "data": VALUES.tolist()}
    status, response = served.post("/v2/models/labelled/infer", {"inputs": [entry], "outputs": outputs})
    assert status == 200
    (output,) = response["outputs"]
    assert (output["datatype"], output["shape"]) == ("BYTES", [2, 2])
    assert output["data"] == [*EXPECTED[0], *EXPECTED[1]]
    for wrong in (-1, "2", 1.5):
        outputs[0]["parameters"]["classification"] = wrong
        status, response = served.post("/v2/models/labelled/infer", {"inputs": [entry], "outputs": outputs})
        assert status == 400 and "classification" in response["error"]


def test_http_client_without_binary_data(served):
    with http_client.InferenceServerClient(served.address("http")) as connection:
        found = infer((http_client, connection), "labelled", VALUES, 2, binary_data=False)
    assert [[str(text) for text in row] for row in found] == EXPECTED


def test_grpc_parameter_of_another_type(served):
    with grpc_client.InferenceServerClient(served.address("grpc")) as connection:
        tensor = grpc_client.InferInput("INPUT", [2, 4], "FP32")
        tensor.set_data_from_numpy(VALUES)
        output = grpc_client.InferRequestedOutput("OUTPUT")
        output._output.parameters["classification"].string_param = "2"
        with pytest.raises(InferenceServerException, match="'classification' parameter") as caught:
            connection.infer("labelled", [tensor], outputs=[output])
        assert caught.value.status() == "StatusCode.INVALID_ARGUMENT"
