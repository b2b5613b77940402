"""Front ends: wire formats of clients. They parse requests, call the server and write responses."""
