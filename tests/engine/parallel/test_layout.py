"""The place of ranks among tensor-parallel groups and pipeline stages."""

import pytest

from neso.engine.parallel.layout import RankLayout, split_evenly


def test_rank_0_is_on_the_stage_that_computes_the_logits():
    layouts = [RankLayout(rank, 2, 3) for rank in range(6)]
    assert [layout.stage for layout in layouts] == [2, 2, 1, 1, 0, 0]
    assert [layout.tp_rank for layout in layouts] == [0, 1, 0, 1, 0, 1]
    assert layouts[0].is_last_stage and layouts[5].is_first_stage


def test_activations_go_from_the_first_stage_to_the_last():
    rank, path = RankLayout(5, 2, 3), [5]
    while not rank.is_last_stage:
        following = RankLayout(rank.next, 2, 3)
        assert following.previous == rank.rank
        rank = following
        path.append(rank.rank)
    assert path == [5, 3, 1]


def test_tensor_parallel_group_holds_the_ranks_of_a_stage():
    assert list(RankLayout(3, 2, 3).tp_group) == [2, 3]


@pytest.mark.parametrize("parts", [1, 2, 3, 7])
def test_parts_cover_everything_once(parts):
    found = [split_evenly(17, parts, index) for index in range(parts)]
    assert [number for part in found for number in part] == list(range(17))
    assert max(map(len, found)) - min(map(len, found)) <= 1


@pytest.mark.parametrize(("rank", "tensor", "pipeline"), [(2, 2, 1), (-1, 1, 1), (0, 0, 1), (0, 1, 0)])
def test_invalid_ranks_are_refused(rank, tensor, pipeline):
    with pytest.raises(ValueError):
        RankLayout(rank, tensor, pipeline)
