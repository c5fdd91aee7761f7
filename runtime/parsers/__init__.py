"""What did the model say: reasoning, content, tool calls? Incremental parsers of its output, one per family."""
