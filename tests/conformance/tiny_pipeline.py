"""A Stable Diffusion pipeline with random weights, for images of 32 x 32 pixels."""

from __future__ import annotations

from pathlib import Path


def make_stable_diffusion(directory: Path) -> Path:
    """Write the checkpoint of a pipeline: tokenizer, text encoder, UNet, VAE and scheduler."""
    import torch
    from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

    torch.manual_seed(0)
    characters = [chr(code) for code in range(33, 127)]
    tokens = [
        *characters,
        *(f"{character}</w>" for character in characters),
        "<|startoftext|>",
        "<|endoftext|>",
    ]
    tokenizer = CLIPTokenizer(
        vocab={token: number for number, token in enumerate(tokens)}, merges=[], model_max_length=16
    )
    text = CLIPTextConfig(
        vocab_size=len(tokens),
        hidden_size=32,
        intermediate_size=37,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=16,
        bos_token_id=len(tokens) - 2,
        eos_token_id=len(tokens) - 1,
    )
    pipeline = StableDiffusionPipeline(
        tokenizer=tokenizer,
        text_encoder=CLIPTextModel(text),
        unet=UNet2DConditionModel(
            sample_size=16,
            block_out_channels=(8, 16),
            norm_num_groups=8,
            layers_per_block=1,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
            cross_attention_dim=32,
        ),
        vae=AutoencoderKL(
            block_out_channels=(8, 16),
            norm_num_groups=8,
            down_block_types=("DownEncoderBlock2D", "DownEncoderBlock2D"),
            up_block_types=("UpDecoderBlock2D", "UpDecoderBlock2D"),
        ),
        scheduler=DDIMScheduler(clip_sample=False, steps_offset=1),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    pipeline.save_pretrained(directory)
    return directory
