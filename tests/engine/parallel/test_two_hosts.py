"""Ranks on two hosts that mpiexec starts: TCP only, and the engine's ranks connect to `rank_address`."""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
from pathlib import Path

import pytest
from require_mpi import requires_mpi
from two_hosts import ADDRESSES, TwoHosts, require_two_hosts

from neso.engine.client.llm import LLM
from neso.engine.parallel.handshake import SECRET_VARIABLE
from neso.engine.parallel.launcher import mpi_family, mpiexec_command, own_environment
from neso.generation import SamplingParams

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), requires_mpi]

PORT = 20555
PROMPTS = [[7 + i] * (5 + 9 * i) for i in range(4)]
PROGRAM = """
import asyncio, json, sys
from neso.engine.client.async_engine import AsyncEngine
from neso.engine.config import EngineConfig
from neso.engine.parallel import rank_process
from neso.engine.parallel.launched_rank import launched_rank
from neso.generation import GenerationRequest, SamplingParams

async def main():
    engine = await AsyncEngine.start(EngineConfig.from_options({model!r}, {options!r}))
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    async def one(prompt):
        outputs = [output async for output in engine.generate(GenerationRequest(prompt, params))]
        return [token for output in outputs for delta in output.deltas for token in delta.token_ids]
    tokens = await asyncio.gather(*map(one, {prompts!r}))
    await engine.stop()
    open({result!r}, "w").write(json.dumps(tokens))

if launched_rank().rank:
    sys.exit(rank_process.main({address!r}))
asyncio.run(main())
"""


@pytest.mark.parametrize("size", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_two_hosts_give_the_tokens_of_one(checkpoint_factory, tmp_path: Path, size: str):
    require_two_hosts()
    if mpi_family() != "MPICH":
        pytest.skip("the launcher of this test is MPICH's")
    model, result, program = (
        str(checkpoint_factory("llama")),
        tmp_path / "tokens.json",
        tmp_path / "program.py",
    )
    address = f"{ADDRESSES[0]}:{PORT}"
    options = {size: 2, "rank_address": address, "num_blocks": 64, "skip_tokenizer_init": True}
    program.write_text(
        PROGRAM.format(model=model, options=options, prompts=PROMPTS, result=str(result), address=address)
    )
    hosts = TwoHosts(tmp_path)
    try:
        mpiexec = mpiexec_command(2)[0]
        flags = ["-hosts", ",".join(ADDRESSES), "-n", "2", "-ppn", "1"]
        launcher = ["-launcher", "ssh", "-launcher-exec", str(hosts.launcher)]
        environment = {**own_environment(), "FI_PROVIDER": "tcp", "UCX_TLS": "tcp,self"}
        environment[SECRET_VARIABLE] = secrets.token_hex(16)
        subprocess.run(
            [
                *("ip", "netns", "exec", hosts.names[0]),
                *(mpiexec, *launcher, *flags, "-localhost", ADDRESSES[0], sys.executable, str(program)),
            ],
            env=environment,
            check=True,
            timeout=200,
        )
    finally:
        hosts.close()
    llm = LLM(model, num_blocks=64, skip_tokenizer_init=True)
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    expected = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params, progress=False)]
    assert json.loads(result.read_text()) == [list(tokens) for tokens in expected]
