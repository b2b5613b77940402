"""`triton_python_backend_utils` without a server."""

from __future__ import annotations

import sys

import ml_dtypes
import numpy as np
import pytest

from neso.backends.python.model_module import install

install()
pb_utils = sys.modules["triton_python_backend_utils"]

CONFIG = {
    "name": "m",
    "max_batch_size": 4,
    "input": [{"name": "A", "data_type": "TYPE_INT32", "dims": [1]}],
    "output": [],
}


def test_tensor():
    tensor = pb_utils.Tensor("A", np.array([[1, 2]], np.int32))
    assert (tensor.name(), tensor.shape(), tensor.triton_dtype(), tensor.is_cpu()) == ("A", [1, 2], 8, True)
    again = pb_utils.Tensor.from_dlpack("B", tensor.to_dlpack())
    assert again.as_numpy().tolist() == [[1, 2]]
    assert np.shares_memory(pb_utils.Tensor.from_dlpack("B", tensor).as_numpy(), tensor.as_numpy())
    with pytest.raises(pb_utils.TritonModelException):
        pb_utils.Tensor.from_dlpack("B", 3)


def test_dlpack_with_torch():
    torch = pytest.importorskip("torch")
    tensor = pb_utils.Tensor("A", np.arange(3, dtype=np.float32))
    assert torch.from_dlpack(tensor).tolist() == [0, 1, 2]
    from torch.utils.dlpack import from_dlpack, to_dlpack

    assert from_dlpack(tensor.to_dlpack()).tolist() == [0, 1, 2]
    assert pb_utils.Tensor.from_dlpack("B", to_dlpack(torch.ones(2))).as_numpy().tolist() == [1, 1]


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_dlpack_capsule_keeps_the_tensor_alive(dtype):
    tensor = pb_utils.Tensor("A", np.ones(3, dtype))
    before = sys.getrefcount(tensor)
    capsule = tensor.to_dlpack()
    assert sys.getrefcount(tensor) == before + 1
    del capsule
    assert sys.getrefcount(tensor) == before


def test_dlpack_of_bfloat16():
    torch = pytest.importorskip("torch")
    tensor = pb_utils.Tensor("A", np.array([1.5, -2], ml_dtypes.bfloat16))
    there = torch.from_dlpack(tensor.to_dlpack())
    assert there.dtype is torch.bfloat16 and there.tolist() == [1.5, -2]
    assert torch.from_dlpack(tensor).tolist() == [1.5, -2]
    there[0] = 7  # the memory is shared both ways
    assert tensor.as_numpy()[0] == 7
    from torch.utils.dlpack import to_dlpack

    for source in (there, to_dlpack(there)):
        back = pb_utils.Tensor.from_dlpack("B", source)
        assert back.triton_dtype() == 14 and np.shares_memory(back.as_numpy(), tensor.as_numpy())


def test_dlpack_of_a_batch_of_a_model():
    torch = pytest.importorskip("torch")
    source = torch.arange(12, dtype=torch.float16).reshape(3, 4)
    tensor = pb_utils.Tensor.from_dlpack("A", source)
    assert tensor.shape() == [3, 4] and tensor.__dlpack_device__() == (1, 0)
    source[2, 3] = 99
    assert tensor.as_numpy()[2, 3] == 99, "the memory is shared"
    assert pb_utils.Tensor.from_dlpack("A", torch.tensor([True, False])).as_numpy().tolist() == [True, False]
    with pytest.raises(pb_utils.TritonModelException):
        pb_utils.Tensor.from_dlpack("A", torch.ones(2, requires_grad=True))
    with pytest.raises(pb_utils.TritonModelException, match="not the CPU's"):
        pb_utils.Tensor.from_dlpack("A", DeviceArray())
    with pytest.raises(pb_utils.TritonModelException, match="does not have support for string"):
        pb_utils.Tensor("A", np.array([b"a"], np.object_)).to_dlpack()


class DeviceArray:
    def __dlpack__(self, **_):
        raise AssertionError("nobody can read this")

    def __dlpack_device__(self):
        return 2, 0


def test_preferred_memory():
    wish = pb_utils.PreferredMemory(pb_utils.TRITONSERVER_MEMORY_GPU, 1)
    assert wish.preferred_memory_type() == pb_utils.MemoryType.TRITONSERVER_MEMORY_GPU == 1
    assert wish.preferred_device_id() == 1
    assert pb_utils.PreferredMemory().preferred_memory_type() == pb_utils.TRITONSERVER_MEMORY_CPU == 0
    pb_utils.InferenceRequest(**REQUEST, preferred_memory=wish)


def test_datatype_numbers_match_the_protocol():
    from tritonclient.grpc import model_config_pb2

    from neso.server.tensor import DataType

    for datatype in DataType:
        number = model_config_pb2.DataType.Value(datatype.config_name)
        assert pb_utils.triton_to_numpy_type(number) is datatype.dtype.type
        assert pb_utils.numpy_to_triton_type(datatype.dtype) == number


