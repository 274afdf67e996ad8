"""Between the API and the engine: messages become prompts, and snapshots become content, reasoning and tool calls."""
