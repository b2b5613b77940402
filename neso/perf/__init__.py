"""Load generator and reports for language-model servers. It is a client and imports nothing of the server."""