def test_datatypes():
    assert pb_utils.triton_string_to_numpy("TYPE_STRING") is np.object_
    assert pb_utils.triton_string_to_numpy("TYPE_BOOL") is np.bool_
    assert pb_utils.numpy_to_triton_type(np.float32) == 11
    assert pb_utils.numpy_to_triton_type(np.object_) == 13
    assert pb_utils.triton_to_numpy_type(9) is np.int64
    assert pb_utils.triton_to_numpy_type(14) is ml_dtypes.bfloat16
    with pytest.raises(pb_utils.TritonModelException):
        pb_utils.triton_string_to_numpy("TYPE_NO")


def test_serialization_of_bytes_tensors():
    array = np.array([b"a", "bü"], np.object_)
    data = pb_utils.serialize_byte_tensor(array)
    assert data == b"\x01\0\0\0a\x03\0\0\0b\xc3\xbc"
    assert pb_utils.deserialize_bytes_tensor(data).tolist() == [b"a", "bü".encode()]
    assert pb_utils.serialize_byte_tensor(np.array([], np.object_)) == b""
    assert pb_utils.deserialize_bytes_tensor(b"").tolist() == []
    assert pb_utils.serialize_byte_tensor(np.array([1])) is None
    with pytest.raises(pb_utils.TritonModelException):
        pb_utils.deserialize_bytes_tensor(data[:-1])


def test_constants():
    assert pb_utils.TRITON_STRING_TO_NUMPY["TYPE_STRING"] is np.object_
    assert pb_utils.TRITON_STRING_TO_NUMPY["TYPE_BOOL"] is bool
    assert pb_utils.TRITON_STRING_TO_NUMPY["TYPE_FP16"] is np.float16
    assert pb_utils.TRITONSERVER_REQUEST_RELEASE_ALL == 1
    assert pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE == 2
    assert pb_utils.Logger.LogLevel.WARNING is pb_utils.Logger.WARNING


REQUEST = {"inputs": [pb_utils.Tensor("A", np.zeros(1))], "requested_output_names": ["O"], "model_name": "m"}


@pytest.mark.parametrize(
    "wrong",
    [
        {"inputs": None},
        {"inputs": [np.zeros(1)]},
        {"model_name": None},
        {"model_name": 7},
        {"requested_output_names": None},
        {"requested_output_names": [None]},
        {"correlation_id": None},
        {"correlation_id": 1.5},
        {"request_id": None},
        {"model_version": None},
        {"model_version": "1"},
        {"flags": None},
        {"timeout": None},
    ],
    ids=str,
)
def test_request_arguments_of_a_wrong_type(wrong):
    with pytest.raises(TypeError, match=next(iter(wrong))):
        pb_utils.InferenceRequest(**{**REQUEST, **wrong})


@pytest.mark.parametrize("missing", REQUEST)
def test_required_arguments_of_a_request(missing):
    given = {name: value for name, value in REQUEST.items() if name != missing}
    with pytest.raises(TypeError, match=missing):
        pb_utils.InferenceRequest(**given)


def test_missing_tensors_are_rejected():
    with pytest.raises(pb_utils.TritonModelException, match="inputs must not contain None"):
        pb_utils.InferenceRequest(**{**REQUEST, "inputs": [None]})
    with pytest.raises(pb_utils.TritonModelException, match="output_tensors must not contain None"):
        pb_utils.InferenceResponse([None])
    with pytest.raises(TypeError, match="output_tensors must be a list"):
        pb_utils.InferenceResponse(None)
    pb_utils.InferenceRequest(**{**REQUEST, "inputs": [], "requested_output_names": []})


def test_names_can_be_elements_of_bytes_tensors():
    name = np.array([b"add"], np.object_)[0]
    request = pb_utils.InferenceRequest(**{**REQUEST, "model_name": name, "requested_output_names": [b"O"]})
    assert (request.model_name(), request.requested_output_names()) == ("add", ["O"])
    assert pb_utils.Tensor(b"A", np.zeros(1)).name() == "A"


def test_tensor_arguments_of_a_wrong_type():
    for name, array in ((None, np.zeros(1)), ("A", None), ("", None), ("A", [1])):
        with pytest.raises(TypeError):
            pb_utils.Tensor(name, array)
    with pytest.raises(pb_utils.TritonModelException, match="cannot be an empty string"):
        pb_utils.Tensor("", np.zeros(1))
    for name in ("A", ""):
        with pytest.raises(pb_utils.TritonModelException):
            pb_utils.Tensor.from_dlpack(name, None)


