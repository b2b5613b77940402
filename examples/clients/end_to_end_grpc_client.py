"""Generates text with the model ensemble or tensorrt_llm_bls.

usage: python end_to_end_grpc_client.py -p "What is machine learning?" -o 20 [--streaming]
"""

from __future__ import annotations

import argparse
import json

import numpy as np
from grpc_requests import Arrays, Responses, lora_arrays, row, tensors
from tritonclient.utils import InferenceServerException


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("-u", "--url", default="localhost:8001", help="gRPC address")
    parser.add_argument("-v", "--verbose", action="store_true", help="print each response when it arrives")
    parser.add_argument("--model-name", default="ensemble", help="ensemble or tensorrt_llm_bls")
    parser.add_argument("--request-id", default="")
    what = parser.add_argument_group("prompt")
    what.add_argument("-p", "--prompt", required=True, help="a text, or a JSON list of texts")
    what.add_argument("--batch-inputs", action="store_true", help="send several texts as one request")
    what.add_argument("--lora-path", help="a folder with model.lora_weights.npy and model.lora_config.npy")
    what.add_argument("--lora-task-id", type=int)
    how = parser.add_argument_group("generation")
    how.add_argument("-o", "--output-len", type=int, default=100)
    how.add_argument("-S", "--streaming", action="store_true")
    how.add_argument("-b", "--beam-width", type=int, default=1)
    how.add_argument("--num-return-sequences", type=int)
    for name in ("temperature", "repetition-penalty", "presence-penalty", "frequency-penalty", "top-p"):
        how.add_argument(f"--{name}", type=float)
    for name in ("top-k", "seed", "end-id", "pad-id", "num-draft-tokens"):
        how.add_argument(f"--{name}", type=int)
    how.add_argument("--use-draft-logits", action="store_true")
    for name in ("stop-words", "bad-words", "embedding-bias-words"):
        how.add_argument(f"--{name}", nargs="+")
    how.add_argument("--embedding-bias-weights", nargs="+", type=float)
    how.add_argument(
        "--guided-decoding-guide-type", help="json, json_schema, regex, ebnf_grammar or structural_tag"
    )
    how.add_argument("--guided-decoding-guide")
    back = parser.add_argument_group("what comes back")
    for name in ("log-probs", "context-logits", "generation-logits", "perf-metrics"):
        back.add_argument(f"--return-{name}", action="store_true")
    back.add_argument("--exclude-input-in-output", action="store_true")
    back.add_argument(
        "--overwrite-output-text",
        action="store_true",
        help="each response has the whole text so far: accumulate_tokens",
    )
    return parser.parse_args()


def request_inputs(args: argparse.Namespace, prompt: str) -> Arrays:
    """Return the input arrays by tensor name; None for omitted tensors."""
    values = {
        "text_input": (prompt.encode(), object),
        "max_tokens": (args.output_len, np.int32),
        "stream": (args.streaming, bool),
        "beam_width": (args.beam_width, np.int32),
        "num_return_sequences": (args.num_return_sequences, np.int32),
        "temperature": (args.temperature, np.float32),
        "top_k": (args.top_k, np.int32),
        "top_p": (args.top_p, np.float32),
        "repetition_penalty": (args.repetition_penalty, np.float32),
        "presence_penalty": (args.presence_penalty, np.float32),
        "frequency_penalty": (args.frequency_penalty, np.float32),
        "seed": (args.seed, np.uint64),
        "end_id": (args.end_id, np.int32),
        "pad_id": (args.pad_id, np.int32),
        "stop_words": (encoded(args.stop_words), object),
        "bad_words": (encoded(args.bad_words), object),
        "embedding_bias_words": (encoded(args.embedding_bias_words), object),
        "embedding_bias_weights": (args.embedding_bias_weights, np.float32),
        "guided_decoding_guide_type": (encoded(args.guided_decoding_guide_type), object),
        "guided_decoding_guide": (encoded(args.guided_decoding_guide), object),
        "num_draft_tokens": (args.num_draft_tokens, np.int32),
        "use_draft_logits": (args.use_draft_logits or None, bool),
        "exclude_input_in_output": (args.exclude_input_in_output or None, bool),
        "return_log_probs": (args.return_log_probs or None, bool),
        "return_context_logits": (args.return_context_logits or None, bool),
        "return_generation_logits": (args.return_generation_logits or None, bool),
        "return_perf_metrics": (args.return_perf_metrics or None, bool),
    }
    arrays = {name: None if value is None else row(value, kind) for name, (value, kind) in values.items()}
    return {**arrays, **lora_arrays(args.lora_path, args.lora_task_id)}


def encoded(text: str | list[str] | None) -> bytes | list[bytes] | None:
    return [word.encode() for word in text] if isinstance(text, list) else text and text.encode()


def run(args: argparse.Namespace, inputs: Arrays) -> dict[tuple[int, int], str]:
    """Return the texts by row and sequence."""
    texts: dict[tuple[int, int], str] = {}
    for result in Responses(args.url, args.model_name, tensors(inputs), request_id=args.request_id):
        row_index, sequence = (result.as_numpy(name) for name in ("batch_index", "sequence_index"))
        batch = 0 if row_index is None else row_index.item()
        first = 0 if sequence is None else sequence.item()
        for beam, new in enumerate(result.as_numpy("text_output")):
            before = "" if args.overwrite_output_text else texts.get((batch, first + beam), "")
            texts[batch, first + beam] = before + new.decode()
        for output in result.get_response().outputs if args.verbose or not args.streaming else ():
            if args.verbose or output.name not in ("text_output", "batch_index", "sequence_index"):
                array = result.as_numpy(output.name)
                print(f"{output.name} {list(array.shape)}: {array}", flush=True)
    return texts


def main() -> None:
    args = arguments()
    try:
        prompts = json.loads(args.prompt)
    except json.JSONDecodeError:
        prompts = None
    requests = [request_inputs(args, p) for p in (prompts if isinstance(prompts, list) else [args.prompt])]
    if args.batch_inputs:
        stacked = {
            name: None if array is None else np.concatenate([given[name] for given in requests])
            for name, array in requests[0].items()
        }
        requests = [stacked]
    try:
        for inputs in requests:
            for (batch, sequence), text in sorted(run(args, inputs).items()):
                print(f"[{batch}, {sequence}] {text}")
    except InferenceServerException as error:
        raise SystemExit(f"Received an error from server: {error}") from None


if __name__ == "__main__":
    main()
