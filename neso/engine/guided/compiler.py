"""Compiles grammars in background threads."""

from __future__ import annotations

import logging
import queue
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
from llguidance import LLTokenizer

from neso.engine.guided.grammar import GrammarError, clean_message, grammar_text
from neso.engine.guided.grammar_matcher import CompiledGrammar, make_matcher
from neso.engine.guided.grammar_sandbox import GrammarSandbox
from neso.engine.guided.token_table import TokenTable
from neso.engine.text.tokenizer import Tokenizer
from neso.generation import GuidedDecoding

logger = logging.getLogger(__name__)

COMPILE_STACK = 64 << 20
"""Stack size of a compiler thread in bytes; grammars are parsed recursively."""
NUM_THREADS = 2
MAX_CACHED = 256
MAX_PENDING = 512
ERROR_TTL = 60.0
"""Seconds after which a failed grammar is compiled again, because the failure may have been caused by load."""


@dataclass(slots=True, eq=False)
class Compilation:
    """Compilation of a grammar; `result` is available when `done` is set."""

    guided: GuidedDecoding
    done: threading.Event = field(default_factory=threading.Event)
    result: CompiledGrammar | GrammarError | None = None
    finished_at: float = 0.0

    def finish(self, result: CompiledGrammar | GrammarError) -> None:
        self.result, self.finished_at = result, time.monotonic()
        self.done.set()

    def failed_before(self, moment: float) -> bool:
        """Whether the compilation failed before a time of the monotonic clock."""
        return isinstance(self.result, GrammarError) and self.finished_at < moment


class GrammarCompiler:
    """Compiles and caches grammars of one model. Errors are cached as well.

    Each grammar is first checked in a separate process (`GrammarSandbox`). Nothing is loaded before the first request.
    """

    def __init__(self, load_tokenizer: Callable[[], Tokenizer], vocab_size: int, timeout: float) -> None:
        """`vocab_size`: width of the logits. `timeout`: seconds for each grammar."""
        self._cache: OrderedDict[tuple[Any, ...], Compilation] = OrderedDict()
        self._pool = _CompilerPool(load_tokenizer, vocab_size, timeout)
        weakref.finalize(self, self._pool.close)

    def compile(self, guided: GuidedDecoding) -> Compilation:
        """Return the compilation of a grammar, which may be new, running or done. Does not wait.

        Raises `GrammarError` if too many compilations are waiting.
        """
        # The key contains the grammar, but not the name of the request field.
        key = tuple(v for n, v in msgspec.structs.asdict(guided).items() if n != "source_field")
        known = self._cache.get(key)
        if known is not None and not known.failed_before(time.monotonic() - ERROR_TTL):
            self._cache.move_to_end(key)
            return known
        if self._pool.num_pending >= MAX_PENDING:
            raise GrammarError(f"{MAX_PENDING} grammars are waiting to be compiled already")
        compilation = self._cache[key] = Compilation(guided)
        if len(self._cache) > MAX_CACHED:
            self._cache.popitem(last=False)
        self._pool.add(compilation)
        return compilation

    def wait(self, timeout: float) -> None:
        """Wait for the end of a compilation, at most `timeout` seconds."""
        self._pool.wait(timeout)


class _CompilerPool:
    """Compiler threads and their queue. It does not reference the compiler, so the compiler's finalizer can stop it."""

    def __init__(self, load_tokenizer: Callable[[], Tokenizer], vocab_size: int, timeout: float) -> None:
        self._load_tokenizer = load_tokenizer
        self._vocab_size = vocab_size
        self._timeout = timeout
        self._queue: queue.SimpleQueue[Compilation | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._tokens: _ModelTokens | None = None
        self._num_threads = 0
        self._idle: set[int] = set()
        self._some_done = threading.Event()
        self._closed = False

    @property
    def num_pending(self) -> int:
        return self._queue.qsize()

    def add(self, compilation: Compilation) -> None:
        self._queue.put(compilation)
        if self._num_threads < NUM_THREADS and len(self._idle) < self._queue.qsize():
            self._num_threads += 1
            _start_thread(self._run, f"grammar-compiler-{self._num_threads}")

    def wait(self, timeout: float) -> None:
        if self._some_done.wait(timeout):
            self._some_done.clear()

    def close(self) -> None:
        """Stop the threads after their current compilation."""
        self._closed = True
        for _ in range(self._num_threads):
            self._queue.put(None)

    def _run(self) -> None:
        sandbox: GrammarSandbox | None = None
        try:
            while True:
                self._idle.add(threading.get_ident())
                compilation = self._queue.get()
                self._idle.discard(threading.get_ident())
                if compilation is None or self._closed:
                    return
                try:
                    tokens = self._get_tokens()
                    sandbox = sandbox or GrammarSandbox(tokens.table, self._timeout)
                    compilation.finish(tokens.compile(compilation.guided, sandbox))
                except GrammarError as error:
                    compilation.finish(error)
                except BaseException as error:  # a panic in the library is not an Exception
                    logger.error("compiling a grammar failed", exc_info=error)
                    compilation.finish(GrammarError(f"cannot be compiled: {error}"))
                self._some_done.set()
        finally:
            if sandbox is not None:
                sandbox.close()

    def _get_tokens(self) -> _ModelTokens:
        with self._lock:
            if self._tokens is None:
                self._tokens = _ModelTokens.make(self._load_tokenizer(), self._vocab_size)
            return self._tokens


@dataclass(frozen=True, slots=True)
class _ModelTokens:
    """Data of a model that is needed to compile grammars."""

    table: TokenTable
    special_tokens: dict[str, int]
    tokenizer: LLTokenizer

    @classmethod
    def make(cls, tokenizer: Tokenizer, vocab_size: int) -> _ModelTokens:
        table = TokenTable.of(tokenizer, vocab_size)
        return cls(table, table.special_tokens(), table.ll_tokenizer())

    def compile(self, guided: GuidedDecoding, sandbox: GrammarSandbox) -> CompiledGrammar:
        """Compile a grammar. Raises `GrammarError`."""
        grammar = grammar_text(guided, self.special_tokens)
        try:
            sandbox.check(grammar)
            matcher, error = make_matcher(self.tokenizer, grammar)
            if error:
                raise GrammarError(error)
        except GrammarError as error:
            raise GrammarError(clean_message(guided.kind, str(error))) from None
        return CompiledGrammar(matcher, len(self.table.pieces))


def _start_thread(target: Callable[[], None], name: str) -> None:
    # The stack size applies to all threads created from now on, so it is reset at once.
    before = threading.stack_size(COMPILE_STACK)
    try:
        threading.Thread(target=target, name=name, daemon=True).start()
    finally:
        threading.stack_size(before)
