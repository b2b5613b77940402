"""`neso repo`: writes model repositories."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from neso.layouts.trtllm import SchedulerPolicy

repo = typer.Typer(help="Write model repositories.", no_args_is_help=True)

TRTLLM = "Layout trtllm"


class Layout(str, Enum):
    neso = "neso"
    trtllm = "trtllm"
    vllm = "vllm"


@repo.command()
def init(
    context: typer.Context,
    directory: Annotated[Path, typer.Argument(help="The repository; it is made if it is not there.")],
    model: Annotated[
        str,
        typer.Option(help="A checkpoint directory, a GGUF file, or a Hugging Face id.", show_default=False),
    ],
    layout: Annotated[
        Layout,
        typer.Option(help="neso, vllm: one model; trtllm: TensorRT-LLM's five models around tensorrt_llm."),
    ] = Layout.trtllm,
    name: Annotated[
        str | None,
        typer.Option(help="Of the model, in layouts neso and vllm; by default as MODEL is called."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace files that are there.")] = False,
    tokenizer: Annotated[
        str | None,
        typer.Option(help="Directory of the tokenizer; MODEL's by default.", rich_help_panel=TRTLLM),
    ] = None,
    decoupled: Annotated[
        bool,
        typer.Option(help="Any number of responses to a request: for streaming.", rich_help_panel=TRTLLM),
    ] = True,
    max_batch_size: Annotated[
        int, typer.Option(min=0, help="Rows of a request; 0: no batch dimension.", rich_help_panel=TRTLLM)
    ] = 64,
    instances: Annotated[
        int, typer.Option(min=1, help="Of preprocessing and postprocessing each.", rich_help_panel=TRTLLM)
    ] = 1,
    batch_scheduler_policy: Annotated[
        SchedulerPolicy, typer.Option(help="When requests begin.", rich_help_panel=TRTLLM)
    ] = SchedulerPolicy.max_utilization,
    max_beam_width: Annotated[
        int, typer.Option(min=1, help="The widest beam search.", rich_help_panel=TRTLLM)
    ] = 1,
    kv_cache_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="max_tokens_in_paged_kv_cache: size of the cache.", rich_help_panel=TRTLLM),
    ] = None,
    kv_cache_free_gpu_mem_fraction: Annotated[
        float | None,
        typer.Option(min=0, max=1, help="Share of the free memory for the cache.", rich_help_panel=TRTLLM),
    ] = None,
    enable_chunked_context: Annotated[
        bool, typer.Option(help="Long prompts in pieces, beside others.", rich_help_panel=TRTLLM)
    ] = True,
    exclude_input_in_output: Annotated[
        bool,
        typer.Option(
            "--exclude-input-in-output", help="Answer without the prompt by default.", rich_help_panel=TRTLLM
        ),
    ] = False,
    accumulate_tokens: Annotated[
        bool,
        typer.Option(
            "--accumulate-tokens",
            help="tensorrt_llm_bls streams all of the text each time, not what is new.",
            rich_help_panel=TRTLLM,
        ),
    ] = False,
    draft_model: Annotated[
        str | None,
        typer.Option(help="A small checkpoint that guesses: tensorrt_llm_draft.", rich_help_panel=TRTLLM),
    ] = None,
    parameter: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE",
            help="Another parameter of tensorrt_llm. May be given several times.",
            rich_help_panel=TRTLLM,
        ),
    ] = None,
) -> None:
    """Write a repository that `neso serve --model-repository=DIRECTORY` serves. Its files are there to be edited."""
    from neso.layouts.repository_files import FilesExist, neso_files, vllm_files, write_files
    from neso.layouts.trtllm import TrtllmOptions, trtllm_files

    _refuse_other_layouts(context, layout)
    try:
        if layout is Layout.trtllm:
            options = TrtllmOptions(
                model=_located(model),
                tokenizer=_located(tokenizer or model),
                draft_model=None if draft_model is None else _located(draft_model),
                decoupled=decoupled,
                max_batch_size=max_batch_size,
                instances=instances,
                batch_scheduler_policy=batch_scheduler_policy,
                max_beam_width=max_beam_width,
                kv_cache_tokens=kv_cache_tokens,
                kv_cache_free_gpu_mem_fraction=kv_cache_free_gpu_mem_fraction,
                enable_chunked_context=enable_chunked_context,
                exclude_input_in_output=exclude_input_in_output,
                accumulate_tokens=accumulate_tokens,
                parameters=dict(map(_pair, parameter or ())),
            )
            files = trtllm_files(options)
        else:
            make = neso_files if layout is Layout.neso else vllm_files
            located = _located(model)
            files = make(_model_name(name or Path(located).name), located)
        write_files(directory, files, overwrite=force)
    except (FilesExist, ValueError, OSError) as error:
        typer.echo(f"neso repo init: {error}", err=True)
        raise typer.Exit(1) from None
    models = sorted({path.split("/")[0] for path in files})
    typer.echo(f"{directory}: {', '.join(models)}\nneso serve --model-repository={directory}")


def _refuse_other_layouts(context: typer.Context, layout: Layout) -> None:
    """Raises `typer.BadParameter` for an option that means nothing to this layout."""
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if source is None or source.name != "COMMANDLINE":
            continue
        if layout is Layout.trtllm and parameter.name == "name":
            raise typer.BadParameter("is for the layouts neso and vllm", context, param_hint="--name")
        if layout is not Layout.trtllm and getattr(parameter, "rich_help_panel", None) == TRTLLM:
            raise typer.BadParameter("is for the layout trtllm", context, param_hint=parameter.opts[0])


def _model_name(name: str) -> str:
    """A model's name is that of its folder."""
    if name in ("", ".", "..") or Path(name).name != name:
        raise ValueError(f"'{name}' cannot be the name of a model, say another by --name")
    return name


def _located(model: str) -> str:
    """A path as it is seen from everywhere; names on the hub and of shipped models stay."""
    path = Path(model).expanduser()
    return str(path.resolve()) if path.exists() else model


def _pair(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not (key and equals):
        raise ValueError(f"--parameter must be KEY=VALUE, got '{text}'")
    return key, value
