"""The five models of TensorRT-LLM's layout: text in, tokens, text out, and the two that chain them."""
