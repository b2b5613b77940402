"""Model repositories: local directories and buckets."""
