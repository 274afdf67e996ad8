"""The Responses API of OpenAI and the Messages API of Anthropic: other forms of a chat request and of its answer."""
