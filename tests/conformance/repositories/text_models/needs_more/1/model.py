class TritonPythonModel:
    """Never asked."""

    def execute(self, requests):
        raise NotImplementedError
