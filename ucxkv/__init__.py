"""ucxkv: an asyncio service on UCX that stores the attention KV cache of LLM inference."""
