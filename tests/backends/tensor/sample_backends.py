"""Example backends as written by a third party."""

from __future__ import annotations

import threading
import time

import numpy as np

from neso.backends.tensor import TensorBackend, TensorModel
from neso.server.errors import InvalidArgument

threads: set[str] = set()
unloaded: list[str] = []
gate = threading.Event()


class Sample(TensorModel):
    """OUT is IN times the parameter `factor`; `fault` selects an error."""

    def load(self):
        self.factor = self.parameters.integer("factor", 2)
        self.fault = self.parameters.get("fault", "")
        if self.fault == "load":
            raise StopIteration("not today")
        if self.fault == "load with a message":
            raise InvalidArgument("the file is broken")

    def run(self, inputs):
        threads.add(threading.current_thread().name)
        out = inputs["IN"] * np.float32(self.factor) + inputs.get("EXTRA", np.float32(0))
        if self.fault == "raise" and 13 in inputs["IN"]:
            raise ValueError("unlucky")
        if self.fault == "exit" and 13 in inputs["IN"]:
            raise SystemExit(1)
        if self.fault == "no output":
            return {"OTHER": out}
        if self.fault == "dtype":
            return {"OUT": out.astype(np.float64)}
        if self.fault == "complex":
            return {"OUT": out.astype(np.complex64)}
        if self.fault == "rows":
            return {"OUT": np.zeros(7, np.float32)}
        if self.fault == "list":
            return [out]
        if self.fault == "wait":
            assert gate.wait(60)
        if self.fault == "slow":
            time.sleep(0.05)
        return {"OUT": out, "NOT_DECLARED": out}

    def unload(self):
        unloaded.append(self.instance.name)


class SampleBackend(TensorBackend):
    model_class = Sample


class NoBackend:
    pass
