"""Generates tokens with the model tensorrt_llm; the client tokenizes.

usage: python inflight_batcher_llm_client.py --tokenizer-dir CHECKPOINT --request-output-len 200 [--streaming]
"""

from __future__ import annotations

import argparse
import csv
import threading
import time
from pathlib import Path

import numpy as np
from grpc_requests import Arrays, Responses, lora_arrays, row, tensors
from tritonclient.grpc import InferRequestedOutput
from tritonclient.utils import InferenceServerException

from neso import Tokenizer, load_tokenizer

TEXT = "Born in north-east France, Soyer trained as a"
LOGITS = ("context_logits", "generation_logits")
PERF_METRICS = (
    *("kv_cache_alloc_new_blocks", "kv_cache_reused_blocks", "kv_cache_alloc_total_blocks"),
    *("arrival_time_ns", "first_scheduled_time_ns", "first_token_time_ns", "last_token_time_ns"),
    *("acceptance_rate", "total_accepted_draft_tokens", "total_draft_tokens"),
)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("-u", "--url", default="localhost:8001", help="gRPC address")
    parser.add_argument("--model-name", default="tensorrt_llm")
    parser.add_argument("--request-id", default="")
    what = parser.add_argument_group("prompt")
    what.add_argument("--text", default=TEXT)
    what.add_argument("--tokenizer-dir", help="checkpoint, or folder with a tokenizer.json")
    what.add_argument("--tokenizer-type", default="auto", help="no effect: the type is detected")
    what.add_argument("--input-tokens-csv", type=Path, help="token ids instead of --text")
    what.add_argument("--draft-tokens-csv", type=Path, help="draft token ids")
    what.add_argument(
        "--prompt-embedding-table-path", type=Path, help="virtual tokens, .npy [tasks, rows, hidden]"
    )
    what.add_argument("--prompt-task-id", type=int, default=0)
    what.add_argument("--lora-path", help="a folder with model.lora_weights.npy and model.lora_config.npy")
    what.add_argument("--lora-task-id", type=int)
    how = parser.add_argument_group("generation")
    how.add_argument("--request-output-len", type=int, default=16)
    how.add_argument("--streaming", action="store_true")
    how.add_argument("--beam-width", type=int, default=1)
    how.add_argument("--num-return-sequences", type=int)
    for name in ("temperature", "repetition-penalty", "presence-penalty", "frequency-penalty", "top-p"):
        how.add_argument(f"--{name}", type=float)
    how.add_argument("--top-k", type=int, default=1)
    how.add_argument("--end-id", type=int, help="default: the tokenizer's")
    how.add_argument("--pad-id", type=int)
    how.add_argument("--stop-after-ms", type=int, default=0, help="stop generation after this time")
    how.add_argument(
        "--stop-via-request-cancel", action="store_true", help="stop by cancelling instead of a stop request"
    )
    back = parser.add_argument_group("outputs")
    for name in ("log-probs", "context-logits", "generation-logits", "perf-metrics"):
        back.add_argument(f"--return-{name}", action="store_true")
    back.add_argument("--exclude-input-in-output", action="store_true")
    back.add_argument("--requested-outputs", nargs="+", default=[])
    back.add_argument("--output-tokens-csv", type=Path, help="expected tokens, for --check-output")
    back.add_argument("--check-output", action="store_true")
    return parser.parse_args()


def read_csv(path: Path) -> list[int]:
    with path.open() as file:
        return [int(value) for value in next(csv.reader(file))]


