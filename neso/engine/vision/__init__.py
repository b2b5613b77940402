"""Images in prompts: converts files to pixels, and pixels to embeddings for the language model."""
