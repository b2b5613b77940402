"""Several server processes on the same ports: `neso serve --server-processes N`.

The main process owns the core; front-end processes have their own connections, wire formats and tokenizers. Each is
connected to the main process by a socket pair:

front-end process                                     main process
KServe, OpenAI ─▶ FrontEndCore ─▶ ForwardedModel ─▶ Channel ─▶ FrontEnd ─▶ Core, Model.submit
"""
