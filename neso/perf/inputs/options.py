"""Options of the inputs, with their flags. Names and aliases are those of genai-perf and aiperf."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from neso.flags import SWITCH, Flag, choice, integer, number

_COUNT = integer(1)
_SIZE = integer(0)
_AMOUNT = number(0)
_FILES = "Input files and datasets"

FILE_TYPES = (
    "auto",
    "single_turn",
    "multi_turn",
    "random_pool",
    "payload",
    "mooncake_trace",
    "azure_trace",
    "burst_gpt_trace",
)


@dataclass(frozen=True)
class InputOptions:
    """Content of the requests."""

    tokenizer: Annotated[
        str,
        Flag(
            "tokenizer",
            "Tokenizer that counts tokens: directory, tokenizer.json, GGUF file, or Hugging Face name.",
            default_text="that of the model, else of neso-pilot",
        ),
    ] = ""
    tokenizer_revision: Annotated[
        str | None, Flag("tokenizer-revision", "Revision of a Hugging Face tokenizer.")
    ] = None
    input_tokens_mean: Annotated[
        float,
        Flag(
            "synthetic-input-tokens-mean",
            "Mean length of synthetic prompts, in tokens.",
            _AMOUNT,
            aliases=("isl", "prompt-input-tokens-mean"),
        ),
    ] = 550
    input_tokens_stddev: Annotated[
        float,
        Flag(
            "synthetic-input-tokens-stddev",
            "Standard deviation of the length of synthetic prompts.",
            _AMOUNT,
            aliases=("isl-stddev", "prompt-input-tokens-stddev"),
        ),
    ] = 0
    output_tokens_mean: Annotated[
        float | None,
        Flag(
            "output-tokens-mean",
            "Mean of the requested output length, in tokens.",
            _AMOUNT,
            aliases=("osl", "prompt-output-tokens-mean"),
            default_text="the server decides",
        ),
    ] = None
    output_tokens_stddev: Annotated[
        float,
        Flag(
            "output-tokens-stddev",
            "Standard deviation of the requested output length.",
            _AMOUNT,
            aliases=("osl-stddev", "prompt-output-tokens-stddev"),
        ),
    ] = 0
    output_tokens_deterministic: Annotated[
        bool,
        Flag("output-tokens-mean-deterministic", "Also request the output length as a minimum.", SWITCH),
    ] = False
    seq_dist: Annotated[
        str | None,
        Flag(
            "seq-dist",
            "Mix of lengths: ISL,OSL:PERCENT;…, where a length may be MEAN|STDDEV.",
            aliases=("sequence-distribution",),
        ),
    ] = None
    random_range_ratio: Annotated[
        float,
        Flag(
            "random-range-ratio", "Lengths are uniform in mean ± ratio · mean, for a ratio up to 1.", _AMOUNT
        ),
    ] = 0
    apply_chat_template: Annotated[
        bool,
        Flag(
            "apply-chat-template",
            "Count the tokens of the chat template, and BOS, as part of the prompt length.",
            SWITCH,
        ),
    ] = False
    num_prefix_prompts: Annotated[
        int,
        Flag(
            "num-prefix-prompts",
            "Number of prefixes. Each prompt starts with one of them.",
            _SIZE,
            aliases=("prefix-prompt-pool-size", "prompt-prefix-pool-size"),
        ),
    ] = 0
    prefix_prompt_length: Annotated[
        int,
        Flag(
            "prefix-prompt-length",
            "Length of a prefix, in tokens, added to the prompt length.",
            _SIZE,
            aliases=("prompt-prefix-length",),
        ),
    ] = 0
    shared_system_prompt_length: Annotated[
        int,
        Flag(
            "shared-system-prompt-length",
            "Length of a system prompt that all requests share, in tokens.",
            _SIZE,
        ),
    ] = 0
    user_context_prompt_length: Annotated[
        int,
        Flag(
            "user-context-prompt-length",
            "Length of the text that starts each session, in tokens; each session has its own text.",
            _SIZE,
        ),
    ] = 0
    system_prompt: Annotated[str, Flag("system-prompt", "System prompt of all requests.")] = ""
    system_prompt_file: Annotated[
        str, Flag("system-prompt-file", "File with the system prompt of all requests.")
    ] = ""
    num_entries: Annotated[
        int,
        Flag(
            "num-dataset-entries",
            "Number of different requests; a longer run repeats them.",
            _COUNT,
            aliases=("num-prompts",),
        ),
    ] = 100
    random_seed: Annotated[int, Flag("random-seed", "Seed of all random choices of the inputs.", _SIZE)] = 0

    input_file: Annotated[
        str | None,
        Flag(
            "input-file",
            "JSON lines or CSV file with requests or a trace, or a folder of .jsonl files.",
            metavar="PATH",
            topic=_FILES,
        ),
    ] = None
    input_file_type: Annotated[
        str,
        Flag(
            "custom-dataset-type",
            "Format of the input file.",
            choice(*FILE_TYPES),
            aliases=("input-file-type",),
            topic=_FILES,
        ),
    ] = "auto"
    input_dataset: Annotated[
        str | None,
        Flag(
            "input-dataset",
            "Dataset: openorca, cnn_dailymail, or any Hugging Face dataset by name.",
            aliases=("public-dataset",),
            topic=_FILES,
        ),
    ] = None
    dataset_subset: Annotated[
        str | None,
        Flag(
            "dataset-subset",
            "Subset (configuration) of a Hugging Face dataset.",
            aliases=("hf-subset",),
            topic=_FILES,
        ),
    ] = None
    dataset_split: Annotated[
        str | None,
        Flag(
            "dataset-split",
            "Split of a Hugging Face dataset.",
            aliases=("hf-split",),
            default_text="train, else the first",
            topic=_FILES,
        ),
    ] = None
    dataset_prompt_column: Annotated[
        str | None,
        Flag(
            "dataset-prompt-column",
            "Column with the prompt of a Hugging Face dataset.",
            default_text="the first of prompt, question, instruction, text, …",
            topic=_FILES,
        ),
    ] = None
    dataset_system_column: Annotated[
        str | None,
        Flag("dataset-system-column", "Column with the system prompt.", topic=_FILES),
    ] = None
    dataset_output_column: Annotated[
        str | None,
        Flag(
            "dataset-output-column",
            "Column with the expected output; its length in tokens is the requested output length.",
            topic=_FILES,
        ),
    ] = None
    sampling_strategy: Annotated[
        str,
        Flag(
            "dataset-sampling-strategy",
            "Order of the entries of a file or dataset. shuffle takes each once, random draws with repetition.",
            choice("sequential", "shuffle", "random"),
            topic=_FILES,
        ),
    ] = "sequential"
    replay_speedup: Annotated[
        float,
        Flag(
            "replay-speedup",
            "Divide the timestamps and delays of a trace by this factor.",
            number(1e-6),
            topic=_FILES,
        ),
    ] = 1.0
    schedule_start_ms: Annotated[
        float | None,
        Flag(
            "fixed-schedule-start-offset",
            "Skip requests of a trace before this timestamp, in milliseconds.",
            _AMOUNT,
            topic=_FILES,
        ),
    ] = None
    schedule_end_ms: Annotated[
        float | None,
        Flag(
            "fixed-schedule-end-offset",
            "Skip requests of a trace after this timestamp, in milliseconds.",
            _AMOUNT,
            topic=_FILES,
        ),
    ] = None
    trace_block_size: Annotated[
        int,
        Flag(
            "trace-block-size",
            "Tokens of the block that a hash id of a trace stands for.",
            _COUNT,
            aliases=("isl-block-size",),
            topic=_FILES,
        ),
    ] = 512

    num_sessions: Annotated[
        int | None,
        Flag(
            "num-sessions",
            "Number of different sessions, for sessions of several turns.",
            _COUNT,
            aliases=("conversation-num", "num-conversations"),
            default_text="the number of dataset entries",
            topic="Sessions",
        ),
    ] = None
    session_turns_mean: Annotated[
        float,
        Flag(
            "session-turns-mean",
            "Mean number of turns of a session.",
            number(1),
            aliases=("conversation-turn-mean",),
            topic="Sessions",
        ),
    ] = 1
    session_turns_stddev: Annotated[
        float,
        Flag(
            "session-turns-stddev",
            "Standard deviation of the number of turns.",
            _AMOUNT,
            aliases=("conversation-turn-stddev",),
            topic="Sessions",
        ),
    ] = 0
    session_turn_delay_mean: Annotated[
        float,
        Flag(
            "session-turn-delay-mean",
            "Mean delay before each further turn, in milliseconds.",
            _AMOUNT,
            aliases=("conversation-turn-delay-mean",),
            topic="Sessions",
        ),
    ] = 0
    session_turn_delay_stddev: Annotated[
        float,
        Flag(
            "session-turn-delay-stddev",
            "Standard deviation of the delay, in milliseconds.",
            _AMOUNT,
            aliases=("conversation-turn-delay-stddev",),
            topic="Sessions",
        ),
    ] = 0
    session_delay_ratio: Annotated[
        float,
        Flag(
            "session-delay-ratio",
            "Factor of all delays between turns, including those of files.",
            _AMOUNT,
            aliases=("conversation-turn-delay-ratio",),
            topic="Sessions",
        ),
    ] = 1.0

    extra_inputs: Annotated[
        tuple[str, ...],
        Flag("extra-inputs", "NAME:VALUE, or a JSON object, merged into the body of each request."),
    ] = ()
    batch_size_text: Annotated[
        int,
        Flag(
            "batch-size-text",
            "Number of texts of each embeddings request.",
            _COUNT,
            aliases=("batch-size", "prompt-batch-size"),
        ),
    ] = 1
    rankings_passages_mean: Annotated[
        float,
        Flag("rankings-passages-mean", "Mean number of passages of a ranking request.", number(1),
             topic="Rankings"),
    ] = 10  # fmt: skip
    rankings_passages_stddev: Annotated[
        float,
        Flag("rankings-passages-stddev", "Standard deviation of the number of passages.", _AMOUNT,
             topic="Rankings"),
    ] = 0  # fmt: skip
    rankings_passage_tokens_mean: Annotated[
        float,
        Flag("rankings-passages-prompt-token-mean", "Mean length of a passage, in tokens.", number(1),
             topic="Rankings"),
    ] = 128  # fmt: skip
    rankings_passage_tokens_stddev: Annotated[
        float,
        Flag("rankings-passages-prompt-token-stddev", "Standard deviation of the length of a passage.",
             _AMOUNT, topic="Rankings"),
    ] = 0  # fmt: skip
    rankings_query_tokens_mean: Annotated[
        float,
        Flag("rankings-query-prompt-token-mean", "Mean length of a query, in tokens.", number(1),
             topic="Rankings"),
    ] = 32  # fmt: skip
    rankings_query_tokens_stddev: Annotated[
        float,
        Flag("rankings-query-prompt-token-stddev", "Standard deviation of the length of a query.", _AMOUNT,
             topic="Rankings"),
    ] = 0  # fmt: skip

    batch_size_image: Annotated[
        int,
        Flag(
            "batch-size-image",
            "Number of synthetic images of each request.",
            _SIZE,
            aliases=("image-batch-size",),
            default_text="1 for endpoint type vision, else 0",
            topic="Images",
        ),
    ] = 0
    image_width_mean: Annotated[
        float,
        Flag("image-width-mean", "Mean width of synthetic images, in pixels.", number(1), topic="Images"),
    ] = 256
    image_width_stddev: Annotated[
        float, Flag("image-width-stddev", "Standard deviation of the width.", _AMOUNT, topic="Images")
    ] = 0
    image_height_mean: Annotated[
        float,
        Flag("image-height-mean", "Mean height of synthetic images, in pixels.", number(1), topic="Images"),
    ] = 256
    image_height_stddev: Annotated[
        float, Flag("image-height-stddev", "Standard deviation of the height.", _AMOUNT, topic="Images")
    ] = 0
    image_format: Annotated[
        str,
        Flag("image-format", "Format of synthetic images.", choice("png", "jpeg", "random"), topic="Images"),
    ] = "png"

    tensor_shapes: Annotated[
        tuple[str, ...],
        Flag("shape", "NAME:D1,D2,…: shape of an input tensor with variable dimensions.", topic="Tensors"),
    ] = ()
    tensor_data: Annotated[
        str,
        Flag(
            "input-data",
            "Values of input tensors: random, zero, or a JSON file in perf_analyzer's format.",
            topic="Tensors",
        ),
    ] = "random"
    shared_memory: Annotated[
        str,
        Flag(
            "shared-memory",
            "Where the tensors of requests and responses are: none (in the messages) or system (shared memory; for "
            "tensor models of a server on the same machine). Responses are written to one place and not read.",
            choice("none", "system"),
            topic="Tensors",
        ),
    ] = "none"
    output_shared_memory_size: Annotated[
        int,
        Flag(
            "output-shared-memory-size",
            "Bytes of shared memory for each output of variable size.",
            _COUNT,
            topic="Tensors",
        ),
    ] = 102_400
    sequence_length: Annotated[
        int,
        Flag(
            "sequence-length",
            "Requests of each sequence, for tensor models with sequence batching.",
            _COUNT,
            topic="Tensors",
        ),
    ] = 20
    string_length: Annotated[
        int, Flag("string-length", "Length of random strings of input tensors.", _COUNT, topic="Tensors")
    ] = 128
    string_data: Annotated[
        str | None, Flag("string-data", "Value of string tensors instead of random ones.", topic="Tensors")
    ] = None
