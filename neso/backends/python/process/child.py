"""The process of one instance of a model: does what the server says until that has gone."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import socket
import sys
import threading
import traceback
from concurrent.futures import Future
from pathlib import Path

from neso.backends.python.errors import describe
from neso.backends.python.model_instance import ModelInstance, Work, WorkQueue
from neso.backends.python.model_module import load_model_class
from neso.backends.python.pb_utils import complete_config
from neso.backends.python.process.codec import ServerLog, pack_error
from neso.backends.python.process.messages import (
    Answer,
    Cancel,
    CheckReady,
    Complete,
    Completed,
    Ended,
    Execute,
    Executed,
    Free,
    Hello,
    Initialize,
    Message,
    Reschedule,
    Respond,
    ResponseData,
    Started,
    Stop,
    TraceData,
)
from neso.backends.python.process.remote_server import ChildChannel, RemoteServer
from neso.backends.python.response import ModelOutputs
from neso.server.errors import InternalError
from neso.server.inference_request import InferenceRequest
from neso.server.inference_response import InferenceResponse
from neso.server.statistics import Timeline
from neso.server.tensor import DataType

_PR_SET_PDEATHSIG = 1


def main(connection: int, from_server: int, to_server: int) -> None:
    """Be an instance, or complete a configuration, as the first message says."""
    _end_with_parent()
    # Ctrl-C reaches the whole process group; the server decides when its models end. (To ignore the signal would have
    # programs that the model starts ignore it too.)
    signal.signal(signal.SIGINT, lambda *_: None)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    channel = ChildChannel(socket.socket(fileno=connection), from_server, to_server)
    channel.send(Hello())
    first = channel.receive_first()
    if isinstance(first, Initialize):
        _log_to(channel, first.log_level)
        Child(channel, first).run()
    elif isinstance(first, Complete):
        _log_to(channel, first.log_level)
        channel.send(_complete(first))
    sys.stdout.flush()


class Child:
    """Runs the instance in this thread, the main one, and what the server says in another."""

    def __init__(self, channel: ChildChannel, first: Initialize) -> None:
        self._channel = channel
        self._work = WorkQueue()
        self._streams: dict[int, ChildStream] = {}
        self._decoupled = first.decoupled
        self._finishing = False
        self._server = RemoteServer(channel)
        outputs = ModelOutputs(
            self._respond,
            first.args["model_instance_name"],
            first.decoupled,
            {name: DataType(datatype) for name, datatype in first.outputs.items()},
            first.states,
            self._reschedule if first.iterative else None,
        )
        self._instance = ModelInstance(Path(first.path), first.args, outputs, self._work, self._server)
        self._instance.started.add_done_callback(self._started)

    def run(self) -> None:
        """Until the server says `Stop`, or the model cannot be initialized."""
        threading.Thread(target=self._listen, name="server", daemon=True).start()
        self._instance.run()
        self._channel.send(Ended())

    def _listen(self) -> None:
        try:
            for message in self._channel:
                self._handle(message)
        except BaseException:
            traceback.print_exc()
            os._exit(1)  # nobody could answer the server any more
        os._exit(0)  # the server has gone

    def _handle(self, message: Message) -> None:
        match message:
            case Execute():
                logging.getLogger().setLevel(message.log_level)
                self._work.put(self._make_work(message))
            case Cancel(number):
                if (stream := self._streams.get(number)) is not None:
                    stream.request.cancel()
            case CheckReady(question):
                self._instance.check_ready().add_done_callback(
                    lambda answer: self._channel.send(Answer(question, answer.result()))
                )
            case Stop():
                self._work.put(None)
            case _:
                self._server.handle(message)

    def _started(self, started: Future[None]) -> None:
        error = started.exception()
        if error is not None:
            logging.getLogger(__name__).error("the model failed to initialize", exc_info=error)
        self._channel.send(Started(None if error is None else describe(error)))

    def _make_work(self, message: Execute) -> Work:
        streams = []
        for number, data in message.requests:
            stream = ChildStream(number, self._channel.exchange.unpack_request(data), data.trace)
            self._streams[number] = stream
            streams.append(stream)
        return Work(
            streams, lambda timeline: self._executed(message.work, timeline), lambda: self._free(message.work)
        )

    def _executed(self, work: int, timeline: Timeline) -> None:
        executed = Executed(work, timeline.input_end, timeline.output_start)
        if self._decoupled:
            self._channel.send(executed)
        else:
            # The responses come next, and nothing else before `_free`.
            self._finishing = True
            self._channel.send_later(executed)

    def _free(self, work: int) -> None:
        self._finishing = False
        self._channel.send(Free(work))

    def _reschedule(self, stream: ChildStream) -> None:
        self._streams.pop(stream.number, None)
        send = self._channel.send_later if self._finishing else self._channel.send
        send(Reschedule(stream.number))

    def _respond(self, stream: ChildStream, response: InferenceResponse) -> None:
        if response.final:
            self._streams.pop(stream.number, None)
        try:
            data = self._channel.exchange.pack_response(response)
        except Exception as error:  # no memory, most likely
            failure = InternalError(f"the response cannot be passed to the server: {describe(error)}")
            data = ResponseData((), {}, pack_error(failure), response.final, response.made)
        send = self._channel.send_later if self._finishing else self._channel.send
        send(Respond(stream.number, data, stream.timeline.input_end, stream.timeline.output_start))


class ChildStream:
    """Stands for a request in flight, which the server knows by its number."""

    def __init__(self, number: int, request: InferenceRequest, trace: TraceData | None) -> None:
        self.number = number
        self.request = request
        self.timeline = Timeline()
        self.trace = trace


def _complete(message: Complete) -> Completed:
    try:
        model_class = load_model_class(Path(message.path), message.config["name"])
        return Completed(complete_config(message.config, model_class), None)
    except Exception as error:
        logging.getLogger(__name__).debug("auto_complete_config failed", exc_info=error)
        return Completed(None, describe(error))


def _log_to(channel: ChildChannel, level: int) -> None:
    logging.basicConfig(level=level, format="%(message)s", handlers=[ServerLog(channel.send)])


def _end_with_parent() -> None:
    """Have the system kill this process when the server dies, whatever the model is doing then."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
