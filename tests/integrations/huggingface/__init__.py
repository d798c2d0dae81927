"""The adapter to Hugging Face."""
