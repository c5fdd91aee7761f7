"""Proving a running server from outside: any OpenAI-compatible one, over HTTP alone. Imports nothing of ours."""