def request_inputs(args: argparse.Namespace, ids: list[int], tokenizer: Tokenizer | None) -> Arrays:
    """Return the input arrays by tensor name; None for omitted tensors."""
    end_id, pad_id = args.end_id, args.pad_id
    if tokenizer is not None and end_id is None and tokenizer.eos_token_ids:
        end_id = tokenizer.eos_token_ids[0]
    if tokenizer is not None and pad_id is None:
        pad_id = end_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    table = None
    if args.prompt_embedding_table_path:
        table = np.load(args.prompt_embedding_table_path)[args.prompt_task_id][None].astype(np.float16)
    values = {
        "input_ids": (ids, np.int32),
        "input_lengths": (len(ids), np.int32),
        "request_output_len": (args.request_output_len, np.int32),
        "streaming": (args.streaming, bool),
        "end_id": (end_id, np.int32),
        "pad_id": (pad_id, np.int32),
        "beam_width": (args.beam_width, np.int32),
        "num_return_sequences": (args.num_return_sequences, np.int32),
        "temperature": (args.temperature, np.float32),
        "runtime_top_k": (args.top_k, np.int32),
        "runtime_top_p": (args.top_p, np.float32),
        "repetition_penalty": (args.repetition_penalty, np.float32),
        "presence_penalty": (args.presence_penalty, np.float32),
        "frequency_penalty": (args.frequency_penalty, np.float32),
        "draft_input_ids": (read_csv(args.draft_tokens_csv) if args.draft_tokens_csv else None, np.int32),
        "prompt_vocab_size": (None if table is None else table.shape[1], np.int32),
        "exclude_input_in_output": (args.exclude_input_in_output or None, bool),
        "return_log_probs": (args.return_log_probs or None, bool),
        "return_context_logits": (args.return_context_logits or None, bool),
        "return_generation_logits": (args.return_generation_logits or None, bool),
        "return_perf_metrics": (args.return_perf_metrics or None, bool),
    }
    arrays = {name: None if value is None else row(value, kind) for name, (value, kind) in values.items()}
    return {**arrays, "prompt_embedding_table": table, **lora_arrays(args.lora_path, args.lora_task_id)}


def stop_later(args: argparse.Namespace, responses: Responses) -> None:
    """Stop the request after a delay, from a thread."""
    stop = {"input_ids": row([0], np.int32), "stop": row(True, bool)}
    stop |= {name: row(1, np.int32) for name in ("input_lengths", "request_output_len")}

    def act() -> None:
        time.sleep(args.stop_after_ms / 1000)
        if args.stop_via_request_cancel:
            responses.cancel()
        else:
            responses.send(tensors(stop), request_id=args.request_id)

    threading.Thread(target=act, daemon=True).start()


def main() -> None:
    args = arguments()
    args.request_id = args.request_id or ("1" if args.stop_after_ms else "")
    tokenizer = load_tokenizer(args.tokenizer_dir) if args.tokenizer_dir else None
    if args.input_tokens_csv:
        ids = read_csv(args.input_tokens_csv)
    elif tokenizer is not None:
        ids = tokenizer.encode(args.text)
    else:
        raise SystemExit("a text needs --tokenizer-dir; or give --input-tokens-csv")
    print("Input sequence: ", ids)

    sequences: dict[int, list[int]] = {}
    arrays: dict[tuple[int, str], list[np.ndarray]] = {}
    outputs = [InferRequestedOutput(name) for name in args.requested_outputs] or None
    given = tensors(request_inputs(args, ids, tokenizer))
    responses = Responses(args.url, args.model_name, given, request_id=args.request_id, outputs=outputs)
    if args.stop_after_ms:
        stop_later(args, responses)
    try:
        for result in responses:
            index = result.as_numpy("sequence_index")
            first = 0 if index is None else index.item()
            lengths = result.as_numpy("sequence_length")[0]
            for beam, (tokens, length) in enumerate(
                zip(result.as_numpy("output_ids")[0], lengths, strict=True)
            ):
                sequences.setdefault(first + beam, []).extend(tokens[:length].tolist())
            for name in ("cum_log_probs", "output_log_probs", *LOGITS, *PERF_METRICS):
                if (array := result.as_numpy(name)) is not None:
                    arrays.setdefault((first, name), []).append(array)
    except InferenceServerException as error:
        if not (args.stop_via_request_cancel and "cancel" in str(error).lower()):
            raise SystemExit(f"Received an error from server: {error}") from None
        print("Request is cancelled")
    else:
        print("Got completed request")

    if tokenizer is not None:
        print("Input:", tokenizer.decode(ids))
    for index, tokens in sorted(sequences.items()):
        new = tokens[len(ids) :] if tokens[: len(ids)] == ids and not args.streaming else tokens
        if tokenizer is not None:
            print(f"Output beam {index}:", tokenizer.decode(new))
        print("Output sequence: ", new)
        if args.check_output:
            expected = read_csv(args.output_tokens_csv) if args.output_tokens_csv else []
            if new != expected:
                raise SystemExit(f"expected {expected}")
    for (_, name), parts in sorted(arrays.items()):
        array = (
            parts[-1]
            if name in ("cum_log_probs", "context_logits", *PERF_METRICS)
            else np.concatenate(parts, 2)
        )
        if name in PERF_METRICS:
            print(f"{name}: {array.item()}")
        else:
            print(f"{name}.shape: {array.shape}\n{name}: {array}")


if __name__ == "__main__":
    main()
