"""The models of the server as this API knows them: names, texts, adapters, loading and unloading."""
