"""The groups of OpenAI's API that can be restricted, by the names of Triton's front end for it."""

GROUPS = ("inference", "model-repository", "metrics", "health")
