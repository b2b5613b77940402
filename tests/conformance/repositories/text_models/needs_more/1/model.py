class TritonPythonModel:
    """Never executed."""

    def execute(self, requests):
        raise NotImplementedError
