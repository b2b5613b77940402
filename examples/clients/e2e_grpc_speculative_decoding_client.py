"""Speculative decoding driven by the client: a draft model proposes tokens, tensorrt_llm verifies them.

The two models may be on different servers; preprocessing runs on the draft server, postprocessing on the target server.

usage: python e2e_grpc_speculative_decoding_client.py --url-target HOST:PORT -p "What is TTFT?" -o 20
"""

from __future__ import annotations

import argparse

import numpy as np
from grpc_requests import Arrays, Responses, row, tensors
from tritonclient.utils import InferenceServerException


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--url-target", required=True, help="gRPC address of the target model")
    parser.add_argument("--url-draft", help="gRPC address of the draft model; default: the target's")
    parser.add_argument("--preprocessor-model-name", default="preprocessing")
    parser.add_argument("--postprocessor-model-name", default="postprocessing")
    parser.add_argument("--draft-tensorrt-llm-model-name", default="tensorrt_llm_draft")
    parser.add_argument("--target-tensorrt-llm-model-name", default="tensorrt_llm")
    parser.add_argument("-p", "--prompt", required=True)
    parser.add_argument("-o", "--output-len", type=int, default=100)
    parser.add_argument("--num-draft-tokens", type=int, default=5)
    parser.add_argument("--stop-words", nargs="+", default=[])
    parser.add_argument("--bad-words", nargs="+", default=[])
    for name in ("end-id", "pad-id"):
        parser.add_argument(f"--{name}", type=int)
    for name in ("temperature", "repetition-penalty", "presence-penalty", "frequency-penalty"):
        parser.add_argument(f"--{name}", type=float)
    parser.add_argument("--request-id", default="1")
    parser.add_argument(
        "--return-draft-model-draft-logits",
        action="store_true",
        help="accept draft tokens by probability instead of equality",
    )
    parser.add_argument("-v", "--verbose", action="store_true")
    return parser.parse_args()


class Client:
    """Calls the four models."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.url_draft = args.url_draft or args.url_target

    def ask(self, url: str, model: str, inputs: Arrays) -> dict[str, np.ndarray]:
        """Return the outputs of a single response."""
        (result,) = Responses(url, model, tensors(inputs), request_id=self.args.request_id)
        outputs = {output.name: result.as_numpy(output.name) for output in result.get_response().outputs}
        if self.args.verbose:
            print(
                f"{model}: { ({name: array.tolist() for name, array in outputs.items() if array.size < 100}) }"
            )
        return outputs

    def preprocess(self) -> Arrays:
        """Return the inputs of both models other than the tokens."""
        args = self.args
        given = {
            "QUERY": row(args.prompt.encode(), object),
            "REQUEST_OUTPUT_LEN": row(args.output_len, np.int32),
            "BAD_WORDS_DICT": words(args.bad_words),
            "STOP_WORDS_DICT": words(args.stop_words),
            "END_ID": None if args.end_id is None else row(args.end_id, np.int32),
            "PAD_ID": None if args.pad_id is None else row(args.pad_id, np.int32),
        }
        return self.ask(self.url_draft, args.preprocessor_model_name, given)

    def tokens(
        self, url: str, model: str, known: list[int], number: int, more: Arrays
    ) -> tuple[list[int], np.ndarray]:
        """Return the next tokens of a model, and its logits if requested."""
        args = self.args
        values = {
            name: None if value is None else row(value, np.float32)
            for name, value in (
                ("temperature", args.temperature),
                ("repetition_penalty", args.repetition_penalty),
                ("presence_penalty", args.presence_penalty),
                ("frequency_penalty", args.frequency_penalty),
            )
        }
        counts = {"input_lengths": len(known), "request_output_len": number}
        inputs = {"input_ids": row(known, np.int32), **{name: row(n, np.int32) for name, n in counts.items()}}
        outputs = self.ask(url, model, inputs | values | more)
        ids = outputs["output_ids"][0, 0, : outputs["sequence_length"].item()].tolist()
        return ids[len(known) :] if ids[: len(known)] == known else ids, outputs.get("generation_logits")

    def run(self) -> str:
        """Generate and return the whole text."""
        args, prepared = self.args, self.preprocess()
        prompt = prepared["INPUT_ID"][0].tolist()
        stop_words = words_of(prepared["STOP_WORDS_IDS"][0])
        shared: Arrays = {
            "bad_words_list": prepared["BAD_WORDS_IDS"],
            "stop_words_list": prepared["STOP_WORDS_IDS"],
            "end_id": prepared["OUT_END_ID"],
            "pad_id": prepared["OUT_PAD_ID"],
        }
        use_logits = args.return_draft_model_draft_logits
        asks_logits: Arrays = {"return_generation_logits": row(True, bool)} if use_logits else {}
        known, rounds = list(prompt), 0
        while (left := len(prompt) + args.output_len - len(known)) > 0:
            draft, number = [], min(args.num_draft_tokens, left - 1)
            more: Arrays = {}
            if number > 0:
                model = args.draft_tensorrt_llm_model_name
                draft, logits = self.tokens(self.url_draft, model, known, number, shared | asks_logits)
                more["draft_input_ids"] = row(draft, np.int32) if draft else None
                more["draft_logits"] = logits[:, 0, : len(draft)] if use_logits and draft else None
            model = args.target_tensorrt_llm_model_name
            new, _ = self.tokens(args.url_target, model, known, len(draft) + 1, shared | more)
            known, rounds = known + new, rounds + 1
            if not new or any(known[-len(word) :] == word for word in stop_words):
                break
        print(f"{len(known) - len(prompt)} tokens in {rounds} rounds")
        given: Arrays = {
            "TOKENS_BATCH": row(known, np.int32)[None],
            "SEQUENCE_LENGTH": row(len(known), np.int32),
        }
        return self.ask(args.url_target, args.postprocessor_model_name, given)["OUTPUT"].flat[0].decode()


def words(given: list[str]) -> np.ndarray | None:
    return row([word.encode() for word in given], object) if given else None


def words_of(array: np.ndarray) -> list[list[int]]:
    """Encode words as int32[2, length]: concatenated tokens, and end offsets padded with -1."""
    ends = [end for end in array[1].tolist() if end >= 0]
    return [array[0, start:end].tolist() for start, end in zip([0, *ends], ends, strict=False)]


def main() -> None:
    try:
        print(Client(arguments()).run())
    except InferenceServerException as error:
        raise SystemExit(f"Received an error from server: {error}") from None


if __name__ == "__main__":
    main()
