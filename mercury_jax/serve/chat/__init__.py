"""Between the API and the engine: messages become ids, snapshots become text, thinking and tool calls."""
