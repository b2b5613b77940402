"""Main program of a child process: runs one instance of a model, controlled by messages from the server."""

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
from neso.backends.python.model_instance import ModelInstance, WorkItem, WorkQueue
from neso.backends.python.model_module import ModelCode, load_model_class, model_folder
from neso.backends.python.pb_utils import complete_config
from neso.backends.python.process.codec import ServerLogHandler, pack_error
from neso.backends.python.process.messages import (
    AutoComplete,
    AutoCompleted,
    Cancel,
    CheckReady,
    Execute,
    Executed,
    Finalized,
    Hello,
    Initialize,
    Message,
    Pause,
    Reply,
    Reschedule,
    Respond,
    ResponseData,
    Resume,
    Started,
    Stop,
    TraceData,
    WorkDone,
)
from neso.backends.python.process.remote_server import ChildChannel, RemoteServer
from neso.backends.python.response import ModelOutputs
from neso.server.backlog import OVERFLOW_WAIT, is_in_event_loop
from neso.server.errors import InternalError
from neso.server.inference_request import InferenceRequest
from neso.server.inference_response import InferenceResponse
from neso.server.statistics import Timeline
from neso.server.tensor import DataType

_PR_SET_PDEATHSIG = 1


def main(connection: int, from_server: int, to_server: int) -> None:
    """Run an instance, or auto-complete a configuration, depending on the first message."""
    _exit_with_parent()
    # Ctrl-C is sent to the whole process group, but the server ends its models itself. SIG_IGN would be inherited by
    # programs that the model starts.
    signal.signal(signal.SIGINT, lambda *_: None)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    channel = ChildChannel(socket.socket(fileno=connection), from_server, to_server)
    channel.send(Hello())
    first = channel.receive_first()
    if isinstance(first, Initialize | AutoComplete):
        # As in Triton. Imports in the model's files do not need it, but those by libraries do.
        sys.path += [str(Path(first.file).parent), str(Path(first.folder).parent)]
    if isinstance(first, Initialize):
        _log_to(channel, first.log_level)
        Child(channel, first).run()
    elif isinstance(first, AutoComplete):
        _log_to(channel, first.log_level)
        channel.send(_auto_complete(first))
    sys.stdout.flush()


class Child:
    """Runs the instance in the main thread and receives messages in another thread."""

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
        code = ModelCode(Path(first.file), Path(first.folder))
        self._instance = ModelInstance(code, first.args, outputs, self._work, self._server)
        self._instance.started.add_done_callback(self._started)

    def run(self) -> None:
        """Run until the server sends `Stop`, or the model fails to initialize."""
        threading.Thread(target=self._listen, name="server", daemon=True).start()
        self._instance.run()
        self._channel.send(Finalized())

    def _listen(self) -> None:
        try:
            for message in self._channel:
                self._handle(message)
        except BaseException:
            traceback.print_exc()
            os._exit(1)  # messages from the server can no longer be handled
        os._exit(0)  # the server has closed the connection

    def _handle(self, message: Message) -> None:
        match message:
            case Execute():
                logging.getLogger().setLevel(message.log_level)
                self._work.put(self._make_work(message))
            case Cancel(number):
                if (stream := self._streams.get(number)) is not None:
                    stream.request.cancel()
                    stream.room.set()
            case Pause(number):
                if (stream := self._streams.get(number)) is not None and not stream.request.cancelled:
                    stream.room.clear()
            case Resume(number):
                if (stream := self._streams.get(number)) is not None:
                    stream.room.set()
            case CheckReady(query):
                self._instance.check_ready().add_done_callback(
                    lambda result: self._channel.send(Reply(query, result.result()))
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

    def _make_work(self, message: Execute) -> WorkItem:
        streams = []
        for number, data in message.requests:
            stream = ChildStream(number, self._channel.codec.unpack_request(data), data.trace)
            self._streams[number] = stream
            streams.append(stream)
        return WorkItem(
            streams,
            lambda timeline: self._executed(message.work, timeline),
            lambda: self._work_done(message.work),
        )

    def _executed(self, work: int, timeline: Timeline) -> None:
        executed = Executed(work, timeline.input_end, timeline.output_start)
        if self._decoupled:
            self._channel.send(executed)
        else:
            # Only responses follow until `_work_done`: send them all at once.
            self._finishing = True
            self._channel.send_later(executed)

    def _work_done(self, work: int) -> None:
        self._finishing = False
        self._channel.send(WorkDone(work))

    def _reschedule(self, stream: ChildStream) -> None:
        self._streams.pop(stream.number, None)
        send = self._channel.send_later if self._finishing else self._channel.send
        send(Reschedule(stream.number))

    def _respond(self, stream: ChildStream, response: InferenceResponse) -> None:
        if response.final:
            self._streams.pop(stream.number, None)
        else:
            stream.wait_for_room()
        try:
            data = self._channel.codec.pack_response(response)
        except Exception as error:  # e.g. out of shared memory
            failure = InternalError(f"the response cannot be passed to the server: {describe(error)}")
            data = ResponseData((), {}, pack_error(failure), response.final, response.created_ns)
        send = self._channel.send_later if self._finishing else self._channel.send
        send(Respond(stream.number, data, stream.timeline.input_end, stream.timeline.output_start))


class ChildStream:
    """A request in flight, identified by a number in messages. Implements `RequestStream`."""

    def __init__(self, number: int, request: InferenceRequest, trace: TraceData | None) -> None:
        self.number = number
        self.request = request
        self.timeline = Timeline()
        self.trace = trace
        self.room = threading.Event()  # cleared while the client reads too slowly
        self.room.set()

    def wait_for_room(self) -> None:
        """Wait while the client reads too slowly; an event loop in this thread waits a bounded time."""
        if not self.room.is_set() and not self.room.wait(OVERFLOW_WAIT if is_in_event_loop() else None):
            self.room.set()  # the server cancels the request if the client does not read on


def _auto_complete(message: AutoComplete) -> AutoCompleted:
    try:
        code = ModelCode(Path(message.file), Path(message.folder))
        model_class = load_model_class(code, message.config["name"])
        with model_folder(code.folder):
            return AutoCompleted(complete_config(message.config, model_class), None)
    except Exception as error:
        logging.getLogger(__name__).debug("auto_complete_config failed", exc_info=error)
        return AutoCompleted(None, describe(error))


def _log_to(channel: ChildChannel, level: int) -> None:
    logging.basicConfig(level=level, format="%(message)s", handlers=[ServerLogHandler(channel.send)])


def _exit_with_parent() -> None:
    """Let the kernel kill this process when the server dies, even if the model is blocked."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
