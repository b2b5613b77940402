"""All files of the layout."""

from __future__ import annotations

from pathlib import Path

from neso.layouts.trtllm import configs
from neso.layouts.trtllm.options import TrtllmOptions

MODELS = Path(__file__).parent / "models"
"""The Python models, as they are copied."""


def trtllm_files(options: TrtllmOptions) -> dict[str, str]:
    """Paths in the repository and what is in them."""
    files = {
        f"{configs.PREPROCESSING}/config.pbtxt": configs.preprocessing(options),
        f"{configs.GENERATION}/config.pbtxt": configs.generation(options),
        f"{configs.POSTPROCESSING}/config.pbtxt": configs.postprocessing(options),
        f"{configs.ENSEMBLE}/config.pbtxt": configs.ensemble(options),
        f"{configs.BLS}/config.pbtxt": configs.bls(options),
    }
    if options.draft_model:
        files[f"{configs.DRAFT}/config.pbtxt"] = configs.generation(options, draft=True)
    for name in (configs.PREPROCESSING, configs.POSTPROCESSING, configs.BLS):
        files |= {f"{name}/1/{path.name}": path.read_text() for path in sorted((MODELS / name).glob("*.py"))}
    # A version is a folder, and version control keeps no empty ones.
    for name in (configs.GENERATION, configs.ENSEMBLE, *([configs.DRAFT] if options.draft_model else [])):
        files[f"{name}/1/README"] = "The version folder of a model whose files are elsewhere.\n"
    return files
