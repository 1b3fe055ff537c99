"""The health of GPUs: XIDs, verdicts, and what people are told."""
