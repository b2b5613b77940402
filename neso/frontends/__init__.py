"""Frontends: the client protocols. They parse requests, call the server and write responses."""
