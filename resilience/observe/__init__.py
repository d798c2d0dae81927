"""What a person sees: the report of a cycle, as a block of text and as JSON."""