def test_error_arguments_of_a_wrong_type():
    for arguments in ((None,), ("m", None), ("m", 99)):
        with pytest.raises(TypeError):
            pb_utils.TritonError(*arguments)


def test_logger_arguments_of_a_wrong_type():
    logger = pb_utils.Logger
    for log in (logger.log, logger.log_info, logger.log_warn, logger.log_error, logger.log_verbose):
        with pytest.raises(TypeError, match="message must be a str"):
            log(None)
    for level in (None, 1):
        with pytest.raises(TypeError, match=r"level must be a pb_utils\.LogLevel"):
            logger.log("m", level)


def test_config_lookup_by_name():
    assert pb_utils.get_input_config_by_name(CONFIG, "A")["dims"] == [1]
    assert pb_utils.get_output_config_by_name(CONFIG, "A") is None
    assert not pb_utils.using_decoupled_model_transaction_policy(CONFIG)
    policy = {"model_transaction_policy": {"decoupled": True}}
    assert pb_utils.using_decoupled_model_transaction_policy(policy)


def test_responses_and_errors():
    tensor = pb_utils.Tensor("A", np.zeros(1))
    response = pb_utils.InferenceResponse(output_tensors=[tensor], parameters={"a": 1})
    assert response.output_tensors() == [tensor] and not response.has_error() and response.error() is None
    assert pb_utils.get_output_tensor_by_name(response, "A") is tensor
    assert response.parameters() == '{"a": 1}'
    error = pb_utils.TritonError("m", pb_utils.TritonError.UNAVAILABLE)
    assert (error.message(), error.code(), str(error)) == ("m", 4, "m")
    assert pb_utils.InferenceResponse(error=error).has_error()


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({1: "a"}, "keys to have type str, found type <class 'int'>"),
        ({"a": []}, "values to have type bool/int/str, found type <class 'list'>"),
        ({"a": None}, "values to have type bool/int/str, found type <class 'NoneType'>"),
        ([], "got <class 'list'>"),
        ("a", "got <class 'str'>"),
    ],
)
def test_invalid_parameters_are_rejected(parameters, message):
    with pytest.raises(pb_utils.TritonModelException, match=message):
        pb_utils.InferenceResponse(parameters=parameters)
    with pytest.raises(pb_utils.TritonModelException, match=message):
        pb_utils.InferenceRequest(**REQUEST, parameters=parameters)
    valid = {"a": "b", "c": 1, "d": True, "e": 0.5}
    assert pb_utils.InferenceResponse(parameters=valid).parameters() == (
        '{"a": "b", "c": 1, "d": true, "e": 0.5}'
    )


def test_request_created_by_a_model():
    request = pb_utils.InferenceRequest(
        model_name="other", requested_output_names=["O"], inputs=[pb_utils.Tensor("A", np.zeros(1))]
    )
    assert (request.model_name(), request.requested_output_names()) == ("other", ["O"])
    assert not request.is_cancelled()
    with pytest.raises(
        pb_utils.TritonModelException, match="can only be called in the threads that run the model"
    ):
        request.exec()
    with pytest.raises(pb_utils.TritonModelException):
        request.get_response_sender()


def test_logger(caplog):
    caplog.set_level("DEBUG")
    logger = pb_utils.Logger
    logger.log("one", logger.WARNING)
    logger.log_info("two 100%")
    logger.log_verbose("three")
    assert [(r.levelname, r.getMessage()) for r in caplog.records] == [
        ("WARNING", "one"), ("INFO", "two 100%"), ("DEBUG", "three"),
    ]  # fmt: skip
    assert caplog.records[0].filename == "test_pb_utils.py"


def test_model_config_setters():
    import copy

    config = pb_utils.ModelConfig(copy.deepcopy(CONFIG))
    config.add_input({"name": "A", "data_type": "TYPE_INT32", "dims": [1], "optional": True})
    config.add_output({"name": "O", "data_type": "TYPE_INT32", "dims": [1]})
    config.set_dynamic_batching()
    config.set_model_transaction_policy({"decoupled": True})
    values = config.as_dict()
    assert len(values["input"]) == len(values["output"]) == 1 and values["dynamic_batching"] == {}
    assert values["input"][0]["optional"] is True
    for wrong in (
        lambda: config.add_input({"name": "A", "data_type": "TYPE_INT64", "dims": [1]}),
        lambda: config.add_input({"name": "A", "data_type": "TYPE_INT32", "dims": [1], "optional": False}),
        lambda: config.add_input({"name": "B"}),
        lambda: config.add_output({"name": "B", "data_type": "TYPE_INT8", "dims": [1], "x": 1}),
        lambda: config.set_max_batch_size(2),
        lambda: config.set_model_transaction_policy({"decoupled": False}),
        lambda: config.set_model_transaction_policy({"coupled": False}),
    ):
        with pytest.raises(ValueError):
            wrong()
