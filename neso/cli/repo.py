"""`neso repo`: write model repositories."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import typer

from neso.layouts.trtllm_options import PANEL, TrtllmOptions

repo = typer.Typer(help="Write model repositories.", no_args_is_help=True)


class Layout(str, Enum):
    neso = "neso"
    trtllm = "trtllm"
    vllm = "vllm"


def _trtllm_parameters() -> list[inspect.Parameter]:
    """Return the command's parameters for the options of layout trtllm."""
    hints = get_type_hints(TrtllmOptions, include_extras=True)
    parameters = []
    for option in fields(TrtllmOptions):
        if len(get_args(hints[option.name])) < 2 or not hasattr(hints[option.name], "__metadata__"):
            continue  # no flag
        kind, flag = get_args(hints[option.name])
        required = option.name == "tokenizer"
        annotation = Annotated[kind | None, flag] if required else hints[option.name]
        parameters.append(
            inspect.Parameter(
                option.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=None if required else option.default,
                annotation=annotation,
            )
        )
    return parameters


def _with_trtllm_options(command: Callable[..., None]) -> Callable[..., None]:
    """Replace the parameter `**trtllm` of a command by the options of layout trtllm."""
    signature = inspect.signature(command, eval_str=True)
    *own, _ = signature.parameters.values()
    parameters = [*own, *_trtllm_parameters()]
    command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


@repo.command()
@_with_trtllm_options
def init(
    context: typer.Context,
    directory: Annotated[Path, typer.Argument(help="Directory of the repository, created if missing.")],
    *,
    model: Annotated[
        str,
        typer.Option(help="Checkpoint directory, GGUF file, or Hugging Face id.", show_default=False),
    ],
    layout: Annotated[
        Layout,
        typer.Option(help="neso, vllm: one model; trtllm: TensorRT-LLM's five models around tensorrt_llm."),
    ] = Layout.trtllm,
    name: Annotated[
        str | None,
        typer.Option(help="Name of the model in layouts neso and vllm. Default: the last part of MODEL."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace existing files.")] = False,
    parameter: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE",
            help="Further parameter of tensorrt_llm. May be given several times.",
            rich_help_panel=PANEL,
        ),
    ] = None,
    **trtllm: Any,
) -> None:
    """Write a model repository for `neso serve --model-repository=DIRECTORY`. Its files may be edited."""
    from neso.layouts.repository_files import FilesExist, neso_files, vllm_files, write_files
    from neso.layouts.trtllm import trtllm_files

    _reject_other_layouts(context, layout)
    try:
        model = _absolute(model)
        if layout is Layout.trtllm:
            for path in ("tokenizer", "draft_model"):
                trtllm[path] = trtllm[path] and _absolute(trtllm[path])
            trtllm["tokenizer"] = trtllm["tokenizer"] or model
            pairs = dict(map(_pair, parameter or ()))
            files = trtllm_files(TrtllmOptions(model=model, parameters=pairs, **trtllm))
        else:
            make = neso_files if layout is Layout.neso else vllm_files
            files = make(_model_name(name or Path(model).name), model)
        write_files(directory, files, overwrite=force)
    except (FilesExist, ValueError, OSError) as error:
        typer.echo(f"neso repo init: {error}", err=True)
        raise typer.Exit(1) from None
    models = sorted({path.split("/")[0] for path in files})
    typer.echo(f"{directory}: {', '.join(models)}\nneso serve --model-repository={directory}")


def _reject_other_layouts(context: typer.Context, layout: Layout) -> None:
    """Raise `typer.BadParameter` for an option of another layout."""
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if source is None or source.name != "COMMANDLINE":
            continue
        if layout is Layout.trtllm and parameter.name == "name":
            raise typer.BadParameter("is for the layouts neso and vllm", context, param_hint="--name")
        if layout is not Layout.trtllm and getattr(parameter, "rich_help_panel", None) == PANEL:
            raise typer.BadParameter("is for the layout trtllm", context, param_hint=parameter.opts[0])


def _model_name(name: str) -> str:
    """Return a valid name of a model folder. Raises `ValueError`."""
    if name in ("", ".", "..") or Path(name).name != name:
        raise ValueError(f"'{name}' cannot be the name of a model, set another with --name")
    return name


def _absolute(model: str) -> str:
    """Return the absolute path of an existing file or directory; other names, such as hub names, are unchanged."""
    path = Path(model).expanduser()
    return str(path.resolve()) if path.exists() else model


def _pair(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not (key and equals):
        raise ValueError(f"--parameter must be KEY=VALUE, got '{text}'")
    return key, value
