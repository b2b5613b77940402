"""Commands of rank 0 arrive at other ranks as they were sent."""

from dataclasses import fields

import ml_dtypes
import numpy as np

from neso.engine.addons.registry import PLAN_PARTS
from neso.engine.core.step_plan import StepPlan
from neso.engine.lora.adapter import LoraAdapter, LoraPlan, LowRank
from neso.engine.parallel.plan_codec import PlanCodec, Stop, pack_adapter, unpack_adapter
from neso.engine.spec_decode.draft import DraftTreePlan


def make_plan() -> StepPlan:
    int32 = np.int32
    tree = DraftTreePlan(
        slot_copies=np.array([[0, 3, 2]], int32),
        depths=np.array([0, 1, 1], int32),
        masks=np.array([1, 3, 5], np.uint64),
    )
    return (
        StepPlan(
            step=7,
            sequence_ids=np.array([3], int32),
            token_ids=np.array([5, 6, 7], int32),
            query_start=np.array([0, 3], int32),
            num_computed=np.array([4], int32),
            block_tables=np.array([[2, 9, -1]], int32),
            block_copies=np.empty((0, 2), int32),
            logits_rows=np.array([2, 2], int32),
        )
        .with_part(tree)
        .with_part(LoraPlan(np.array([-1], int32)))
    )


def assert_same_arrays(left: object, right: object, names: list[str]) -> None:
    for name in names:
        one, other = getattr(left, name), getattr(right, name)
        assert one.dtype == other.dtype and one.shape == other.shape and (one == other).all(), name


def test_plan_with_parts_arrives_unchanged():
    plan, codec = make_plan(), PlanCodec(PLAN_PARTS)
    found = codec.unpack_plan(codec.decode(codec.encode(codec.pack_plan(plan))))
    assert found.step == plan.step and found.parts.keys() == plan.parts.keys()
    assert_same_arrays(plan, found, [f.name for f in fields(plan) if f.name not in ("step", "parts")])
    for kind, part in plan.parts.items():
        assert_same_arrays(part, found.parts[kind], [f.name for f in fields(part)])


def test_adapter_arrives_unchanged():
    change = LowRank(np.ones((2, 3), ml_dtypes.bfloat16), np.arange(8, dtype=np.float32).reshape(4, 2), 0.5)
    codec = PlanCodec(PLAN_PARTS)
    adapter = LoraAdapter(({"query": change}, {}))
    command = codec.decode(codec.encode(pack_adapter(4, adapter)))
    found = unpack_adapter(command)
    assert command.slot == 4 and [layer.keys() for layer in found.layers] == [{"query"}, set()]
    got = found.layers[0]["query"]
    assert got.scale == 0.5
    assert_same_arrays(change, got, ["a", "b"])
    assert unpack_adapter(codec.decode(codec.encode(pack_adapter(4, None)))) is None


def test_stop_has_no_content():
    codec = PlanCodec(PLAN_PARTS)
    assert codec.decode(codec.encode(Stop())) == Stop()
