"""Classification outputs: order, text, labels, shapes."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from google.protobuf import text_format
from repository_builder import IDENTITY_TENSORS
from tritonclient.grpc.model_config_pb2 import ModelConfig

from neso.server.errors import InvalidArgument
from neso.server.metadata import ModelState
from neso.server.signature import MAX_CLASSES, Classifier, largest
from neso.server.tensor import Tensor

OUTPUT = 'name: "m" output { name: "Y" data_type: TYPE_FP32 dims: [ -1 ] label_filename: "labels.txt" }'


def classes(array, count: int, *, batched: bool = False, labels: str = "", folder: Path | None = None):
    text = OUTPUT if labels else OUTPUT.replace('label_filename: "labels.txt"', "")
    if folder is not None:
        (folder / "labels.txt").write_text(labels)
    config = text_format.Parse(f"{text} max_batch_size: {8 * batched}", ModelConfig())
    (tensor,) = Classifier(config, folder or Path()).classify([Tensor.from_numpy("Y", array)], {"Y": count})
    assert tensor.datatype == "BYTES" and tensor.name == "Y"
    return tensor.array


def test_descending_order_with_six_decimals():
    found = classes(np.array([0.1, 0.7, -2, 0.2], np.float32), 3)
    assert found.tolist() == [b"0.700000:1", b"0.200000:3", b"0.100000:0"]


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"])
def test_integers_have_no_decimals(dtype):
    highest = np.iinfo(dtype).max
    assert classes(np.array([3, highest, 0], dtype), 2).tolist() == [b"%d:1" % highest, b"3:0"]


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float64])
def test_other_floats(dtype):
    assert classes(np.array([0.5, 1.5], dtype), 1).tolist() == [b"1.500000:1"]


def test_no_more_classes_than_elements():
    assert classes(np.array([[1, 2], [4, 3]], np.int32), 9).tolist() == [b"4:2", b"3:3", b"2:1", b"1:0"]


def test_batch_entries_are_classified_separately():
    found = classes(np.array([[[1, 2], [4, 3]], [[8, 7], [6, 5]]], np.int32), 2, batched=True)
    assert found.tolist() == [[b"4:2", b"3:3"], [b"8:0", b"7:1"]]


@pytest.mark.parametrize(("shape", "expected"), [((0, 3), (0, 2)), ((2, 0), (2, 0))])
def test_empty_outputs(shape, expected):
    assert classes(np.zeros(shape, np.float32), 2, batched=True).shape == expected


def test_equal_values_and_nan():
    assert largest(np.array([1, 2, 2, 1]), 4).tolist() == [1, 2, 0, 3]
    assert largest(np.array([np.nan, 1.0, np.inf, -5]), 3).tolist() == [2, 1, 3]


def test_labels(tmp_path):
    found = classes(np.arange(5, dtype=np.int32), 5, labels="cat\r\ndog: brown\n\nfox\n", folder=tmp_path)
    assert found.tolist() == [b"4:4", b"3:3:fox", b"2:2", b"1:1:dog: brown", b"0:0:cat"]


def test_missing_label_file(tmp_path):
    config = text_format.Parse(OUTPUT, ModelConfig())
    with pytest.raises(InvalidArgument, match=r"label file of model 'm'.*labels\.txt"):
        Classifier(config, tmp_path)


@pytest.mark.parametrize("filename", ["/etc/hostname", "../labels.txt", "a/../../labels.txt"])
def test_a_label_file_outside_the_folder(tmp_path, filename):
    config = text_format.Parse(OUTPUT.replace("labels.txt", filename), ModelConfig())
    with pytest.raises(InvalidArgument, match="must stay inside the model's folder"):
        Classifier(config, tmp_path)


async def test_missing_labels_fail_the_load(repository, start_core):
    repository.add("labelled", config=IDENTITY_TENSORS.replace("output {", 'output { label_filename: "no" '))
    core = await start_core()
    (entry,) = core.repository_index()
    assert entry.state is ModelState.UNAVAILABLE and "label file of model 'labelled'" in entry.reason


@pytest.mark.parametrize(("array", "name"), [(["a"], "BYTES"), ([True], "BOOL")])
def test_datatypes_without_order(array, name):
    with pytest.raises(InvalidArgument, match=f"unsupported type '{name}'"):
        classes(np.array(array), 1)


def test_number_of_classes_is_limited() -> None:
    assert len(classes(np.zeros(MAX_CLASSES, np.float32), 1)) == 1
    with pytest.raises(InvalidArgument, match="classification output tensor too large"):
        classes(np.zeros(MAX_CLASSES + 1, np.float32), 1)
