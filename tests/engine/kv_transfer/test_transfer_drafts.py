"""A draft model computes the prompt itself if the model's blocks come from another engine."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from eventually import wait_until
from request_mix import METHODS, Files, Mixed, with_prompt

from neso.engine.core.request import KvExport, KvImport
from neso.engine.spec_decode import draft_model

OPTIONS: dict[str, Any] = {"num_blocks": 64, "block_size": 4, "kv_transfer": True}


@pytest.fixture(scope="module")
def files(checkpoint_factory, tmp_path_factory) -> Files:
    return Files(
        tmp_path_factory.mktemp("drafts"),
        checkpoint_factory("llama"),
        checkpoint_factory("llama", seed=5),
    )


def accepted(engine: Mixed) -> tuple[int, int]:
    drafts = engine.core.stats().drafts
    return drafts.draft_tokens, drafts.accepted_tokens


@pytest.mark.parametrize("at_once", [512, 5])
@pytest.mark.parametrize("method", ["", "other "], ids=["same", "other"])
def test_drafts_are_accepted_as_in_one_engine(files, monkeypatch, method, at_once):
    monkeypatch.setattr(draft_model, "MAX_CATCH_UP_TOKENS", at_once)
    own = files.engine_options({**OPTIONS, **METHODS[f"{method}draft model"]})
    plain, prefill, decode = (Mixed(str(files.same), runner="native", **own) for _ in range(3))
    request = decode.engine_request("r", with_prompt("long", {"ignore_eos": True}))
    results = []
    for engine in (plain, decode):
        outputs: list[Any] = []
        if engine is decode:
            prefill.core.add(request.prefill_only(KvExport("r")))
            source = KvImport(prefill.info.kv_address, "r", 60.0)
            engine.core.add(msgspec.structs.replace(request, kv_import=source))
        else:
            engine.core.add(request)

        def finished(engine: Mixed = engine, outputs: list[Any] = outputs) -> bool:
            prefill.core.step()
            outputs.extend(engine.core.step())
            engine.core.check_integrity()
            return bool(outputs) and outputs[-1].finish_reason is not None

        wait_until(finished)
        results.append([token for output in outputs for token in output.token_ids])
    assert results[0] == results[1]
    assert decode.core.stats().kv_transfer.imported_blocks > 0
    drafted, good = accepted(decode)
    assert drafted > 0
    if not method:
        assert good == drafted  # a draft model without the prompt would guess wrong
    if at_once == 512:
        assert (drafted, good) == accepted(plain)
    for engine in (plain, prefill, decode):
        engine.core.close()
