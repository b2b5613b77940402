class TritonPythonModel:
    """Never executed: other models use its tokenizer."""

    def execute(self, requests):
        raise NotImplementedError
